"""The CPU targets: kernels of C, called through ctypes with raw addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rung.core.config import Settings
from rung.core.errors import LaunchError, TargetCompileError
from rung.core.machine import Machine
from rung.core.op import Func
from rung.core.types import I32, Type, dtype_of
from rung.targets.base import Launch, Signature, Stretch, Target, buffers_of, symbols_of
from rung.targets.cpu import glue
from rung.targets.cpu.atoms import Extension
from rung.targets.cpu.build import build, command_for, find, version
from rung.targets.cpu.emit import emit, emit_units
from rung.targets.cpu.groups import CpuPrelude
from rung.targets.cpu.libraries import called, keeps_call, libraries
from rung.targets.cpu.machine import (
    ASLEEP,
    AVX512,
    MACHINES,
    NEEDS,
    extended,
    extensions,
    features,
    host,
)
from rung.targets.cpu.packed import packed
from rung.tile.candidates_cpu import candidates
from rung.tile.mapping import Mapping as TileMapping
from rung.tile.match import Library, meaning_of


@dataclass(frozen=True)
class Cpu(Target):
    """One instruction set of x86-64."""

    name: str
    machine: Machine

    @property
    def libraries(self) -> Sequence[Library]:
        return libraries()

    def keeps_call(self, call: str, operands: Sequence[Type], hints: Mapping[str, int]) -> bool:
        return keeps_call(call, operands, hints, self.machine)

    def candidates(self, kernel: Func, machine: Machine, hints: Mapping[str, int]
                   ) -> Iterable[TileMapping]:
        for plain in candidates(kernel, machine, hints):
            yield plain
            if on_atoms := packed(kernel, machine, plain):
                yield on_atoms

    def emit(self, kernels: Sequence[Func]) -> str:
        return emit(kernels)

    def load(self, kernels: Sequence[Func], source: str, stretches: Sequence[Stretch] = ()
             ) -> Mapping[str, Launch]:
        missing = NEEDS[self.name] - features()
        if missing:
            raise LaunchError(f"this CPU has no {', '.join(sorted(missing))}, which {self.name} "
                              f"needs")
        path = build(emit_units(kernels, source, stretches), self.machine)
        return bound(path, kernels, [s.name for s in stretches])

    def identity(self) -> str:
        return "\0".join([repr(self.machine), *command_for(self.machine), version()])

    def reload(self, library: str, stretches: Sequence[str]) -> Mapping[str, Launch] | None:
        path = find(library)
        return bound(path, (), stretches) if path else None

    def bind(self, signature: Signature, launch: Launch, slow: Launch, **rest: Any
             ) -> Launch:
        assert isinstance(launch, NativeStretch)
        return glue.bind(signature, launch.entry, launch.layout, launch.library, slow, **rest)

    def call(self, kernel: Func) -> Callable[..., torch.Tensor]:
        mapping: TileMapping = kernel.attr("mapping")
        (use,) = mapping.uses
        return called(use.atom, kernel, [v.name for v in buffers_of(kernel)])


def target(name: str) -> Cpu:
    """The target of a name in `TARGETS`; `cpu` is the widest that runs here, with all its atoms.

    Prices count on as many cores as torch has threads now; kernels run with what it has then.
    Threads that wait asleep make a fork dear.
    """
    machine = MACHINES[name] if name != "cpu" else extended(
        host(), filter(knows, extensions(host())))
    rates = machine.rates
    if Settings.from_environment().asleep:
        rates = replace(rates, fork=ASLEEP)
    return Cpu(machine.name, replace(machine, cores=torch.get_num_threads(), rates=rates))


@cache
def knows(extension: Extension) -> bool:
    """Whether the compiler and its assembler are new enough for an instruction."""
    prelude, acc = CpuPrelude(), dtype_of(meaning_of(extension.atom).outs[0].type)
    call = prelude.call(extension.atom.name, acc, 16, ["c", "a", "b"])
    state, word = prelude.type(acc, 16), prelude.type(I32, 16)
    probe = f"{state} probe({state} c, {word} a, {word} b) {{ return {call}; }}\n"
    try:
        build([prelude.text() + probe], extended(AVX512, [extension]))
        return True
    except TargetCompileError:
        return False


class NativeStretch:
    """A stretch in a library, callable with sequences of addresses and sizes."""

    def __init__(self, library: ctypes.CDLL, name: str):
        self.library, self.run, self.file = library, library[name], Path(library._name).name
        self.one = library[f"step_{name}"]
        self.run.restype = self.one.restype = ctypes.c_long
        self.entry, self.layout = (ctypes.cast(library[n], ctypes.c_void_p).value or 0
                                   for n in (name, f"layout_{name}"))

    def __call__(self, addresses: Sequence[int], sizes: Sequence[int]) -> tuple[int, int, int]:
        return self._given(self.run, addresses, sizes)

    def step(self, n: int, addresses: Sequence[int], sizes: Sequence[int]) -> tuple[int, int, int]:
        """One step of the stretch alone."""
        return self._given(self.one, addresses, sizes, ctypes.c_long(n), 1)

    def _given(self, run: Launch, addresses: Sequence[int], sizes: Sequence[int], *rest: object
               ) -> tuple[int, int, int]:
        found = (ctypes.c_long * 2)()
        site = run((ctypes.c_void_p * len(addresses))(*addresses),
                   (ctypes.c_long * len(sizes))(*sizes), found, *rest)
        return site, found[0], found[1]


def bound(path: Path, kernels: Sequence[Func], stretches: Sequence[str] = ()
          ) -> dict[str, Launch]:
    """The functions of a library that run each kernel and stretch."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise LaunchError(f"cannot load {path}: {error}") from None
    launches: dict[str, Launch] = {}
    for kernel in kernels:
        run = library[f"run_{kernel.name}"]
        run.restype = None
        run.argtypes = ([ctypes.c_void_p] * len(buffers_of(kernel))
                        + [ctypes.c_long] * len(symbols_of(kernel)))
        launches[kernel.name] = run
    return launches | {name: NativeStretch(library, name) for name in stretches}
