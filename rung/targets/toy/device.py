"""The toy as a device: its Kernel IR runs on NumPy, in memory of its own.

The host cannot read that memory: a stretch copies what it is given to it, and what kernels wrote
back. Memory is full of NaN until it is written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from rung.core.errors import LaunchError
from rung.core.op import Block, Func, Op, Value
from rung.core.scalar import round_bf16
from rung.core.types import BF16, BOOL, ArrayType, Type, dtype_of, shape_of
from rung.kernel.ir import Alloc, run_kernel_ir
from rung.kernel.moves import Engine
from rung.targets.base import buffers_of, strides_of, symbols_of
from rung.targets.device import Device, Launch, Launched, Memory, Stretch, Workspaces
from rung.targets.toy.machine import TOY

CAPACITY = {s.name: s.bytes for s in TOY.spaces}


class ToyEngine(Engine):
    """Runs transfers as the DMA does, and refuses more than a space holds at one time."""

    def __init__(self, symbols: Mapping[str, int] | None = None, axes: Sequence[str] = ()):
        super().__init__(symbols, axes)
        self.live: dict[Value, ArrayType] = {}

    def block(self, block: Block, args: Iterable[Any] = ()) -> Any:
        before = self.live
        out = super().block(block, args)
        self.live = before
        return out

    def step(self, op: Op) -> Any:
        for t in op.types if isinstance(op, Alloc) else ():
            assert isinstance(t, ArrayType)
            self.live = {**self.live, op.result: t}
            used = sum(x.bytes for x in self.live.values() if x.space == t.space)
            if used > CAPACITY[t.space]:
                raise LaunchError(f"{used} B live in {t.space}, which has {CAPACITY[t.space]}")
        return super().step(op)


class Region:
    """So many bytes of the toy's memory, for as long as it is held."""

    def __init__(self, size: int):
        number = next(_numbers)
        self.address, self.bytes = number << WINDOW, np.full(size, 0xFF, np.uint8)
        _regions[number] = self


WINDOW = 32  # bits of an address within a region
FIRST = 1 << 16  # number of a region: no process has memory at its address
_numbers = count(FIRST)
_regions: WeakValueDictionary[int, Region] = WeakValueDictionary()


def copy(to: int, source: int, size: int) -> None:
    """Copy bytes between addresses, of the host or the toy."""
    there, here = (_memory(at, size).ctypes.data if at >> WINDOW >= FIRST else at
                   for at in (to, source))
    ctypes.memmove(there, here, size)


def _memory(address: int, size: int) -> np.ndarray[Any, Any]:
    region, at = _regions.get(address >> WINDOW), address & (1 << WINDOW) - 1
    if region is None or at + size > len(region.bytes):
        raise LaunchError(f"the toy has no {size} B at {address:#x}")
    return region.bytes[at:at + size]


class Toy(Device):
    """The one toy machine."""

    def load(self, kernels: Sequence[Func], source: str, stretches: Sequence[Stretch] = ()
             ) -> Mapping[str, Launch]:
        launches, known = {k.name: _launch(k) for k in kernels}, {k.name: k for k in kernels}
        return launches | {s.name: _run_stretch(s, launches, known) for s in stretches}

    def workspaces(self, memory: Memory) -> Workspaces:
        return Region, lambda _: None


DEVICE = Toy


def _launch(kernel: Func) -> Launch:
    """Reads and writes buffers at their addresses; bf16 and bool as torch keeps them."""
    buffers, symbols = buffers_of(kernel), symbols_of(kernel)

    def launch(*args: int) -> None:
        sizes = dict(zip(symbols, args[len(buffers):], strict=True))
        raw = {v.name: _view(v.type, at, sizes)
               for v, at in zip(buffers, args[:len(buffers)], strict=True)}
        held = {v.name: _held(v, raw[v.name]) for v in buffers}
        run_kernel_ir(kernel, held, ToyEngine, sizes)
        for v in _written(kernel):
            raw[v.name][...] = _stored(v, held[v.name])

    return launch


def _written(kernel: Func) -> list[Value]:
    return [v for v in buffers_of(kernel) if v in kernel.outs or v.role == "mutated"]


def _run_stretch(stretch: Stretch, launches: Mapping[str, Launch], kernels: Mapping[str, Func]
                 ) -> Launch:
    tensors = (*stretch.given, *stretch.made)
    written = {place[0] for step in stretch.steps if isinstance(step, Launched)
               for v, place in zip(buffers_of(kernels[step.kernel]), step.places, strict=True)
               if v in _written(kernels[step.kernel])}

    def run(addresses: Sequence[int], numbers: Sequence[int]) -> tuple[int, int, int]:
        sizes = dict(zip(stretch.sizes, numbers, strict=True))
        regions = [Region(_size(t, sizes)) for t in tensors]
        own = [*(region.address for region in regions), *addresses[len(tensors):]]
        for n in range(len(stretch.given)):
            copy(own[n], addresses[n], len(regions[n].bytes))
        found = steps(own, sizes)
        for n in written & set(range(len(tensors))):
            copy(addresses[n], own[n], len(regions[n].bytes))
        return found

    def steps(addresses: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, int, int]:
        site = 0
        for step in stretch.steps:
            if isinstance(step, Launched):
                launches[step.kernel](*(addresses[n] + skip for n, skip in step.places),
                                      *(sizes[s] for s in step.sizes))
                continue
            site += 1
            values = _view(step.type, addresses[step.place[0]] + step.place[1], sizes)
            low, high = int(step.low.evaluate(sizes)), int(step.high.evaluate(sizes))
            bad = values[(values < low) | (values >= high)]
            if bad.size:
                return site, int(bad[0]), high
        return 0, 0, 0

    return run


def _view(t: Type, address: int, sizes: Mapping[str, int]) -> np.ndarray:
    shape, steps = ([int(e.evaluate(sizes)) for e in es] for es in (shape_of(t), strides_of(t)))
    kind = _kind(t)
    return np.ndarray(shape, kind, _memory(address, _size(t, sizes)).data,
                      strides=[n * kind.itemsize for n in steps])


def _kind(t: Type) -> np.dtype:
    return np.dtype(np.uint16) if dtype_of(t) == BF16 else dtype_of(t).numpy


def _size(t: Type, sizes: Mapping[str, int]) -> int:
    """Bytes from the first to the last element of a tensor."""
    shape, steps = ([int(e.evaluate(sizes)) for e in es] for es in (shape_of(t), strides_of(t)))
    last = sum((n - 1) * s for n, s in zip(shape, steps, strict=True))
    return (last + 1) * _kind(t).itemsize if all(shape) else 0


def _held(value: Value, raw: np.ndarray) -> np.ndarray:
    if dtype_of(value.type) == BF16:
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return np.array(raw, bool if dtype_of(value.type) == BOOL else raw.dtype)


def _stored(value: Value, held: np.ndarray) -> np.ndarray:
    if dtype_of(value.type) == BF16:
        bits: np.ndarray = round_bf16(held).view(np.uint32) >> 16
        return bits.astype(np.uint16)
    return held


