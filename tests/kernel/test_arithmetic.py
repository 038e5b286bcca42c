"""Fused multiply-adds and first steps of folds in Kernel IR: which, and what they give."""

from __future__ import annotations

import numpy as np
import pytest
from kernel.test_prefix import func

from rung.core.op import Func
from rung.kernel.arithmetic import fill_loads, first_steps, fuse_products
from rung.kernel.ir import run_kernel_ir

MAPS = """\
kernel-ir k(a: f32[64], b: f32[64], c: f32[64]) -> y: f32[64]
  for i in 0..64 at thread
    y[i] = {}
"""
FUSED = {
    "a[i] * b[i] + c[i]": "fma(a[i], b[i], c[i])",
    "c[i] + a[i] * b[i]": "fma(a[i], b[i], c[i])",
    "a[i] * b[i] - c[i]": "fma(a[i], b[i], neg(c[i]))",
    "c[i] - a[i] * b[i]": "fma(neg(a[i]), b[i], c[i])",
    "a[i] * a[i] + c[i]": "fma(a[i], a[i], c[i])",
    "(a[i] * b[i] + c[i]) * b[i] + c[i]": "fma(fma(a[i], b[i], c[i]), b[i], c[i])",
}
KEPT = ("a[i] * b[i] - b[i] * c[i]", "a[i] * b[i] + b[i] * c[i]", "c[i] - a[i] * a[i]",
        "floor(a[i] * b[i] + c[i])", "f32(i32(a[i] * b[i] + c[i]))", "a[i] + b[i]")


def run(made: Func, **more: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(0)
    arrays = {v.name: rng.uniform(-2, 2, 64).astype(np.float32) for v in made.params} | more
    arrays["y"] = np.zeros(64, np.float32)
    run_kernel_ir(made, arrays)
    return arrays["y"]


@pytest.mark.parametrize("text", FUSED)
def test_what_is_fused_rounds_once(text: str) -> None:
    old = func(MAPS.format(text))
    new = fuse_products(old)
    assert str(new).strip().splitlines()[-1].strip() == f"y[i] = {FUSED[text]}"
    func(str(new))
    np.testing.assert_allclose(run(new), run(old), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("text", KEPT)
def test_what_may_cancel_or_jump_stays(text: str) -> None:
    old = func(MAPS.format(text))
    assert str(fuse_products(old)) == str(old)


def test_a_product_that_is_read_twice_stays() -> None:
    old = func("""\
kernel-ir k(a: f32[64], b: f32[64], c: f32[64]) -> y: f32[64]
  for i in 0..64 at thread
    p = a[i] * b[i] : f32
    y[i] = (p + c[i]) / p
""")
    assert str(fuse_products(old)) == str(old)


STEPS = """\
kernel-ir k(a: f32[64], b: f32[64], c: f32[64]) -> y: f32[64]
  unroll u<2
  for i in 0..32 at thread
    none = fill {identity} : f32 over u<2
    t = a[2*i+u] : f32 over u<2
    s = {step} : f32 over u<2
    y[2*i+u] = s
"""


@pytest.mark.parametrize(("identity", "step", "left"), [
    ("0.0", "none + t", "a[2*i+u]"), ("-inf", "max(none, t)", "a[2*i+u]"),
    ("inf", "min(none, t)", "a[2*i+u]"), ("1.0", "none * t", "a[2*i+u]"),
    ("0.0", "fma(t, t, none)", "t * t")])
def test_a_step_from_nothing_is_what_is_folded(identity: str, step: str, left: str) -> None:
    old = func(STEPS.format(identity=identity, step=step))
    new = first_steps(old)
    assert "fill" not in str(new) and f"y[2*i+u] = {left}" in str(new)
    special = np.resize(np.array([np.nan, np.inf, -np.inf, 1, 3e38], np.float32), 64)
    for given in ({}, {"a": special}):
        np.testing.assert_array_equal(run(new, **given), run(old, **given))


@pytest.mark.parametrize(("identity", "step"), [
    ("0.0", "max(none, t)"), ("1.0", "none + t"), ("-inf", "min(none, t)"), ("0.0", "none * t"),
    ("1.0", "fma(t, t, none)"), ("0.0", "fma(none, t, t)"), ("0.0", "none - t")])
def test_other_steps_stay(identity: str, step: str) -> None:
    old = func(STEPS.format(identity=identity, step=step))
    assert str(first_steps(old)) == str(old)


def test_an_accumulator_of_a_loop_stays() -> None:
    old = func("""\
kernel-ir k(a: f32[64,8], b: f32[64], c: f32[64]) -> y: f32[64]
  for i in 0..64 at thread
    none = fill 0.0 : f32
    sum = for j in 0..8 carry s = none : f32
      s1 = s + a[i,j] : f32
      yield s1
    y[i] = sum
""")
    assert str(first_steps(old)) == str(old)


MASKED = """\
kernel-ir k(a: f32[64], b: f32[64], c: f32[64]) -> y: f32[64]
  unroll u<2
  for i in 0..32 at thread
    t = a[2*i+u | 50-2*i-u] : f32 over u<2
    v = where(index({left}) >= 0, t, {other}) : f32 over u<2
    y[2*i+u] = v{rest}
"""


@pytest.mark.parametrize("other", ["-inf", "0.0", "inf"])
def test_a_load_fills_in_what_is_put_in_its_place(other: str) -> None:
    old = func(MASKED.format(left="50-2*i-u", other=other, rest=""))
    new = fill_loads(old)
    assert "where" not in str(new) and "index" not in str(new)
    assert other == "0.0" or f"else {other}" in str(new)
    np.testing.assert_array_equal(run(new), run(old))


@pytest.mark.parametrize(("left", "other", "rest"), [
    ("51-2*i-u", "-inf", ""), ("50-2*i-u", "3.0", ""), ("50-2*i-u", "-inf", " + t")])
def test_other_loads_stay(left: str, other: str, rest: str) -> None:
    """Under another mask, of another number, or read twice."""
    old = func(MASKED.format(left=left, other=other, rest=rest))
    assert str(fill_loads(old)) == str(old)


@pytest.mark.parametrize("other", ["-inf", "-0.0"])
def test_loads_of_integers_stay(other: str) -> None:
    """Which hold neither."""
    old = func(MASKED.replace("a: f32", "a: i64").replace("i-u] : f32", "i-u] : i64").replace(
        ", t, ", ", f32(t), ").format(left="50-2*i-u", other=other, rest=""))
    assert "f32(t)" in str(old) or "f32(a[" in str(old)
    assert str(fill_loads(old)) == str(old)
