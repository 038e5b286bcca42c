"""Table of the elementwise overloads."""

from __future__ import annotations

from collections.abc import Callable

from rung.core.errors import Unsupported
from rung.core.op import Value
from rung.core.ops import Cast
from rung.core.types import BOOL, dtype_of
from rung.frontends.torch.emit import Emit, Number, Operand, promote

Body = Callable[..., Value]


def unary(fn: str) -> Body:
    """A function of one tensor, computed in the type of the result."""
    return lambda e, x: e.finish(e.map(fn, e.operand(x, e.dtype)))


def binary(fn: str, exact: bool = False) -> Body:
    """A function of two operands that broadcast, computed in the type of the result.

    `exact`: the kernel reads a second operand that is a scalar without rounding it to bf16.
    """
    def build(e: Emit, x: Operand, y: Operand) -> Value:
        args = e.operand(x, e.dtype), e.operand(y, e.dtype, exact)
        return e.finish(e.map(fn, *e.expanded(e.shape, *args)))
    return build


def compare(fn: str) -> Body:
    """A comparison, in the common type of its operands."""
    def build(e: Emit, x: Operand, y: Operand) -> Value:
        dtype = promote(x, y)
        if dtype is BOOL and fn not in ("eq", "ne"):
            raise Unsupported(f"{fn} of bools")
        return e.map(fn, *e.expanded(e.shape, *(e.operand(a, dtype) for a in (x, y))))
    return build


def logical(fn: str) -> Body:
    """A function of truth values; other operands are compared with zero."""
    def build(e: Emit, *args: Value) -> Value:
        return e.map(fn, *e.expanded(e.shape, *(e.value(a, BOOL) for a in args)))
    return build


def bitwise(fn: str) -> Body:
    def build(e: Emit, *args: Operand) -> Value:
        if e.dtype is not BOOL:
            raise Unsupported(f"bits of {e.dtype}")
        return logical(fn)(e, *args)
    return build


def numbers(build: Body) -> Body:
    """`build` for results other than bools."""
    def checked(e: Emit, *args: Operand) -> Value:
        if e.dtype is BOOL:
            raise Unsupported("arithmetic of bools")
        return build(e, *args)
    return checked


def scaled(fn: str) -> Body:
    """x + alpha * y or x - alpha * y, rounded once for floats."""
    def build(e: Emit, x: Operand, y: Operand, alpha: Number) -> Value:
        if alpha == 1:
            return binary(fn)(e, x, y)
        a, b = e.expanded(e.shape, *(e.operand(v, e.dtype) for v in (x, y)))
        if not e.dtype.is_float:
            return e.finish(e.map(fn, a, e.map("mul", b, alpha)))
        return e.finish(e.map("fma", b, e.operand(alpha if fn == "add" else -alpha, e.dtype), a))
    return numbers(build)


def floats(build: Body) -> Body:
    """`build` for results of float types only."""
    def checked(e: Emit, *args: Operand) -> Value:
        if not e.dtype.is_float:
            raise Unsupported(f"integer result {e.dtype}")
        return build(e, *args)
    return checked


def power(e: Emit, x: Value, exponent: float) -> Value:
    """The exponents for which torch has kernels of their own; a cube of bf16 rounds twice."""
    a = e.operand(x, e.dtype)
    match float(exponent):
        case 1.0:
            out = a
        case 2.0:
            out = e.map("mul", a, a)
        case 3.0:
            square = e.value(e.rounded(e.map("mul", a, a), e.dtype), dtype_of(a.type))
            out = e.map("mul", square, a)
        case 0.5 | -0.5 | -1.0 as n:
            out = e.map({0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}[n], a)
        case n:
            raise Unsupported(f"exponent {n}")
    return e.finish(out)


def gelu(e: Emit, x: Value, approximate: str) -> Value:
    """x Phi(x), Phi by erf, or by tanh(sqrt(2/pi) (x + 0.044715 x^3))."""
    a = e.operand(x, e.dtype)
    half = e.map("mul", a, 0.5)
    if approximate == "none":
        inner = e.map("erf", e.map("mul", a, 0.7071067811865476))
    else:
        cube = e.map("mul", e.map("mul", a, a), a)
        polynomial = e.map("add", a, e.map("mul", cube, 0.044715))
        inner = e.map("tanh", e.map("mul", polynomial, 0.7978845608028654))
    return e.finish(e.map("mul", half, e.map("add", inner, 1)))


def clamp(e: Emit, x: Value, low: Operand | None, high: Operand | None = None) -> Value:
    """NaN stays, and the upper bound wins."""
    a = e.operand(x, e.dtype)
    if low is not None:
        a = e.map("max", a, e.operand(low, e.dtype))
    if high is not None:
        a = e.map("min", a, e.operand(high, e.dtype))
    return e.finish(a)


def clamp_max(e: Emit, x: Value, high: Operand) -> Value:
    return clamp(e, x, None, high)


def where(e: Emit, condition: Value, x: Value, y: Value) -> Value:
    if dtype_of(condition.type) is not BOOL:
        raise Unsupported("a condition that is no bool")
    args = (e.value(condition, BOOL), *(e.value(v, e.dtype) for v in (x, y)))
    return e.map("where", *e.expanded(e.shape, *args))


def masked_fill(e: Emit, x: Value, mask: Value, value: Operand) -> Value:
    return where(e, mask, e.value(value, e.dtype), x)


