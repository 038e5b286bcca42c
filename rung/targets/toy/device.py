"""The toy as a device: its Kernel IR runs on NumPy, in the memory that the host gives."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rung.core.errors import LaunchError
from rung.core.op import Block, Func, Op, Value
from rung.core.scalar import round_bf16
from rung.core.types import BF16, BOOL, ArrayType, Type, dtype_of, shape_of
from rung.kernel.ir import Alloc, run_kernel_ir
from rung.kernel.moves import Engine
from rung.targets.base import buffers_of, symbols_of
from rung.targets.cpu import pool
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


class Toy(Device):
    """The one toy machine."""

    def load(self, kernels: Sequence[Func], source: str, stretches: Sequence[Stretch] = ()
             ) -> Mapping[str, Launch]:
        launches = {k.name: _launch(k) for k in kernels}
        return launches | {s.name: _run_stretch(s, launches) for s in stretches}

    def workspaces(self, memory: Memory) -> Workspaces:
        own = pool.of(memory)
        return own.take, own.give


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
        for v in buffers:
            if v in kernel.outs or v.role == "mutated":
                raw[v.name][...] = _stored(v, held[v.name])

    return launch


def _run_stretch(stretch: Stretch, launches: Mapping[str, Launch]) -> Launch:
    def run(addresses: Sequence[int], numbers: Sequence[int]) -> tuple[int, int, int]:
        sizes, site = dict(zip(stretch.sizes, numbers, strict=True)), 0
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
    shape = [int(e.evaluate(sizes)) for e in shape_of(t)]
    dtype = dtype_of(t)
    kind = np.dtype(np.uint16 if dtype == BF16 else dtype.numpy)
    strides = getattr(t, "strides", None)
    steps = None if strides is None else [int(e.evaluate(sizes)) * kind.itemsize for e in strides]
    span = 1 + sum((n - 1) * s // kind.itemsize for n, s in zip(shape, steps, strict=True)
                   ) if steps is not None else int(np.prod(shape))
    if not address or not all(shape):
        return np.zeros(shape, kind)
    memory = memoryview((ctypes.c_char * (span * kind.itemsize)).from_address(address)).cast("B")
    return np.ndarray(shape, kind, memory, strides=steps)


def _held(value: Value, raw: np.ndarray) -> np.ndarray:
    if dtype_of(value.type) == BF16:
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return np.array(raw, bool if dtype_of(value.type) == BOOL else raw.dtype)


def _stored(value: Value, held: np.ndarray) -> np.ndarray:
    if dtype_of(value.type) == BF16:
        bits: np.ndarray = round_bf16(held).view(np.uint32) >> 16
        return bits.astype(np.uint16)
    return held


