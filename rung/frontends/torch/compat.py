"""Everything private that Rung takes from torch, in one place; torch 2.11 to 2.14.

Nothing here may import `torch._inductor`, which is slow to load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import _prims_common, fx
from torch._decomp import get_decompositions
from torch._decomp.decompositions import upsample_compute_output_size
from torch._functorch import config as settings
from torch._functorch._aot_autograd.subclass_utils import requires_subclass_dispatch
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import default_partition, must_recompute
from torch._guards import TracingContext
from torch._higher_order_ops.auto_functionalize import (
    auto_functionalized_v2 as auto_functionalized,
)
from torch._higher_order_ops.auto_functionalize import (
    get_mutable_args,
    read_view_information_from_args,
)
from torch._higher_order_ops.effects import with_effects
from torch._ops import OperatorBase, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes as untraced_values
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)
from torch.utils.checkpoint import CheckpointPolicy

SUPPORTED = (2, 11), (2, 14)  # the first and last minor version of torch

Function = Callable[..., Any]
Sympy: TypeAlias = Any  # an expression, whose classes have no types
Compiler = Callable[[fx.GraphModule, Sequence[Any]], Function]
Boxed = Callable[[list[Any]], Sequence[Any]]

__all__ = ["OpOverload", "OperatorBase", "auto_functionalized", "default_partition",
           "get_decompositions", "must_recompute", "suggest_memory_format",
           "unset_fake_temporarily", "untraced_values", "with_effects"]


def compile_graphs(gm: fx.GraphModule, example_inputs: Sequence[Any], forward: Compiler,
                   backward: Compiler, inference: Compiler, partition: Function,
                   decompositions: Mapping[OperatorBase, Function],
                   kernels: Mapping[OpOverload, Function | None],
                   metas: Mapping[OpOverload, Function]) -> Function:
    """AOTAutograd around compilers of forward, backward and inference graphs, which are traced
    with `decompositions` below autograd and with `kernels` above it; `metas` give results of
    symbolic sizes without data.

    Where it would only hand the arguments of an inference graph on, what `inference` made is
    called without it, which saves a microsecond or two a call.
    """
    if any(isinstance(x, list | tuple | dict) for x in example_inputs):  # of compiled autograd
        again = partial(compile_graphs, forward=forward, backward=backward, inference=inference,
                        partition=partition, decompositions=decompositions, kernels=kernels,
                        metas=metas)
        flatten = import_module("torch._dynamo.utils").flatten_graph_inputs
        flat: Function = flatten(gm, example_inputs, again)
        return flat
    alone: list[Function] = []
    autocast = torch._C._is_any_autocast_enabled()  # which AOTAutograd switches off to compile

    def infer(graph: fx.GraphModule, inputs: Sequence[Any]) -> Function:
        made = inference(graph, inputs)
        if not autocast and adds_nothing(graph, example_inputs):
            alone.append(unboxed(made, graph) if isinstance(gm, fx.GraphModule) else made)
        return unless_watched(made, graph)

    def first(graph: fx.GraphModule, inputs: Sequence[Any]) -> Function:
        return unless_watched(forward(graph, inputs), graph)

    def later(graph: fx.GraphModule, inputs: Sequence[Any]) -> Function:
        # Autograd calls the compiler and its product at a time when Dynamo may be tracing.
        made = unless_watched(untraced(backward)(graph, inputs), graph)
        return untraced(with_memory(made, graph))

    build: Any = aot_module_simplified
    with with_kernels(kernels, metas), gradients_without_autocast(), unread_draws(), counted():
        whole = build(
            gm, example_inputs, fw_compiler=first, bw_compiler=later,
            inference_compiler=infer, partition_fn=partition,
            decompositions=dict(decompositions), keep_inference_input_mutations=True)
    if is_splitting():  # the wrapper answers a first call without data
        alone.clear()
    if alone and isinstance(gm, fx.GraphModule):
        return alone[0]
    if any(map(is_plain_subclass, example_inputs)):
        whole = unwatched(whole)
    return alone[0] if alone else untraced(whole)  # flattened: of a list, as `whole` is then


@contextmanager
def counted() -> Iterator[None]:
    """Counts a graph that AOTAutograd compiles: Dynamo's splitter for data-parallel training tells
    it by that from one that runs as it is."""
    counts = import_module("torch._dynamo.utils").counters["aot_autograd"]
    try:
        yield
    except Exception:
        counts["not_ok"] += 1
        raise
    counts.update(total=1, ok=1)


def is_plain_subclass(x: object) -> bool:
    """Whether operators below autograd take a subclass of tensors for a tensor."""
    return isinstance(x, torch.Tensor) and type(x) not in (torch.Tensor, torch.nn.Parameter) and (
        type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__)


def unwatched(run: Function) -> Function:
    """`run` without AOTAutograd's look at the operators of a first call, which refuses subclasses.
    """
    def call(*args: object) -> object:
        with settings.patch(check_custom_op_aliasing=False):
            return run(*args)
    return call if hasattr(settings, "check_custom_op_aliasing") else run


def gradients_without_autocast() -> AbstractContextManager[object]:
    """Traces gradients as eager computes them where `backward` is called outside of autocast, as
    torch advises; what the user has set stays."""
    own = settings.backward_pass_autocast != "same_as_forward"
    off: AbstractContextManager[object] = settings.patch(backward_pass_autocast="off")
    return nullcontext() if own else off


def unread_draws() -> AbstractContextManager[object]:
    """While tracing, random numbers that nobody reads are drawn nevertheless, as in eager."""
    config = import_module("torch._inductor.config")  # which torch reads to drop dead code, alone
    kept: AbstractContextManager[object] = config.patch(fallback_random=True)
    return kept


ANALYSIS: Any = getattr(import_module("torch._functorch._aot_autograd.runtime_wrappers"),
                        "_AnalyzeCustomOpInputOutputMode", ())
"""The mode in which AOTAutograd calls a graph first, to see custom operators; () for none."""


def is_watched() -> bool:
    """Whether a mode of torch sees each operator, or stands for it, as FakeTensorMode does."""
    return torch._C._len_torch_dispatch_stack() > 0 and any(
        not isinstance(mode, ANALYSIS) for mode in _get_current_dispatch_mode_stack())


def unboxed(run: Boxed, graph: fx.GraphModule) -> Function:
    """`run` for arguments that are no list; the graph itself where a mode sees its operators."""
    def call(*args: Any) -> Sequence[Any]:
        if is_watched():
            seen: Sequence[Any] = graph(*args)
            return seen
        return run(list(args))
    return call


def unless_watched(run: Boxed, graph: fx.GraphModule) -> Boxed:
    """`run`, or the graph itself where a mode sees its operators."""
    def call(args: list[Any]) -> Sequence[Any]:
        if not is_watched():
            return run(args)
        given = tuple(args)
        args.clear()
        seen: Sequence[Any] = graph(*given)
        return seen
    return boxed(call)


WORK = ("num_mutated_inp_runtime_indices", "num_mutated_graph_handled_indices",
        "num_outputs_aliased", "num_unsafe_view_outputs", "num_intermediate_bases", "tokens",
        "dynamic_outputs", "is_rng_op_functionalized", "num_graphsafe_rng_states")
"""What AOTAutograd's wrapper looks after, as fields of its metadata that are 0 or empty if not."""


