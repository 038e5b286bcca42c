"""The programs that the tests of the middle rungs share: from one op to a transformer layer."""

from __future__ import annotations

from programs import Prog

from rung.core.op import Func, Value
from rung.core.types import BF16, F32, I64, DType
from rung.tensor.ir import shape_of


def relu_mm(m: int | str = 6, k: int = 5, n: int = 7) -> Func:
    p = Prog("relu_mm")
    x, b, w = p.param("x", m, k), p.param("bias", k), p.param("w", k, n)
    return p.done(p.map("relu", p.einsum("ik,kj->ij", p.map("add", x, b), w)))


def softmax(m: int | str = 5, n: int | str = 8) -> Func:
    p = Prog("softmax")
    return p.done(p.softmax(p.param("x", m, n)))


def colsum(m: int | str = 5, n: int = 8) -> Func:
    p = Prog("colsum")
    return p.done(p.reduce("add", p.param("x", m, n), 0))


def floor_add(n: int | str = 9) -> Func:
    p = Prog("floor_one")
    return p.done(p.map("add", p.map("floor", p.param("x", n)), 1.0))


def rms_norm(m: int | str = 5, n: int = 8) -> Func:
    p = Prog("rms_norm")
    return p.done(p.rms_norm(p.param("x", m, n), p.param("w", n)))


def layer_norm(m: int | str = 5, n: int = 8) -> Func:
    p = Prog("layer_norm")
    x, w, b = p.param("x", m, n), p.param("w", n), p.param("b", n)
    mean = p.map("mul", p.reduce("add", x, -1, keep=True), 1 / n)
    c = p.map("sub", x, mean)
    var = p.map("mul", p.reduce("add", p.map("mul", c, c), -1, keep=True), 1 / n)
    y = p.map("mul", p.map("mul", c, p.map("rsqrt", p.map("add", var, 1e-5))), w)
    return p.done(p.map("add", y, b))


def norm_linear(m: int = 1, k: int = 8, n: int = 16) -> Func:
    p = Prog("norm_linear")
    x, w, a = p.param("x", m, k), p.param("w", k), p.param("a", n, k)
    return p.done(p.einsum("ik,jk->ij", p.rms_norm(x, w), a))


def exp_mm(m: int, k: int, n: int) -> Func:
    p = Prog("exp_mm")
    return p.done(p.einsum("ik,kj->ij", p.map("exp", p.param("x", m, k)), p.param("w", k, n)))


def swiglu(m: int = 3, k: int = 8, n: int = 16) -> Func:
    p = Prog("swiglu")
    x, a, b = p.param("x", m, k), p.param("a", n, k), p.param("b", n, k)
    gate = p.map("silu", p.einsum("ik,jk->ij", x, a))
    return p.done(p.map("mul", gate, p.einsum("ik,jk->ij", x, b)))


def mlp(m: int = 6, k: int = 8, n: int = 12) -> Func:
    p = Prog("mlp")
    x, a, bias, b = p.param("x", m, k), p.param("a", n, k), p.param("bias", n), p.param("b", k, n)
    h = p.map("relu", p.map("add", p.einsum("ik,jk->ij", x, a), bias))
    return p.done(p.map("add", p.einsum("ik,jk->ij", h, b), x))


def masked(p: Prog, scores: Value, pos: Value, t: int | str) -> Value:
    """Scores [1,h,m,t], -inf where the key lies behind the query's position."""
    shape = shape_of(scores)
    late = p.map("le", p.expand(p.iota(t), (shape[2], shape[3])),
                 p.index(pos, (shape[2], shape[3]), lambda i, j: [i]))
    low = p.index(p.full(float("-inf"), 1), shape, lambda *_: [0])
    return p.map("where", p.expand(late, shape), scores, low)


def attend(h: int = 4, t: int | str = 16, d: int = 8, m: int = 1) -> Func:
    """Attention of m tokens against a cache of t."""
    p = Prog("attend")
    q, pos = p.param("q", 1, h, m, d), p.param("pos", m, dtype=I64)
    k, v = p.param("k", 1, h, t, d), p.param("v", 1, h, t, d)
    s = p.map("mul", p.einsum("bhid,bhtd->bhit", q, k), 0.35)
    return p.done(p.einsum("bhit,bhtd->bhid", p.softmax(masked(p, s, pos, t)), v))


