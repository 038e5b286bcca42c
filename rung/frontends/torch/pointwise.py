"""Table of the elementwise overloads that compute with any type: arithmetic, bits, casts."""

from __future__ import annotations

from collections.abc import Callable

from rung.core.errors import Unsupported
from rung.core.expr import Expr
from rung.core.op import Value
from rung.core.types import BF16, BOOL, F16, F32, dtype_of
from rung.frontends.torch.calls import is_number
from rung.frontends.torch.emit import Emit, Number, Operand, promote
from rung.frontends.torch.formulas import (
    Body,
    Term,
    copysign,
    eq,
    equation,
    floor,
    fma,
    fmod,
    formula,
    ne,
    quotient,
    trunc,
    where,
)
from rung.tensor.ir import Full, shape_of


def unary(fn: str) -> Body:
    """A function of one tensor, computed in the type of the result."""
    return lambda e, x: e.finish(e.map(fn, e.operand(x, e.dtype)))


def whole(fn: str) -> Body:
    """A rounding to whole numbers: integers are whole already."""
    return lambda e, x: unary(fn)(e, x) if e.dtype.is_float else x


def binary(fn: str, exact: bool = False, bools: str = "") -> Body:
    """A function of two operands that broadcast, computed in the type of the result.

    `exact`: the kernel reads a second operand that is a scalar without rounding it to bf16.
    `bools`: the function that does the same to truth values.
    """
    def build(e: Emit, x: Operand, y: Operand) -> Value:
        args = e.operand(x, e.dtype), e.operand(y, e.dtype, exact)
        name = bools if bools and e.dtype is BOOL else fn
        return e.finish(e.map(name, *e.expanded(e.shape, *args)))
    return build


def integers(build: Body, otherwise: Body) -> Body:
    """`build` for results of integer types, `otherwise` for floats."""
    return lambda e, *args: (otherwise if e.dtype.is_float else build)(e, *args)


# --- comparisons, truth and bits

def compare(fn: str) -> Body:
    """A comparison, in the common type of its operands; false is less than true."""
    def build(e: Emit, x: Operand, y: Operand) -> Value:
        dtype = promote(x, y)
        a, b = e.expanded(e.shape, *(e.operand(v, dtype) for v in (x, y)))
        if dtype is not BOOL or fn in ("eq", "ne"):
            return e.map(fn, a, b)
        both = {"lt": (a, b, "and"), "le": (a, b, "or"), "gt": (b, a, "and"), "ge": (b, a, "or")}
        low, high, join = both[fn]
        return e.map(join, e.map("not", low), high)
    return build


def logical(fn: str) -> Body:
    """A function of truth values; other operands are compared with zero."""
    def build(e: Emit, *args: Value) -> Value:
        return e.map(fn, *e.expanded(e.shape, *(e.value(a, BOOL) for a in args)))
    return build


def bitwise(fn: str) -> Body:
    """A function of the operands' bits, in the type of the result."""
    def build(e: Emit, *args: Operand) -> Value:
        return e.finish(e.map(fn, *e.expanded(e.shape, *(e.value(a, e.dtype) for a in args))))
    return build


# --- arithmetic

def scaled(fn: str) -> Body:
    """x + alpha * y or x - alpha * y, rounded once for floats."""
    def build(e: Emit, x: Operand, y: Operand, alpha: Number) -> Value:
        if alpha == 1:
            return binary(fn, bools="or" if fn == "add" else "")(e, x, y)
        a, b = e.expanded(e.shape, *(e.operand(v, e.dtype) for v in (x, y)))
        if not e.dtype.is_float:
            return e.finish(e.map(fn, a, e.map("mul", b, alpha)))
        less = e.map("neg", alpha) if isinstance(alpha, Value) else -alpha
        return e.finish(e.map("fma", b, e.operand(alpha if fn == "add" else less, e.dtype), a))
    return build


def true_divide(e: Emit, x: Operand, y: Operand) -> Value:
    if not e.dtype.is_float:
        raise Unsupported(f"a true quotient as {e.dtype}")
    return binary("div", exact=True)(e, x, y)


