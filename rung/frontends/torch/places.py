"""Where the tensors of a graph lie: the device that it runs on, and scalars beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, TypeGuard

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from rung.core.errors import Unsupported
from rung.core.op import Op, Value
from rung.core.types import TensorType, Type
from rung.frontends.torch.higher import Applied
from rung.frontends.torch.tensors import HOST
from rung.program.ir import Call


class ImportedSoFar(Protocol):
    """What there is of a program while a graph is imported, and how more is added."""

    home: torch.device
    ops: list[Op]
    constants: dict[str, tuple[Value, torch.Tensor | Applied]]

    def value(self, hint: str, kind: Type, role: str = "") -> Value: ...

    def compute(self, value: Value, target: str, args: Sequence[object], **named: object
                ) -> Value: ...


def home_of(gm: fx.GraphModule) -> torch.device:
    """The device that a graph runs on: the one accelerator that a tensor of it is on, or the host.
    Unsupported if there are several, or tensors without memory."""
    found = {x.device for node in gm.graph.nodes for x in tree_leaves(node.meta.get("val"))
             if isinstance(x, torch.Tensor)}
    others = found - {HOST}
    if len(others) > 1 or any(d.type != "cuda" for d in others):
        raise Unsupported(f"tensors on {' and '.join(sorted(map(str, found)))}")
    return others.pop() if others else HOST


def takes_scalars(op: torch._ops.OpOverload) -> bool:
    """Whether an operator takes tensors without dimensions from the host beside others."""
    return torch.Tag.pointwise in op.tags or op is torch.ops.aten.masked_fill.Tensor


def is_scalar(x: object) -> TypeGuard[Value]:
    """Whether `x` is a tensor without dimensions that does not lie where the program runs."""
    return isinstance(x, Value) and isinstance(x.type, TensorType) and (
        bool(x.type.device) and not x.type.shape)


def brought(graph: ImportedSoFar, value: Value) -> Value:
    """A scalar of the host where the program runs: a copy, or, of a constant, another constant."""
    op = next((op for op in reversed(graph.ops) if value in op.results), None)
    if isinstance(op, Call) and op.target == "aten.lift_fresh_copy.default":
        value = op.args[0][1]
    assert isinstance(value.type, TensorType)
    found = next((x for v, x in graph.constants.values() if v is value), None)
    if not isinstance(found, torch.Tensor):
        made = graph.value(value.name, replace(value.type, device=""))
        device = f"device:{graph.home}"
        return graph.compute(made, "aten._to_copy.default", (value,), device=device)
    key = f"{value.name} at home"
    if key not in graph.constants:
        made = graph.value(value.name, replace(value.type, device=""), "const")
        graph.constants[key] = made, found.to(graph.home)
    return graph.constants[key][0]
