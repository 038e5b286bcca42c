"""Masks of attention that follow from sizes alone, in a graph of Dynamo.

    mask = (arange(8) >= 0)[None, :].expand(8, 8)        attention(q, k, v)
    attention(q, k, v, attn_mask=mask)              ->

    mask = arange(8)[None, :] <= arange(8)[:, None]      attention(q, k, v, is_causal=True)
    attention(q, k, v, attn_mask=mask)              ->

Model libraries leave such a mask out where they can read it, which they cannot while they are
traced; and torch's fast kernels take no mask, or only some.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from rung.core import trace
from rung.frontends.torch import compat

ATTENTION = F.scaled_dot_product_attention
MOST = 1 << 26  # elements of what is computed here
MAKERS = {torch.arange, torch.ones, torch.zeros, torch.full, torch.tril, torch.triu}
METHODS = {"expand", "to", "bool", "unsqueeze", "view", "reshape", "logical_and", "contiguous",
           "new_ones", "tril", "triu"}
PURE = MAKERS | {getattr(operator, n) for n in (
    "getitem", "add", "sub", "ge", "gt", "le", "lt", "eq", "and_", "or_", "invert")}


def without_known_masks(gm: fx.GraphModule) -> None:
    """Calls attention without a mask that hides nothing, or exactly what comes later."""
    found: dict[fx.Node, torch.Tensor | None] = {}
    for node in gm.graph.nodes:
        given = _named(node) if node.target is ATTENTION else {}
        mask = given.get("attn_mask")
        if not isinstance(mask, fx.Node) or given.get("is_causal"):
            continue
        if mask not in found:
            found[mask] = known(mask)
        if said := meaning(found[mask]):
            node.args = node.args[:3]
            node.kwargs = given | {"attn_mask": None, "is_causal": said == "causal"}
            trace.emit("fired", "masks", node.name, f"the mask {mask.name} is {said}")
    for node in reversed([n for mask in found for n in _ancestors(mask) if _is_pure(n)]):
        if not node.users and node.graph is gm.graph:
            gm.graph.erase_node(node)
    if found:
        gm.recompile()


def _named(call: fx.Node) -> dict[str, Any]:
    """The arguments of a call of attention after the first three, by name."""
    return dict(zip(("attn_mask", "dropout_p", "is_causal"), call.args[3:], strict=False)
                ) | dict(call.kwargs)


def meaning(mask: torch.Tensor | None) -> str:
    """`empty` of a mask that hides nothing, `causal` of one that hides what comes later in rows and
    columns of one number; "" of any other."""
    if mask is None or mask.dtype is not torch.bool or not mask.numel():
        return ""
    if bool(mask.all()):
        return "empty"
    rows, columns = mask.shape[-2:]
    causal = torch.ones(rows, columns, dtype=torch.bool).tril()
    return "causal" if rows == columns and bool((mask == causal).all()) else ""


def known(mask: fx.Node) -> torch.Tensor | None:
    """What a node computes of constants alone, by operators that write to nothing, as nobody else
    does; None of any other."""
    order = _ancestors(mask)
    if not all(map(_is_pure, order)) or any(
            not (_is_pure(user) or user.target is ATTENTION) for n in order for user in n.users):
        return None
    values: dict[fx.Node, Any] = {}
    host = torch.device("cpu")

    def given(x: Any) -> Any:
        return values[x] if isinstance(x, fx.Node) else host if isinstance(
            x, torch.device) else x
    with compat.unset_fake_temporarily(), host:
        for node in order:
            args, named = fx.node.map_aggregate((node.args, dict(node.kwargs)), given)
            run: Any = node.target if node.op == "call_function" else getattr(
                args[0], str(node.target))
            values[node] = run(*(args if node.op == "call_function" else args[1:]), **named)
    found: torch.Tensor = values[mask]
    return found


def _ancestors(node: fx.Node) -> Sequence[fx.Node]:
    """A node and all that it is computed of, in order."""
    found, todo = {node}, [node]
    while todo:
        new = set(todo.pop().all_input_nodes) - found
        found |= new
        todo.extend(new)
    return [n for n in node.graph.nodes if n in found]


def _is_pure(node: fx.Node) -> bool:
    """Whether it is a small tensor of fixed sizes that an operator makes and that none writes to.
    """
    value = node.meta.get("example_value")
    small = isinstance(value, torch.Tensor) and value.layout is torch.strided and all(
        isinstance(n, int) for n in value.shape) and value.numel() <= MOST
    named = node.target in PURE if node.op == "call_function" else (
        node.op == "call_method" and node.target in METHODS)
    return small and named and "out" not in node.kwargs
