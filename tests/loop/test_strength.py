"""Reciprocals, 1 + erf(x), coarse exps, places in 32 bits: where they stand, and if rightly so."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernels import lower

from rung.core.op import Func
from rung.core.parse import parse_module
from rung.core.scalar import round_bf16
from rung.loop import ir as loop
from rung.loop.strength import RULES, reduce_strength
from rung.pipeline import PASSES
from rung.targets import TARGETS
from rung.targets.base import target
from rung.tools.capture import capture
from rung.tools.given import Given

N, M = 7, 24
SPECIAL = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-40, 2e-38, 3e38, -3e38, 1,
                    3, -7, 0.1, 1e30], np.float32)
HEAD = f"kernel k(x: f32[{N},{M}], w: f32[{N}], n: i64[{N}], h: f16[{N}]) -> y: f32[{N},{M}]\n"
WEIGHTS = f"""\
  m = fold max x[i,j] over j {M} : f32 over i acc f32
  e = exp(x[i,j] - m) : f32 over i,j
  s = fold add e over j {M} : f32 over i acc f32
"""
MERGED = f"  m, s = fold softmax x[i,j] over j {M} : f32 over i, f32 over i acc f32\n"
BY_RECIPROCAL = {
    "constant": ("", "x[i,j] / 3.0"),
    "zero": ("", "x[i,j] / -0.0"),
    "root": ("", "x[i,j] / sqrt(w[i])"),
    "root, bounded": ("", "x[i,j] / max(sqrt(w[i]), 1e-12)"),
    "root and a bit": ("", "x[i,j] / (sqrt(w[i]) + 1e-8)"),
    "negated": ("", "x[i,j] / neg(abs(sqrt(w[i])))"),
    "one of two": ("", "x[i,j] / where(w[i] > 1.0, sqrt(w[i]), 2.0)"),
    "rounded root": ("", "x[i,j] / f32(bf16(sqrt(w[i])))"),
    "count": ("", "x[i,j] / f32(n[i])"),
    "f16": ("", "x[i,j] / f32(h[i])"),
    "weights": (WEIGHTS, "e / s"),
    "merged weights": (MERGED, "exp(x[i,j] - m) / s"),
    "their maximum, roughly": (WEIGHTS, "x[i,j] / max(s, 5.0)"),
}
BY_DIVISION = {
    "any number": ("", "x[i,j] / w[i]"),
    "small": ("", "x[i,j] / 1e-39"),
    "large": ("", "x[i,j] / 2e+38"),
    "perhaps small": ("", "x[i,j] / max(w[i], 1.0)"),
    "a root less something": ("", "x[i,j] / (sqrt(w[i]) - 1.0)"),
    "a root and a negative number": ("", "x[i,j] / (sqrt(w[i]) + -1.0)"),
    "sum": (f"  s = fold add x[i,j] over j {M} : f32 over i acc f32\n", "x[i,j] / s"),
    "exponentials": (f"  s = fold add exp(x[i,j]) over j {M} : f32 over i acc f32\n",
                     "x[i,j] / s"),
    "other weights": (WEIGHTS.replace("x[i,j] - m", "w[i] - m + x[i,j]"), "e / s"),
    "maximum of weights": (MERGED, "x[i,j] / m"),
    "no inner axis": ("", "x[i,j] / sqrt(x[i,j])"),
}


def kernel(lines: str, value: str) -> Func:
    (made,) = parse_module(f"{HEAD}{lines}  y[i,j] = {value}\n", {"kernel": loop.VOCABULARY})
    return made


def run(func: Func, **given: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(0)
    arrays = {"x": rng.choice(SPECIAL, (N, M)), "w": SPECIAL[:N], "h": SPECIAL[:N].astype("f2"),
              "n": np.array([0, 1, -1, 3, 2**62, -2**63, 2**63 - 1]),
              "y": np.zeros((N, M), np.float32)} | given
    with np.errstate(all="ignore"):
        loop.run_kernel(func, {k: v for k, v in arrays.items()
                               if k in {b.name for b in (*func.params, *func.outs)}})
    return arrays["y"]


@pytest.mark.parametrize("name", BY_RECIPROCAL)
def test_a_reciprocal_gives_what_the_division_gives(name: str) -> None:
    old = kernel(*BY_RECIPROCAL[name])
    new = reduce_strength(old, RULES)
    assert "/" not in str(new)
    for start in range(0, len(SPECIAL), 3):
        row = np.resize(np.roll(SPECIAL, -start), N)
        with np.errstate(over="ignore"):
            given = {"w": row, "h": row.astype("f2")}
        a, b = run(old, **given), run(new, **given)
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        np.testing.assert_array_equal(np.signbit(a)[a == a], np.signbit(b)[a == a])
        with np.errstate(all="ignore"):
            near = np.abs(a - b) <= 2 * np.spacing(np.abs(a))
        assert ((a == b) | (a != a) | near).all()


@pytest.mark.parametrize("name", BY_DIVISION)
def test_other_divisions_stay(name: str) -> None:
    old = kernel(*BY_DIVISION[name])
    assert str(reduce_strength(old, RULES)) == str(old)


def test_what_the_guard_is_for() -> None:
    """x / s and x * (1 / s) differ where 1 / s is infinite, or has lost bits."""
    x, s = np.float32(2e-38), np.float32(1e-39)
    with np.errstate(over="ignore"):
        assert np.isinf(x * (np.float32(1) / s)) and abs(x / s - 20) < 1e-4
    large = np.float32(3e38)
    assert large * (np.float32(1) / large) != 1


def test_columns_are_divided_by_a_folded_axis() -> None:
    text = f"""\
