"""The passes on single kernels: simplify, normalize, merge_folds, split, canonical."""

from __future__ import annotations

from collections.abc import Callable

import models
import numpy as np
import pytest
from programs import Prog, check, draw, price, results

from rung.core.op import Func
from rung.core.parse import parse_module
from rung.core.types import BF16, F32
from rung.core.verify import verify
from rung.loop import ir as loop
from rung.loop.canonical import canonical
from rung.loop.emit import Declined
from rung.loop.fuse import fuse
from rung.loop.merge_folds import can_merge, merge
from rung.loop.normalize import merge_axes, split_axes
from rung.loop.simplify import simplify
from rung.loop.split import split_fold
from rung.program.ir import Module
from rung.tensor.to_loop import to_loop


def parse(text: str) -> Func:
    (func,) = parse_module(text, {"kernel": loop.VOCABULARY})
    return func


def body(func: Func) -> list[str]:
    return [line.strip() for line in str(func).splitlines()[1:]]


def fused(program: Func) -> Module:
    return fuse(to_loop(program), price, price)


RULES = [
    ("x[i] * 1.0 - 0.0", "y[i] = x[i]"),
    ("x[i] + 0.0", "y[i] = x[i] + 0.0"),
    ("max(x[i], x[i]) + -0.0", "y[i] = x[i]"),
    ("neg(neg(x[i]))", "y[i] = x[i]"),
    ("x[i] * (2.0 + 1.0)", "y[i] = x[i] * 3.0"),
    ("where(x[i] < 0.0, where(x[i] < 0.0, 1.0, 2.0), x[i])",
     "y[i] = where(x[i] < 0.0, 1.0, x[i])"),
    ("where(x[i] < 0.0, x[i], x[i])", "y[i] = x[i]"),
    ("f32(round_bf16(x[i] * 2.0))", "y[i] = x[i] * 2.0"),
    ("f32(bf16(x[i] * 2.0))", "y[i] = f32(bf16(x[i] * 2.0))"),
    ("f32(bf16(round_bf16(x[i] * 2.0)))", "y[i] = f32(bf16(x[i] * 2.0))"),
    ("tan(f32(round_bf16(x[i] * 2.0)))", "y[i] = tan(f32(round_bf16(x[i] * 2.0)))"),
]


@pytest.mark.parametrize("before, after", RULES)
def test_rules(before: str, after: str) -> None:
    func = parse(f"kernel f(x: f32[8]) -> y: f32[8]\n  y[i] = {before}")
    assert body(simplify(func)) == [after]


ONE_TERM = """\
kernel f(x: f32[4,6], g: f32[4], n: i64[4]) -> y: f32[4]
  s = fold add where({}) over j 6 : f32 over i acc f32
  y[i] = s
"""
LABELS = [[0, 5, 2, 3], [-1, 6, 2**32, -2**63]]


@pytest.mark.parametrize("labels", LABELS, ids=["inside", "outside"])
@pytest.mark.parametrize("term", [
    "index(j) == n[i], g[i], 0.0", "n[i] == index(j), x[i,j] * 2.0 + g[i], 0.0",
    "index(j) == n[i], f32(index(j)) - x[i,j], 0.0"])
def test_a_sum_of_one_term(term: str, labels: list[int]) -> None:
    """Bit for bit, whatever stands at the other places."""
    old = parse(ONE_TERM.format(term))
    new = simplify(old, "eager")
    assert "fold" not in str(new)
    x = np.array([[np.nan, np.inf, -0.0, 1, -np.inf, np.nan]] * 4, np.float32)
    for g in ([-0.0, np.nan, np.inf, 3], [1, -0.0, -0.0, -0.0]):
        found = []
        for func in (old, new):
            arrays = {"x": x, "g": np.array(g, np.float32), "n": np.array(labels),
                      "y": np.zeros(4, np.float32)}
            with np.errstate(invalid="ignore"):
                loop.run_kernel(func, {v.name: arrays[v.name] for v in (*func.params, *func.outs)})
            found.append(arrays["y"])
        np.testing.assert_array_equal(found[0], found[1])
        np.testing.assert_array_equal(np.signbit(found[0]), np.signbit(found[1]))


