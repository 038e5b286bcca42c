"""Strength reduction: dear functions by cheaper ones that round otherwise.

    s = fold add e[i,j] over j           s = fold add e[i,j] over j
    y[i,j] = e / s                  ->   r = reciprocal(s)
                                         y[i,j] = e * r

The machine's `forms` say what is cheaper. Changes last bits: no pass for the precision "eager".
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import inf, isfinite

import numpy as np

from rung.core.expr import Expr, sym
from rung.core.op import Func, Op, Value, made_by, uses
from rung.core.ops import Cast, Const, IndexValue, Map
from rung.core.types import BF16, F16, F32, I32, axes_of, dtype_of
from rung.loop.carriers import PEAK, is_weight
from rung.loop.ir import Fold, Store, extents_of, free_axes
from rung.loop.simplify import Rule, Sweep, is_inside, label_at, swept

LEAST, MOST = 2.0**-126, 2.0**126
"""Between them are the normal numbers of f32 whose reciprocals are normal."""

MANY = 2**31
SMOOTH = ("add", "sub", "mul", "div", "neg", "fma", "where")
"""Functions whose results are as near as their operands, but where these cancel."""


def reduce_strength(func: Func, forms: Collection[str]) -> Func:
    """`func` with the forms that are cheaper."""
    rules = tuple(rule for form, rule in RULES.items() if form in forms)
    return swept(func, tuple(make(func) for make in rules)) if rules else func


# x / s -> x * reciprocal(s)          if s is one number for all of an inner axis, or a constant
def by_reciprocal(func: Func) -> Rule:
    """The rule for `func`. It asks that x * (1 / s) is x / s but for rounding: 1 / s is normal,
    or s is 0, infinite or NaN, where both are equal."""
    inner = _inner_axes(func)

    def rule(s: Sweep, op: Op) -> Value | None:
        match op:
            case Map("div", (x, d)) if dtype_of(d.type) is F32:
                shared = set(axes_of(x.type)) - set(axes_of(d.type))
                if shared & inner and _has_reciprocal(s, d):
                    return s.make(Map("mul", (x, _reciprocal(s, d))))
        return None
    return rule


def _inner_axes(func: Func) -> set[str]:
    """The axes along which values follow each other: the last ones of stores, and folded ones."""
    found = {op.axis for op in func.body.ops if isinstance(op, Fold)}
    for op in func.body.ops:
        if isinstance(op, Store):
            found.update(free_axes(op.subs[-1:]))
    return found


def _reciprocal(s: Sweep, d: Value) -> Value:
    k = s.number(d)
    if k is None:
        return s.make(Map("reciprocal", (d,)))
    with np.errstate(divide="ignore"):
        return s.make(Const(float(np.float32(1) / np.float32(k)), F32))


def _has_reciprocal(s: Sweep, d: Value) -> bool:
    """Whether d is 0, infinite, NaN, or of a size from LEAST to MOST."""
    low, high = _sizes(s, d)
    return low >= LEAST and high <= MOST


def _sizes(s: Sweep, v: Value) -> tuple[float, float]:
    """Bounds of the size of v, an f32, where it is neither 0, infinite nor NaN."""
    unknown = (0.0, inf)
    match s.made.get(v):
        case Const(k):
            size = abs(float(np.float32(k)))
            return (size, size) if isfinite(size) and size else (1.0, 1.0)
        case Map("sqrt", _):
            return 2.0**-75, 2.0**64
        case Map("neg" | "abs", (x,)):
            return _sizes(s, x)
        case Map("max" | "min", args) | Map("where", (_, *args)):
            both = [_sizes(s, x) for x in args]
            return min(low for low, _ in both), max(high for _, high in both)
        case Map("add", (x, y)) if _is_positive(s, x) and _is_positive(s, y):
            (a, b), (c, d) = _sizes(s, x), _sizes(s, y)
            return min(a, c), 2 * max(b, d)
        case Cast(x, dtype) if dtype is F32:
            return _sizes_of_cast(s, x)
        case Fold("add", (x,), axis, product="", prefix=False) as fold:
            return _of_weights(fold.extent) if _are_weights(s, x, axis) else unknown
        case Fold("softmax" | "attend") as fold:
            states = [r for r, op in s.made.items() if op is fold]
            return _of_weights(fold.extent) if states.index(v) == 1 else unknown
    return unknown


def _is_positive(s: Sweep, v: Value) -> bool:
    """Whether v is not below 0, and not -0.0 unless its root."""
    k = s.number(v)
    op = s.made.get(v)
    return k > 0 if k is not None else isinstance(op, Map) and op.fn == "sqrt"


def _sizes_of_cast(s: Sweep, x: Value) -> tuple[float, float]:
    """Integers have sizes from 1, f16 from 2^-24; bf16 has the exponents of f32."""
    dtype = dtype_of(x.type)
    if not dtype.is_float:
        return 1.0, 2.0**63
    if dtype is F16:
        return 2.0**-24, 2.0**16
    inner = s.made.get(x)
    if isinstance(inner, Cast) and dtype_of(inner.x.type) is F32:  # rounded to bf16
        low, high = _sizes(s, inner.x)
        return low / 2, high * 2
    return 0.0, inf


def _of_weights(extent: Expr) -> tuple[float, float]:
    """The sum of exp(x - max x): one of the terms is 1, or the sum is 0 or NaN."""
    return 1.0, 2.0 * (extent.const_value or 2.0**63)


def _are_weights(s: Sweep, x: Value, axis: str) -> bool:
    """Whether x is exp(v - m), m the maximum of v along `axis`."""
    for m, op in s.made.items():
        match op:
            case Fold("max", (v,), found, product="", prefix=False) if found == axis:
                if is_weight(s.made, x, v, m):
                    return True
    return False


# 1 + erf(x) -> erfp1(x)              its error is relative to 1, so that it needs no two branches
def one_and_erf(func: Func) -> Rule:
    """The rule, which is the same for all kernels."""
    def rule(s: Sweep, op: Op) -> Value | None:
        match op:
            case Map("add", args) if dtype_of(op.args[0].type) is F32:
                for one, other in (args, args[::-1]):
                    inner = s.made.get(other)
                    if s.number(one) == 1 and isinstance(inner, Map) and inner.fn == "erf":
                        return s.make(Map("erfp1", inner.args))
        return None
    return rule


# exp(x) -> exp_approx(x)        where that is rounded to 16 bits, or a term of a sum of weights
def approximate_exp(func: Func) -> Rule:
    """The rule for `func`. The error is 2^-22 and |x| * 2^-23.7 of the result, which is 2^-17 at
    most; of exp(x - max x) it is 2^-22 of 1, and 1 is a term of their sum."""
    coarse = _coarse(func)

    def rule(s: Sweep, op: Op) -> Value | None:
        match op:
            case Map("exp", args, results=(result,)) if result in coarse:
                return s.make(Map("exp_approx", args))
        return None
    return rule


def _coarse(func: Func) -> set[Value]:
    """The values of f32 that are read for what has 16 bits, and to sum weights, alone."""
    made, readers = made_by(func), uses(func.body)
    found = set[Value]()

    def allows(op: Op, v: Value) -> bool:
        match op:
            case Cast():
                return op.dtype in (BF16, F16)
            case Map():
                return op.fn in SMOOTH and v is not _condition(op) and op.result in found
            case Fold("add", (x,), axis, product="", prefix=False):
                return any(is_weight(made, x, top.args[0], top.result) for top in made.values()
                           if isinstance(top, Fold) and top.plain and top.carrier == PEAK
                           and top.axis == axis)
        return False

    for op in reversed(func.body.ops):
        for r in op.results:
            if dtype_of(r.type) is F32 and readers.get(r) and all(
                    allows(reader, r) for reader in readers[r]):
                found.add(r)
    return found


def _condition(op: Map) -> Value | None:
    return op.args[0] if op.fn == "where" else None


# index(j) == l -> i32(index(j)) == where(0 <= l < n, i32(l), -1)     if l is one number for all j
def short_places(func: Func) -> Rule:
    """The rule for `func`: places below 2^31 are compared as i32."""
    extents = extents_of(func)

    def rule(s: Sweep, op: Op) -> Value | None:
        found = label_at(s, op) if isinstance(op, Map) else None
        if found is None or (extents[found[0]].const_value or MANY) >= MANY:
            return None
        axis, label = found
        held = s.make(Map("where", (is_inside(s, label, extents[axis]),
                                    s.make(Cast(label, I32)), s.make(Const(-1, I32)))))
        return s.make(Map("eq", (s.make(Cast(s.make(IndexValue(sym(axis))), I32)), held)))
    return rule


RULES: dict[str, Callable[[Func], Rule]] = {
    "reciprocal": by_reciprocal, "erfp1": one_and_erf, "exp_approx": approximate_exp,
    "i32": short_places}
