"""NVIDIA GPUs as devices: cubins loaded by the driver, launched from C, or from Python without a C
compiler.

A launch goes to the stream that the front end says is current. What a compiled program needs is one
JSON file in the cache: the names of its cubins and kernels, and its stretches in both languages.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from typing import Any

from rung.core import store, trace
from rung.core.errors import LaunchError, TargetCompileError
from rung.core.op import Func
from rung.targets.base import buffers_of, symbols_of
from rung.targets.cpu import glue
from rung.targets.cpu.build import build_plain, find
from rung.targets.cpu.device import NativeStretch
from rung.targets.cuda import build, driver
from rung.targets.cuda.emit import DECLARED
from rung.targets.cuda.faults import Faults, faults
from rung.targets.cuda.libraries import LIBRARIES
from rung.targets.cuda.stretch import FAILED, PENDING, Stretches
from rung.targets.device import (
    Device,
    Launch,
    Launched,
    Memory,
    Refuse,
    Signature,
    Stretch,
    Workspace,
    Workspaces,
)
from rung.targets.emit import dealt
from rung.targets.libraries import called

UNIT = 1 << 15
"""Characters of source that are worth a run of the compiler of their own."""
NEEDS = 9, 0  # the compute capability that kernels are made for


@dataclass(frozen=True)
class CompiledStretches:
    """What is loaded for a program: cubins, (name, bytes of dynamic shared memory, cubin) of each
    kernel, the Python of each stretch, and the library of their C, or ""."""

    cubins: list[str]
    kernels: list[tuple[str, int, int]]
    python: dict[str, str]
    library: str = ""


@dataclass(frozen=True)
class Cuda(Device):
    """One NVIDIA GPU."""

    runs_on = "cuda"

    def __post_init__(self) -> None:
        found = driver.capability(self.number)
        if found[0] != NEEDS[0]:
            raise LaunchError(f"kernels for {self.target.name} need compute capability "
                              f"{NEEDS[0]}.x, and device {self.number} has {found[0]}.{found[1]}")

    def identity(self) -> str:
        return "\0".join([repr(self.target.machine), build.version(), build.ARCH, *build.OPTIONS,
                          str(self.number)])

    def load(self, kernels: Sequence[Func], source: str, stretches: Sequence[Stretch] = ()
             ) -> Mapping[str, Launch]:
        text = Stretches(kernels, stretches, self.number)
        checks = text.check_kernels()
        head = DECLARED if checks and DECLARED not in source else ""
        units = _units(head + source, checks, len(kernels))
        names = build.cubins(units)
        where = [(name, dynamic, next(n for n, unit in enumerate(units) if f" {name}(" in unit))
                 for name, dynamic in text.names()]
        # Two programs may launch different kernels alike; each has a library of its own.
        library = _library(f"/* {' '.join(names)} */\n{text.c()}") if stretches else ""
        loadable = CompiledStretches(names, where, text.python(), library)
        content = json.dumps(asdict(loadable)).encode()
        file = f"{sha256(content).hexdigest()}.json"
        store.write(build.KIND, file, content)
        handles = self._handles(loadable)
        runs = {k.name: self._launch(k, text, handles) for k in kernels}
        return runs | self._stretches(loadable, file, [s.name for s in stretches], handles)

    def workspaces(self, memory: Memory) -> Workspaces:
        # The front end's memory is reused in the order of the stream.
        return lambda count: Workspace(count, memory), lambda _: None

    def reload(self, library: str, stretches: Sequence[str]) -> Mapping[str, Launch] | None:
        entry = store.find(build.KIND, library)
        if entry is None:
            return None
        loadable = CompiledStretches(**json.loads(entry.content))
        if not all(store.find(build.KIND, name) for name in loadable.cubins):
            return None
        return self._stretches(loadable, library, stretches, self._handles(loadable))

    def bind(self, signature: Signature, launch: Launch, slow: Launch, refuse: Refuse,
             **rest: Any) -> Launch:
        if not isinstance(launch, NativeCudaStretch):
            return slow
        return glue.bind(signature, launch.entry, launch.layout, launch.library, slow, refuse,
                         base=launch.base, here=launch.here, **rest)

    def refusing(self, refuse: Refuse, launch: Launch, checks: int) -> Refuse:
        found = faults(self.number)
        launch.base = found.add(refuse, checks)  # type: ignore[attr-defined]

        def raising(number: int, value: int, limit: int) -> None:
            if number == FAILED:
                name = launch.kernels[value]  # type: ignore[attr-defined]
                raise LaunchError(f"the kernel {name} did not start: {driver.words(limit)}")
            if number:
                found.fail(self.stream())
        return raising

    def call(self, kernel: Func) -> Launch:
        return called(LIBRARIES, kernel)

    # ---- loading
    def _handles(self, loadable: CompiledStretches) -> list[int]:
        with driver.current(self.number):
            libraries = [_loaded(name, self.number) for name in loadable.cubins]
            return [libraries[n].kernel(name, dynamic, self.number)
                    for name, dynamic, n in loadable.kernels]

    def _stretches(self, loadable: CompiledStretches, file: str, names: Sequence[str],
                   handles: Sequence[int]) -> dict[str, Launch]:
        kernels = [name for name, _, _ in loadable.kernels]
        path = find(loadable.library) if loadable.library else None
        if path is None:
            return {name: PythonStretch(self, loadable.python[name], name, handles, kernels, file)
                    for name in names}
        library = ctypes.CDLL(str(path))
        _bind(library, handles, faults(self.number))
        return {name: NativeCudaStretch(self, library, name, kernels, file) for name in names}

    def _launch(self, kernel: Func, text: Stretches, handles: Sequence[int]) -> Launch:
        """A launch of one kernel alone."""
        names, sizes = [v.name for v in buffers_of(kernel)], symbols_of(kernel)
        buffers = len(names)
        shape = text.start(Launched(kernel.name, (), ()))

        def launch(*args: int) -> None:
            numbers = dict(zip(sizes, args[buffers:], strict=True))
            blocks = int(shape.blocks.evaluate(numbers))
            blocks = min(blocks, shape.most) if shape.most else blocks
            wide = shape.needs.holds(dict(zip(names, args, strict=False)), numbers)
            with driver.current(self.number):
                driver.launch(handles[shape.kernel + (not wide)], blocks, shape.threads,
                              shape.dynamic, self.stream(), args[:buffers], args[buffers:])
        return launch


DEVICE = Cuda


def _units(source: str, checks: str, count: int) -> list[str]:
    """The sources of cubins of about equal length, the last with the kernels of checks."""
    units = min(1 + len(source) // UNIT, count or 1)
    *made, last = dealt(f"\n{source}", '\nextern "C" __global__', units)
    return [*made, last + checks]


@cache
def _loaded(name: str, device: int) -> driver.LoadedCubin:
    """A cubin in the cache, loaded once, its checks bound to the device's record of faults."""
    entry = store.find(build.KIND, name)
    if entry is None:
        raise LaunchError(f"{name} has gone from the cache")
    library = driver.LoadedCubin(entry.content)
    faults(device).watch(library)
    return library


