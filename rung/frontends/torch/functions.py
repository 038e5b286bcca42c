"""Table of the mathematical functions."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from rung.core.errors import Unsupported
from rung.core.op import Value
from rung.core.types import BF16, BOOL, F64, DType, dtype_of
from rung.frontends.torch.emit import Emit
from rung.frontends.torch.formulas import (
    Body,
    Term,
    copysign,
    eq,
    equation,
    erf,
    erfc,
    exp,
    exp2,
    formula,
    isinf,
    isnan,
    log,
    log1p,
    maximum,
    predicate,
    sin,
    sqrt,
    terms,
    trunc,
    where,
)
from rung.frontends.torch.pointwise import binary, unary
from rung.tensor.ir import Full

# --- signs and tests

def sign(e: Emit, x: Value) -> Value:
    """(x > 0) - (x < 0)"""
    if e.dtype is BOOL:
        return x
    a = e.operand(x, e.dtype)
    above, below = (e.value(e.map(fn, a, 0), dtype_of(a.type)) for fn in ("gt", "lt"))
    return e.finish(e.map("sub", above, below))


def signbit(x: Term) -> Term:
    return copysign(x.of(1), x) < 0 if x.dtype.is_float else x < 0


def of_floats(test: Callable[[Term], Term]) -> Body:
    """A test that integers never pass."""
    def build(e: Emit, x: Value) -> Value:
        if dtype_of(x.type).is_float:
            return predicate(test)(e, x)
        return e.op(Full(False, BOOL, e.shape))
    return build


def nan_to_num(e: Emit, x: Value, nan: float | None, above: float | None,
               below: float | None) -> Value:
    """By default NaN becomes 0, and an infinity the largest number of its sign."""
    if not e.dtype.is_float:
        return x
    top = largest(e.dtype)
    a = Term(e, e.operand(x, e.dtype))
    high, low, zero = (Term(e, e.operand(default if given is None else given, e.dtype))
                       for given, default in ((above, top), (below, -top), (nan, 0.0)))
    a = where(eq(a, math.inf), high, where(eq(a, -math.inf), low, where(isnan(a), zero, a)))
    return e.finish(a.value)


def largest(dtype: DType) -> float:
    """The largest finite number of a float type."""
    return (2 - 2.0**-7) * 2.0**127 if dtype is BF16 else float(np.finfo(dtype.numpy).max)


def heaviside(e: Emit, x: Value, at_zero: Value) -> Value:
    """0 below 0, 1 above, `at_zero` at it."""
    if e.dtype is BOOL:
        raise Unsupported("a step of bools")
    a, b = (Term(e, e.expand(e.operand(v, e.dtype), e.shape)) for v in (x, at_zero))
    above = Term(e, e.value((a > 0).value, a.dtype))
    return e.finish(where(eq(a, 0), b, above).value)


def fmax(x: Term, y: Term) -> Term:
    """The larger one; of a number and NaN the number."""
    return where((x >= y) | isnan(y), x, y)


def fmin(x: Term, y: Term) -> Term:
    return where((x <= y) | isnan(y), x, y)


def of_numbers(write: Callable[[Term, Term], Term], otherwise: Body) -> Body:
    """A formula for floats, which alone have NaNs."""
    return lambda e, x, y: (formula(write) if e.dtype.is_float else otherwise)(e, x, y)


def nextafter(e: Emit, x: Value, y: Value) -> Value:
    if e.dtype.bits == 16:
        raise Unsupported(f"the neighbour of a {e.dtype}")
    return binary("nextafter")(e, x, y)


# --- logarithms

def logaddexp(x: Term, y: Term) -> Term:
    """log(e^x + e^y)"""
    far = log1p(exp(-abs(x - y)))
    return where(isinf(x) & eq(x, y), x, maximum(x, y) + far)


def logaddexp2(x: Term, y: Term) -> Term:
    """log2(2^x + 2^y)"""
    far = log1p(exp2(-abs(x - y))) * (1 / math.log(2))
    return where(isinf(x) & eq(x, y), x, maximum(x, y) + far)


def xlogy(x: Term, y: Term) -> Term:
    return where(isnan(y), y, where(eq(x, 0), 0, x * log(y)))


def xlog1py(x: Term, y: Term) -> Term:
    return where(isnan(y), y, where(eq(x, 0), 0, x * log1p(y)))


def entropy(x: Term) -> Term:
    """-x log x; 0 at 0, and -inf below it."""
    return where(x > 0, -x * log(x), where(eq(x, 0), 0, where(x < 0, -math.inf, x)))


def logit(e: Emit, x: Value, eps: float | None) -> Value:
    """The log of the odds; torch rounds each step, and the bounds, to the type of the tensor."""
    z, = terms(e, e.dtype, (x,))
    if eps is not None and eps >= 0:
        low, high = within(z, eps, e.dtype)
        z = where(z < low, low, where(z > high, high, z))
    return e.finish(log((z / (1 - z).rounded(e.dtype)).rounded(e.dtype)).value)


def logit_backward(e: Emit, grad: Value, x: Value, eps: float | None) -> Value:
    g, z = terms(e, e.dtype, (grad, x))
    slope = g / (z * (1 - z).rounded(e.dtype)).rounded(e.dtype)
    if eps is None or eps < 0:
        return e.finish(where((z < 0) | (z > 1), math.nan, slope).value)
    low, high = within(z, eps, e.dtype)
    return e.finish(where((z >= low) & (z <= high), slope, 0).value)


def within(x: Term, eps: float, dtype: DType) -> tuple[Term, Term]:
    """`eps` and 1 - `eps`, as `dtype` holds them."""
    low = x.of(eps).rounded(dtype)
    return low, (1 - low).rounded(dtype)


# --- others

def sinc(x: Term) -> Term:
    t = x * math.pi
    return where(eq(x, 0), 1, sin(t) / t)


def angle(x: Term) -> Term:
    return where(isnan(x), x, where(x < 0, math.pi, x.of(0)))


# Rational approximations of erfinv by G. Pavlis (1996), from the highest power down.
NEAR = (-0.140543331, 0.914624893, -1.645349621, 0.886226899)
NEAR_BELOW = (0.012229801, -0.329097515, 1.442710462, -2.118377725, 1.0)
FAR, FAR_BELOW = (1.641345311, 3.429567803, -1.624906493, -1.970840454), (1.6370678, 3.5438892, 1.0)


def polynomial(x: Term, coefficients: tuple[float, ...]) -> Term:
    out = x * coefficients[0] + coefficients[1]
    for c in coefficients[2:]:
        out = out * x + c
    return out


def erfinv(y: Term) -> Term:
    """A rational approximation, improved by Newton's steps; near 1, on what is left to 1."""
    a = abs(y)
    square = a * a
    near = a * polynomial(square, NEAR) / polynomial(square, NEAR_BELOW)
    z = sqrt(-log((1 - a) / 2))
    x = where(a <= 0.7, near, polynomial(z, FAR) / polynomial(z, FAR_BELOW))
    for _ in range(3 if a.dtype is F64 else 2):
        off = where(a <= 0.7, erf(x) - a, 1 - a - erfc(x))
        x = x - off / (exp(-x * x) * (2 / math.sqrt(math.pi)))
    return where(a < 1, copysign(x, y), where(eq(a, 1), y * math.inf, math.nan * y))


