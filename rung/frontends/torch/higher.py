"""Higher-order operators, such as `cond`: torch runs them, and the graphs that they are given.

    cond = torch.ops.higher_order.cond(gt, true_graph_0, false_graph_0, (mul,))     # the fx node
    cond1 = call _operator.call(cond, gt, mul) : f32[4]                             # the op

The constant `cond` of the program is an `Applied`, which lacks its operands alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.utils._pytree import tree_map

from rung.core.expr import Expr
from rung.core.op import Value
from rung.core.types import DType, VecType

FUNCTION = VecType(DType("function", "x", 0))
APPLY = "_operator.call"


@dataclass(frozen=True, eq=False)
class Applied:
    """An operator with its arguments, in which each of `operands` stands for what is given."""

    operator: Callable[..., object]
    args: object  # (positional, named)
    operands: tuple[Value | Expr, ...]

    def __call__(self, *given: object) -> object:
        """What the operator gives, in its structure."""
        found = dict(zip(self.operands, given, strict=True))
        args, named = tree_map(lambda x: found[x] if isinstance(x, Value | Expr) else x, self.args)
        return self.operator(*args, **named)