kernel k(x: f32[{N},{M}]) -> y: f32[{N},{M}]
  m, s = fold softmax x[i,j] over i {N} : f32 over j, f32 over j acc f32
  y[i,j] = exp(x[i,j] - m) / s
"""
    (old,) = parse_module(text, {"kernel": loop.VOCABULARY})
    assert "reciprocal(s)" in str(reduce_strength(old, RULES))


@pytest.mark.parametrize("text", ["1.0 + erf(x[i,j])", "erf(x[i,j]) + 1.0"])
def test_one_and_erf(text: str) -> None:
    old = kernel("", text)
    new = reduce_strength(old, RULES)
    assert "= erfp1(x[i,j])" in str(new)
    np.testing.assert_allclose(run(new), run(old), atol=2e-7)
    other = kernel("", text.replace("1.0", "2.0"))
    assert str(reduce_strength(other, RULES)) == str(other)


def test_only_a_machine_that_prefers_the_forms_gets_them() -> None:
    """No CPU and no toy, and none under the precision "eager"."""
    preferring = {name for name in TARGETS if target(name).machine.rates.forms}
    assert preferring == {"cuda.sm90", "cuda-emulated"} | (preferring & {"cuda"})
    assert str(reduce_strength(old := kernel(WEIGHTS, "e / s"), ())) == str(old)
    assert {p.kind for p in PASSES if p.name in ("strength", "multiply_add")} == {"changes-values"}


def test_rounding_to_bf16_keeps_the_bounds() -> None:
    least = np.array([2.0**-126, 2.0**126], np.float32)
    np.testing.assert_array_equal(round_bf16(least), least)


@pytest.mark.parametrize(("precision", "found"), [("default", True), ("eager", False)])
def test_eager_has_none_of_them(precision: str, found: bool) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * y + 1) / 3

    (graph,) = capture(Given("fn", fn, (torch.randn(9, 40), torch.randn(9, 40)))).graphs
    assert graph.imported is not None
    made = lower(graph.imported.func, target("cuda.sm90"), precision=precision)
    assert ("fma_f32(" in made.source) == found
    assert (" / 0x1.8000000000000p+1f" in made.source) != found


LABELS = np.array([0, M - 1, -1, M, 2**32, 2**32 + 5, -2**63])


@pytest.mark.parametrize("test", ["index(j) == n[i]", "n[i] == index(j)"])
def test_places_are_compared_in_32_bits(test: str) -> None:
    old = kernel("", f"where({test}, x[i,j], 0.5)")
    new = reduce_strength(old, ("i32",))
    assert "i32(index(j)) == where(" in str(new)
    np.testing.assert_array_equal(run(new, n=LABELS), run(old, n=LABELS))


def test_other_places_stay() -> None:
    for text in ("index(j) == index(i)", "index(j) < n[i]", "index(2*j) == n[i]"):
        old = kernel("", f"where({text}, x[i,j], 0.5)")
        assert str(reduce_strength(old, ("i32",))) == str(old)


@pytest.mark.parametrize(("before", "after"), [
    (WEIGHTS, "bf16(e * s)"), ("", "bf16(exp(x[i,j]) - 1.0)"), ("", "f16(0.5 * exp(x[i,j]))")])
def test_a_coarse_exp(before: str, after: str) -> None:
    """One that is rounded to 16 bits, or whose sum is of weights."""
    old = kernel(before, f"f32({after})")
    new = reduce_strength(old, ("exp_approx",))
    assert str(new).count("exp_approx(") == 1 and "= exp(" not in str(new)
    np.testing.assert_array_equal(run(new), run(old))


@pytest.mark.parametrize(("before", "after"), [
    (WEIGHTS, "e / s"), ("", "exp(x[i,j])"),
    (f"  s = fold add exp(x[i,j]) over j {M} : f32 over i acc f32\n", "s + x[i,j]"),
    ("", "where(exp(x[i,j]) > 1.0, 1.0, f32(bf16(x[i,j])))"),
    ("", "f32(bf16(sin(exp(x[i,j]))))"),
    ("  e = exp(x[i,j]) : f32 over i,j\n", "f32(bf16(e)) + e")])
def test_other_exps_stay(before: str, after: str) -> None:
    """Of which all bits are written, compared or folded."""
    old = kernel(before, after)
    assert str(reduce_strength(old, ("exp_approx",))) == str(old)
