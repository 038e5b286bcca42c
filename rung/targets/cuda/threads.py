"""Calls of the device functions of scans over the threads of a block, and of atomic updates.

Updates that the hardware has no instruction for go by compare-and-swap.
"""

from __future__ import annotations

from rung.core.scalar import MONOIDS
from rung.core.types import F32, F64, I32, DType, dtype_of
from rung.kernel.ir import Prefix, Store
from rung.targets.c_family import Prelude


def fold_text(p: Prelude, monoid: str, dtype: DType) -> str:
    """A lambda that folds two elements."""
    kind, step = p.type(dtype), p.call(MONOIDS[monoid].combine, dtype, 1, ["a", "b"])
    return f"[](const {kind} a, const {kind} b) {{ return {step}; }}"


def prefix_text(p: Prelude, op: Prefix, x: str, shape: tuple[int, int, int], place: str,
                team: bool) -> str:
    """A call of `prefix`; `shape` is the count of threads, their stride and those of the block."""
    dtype, name = dtype_of(op.x.type), "team_prefix" if team else "prefix"
    numbers = ", ".join(map(str, (*shape, "true" if op.exclusive else "false")))
    none = p.constant(MONOIDS[op.monoid].identity(dtype), dtype)
    return f"{name}<{numbers}>({x}, {fold_text(p, op.monoid, dtype)}, {none}, {place})"


def atomic_text(p: Prelude, op: Store, pointer: str, value: str) -> str:
    """An atomic update: of integers and in sums an instruction, else by compare-and-swap, which
    has NaN as torch has it."""
    dtype = dtype_of(op.buf.type)
    if op.combine == "add" and dtype in (F32, F64, I32):
        return f"atomicAdd({pointer}, {value});"
    if op.combine == "add":
        word = "unsigned long long"
        return f"atomicAdd(({word} *)({pointer}), ({word})({value}));"
    if op.combine in ("max", "min") and not dtype.is_float:
        word = "int" if dtype is I32 else "long long"
        return f"atomic{op.combine.title()}(({word} *)({pointer}), ({word})({value}));"
    word = "unsigned" if dtype.bytes == 4 else "unsigned long long"
    return f"atomic_fold<{word}>({pointer}, {value}, {fold_text(p, op.combine, dtype)});"