@pytest.mark.parametrize("term", [
    "index(j) == n[i], g[i], 1.0", "index(j) == n[i], g[i], -0.0", "index(j) != n[i], g[i], 0.0",
    "index(j) == index(j + 1), g[i], 0.0", "index(2*j) == n[i], g[i], 0.0",
    "index(j) == n[i], x[i,5-j], 0.0", "index(j) < n[i], g[i], 0.0"])
def test_sums_of_other_terms_stay(term: str) -> None:
    assert "fold" in str(simplify(parse(ONE_TERM.format(term)), "eager"))


def test_a_product_with_one_hot_stays() -> None:
    """0 * inf is NaN."""
    text = ONE_TERM.replace("where({})", "where(index(j) == n[i], g[i], 0.0) * x[i,j]")
    assert "fold" in str(simplify(parse(text)))


def test_eager_precision_keeps_roundings() -> None:
    func = parse("kernel f(x: f32[8]) -> y: f32[8]\n  y[i] = f32(round_bf16(x[i]))")
    assert body(simplify(func, "eager")) == ["y[i] = f32(round_bf16(x[i]))"]
    with pytest.raises(ValueError, match="precision"):
        simplify(func, "fast")


def test_a_written_out_product_is_a_contraction() -> None:
    p = Prog()
    x, w = p.param("x", 4, 5), p.param("w", 6, 5)
    wide = [p.index(v, [4, 6, 5], at) for v, at in
            ((x, lambda i, j, k: [i, k]), (w, lambda i, j, k: [j, k]))]
    module = fused(p.done(p.reduce("add", p.map("mul", *wide), 2)))
    new = Module(module.programs, tuple(map(simplify, module.kernels)))
    assert loop.contractions(new.kernels[0])
    check(module, new, draw(module.main), exact=False)


def test_a_sum_of_squares_is_no_contraction() -> None:
    (kernel,) = map(simplify, fused(models.rms_norm()).kernels)
    assert not loop.contractions(kernel)


EVERY = [models.relu_mm(), models.softmax(), models.attend(m=3), models.rotate(),
         models.transformer(1, m=2), models.momentum(), models.layer_norm("s0")]
PASSES: list[Callable[[Func], Func]] = [lambda k: simplify(k, "eager"), split_axes, merge_axes]


@pytest.mark.parametrize("change", PASSES, ids=["simplify", "split", "merge"])
@pytest.mark.parametrize("program", EVERY, ids=lambda p: p.name)
def test_passes_keep_the_meaning(program: Func, change: Callable[[Func], Func]) -> None:
    before = fused(program)
    after = Module(before.programs, tuple(map(change, before.kernels)))
    for kernel in canonical(after).kernels:
        verify(kernel, loop.VOCABULARY, loop.verify_kernel)
    check(before, after, draw(program, {"s0": 3}, ints=16), exact=False)


def test_an_axis_that_runs_backwards_is_split() -> None:
    func = parse("kernel k(x: f32[5,5]) -> y: f32[25]\n  y[i] = x[(24-i)//5,(24-i)%5]")
    assert "x[4-i1,4-i2]" in str(split_axes(func))


def test_reshapes_split_axes() -> None:
    func = parse("kernel f(x: f32[4,8,5]) -> y: f32[32,5]\n  y[i,j] = x[i//8,i%8,j]")
    assert body(split_axes(func)) == ["y[8*i1+i2,j] = x[i1,i2,j]"]


def test_a_remainder_that_does_not_divide_stays() -> None:
    func = parse("kernel f(x: f32[5,7]) -> y: f32[32]\n  y[i] = x[i//7,i%7]")
    assert split_axes(func) is func


