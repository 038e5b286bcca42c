"""The emulator as a device: kernels and stretches in C++, called as the CPU's are."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock

from rung.core.errors import LaunchError
from rung.core.op import Func
from rung.targets.cpu import pool
from rung.targets.cpu.build import build_cpp, version
from rung.targets.cpu.device import NativeStretch, bound
from rung.targets.cuda_emulated.emit import HOST, emit_library
from rung.targets.device import Device, Launch, Memory, Stretch, Workspaces

FLAGS = ("-std=gnu++17", "-O1", "-ffp-contract=off", "-fno-math-errno",
         "-fno-trapping-math", "-fno-exceptions", "-U_FORTIFY_SOURCE", "-shared", "-fPIC", "-w",
         "-fsanitize=thread", "-nodefaultlibs")  # without libraries, the sanitizer's is left out
LIBRARIES = ("-lm", "-lc", "-lgcc")
LEAST = 'extern "C" void __tsan_init() {}'
_lock = Lock()  # a library runs one launch at a time


class Emulated(Device):
    """An emulated GPU, in the memory of the host."""

    def identity(self) -> str:
        return "\0".join([repr(self.target.machine), version(), *FLAGS, HOST])

    def load(self, kernels: Sequence[Func], source: str, stretches: Sequence[Stretch] = ()
             ) -> Mapping[str, Launch]:
        text = emit_library(kernels, source, stretches)
        path = build_cpp(text, FLAGS, LIBRARIES, LEAST)
        found = bound(path, kernels, [s.name for s in stretches])
        return {name: EmulatedLaunch(run, path) for name, run in found.items()}

    def workspaces(self, memory: Memory) -> Workspaces:
        own = pool.of(memory)
        return own.take, own.give


DEVICE = Emulated


class EmulatedLaunch:
    """A function of a library, that raises what the emulator found."""

    def __init__(self, run: Launch, path: Path):
        self.run, self.fault = run, ctypes.CDLL(str(path)).take_fault

    def __call__(self, *args: object) -> object:
        return self._checked(self.run, *args)

    def step(self, *args: object) -> object:
        """One step of a stretch alone."""
        assert isinstance(self.run, NativeStretch)
        return self._checked(self.run.step, *args)

    def _checked(self, run: Launch, *args: object) -> object:
        with _lock:
            made, text = run(*args), ctypes.create_string_buffer(400)
            self.fault(text)
        if text.value:
            raise LaunchError(text.value.decode())
        return made
