"""Graphs of Dynamo whose meaning AOTAutograd does not keep: they run as they are.

    y = x.expand(3, 4)      eager fills x with 1, and refuses to add in place;
    y.fill_(1)              AOTAutograd sums what was written over the rows of y: x becomes 3

    x, y = z, z[1:]         two arguments that share elements
    x.add_(1)
    return y[0]             AOTAutograd takes the row of z, not of y

    torch.lstm(..., dropout=0.5, train=True)    torch writes it out without the dropout
    torch.lstm(x, ...)      AOTAutograd runs it where it saves nothing for its gradient
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from rung.frontends.torch import compat
from rung.frontends.torch.importer import origin_of


def fault(gm: fx.GraphModule) -> str:
    """What the first call of another meaning is, with the user's line; "" where there is none."""
    for module in (m for m in gm.modules() if isinstance(m, fx.GraphModule)):
        for node in module.graph.nodes:
            faults = {"writes to elements that share memory": any(map(overlaps, _written(node))),
                      "would not drop": _drops(node), "would save nothing": _saves(node)}
            for what in (what for what, holds in faults.items() if holds):
                at = origin_of(node)
                return f"{at.target} {what} at {at.line}: {at.code}"
    return view_of_shared(gm)


def view_of_shared(gm: fx.GraphModule) -> str:
    """What the first result is that views one of several arguments that share elements, in memory
    which is written to; "" where there is none."""
    nodes, given = list(gm.graph.nodes), defaultdict[int, list[torch.Tensor]](list)
    for node in nodes:
        if node.op == "placeholder" and _memory(node):
            given[_memory(node)].append(node.meta["example_value"])
    written = {_memory(n) for node in nodes for n in _targets(node)}
    shared = {place for place, xs in given.items() if place in written and compat.overlap(xs)}
    for node in nodes[-1].all_input_nodes:
        if node.op != "placeholder" and _memory(node) in shared:
            at = origin_of(node)
            return f"{at.target} views one of several arguments that share elements at {at.line}"
    return ""


def _memory(node: fx.Node) -> int:
    """The storage of what a node holds; 0 where that is no tensor with one."""
    x = node.meta.get("example_value")
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
        return 0
    try:
        return int(x.untyped_storage()._cdata)
    except NotImplementedError:  # a value under vmap
        return 0


def _drops(node: fx.Node) -> bool:
    """Whether a call is a recurrent network in training with dropout, its one float."""
    return _name(node) in RECURRENT and any(
        isinstance(rate, float) and rate > 0 and train is True
        for rate, train in zip(node.args, node.args[1:], strict=False))


def _saves(node: fx.Node) -> bool:
    """Whether a call is a network of oneDNN that has a gradient; there are none of float64."""
    return _name(node) == "lstm" and any(
        x.requires_grad and x.dtype is not torch.float64 for x in node.meta["example_value"])


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def _written(node: fx.Node) -> Iterator[Any]:
    """What the nodes that are overwritten by a call hold."""
    return (x.meta.get("example_value") for x in _targets(node))


def _targets(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that are overwritten by a call."""
    name = _name(node)
    into = [node.kwargs["out"]] if isinstance(node.kwargs.get("out"), fx.Node) else []
    if node.op in ("call_method", "call_function") and node.args and (
            (name.endswith("_") and not name.endswith("__")) or name in ("setitem", *INPLACE)):
        into.append(node.args[0])
    return (x for x in into if isinstance(x, fx.Node))


INPLACE = {"iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor",
           "ilshift", "irshift", "imatmul"}


def overlaps(x: Any) -> bool:
    """Whether two elements of a tensor certainly have one place: a stride of 0."""
    return isinstance(x, torch.Tensor) and x.layout is torch.strided and any(
        isinstance(step, int) and step == 0 and (not isinstance(size, int) or size > 1)
        for size, step in zip(x.shape, x.stride(), strict=True))