def adds_nothing(graph: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether the wrapper of an inference graph, which is being compiled, only calls it: nothing
    is mutated, aliased, a subclass, or could be recorded by autograd."""
    context = TracingContext.try_get()
    meta = context.fw_metadata if context else None
    tensors: Any = [x for x in inputs if isinstance(x, torch.Tensor)]
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    placeholders = graph.graph.find_nodes(op="placeholder")
    return (meta is not None and len(placeholders) == len(inputs) and not recorded
            and not any(getattr(meta, name, True) for name in WORK)
            and getattr(meta, "grad_enabled_mutation", False) is None
            and not requires_subclass_dispatch(tensors, meta))


@contextmanager
def with_kernels(kernels: Mapping[OpOverload, Function | None],
                 metas: Mapping[OpOverload, Function]) -> Iterator[None]:
    """While tracing, these functions stand for operators, or where None the operators themselves,
    and not what they would be written as; `metas` for operators on tensors without data."""
    above = torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd
    below = (torch._C.DispatchKey.Meta,)
    taken = []
    for op, own, keys in (*((op, own, above) for op, own in kernels.items()),
                          *((op, own, below) for op, own in metas.items())):
        taken.append((op, keys, {k: op.py_kernels.pop(k) for k in keys if k in op.py_kernels}))
        if own is not None:
            op.py_kernels.update(dict.fromkeys(keys, own))
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, keys, before in taken:
            for key in keys:
                op.py_kernels.pop(key, None)
            op.py_kernels.update(before)
            op._dispatch_cache.clear()


suggest_memory_format = _prims_common.suggest_memory_format
output_size: Callable[..., list[Any]] = upsample_compute_output_size


def memory_order(x: torch.Tensor) -> list[int]:
    """The dimensions of a dense tensor in the layout of `x`, from the outermost to the innermost;
    asking for it installs no guard."""
    order, _ = _prims_common.compute_elementwise_output_logical_to_physical_perm(x)
    return order


def keep(nodes: Sequence[fx.Node]) -> None:
    """Mark nodes of a joint graph as kept for the backward graph, whatever a checkpoint says."""
    for node in nodes:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def forward_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a joint graph from the first to the last of the forward pass, without the
    gradients that come in."""
    nodes = list(graph.nodes)
    last = max((n for n, x in enumerate(nodes) if x.meta.get("partitioner_tag") == "is_forward"),
               default=-1)
    return [n for n in nodes[:last + 1] if not n.name.startswith("tangents_")]


def untraced(function: Function) -> Function:
    """`function`, at which Dynamo does not look."""
    disable: Any = torch._dynamo.disable
    wrapped: Function = disable(function, reason="compiled by Rung")
    return wrapped


def boxed(run: Callable[[list[Any]], Sequence[Any]]) -> Boxed:
    """`run` marked as a function of one list of arguments, which it empties."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def function_depth() -> int:
    """How many transforms of torch.func are open."""
    return len(torch._C._functorch.get_interpreter_stack() or ())


leave_functions: Callable[[int], None] = (
    torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth)
"""Close all but the outer ones of that many."""


def is_dynamos(error: Exception) -> bool:
    """Whether Dynamo itself does something about an error, such as to end the graph earlier."""
    known = import_module("torch._dynamo.exc")
    return isinstance(error, (
        known.TorchDynamoException, *known.exceptions_allowed_to_be_fallback))


def in_forward_mode() -> bool:
    """Whether tensors may carry tangents now, which no kernel of ours passes on. That this has not
    changed is among Dynamo's guards of the graph that is being compiled from here on."""
    context = TracingContext.try_get()
    if context is not None:
        guards, sources = map(import_module, ("torch._dynamo.guards", "torch._dynamo.source"))
        context.guards_context.dynamo_guards.add(
            sources.GlobalStateSource().make_guard(guards.GuardBuilder.DUAL_LEVEL))
    levels: Any = torch.autograd.forward_ad
    return bool(levels._current_level >= 0)


def is_backward(gm: fx.GraphModule) -> bool:
    """Whether a graph of AOTAutograd takes gradients of a forward graph's results."""
    return any(n.op == "placeholder" and n.name.startswith("tangents_") for n in gm.graph.nodes)


def has_no_memory(x: Any) -> bool:
    """Whether there is nothing where an argument lies, or where one that it is made of does; for
    Dynamo's splitter, fake ones only stand for those of the calls."""
    wrapper: Any = is_traceable_wrapper_subclass(x)
    if wrapper:
        return any(has_no_memory(getattr(x, name)) for name in x.__tensor_flatten__()[0])
    return is_only_zeros(x) or (isinstance(x, FakeTensor) and not is_splitting()) or (
        isinstance(x, torch.Tensor) and torch._is_functional_tensor(x))


def is_splitting() -> bool:
    """Whether Dynamo's splitter for data-parallel training compiles a part of a graph."""
    context = TracingContext.try_get()
    return context is not None and bool(context.fakify_first_call)


def is_only_zeros(x: object) -> TypeGuard[torch.Tensor]:
    """Whether a tensor has no memory: the zeros that autograd gives for the gradient of `sgn`."""
    return isinstance(x, torch.Tensor) and x._is_zerotensor()


def with_memory(run: Boxed, graph: fx.GraphModule) -> Boxed:
    """`run` of a backward graph, for gradients without memory too."""
    places = [n for n, x in enumerate(graph.graph.find_nodes(op="placeholder"))
              if x.name.startswith("tangents_")]

    def call(args: list[object]) -> Sequence[object]:
        for n in places:
            if is_only_zeros(x := args[n]):
                args[n] = torch.zeros_like(x)
        return run(args)
    return boxed(call)


def static_inputs(gm: fx.GraphModule) -> frozenset[int]:
    """Positions of the parameters and buffers among the graph's inputs, while it is compiled."""
    if is_backward(gm):
        return frozenset()  # torch's are positions in the forward graph
    context = TracingContext.try_get()
    meta = context.fw_metadata if context else None
    return frozenset(meta.static_input_indices or ()) if meta else frozenset()


def mutable(op: OpOverload, named: dict[str, Any], bases: Sequence[torch.Tensor],
            view: Function) -> dict[str, Any]:
    """The mutable arguments of a call that `auto_functionalized` makes, each as a `view` of (number
    of its base, the base, the elements of it that it is); what says so is taken out of `named`."""
    given: dict[str, Any] = dict(fx.map_arg(named, lambda n: n.meta["val"]))
    found = read_view_information_from_args(*get_mutable_args(op), given, list(bases))
    for name in named.keys() - given.keys():
        del named[name]

    def made(info: Any) -> Any:
        if info is None or isinstance(info, list):
            return info and [made(x) for x in info]
        base = bases[info.base_index]
        if not hasattr(info, "start"):
            return view(info.base_index, base, info.regenerate_view(bases))
        shape, steps = list(base.shape), base.stride()  # `slice` would count from the base's start
        shape[info.dim] = info.end - info.start
        part = base.as_strided(shape, steps, info.start * steps[info.dim])
        return view(info.base_index, base, part)
    return {name: made(info) for name, info in found.items()}


def is_traced() -> bool:
    """Whether TORCH_TRACE asks for structured logs."""
    logs = import_module("torch._logging._internal")
    return bool(logs.trace_log.handlers)


def trace_artifact(name: str, text: str) -> None:
    """A text of the graph that is being compiled, for TORCH_TRACE."""
    logs = import_module("torch._logging._internal")
    logs.trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"},
                          payload_fn=lambda: text)


