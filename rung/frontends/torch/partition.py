"""A joint graph of AOTAutograd as a forward graph and a backward graph, and what the one keeps for
the other.

    y = x.t(); ...; gw = g @ y    ->    y = x.t(); ...; again = x.t(); gw = g @ again

In eager a view that is kept is no memory of its own; a result of a graph is.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from rung.frontends.torch import compat
from rung.frontends.torch.calls import effect_of
from rung.frontends.torch.compat import OpOverload

CHAIN = 8  # operators that are computed again for one value
aten = torch.ops.aten
SOFTMAXES = {aten._softmax.default: aten.div.Tensor, aten._log_softmax.default: aten.sub.Tensor}
"""How each of them ends: exp(x - max) / sum, x - max - log(sum)."""
FOLDS = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, aten.gather.default,
         aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
"""Operators that compute what they read where they read it."""


def partition(joint: fx.GraphModule, inputs: Sequence[object], exact: bool = False,
              **rest: Any) -> object:
    """Torch's split, of what `made_again` gives where no checkpoint says what to compute anew. No
    draw is repeated: what is random is kept, which costs memory instead. `exact`: operators stay
    those whose bits are eager's."""
    for node in joint.graph.nodes:
        if isinstance(node.target, OpOverload) and effect_of(node) == "rng":
            compat.keep([node, *(n for n in node.users if n.target is operator.getitem)])
    if not any(map(compat.must_recompute, joint.graph.nodes)):
        if not exact:
            softmaxes_of_parts(joint.graph)
        made_again(joint.graph)
    forward, backward = compat.default_partition(joint, inputs, **rest)
    backward.graph.eliminate_dead_code(lambda node: node.is_impure(impure_random=False))
    backward.recompile()
    return forward, backward


def softmaxes_of_parts(graph: fx.Graph) -> None:
    """Write out each softmax that is kept for the backward graph, where its input and a maximum
    and a sum for each row are fewer bytes: what is then elementwise can be computed again.

        y = _log_softmax(x)   ->   top = amax(x); away = x - top; y = away - log(sum(exp(away)))
    """
    forward, results = compat.forward_nodes(graph), graph.output_node()
    inside, reads = {*forward, results}, _reads(forward)
    for node in forward:
        if node.target not in SOFTMAXES or results in node.users or not _bytes(node):
            continue
        x = _viewed(node.all_input_nodes[0])
        rows = 2 * _bytes(node) // max(1, compat.expected(node.meta["val"].shape[node.args[1]]))
        # an input is there anyway, and the rows of what was computed are written to be folded
        users = _users(node)
        whole = not _is_elementwise(x) and all(
            n not in inside or _is_elementwise(n) or n.target in FOLDS for n in users)
        moved = rows if whole and _bytes(x) <= _bytes(node) else reads.get(x, _bytes(x)) + rows
        if moved < _bytes(node) and not _is_written(x) and any(n not in inside for n in users):
            node.replace_all_uses_with(_written_out(node))
            graph.erase_node(node)


def _written_out(node: fx.Node) -> fx.Node:
    """The parts of a softmax, before it; gives the last one."""
    x, dim, _ = node.args
    kind = node.meta["val"].dtype
    wide = torch.float32 if kind.itemsize < 4 else kind

    def part(target: OpOverload, *args: Any, **how: Any) -> fx.Node:
        with node.graph.inserting_before(node):
            made = node.graph.call_function(target, args, how)
        values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
        made.meta = node.meta | {"val": target(*values, **how)}
        return made

    def as_type(x: fx.Node, dtype: torch.dtype) -> fx.Node:
        same = x.meta["val"].dtype is dtype
        return x if same else part(aten._to_copy.default, x, dtype=dtype)

    assert isinstance(x, fx.Node) and isinstance(node.target, OpOverload)
    x = as_type(x, wide)
    away = part(aten.sub.Tensor, x, part(aten.amax.default, x, [dim], True))
    powers = part(aten.exp.default, away)
    whole = part(aten.unsqueeze.default, part(torch.ops.prims.sum.default, powers, [dim]), dim)
    log = node.target is aten._log_softmax.default
    first, second = (away, part(aten.log.default, whole)) if log else (powers, whole)
    return as_type(part(SOFTMAXES[node.target], first, second), kind)