def threshold_backward(e: Emit, grad: Value, x: Value, threshold: Operand) -> Value:
    """The gradient where x > threshold or is NaN."""
    small = compare("le")(e, x, threshold)
    return e.map("where", *e.expanded(e.shape, small, e.value(0, e.dtype), grad))


def convert(e: Emit, x: Value, dtype: object, *_: object) -> Value:
    """The user's cast: layout and memory format are restored where a result needs them."""
    if dtype is None or dtype_of(x.type) == e.dtype:
        return x
    return e.op(Cast(x, e.dtype))


def same(e: Emit, x: Value, *_: object) -> Value:
    return x


POINTWISE: dict[str, Body] = {
    "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor": scaled("add"),
    "aten::add.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor": scaled("add"),
    "aten::sub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor": scaled("sub"),
    "aten::sub.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor": scaled("sub"),
    "aten::rsub.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor":
        lambda e, x, y, alpha: scaled("sub")(e, y, x, alpha),
    "aten::mul.Tensor(Tensor self, Tensor other) -> Tensor": numbers(binary("mul", exact=True)),
    "aten::mul.Scalar(Tensor self, Scalar other) -> Tensor": numbers(binary("mul", exact=True)),
    "aten::div.Tensor(Tensor self, Tensor other) -> Tensor": floats(binary("div", exact=True)),
    "aten::div.Scalar(Tensor self, Scalar other) -> Tensor": floats(binary("div", exact=True)),
    "aten::true_divide.Tensor(Tensor self, Tensor other) -> Tensor":
        floats(binary("div", exact=True)),
    "aten::maximum(Tensor self, Tensor other) -> Tensor": binary("max"),
    "aten::minimum(Tensor self, Tensor other) -> Tensor": binary("min"),
    "aten::neg(Tensor self) -> Tensor": unary("neg"),
    "aten::abs(Tensor self) -> Tensor": floats(unary("abs")),
    "aten::exp(Tensor self) -> Tensor": unary("exp"),
    "aten::exp2(Tensor self) -> Tensor": unary("exp2"),
    "aten::log(Tensor self) -> Tensor": unary("log"),
    "aten::sqrt(Tensor self) -> Tensor": unary("sqrt"),
    "aten::rsqrt(Tensor self) -> Tensor": unary("rsqrt"),
    "aten::reciprocal(Tensor self) -> Tensor": unary("reciprocal"),
    "aten::sigmoid(Tensor self) -> Tensor": unary("sigmoid"),
    "aten::silu(Tensor self) -> Tensor": unary("silu"),
    "aten::tanh(Tensor self) -> Tensor": unary("tanh"),
    "aten::erf(Tensor self) -> Tensor": unary("erf"),
    "aten::relu(Tensor self) -> Tensor": unary("relu"),
    "aten::floor(Tensor self) -> Tensor": floats(unary("floor")),
    "aten::ceil(Tensor self) -> Tensor": floats(unary("ceil")),
    "aten::trunc(Tensor self) -> Tensor": floats(unary("trunc")),
    "aten::round(Tensor self) -> Tensor": floats(unary("round")),
    'aten::gelu(Tensor self, *, str approximate="none") -> Tensor': gelu,
    "aten::pow.Tensor_Scalar(Tensor self, Scalar exponent) -> Tensor": floats(power),
    "aten::clamp(Tensor self, Scalar? min=None, Scalar? max=None) -> Tensor": clamp,
    "aten::clamp_min(Tensor self, Scalar min) -> Tensor": clamp,
    "aten::clamp_max(Tensor self, Scalar max) -> Tensor": clamp_max,
    "aten::logical_and(Tensor self, Tensor other) -> Tensor": logical("and"),
    "aten::logical_or(Tensor self, Tensor other) -> Tensor": logical("or"),
    "aten::logical_xor(Tensor self, Tensor other) -> Tensor": logical("ne"),
    "aten::logical_not(Tensor self) -> Tensor": logical("not"),
    "aten::bitwise_and.Tensor(Tensor self, Tensor other) -> Tensor": bitwise("and"),
    "aten::bitwise_or.Tensor(Tensor self, Tensor other) -> Tensor": bitwise("or"),
    "aten::bitwise_not(Tensor self) -> Tensor": bitwise("not"),
    "aten::where.self(Tensor condition, Tensor self, Tensor other) -> Tensor": where,
    "aten::masked_fill.Scalar(Tensor self, Tensor mask, Scalar value) -> Tensor": masked_fill,
    "aten::masked_fill.Tensor(Tensor self, Tensor mask, Tensor value) -> Tensor": masked_fill,
    "aten::threshold_backward(Tensor grad_output, Tensor self, Scalar threshold) -> Tensor":
        threshold_backward,
    "aten::_to_copy(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, "
    "Device? device=None, bool? pin_memory=None, bool non_blocking=False, "
    "MemoryFormat? memory_format=None) -> Tensor": convert,
    "prims::convert_element_type(Tensor a, ScalarType dtype) -> Tensor": convert,
    "aten::clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor": same,
    "aten::lift_fresh_copy(Tensor self) -> Tensor": same,
    "aten::alias(Tensor(a) self) -> Tensor(a)": same,
    "aten::detach(Tensor(a) self) -> Tensor(a)": same,
    **{f"aten::{fn}.{kind}(Tensor self, {kind} other) -> Tensor": compare(fn)
       for fn in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Tensor", "Scalar")},
}
