"""Each elementwise overload of the table against eager, on all types that it takes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from frontends.capture import declined, run, traced
from frontends.overloads import (
    BF16,
    BOOL,
    F32,
    F64,
    FLOATS,
    I8,
    I32,
    I64,
    INTEGERS,
    U8,
    Case,
    caller,
    case,
    check_overload,
    data,
    grouped,
    tame,
)

from rung.core import trace

MIXED = [((5, 8), (5, 8)), ((5, 8), (8,)), ((5, 1), (1, 8)), ((), (3, 8)), ((3, 8), ()), ((), ()),
         ((0, 4), (1, 4)), ((2, 1, 3), (4, 1))]


def pointwise() -> list[Case]:
    out = []
    for name in ("neg", "abs", "reciprocal", "relu", "floor", "ceil", "trunc", "round"):
        out += [case(name, data(s, d)) for s in ((6, 8), (), (0, 2)) for d in (F32, BF16, F64)]
    for name in ("sqrt", "exp", "exp2", "log", "rsqrt", "sigmoid", "silu", "tanh", "erf"):
        out += [case(name, data(s, d), close=4) for s in ((6, 8), (), (0, 2))
                for d in (F32, BF16, F64)]
    out += [case(n, data((4,), I64), close=4) for n in ("exp", "sqrt", "sigmoid", "rsqrt")]
    out += [case(n, data((4,), BOOL), close=4) for n in ("exp",)]
    out += [case("neg", data((5,), I64)), case("relu", data((5,), I64))]
    out += [case("gelu", tame((6, 8), d), close=16, approximate=a) for d in (F32, BF16)
            for a in ("none", "tanh")]
    out += [case("pow.Tensor_Scalar", data((6, 8), d), p, close=4 if abs(p) == 0.5 else 0)
            for d in (F32, BF16, F64) for p in (1, 2, 2.0, 3, 0.5, -0.5, -1, -1.0)]
    return out + clamps()


def clamps() -> list[Case]:
    out = [case("clamp", data((6, 8), d), lo, hi) for d in (F32, BF16)
           for lo, hi in ((-0.3, 0.7), (None, 0.1), (0.1, None), (2.0, -2.0))]
    out += [case("clamp_min", data((6, 8), d), 0.1) for d in (F32, BF16)]
    out += [case("clamp_max", data((6, 8), d), 0.1) for d in (F32, BF16)]
    return [*out, case("clamp", data((7,), I64), -1, 2)]


def arithmetic() -> list[Case]:
    out = []
    for name in ("add", "sub", "mul", "div", "maximum", "minimum"):
        target = name if name.endswith("imum") else f"{name}.Tensor"
        for a, b in MIXED:
            out += [case(target, data(a, d), data(b, d, 1)) for d in (F32, BF16)]
        pairs = [(F32, BF16), (BF16, F32), (F32, I64), (I64, BF16), (BOOL, F32), (F64, F32)]
        out += [case(target, data((5, 8), x), data((8,), y, 1)) for x, y in pairs
                if name != "sub" or x is not BOOL]
        out += [case(target, data((25, 8), x), data((), y, 1)) for x, y in
                [(BF16, F32), (BF16, F64), (F32, F64), (F32, I64), (BF16, I64)]]
        out += [case(target, data((), y, 1), data((25, 8), x)) for x, y in
                [(BF16, F32), (F32, F64), (BF16, I64)]]
    for name in ("add", "sub", "mul", "div"):
        out += [case(f"{name}.{kind}", data((25, 8), d), v) for d in (F32, BF16, F64)
                for v in (1.98765, 3, -7) for kind in ("Tensor", "Scalar")]
    out += [case("true_divide.Tensor", data((3, 4)), 2)]
    for name in ("add", "sub"):
        out += [case(f"{name}.Tensor", data((8, 8), d), data((8, 8), d, 1), alpha=a)
                for d in (F32, BF16) for a in (2, 0.3)]
        out += [case(f"{name}.Tensor", data((6, 8), I64), data((8,), I64, 1), alpha=3)]
        out += [case(f"{name}.Tensor", data((6, 8), I64), v) for v in (3, 0.5)]
    out += [case("mul.Tensor", data((3, 4), I64), data((4,), I32, 1)),
            case("div.Tensor", data((3, 4), I64), data((4,), I64, 1)),
            case("add.Tensor", data((4,), BOOL), data((4,), BOOL, 1)),
            case("mul.Tensor", data((4,), BOOL), data((4,), BOOL, 1)),
            case("add.Tensor", data((4,), U8), -3), case("add.Tensor", data((4,), I8), 1000,
                                                         lowers=False),
            case("add.Tensor", data((4,), BOOL), 2), case("rsub.Scalar", data((6, 8)), 1.5),
            case("rsub.Scalar", data((25, 8), BF16), 1.98765),
            case("rsub.Tensor", data((6, 8)), data((8,)), alpha=2)]
    return out


def logic() -> list[Case]:
    out = []
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        for a, b in MIXED:
            out += [case(f"{name}.Tensor", data(a, d), data(b, d, 1)) for d in (F32, BF16, I64)]
        out += [case(f"{name}.Scalar", data((25, 8), d), v) for d in (F32, BF16, I64)
                for v in (0.1, 1, 0.5)]
        out += [case(f"{name}.Tensor", data((6, 8), F32), data((8,), BF16)),
                case(f"{name}.Tensor", data((6, 8), I64), data((), F32))]
    out += [case("eq.Tensor", data((4,), BOOL), data((4,), BOOL, 1))]
    for name in ("logical_and", "logical_or", "logical_xor", "bitwise_and.Tensor",
                 "bitwise_or.Tensor"):
        out += [case(name, data((5, 8), BOOL), data((8,), BOOL, 1))]
    out += [case("logical_and", data((5, 8)), data((8,), I64)), case("logical_not", data((5, 8))),
            case("logical_not", data((5,), BOOL)), case("bitwise_not", data((5,), BOOL)),
            case("bitwise_not", data((5,), I64)), case("bitwise_not", data((5,), U8))]
    for d in (F32, BF16, I64, BOOL):
        out += [case("where.self", data(c, BOOL), data(a, d), data(b, d, 1)) for c, a, b in
                (((5, 8), (5, 8), (5, 8)), ((5, 1), (8,), ()), ((), (5, 8), (8,)))]
    out += [case("where.self", data((5, 8), BOOL), data((5, 8), BF16), data((8,), F32)),
            case("masked_fill.Scalar", data((5, 8), BF16), data((8,), BOOL), -math.inf),
            case("masked_fill.Tensor", data((5, 8)), data((5, 1), BOOL), torch.tensor(2.0)),
            case("threshold_backward", data((6, 8)), data((6, 8), F32, 1), 0),
            case("threshold_backward", data((6, 8), BF16), data((6, 8), BF16, 1), 0)]
    return out


def casts() -> list[Case]:
    out = [case("_to_copy", (small if b in INTEGERS else data)((6, 8), a), dtype=b)
           for a in (*FLOATS, *INTEGERS, BOOL) for b in (*FLOATS, *INTEGERS, BOOL)]
    out += [case("prims.convert_element_type.default", data((6, 8)), BF16),
            case("clone", data((3, 4))), case("clone", data((3, 4)).t()),
            case("clone", data((3, 4)).t(), memory_format=torch.contiguous_format),
            case("_to_copy", data((3, 4)).t(), dtype=BF16),
            case("alias", data((3, 4))), case("detach", data((3, 4)).t()),
            case("fill.Scalar", data((3, 4), BF16), 1.003), case("fill.Scalar", data((3,), I8), 3),
            case("fill.Tensor", data((3, 4)), torch.tensor(2.5)),
            case("copy", data((3, 4)), data((4,), I64))]
    return out



def small(shape: tuple[int, ...], dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    """Numbers that every integer type has, none of them negative."""
    x = tame(shape, dtype, seed)
    return x if dtype is BOOL else x.abs()


def divisor(dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    x = data((8,), dtype, seed)
    return torch.where(x == 0, torch.ones_like(x) * 3, x) if dtype in INTEGERS else x


def division() -> list[Case]:
    out = []
    for d in (*FLOATS, *INTEGERS):
        x, y = data((25, 8), d) * 7, divisor(d)
        out += [case(name, x, by) for name in ("remainder.Tensor", "fmod.Tensor", "floor_divide")
                for by in (y, y[2])]
        out += [case(f"{name}.Scalar", x, by) for name in ("remainder", "fmod", "floor_divide")
                for by in (3, *([-7] if d is not U8 else []), *([0.3] if d in FLOATS else []))]
        out += [case(f"div.{kind}_mode", x, by, rounding_mode=mode)
                for mode in ("floor", "trunc", *([None] if d in FLOATS else []))
                for kind, by in (("Tensor", y), ("Scalar", 3))]
        out += [case("remainder.Scalar_Tensor", 17, y)]
    return out


def bits() -> list[Case]:
    out = []
    for d in INTEGERS:
        x, y = data((6, 8), d) * 9, data((8,), d, 1) * 5
        for fn in ("and", "or", "xor"):
            out += [case(f"bitwise_{fn}.{kind}", *args) for kind, args in (
                ("Tensor", (x, y)), ("Scalar", (x, 6)), ("Scalar_Tensor", (6, y)))]
        for way in ("left", "right"):
            out += [case(f"bitwise_{way}_shift.{kind}", *args) for kind, args in (
                ("Tensor", (x, y)), ("Tensor_Scalar", (x, 2)), ("Tensor_Scalar", (x, 64)),
                ("Scalar_Tensor", (6, y)))]
            out += [case(f"__{way[0]}shift__.{kind}", x, by) for kind, by in (
                ("Tensor", y), ("Scalar", 1), ("Scalar", 7))]
    for fn in ("and", "or", "xor"):
        out += [case(f"bitwise_{fn}.Tensor", data((8,), BOOL), data((8,), BOOL, 1))]
    for fn in ("lt", "le", "gt", "ge", "ne"):
        out += [case(f"{fn}.Tensor", data((8,), BOOL), data((8,), BOOL, 1))]
    return out


def powers() -> list[Case]:
    out = []
    for d in FLOATS:
        x, y = data((25, 8), d), data((8,), d, 1)
        out += [case("pow.Tensor_Tensor", x, y, close=4), case("pow.Scalar", 2.5, y, close=4),
                *(case("pow.Tensor_Scalar", x, p, close=4) for p in (0, 4, -2, -3, 1.7)),
                case("atan2", x, y, close=4), case("hypot", x, y, close=4),
                case("ldexp.Tensor", x, data((8,), I64, 3)), case("ldexp.Tensor", x, y, close=4),
                case("copysign.Tensor", x, y), case("copysign.Scalar", x, -2.0)]
    for d in INTEGERS:
        x = data((6, 8), d)
        out += [case("pow.Tensor_Tensor", x, data((8,), d, 1)), case("pow.Tensor_Scalar", x, 5),
                case("pow.Scalar", 3, x)]
    for d in (F32, F64):
        out += [case("nextafter", data((25, 8), d), data((8,), d, 1)),
                *(case("round.decimals", data((6, 8), d) * 99, decimals=n) for n in (0, 2, -1))]
    return out


UNARY = ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin",
         "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "erf", "erfc", "sinc", "erfinv",
         "logit", "special_entr", "frac", "deg2rad", "rad2deg", "angle", "sign", "sgn", "signbit",
         "isnan", "isinf", "isposinf", "isneginf", "nan_to_num")
PAIRS = ("fmax", "fmin", "logaddexp", "logaddexp2", "heaviside", "xlogy.Tensor", "special_xlog1py")


def functions() -> list[Case]:
    out = [case(name, data((6, 8), d), close=8) for name in UNARY for d in FLOATS]
    out += [case(name, data((6,), d), close=8) for name in ("sin", "expm1", "sign", "sgn",
                                                            "signbit", "isnan", "isinf", "angle",
                                                            "isposinf", "nan_to_num", "sinc")
            for d in (*INTEGERS, BOOL)]
    out += [case("sin", torch.linspace(-9000, 90000, 48), close=8),
            case("nan_to_num", data((6, 8)), 1.0, 2.0, -2.0)]
    for d in FLOATS:
        x, y = data((25, 8), d), data((8,), d, 1)
        out += [case(name, x, y, close=8) for name in PAIRS]
        out += [case("logit", tame((6, 8), d), 0.1, close=8),
                case("logit_backward", x, y[:1], close=8),
                case("logit_backward", x, x, 0.1, close=8)]
    for name in ("xlogy.Scalar_Self", "special_xlog1py.self_scalar"):
        out += [case(name, 2, data((6, 8)), close=8), case(name, 0, data((6, 8)), close=8)]
    for name in ("xlogy.Scalar_Other", "special_xlog1py.other_scalar"):
        out += [case(name, data((6, 8)), 2.5, close=8)]
    return out


def activations() -> list[Case]:
    out = []
    for d in (F32, BF16, F64):
        x, g = data((6, 8), d), tame((6, 8), d, 5)
        y = tame((6, 8), d, 6)
        out += [case(name, x, *rest, close=8) for name, *rest in (
            ("elu",), ("elu", 1.5, 2.0, 0.5), ("celu", 1.3), ("softplus", 2, 3),
            ("threshold", 1, 5), ("leaky_relu", 0.1),
            ("hardtanh", -1, 2), ("hardswish",), ("hardsigmoid",),
            ("hardshrink", 0.6), ("softshrink", 0.6), ("log_sigmoid_forward",),
            ("_prelu_kernel", tame((1, 8), d, 2)))]
        out += [case("mish", y, close=8)]
        out += [case(f"{name}_backward", g, y, *rest, close=32) for name, *rest in (
            ("sigmoid",), ("tanh",), ("silu",), ("mish",), ("hardswish",), ("hardsigmoid",),
            ("gelu",), ("threshold", 0.5), ("softplus", 2, 3), ("leaky_relu", 0.1, False),
            ("hardtanh", -1, 2), ("hardshrink", 0.6), ("softshrink", 0.6),
            ("log_sigmoid", torch.exp(-y.abs())), ("_prelu_kernel", tame((1, 8), d, 2)))]
        out += [case("gelu_backward", g, y, close=256, approximate="tanh")]
        out += [case("elu_backward", g, 1.5, 2.0, 0.5, is_result, y, close=32)
                for is_result in (False, True)]
        out += [case(name, x, tame((6, 1), d, 2), tame((8,), d, 3), value=v, close=4)
                for name in ("addcmul", "addcdiv") for v in (1, 0.5)]
        out += [case("lerp.Scalar", y, g, w, close=4) for w in (0.3, 0.8)]
        out += [case("lerp.Tensor", y, g, tame((8,), d, 4), close=4)]
    out += [case(name, data((8,), BOOL), data((8,), BOOL, 1)) for name in ("fmax", "fmin")]
    return [*out, case("addcmul", data((5,), I64), data((5,), I64), data((5,), I64), value=2)]


def bounds() -> list[Case]:
    out = []
    for d in (*FLOATS, *INTEGERS):
        x, low, high = data((25, 8), d), data((8,), d, 1), data((25, 1), d, 2)
        out += [case("clamp.Tensor", x, low, high), case("clamp.Tensor", x, None, high),
                case("clamp_min.Tensor", x, low), case("clamp_max.Tensor", x, high)]
    return out


CASES = [*pointwise(), *arithmetic(), *logic(), *casts(), *division(), *bits(), *powers(),
         *functions(), *activations(), *bounds()]


@pytest.mark.parametrize("cases", grouped(CASES))
def test_overload(cases: list[Case]) -> None:
    check_overload(cases)


ZERO: list[tuple[str, Any]] = [
    (name, dict(rounding_mode="floor") if name.startswith("div") else {})
    for name in ("div.Tensor_mode", "remainder.Tensor", "fmod.Tensor", "floor_divide")]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize(("name", "named"), ZERO)
def test_an_integer_divided_by_zero_is_the_error_of_eager(name: str, named: Any,
                                                          dtype: torch.dtype) -> None:
    fn, tensors = caller(case(name, data((4,), dtype), torch.tensor([1, 0, 2, 3], dtype=dtype),
                              **named))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        fn(*tensors)
    with trace.listen() as events, pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run(traced(fn, tensors), tensors)
    assert declined(events) == []
