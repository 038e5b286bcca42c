"""What is tried of an entry of PyTorch's operator database: programs, each a function of tensors.

An item is one way of using an entry on one dtype; its programs are made anew from a seed, so that
eager, Rung and AOTAutograd alone each get inputs of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import set_rng_seed
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.float16,
          torch.int8, torch.uint8, torch.complex64)
WAYS = ("forward", "gradient", "second", "inplace", "errors")
"""second: a gradient of a gradient; inplace: the method that overwrites its first argument."""


UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty",
             "new_empty_strided")
"""Entries whose results have no defined content: it is set to 0."""


@dataclass(frozen=True)
class Item:
    """One way of using an entry of the database, by its name (`op` or `op.variant`)."""

    op: str
    dtype: str
    way: str
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.op} {self.dtype} {self.way}"


@dataclass(frozen=True)
class Program:
    """`fn` takes tensors that stand in for `tensors`, and gives the leaves of the result."""

    fn: Callable[..., list[Any]]
    tensors: Sequence[torch.Tensor]

    def inputs(self) -> list[torch.Tensor]:
        """Copies that share memory, overlap and require gradients as the originals do."""
        memo: dict[int, Any] = {}  # of storages: copies share them as the originals do
        made = [copy.deepcopy(x.detach(), memo) if x.layout is torch.strided
                else x.detach().clone() for x in self.tensors]
        return [x.requires_grad_(y.requires_grad)
                for x, y in zip(made, self.tensors, strict=True)]


@cache
def entries() -> dict[str, Any]:
    """The database by name."""
    return {".".join(filter(None, (op.name, op.variant_test_name))): op for op in op_db}


def items(op: str, device: str = "cpu") -> Iterator[Item]:
    """The items of an entry."""
    entry = entries()[op]
    known = entry.supported_dtypes(device)
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        if dtype in known:
            yield Item(op, name, "forward", device)
            if entry.inplace_variant is not None:
                yield Item(op, name, "inplace", device)
        if dtype is torch.float32 and dtype in entry.supported_backward_dtypes(device):
            yield Item(op, name, "gradient", device)
            if entry.supports_gradgrad:
                yield Item(op, name, "second", device)
    if entry.error_inputs_func is not None:
        yield Item(op, "any", "errors", device)


def programs(item: Item) -> list[Program]:
    """The programs of an item, with the same numbers in every run."""
    set_rng_seed(0)
    entry = entries()[item.op]
    function = entry.inplace_variant if item.way == "inplace" else entry.op
    if item.way == "errors":
        samples = [e.sample_input for e in entry.error_inputs(item.device)]
    else:
        grad = item.way in ("gradient", "second")
        samples = list(entry.sample_inputs(item.device, getattr(torch, item.dtype),
                                           requires_grad=grad))
    if item.way == "inplace":
        samples = [s for s in samples if not s.broadcasts_input]
    if item.op in UNDEFINED:
        make = function

        def function(*args: Any, **named: Any) -> torch.Tensor:
            made: torch.Tensor = make(*args, **named)
            return made.fill_(0)
    return [program(function, s) for s in samples[:1 if item.way == "second" else None]]


def program(function: Callable[..., Any], sample: Any) -> Program:
    """`function` of a sample's tensors; what else the sample has is a constant."""
    leaves, spec = tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
    after = sample.output_process_fn_grad

    def fn(*tensors: torch.Tensor) -> list[Any]:
        given = iter(tensors)
        x, args, named = tree_unflatten(
            [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)
        return tree_leaves(after(function(x, *args, **named)))
    return Program(fn, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])


def graph(batch: Sequence[Program]) -> fx.GraphModule:
    """Programs side by side as a graph like Dynamo's, which gives the tensors of all results."""
    def side_by_side(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given, outs = iter(tensors), list[Any]()
        for p in batch:
            outs += p.fn(*(next(given) for _ in p.tensors))
        return tuple(x for x in outs if isinstance(x, torch.Tensor))

    made = fx.Graph()
    nodes = [made.placeholder(f"x{n}") for n in range(sum(len(p.tensors) for p in batch))]
    made.output(made.call_function(side_by_side, tuple(nodes)))
    return fx.GraphModule({}, made)
