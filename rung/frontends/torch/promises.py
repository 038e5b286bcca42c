"""What is known of a result before it is made, and is compared with what it is then.

    at = mask.nonzero()                     a check of the user, which torch takes for granted
    torch._check(at.size(0) == 4)
    y = torch.ops.mine.head(x)              a fake implementation of the user

    nonzero = call aten.nonzero.default(mask) : i64[4,1]
    call rung.frontends.torch.promises.tensor(nonzero, "aten.nonzero.default", [4, 1], i64)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from rung.core.op import Value
from rung.frontends.torch.compat import OpOverload, is_replaced
from rung.frontends.torch.tensors import HOST
from rung.program.ir import Call


def is_promised(node: fx.Node, known: Sequence[object]) -> bool:
    """Whether a result of a node may be another than is known: its operator tells by code that is
    not torch's, or its sizes or its number, which follow data, are `known` by a check."""
    return not operator_of(node).startswith(("aten.", "prims.")) or (
        "unbacked_bindings" in node.meta and any(map(is_replaced, known)))


def promise(node: fx.Node, value: Value, known: Sequence[object]) -> Call:
    """The call that compares a result of a node with its `known` shape and type, or number. As in
    eager, what was written before it stays written; so it is no check that delays writes."""
    function = "tensor" if len(known) > 1 else "number"
    args = tuple(("", x) for x in (value, operator_of(node), *known))
    return Call(f"{__name__}.{function}", args, (), "ordered")


def operator_of(node: fx.Node) -> str:
    """The operator that a node calls, itself or by a higher-order one."""
    called = (x for x in (node.target, *node.args) if isinstance(x, OpOverload))
    return str(next(called, node.target))


def tensor(x: object, op: str, shape: Sequence[int], dtype: torch.dtype,
           device: torch.device = HOST) -> None:
    """Raise RuntimeError unless an operator gave a tensor of this shape and type on a device."""
    found, known = _described(x), f"{tuple(shape)} of {dtype} on {device}"
    if found != known:
        raise broken(op, found, known)


def number(x: object, op: str, known: object) -> None:
    """Raise RuntimeError unless an operator gave this number."""
    if x != known:
        raise broken(op, str(x), str(known))


def broken(op: str, found: str, known: str) -> RuntimeError:
    return RuntimeError(f"{op} gave {found}, where {known} was promised, by a check such as "
                        f"torch._check or by the operator's fake implementation")


def _described(x: object) -> str:
    if not isinstance(x, torch.Tensor):
        return f"a {type(x).__name__}"
    other = str(x.layout) if x.layout is not torch.strided else "negated" if x.is_neg() else ""
    return f"{tuple(x.shape)} of {x.dtype} on {x.device}{other and f', {other}'}"