def made_again(graph: fx.Graph) -> None:
    """Give each backward use of a view, and of a value that is larger than all that it is an
    elementwise function of, a copy of its own. Where a larger tensor would be kept for views
    alone, these are kept, without what lies between their elements; results always are."""
    forward, results = compat.forward_nodes(graph), graph.output_node()
    outside = {*forward, results}
    reads = _reads(forward)

    def later(node: fx.Node) -> list[fx.Node]:
        return [] if results in node.users else [n for n in node.users if n not in outside]

    for node in reversed(forward):
        views = [] if _is_written(node) else [v for v in node.users if _is_view(v) and later(v)]
        if node.op == "placeholder" or results in node.users or later(node) or (
                sum(map(_bytes, views)) >= reads.get(node, _bytes(node))):
            for view in views:
                _copy(view, later(view))
        if node in reads:
            _copy(node, later(node))
    for node in forward:
        users = later(node) if node.op == "call_function" else []
        if users and _bytes(node) and _has_gaps(node) and not (
                node.meta["val"].is_cuda and _calls_library(users)):
            with graph.inserting_after(node):
                made = graph.call_function(torch.ops.aten.clone.default, (node,))
            made.meta = node.meta | {"val": node.meta["val"].clone()}
            node.replace_all_uses_with(made, users.__contains__)


def _calls_library(users: Iterable[fx.Node]) -> bool:
    """Whether more than elementwise operators read a tensor, itself or as a view: those of a GPU
    may ask for rows that begin at multiples, which only gaps give."""
    return any(_calls_library(n.users) if _is_view(n) else not _is_elementwise(n) for n in users)


def _reads(forward: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Bytes of what each elementwise value comes of, where those are fewer than its own; through
    a few other such values."""
    reads, steps = dict[fx.Node, int](), dict[fx.Node, int]()
    for node in filter(_is_elementwise, forward):
        sources = {*node.all_input_nodes}
        while views := {*filter(_is_view, sources)}:
            sources = (sources - views) | {v.all_input_nodes[0] for v in views}
        read = sum(reads.get(x, _bytes(x)) for x in sources)
        steps[node] = 1 + sum(steps[x] for x in sources if x in reads)
        if read < _bytes(node) and steps[node] <= CHAIN and not any(map(_is_written, sources)):
            reads[node] = read
    return reads


def _viewed(node: fx.Node) -> fx.Node:
    """What a view is of."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _users(node: fx.Node) -> list[fx.Node]:
    """What reads a value, itself or as a view."""
    return [m for n in node.users for m in (_users(n) if _is_view(n) else [n])]


def _is_view(node: fx.Node) -> bool:
    """Whether a node gives one view of its first operand."""
    return isinstance(node.target, OpOverload) and effect_of(node) == "" and (
        node.target is torch.ops.aten._unsafe_view.default
        or [str(r.type) for r in node.target._schema.returns if r.alias_info] == ["Tensor"])


def _is_elementwise(node: fx.Node) -> bool:
    return (isinstance(node.target, OpOverload) and effect_of(node) == ""
            and isinstance(node.meta["val"], torch.Tensor)
            and (torch.Tag.pointwise in node.target.tags or _is_cast(node)))


def _is_cast(node: fx.Node) -> bool:
    """Whether a node gives its operand another type, where it is."""
    return (node.target is aten._to_copy.default
            and node.meta["val"].device == node.all_input_nodes[0].meta["val"].device)


def _is_written(node: fx.Node) -> bool:
    return any(isinstance(n.target, OpOverload) and n.target._schema.is_mutable
               for n in node.users)


def _copy(node: fx.Node, users: Iterable[fx.Node]) -> None:
    """A copy of a node before each of `users`, for it."""
    for user in users:
        with node.graph.inserting_before(user):
            made = node.graph.node_copy(node)
        made.meta["partitioner_tag"] = "is_backward"
        user.replace_input_with(node, made)


def _has_gaps(node: fx.Node) -> bool:
    """Whether there is memory between the elements of a tensor."""
    x = node.meta["val"]
    sizes, strides = map(compat.expected, x.shape), map(compat.expected, x.stride())
    reach = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    return bool(reach * x.dtype.itemsize >= _bytes(node))


def _bytes(node: fx.Node) -> int:
    """Of a tensor of the expected sizes; 0 for what is none."""
    x: object = node.meta.get("val")
    return prod(map(compat.expected, x.shape), start=x.dtype.itemsize) if isinstance(
        x, torch.Tensor) else 0
