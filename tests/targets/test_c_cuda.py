"""The text of CUDA's functions on the host, against float64 over all of bf16 and many f32."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rung.core.scalar import SCALARS
from rung.core.types import F32
from rung.targets.c_cuda import PTX, CudaPrelude

HEAD = """\
#include <math.h>
#define __device__
#define __forceinline__ inline
static float off(float y, double error) {
  int e;
  const double m = frexp(y, &e);
  return !isfinite(y) || !y || fabs(m) == 0.5 ? y : (float)(y + ldexp(error, e - 1));
}
"""
FUNCTIONS = ("erfp1", "exp_approx", "sigmoid", "silu")
# What PTX allows ex2.approx and rcp.approx, for results from 1 to 2; powers of two are exact.
ERRORS = {"return exp2f(a);": 2.0**-22.5, "return 1 / a;": 2.0**-23}
Sweep = Callable[[str, np.ndarray], np.ndarray]


def library(folder: Path, off: int, text: Callable[[str], str] = str) -> Sweep:
    """The functions, whose instructions err as much as they may, up (1), down (-1) or not (0)."""
    p = CudaPrelude(ptx=False)
    loops = [f'extern "C" void sweep_{name}(long n, const float *x, float *y) '
             f'{{ for (long i = 0; i < n; i++) y[i] = {p.call(name, F32, 1, ["x[i]"])}; }}\n'
             for name in FUNCTIONS]
    source = text(HEAD + p.text() + "".join(loops))
    for exact, error in ERRORS.items():
        assert exact in source
        source = source.replace(exact, exact.replace("return ", "return off(").replace(
            ";", f", {off * error});"))
    path = folder / f"f{off}.so"
    (folder / "f.cpp").write_text(source)
    subprocess.run(["g++", "-std=gnu++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-o",
                    str(path), str(folder / "f.cpp"), "-lm"], check=True)
    made = ctypes.CDLL(str(path))

    def sweep(name: str, x: np.ndarray) -> np.ndarray:
        x, y = np.ascontiguousarray(x, np.float32), np.empty(len(x), np.float32)
        pointers = (ctypes.c_void_p(a.ctypes.data) for a in (x, y))
        getattr(made, f"sweep_{name}")(ctypes.c_long(len(x)), *pointers)
        return y
    return sweep


@pytest.fixture(scope="module", params=(-1, 0, 1))
def sweep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    return library(tmp_path_factory.mktemp("c_cuda"), request.param)


def arguments() -> np.ndarray:
    """All of bf16, random bits, and many where the functions are not flat."""
    rng = np.random.default_rng(0)
    half = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    bits = rng.integers(0, 1 << 32, 1 << 19, dtype=np.uint64).astype(np.uint32).view(np.float32)
    near = [rng.uniform(-r, r, 1 << 17).astype(np.float32) for r in (1, 5, 20, 110)]
    return np.concatenate([half, bits, *near])


def errors(name: str, got: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the exact result is finite, it and the absolute error; the rest is equal."""
    with np.errstate(all="ignore"):
        exact = SCALARS[name].numpy(x.astype(np.float64))
        finite = np.isfinite(exact.astype(np.float32))
        np.testing.assert_array_equal(got[~finite], exact[~finite].astype(np.float32))
        return exact, np.where(finite, np.abs(got - exact), 0)


def erfp1_errs(sweep: Sweep) -> float:
    """In units of the last place of 1."""
    x = arguments()
    return float(errors("erfp1", sweep("erfp1", x), x)[1].max()) / 2.0**-23


def test_one_plus_erf(sweep: Sweep) -> None:
    assert erfp1_errs(sweep) < 2


def test_a_coarse_exp(sweep: Sweep) -> None:
    """As docs/numerics.md bounds it, but where the result is subnormal."""
    x = arguments()
    x = x[(x > -87.3) & (x < 88.7)]
    exact, error = errors("exp_approx", sweep("exp_approx", x), x)
    near = 2.0**-22 + np.abs(x.astype(np.float64)) * 2.0**-23.7
    assert (error <= near * exact).all() and near.max() <= 2.0**-17
    weights = x <= 0
    assert error[weights].max() <= 2.0**-21


@pytest.mark.parametrize(("name", "bound"), [("sigmoid", 4.0), ("silu", 5.0)])
def test_sigmoids(name: str, bound: float, sweep: Sweep) -> None:
    x = arguments()
    x = x[np.isfinite(x)]
    exact, error = errors(name, sweep(name, x), x)
    with np.errstate(all="ignore"):
        ulps = error / np.spacing(np.abs(exact).astype(np.float32))
    tail = x < np.log(2.0**-126)
    assert ulps[~tail].max() <= bound
    flushed = x < -88.72  # where exp(-x) is infinite, or may be
    assert ulps[tail & ~flushed].max() <= 6
    assert error[flushed].max() <= 4e-37


def test_exact_values(sweep: Sweep) -> None:
    x = np.array([0.0, -0.0, 1e38, -1e38, np.inf, -np.inf, 40, -40], np.float32)
    one = sweep("erfp1", x)
    assert one[2:].tolist() == [2, 0, 2, 0, 2, 0]
    assert sweep("exp_approx", x)[[0, 1, 2, 3, 4, 5]].tolist() == [1, 1, np.inf, 0, np.inf, 0]
    assert np.isnan(sweep("exp_approx", np.array([np.nan]))).all()
    assert np.isnan(sweep("erfp1", np.array([np.nan]))).all()
    assert sweep("sigmoid", x)[2:].tolist()[:4] == [1, 0, 1, 0]
    signs = np.signbit(sweep("silu", x[:2]))
    assert signs.tolist() == [False, True]


def test_beyond_its_fit_the_polynomial_falls(sweep: Sweep) -> None:
    x = -np.concatenate([np.linspace(3.5, 30, 1 << 16), np.geomspace(30, 3e38, 1 << 12)])
    got = sweep("erfp1", x.astype(np.float32))
    assert (np.diff(got) <= 0).all() and got[-1] == 0


def test_a_wrong_coefficient_is_seen(tmp_path: Path) -> None:
    assert erfp1_errs(library(tmp_path, 0, lambda s: s.replace("0x1.cee88ap-6f", "0x1.cfe88ap-6f"))
                      ) > 2


def test_on_the_device_they_are_instructions() -> None:
    p = CudaPrelude()
    for name in FUNCTIONS:
        p.call(name, F32, 1, ["x"])
    assert all(text in p.text() for text in ("ex2.approx.ftz.f32 %0, %1;", "rcp.approx.ftz.f32 %0"))
    assert {"pow2", "over"} <= PTX.keys()
