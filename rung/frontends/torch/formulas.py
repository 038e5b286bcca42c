"""Entries of the table as equations: terms that operators and functions combine into ops.

    formula(lambda x: x * clamp(x + 3, 0, 6) / 6)      # the body of aten::hardswish

A term is a tensor of the result's shape in the computing type; numbers take the type of the term
beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from rung.core.errors import Unsupported
from rung.core.op import Value
from rung.core.types import DType, dtype_of
from rung.frontends.torch.calls import is_number
from rung.frontends.torch.emit import Emit, Number, Operand, compute_dtype

Body = Callable[..., Value]


@dataclass(frozen=True, eq=False)
class Term:
    """A value with the operators of its scalar functions; `e` takes the ops."""

    e: Emit
    value: Value

    def __add__(self, other: Arg) -> Term:
        return call("add", self, other)

    def __radd__(self, other: Number) -> Term:
        return call("add", other, self)

    def __sub__(self, other: Arg) -> Term:
        return call("sub", self, other)

    def __rsub__(self, other: Number) -> Term:
        return call("sub", other, self)

    def __mul__(self, other: Arg) -> Term:
        return call("mul", self, other)

    def __rmul__(self, other: Number) -> Term:
        return call("mul", other, self)

    def __truediv__(self, other: Arg) -> Term:
        return call("div", self, other)

    def __rtruediv__(self, other: Number) -> Term:
        return call("div", other, self)

    def __neg__(self) -> Term:
        return call("neg", self)

    def __abs__(self) -> Term:
        return call("abs", self)

    def __lt__(self, other: Arg) -> Term:
        return call("lt", self, other)

    def __le__(self, other: Arg) -> Term:
        return call("le", self, other)

    def __gt__(self, other: Arg) -> Term:
        return call("gt", self, other)

    def __ge__(self, other: Arg) -> Term:
        return call("ge", self, other)

    def __bool__(self) -> NoReturn:
        raise Unsupported("a choice by a number that is not known")

    def __and__(self, other: Term) -> Term:
        return call("and", self, other)

    def __or__(self, other: Term) -> Term:
        return call("or", self, other)

    def __invert__(self) -> Term:
        return call("not", self)

    @property
    def dtype(self) -> DType:
        return dtype_of(self.value.type)

    def of(self, value: Number) -> Term:
        """A number in the term's type."""
        return Term(self.e, self.e.value(value, self.dtype))

    def rounded(self, dtype: DType) -> Term:
        """The term as `dtype` holds it."""
        return Term(self.e, self.e.value(self.e.value(self.value, dtype), self.dtype))


Arg = Term | Number


def call(fn: str, *args: Arg) -> Term:
    """A scalar function; one of `args`, the last if they differ in type, is a term."""
    e = next(a.e for a in args if isinstance(a, Term))
    return Term(e, e.map(fn, *(a.value if isinstance(a, Term) else a for a in args)))


exp, expm1, log, log1p, log2, exp2 = (
    partial(call, fn) for fn in ("exp", "expm1", "log", "log1p", "log2", "exp2"))
sqrt, sin, tanh, erf, erfc, sigmoid = (
    partial(call, fn) for fn in ("sqrt", "sin", "tanh", "erf", "erfc", "sigmoid"))
floor, trunc, fmod, power, copysign = (
    partial(call, fn) for fn in ("floor", "trunc", "fmod", "pow", "copysign"))
eq, ne, fma, quotient = (partial(call, fn) for fn in ("eq", "ne", "fma", "quotient"))
maximum, minimum = partial(call, "max"), partial(call, "min")


def where(condition: Term, x: Arg, y: Arg) -> Term:
    """`x` where the condition holds, else `y`; one of them is a term."""
    kind = next(a.dtype for a in (x, y) if isinstance(a, Term))
    e = condition.e
    return call("where", condition, *(
        a if isinstance(a, Term) else Term(e, e.value(a, kind)) for a in (x, y)))


def clamp(x: Term, low: Arg, high: Arg) -> Term:
    """`x` within two numbers; a zero equal to one of them keeps its sign."""
    return minimum(high, maximum(low, x))


def isnan(x: Term) -> Term:
    return ne(x, x)


def isinf(x: Term) -> Term:
    return eq(abs(x), math.inf)


def formula(write: Callable[..., Term]) -> Body:
    """`write` of the operands in the result's type, computed there and rounded once."""
    def build(e: Emit, *args: Any) -> Value:
        return e.finish(write(*terms(e, e.dtype, args)).value)
    return build


def equation(write: Callable[..., Term], exact: bool = False) -> Body:
    """A formula in which numbers are terms as tensors are; `exact`: not rounded to bf16 first."""
    def build(e: Emit, *args: Operand) -> Value:
        values = e.expanded(e.shape, *(e.operand(a, e.dtype, exact) for a in args))
        return e.finish(write(*(Term(e, v) for v in values)).value)
    return build


def predicate(write: Callable[..., Term]) -> Body:
    """`write` of one operand in its own type, which gives a bool."""
    def build(e: Emit, x: Value) -> Value:
        return write(*terms(e, dtype_of(x.type), (x,))).value
    return build


def pair(write: Callable[..., tuple[Term, ...]]) -> Callable[..., tuple[Value, ...]]:
    """A formula with several results."""
    def build(e: Emit, *args: Any) -> tuple[Value, ...]:
        out = write(*terms(e, e.dtype, args))
        return tuple(e.finish(t.value, n) for n, t in enumerate(out))
    return build


def terms(e: Emit, dtype: DType, args: tuple[Any, ...]) -> list[Any]:
    """Tensors, and floats not known yet, as terms of the type in which `dtype` is computed; all
    else as it is."""
    return [a if not isinstance(a, Value) else
            Term(e, e.value(a, compute_dtype(dtype))) if is_number(a) else
            Term(e, e.expand(e.operand(a, dtype), e.shape)) for a in args]
