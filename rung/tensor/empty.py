"""Zero-element tensors: their op becomes a library call, a reduction over one a constant.

    t = x + b : f32[0,8]                -> t = call empty([0,8], [8,1], f32) as unwritten : f32[0,8]
    s = reduce add t over [0] : f32[8]  -> s = full 0.0 [8] f32

So no kernel has an axis of extent 0, and index expressions may divide by extents.
"""

from __future__ import annotations

from dataclasses import replace

from rung.core.op import Builder, Func, Op, Value
from rung.core.ops import Cast, Map
from rung.core.rewrite import dead_code, rewrite
from rung.core.scalar import MONOIDS
from rung.core.types import DType, TensorType
from rung.program.ir import copied, unwritten
from rung.program.storage import leaving
from rung.tensor.ir import (
    Concat,
    Contract,
    Full,
    Gather,
    Index,
    Iota,
    Reduce,
    Scan,
    Scatter,
    shape_of,
)

MAKERS = (Map, Cast, Reduce, Scan, Index, Contract, Gather, Iota, Concat, Full)


def drop_empty(program: Func) -> Func:
    """`program` without our ops on zero-element tensors; exact."""
    own = leaving(program)
    return dead_code(rewrite(program, lambda op, builder: _rule(op, builder, own)))


def _rule(op: Op, builder: Builder, own: set[Value]) -> tuple[Value, ...] | None:
    """`own` are the values that have memory of their own."""
    if isinstance(op, Scatter) and is_empty(op.src):
        if op.result not in own:
            return (op.x,)
        return builder.add(copied(op.x), op.result.name)
    kind = op.results[0].type if isinstance(op, MAKERS) else None
    if not isinstance(kind, TensorType) or not any(map(is_empty, (*op.operands(), op.results[0]))):
        return None
    name = op.results[0].name
    if isinstance(op, Concat) and not is_empty(op.results[0]):
        return builder.add(replace(op, xs=tuple(x for x in op.xs if not is_empty(x)), results=()),
                           name)
    if is_empty(op.results[0]):
        return builder.add(unwritten(kind), name)
    return builder.add(Full(_value(op, kind.dtype), kind.dtype, kind.shape), name)


def _value(op: Op, dtype: DType) -> float | int | bool:
    """The elements of the result: folds give identity elements, loads are masked."""
    match op:
        case Reduce():
            return MONOIDS[op.monoid].identity(op.acc)
        case Contract():
            return MONOIDS[op.combine].identity(op.acc)
        case Index():
            return op.fill
    return False if dtype.kind == "b" else 0.0 if dtype.is_float else 0


def is_empty(value: Value) -> bool:
    return any(size.is_const(0) for size in shape_of(value))