def divided(write: Callable[[Term, Term], Term]) -> Body:
    """`write` of two integers, the second of which is checked not to be 0."""
    def build(e: Emit, x: Operand, y: Operand) -> Value:
        if isinstance(y, Value):
            e.check_nonzero(e.value(y, e.dtype))
        elif y == 0:
            raise Unsupported("division by the integer 0")
        return equation(write)(e, x, y)
    return build


def apart(rest: Term, y: Term) -> Term:
    """Whether a remainder that is not 0 has another sign than the divisor."""
    return ne(rest, 0) & ne(rest < 0, y < 0)


def int_remainder(x: Term, y: Term) -> Term:
    rest = x - quotient(x, y) * y
    return where(apart(rest, y), rest + y, rest)


def int_floor(x: Term, y: Term) -> Term:
    q = quotient(x, y)
    return where(apart(x - q * y, y), q - 1, q)


def remainder(x: Term, y: Term) -> Term:
    rest = fmod(x, y)
    return where(apart(rest, y), rest + y, rest)


def floor_divide(x: Term, y: Term, near: Callable[[Term], Term] = lambda t: t) -> Term:
    """floor(x / y) as Python computes it: from the remainder, so that no rounding of the quotient
    passes a whole number. `near` rounds what each step gives."""
    rest, ratio = fmod(x, y), near(x / y)
    q = near(near(x - rest) / y)
    q = where(apart(rest, y), near(q - 1), q)
    down = floor(q)
    down = where(q - down > 0.5, near(down + 1), down)
    return where(eq(y, 0), ratio, where(eq(q, 0), copysign(x.of(0), ratio), down))


def trunc_divide(x: Term, y: Term, near: Callable[[Term], Term] = lambda t: t) -> Term:
    return trunc(near(x / y))


def stepwise(write: Callable[..., Term]) -> Body:
    """A quotient whose steps torch rounds to the type of two tensors, but not beside a scalar."""
    def build(e: Emit, x: Operand, y: Operand) -> Value:
        if isinstance(y, Value) and shape_of(y):
            return equation(lambda a, b: write(a, b, lambda t: t.rounded(e.dtype)))(e, x, y)
        return equation(write, exact=True)(e, x, y)
    return build


FLOOR = integers(divided(int_floor), stepwise(floor_divide))
TRUNC = integers(divided(quotient), stepwise(trunc_divide))
REMAINDER = integers(divided(int_remainder), equation(remainder))
FMOD = integers(divided(lambda x, y: x - quotient(x, y) * y), equation(fmod))


def divide(e: Emit, x: Operand, y: Operand, mode: str | None) -> Value:
    return {"floor": FLOOR, "trunc": TRUNC}.get(mode or "", true_divide)(e, x, y)


def power(e: Emit, x: Operand, exponent: Operand) -> Value:
    """The exponents for which torch has kernels of their own, the roots not of f16; a square
    of bf16 in another power is rounded."""
    if e.dtype is BOOL or (isinstance(exponent, Value) and is_number(exponent)):
        raise Unsupported("a power of bools, or to an exponent that is not known")
    if not e.dtype.is_float and not isinstance(exponent, Value) and (
            isinstance(exponent, Expr) or exponent < 0):
        raise Unsupported("integers to a negative power")
    if isinstance(exponent, Value | Expr) or not e.dtype.is_float:
        return binary("pow")(e, x, exponent)
    a = e.operand(x, e.dtype)
    match float(e.literal(exponent, e.dtype)):
        case 0.0:
            out = e.op(Full(1.0, dtype_of(a.type), e.shape))
        case 1.0:
            out = a
        case 2.0:
            out = e.map("mul", a, a)
        case 3.0 | -2.0 as n:
            square = e.map("mul", a, a)
            if e.dtype is BF16:
                square = e.value(e.rounded(square, BF16), F32)
            out = e.map("mul", square, a) if n > 0 else e.map("reciprocal", square)
        case 0.5 | -0.5 | -1.0 as n if e.dtype is not F16:
            out = e.map({0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}[n], a)
        case n:
            out = e.map("pow", a, e.operand(n, e.dtype))
    return e.finish(out)


def ldexp(e: Emit, x: Value, exponent: Value) -> Value:
    """x * 2^exponent, the power rounded to its own type."""
    kind = promote(2.0, exponent)
    two = e.map("pow", 2.0, e.operand(exponent, kind))
    return binary("mul")(e, x, e.rounded(two, kind))


