"""A joint graph of AOTAutograd as a forward graph and a backward graph, and what the one keeps for
the other.

    y = x.t(); ...; gw = g @ y    ->    y = x.t(); ...; again = x.t(); gw = g @ again

In eager a view that is kept is no memory of its own; a result of a graph is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from rung.frontends.torch import compat
from rung.frontends.torch.calls import effect_of
from rung.frontends.torch.compat import OpOverload

CHAIN = 8  # operators that are computed again for one value
Nodes = set[fx.Node]
Users = Callable[[fx.Node], list[fx.Node]]


def partition(joint: fx.GraphModule, inputs: Sequence[object], **rest: Any) -> object:
    """Torch's split, of what `made_again` gives where no checkpoint says what to compute anew. No
    draw is repeated: what is random is kept, which costs memory instead."""
    for node in joint.graph.nodes:
        if isinstance(node.target, OpOverload) and effect_of(node) == "rng":
            compat.keep([node, *(n for n in node.users if n.target is operator.getitem)])
    if not any(map(compat.must_recompute, joint.graph.nodes)):
        made_again(joint.graph)
    forward, backward = compat.default_partition(joint, inputs, **rest)
    backward.graph.eliminate_dead_code(lambda node: node.is_impure(impure_random=False))
    backward.recompile()
    return forward, backward


def made_again(graph: fx.Graph) -> None:
    """Give each backward use of a view, and of a value that is larger than all that would be kept
    to compute it again, elementwise, a copy of its own. Where a larger tensor would be kept for
    views alone, these are kept, without what lies between their elements; results always are."""
    forward, results = compat.forward_nodes(graph), graph.output_node()
    outside = {*forward, results}

    def later(node: fx.Node) -> list[fx.Node]:
        return [] if results in node.users else [n for n in node.users if n not in outside]

    reads = _reads(forward, later)
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
                _on_gpu(node) and _calls_library(users)):
            with graph.inserting_after(node):
                made = graph.call_function(torch.ops.aten.clone.default, (node,))
            made.meta = node.meta | {"val": node.meta["val"].clone()}
            node.replace_all_uses_with(made, users.__contains__)


def _calls_library(users: Iterable[fx.Node]) -> bool:
    """Whether more than elementwise operators read a tensor, itself or as a view: those of a GPU
    may ask for rows that begin at multiples, which only gaps give."""
    return any(_calls_library(n.users) if _is_view(n) else not _is_elementwise(n) for n in users)


def _reads(forward: Sequence[fx.Node], later: Users) -> dict[fx.Node, int]:
    """Bytes that are kept for what each elementwise value comes of, where those are fewer than its
    own; through a few other such values. On a GPU what is kept anyway counts nothing: to read
    it is all that computing again costs there, unless a library needs the value in memory."""
    reads, steps, sources = dict[fx.Node, int](), dict[fx.Node, int](), dict[fx.Node, Nodes]()
    anyway = set[fx.Node]()
    for node in forward:
        found = _sources(node) if _is_elementwise(node) else set()
        fused = found and _on_gpu(node) and not _calls_library(later(node))
        free = anyway if fused else set[fx.Node]()
        sources[node] = set().union(*(sources[x] if x in reads else {x} for x in found))
        read = sum(_bytes(x) for x in sources[node] - free)
        steps[node] = 1 + sum(steps[x] for x in found if x in reads)
        if found and read < _bytes(node) and steps[node] <= CHAIN and not any(
                map(_is_written, found)):
            reads[node] = read
        if later(node):
            anyway |= sources[node] if node in reads else {node}
    return reads


def _on_gpu(node: fx.Node) -> bool:
    return bool(node.meta["val"].is_cuda)


def _sources(node: fx.Node) -> Nodes:
    """What an elementwise value comes of; a view is what it shows."""
    found = {*node.all_input_nodes}
    while views := {*filter(_is_view, found)}:
        found = (found - views) | {v.all_input_nodes[0] for v in views}
    return found


def _is_view(node: fx.Node) -> bool:
    """Whether a node gives one view of its first operand."""
    return isinstance(node.target, OpOverload) and effect_of(node) == "" and (
        node.target is torch.ops.aten._unsafe_view.default
        or [str(r.type) for r in node.target._schema.returns if r.alias_info] == ["Tensor"])


def _is_elementwise(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or effect_of(node) != "":
        return False
    x: object = node.meta["val"]
    return isinstance(x, torch.Tensor) and (
        torch.Tag.pointwise in node.target.tags
        or (node.target is torch.ops.aten._to_copy.default
            and node.all_input_nodes[0].meta["val"].device == x.device))


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
