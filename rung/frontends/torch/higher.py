"""Higher-order operators, such as `cond`: torch runs them, and the graphs that they are given.

    cond = torch.ops.higher_order.cond(gt, true_graph_0, false_graph_0, (mul,))     # the fx node
    cond1 = call _operator.call(cond, gt, mul) : f32[4]                             # the op

The constant `cond` of the program is an `Applied`, which lacks its operands alone. So is a mutable
operator, which updates in place the tensors under its mutable arguments:

    auto_functionalized_v2(put, row=x, _cache_slice_dim=0, ..., _all_bases=[cache])
    cache1 = call _operator.call(put, x) in place cache
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from rung.core.expr import Expr
from rung.core.op import Value
from rung.core.types import DType, VecType

FUNCTION = VecType(DType("function", "x", 0))
APPLY = "_operator.call"


@dataclass(frozen=True)
class View:
    """What a mutable argument is: the updated operand with this number, or elements of it."""

    number: int
    shape: tuple[int | Expr, ...] | None = None
    strides: tuple[int | Expr, ...] = ()
    offset: int | Expr = 0  # from that of the operand

    def sizes(self) -> tuple[int | Expr, ...]:
        return *(self.shape or ()), *self.strides, self.offset

    def of(self, base: torch.Tensor, found: Mapping[object, Any]) -> torch.Tensor:
        """The argument; `found` has the numbers of expressions."""
        if self.shape is None:
            return base
        shape, strides = ([found.get(n, n) for n in ns] for ns in (self.shape, self.strides))
        start = base.storage_offset() + found.get(self.offset, self.offset)
        return base.as_strided(shape, strides, start)


@dataclass(frozen=True, eq=False)
class Applied:
    """An operator with its arguments, in which each of `operands` stands for what is given, and
    each `View` for a part of the operands to update, which are given after these."""

    operator: Callable[..., object]
    args: object  # (positional, named)
    operands: tuple[Value | Expr, ...]

    def __call__(self, *given: Any) -> object:
        """What the operator gives, in its structure."""
        found: dict[object, Any] = dict(zip(self.operands, given, strict=False))
        updated = given[len(self.operands):]

        def real(x: object) -> object:
            if isinstance(x, View):
                return x.of(updated[x.number], found)
            return found[x] if isinstance(x, Value | Expr) else x

        args, named = tree_map(real, self.args)
        return self.operator(*args, **named)
