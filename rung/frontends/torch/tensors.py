"""Torch's tensors as the host's code has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch._C._dynamo import guards
from torch.utils._pytree import tree_leaves

from rung.core.types import BF16, BOOL, F16, F32, F64, I8, I16, I32, I64, U8, DType
from rung.program.externs import Native, Tensors, Texts

HOST = torch.device("cpu")


def memory_on(home: torch.device) -> Callable[..., torch.Tensor]:
    """What makes tensors of undefined content on a device, of a size, strides and element type."""
    def new_memory(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=home)
    return new_memory


def bytes_on(home: torch.device) -> Callable[[int], tuple[torch.Tensor, int]]:
    """What gives so many bytes of undefined content on a device, and their address."""
    def memory(count: int) -> tuple[torch.Tensor, int]:
        made = torch.empty(count, dtype=torch.uint8, device=home)
        return made, made.data_ptr()
    return memory


DTYPES: dict[DType, torch.dtype] = {dtype: getattr(torch, name) for name, dtype in (
    ("float64", F64), ("float32", F32), ("bfloat16", BF16), ("float16", F16), ("int64", I64),
    ("int32", I32), ("int16", I16), ("int8", I8), ("uint8", U8), ("bool", BOOL))}
"""The element types of the IR as torch's."""

bump = torch.autograd.graph.increment_version
"""Tell autograd that a tensor has changed."""


def cloned(args: Sequence[Any], written: Sequence[int] | None = None) -> list[Any]:
    """Copies of the tensors among `args`, with their strides; those that share memory still do, and
    those that are conjugated or negated when they are read still are. With `written`, only what
    shares memory with the arguments at these places is copied."""
    memory: dict[int, torch.UntypedStorage] = {}
    places = range(len(args)) if written is None else written
    storages = {args[n].untyped_storage()._cdata for n in places if _in_memory(args[n])}
    copies = []
    for x in args:
        if _in_memory(x) and x.untyped_storage()._cdata in storages:
            old: Any = x.untyped_storage()
            if old._cdata not in memory:
                memory[old._cdata] = old.clone()
            copy = torch.empty(0, dtype=x.dtype, device=x.device).set_(
                memory[old._cdata], x.storage_offset(), x.size(), x.stride())
            copy = torch.conj(copy) if x.is_conj() else copy
            x = torch._neg_view(copy) if x.is_neg() else copy
        copies.append(x)
    return copies


def _in_memory(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.layout is torch.strided


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


LOWEST = 1 << 16
"""No memory lies below this address, which a tensor without memory has, or a view of one."""


def address(home: torch.device, x: torch.Tensor, name: str, shape: Sequence[int],
            strides: Sequence[int], dtype: torch.dtype) -> int:
    """Where a tensor lies; RuntimeError unless it has memory on the device, in this layout. A
    tensor whose class says itself what operators do, as a fake one does, need not have memory."""
    if x.dtype is not dtype or x.shape != shape or x.layout is not torch.strided or not (
            0 in shape or all(n == 1 or a == b
                              for n, a, b in zip(shape, x.stride(), strides, strict=True))):
        raise RuntimeError(f"{name} is {tuple(x.shape)} of {x.dtype}, laid out as {_layout(x)}, "
                           f"where the program was compiled for {shape} of {dtype}, {strides}")
    own = type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    at = x.data_ptr() if x.device == home and not own else 0
    if at < LOWEST and 0 not in shape:
        raise RuntimeError(f"{name}, a {type(x).__name__} of {x.device}, has no memory here")
    return at


def _layout(x: torch.Tensor) -> object:
    return x.stride() if x.layout is torch.strided else x.layout


def leaves(out: Any, count: int, op: str, places: Sequence[int] = ()) -> list[Any]:
    """The `count` results of a call without structure, those at these `places` if not all are
    wanted, and without those that are None where torch has told that they are; RuntimeError for
    another count."""
    found = [out[n] for n in places] or tree_leaves(out)
    if len(found) != count:
        found = [leaf for leaf in found if leaf is not None]
    if len(found) != count:
        raise RuntimeError(f"{op} gave {len(found)} results, where {count} were promised")
    return found


def dtype_text(dtype: DType) -> str:
    """An element type in Python; those that the IR does not compute with are called as torch's."""
    return str(DTYPES.get(dtype) or getattr(torch, dtype.name))


FAST = "_empty_strided_%s"
"""Torch's own function, on the current device, that takes a third of the time of the public one;
both are blind to default devices."""

PLACES = {"cpu": 1, "cuda": 2}
"""DLPack's kinds of devices."""


def native_on(home: torch.device) -> Native | None:
    """How C reads tensors of a device; None where this torch has no DLPack exchange API."""
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    types = {dtype.name: theirs for dtype, theirs in DTYPES.items()}
    empty = getattr(guards, FAST % home.type, memory_on(home))
    return exchange and Native(exchange, (torch.Tensor, torch.nn.Parameter), types, empty,
                               (PLACES[home.type], home.index or 0))


def stream_on(home: torch.device) -> int:
    """The stream of CUDA that is current for a device, as its driver has it; 0 on the host."""
    current: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)
    return current(home.index) if home.type == "cuda" else 0


TEXTS = Texts(
    dtype_text, "{0}.stride()", "{0}.is_contiguous()", "{0}.view({1})", "{0}.as_strided({1}, {2})",
    "{0}.copy_({1})", "{0}.data_ptr()", "{0}.data",
    # torch itself refuses to change a tensor of the inference mode outside of it
    "if {0}.is_inference(): {0}[None][:0].zero_()")


@cache
def tensors_on(home: torch.device) -> Tensors:
    """The tensors of programs that run on a device."""
    empty = memory_on(home) if home != HOST else getattr(guards, FAST % "cpu", memory_on(home))
    functions = {"empty": empty, "fit": fit, "leaves": leaves, "bump": bump,
                 "address": partial(address, home), "torch": torch}
    return Tensors(TEXTS, functions, bytes_on(home), partial(native_on, home), str(home),
                   partial(stream_on, home))
