"""Graphs of Dynamo whose meaning AOTAutograd does not keep: they run as they are.

    y = x.expand(3, 4)      eager fills x with 1, and refuses to add in place;
    y.fill_(1)              AOTAutograd sums what was written over the rows of y: x becomes 3

    x, y = z, z[1:]         two arguments that share elements, in this call or in a later one;
    x.add_(1)               AOTAutograd takes them to be as far apart in all calls, or not to share,
    return y[0]             and takes the row of z, not of y

    x[1:] = x[:-1]          eager refuses to overwrite a part of what it reads, or reads what it has
    x.addmm_(x, x)          overwritten; AOTAutograd reads all of it before

    torch.lstm(..., dropout=0.5, train=True)    torch writes it out without the dropout
    torch.lstm(x, ...)      AOTAutograd runs it where it saves nothing for its gradient

    n.logit_()              eager refuses to put floats into integers, and complex numbers into
    x.add_(1j)              floats, and some functions to write
    torch.complex(x, y, out=z)          to another type: torch writes them out with casts
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from rung.frontends.torch import compat
from rung.frontends.torch.sources import origin_of


def fault(gm: fx.GraphModule) -> str:
    """What the first call of another meaning is, with the user's line; "" where there is none."""
    for module in (m for m in gm.modules() if isinstance(m, fx.GraphModule)):
        for node in module.graph.nodes:
            faults = {"writes to elements that share memory": any(
                          overlaps(x.meta.get("example_value")) for x in _targets(node)),
                      "overwrites what it reads": _overwrites(node),
                      "takes memory of another": _name(node) == "set_" and (
                          node.args[0].op != "placeholder"),
                      "would not drop": _drops(node), "would save nothing": _saves(node),
                      "writes values of another type": _casts(node)}
            for what in (what for what, holds in faults.items() if holds):
                at = origin_of(node)
                return f"{at.target} {what} at {at.line}: {at.code}"
    return shared_memory(gm)


def shared_memory(gm: fx.GraphModule) -> str:
    """What first is of an argument that changes, in ways that AOTAutograd does not keep: as several
    arguments are that share elements, or as a view of the whole storage; "" where nothing is."""
    nodes, given = list(gm.graph.nodes), defaultdict[int, list[fx.Node]](list)
    for node in nodes:
        if node.op == "placeholder" and _memory(node):
            given[_memory(node)].append(node)
    written = {_memory(n) for node in nodes for n in _targets(node)}.intersection(given)
    shared = {m for m in written for x, y in combinations(given[m], 2)
              if meet(x.meta["example_value"], y.meta["example_value"])}
    for node in nodes:
        m, result = _memory(node), node.op != "placeholder" and nodes[-1] in node.users
        if (m in written and _name(node) == "as_strided") or (
                m in shared and (result or not all(map(compat.is_of_module, given[m])))):
            at = origin_of(node)
            return f"{at.target} depends on who else has memory that changes at {at.line}"
    return ""


def apart(run: compat.Function, gm: fx.GraphModule) -> compat.Function:
    """`run`, or the graph as it is in a call whose arguments share elements that it overwrites."""
    given = [n for n in gm.graph.nodes if n.op == "placeholder"]
    written = {n for node in gm.graph.nodes for n in _targets(node)}
    memories = {_memory(n) for n in written}
    asked = [(k, _memory(n) in memories) for k, n in enumerate(given)
             if _memory(n) and not compat.is_of_module(n)]
    if len(asked) < 2 or not any(writes for _, writes in asked):
        return run

    def call(*args: torch.Tensor) -> object:
        if len({args[k].untyped_storage()._cdata for k, _ in asked}) == len(asked):
            return run(*args)
        end, last = 0, (args[0], False)
        for start, k, writes in sorted((args[k].data_ptr(), k, writes) for k, writes in asked):
            x = args[k]
            if start < end and (writes or last[1]) and meet(last[0], x):
                return gm(*args)
            reach = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1
            if start + reach * x.itemsize >= end:
                end, last = start + reach * x.itemsize, (x, writes)
        return run(*args)
    return call


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