FORMULAS: dict[str, Callable[..., Term]] = {
    "frac(Tensor self)": lambda x: x - trunc(x),
    "deg2rad(Tensor self)": lambda x: x * (math.pi / 180),
    "rad2deg(Tensor self)": lambda x: x * (180 / math.pi),
    "logaddexp(Tensor self, Tensor other)": logaddexp,
    "logaddexp2(Tensor self, Tensor other)": logaddexp2,
    "special_entr(Tensor self)": entropy,
    "sinc(Tensor self)": sinc,
    "erfinv(Tensor self)": erfinv,
}
BUILDS: dict[str, Body] = {
    **{f"{fn}(Tensor self)": unary(fn) for fn in (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal",
        "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh",
        "erf", "erfc")},
    **{f"{fn}(Tensor self, Tensor other)": binary(fn) for fn in ("atan2", "hypot")},
    **{schema: formula(write) for schema, write in FORMULAS.items()},
    **{f"{fn}(Tensor self)": sign for fn in ("sign", "sgn")},
    "logit(Tensor self, float? eps=None)": logit,
    "logit_backward(Tensor grad_output, Tensor self, float? eps=None)": logit_backward,
    "signbit(Tensor self)": lambda e, x: (
        of_floats(signbit) if dtype_of(x.type) is BOOL else predicate(signbit))(e, x),
    "isnan(Tensor self)": of_floats(isnan),
    "isinf(Tensor self)": of_floats(isinf),
    "isposinf(Tensor self)": of_floats(lambda x: eq(x, math.inf)),
    "isneginf(Tensor self)": of_floats(lambda x: eq(x, -math.inf)),
    "nan_to_num(Tensor self, float? nan=None, float? posinf=None, float? neginf=None)": nan_to_num,
    "fmax(Tensor self, Tensor other)": of_numbers(fmax, binary("max", bools="or")),
    "fmin(Tensor self, Tensor other)": of_numbers(fmin, binary("min", bools="and")),
    "heaviside(Tensor self, Tensor values)": heaviside,
    "nextafter(Tensor self, Tensor other)": nextafter,
    "copysign.Tensor(Tensor self, Tensor other)": binary("copysign"),
    "copysign.Scalar(Tensor self, Scalar other)": binary("copysign"),
    "angle(Tensor self)": formula(angle),
    "xlogy.Tensor(Tensor self, Tensor other)": equation(xlogy),
    "xlogy.Scalar_Self(Scalar self, Tensor other)": equation(xlogy),
    "xlogy.Scalar_Other(Tensor self, Scalar other)": equation(xlogy),
    "special_xlog1py(Tensor self, Tensor other)": equation(xlog1py),
    "special_xlog1py.self_scalar(Scalar self, Tensor other)": equation(xlog1py),
    "special_xlog1py.other_scalar(Tensor self, Scalar other)": equation(xlog1py),
}
FUNCTIONS: dict[str, Body] = {
    f"aten::{schema} -> Tensor": build for schema, build in BUILDS.items()}