def test_contiguous_axes_merge() -> None:
    func = parse("kernel f(x: f32[4,s0,8], b: f32[8]) -> y: f32[4,s0,8]\n"
                 "  y[i,j,k] = x[i,j,k] + b[k]")
    merged = merge_axes(func)
    assert str(merged).splitlines() == [
        "kernel f(x: f32[4*s0,8], b: f32[8]) -> y: f32[4*s0,8]", "  y[i,k] = x[i,k] + b[k]"]


def test_folds_over_neighbouring_axes_merge() -> None:
    """In either order, of symbolic sizes, and with what is computed from both axes."""
    text = ("kernel f(x: f32[4,s0,s1], w: f32[4,s0,s1]) -> y: f32[4]\n"
            "  c = contract add mul x[i,j,k], w[i,j,k] over {first} : f32 over i,{free} acc f32\n"
            "  s = fold add c over {last} : f32 over i acc f32\n  y[i] = s / 2.0")
    for first, free, last in (("k s1", "j", "j s0"), ("j s0", "k", "k s1")):
        merged = merge_axes(parse(text.format(first=first, free=free, last=last)))
        assert body(merged) == [
            "c = contract add mul x[i,j], w[i,j] over j s0*s1 : f32 over i acc f32",
            "y[i] = c / 2.0"]


@pytest.mark.parametrize("lines", [
    "s = fold add x[i,j] * w[j] over j 8 : f32 over i acc f32\n  t = fold add s over i 4",
    "s = fold max x[i,j] over j 8 : f32 over i acc f32\n  t = fold add s over i 4",
    "s = fold add x[i,j] over j 8 : f32 over i acc f32\n  t = fold add s * s over i 4"])
def test_folds_that_tell_their_axes_apart_do_not_merge(lines: str) -> None:
    func = parse(f"kernel f(x: f32[4,8], w: f32[8]) -> y: f32[]\n  {lines} : f32 acc f32\n"
                 "  y[] = t")
    assert merge_axes(func) is func


def test_a_reshape_of_three_dimensions_is_one() -> None:
    func = parse("kernel f(x: f32[2,16,4]) -> y: f32[]\n"
                 "  s = fold add x[i//64,(i//4)%16,i%4] over i 128 : f32 acc f32\n  y[] = s")
    assert "x: f32[128]" in str(merge_axes(func)) and "x[i]" in str(merge_axes(func))


def test_an_update_of_a_table_of_one_row_keeps_what_it_follows() -> None:
    func = parse("kernel f(at: i64[6], x: f32[6,4], y: f32[1,4] mutated)\n"
                 "  y[at[i],j] add= x[i,j]")
    verify(merge_axes(func), loop.VOCABULARY, loop.verify_kernel)
    assert body(merge_axes(func)) == ["y[at[i],j] add= x[i,j]"]


def test_a_transpose_does_not_merge() -> None:
    func = parse("kernel f(x: f32[4,8]) -> y: f32[8,4]\n  y[j,i] = x[i,j]")
    assert merge_axes(func) is func


def test_online_softmax() -> None:
    module = fused(models.softmax())
    merged = merge(module.kernels[0])
    assert [op.carrier for op in loop.folds(merged)] == ["softmax"]
    check(module, Module(module.programs, (merged,)), draw(module.main), exact=False)


@pytest.mark.parametrize("tokens", [1, 3])
def test_attention_carries_one_state(tokens: int) -> None:
    module = fused(models.attend(m=tokens))
    merged = merge(module.kernels[0])
    assert [op.carrier for op in loop.folds(merged) if not op.product] == ["attend"]
    check(module, Module(module.programs, (merged,)), draw(module.main, ints=16), exact=False)