def _library(text: str) -> str:
    """The name of the C library of stretches; "" where there is no compiler."""
    try:
        return build_plain(text).name
    except TargetCompileError as error:
        trace.emit("declined", "stub", "native launches", str(error))
        return ""


def _bind(library: ctypes.CDLL, handles: Sequence[int], found: Faults) -> None:
    """Write what the C of stretches needs to its `cuda`."""
    library.bound.restype = ctypes.c_void_p
    place = library.bound()
    words: list[ctypes.c_void_p | int | None] = [
        *(handles or [0]), driver.address("cuCtxGetDevice"), found.record.address,
        driver.address("cuLaunchKernel")]
    (ctypes.c_void_p * len(words)).from_address(place)[:] = words


class NativeCudaStretch(NativeStretch):
    """A stretch in a C library."""

    def __init__(self, device: Cuda, library: ctypes.CDLL, name: str, kernels: Sequence[str],
                 file: str):
        super().__init__(library, name)
        self.device, self.kernels, self.file, self.base = device, kernels, file, 0
        self.here = ctypes.cast(library.here, ctypes.c_void_p).value or 0

    def words(self) -> tuple[int, int]:
        return self.device.stream(), self.base

    def _given(self, *args: Any) -> tuple[int, int, int]:
        with driver.current(self.device.number):
            return super()._given(*args)


class PythonStretch:
    """A stretch as Python that calls the driver."""

    def __init__(self, device: Cuda, text: str, name: str, handles: Sequence[int],
                 kernels: Sequence[str], file: str):
        self.device, self.handles, self.kernels = device, handles, kernels
        self.file, self.base, names = file, 0, dict[str, Any]()
        exec(compile(text, f"<rung {name}>", "exec"), names)
        self.run: Callable[..., None] = names[name]

    def __call__(self, addresses: Sequence[int], sizes: Sequence[int]) -> tuple[int, int, int]:
        stream = self.device.stream()

        def launch(kernel: int, blocks: int, threads: int, dynamic: int,
                   buffers: Sequence[int], numbers: Sequence[int]) -> None:
            if blocks > 0:
                driver.launch(self.handles[kernel], blocks, threads, dynamic, stream, buffers,
                              numbers)

        if faults(self.device.number).is_pending():
            return PENDING, 0, 0
        with driver.current(self.device.number):
            self.run(addresses, sizes, self.base, launch)
        return 0, 0, 0