def _casts(node: fx.Node) -> bool:
    """Whether what a call overwrites has another type than its result would have by itself; in
    place, one that cannot be cast to."""
    name, outs = _name(node), [x for x in tree_leaves(node.kwargs.get("out"))
                               if isinstance(x, fx.Node)]
    alone: object = node.target
    if not outs or isinstance(alone, str):
        outs, alone = list(_targets(node))[:1], getattr(torch.Tensor, name.rstrip("_"), None)
    held = [x.meta["example_value"] for x in outs if isinstance(
        x.meta.get("example_value"), torch.Tensor)]
    args, named = fx.map_arg((node.args, {k: x for k, x in node.kwargs.items() if k != "out"}),
                             lambda n: n.meta.get("example_value"))
    wide = any(getattr(x, "dtype", type(x)) in COMPLEX for x in tree_leaves((args, named)))
    if not callable(alone) or not held or ("out" not in node.kwargs and not wide and any(
            x.is_floating_point() for x in held)):
        return False
    try:
        made = tree_leaves(alone(*args, **named))
    except Exception:  # there is no such function, so that torch's word on the call stands
        return False
    return any(isinstance(y, torch.Tensor) and (
        y.dtype is not x.dtype if "out" in node.kwargs else not torch.can_cast(y.dtype, x.dtype))
        for y, x in zip(made, held, strict=False))


COMPLEX = (complex, torch.complex32, torch.complex64, torch.complex128)


def _name(node: fx.Node) -> str:
    """The name of what is called, without that of an overload."""
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]


RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def _targets(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that are overwritten by a call."""
    into = tree_leaves(node.kwargs.get("out"))
    if node.op in ("call_method", "call_function") and node.args and _writes(node):
        into += tree_leaves(node.args[0])
    return (x for x in into if isinstance(x, fx.Node))


def _writes(node: fx.Node) -> bool:
    """Whether a call overwrites its first argument, or the tensors in that list. Of Python's own
    functions `and_` and others do not, which end so since their names would be keywords."""
    name = _name(node)
    if name.strip("_") in ("setitem", *INPLACE):
        return True
    own = node.target is getattr(operator, name, None)
    return name.endswith("_") and not own and not name.endswith("__") and name != "set_"


INPLACE = {"iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor",
           "ilshift", "irshift", "imatmul"}


def _overwrites(node: fx.Node) -> bool:
    """Whether a call overwrites elements that it reads, but for those that it reads one by one."""
    name, rest = _name(node), node.args[1:]
    for into in _targets(node):
        place, alone = into.meta["example_value"], _is_elementwise(name)
        given = node.args if "out" in node.kwargs else rest[name == "setitem":]
        reads = [x.meta["example_value"] for x in _nodes((given, {**node.kwargs, "out": None}))
                 if _memory(x) == _memory(into) > 0]
        if reads and name == "setitem" and not _nodes(rest[0]):
            view = place[rest[0]]
            alone = view.untyped_storage()._cdata == _memory(into)
            place = view if alone else place
        if any(meet(place, x) and not (alone and _layout(place) == _layout(x)) for x in reads):
            return True
    return False


def _nodes(args: fx.node.Argument) -> list[fx.Node]:
    found = list[fx.Node]()
    fx.node.map_arg(args, found.append)
    return found


def _is_elementwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    tags = {t for o in packet.overloads() for t in getattr(packet, o).tags} if packet else ()
    return torch.Tag.pointwise in tags or name in INPLACE - {"imatmul"} | {"copy_", "masked_fill_"}


def _layout(x: torch.Tensor) -> tuple[int, list[int], list[int]]:
    """(offset, sizes, strides) of a tensor."""
    return (compat.expected(x.storage_offset()), [*map(compat.expected, x.shape)],
            [*map(compat.expected, x.stride())])


def meet(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors in one storage share elements, or are not easily told apart."""
    reach = Counter[int](), Counter[int]()  # the least and the largest factor of each stride
    for sign, (_, sizes, steps) in ((1, _layout(x)), (-1, _layout(y))):
        for size, step in zip(sizes, steps, strict=True):
            reach[sign > 0][step] += sign * (size - 1)
    terms = [(s, reach[0][s], reach[1][s]) for s in sorted({*reach[0], *reach[1]} - {0})]
    return bool(compat.expected(x.numel()) and compat.expected(y.numel())) and (
        _solvable(terms[::-1], _layout(y)[0] - _layout(x)[0]))


def _solvable(terms: list[tuple[int, int, int]], total: int) -> bool:
    """Whether multiples of strides, from the least to the largest factor, add up to `total`."""
    if not terms:
        return total == 0
    (step, low, high), *rest = terms
    least, most = (sum(t[0] * t[n] for t in rest) for n in (1, 2))
    first, last = max(low, -((most - total) // step)), min(high, (total - least) // step)
    return last - first > 64 or any(
        _solvable(rest, total - step * k) for k in range(first, last + 1))


def overlaps(x: object) -> bool:
    """Whether two elements of a tensor certainly have one place: a stride of 0."""
    return isinstance(x, torch.Tensor) and x.layout is torch.strided and any(
        step == 0 and size != 1 for size, step in zip(*_layout(x)[1:], strict=True))
