"""Running the calls of a program through torch, on arguments bound to a schema and laid out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pkgutil import resolve_name
from typing import Any

import torch

from rung.core.expr import Expr
from rung.core.op import Value
from rung.core.types import DType, TensorType, dtype_of, shape_of
from rung.frontends.torch.compat import PROFILER as PROFILER
from rung.frontends.torch.compat import is_profiled as is_profiled
from rung.frontends.torch.compat import recorded as recorded
from rung.frontends.torch.higher import APPLY
from rung.frontends.torch.types import TORCH_DTYPES
from rung.program.ir import Call, Composite

DTYPES = {ours: theirs for theirs, ours in TORCH_DTYPES.items()}


@cache
def overload(target: str) -> torch._ops.OpOverload:
    """The operator of a call's target, `aten.add.Tensor`; AttributeError if there is none."""
    namespace, name, variant = target.split(".")
    found: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, namespace), name), variant)
    return found


@cache
def callee(target: str) -> Callable[..., object]:
    """What a call's target names: an operator, or a function of numbers such as `math.floor`."""
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


def fit(x: torch.Tensor, shape: Sequence[int], strides: Sequence[int],
        dtype: torch.dtype) -> torch.Tensor:
    """A copy of `x`, of this shape and type, with these strides; those of 0 say that it is
    expanded. `x` itself where only strides of dimensions of size 1 are others."""
    if x.shape != shape:
        raise RuntimeError(f"a tensor has shape {tuple(x.shape)}, where the program was compiled "
                           f"for {tuple(shape)}")
    known = zip(x.shape, x.stride(), strides, strict=True)
    if x.dtype is dtype and all(n == 1 or a == b for n, a, b in known):
        return x
    small = x[tuple(slice(None, None if stride else 1) for stride in strides)]
    made = torch.empty_strided(small.shape, tuple(strides), dtype=dtype, device=x.device)
    made.copy_(small)
    return made if small is x else made.expand(tuple(shape))
