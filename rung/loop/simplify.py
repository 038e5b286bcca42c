"""Exact rules inside one kernel, each under its equation.

    y[i] = round_bf16(f32(round_bf16(x[i] * 1.0)) + b[i])   ->   y[i] = round_bf16(x[i] + b[i])

`precision="default"` also deletes roundings to bf16 that eager does only between ops, except before
discontinuous functions (`jumps`); "eager" keeps them. Equal ops are merged, dead code dropped. A
rule gets an op with simplified operands and gives an equal value, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from rung.core.expr import Expr
from rung.core.op import Func, Op, Value
from rung.core.ops import Cast, Const, IndexValue, Map
from rung.core.scalar import SCALARS, cast
from rung.core.types import BF16, BOOL, F32, I64, DType, axes_of, dtype_of
from rung.loop.emit import Copier, Declined, Emitter
from rung.loop.ir import Fold, extents_of

ROUNDINGS = ("default", "eager")
"""Functions that a last bit takes over an edge: there a value is rounded as in eager."""
_HELD: tuple[DType, ...] = (F32, I64, BOOL)  # types whose constants print without their name


def simplify(func: Func, precision: str = "default") -> Func:
    """`func` after one sweep of the rules; pure, with the same text if none applies.

    A kernel is unchanged if a fold's inputs would no longer vary over its axis.
    """
    if precision not in ROUNDINGS:
        raise ValueError(f"precision is one of {', '.join(ROUNDINGS)}, not {precision!r}")
    return swept(func, (*RULES, drop_rounding) if precision == "default" else RULES)


def swept(func: Func, rules: tuple[Rule, ...]) -> Func:
    """`func` after one sweep of some rules."""
    buffers = (*func.params, *func.outs)
    out = Emitter(extents_of(func), [v.name for v in buffers])
    sweep = Sweep(out, values={v: v for v in buffers}, rules=rules)
    sweep.uses, sweep.sharp = _uses(func), _at_jumps(func)
    try:
        sweep.ops(func.body.ops)
    except Declined:
        return func
    return out.kernel(func.name, func.params, func.outs)


@dataclass
class Sweep(Copier):
    """Copies a kernel op by op; the first rule that applies to an op replaces it."""

    rules: tuple[Rule, ...] = ()
    made: dict[Value, Op] = field(default_factory=dict)
    uses: dict[Value, int] = field(default_factory=dict)
    sharp: set[Value] = field(default_factory=set)  # see `_at_jumps`

    def op(self, op: Op) -> tuple[Value, ...]:
        new = self._moved(op)
        if len(op.results) == 1:
            for rule in self.rules:
                value = rule(self, new)
                if value is not None:
                    self.values[op.result] = value
                    return (value,)
        results = super().op(op)
        self.made.update(dict.fromkeys(results, new))
        return results

    def make(self, op: Op) -> Value:
        """Append an op for a rule."""
        value = self.out.one(op)
        self.made[value] = op
        return value

    def number(self, value: Value) -> float | int | bool | None:
        op = self.made.get(value)
        return op.value if isinstance(op, Const) else None


Rule = Callable[[Sweep, Op], Value | None]


def _uses(func: Func) -> dict[Value, int]:
    counts: dict[Value, int] = {}
    for op in func.body.ops:
        for v in op.operands():
            counts[v] = counts.get(v, 0) + 1
    return counts


def _at_jumps(func: Func) -> set[Value]:
    """The operands of discontinuous functions and of casts to integers."""
    return {v for op in func.body.ops if (isinstance(op, Map) and SCALARS[op.fn].jumps) or (
        isinstance(op, Cast) and not op.dtype.is_float) for v in op.operands()}


# f32(round_bf16(v)) -> v            only where a rounding is eager's alone: changes the last bits
# (one to f16 stays: it also overflows, where bf16 has all of f32's exponents)
def drop_rounding(s: Sweep, op: Op) -> Value | None:
    match op:
        case Cast(results=results) if s.sharp.intersection(results):
            return None
        case Cast(x, dtype):
            inner = s.made.get(x)
            if isinstance(inner, Cast) and inner.implicit and inner.dtype is BF16 and dtype_of(
                    inner.x.type) == dtype:
                return inner.x
    return None


# T(round_T(x)) -> T(x),   T(x) -> x if x is T,   wide(where(c, a, b)) -> where(c, wide(a), wide(b))
def of_cast(s: Sweep, op: Op) -> Value | None:
    if not isinstance(op, Cast) or op.implicit:
        return None
    if dtype_of(op.x.type) == op.dtype:
        inner = s.made.get(op.x)
        return _cast(s, inner.x, op.dtype) if isinstance(inner, Cast) and inner.implicit else op.x
    match s.made.get(op.x):
        case Map("where", (c, a, b)) if op.dtype.bits > dtype_of(op.x.type).bits:
            both = [_cast(s, v, op.dtype) for v in (a, b)]
            return s.make(Map("where", (c, *both)))
    return None


def _cast(s: Sweep, value: Value, dtype: DType) -> Value:
    op = Cast(value, dtype)
    found = next((v for rule in s.rules if (v := rule(s, op)) is not None), None)
    return found if found is not None else s.make(op)


# index(3) -> 3
def constant_index(s: Sweep, op: Op) -> Value | None:
    match op:
        case IndexValue(e) if e.const_value is not None:
            return s.make(Const(e.const_value, I64))
    return None


# x * 1 -> x,  x / 1 -> x,  x - 0 -> x,  x + -0.0 -> x,  n + 0 -> n (integers)
def identity_operand(s: Sweep, op: Op) -> Value | None:
    match op:
        case Map("mul" | "div" | "sub" | "add" as fn, (x, y)):
            k = s.number(y)
            if fn in ("mul", "div") and k == 1 and k is not None:
                return x
            if (fn == "sub" and str(k) in ("0", "0.0")) or (fn == "add" and _is_zero(s, y)):
                return x
            if (fn, s.number(x)) == ("mul", 1) or (fn == "add" and _is_zero(s, x)):
                return y
    return None


def _is_zero(s: Sweep, x: Value) -> bool:
    """Whether x is the identity element of addition: an integer 0, or -0.0."""
    k = s.number(x)
    return k == 0 and k is not None and (not dtype_of(x.type).is_float or str(k) == "-0.0")


# where(c, x, x) -> x,  where(c, where(c, a, b), d) -> where(c, a, d), and in the other arm
def of_where(s: Sweep, op: Op) -> Value | None:
    match op:
        case Map("where", (c, a, b)):
            if a is b:
                return a
            yes, no = _arm(s, a, c, 1), _arm(s, b, c, 2)
            if yes is not a or no is not b:
                return s.make(Map("where", (c, yes, no)))
    return None


def _arm(s: Sweep, x: Value, c: Value, n: int) -> Value:
    op = s.made.get(x)
    return op.args[n] if isinstance(op, Map) and op.fn == "where" and op.args[0] is c else x


# max(x, x) -> x  (min, and, or),   neg(neg(x)) -> x
def idempotent(s: Sweep, op: Op) -> Value | None:
    match op:
        case Map("max" | "min" | "and" | "or", (x, y)) if x is y:
            return x
        case Map("neg", (x,)):
            inner = s.made.get(x)
            if isinstance(inner, Map) and inner.fn == "neg":
                return inner.args[0]
    return None


# f(2.0, 3.0) -> the number
def folded_constant(s: Sweep, op: Op) -> Value | None:
    if not isinstance(op, Map | Cast) or not all(
            isinstance(s.made.get(v), Const) for v in op.operands()):
        return None
    args = [s.made[v] for v in op.operands()]
    dtypes = [a.dtype for a in args if isinstance(a, Const)]
    numbers = [np.asarray(a.value, a.dtype.numpy) for a in args if isinstance(a, Const)]
    if isinstance(op, Cast):
        return s.make(Const(cast(numbers[0], dtypes[0], op.dtype).item(), op.dtype))
    if not all(d in _HELD for d in dtypes):
        return None
    result = SCALARS[op.fn].numpy(*numbers)
    dtype = SCALARS[op.fn].result(tuple(dtypes))
    return s.make(Const(result.astype(dtype.numpy).item(), dtype))


# fold add (a * b) over k -> contract add mul a, b over k     if a and b vary over different axes
def written_out(s: Sweep, op: Op) -> Value | None:
    match op:
        case Fold("add", (x,), axis, product="", prefix=False) if op.acc.is_float:
            made = s.made.get(x)
            if not (isinstance(made, Map) and made.fn == "mul"):
                return None
            a, b = made.args
            left, right = set(axes_of(a.type)), set(axes_of(b.type))
            if axis in left & right and left - right and right - left:
                return s.make(replace(op, args=(a, b), product="mul", results=()))
    return None


# fold add where(index(j) == l, a[j], 0) over j < n -> where(0 <= l < n, a[l], 0) + 0.0
# (each other term is 0.0, whatever a[j] is; so is the sum where a[l] is -0.0)
def one_term(s: Sweep, op: Op) -> Value | None:
    match op:
        case Fold("add", (x,), axis, extent, product="", prefix=False):
            made = s.made.get(x)
            if not (isinstance(made, Map) and made.fn == "where"):
                return None
            hit, value, rest = made.args
            found = label_at(s, s.made.get(hit))
            if found is None or found[0] != axis or not _is_plus_zero(s, rest):
                return None
            inside, label = is_inside(s, found[1], extent), found[1]
            at = s.make(Map("where", (inside, label, s.make(Const(0, I64)))))
            term = _element(s, value, axis, at)
            if term is None:
                return None
            term = s.make(Map("where", (inside, term, rest)))
            return s.make(Map("add", (term, rest))) if op.acc.is_float else term
    return None


def label_at(s: Sweep, op: Op | None) -> tuple[str, Value] | None:
    """An axis and the number that its places are compared with, which does not vary over it."""
    if isinstance(op, Map) and op.fn == "eq" and dtype_of(op.args[0].type) is I64:
        for place, label in (op.args, op.args[::-1]):
            index = s.made.get(place)
            if isinstance(index, IndexValue) and str(index.expr) in s.out.axes and (
                    str(index.expr) not in axes_of(label.type)):
                return str(index.expr), label
    return None


def is_inside(s: Sweep, label: Value, extent: Expr) -> Value:
    """Whether a number is a place of an axis."""
    low = s.make(Map("ge", (label, s.make(Const(0, I64)))))
    return s.make(Map("and", (low, s.make(Map("lt", (label, s.make(IndexValue(extent))))))))


def _is_plus_zero(s: Sweep, x: Value) -> bool:
    made = s.made.get(x)
    k = s.number(made.x if isinstance(made, Cast) else x)
    return k is not None and str(k) in ("0", "0.0")


def _element(s: Sweep, value: Value, axis: str, at: Value) -> Value | None:
    """`value` where `axis` is the number `at`; None where that is no read of one element."""
    if axis not in axes_of(value.type):
        return value
    wanted, ops = {value}, list[Op]()
    for op in reversed(s.out.ops):
        if wanted.intersection(op.results) and axis in op.nest:
            wanted.update(op.operands())
            ops.insert(0, op)
    if any(isinstance(op, Fold) for op in ops):
        return None
    copier = Copier(s.out, {axis: at}, {v: v for op in s.out.ops for v in op.operands()})
    try:
        copier.ops(ops)
    except Declined:
        return None
    return copier.values[value]


RULES: tuple[Rule, ...] = (of_cast, constant_index, identity_operand, of_where, idempotent,
                           folded_constant, written_out, one_term)
