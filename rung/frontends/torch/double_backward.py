"""Gradients of gradients: where a backward pass is itself differentiated, eager takes it over.

AOTAutograd's backward graph reads values that its forward graph kept, and these know no inputs; so
AOTAutograd raises. Here the function of autograd that it makes for a graph remembers the inputs of
a call, and under `create_graph=True` the forward graph runs again on them in eager. An input that
nothing kept for the backward pass comes of has no influence on it: of that, the layout is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from rung.frontends.torch import compat

Function: Any = torch.autograd.Function
Pass = Callable[..., Any]


@contextmanager
def differentiable(graphs: Sequence[fx.GraphModule]) -> Iterator[None]:
    """While AOTAutograd compiles: its function of autograd can be differentiated twice.

    The forward graph is in `graphs` once it is compiled, before the function is made of it.
    """
    def made(cls: Any, /, **_: Any) -> None:
        if hasattr(cls, "_aot_id") and graphs and repeats(graphs[0]):
            cls.forward = staticmethod(_remembering(cls.forward, felt(graphs[0])))
            cls.backward = staticmethod(_backward(cls.backward, graphs[0]))

    Function.__init_subclass__ = classmethod(made)
    try:
        yield
    finally:
        del Function.__init_subclass__


def repeats(graph: fx.GraphModule) -> bool:
    """Whether a graph gives the same when it runs again, and changes nothing."""
    ops: list[Any] = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    return not any(isinstance(op, torch._ops.OpOverload) and (
        op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags) for op in ops)


def felt(graph: fx.GraphModule) -> list[bool]:
    """For each input of a forward graph, whether what is kept for the backward pass comes of it."""
    inputs, results = compat.described(graph)
    live = {node for node, what in results if isinstance(node, fx.Node) and (
        what is None or type(what).__name__.startswith("SavedForBackwards"))}
    for node in reversed(graph.graph.nodes):
        if node in live:
            live.update(node.all_input_nodes)
    return [node in live for node, _ in inputs]


def _remembering(forward: Pass, needed: Sequence[bool]) -> Pass:
    def run(ctx: Any, *args: Any) -> Any:
        whole = needed if len(needed) == len(args) else [True] * len(args)
        ctx.inputs_of_call = [_like(x) if not keep and _is_plain(x) else x
                              for x, keep in zip(args, whole, strict=True)]
        ctx.versions_of_inputs = _versions(ctx.inputs_of_call)
        return forward(ctx, *args)
    return run


def _is_plain(x: Any) -> bool:
    return type(x) is torch.Tensor and x.layout is torch.strided


def _like(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What makes a tensor of ones in the layout of `x`, without holding on to it."""
    shape, strides, dtype, grad = x.shape, x.stride(), x.dtype, x.requires_grad
    return lambda: torch.empty_strided(shape, strides, dtype=dtype).fill_(1).requires_grad_(grad)


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
        return _eager(graph, [x() if callable(x) else x for x in inputs], given)
    return run


def _arity(graph: fx.GraphModule) -> int:
    return sum(n.op == "placeholder" for n in graph.graph.nodes)


class _Differentiable(fx.Interpreter):
    """Runs a graph; the functional `copy`, which has no derivative, as what has one."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.copy.default:
            onto, source = args[:2]
            return source.to(onto.dtype).expand_as(onto).clone()
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
