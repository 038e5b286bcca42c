"""Blocked summation: the rounding error of a long sum grows with the block, not the length.

    s = fold add x[j,i] over j 4096   ->   t = fold add x[64*j1+j2,i] over j2 64
                                           s = fold add t over j1 64

For axes along which memory is not contiguous: sums of rows are split over lanes already. A length
without a suitable divisor is summed in float64. Reassociates.

Counts, and other sums of narrow integers that fit i32, use it: a vector has twice as many lanes of
i32 as of i64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt

from rung.core.cost import behind
from rung.core.expr import Expr
from rung.core.op import Func, Op, Value, made_by
from rung.core.ops import Cast
from rung.core.types import BOOL, F32, F64, I8, I16, I32, I64, U8, DType, dtype_of
from rung.loop.emit import Copier, rebuilt
from rung.loop.ir import Fold, Load, extents_of, folds, stride
from rung.loop.normalize import split_axis

CHAIN = 512  # terms that one f32 number may add one after another
SHORT = 32  # terms of a block that are worth a loop


def in_blocks(func: Func) -> Func:
    """`func` with every long strided f32 sum in blocks, or in float64."""
    for axis in dict.fromkeys(op.axis for op in long_sums(func)):
        size = block(func, axis)
        sums = [op for op in long_sums(func) if op.axis == axis]
        func = split_axis(func, axis, Expr.of(size)) if size else _summed(func, sums, F64)
    return _summed(func, _small_sums(func), I32)


LARGEST = {BOOL: 1, U8: 255, I8: 128, I16: 1 << 15}  # what a term of a type adds at most


def _small_sums(func: Func) -> list[Fold]:
    """The folds that add terms of narrow types in i64 where i32 suffices."""
    made = made_by(func)
    return [op for op in _sums(func, I64) if isinstance(term := made.get(op.args[0]), Cast)
            and (op.extent.const_value or 1 << 31) * LARGEST.get(
                dtype_of(term.x.type), 1 << 31) < 1 << 31]


def long_sums(func: Func) -> list[Fold]:
    """The folds that add many f32 terms that are not contiguous. Terms of 16 bits are excluded:
    they are less exact than their sum."""
    made = made_by(func)
    return [op for op in _sums(func, F32)
            if (op.extent.const_value or CHAIN + 1) > CHAIN and _across(op, made)]


def _sums(func: Func, acc: DType) -> list[Fold]:
    return [op for op in folds(func) if op.plain and op.carrier == "add" and op.acc is acc]


def _across(op: Fold, made: dict[Value, Op]) -> bool:
    loads = [x for x in behind(op, made) if isinstance(x, Load) and op.axis in x.nest]
    steps = {stride(x, op.axis) for x in loads if dtype_of(x.buf.type) is F32}
    return bool(steps) and 1 not in steps


def block(func: Func, axis: str) -> int | None:
    """The divisor of the extent nearest its root, if a fold of folds over `axis` is valid and both
    loops are short."""
    size = extents_of(func)[axis].const_value
    if size is None or not all(op.plain for op in folds(func) if op.axis == axis):
        return None
    sizes = (n for n in range(isqrt(size), SHORT - 1, -1) if not size % n and size // n <= CHAIN)
    return next(sizes, None)


def _summed(func: Func, sums: Sequence[Fold], acc: DType) -> Func:
    """`func` with some of its sums in another type."""
    return rebuilt(func, {}, copying=partial(_Summing, sums=sums, acc=acc)) if sums else func


@dataclass
class _Summing(Copier):
    """Copies with some sums in another type, converted once at the end."""

    sums: Sequence[Fold] = ()
    acc: DType = F64

    def op(self, op: Op) -> tuple[Value, ...]:
        if not (isinstance(op, Fold) and op in self.sums):
            return super().op(op)
        term = self.values[op.args[0]]
        made = next(x for x in self.out.ops if term in x.results)
        if isinstance(made, Cast) and self.acc is I32:
            term = made.x
        wide = self.out.one(Cast(term, self.acc))
        wide = self.out.one(replace(op, args=(wide,), acc=self.acc, results=()))
        found = (self.out.one(Cast(wide, op.acc)),)
        self.values[op.result] = found[0]
        return found
