"""Axes that no op has together become one, so that blocks and threads which start together share
them: of concatenations, and of kernels that compute several results.

    axes i 3, j 5                     overlay ->    axes j 5
    y[i] = exp(x[i])                                y[j | 2-j] = exp(x[j | 2-j])
    y[j+3] = z[j]                                   y[j+3] = z[j]

The shorter axis is a part of the longer one, under masks.
"""

from __future__ import annotations

from dataclasses import dataclass

from rung.core.expr import ZERO, Expr, sym
from rung.core.op import Func, Op, Value
from rung.core.types import axes_of
from rung.loop.emit import Copier, rebuilt
from rung.loop.ir import Store, extents_of, folds


def overlay(func: Func) -> Func:
    """The kernel with as few axes as its stores need."""
    while pair := _pair(func):
        short, long = pair
        extents = extents_of(func)
        beyond = extents[short] - 1 - sym(long)
        func = rebuilt(func, {short: sym(long)}, {a: e for a, e in extents.items() if a != short},
                       lambda out, axes, values, s=short, b=beyond: _Overlay(
                           out, axes, values, (), s, b))
    return func


@dataclass
class _Overlay(Copier):
    """Copies with the axis `short` as part of another; accesses over it end where it does."""

    short: str = ""
    beyond: Expr = ZERO

    def op(self, op: Op) -> tuple[Value, ...]:
        self.mask = (self.beyond,) if self.short in op.nest else ()
        return super().op(op)


def _pair(func: Func) -> tuple[str, str] | None:
    """(short, long): two axes of different stores, both of the last dimension or both of none."""
    extents, stores = extents_of(func), [op for op in func.body.ops if isinstance(op, Store)]
    taken = {op.axis for op in folds(func)} | {a for op in stores for a in op.clashing}
    free = [a for a in dict.fromkeys(a for op in stores for a in op.nest) if a not in taken]
    last = {a for op in stores for a in _last(op)}
    for n, one in enumerate(free):
        for other in free[n + 1:]:
            short, long = (one, other) if _fits(extents[one], extents[other]) else (other, one)
            together = any({one, other} <= set(op.nest) for op in func.body.ops)
            if not together and _fits(extents[short], extents[long]) and (
                    (one in last) == (other in last)):
                return short, long
    return None


def _last(op: Store) -> set[str]:
    sub = op.subs[-1] if op.subs else ZERO
    return set(axes_of(sub.type)) if isinstance(sub, Value) else set(sub.symbols())


def _fits(short: Expr, long: Expr) -> bool:
    left = (long - short).const_value
    return left is not None and left >= 0