def round_decimals(e: Emit, x: Value, decimals: int) -> Value:
    """x * 10^decimals rounded to even, and back."""
    if not e.dtype.is_float or e.dtype.bits == 16:
        raise Unsupported(f"decimals of {e.dtype}")
    ten = float(10 ** abs(decimals))
    there, back = ("mul", "div") if decimals >= 0 else ("div", "mul")
    return e.finish(e.map(back, e.map("round", e.map(there, x, ten)), ten))


def bounded(e: Emit, x: Value, low: Operand | None, high: Operand | None = None) -> Value:
    """NaN stays, and the upper bound wins; a zero equal to a number keeps its sign."""
    a = e.expand(e.operand(x, e.dtype), e.shape)
    for fn, bools, bound in (("max", "or", low), ("min", "and", high)):
        if bound is not None:
            name = bools if e.dtype is BOOL else fn
            (b,) = e.expanded(e.shape, e.operand(bound, e.dtype))
            a = e.map(name, *((b, a) if is_number(bound) else (a, b)))
    return e.finish(a)


def bounded_above(e: Emit, x: Value, high: Operand) -> Value:
    return bounded(e, x, None, high)


# --- choice and casts

def choose(e: Emit, condition: Value, x: Value, y: Value) -> Value:
    if dtype_of(condition.type) is not BOOL:
        raise Unsupported("a condition that is no bool")
    args = (e.value(condition, BOOL), *(e.value(v, e.dtype) for v in (x, y)))
    return e.map("where", *e.expanded(e.shape, *args))


def masked_fill(e: Emit, x: Value, mask: Value, value: Operand) -> Value:
    return choose(e, mask, e.value(value, e.dtype), x)


def convert(e: Emit, x: Value, dtype: object, *_: object) -> Value:
    """The user's cast: layout and memory format are restored where a result needs them."""
    if dtype is None or dtype_of(x.type) == e.dtype:
        return x
    return e.value(x, e.dtype)


def same(e: Emit, x: Value, *_: object) -> Value:
    return x


def fill(e: Emit, x: Value, value: Operand) -> Value:
    """`value` everywhere, in the type of `x`."""
    if isinstance(value, bool | int | float):
        return e.op(Full(e.literal(value, e.dtype), e.dtype, e.shape))
    return e.expand(e.value(value, e.dtype), e.shape)


def addcmul(x: Term, a: Term, b: Term, value: Number) -> Term:
    return fma(a if value == 1 else a * value, b, x)


def addcdiv(x: Term, a: Term, b: Term, value: Number) -> Term:
    return x + (a if value == 1 else a * value) / b


def lerp(x: Term, end: Term, weight: Term | Number) -> Term:
    """From whichever end is nearer."""
    away = end - x
    if isinstance(weight, Term):
        return where(abs(weight) < 0.5, fma(away, weight, x), fma(away, weight - 1, end))
    return fma(away, weight, x) if abs(weight) < 0.5 else fma(away, weight - 1, end)


