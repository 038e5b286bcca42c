"""Scalar functions and softmax on a GPU against float64: all of bf16, and a million f32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

Fn = Callable[[torch.Tensor], torch.Tensor]
# Ulps of the result where it is normal, or absolute ones of 1.
RELATIVE: dict[str, tuple[Fn, float]] = {
    "sigmoid": (torch.sigmoid, 4), "silu": (F.silu, 5), "tanh": (torch.tanh, 2),
    "exp": (torch.exp, 2), "exp2": (torch.exp2, 3), "erf": (torch.erf, 2), "log": (torch.log, 2),
    "rsqrt": (torch.rsqrt, 2)}
ABSOLUTE: dict[str, tuple[Fn, float]] = {"erfp1": (lambda x: 1 + torch.erf(x), 2)}
TAIL = -87.3  # below it sigmoid is subnormal, below -88.7 eager's is 0


def arguments(dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bfloat16:
        return torch.arange(1 << 16, device="cuda").to(torch.int16).view(torch.bfloat16)
    torch.manual_seed(0)
    bits = torch.randint(-2**31, 2**31, (500_000,), dtype=torch.int64, device="cuda")
    near = [torch.empty(125_000, device="cuda").uniform_(-r, r) for r in (1, 5, 20, 110)]
    return torch.cat([bits.to(torch.int32).view(torch.float32), *near])


def compiled(fn: Fn) -> Fn:
    return torch.compile(fn, backend="rung", options={"strict": True})


def sides(fn: Fn, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Arguments, results in f32, and float64's; what is not finite is equal."""
    x = arguments(dtype).float()
    got, exact = compiled(fn)(x), fn(x.double())
    rounded = exact.float()
    finite = rounded.isfinite()
    torch.testing.assert_close(got[~finite], rounded[~finite], rtol=0, atol=0, equal_nan=True)
    return x[finite], got[finite].double(), exact[finite]


def spacing(x: torch.Tensor) -> torch.Tensor:
    """An ulp of f32 at each number, at least that of the subnormal ones."""
    return torch.ldexp(torch.ones_like(x), (torch.frexp(x).exponent - 24).clamp(min=-149))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", RELATIVE)
def test_relative_errors(name: str, dtype: torch.dtype) -> None:
    fn, bound = RELATIVE[name]
    x, got, exact = sides(fn, dtype)
    if name in ("sigmoid", "silu"):
        x, got, exact = (v[x >= TAIL] for v in (x, got, exact))
    assert ((got - exact).abs() / spacing(exact)).max() <= bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ABSOLUTE)
def test_absolute_errors(name: str, dtype: torch.dtype) -> None:
    fn, bound = ABSOLUTE[name]
    _, got, exact = sides(fn, dtype)
    assert (got - exact).abs().max() <= bound * 2.0**-23


@pytest.mark.parametrize("fn", [F.gelu, F.silu, torch.sigmoid])
def test_in_bf16_they_round_as_well_as_eager(fn: Fn) -> None:
    x = arguments(torch.bfloat16)
    x = x[x.isfinite()]
    exact = fn(x.double())
    got, eager = ((f(x).double() - exact).abs() for f in (compiled(fn), fn))
    assert (got <= 2 * eager + 2.0**-8 * exact.abs() + 1e-6).all()


def test_softmax_of_scaled_rows() -> None:
    """Also rows of one large number, of infinities, and of nothing else but -inf."""
    x = torch.randn(64, 4096, device="cuda") * torch.logspace(-3, 4, 64, device="cuda")[:, None]
    x[0], x[1, 7], x[2] = -torch.inf, torch.inf, -torch.inf
    x[2, 5] = 3
    for dtype in (torch.float32, torch.bfloat16):
        row = x.to(dtype)
        got, eager = compiled(lambda x: x.softmax(-1))(row), row.softmax(-1)
        exact = row.double().softmax(-1)
        assert torch.equal(got.isnan(), eager.isnan())
        # of what exp is taken of; and of its sum, whose terms err by 2^-22 and |x - max| * 2^-23.7:
        # weighted by the terms, that is at most 16 * 2^-24 for 4096 of them
        rounded = (20 - exact.clamp(min=1e-38).log()) * 2.0**-24
        few = (rounded + torch.finfo(dtype).eps) * exact + 1e-38
        assert ((got.double() - exact).abs() <= few).masked_fill(exact.isnan(), True).all()
