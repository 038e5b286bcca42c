"""Gradients of gradients: where a backward pass is itself differentiated, eager takes it over.

AOTAutograd's backward graph reads values that its forward graph kept, and these know no inputs; so
AOTAutograd raises. Here the function of autograd that it makes for a graph remembers the inputs of
a call, and under `create_graph=True` the forward graph runs again on them in eager. An input that
nothing kept for the backward pass comes of has no influence on it: of that, the layout is enough.
Of an input that the graph updates, the old value is kept; what it draws, it draws again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from rung.frontends.torch import compat, generators

Function: Any = torch.autograd.Function
Pass = Callable[..., Any]


@contextmanager
def differentiable(graphs: Sequence[fx.GraphModule]) -> Iterator[None]:
    """While AOTAutograd compiles: its function of autograd can be differentiated twice.

    The forward graph is in `graphs` once it is compiled, before the function is made of it.
    """
    def made(cls: Any, /, **_: Any) -> None:
        if hasattr(cls, "_aot_id") and graphs and repeats(graphs[0]):
            cls.forward = staticmethod(_remembering(
                cls.forward, felt(graphs[0]), _updated(graphs[0]), _draws(graphs[0])))
            cls.backward = staticmethod(_backward(cls.backward, graphs[0]))

    Function.__init_subclass__ = classmethod(made)
    try:
        yield
    finally:
        del Function.__init_subclass__


def repeats(graph: fx.GraphModule) -> bool:
    """Whether a graph changes nothing but inputs, as its last steps."""
    return not any(isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable
                   and not _is_update(n) for n in graph.graph.nodes)


def _is_update(node: fx.Node) -> bool:
    """Whether a node gives an input its new value, that none reads."""
    return (node.target is torch.ops.aten.copy_.default and not node.users
            and isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder")


def _updated(graph: fx.GraphModule) -> list[bool]:
    """For each input of a graph, whether the graph updates it."""
    found = {n.args[0] for n in graph.graph.nodes if _is_update(n)}
    return [n in found for n in graph.graph.nodes if n.op == "placeholder"]


def _draws(graph: fx.GraphModule) -> bool:
    """Whether a graph may draw random numbers."""
    ops: list[Any] = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    return any(isinstance(op, torch._ops.HigherOrderOperator) or (
        isinstance(op, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in op.tags) for op in ops)


def felt(graph: fx.GraphModule) -> list[bool]:
    """For each input of a forward graph, whether what is kept for the backward pass comes of it."""
    inputs, results = compat.described(graph)
    live = {node for node, what in results if isinstance(node, fx.Node) and (
        what is None or type(what).__name__.startswith("SavedForBackwards"))}
    for node in reversed(graph.graph.nodes):
        if node in live:
            live.update(node.all_input_nodes)
    return [node in live for node, _ in inputs]


def _remembering(forward: Pass, needed: Sequence[bool], updated: Sequence[bool],
                 draws: bool) -> Pass:
    def kept(x: Any, keep: bool, changes: bool) -> Any:
        if not keep and _is_plain(x):
            return _like(x)
        return x.clone() if changes and not x.requires_grad else x

    def run(ctx: Any, *args: Any) -> Any:
        whole = len(needed) == len(args)
        ctx.inputs_of_call = list(map(kept, args, needed, updated)) if whole else list(args)
        ctx.versions_of_inputs = _versions(ctx.inputs_of_call)
        ctx.drawn_from = generators.states() if draws else None
        return forward(ctx, *args)
    return run


def _is_plain(x: Any) -> bool:
    return type(x) is torch.Tensor and x.layout is torch.strided


def _like(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What makes a tensor of ones in the layout of `x`, without holding on to it."""
    shape, strides, grad = x.shape, x.stride(), x.requires_grad
    kind: dict[str, Any] = {"dtype": x.dtype, "device": x.device}
    return lambda: torch.empty_strided(shape, strides, **kind).fill_(1).requires_grad_(grad)


def _versions(args: Sequence[Any]) -> list[int]:
    return [x._version for x in args if isinstance(x, torch.Tensor) and not x.is_inference()]


def _backward(backward: Pass, graph: fx.GraphModule) -> Pass:
    def run(ctx: Any, *grads: Any) -> Any:
        inputs = ctx.inputs_of_call
        if not compat.keeps_graph():
            ctx.inputs_of_call = None
        if not torch.is_grad_enabled() or inputs is None or len(inputs) != _arity(graph):
            return backward(ctx, *grads)
        if _versions(inputs) != ctx.versions_of_inputs:
            raise RuntimeError("one of the variables needed for gradient computation has been "
                               "modified by an inplace operation")
        # torch 2.13 hands them over as one list
        given = grads[0] if grads and isinstance(grads[0], list) else grads
        with generators.drawing(ctx.drawn_from):
            return _eager(graph, [x() if callable(x) else x for x in inputs], given)
    return run


def _arity(graph: fx.GraphModule) -> int:
    return sum(n.op == "placeholder" for n in graph.graph.nodes)


class _Differentiable(fx.Interpreter):
    """Runs a graph without its updates. `copy` has no derivative, and that of the functional rrelu
    reads the noise of before (torch 2.13): they run as what has the right one."""

    def run_node(self, n: fx.Node) -> Any:
        return None if _is_update(n) else super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.copy.default:
            onto, source = args[:2]
            return source.to(onto.dtype).expand_as(onto).clone()
        if target is torch.ops.aten.rrelu_with_noise_functional.default:
            x, noise, *rest = args
            drawn = torch.empty_like(noise)
            return torch.ops.aten.rrelu_with_noise.default(x, drawn, *rest, **kwargs), drawn
        return super().call_function(target, args, kwargs)


def _eager(graph: fx.GraphModule, inputs: Sequence[Any],
           grads: Sequence[Any]) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the inputs, differentiable, from those of the graph's first results."""
    # what the graph kept for its backward pass comes after the results that have gradients
    pairs = [(y, g) for y, g in zip(_Differentiable(graph).run(*inputs), grads, strict=False)
             if isinstance(y, torch.Tensor) and y.requires_grad and g is not None]
    wanted = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    found: Any = torch.autograd.grad([y for y, _ in pairs], wanted, [g for _, g in pairs],
                                     create_graph=True, allow_unused=True) if pairs else ()
    left = iter(found)
    return tuple(next(left, None) if isinstance(x, torch.Tensor) and x.requires_grad else None
                 for x in inputs)