@dataclass(frozen=True)
class Source:
    """What torch notes of how a node was made: Python's stack, the modules (path, class) from the
    outermost, the function that the user called, and whether the node is of its gradient."""

    stack: str
    modules: Sequence[tuple[str, object]]
    function: str
    backward: bool


def source_of(node: fx.Node) -> Source:
    """Where a node comes from."""
    meta = node.meta
    backward = meta.get("partitioner_tag") == "is_backward"
    modules = meta.get("fwd_nn_module_stack") or meta.get("nn_module_stack") or {}
    functions = meta.get("fwd_source_fn_stack") or meta.get("source_fn_stack") or [("", None)]
    return Source(meta.get("stack_trace") or "", list(modules.values()), functions[-1][0], backward)


def described(gm: fx.GraphModule) -> tuple[list[tuple[fx.Node, Any]], list[tuple[Any, Any]]]:
    """(node, what it is to AOTAutograd) of the inputs and of the results of a graph."""
    nodes = list(gm.graph.nodes)
    inputs = [(n, n.meta.get("desc")) for n in nodes if n.op == "placeholder"]
    results = nodes[-1].args[0]
    descriptions = nodes[-1].meta.get("desc") or [None] * len(results)
    return inputs, list(zip(results, descriptions, strict=True))


def keeps_graph() -> bool:
    """Whether the running backward pass leaves its graph for another one."""
    kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return kept


