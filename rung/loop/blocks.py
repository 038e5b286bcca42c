"""Long sums in blocks, so that no number adds many terms: the rounding error grows with the block.

    s = fold add x[j,i] over j 4096   ->   t = fold add x[64*j1+j2,i] over j2 64
                                           s = fold add t over j1 64

A row is summed in lanes, whose sums are short already; here the axis is one that memory is not
contiguous along. A length that has no fitting divisor is summed in float64. Reassociates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt

from rung.core.cost import behind
from rung.core.expr import Expr
from rung.core.op import Func, Op, Value
from rung.core.ops import Cast
from rung.core.scalar import MONOIDS
from rung.core.types import F32, F64, dtype_of
from rung.loop.emit import Copier, rebuilt
from rung.loop.ir import Contract, Fold, Load, Scan, extents_of, op_axes, stride
from rung.loop.normalize import split_axis

CHAIN = 512  # terms that one f32 number may add one after another
SHORT = 32  # terms of a block that are worth a loop


def in_blocks(func: Func) -> Func:
    """`func` with every long sum of f32 that runs across memory in blocks, or in float64."""
    for axis in dict.fromkeys(op.axis for op in long_sums(func)):
        size = block(func, axis)
        func = split_axis(func, axis, Expr.of(size)) if size else _widened(func, axis)
    return func


def long_sums(func: Func) -> list[Fold]:
    """The folds that add many f32 terms, each from another place than its neighbour's. Terms of
    16 bits are less exact than their sum."""
    made = {r: op for op in func.body.ops for r in op.results}
    return [op for op in func.body.ops if isinstance(op, Fold) and op.carrier == "add"
            and op.acc is F32 and (op.extent.const_value or CHAIN + 1) > CHAIN
            and _across(op, made)]


def _across(op: Fold, made: dict[Value, Op]) -> bool:
    loads = [x for x in behind(op, made) if isinstance(x, Load) and op.axis in op_axes(x)]
    steps = {stride(x, op.axis) for x in loads if dtype_of(x.buf.type) is F32}
    return bool(steps) and 1 not in steps


def block(func: Func, axis: str) -> int | None:
    """The divisor of the extent next to its root, if the folds over `axis` merge like their steps
    and both loops are short."""
    along = [op for op in func.body.ops if isinstance(op, Fold | Contract | Scan)
             and op.axis == axis]
    size = extents_of(func)[axis].const_value
    if size is None or not all(isinstance(op, Fold) and op.carrier in MONOIDS for op in along):
        return None
    sizes = (n for n in range(isqrt(size), SHORT - 1, -1) if not size % n and size // n <= CHAIN)
    return next(sizes, None)


def _widened(func: Func, axis: str) -> Func:
    """`func` with the long sums over `axis` in float64."""
    sums = [op for op in long_sums(func) if op.axis == axis]
    return rebuilt(func, {}, copying=partial(_Widening, sums=sums))


@dataclass
class _Widening(Copier):
    """Copies with some sums in float64, rounded once."""

    sums: Sequence[Fold] = ()

    def op(self, op: Op) -> tuple[Value, ...]:
        if not (isinstance(op, Fold) and op in self.sums):
            return super().op(op)
        wide = self.out.one(Cast(self.values[op.args[0]], F64))
        wide = self.out.one(Fold(op.carrier, (wide,), op.axis, op.extent, F64))
        found = (self.out.one(Cast(wide, op.acc)),)
        self.values[op.result] = found[0]
        return found
