"""The CPU as a device: compiled C, called through ctypes with raw addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rung.core.errors import LaunchError
from rung.core.op import Func
from rung.targets.base import buffers_of, symbols_of
from rung.targets.cpu import glue, pool
from rung.targets.cpu.build import build, command_for, find, version
from rung.targets.cpu.emit import emit_units
from rung.targets.cpu.libraries import LIBRARIES
from rung.targets.cpu.machine import NEEDS, features
from rung.targets.device import Device, Launch, Memory, Refuse, Signature, Stretch, Workspaces
from rung.targets.libraries import called


class Cpu(Device):
    """This CPU, with the instruction set of the target."""

    def identity(self) -> str:
        machine = self.target.machine
        return "\0".join([repr(machine), *command_for(machine), version()])

    def load(self, kernels: Sequence[Func], source: str, stretches: Sequence[Stretch] = ()
             ) -> Mapping[str, Launch]:
        name = self.target.name
        missing = NEEDS[name] - features()
        if missing:
            raise LaunchError(f"this CPU has no {', '.join(sorted(missing))}, which {name} needs")
        path = build(emit_units(kernels, source, stretches), self.target.machine)
        return bound(path, kernels, [s.name for s in stretches])

    def workspaces(self, memory: Memory) -> Workspaces:
        own = pool.of(memory)
        return own.take, own.give

    def reload(self, library: str, stretches: Sequence[str]) -> Mapping[str, Launch] | None:
        path = find(library)
        return bound(path, (), stretches) if path else None

    def bind(self, signature: Signature, launch: Launch, slow: Launch, refuse: Refuse,
             **rest: Any) -> Launch:
        assert isinstance(launch, NativeStretch)
        return glue.bind(signature, launch.entry, launch.layout, launch.library, slow, refuse,
                         **rest)

    def call(self, kernel: Func) -> Launch:
        return called(LIBRARIES, kernel)


DEVICE = Cpu


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

    def words(self) -> tuple[int, int]:
        """What the entry is told where it leaves its error word."""
        return 0, 0

    def step(self, n: int, addresses: Sequence[int], sizes: Sequence[int]) -> tuple[int, int, int]:
        """One step of the stretch alone."""
        return self._given(self.one, addresses, sizes, ctypes.c_long(n), 1)

    def _given(self, run: Launch, addresses: Sequence[int], sizes: Sequence[int], *rest: object
               ) -> tuple[int, int, int]:
        found = (ctypes.c_long * 2)(*self.words())
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
