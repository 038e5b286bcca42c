"""Scans over copies and threads, and atomic updates, of the Kernel IR on NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from mapped import VOCABULARIES

from rung.core.errors import LoweringError, VerifyError
from rung.core.op import Func
from rung.core.parse import parse_module
from rung.core.verify import verify
from rung.kernel.ir import VOCABULARY, run_kernel_ir, verify_kernel_ir
from rung.targets.base import target

SCAN = """\
kernel-ir scan(x: f32[24]) -> y: f32[24], z: f32[24]
  unroll ju3<3
  for jt in 0..8 at thread
    t = x[3*jt+ju3] : f32 over ju3<3
    c = prefix {monoid} t by ju3 : f32 over ju3<3
    total = combine {monoid} t by ju3 : f32
    before = exclusive {monoid} total by jt : f32
    y[3*jt+ju3] = {fn}(before, c)
    z[3*jt+ju3] = prefix {monoid} total by jt : f32
"""
ATOMIC = """\
kernel-ir count(at: i64[40], y: f32[4] mutated, z: i64[4] mutated)
  for ib in 0..5 at grid
    for it in 0..8 at thread
      t = at[8*ib+it] : i64
      y[t] add= f32(t)
      z[t] max= t
"""


def func(text: str) -> Func:
    (made,) = parse_module(text, VOCABULARIES)
    verify(made, VOCABULARY, verify_kernel_ir)
    return made


@pytest.mark.parametrize(("monoid", "fn", "ufunc"), [
    ("add", "add", np.add), ("max", "max", np.maximum), ("mul", "mul", np.multiply)])
def test_a_scan_is_one_of_copies_inside_one_of_threads(monoid: str, fn: str, ufunc: np.ufunc
                                                       ) -> None:
    text = SCAN.format(monoid=monoid, fn=fn).replace(
        "z[3*jt+ju3] = prefix", "p = prefix").rstrip() + "\n    z[3*jt+ju3] = p\n"
    x = np.random.default_rng(0).standard_normal(24).astype("f")
    made, arrays = func(text), {"x": x, "y": np.empty(24, "f"), "z": np.empty(24, "f")}
    assert str(func(str(made))) == str(made)
    run_kernel_ir(made, arrays)
    want = ufunc.accumulate(x)
    np.testing.assert_allclose(arrays["y"], want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(arrays["z"], np.repeat(want[2::3], 3), rtol=1e-5, atol=1e-5)


def test_threads_meet_at_an_element() -> None:
    made, at = func(ATOMIC), np.arange(40) % 3
    assert str(func(str(made))) == str(made) and "y[t] add= f32(t)" in str(made)
    arrays = {"at": at, "y": np.ones(4, "f"), "z": np.zeros(4, "i8")}
    run_kernel_ir(made, arrays)
    assert arrays["y"].tolist() == [1, 14, 27, 1] and arrays["z"].tolist() == [0, 1, 2, 0]
    lost = dict(arrays, y=np.ones(4, "f"))
    run_kernel_ir(func(ATOMIC.replace("add= ", "= ")), lost)
    assert lost["y"].tolist() == [0, 1, 2, 1]


@pytest.mark.parametrize(("old", "new", "reason"), [
    ("add= f32(t)", "first= f32(t)", "no atomic first into f32"),
    ("for it", "c = alloc : shared f32[4]\n    for it", "")])
def test_what_cannot_be_updated(old: str, new: str, reason: str) -> None:
    text = ATOMIC.replace(old, new)
    if not reason:
        text, reason = text.replace("y[t]", "c[t]"), "no atomic add into shared"
    with pytest.raises(VerifyError, match=reason):
        func(text)


def test_other_targets_have_no_atomic_updates() -> None:
    text = ATOMIC.replace(" at grid", "").replace(" at thread", "")
    with pytest.raises(LoweringError, match="this target has no atomic add"):
        target("cpu.base").emit([func(text)])
    assert "atomicAdd" in target("cuda.sm90").emit([func(ATOMIC)])
