"""Running the calls of a program through torch, on arguments bound to a schema and laid out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pkgutil import resolve_name
from typing import Any

import torch
from torch import fx

from rung.core.expr import Expr
from rung.core.op import Value
from rung.core.types import DType, TensorType, dtype_of, shape_of
from rung.frontends.torch.higher import APPLY
from rung.frontends.torch.tensors import DTYPES, HOST, memory_on
from rung.program.ir import Call, Composite


@cache
def overload(target: str) -> torch._ops.OpOverload:
    """The operator of a call's target, `aten.add.Tensor`; AttributeError if there is none."""
    namespace, name, variant = target.split(".")
    found: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, namespace), name), variant)
    return found


@cache
def callee(target: str, home: torch.device = HOST) -> Callable[..., object]:
    """What a call's target names: a copy, or memory as it is on a device, which every front end
    has; an operator, or a function of numbers such as `math.floor`."""
    own: dict[str, Callable[..., object]] = {"copy": torch.clone, "empty": memory_on(home)}
    if target in own:
        return own[target]
    found: Callable[..., object] = (overload if target.count(".") == 2 else resolve_name)(target)
    return found


@cache
def schema_of(target: str) -> str:
    """The schema of an operator of this torch, or "" where it has no such operator."""
    try:
        return str(overload(target)._schema)
    except (AttributeError, ValueError):
        return ""


def bind(call: Call) -> tuple[Any, ...]:
    """A call's arguments in the order of its schema, defaults filled in."""
    given = [a for name, a in call.args if not name]
    named = {name: a for name, a in call.args if name}
    rest = overload(call.target)._schema.arguments[len(given):]
    return (*given, *(named.get(a.name, a.default_value) for a in rest))


UNWRITTEN = ("aten.empty.memory_format", "aten.empty_like.default", "aten.empty_strided.default",
             "aten.new_empty.default", "aten.new_empty_strided.default")


@cache
def memory_of(target: str) -> str:
    """What is known of the storage of a call's results, as `program.ir.Call` says it."""
    if target in UNWRITTEN:
        return "unwritten"
    if target == "aten.clone.default":
        return "copy"
    schema = overload(target)._schema if schema_of(target) else None
    views = schema and not schema.is_mutable and any(r.alias_info for r in schema.returns)
    return "view" if views else ""


def effect_of(node: fx.Node) -> str:
    """The effect of a call of an operator, "" if there is none."""
    op: Any = node.target
    schema = op._schema
    if schema.is_mutable:
        return "mutates"
    if torch.Tag.nondeterministic_seeded in op.tags:
        return "" if _drops_nothing(node, schema) else "rng"
    if op.namespace == "_c10d_functional":
        return "ordered"
    return "" if schema.returns else "raises"


def _drops_nothing(node: fx.Node, schema: Any) -> bool:
    """Whether an op is random only by a dropout that is 0 here, as attention in inference."""
    for n, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[n] if n < len(node.args) else node.kwargs.get(
                argument.name, argument.default_value)
            return bool(given == 0)
    return False


def insert(like: fx.Node, target: Any, *args: Any, **named: Any) -> fx.Node:
    """A new call where its graph inserts now, with the lines of `like`; what it gives is known, as
    a tensor without data, by those of its arguments."""
    node = like.graph.call_function(target, args, named)
    node.meta = {**like.meta, "val": seen(node)}
    return node


def seen(node: fx.Node) -> torch.Tensor:
    """What a call gives, of the tensors without data that its arguments are known by."""
    args, named = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    made: torch.Tensor = node.target(*args, **named)  # type: ignore[operator]
    return made


def is_view(node: fx.Node) -> bool:
    """Whether a node gives one view of its first operand."""
    return isinstance(node.target, torch._ops.OpOverload) and effect_of(node) == "" and (
        node.target is torch.ops.aten._unsafe_view.default
        or [str(r.type) for r in node.target._schema.returns if r.alias_info] == ["Tensor"])


@cache
def gives_one(target: str) -> bool:
    """Whether a call gives its one result as it is, and not in a list or tuple."""
    if not schema_of(target):
        return target != APPLY
    return [str(r.type) for r in overload(target)._schema.returns] in (["Tensor"], ["number"])


def is_number(x: object) -> bool:
    """Whether an operand is no tensor."""
    return not (isinstance(x, Value) and isinstance(x.type, TensorType))


def numbers(call: Call) -> Iterator[tuple[Expr | Value, bool]]:
    """The numbers of a call that are not constant, and whether each is an index: a size, place or
    dimension, and not a value."""
    schema: Any = overload(call.target)._schema
    for argument, given in zip(schema.arguments, bind(call), strict=True):
        for x in given if isinstance(given, tuple) else (given,):
            if isinstance(x, Expr | Value) and is_number(x):
                kinds = {str(t) for t in (argument.type, *argument.type.containedTypes())}
                yield x, kinds.isdisjoint(("Tensor", "number"))


def run_call(call: Call | Composite, values: Mapping[Value, torch.Tensor | int],
             sizes: Mapping[str, int]) -> list[Any]:
    """The results of a call, flattened, without those that are None. What it updates stays as it
    is; those of a composite are contiguous, as its types say.
    """
    def real(x: Any) -> Any:
        return to_torch(x, values.__getitem__, sizes)

    states = [torch.as_tensor(values[v]).clone() for v in getattr(call, "updates", ())]
    out = callee(call.target)(*(real(a) for name, a in call.args if not name), *states,
                              **{name: real(a) for name, a in call.args if name})
    leaves = torch.utils._pytree.tree_leaves(out)
    found = [*states, *(leaf for leaf in leaves if leaf is not None)]
    return [x.contiguous() for x in found] if isinstance(call, Composite) else found


def refused(call: Call) -> str:
    """What torch raises for a call of operands that broadcast, tried on one element of each, or "":
    its kernels take fewer types and numbers than its rules of promotion."""
    values = {v: 1 if is_number(v) else torch.ones(
        (1,) * len(shape_of(v.type)), dtype=DTYPES[dtype_of(v.type)], device="cpu")
        for v in call.operands()}
    try:
        run_call(call, values, defaultdict(lambda: 1))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def to_torch(x: Any, value: Callable[[Value], Any], sizes: Mapping[str, int]) -> Any:
    """An argument of a call as torch takes it; `sizes` gives the numbers of size symbols."""
    match x:
        case Value():
            return value(x)
        case tuple():
            return [to_torch(y, value, sizes) for y in x]
        case Expr():
            return int(x.evaluate(sizes))
        case DType():
            return DTYPES[x]
        case str():
            kind, _, name = x.partition(":")
            if kind == "device":
                return torch.device(name)
            if kind in ("dtype", "layout", "memory_format"):
                return getattr(torch, name.removeprefix("torch."))
    return x


def text(argument: str) -> str:
    """A word among the arguments of a call, as Python that gives what torch takes for it."""
    kind, _, name = argument.partition(":")
    if kind == "device":
        return f"torch.device({name!r})"
    if kind in ("dtype", "layout", "memory_format"):
        return f"torch.{name.removeprefix('torch.')}"
    return repr(argument)