def test_two_softmaxes_that_weigh_each_other() -> None:
    """Each sum could be the other's weighted one: one of them is, and is not computed twice."""
    func = parse("kernel f(x: f64[4,8]) -> y: f64[4,4]\n" + "".join(
        f"  m{a} = fold max x[{a},k] over k 8 : f64 over {a} acc f64\n"
        f"  e{a} = exp(x[{a},k] - m{a}) : f64 over {a},k\n"
        f"  s{a} = fold add e{a} over k 8 : f64 over {a} acc f64\n" for a in "ij") +
        "  mm = contract add mul ei / si, ej / sj over k 8 : f64 over i,j acc f64\n"
        "  y[i,j] = mm")
    merged = merge(func)
    assert sorted(op.carrier for op in loop.folds(merged)) == ["attend", "softmax"]
    x = np.random.default_rng(0).standard_normal((4, 8))
    want, got = (np.empty((4, 4)) for _ in range(2))
    loop.run_kernel(func, {"x": x, "y": want})
    loop.run_kernel(merged, {"x": x, "y": got})
    np.testing.assert_allclose(got, want)


def test_what_does_not_merge() -> None:
    kernel = parse("kernel f(x: f32[4,8], z: f32[4,8]) -> y: f32[4]\n"
                   "  m = fold max x[i,j] over j 8 : f32 over i acc f32\n"
                   "  e = exp(z[i,j] - m) : f32 over i,j\n"
                   "  s = fold add e over j 8 : f32 over i acc f32\n"
                   "  y[i] = s")
    top, total = loop.folds(kernel)
    assert can_merge(kernel, top, total) == "what is summed is not exp(x - m) of the maximum's x"
    assert merge(kernel) is kernel


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("make", [models.softmax, models.attend, models.colsum, models.relu_mm])
def test_split_folds(make: Callable[[], Func], parts: int) -> None:
    module = canonical(fused(make()))
    kernel = merge(module.kernels[0])
    axis = loop.folds(kernel)[-1].axis
    first, second, spaces = split_fold(kernel, axis, parts)
    for half in (first, second):
        verify(half, loop.VOCABULARY, loop.verify_kernel)
    assert [v.type for v in first.outs] == list(spaces)
    call = module.main.body.ops[0]
    given = dict(zip((p.name for p in module.main.params), draw(module.main, ints=5), strict=True))
    arrays = {p.name: given[v.name] for p, v in zip(kernel.params, call.operands(), strict=True)}
    arrays |= {o.name: np.zeros([int(n.const_value or 0) for n in o.type.shape],  # type: ignore
                                np.float32) for o in (*first.outs, *second.outs)}
    loop.run_kernel(first, arrays)
    loop.run_kernel(second, arrays)
    want = results(module, list(given.values()))[0]
    np.testing.assert_allclose(arrays["y"], want, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("op, why", [
    ("contract max add x[i,k], x[i,k]", "no sum of products")])
def test_what_does_not_split(op: str, why: str) -> None:
    """Behind the end of the last part both inputs are 0, which a maximum of sums would see."""
    kernel = parse(f"kernel f(x: f32[4,8]) -> y: f32[4,8]\n"
                   f"  s = {op} over k 8 : f32 over i acc f32\n  y[i,k] = s")
    with pytest.raises(Declined, match=why):
        split_fold(kernel, "k", 3)


def test_a_scan_splits_alone() -> None:
    kernel = parse("kernel f(x: f32[4,8]) -> y: f32[4,8]\n"
                   "  s = scan add x[i,k] over k 8 : f32 over i,k acc f32\n"
                   "  t = fold add x[i,k] over k 8 : f32 over i acc f32\n  y[i,k] = s + t")
    with pytest.raises(Declined, match="a scan runs"):
        split_fold(kernel, "k", 3)


def test_split_needs_independent_folds() -> None:
    (kernel,) = canonical(fused(models.softmax())).kernels
    with pytest.raises(Declined, match="reads another's result"):
        split_fold(kernel, "j", 2)


def test_names_come_from_structure_alone() -> None:
    one, two = models.relu_mm(), models.relu_mm()
    assert str(canonical(fused(one)).kernels[0]) == str(canonical(fused(two)).kernels[0])


def test_bf16_is_rounded_once_by_default() -> None:
    (kernel,) = map(simplify, fused(models.linear_bf16()).kernels)
    casts = [op for op in kernel.body.ops if getattr(op, "dtype", None) in (BF16, F32)
             and getattr(op, "implicit", False)]
    assert len(casts) == 1
