"""The NumPy meanings against torch eager, on ordinary and special values."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch

from rung.core.errors import VerifyError
from rung.core.scalar import MONOIDS, SCALARS, cast, round_bf16
from rung.core.types import (
    BF16,
    BOOL,
    DTYPES,
    F16,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    U8,
    DType,
)

TORCH_TYPES = {F64: torch.float64, F32: torch.float32, BF16: torch.bfloat16, F16: torch.float16,
               I64: torch.int64, I32: torch.int32, I16: torch.int16, I8: torch.int8,
               U8: torch.uint8, BOOL: torch.bool}


def wide_fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    if a.dtype == torch.float32:
        return (a.double() * b.double() + c.double()).float()
    return a * b + c


def quotient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    safe = torch.where(b == 0, torch.ones_like(b), b)
    return torch.where(b == 0, torch.zeros_like(a), torch.div(a, safe, rounding_mode="trunc"))


def fmod(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Element by element: torch's vectors give NaN where a / b overflows."""
    return torch.stack([torch.fmod(x, y) for x, y in zip(a, b, strict=True)])


TORCH = {
    "div": torch.div, "neg": torch.neg, "abs": torch.abs, "min": torch.minimum,
    "max": torch.maximum, "fma": wide_fma, "pow": torch.pow, "silu": torch.nn.functional.silu,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "not": torch.bitwise_not, "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift, "quotient": quotient, "fmod": fmod,
    "exp_approx": torch.exp,
    "erfp1": lambda x: torch.erfc(-x.double()).to(x.dtype),
    "sinh": lambda x: torch.sinh(x.double()).to(x.dtype),  # torch's own overflows too soon
    "cosh": lambda x: torch.cosh(x.double()).to(x.dtype),
}
NUMBERS = (F64, F32, I64, I32, I16, I8, U8)


def values(dtype: DType, seed: int, count: int = 400) -> np.ndarray:
    """Every pair of special values, then random ones; `seed` 0 and 1 give the pair's sides."""
    rng = np.random.default_rng(seed)
    if dtype == BOOL:
        return rng.integers(0, 2, count).astype(bool)
    if dtype.is_float:
        tiny = 1e-40 if dtype != F64 else 1e-310
        special = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, np.inf, -np.inf, np.nan, tiny, -tiny,
                   88.8, -88.8, -104.0, 1e30, -1e30, 8388609.0, -0.3]
        usual = rng.normal(size=count) * 10.0 ** rng.integers(-4, 3, count)
    else:
        info = np.iinfo(dtype.numpy)
        special = [info.min, info.max, 0, 1, 2, info.max // 2 + 1, info.min + 1]
        usual = rng.integers(info.min, info.max, count, dtype=np.int64)
    pairs = np.array(list(itertools.product(special, special, special[:3])), object)[:, seed]
    with np.errstate(all="ignore"):
        both = np.concatenate([pairs.astype(dtype.numpy), usual.astype(dtype.numpy)])
    return round_bf16(both) if dtype == BF16 else both


def accepted(name: str) -> list[DType]:
    fn = SCALARS[name]
    found = []
    for dtype in DTYPES.values():
        try:
            fn.result((BOOL, dtype, dtype) if name == "where" else (dtype,) * fn.arity)
        except ValueError:
            continue
        found.append(dtype)
    return found


@pytest.mark.parametrize("name", SCALARS)
def test_meaning_is_torchs(name: str) -> None:
    fn = SCALARS[name]
    meaning = TORCH.get(name) or getattr(torch, name)
    for dtype in accepted(name):
        args = [values(dtype, seed) for seed in range(fn.arity)]
        if name == "where":
            args[0] = values(BOOL, 0, len(args[1]))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = fn.numpy(*args)
            fn.numpy(*(a[0] for a in args))  # scalars must not warn either
        tensors = [torch.from_numpy(a) for a in args]
        expected = meaning(*tensors).numpy()
        assert got.dtype == expected.dtype
        eps = float(np.finfo(got.dtype).eps) if got.dtype.kind == "f" else 0.0
        exact = eps == 0 or fn.cost <= 2 or name in ("div", "reciprocal")
        small = 0.0 if exact else 1e-36 if name == "silu" else float(np.finfo(got.dtype).tiny)
        np.testing.assert_allclose(got, expected, rtol=0 if exact else 4 * eps, atol=small,
                                   err_msg=f"{name} {dtype}")
        if exact and name not in ("min", "max", "relu") and got.dtype.kind == "f":
            number = ~np.isnan(got)
            assert (np.signbit(got) == np.signbit(expected))[number].all(), (name, dtype)


def test_type_rules() -> None:
    assert SCALARS["add"].result((I32, I32)) == I32
    assert SCALARS["lt"].result((F32, F32)) == BOOL
    assert SCALARS["where"].result((BOOL, BF16, BF16)) == BF16
    for name, dtypes, message in (
            ("add", (F32, F64), "one type, not f32, f64"), ("add", (F32,), "takes 2 operands"),
            ("mul", (BF16, BF16), "cast it to f32 first"), ("exp", (I32,), "f64 or f32, not i32"),
            ("div", (I64, I64), "not i64"), ("and", (F32, F32), "takes bool or integers"),
            ("lt", (BOOL, BOOL), "not bool"), ("where", (F32, F32, F32), "bool condition")):
        with pytest.raises(ValueError, match=message):
            SCALARS[name].result(dtypes)


def test_round_bf16_is_torchs() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint64)
    ties = (np.arange(65536, dtype=np.uint64) << 16)[:, None] + [0, 1, 0x7FFF, 0x8000, 0x8001]
    x = np.concatenate([bits, ties.ravel()]).astype(np.uint32).view(np.float32)
    expected = torch.from_numpy(x).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(round_bf16(x), expected)
    assert round_bf16(np.array(np.nan, np.float32)).shape == ()


@pytest.mark.parametrize("src", DTYPES.values(), ids=str)
def test_cast_is_torchs(src: DType) -> None:
    for dst in DTYPES.values():
        x = values(src, 0)
        if src.is_float and dst.kind in "iu":
            info = np.iinfo(dst.numpy)
            wide = x.astype(np.float64)
            x = x[(wide > max(info.min, -2**31)) & (wide < min(info.max, 2**31 - 128))]
        tensor = torch.from_numpy(x).to(TORCH_TYPES[src])
        expected = tensor.to(TORCH_TYPES[dst])
        expected = (expected.float() if dst == BF16 else expected).numpy()
        got = cast(x, src, dst)
        assert got.dtype == dst.numpy
        np.testing.assert_array_equal(got, expected, err_msg=f"{src} -> {dst}")


def test_monoids() -> None:
    for monoid in MONOIDS.values():
        logic = monoid.name in ("and", "or")
        for dtype in (BOOL, I64, I8, U8) if logic else NUMBERS:
            x = values(dtype, 0)
            identity = np.full_like(x, monoid.identity(dtype))
            np.testing.assert_array_equal(SCALARS[monoid.combine].numpy(identity, x), x)
            assert monoid.reduce(x, (0,)).dtype == x.dtype
            assert monoid.reduce(x[:0], (0,)) == monoid.identity(dtype)
    with pytest.raises(VerifyError, match="no identity in bool"):
        MONOIDS["max"].identity(BOOL)
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    np.testing.assert_array_equal(MONOIDS["max"].reduce(x, (0, 2)), x.max((0, 2)))
    x[0, 0, 0] = np.nan
    assert np.isnan(MONOIDS["max"].reduce(x, (0, 1, 2)))