PROFILER: tuple[dict[str, Any], str] = vars(torch.autograd.profiler), "_is_profiler_enabled"
"""Where torch notes that a profiler runs: a dictionary, and the key of what is then True."""

recorded: Callable[[str], AbstractContextManager[object]] = torch._C._profiler._RecordFunctionFast
"""Records what runs inside as an event of this name, if a profiler runs."""


def is_profiled() -> bool:
    """Whether a profiler runs."""
    noted, key = PROFILER
    return noted.get(key) is True


def is_of_module(placeholder: fx.Node) -> bool:
    """Whether an argument of Dynamo's graph is a parameter or buffer of a module."""
    given = placeholder.meta.get("grapharg")
    return given is not None and bool(given.source.guard_source.is_unspecialized_nn_module())


def expected(size: int | torch.SymInt) -> int:
    """A size, or what a symbolic one is in the example, or 64 where only data tell; asking for it
    installs no guard."""
    if isinstance(size, torch.SymInt):
        return size.node.hint if size.node.has_hint() else 64
    return size


def size_expr(size: torch.SymInt) -> Sympy:
    """The sympy expression of a symbolic size; reading it installs no guard."""
    return size.node.expr


def is_signed(size: torch.SymInt, e: Sympy) -> bool:
    """Whether `e`, of symbols such as those of `size`, may be negative, as an integer argument of
    the user may; the size of a nested tensor has no bounds, and is none."""
    bounds = size.node.shape_env.bound_sympy(e)
    return bounds is not None and bool(bounds.lower < 0)


Symbolic = torch.SymInt | torch.SymFloat | torch.SymBool


def is_replaced(x: object) -> bool:
    """Whether another expression stands for a number, since a check told that they are equal."""
    return isinstance(x, Symbolic) and bool(x.node._expr != x.node.expr)


def constant_of(x: object) -> object:
    """The value of a number that is known without data; None of another one."""
    if not isinstance(x, Symbolic):
        return x
    e: Sympy = x.node.expr
    kind = bool if isinstance(x, torch.SymBool) else float if isinstance(x, torch.SymFloat) else int
    return None if e.free_symbols else kind(e)


def libraries() -> tuple[str, ...]:
    """The libraries whose private operators this torch has."""
    built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return ("onednn",) if built and hasattr(torch.ops.mkldnn, "_linear_pointwise") else ()
