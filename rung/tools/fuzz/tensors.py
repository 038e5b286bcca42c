"""Random programs of Tensor IR, and all middle passes on them under random prices.

`Prog` is a builder with broadcasting: `p.map("add", x, bias)` puts in the `index` that eager's
broadcasting means. `wrong(seed)` names the first pass that changes what the program of a seed
computes: under random prices every fusion that is legal is done sooner or later.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rung import pipeline
from rung.core.expr import Expr, sym
from rung.core.op import Builder, Func, Names, Value
from rung.core.ops import Cast, Const, Map
from rung.core.types import F32, I64, DType, TensorType, dtype_of
from rung.loop.canonical import canonical
from rung.loop.fuse import fuse
from rung.loop.normalize import merge_axes
from rung.loop.siblings import join_siblings
from rung.loop.simplify import simplify as simplify_kernel
from rung.program.ir import Module, Return, Write
from rung.program.reinplace import reinplace
from rung.program.views import views
from rung.tensor.ir import (
    Concat,
    Contract,
    Full,
    Gather,
    Index,
    Iota,
    Reduce,
    Scan,
    Scatter,
    axis_names,
    shape_of,
    symbols,
)
from rung.tensor.simplify import simplify
from rung.tensor.to_loop import to_loop
from rung.tools import check, judge


def size(x: int | str) -> Expr:
    return Expr.of(x)


class Prog:
    """One program under construction."""

    def __init__(self, name: str = "main"):
        self.name = name
        self.b = Builder(Names())
        self.params: list[Value] = []

    def param(self, name: str, *shape: int | str, dtype: DType = F32, role: str = "input") -> Value:
        value = Value(self.b.names(name), TensorType(dtype, tuple(map(size, shape))), role)
        self.params.append(value)
        return value

    def const(self, x: float | int | bool, dtype: DType = F32) -> Value:
        return self.b.one(Const(x, dtype))

    def map(self, fn: str, *args: Value | float) -> Value:
        dtype = next(dtype_of(a.type) for a in args if isinstance(a, Value))
        shape: tuple[Expr, ...] = ()
        for a in args:
            if isinstance(a, Value):
                shape = _wider(shape, shape_of(a))
        whole = [self.expand(a, shape) if isinstance(a, Value) else self.const(a, dtype)
                 for a in args]
        return self.b.one(Map(fn, tuple(whole)), fn)

    def expand(self, x: Value, shape: Sequence[Expr]) -> Value:
        if not isinstance(x.type, TensorType) or shape_of(x) == tuple(shape):
            return x
        axes = axis_names(len(shape))
        lead = len(shape) - len(shape_of(x))
        subs = [Expr.of(0) if n.is_const(1) else sym(a)
                for n, a in zip(shape_of(x), axes[lead:], strict=True)]
        return self.index(x, shape, lambda *_: subs)

    def index(self, x: Value, shape: Sequence[Expr | int | str],
              at: Callable[..., Sequence[Expr | int]],
              mask: Callable[..., Sequence[Expr]] = lambda *_: (), fill: float = 0) -> Value:
        axes = axis_names(len(shape))
        syms = symbols(axes)
        return self.b.one(Index(x, axes, tuple(map(Expr.of, shape)),
                                tuple(map(Expr.of, at(*syms))), tuple(mask(*syms)), fill), "t")

    def permute(self, x: Value, *dims: int) -> Value:
        shape = [shape_of(x)[d] for d in dims]
        return self.index(x, shape, lambda *s: [s[dims.index(n)] for n in range(len(dims))])

    def view(self, x: Value, *shape: int | str) -> Value:
        """A reshape, as the front end writes it: flat index divided out again."""
        def at(*s: Expr) -> list[Expr]:
            flat = Expr.of(0)
            for axis, n in zip(s, shape, strict=True):
                flat = flat * Expr.of(n) + axis
            subs = []
            for extent in reversed(shape_of(x)):
                subs.append(flat % extent)
                flat = flat // extent
            return subs[::-1]
        return self.index(x, list(shape), at)

    def slice(self, x: Value, dim: int, start: int, stop: int) -> Value:
        shape: list[Any] = list(shape_of(x))
        shape[dim] = stop - start
        return self.index(x, shape, lambda *s: [a + start if n == dim else a
                                                for n, a in enumerate(s)])

    def reduce(self, monoid: str, x: Value, *axes: int, keep: bool = False) -> Value:
        axes = tuple(a % len(shape_of(x)) for a in axes)
        y = self.b.one(Reduce(monoid, x, axes, dtype_of(x.type)), monoid)
        if not keep:
            return y
        shape = [Expr.of(1) if n in axes else s for n, s in enumerate(shape_of(x))]
        return self.index(y, shape, lambda *s: [a for n, a in enumerate(s) if n not in axes])

    def scan(self, monoid: str, x: Value, dim: int) -> Value:
        return self.b.one(Scan(monoid, x, dim, dtype_of(x.type)), "cum")

    def einsum(self, text: str, a: Value, b: Value) -> Value:
        left, out = text.split("->")
        x, y = left.split(",")
        return self.b.one(Contract("add", "mul", a, tuple(x), b, tuple(y), tuple(out),
                                   dtype_of(a.type)), "mm")

    def cast(self, x: Value, dtype: DType, implicit: bool = False) -> Value:
        return self.b.one(Cast(x, dtype, implicit), "c")

    def gather(self, x: Value, dim: int, at: Value) -> Value:
        return self.b.one(Gather(x, dim, at))

    def scatter(self, x: Value, dim: int, at: Value, src: Value, by: str = "") -> Value:
        return self.b.one(Scatter(x, dim, at, src, by))

    def concat(self, dim: int, *xs: Value) -> Value:
        return self.b.one(Concat(xs, dim))

    def iota(self, n: int | str) -> Value:
        return self.b.one(Iota(Expr.of(n)))

    def full(self, x: float, *shape: int, dtype: DType = F32) -> Value:
        return self.b.one(Full(x, dtype, tuple(map(size, shape))))

    def softmax(self, x: Value) -> Value:
        e = self.map("exp", self.map("sub", x, self.reduce("max", x, -1, keep=True)))
        return self.map("div", e, self.reduce("add", e, -1, keep=True))

    def rms_norm(self, x: Value, w: Value) -> Value:
        n = shape_of(x)[-1].const_value or 1
        mean = self.map("mul", self.reduce("add", self.map("mul", x, x), -1, keep=True), 1.0 / n)
        return self.map("mul", self.map("mul", x, self.map("rsqrt", self.map("add", mean, 1e-5))),
                        w)

    def write(self, dst: Value, src: Value) -> None:
        self.b.add(Write(dst, src))

    def done(self, *values: Value) -> Func:
        self.b.add(Return(values))
        return Func("program", self.name, tuple(self.params), (), self.b.block())


def _wider(a: tuple[Expr, ...], b: tuple[Expr, ...]) -> tuple[Expr, ...]:
    n = max(len(a), len(b))
    a, b = ((Expr.of(1),) * (n - len(x)) + x for x in (a, b))
    return tuple(y if x.is_const(1) else x for x, y in zip(a, b, strict=True))


def draw(rng: random.Random, steps: int = 12) -> Func:
    """A program whose values stay small or bounded, so that sums differ by rounding only."""
    p = Prog("random")
    pool = [p.param("a", 4, 6), p.param("b", 6), p.param("c", 4, 1, 6), p.param("d", 6, 4)]
    cache, at = p.param("cache", 8, 6, role="mutated"), p.param("at", 4, dtype=I64)
    state = p.param("state", 4, 6, role="mutated")
    pool += [state]
    for _ in range(steps):
        new = _step(p, rng, pool, at)
        if new is not None:
            pool.append(new)
    rows = [v for v in pool if tuple(map(str, shape_of(v))) == ("4", "6")]
    out = rng.sample(pool, 3)
    new = p.scatter(cache, 0, at, rng.choice(rows))
    out += rng.choice([[], [p.map("neg", new)], [new]])
    p.write(cache, new)
    if rng.random() < 0.7:
        p.write(state, rng.choice(rows[1:] or rows))
    return p.done(*out)


def _step(p: Prog, rng: random.Random, pool: list[Value], at: Value) -> Value | None:
    x = rng.choice(pool)
    shape = [int(n.const_value or 0) for n in shape_of(x)]
    rank = len(shape)
    match rng.randrange(12):
        case 0 | 1:
            return p.map(rng.choice(["neg", "relu", "tanh", "sigmoid"]), x)
        case 2 | 3:
            other = [v for v in pool if _fits(shape_of(v), shape_of(x))]
            y = p.map(rng.choice(["add", "mul", "max"]), x, rng.choice(other))
            return p.map("tanh", y)
        case 4 if rank:
            return p.reduce(rng.choice(["add", "max"]), x, rng.randrange(rank),
                            keep=rng.random() < 0.6)
        case 5 if rank > 1:
            return p.permute(x, *rng.sample(range(rank), rank))
        case 6:
            n = int(np.prod(shape))
            sizes = [s for s in ((n,), (2, n // 2), (n // 3, 3), (1, n)) if np.prod(s) == n]
            return p.view(x, *rng.choice(sizes))
        case 7 if rank:
            dim = rng.randrange(rank)
            parts = [x, p.map("neg", x), x][: rng.randint(2, 3)]
            return p.concat(dim, *parts)
        case 8 if rank:
            dim = rng.randrange(rank)
            if shape[dim] < 2:
                return None
            a = rng.randrange(shape[dim] - 1)
            return p.slice(x, dim, a, rng.randint(a + 1, shape[dim]))
        case 9 if rank == 2:
            other = [v for v in pool if len(shape_of(v)) == 2 and shape_of(v)[0] is shape_of(x)[1]]
            return p.map("tanh", p.einsum("ik,kj->ij", x, rng.choice(other))) if other else None
        case 10 if rank:
            dim, n = 0, shape[0]
            if n >= 8:
                return p.gather(x, dim, at)
            return p.index(x, [n + 3, *shape[1:]], lambda i, *r: [i - 1, *r],
                           lambda i, *r: [i - 1, Expr.of(n) - i], 0.5)
        case 11 if rank:
            return p.map("tanh", p.scan("add", x, rng.randrange(rank)))
    return None


def _fits(small: tuple[Expr, ...], big: tuple[Expr, ...]) -> bool:
    tail = big[len(big) - len(small):]
    return len(small) <= len(big) and all(a is b or a.is_const(1) for a, b in
                                          zip(small, tail, strict=True))


def passes(tidy: Func, rng: random.Random) -> Iterator[tuple[str, Module]]:
    """The modules after `to_loop` and each pass below it, where prices are random, or all equal."""
    prices: dict[Func, float] = {}
    even = rng.random() < 0.5  # every fusion pays

    def price(kernel: Func) -> float:
        return 1.0 if even else prices.setdefault(kernel, rng.random())

    def kernels(change: Callable[[Func], Func], module: Module) -> Module:
        return Module(module.programs, tuple(map(change, module.kernels)))

    yield "to_loop", (module := to_loop(tidy))
    yield "fuse", (module := fuse(module, price, price))
    yield "siblings", (module := join_siblings(module, price, price))
    yield "simplify", (module := kernels(lambda k: simplify_kernel(k, "eager"), module))
    yield "views", (module := views(module))
    yield "reinplace", (module := reinplace(module))
    yield "merge_axes", (module := kernels(merge_axes, module))
    yield "canonical", canonical(module)


def wrong(seed: int) -> str:
    """The first pass that changes the result for the program of a seed, by how much, and the
    program; "" if none does. RungError where a pass gives what does not verify."""
    rng = random.Random(seed)
    program = draw(rng)
    inputs = arguments(program, seed)
    want = check.results(Module((program,)), inputs)
    tidy = simplify(program)
    for name, module in (("tensor.simplify", Module((tidy,))), *passes(tidy, rng)):
        pipeline.verify_module(module, name)
        if found := judge.difference(want, check.results(module, inputs), 1e-4):
            return f"{name} changes {found}\n{program}"
    return ""


def arguments(program: Func, seed: int) -> list[Any]:
    """Random arguments; integers are below 8 and, as they may be indices of a scatter, differ."""
    found = check.draw(program, seed=seed)
    assert found is not None
    rng = np.random.default_rng(seed)
    return [rng.permutation(max(8, x.size))[:x.size].reshape(x.shape) % 8 if x.dtype == np.int64
            else x for x in found]
