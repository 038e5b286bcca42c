"""Accumulation of scatters: a scatter into zeros, added to a sum, scatters into that sum.

    g = scatter full(0.0) dim 0 at i <- v by add    ->    y = scatter x dim 0 at i <- v by add
    y = x + g

So the gradient of an embedding table with two uses is one tensor instead of three.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from rung.core import origins
from rung.core.op import Func, Op, Value, walk
from rung.core.ops import Map
from rung.core.rewrite import dead_code
from rung.core.types import dtype_of
from rung.tensor.ir import Contract, Full, Scatter, shape_of


def accumulate(program: Func) -> Func:
    """`program` with such sums in one tensor; reassociates."""
    uses = Counter(v for op in walk(program.body) for v in op.operands())
    made: dict[Value, Op] = {}
    ops = []
    for old in program.body.ops:
        op = _joined(old, made, uses) or old
        made.update(dict.fromkeys(op.results, op))
        ops.append(op)
    return dead_code(program.with_ops(ops))


# x + (scatter 0 <- v by add) -> scatter x <- v by add      if nobody else reads x or the scatter
def _joined(op: Op, made: Mapping[Value, Op], uses: Counter[Value]) -> Op | None:
    if not isinstance(op, Map) or op.fn != "add" or not dtype_of(op.results[0].type).is_float:
        return None
    for x, scattered in (op.args, op.args[::-1]):
        last = made.get(scattered)
        if (isinstance(last, Scatter) and last.combine == "add" and _is_zero(made.get(last.x))
                and _is_sum(made.get(x)) and uses[x] == uses[scattered] == 1
                and shape_of(x) == shape_of(scattered)):
            origins.derive(op.results, [scattered])
            return replace(last, x=x, results=op.results)
    return None


def _is_sum(op: Op | None) -> bool:
    """Whether a value was accumulated from 0.0, so that it contains no -0.0."""
    return (isinstance(op, Contract) and op.combine == "add") or (
        isinstance(op, Scatter) and op.combine == "add")


def _is_zero(op: Op | None) -> bool:
    return isinstance(op, Full) and op.value == 0 and str(op.value)[0] != "-"