def rope(p: Prog, x: Value, cos: Value, sin: Value) -> Value:
    last = len(shape_of(x)) - 1
    d = shape_of(x)[last].const_value or 0
    low, high = p.slice(x, last, 0, d // 2), p.slice(x, last, d // 2, d)
    turned = p.concat(last, p.map("neg", high), low)
    return p.map("add", p.map("mul", x, cos), p.map("mul", turned, sin))


def rotate(h: int = 4, t: int = 16, d: int = 8) -> Func:
    """RoPE of one token, written into a cache."""
    p = Prog("rotate")
    x, cache = p.param("x", 1, h, 1, d), p.param("cache", 1, h, t, d, role="mutated")
    pos, cos, sin = p.param("pos", 1, dtype=I64), p.param("cos", t, d), p.param("sin", t, d)
    y = rope(p, x, p.gather(cos, 0, pos), p.gather(sin, 0, pos))
    p.write(cache, p.scatter(cache, 2, pos, y))
    return p.done()


def linear(p: Prog, x: Value, w: Value) -> Value:
    """x @ w.T; in bf16 with eager's rounding."""
    narrow = x.type.dtype is BF16  # type: ignore[union-attr]
    if not narrow:
        return p.einsum("ik,jk->ij", x, w)
    return p.cast(p.einsum("ik,jk->ij", p.cast(x, F32), p.cast(w, F32)), BF16, implicit=True)


def linear_bf16(m: int = 3, k: int = 8, n: int = 5) -> Func:
    p = Prog("linear_bf16")
    x, w, b = (p.param(n_, *s, dtype=BF16) for n_, s in (("x", (m, k)), ("w", (n, k)), ("b", (n,))))
    y = p.cast(p.map("add", p.cast(linear(p, x, w), F32), p.cast(b, F32)), BF16, implicit=True)
    return p.done(p.cast(p.map("relu", p.cast(y, F32)), BF16, implicit=True))


def transformer(layers: int = 1, m: int = 1, heads: int = 4, kv: int = 2, d: int = 8,
                t: int = 16, f: int = 48, dtype: DType = F32) -> Func:
    """A Llama-like decoder on m tokens with a KV cache, updated in place."""
    e = heads * d
    p = Prog("transformer")
    x, pos = p.param("x", m, e), p.param("pos", m, dtype=I64)
    table = p.param("cos", t, d), p.param("sin", t, d)
    writes: list[tuple[Value, Value]] = []
    for n in range(layers):
        x = _attention(p, x, pos, table, (heads, kv, d, t), n, writes)
        norm = p.param(f"n2_{n}", e)
        w1, w3, w2 = (p.param(f"w{k}_{n}", *s) for k, s in ((1, (f, e)), (3, (f, e)), (2, (e, f))))
        h = p.rms_norm(x, norm)
        gate = p.map("silu", linear(p, h, w1))
        x = p.map("add", x, linear(p, p.map("mul", gate, linear(p, h, w3)), w2))
    for cache, new in writes:
        p.write(cache, new)
    return p.done(x)


def _attention(p: Prog, x: Value, pos: Value, table: tuple[Value, Value],
               sizes: tuple[int, int, int, int], n: int,
               writes: list[tuple[Value, Value]]) -> Value:
    heads, kv, d, t = sizes
    m, e = (int(s.const_value or 0) for s in shape_of(x))
    norm = p.param(f"n1_{n}", e)
    wq, wk, wv, wo = (p.param(f"w{k}_{n}", rows, e) for k, rows in
                      (("q", e), ("k", kv * d), ("v", kv * d), ("o", e)))
    caches = [p.param(f"{k}c_{n}", 1, kv, t, d, role="mutated") for k in "kv"]
    h = p.rms_norm(x, norm)
    q, k, v = (p.permute(p.view(linear(p, h, w), 1, m, c, d), 0, 2, 1, 3)
               for w, c in ((wq, heads), (wk, kv), (wv, kv)))
    cos, sin = (p.gather(c, 0, pos) for c in table)
    q, k = rope(p, q, cos, sin), rope(p, k, cos, sin)
    new = [p.scatter(c, 2, pos, y) for c, y in zip(caches, (k, v), strict=True)]
    writes += zip(caches, new, strict=True)
    wide = [p.index(c, (1, heads, t, d), lambda a, b, i, j: [a, b // (heads // kv), i, j])
            for c in new]
    s = masked(p, p.map("mul", p.einsum("bhid,bhtd->bhit", q, wide[0]), 0.35), pos, t)
    o = p.einsum("bhit,bhtd->bhid", p.softmax(s), wide[1])
    return p.map("add", x, linear(p, p.view(p.permute(o, 0, 2, 1, 3), m, e), wo))


def momentum() -> Func:
    """Two updates of parameters: one pointwise, one that reads whole rows."""
    p = Prog("momentum")
    x, g = p.param("x", 4, 6, role="mutated"), p.param("g", 4, 6)
    s = p.param("s", 4, 6, role="mutated")
    n = p.map("add", p.map("mul", x, 0.9), g)
    p.write(x, n)
    p.write(s, p.softmax(s))
    return p.done(p.view(n, 24))