SCALAR = "Tensor self, Scalar other"
TENSORS = "Tensor self, Tensor other"
BOTH = (("Tensor", TENSORS), ("Scalar", SCALAR))
SHIFTS = (*BOTH, ("Scalar_Tensor", "Scalar self, Tensor other"))
ARITHMETIC: dict[str, Body] = {
    f"add.Tensor({TENSORS}, *, Scalar alpha=1)": scaled("add"),
    f"add.Scalar({SCALAR}, Scalar alpha=1)": scaled("add"),
    f"sub.Tensor({TENSORS}, *, Scalar alpha=1)": scaled("sub"),
    f"sub.Scalar({SCALAR}, Scalar alpha=1)": scaled("sub"),
    f"rsub.Tensor({TENSORS}, *, Scalar alpha=1)":
        lambda e, x, y, alpha: scaled("sub")(e, y, x, alpha),
    f"rsub.Scalar({SCALAR}, Scalar alpha=1)":
        lambda e, x, y, alpha: scaled("sub")(e, y, x, alpha),
    **{f"mul.{kind}({args})": binary("mul", exact=True, bools="and") for kind, args in BOTH},
    **{f"div.{kind}({args})": true_divide for kind, args in BOTH},
    f"true_divide.Tensor({TENSORS})": true_divide,
    **{f"div.{kind}_mode({args}, *, str? rounding_mode)": divide for kind, args in BOTH},
    f"floor_divide({TENSORS})": FLOOR,
    f"floor_divide.Scalar({SCALAR})": FLOOR,
    **{f"remainder.{kind}({args})": REMAINDER for kind, args in SHIFTS},
    **{f"fmod.{kind}({args})": FMOD for kind, args in BOTH},
    f"maximum({TENSORS})": binary("max", bools="or"),
    f"minimum({TENSORS})": binary("min", bools="and"),
    "neg(Tensor self)": unary("neg"),
    "abs(Tensor self)": unary("abs"),
    **{f"{fn}(Tensor self)": whole(fn) for fn in ("floor", "ceil", "trunc", "round")},
    "round.decimals(Tensor self, *, int decimals)": round_decimals,
    "pow.Tensor_Scalar(Tensor self, Scalar exponent)": power,
    "pow.Tensor_Tensor(Tensor self, Tensor exponent)": power,
    "pow.Scalar(Scalar self, Tensor exponent)": power,
    f"ldexp.Tensor({TENSORS})": ldexp,
    "clamp(Tensor self, Scalar? min=None, Scalar? max=None)": bounded,
    "clamp.Tensor(Tensor self, Tensor? min=None, Tensor? max=None)": bounded,
    **{f"clamp_min{kind}": bounded for kind in (
        "(Tensor self, Scalar min)", ".Tensor(Tensor self, Tensor min)")},
    **{f"clamp_max{kind}": bounded_above for kind in (
        "(Tensor self, Scalar max)", ".Tensor(Tensor self, Tensor max)")},
    "addcmul(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1)": formula(addcmul),
    "addcdiv(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1)": formula(addcdiv),
    "lerp.Scalar(Tensor self, Tensor end, Scalar weight)": formula(lerp),
    "lerp.Tensor(Tensor self, Tensor end, Tensor weight)": formula(lerp),
}
LOGIC: dict[str, Body] = {
    **{f"{fn}.{kind}({args})": compare(fn) for fn in ("eq", "ne", "lt", "le", "gt", "ge")
       for kind, args in BOTH},
    f"logical_and({TENSORS})": logical("and"),
    f"logical_or({TENSORS})": logical("or"),
    f"logical_xor({TENSORS})": logical("xor"),
    "logical_not(Tensor self)": logical("not"),
    "bitwise_not(Tensor self)": bitwise("not"),
    **{f"bitwise_{fn}.{kind}({args})": bitwise(fn) for fn in ("and", "or", "xor")
       for kind, args in SHIFTS},
    **{f"bitwise_{way}_shift.{kind}({args})": bitwise(f"shift_{way}") for way in ("left", "right")
       for kind, args in (("Tensor", TENSORS), ("Tensor_Scalar", SCALAR), SHIFTS[2])},
    **{f"__{sign}shift__.{kind}({args})": bitwise(f"shift_{way}")
       for sign, way in (("l", "left"), ("r", "right")) for kind, args in BOTH},
}
MOVED: dict[str, Body] = {
    "where.self(Tensor condition, Tensor self, Tensor other)": choose,
    "masked_fill.Scalar(Tensor self, Tensor mask, Scalar value)": masked_fill,
    "masked_fill.Tensor(Tensor self, Tensor mask, Tensor value)": masked_fill,
    "fill.Scalar(Tensor self, Scalar value)": fill,
    "fill.Tensor(Tensor self, Tensor value)": fill,
    "copy(Tensor self, Tensor src, bool non_blocking=False)": lambda e, x, y, _: fill(e, x, y),
    "_to_copy(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, "
    "bool? pin_memory=None, bool non_blocking=False, MemoryFormat? memory_format=None)": convert,
    "clone(Tensor self, *, MemoryFormat? memory_format=None)": same,
    "lift_fresh_copy(Tensor self)": same,
}
POINTWISE: dict[str, Body] = {
    **{f"aten::{schema} -> Tensor": build for table in (ARITHMETIC, LOGIC, MOVED)
       for schema, build in table.items()},
    "prims::convert_element_type(Tensor a, ScalarType dtype) -> Tensor": convert,
    "aten::alias(Tensor(a) self) -> Tensor(a)": same,
    "aten::detach(Tensor(a) self) -> Tensor(a)": same,
}
