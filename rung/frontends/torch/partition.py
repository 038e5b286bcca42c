"""A joint graph of AOTAutograd as a forward graph and a backward graph, and what the one keeps for
the other.

    y = x.t(); ...; gw = g @ y    ->    y = x.t(); ...; again = x.t(); gw = g @ again

In eager a view that is kept is no memory of its own; a result of a graph is.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from rung.frontends.torch import compat
from rung.frontends.torch.aligned import align
from rung.frontends.torch.calls import effect_of, insert, is_view
from rung.frontends.torch.compat import OpOverload

CHAIN = 8  # operators that are computed again for one value
MOST = 1.1  # times the bytes of others, for which a tensor is kept in their place
aten = torch.ops.aten
SOFTMAXES = {aten._softmax.default: aten.div.Tensor, aten._log_softmax.default: aten.sub.Tensor}
"""How each of them ends: exp(x - max) / sum, x - max - log(sum)."""
FOLDS = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, aten.gather.default,
         aten.nll_loss_backward.default, aten.nll_loss2d_backward.default,
         aten._softmax_backward_data.default, aten._log_softmax_backward_data.default,
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
    if align(joint.graph):
        joint.recompile()
    if not any(map(compat.must_recompute, joint.graph.nodes)):
        if not exact:
            softmaxes_of_parts(joint.graph)
        made_again(joint.graph)
    forward, backward = compat.default_partition(joint, inputs, **rest)
    backward.graph.eliminate_dead_code(lambda node: node.is_impure(impure_random=False))
    backward.recompile()
    return forward, backward


def softmaxes_of_parts(graph: fx.Graph) -> None:
    """Write out each softmax that the backward graph reads, where it is no smaller than its input:
    from a maximum and a sum for each row, `made_again` can compute it again.

        y = _log_softmax(x)   ->   top = amax(x); away = x - top; y = away - log(sum(exp(away)))
    """
    forward, results = compat.forward_nodes(graph), graph.output_node()
    inside, sources = {*forward, results}, _sources(forward, ())
    for node in forward:
        if node.target not in SOFTMAXES or results in node.users or not node.meta["val"].dim():
            continue
        x, users = node.all_input_nodes[0], _users(node)
        if (MOST - 1) * compat.expected(node.meta["val"].shape[_dimension(node)]) < 2:
            continue  # two numbers a row are not small
        read = sum(map(_bytes, sources.get(x, (x,))))
        there = read < _bytes(node) or (read == _bytes(node) and _in_place(users, inside))
        if there and not inside.issuperset(users):
            node.replace_all_uses_with(_written_out(node))
            graph.erase_node(node)


def _dimension(softmax: fx.Node) -> int:
    dim, rank = softmax.args[1], softmax.meta["val"].dim()
    assert isinstance(dim, int) and isinstance(rank, int)
    return dim % rank


def _written_out(node: fx.Node) -> fx.Node:
    """The parts of a softmax, before it; gives the last one."""
    x, kind, dim = node.args[0], node.meta["val"].dtype, _dimension(node)
    wide = torch.float32 if kind.itemsize < 4 else kind

    def part(target: OpOverload, *args: Any, **how: Any) -> fx.Node:
        with node.graph.inserting_before(node):
            return insert(node, target, *args, **how)

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
    """Give each backward use of a view a copy of its own; and of an elementwise value, where what
    it is computed of is hardly larger, and what of that is not kept anyway is smaller; or as large,
    but in memory, where the forward graph would write the value for this alone. Where a much
    larger tensor would be kept for views alone, these are kept, without what lies between their
    elements; results always are."""
    forward, results = compat.forward_nodes(graph), graph.output_node()
    outside = {*forward, results}

    def later(node: fx.Node) -> list[fx.Node]:
        return [] if results in node.users else [n for n in node.users if n not in outside]

    def views_of(node: fx.Node) -> list[fx.Node]:
        return [] if _is_written(node) else [v for v in node.users if is_view(v) and later(v)]

    whole = {n for n in forward if _is_elementwise(n) and _calls_library(later(n))}
    sources = _sources(forward, whole)
    kept = {n for n in forward if n.op == "placeholder" or results in n.users or (
        n not in sources and (later(n) or sum(map(_bytes, views_of(n))) * MOST >= _bytes(n)))}
    for node in reversed(forward):
        views, missing = views_of(node), sum(map(_bytes, sources.get(node, {node}) - kept))
        if node in kept or later(node) or sum(map(_bytes, views)) * MOST >= missing:
            for view in views:
                _copy(view, later(view))
        again = node in sources and (missing < _bytes(node) or (
            missing <= MOST * _bytes(node) and _in_place(_users(node), outside)
            and all(_is_small(x, node) or _is_in_memory(x, outside)
                    for x in sources[node] - kept)))
        if later(node) and again:
            _copy(node, later(node))
            kept |= sources[node]
        elif later(node):
            kept.add(node)
    for node in forward:
        users = later(node) if node.op == "call_function" else []
        if users and _bytes(node) and _has_gaps(node) and not (
                node.meta["val"].is_cuda and _calls_library(users)):
            with graph.inserting_after(node):
                made = insert(node, aten.clone.default, node)
            node.replace_all_uses_with(made, users.__contains__)


def _calls_library(users: Iterable[fx.Node]) -> bool:
    """Whether operators that are not computed in place read a tensor, itself or as a view: those
    of a GPU may ask for rows that begin at multiples, which only gaps give."""
    return not all(map(_is_in_place, _readers(users)))


def _sources(forward: Sequence[fx.Node], whole: Container[fx.Node]
             ) -> dict[fx.Node, frozenset[fx.Node]]:
    """What each elementwise value that is not of `whole` is computed of, through a few other such
    values of its size, where that is hardly larger."""
    sources, steps = dict[fx.Node, frozenset[fx.Node]](), dict[fx.Node, int]()
    for node in filter(_is_elementwise, forward):
        reads = {*node.all_input_nodes}
        while views := {*filter(is_view, reads)}:
            reads = (reads - views) | {v.all_input_nodes[0] for v in views}
        found = frozenset[fx.Node]().union(*(
            {x} if _is_small(x, node) else sources.get(x, {x}) for x in reads))
        steps[node] = 1 + sum(steps[x] for x in reads if x in sources)
        if node not in whole and steps[node] <= CHAIN and not any(map(_is_written, reads)) and (
                sum(map(_bytes, found)) <= MOST * _bytes(node)):
            sources[node] = found
    return sources


def _users(node: fx.Node) -> list[fx.Node]:
    """What reads a value, itself or as a view."""
    return _readers(node.users)


def _readers(users: Iterable[fx.Node]) -> list[fx.Node]:
    """The users of a value, those of its views in the place of these."""
    return [m for n in users for m in (_users(n) if is_view(n) else [n])]


def _in_place(users: Iterable[fx.Node], inside: Container[fx.Node]) -> bool:
    """Whether those of the users that are `inside` the forward graph compute what they read where
    they read it."""
    return all(n not in inside or _is_in_place(n) for n in users)


def _is_in_place(node: fx.Node) -> bool:
    return node.target in FOLDS or _is_elementwise(node)


def _is_small(x: fx.Node, node: fx.Node) -> bool:
    """Whether a value is next to nothing beside what is computed of it."""
    return _bytes(x) <= (MOST - 1) * _bytes(node)


def _is_in_memory(node: fx.Node, inside: Container[fx.Node]) -> bool:
    """Whether the forward graph writes a value: it is made and read, itself or as another type, by
    other than elementwise operators."""
    users = [m for n in _users(node) for m in (_users(n) if _is_cast(n) else [n])]
    return not _is_elementwise(node) and any(
        n in inside and not _is_elementwise(n) for n in users)


def _is_elementwise(node: fx.Node) -> bool:
    return (isinstance(node.target, OpOverload) and effect_of(node) == ""
            and isinstance(node.meta["val"], torch.Tensor)
            and (torch.Tag.pointwise in node.target.tags or _is_cast(node)))


def _is_cast(node: fx.Node) -> bool:
    """Whether a node gives its operand another type, where it is."""
    return (node.target is aten._to_copy.default and isinstance(node.meta["val"], torch.Tensor)
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
