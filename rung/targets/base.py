"""What a target is, and the list of targets.

A target turns Kernel IR into source and, where it can run here, source into functions that the
host calls with addresses: `launch(address of each buffer..., size symbols...)`, in the order of
`buffers_of` and `symbols_of`. A new target is one folder beside this file and a line in `TARGETS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Protocol

from rung.core.errors import RungError
from rung.core.expr import Expr, is_size
from rung.core.machine import Machine
from rung.core.op import Func, Value, expressions, walk
from rung.core.types import TensorType
from rung.tile.atoms import Library
from rung.tile.mapping import Mapping as TileMapping

Launch = Callable[..., None]


class Target(Protocol):
    """One machine to compile for."""

    @property
    def name(self) -> str:
        """As in `options={"target": name}`."""

    @property
    def machine(self) -> Machine: ...

    @property
    def libraries(self) -> Sequence[Library]:
        """Library calls that compute whole kernels."""

    def candidates(self, kernel: Func, machine: Machine, hints: Mapping[str, int]
                   ) -> Iterable[TileMapping]:
        """Mappings worth pricing for a kernel."""

    def emit(self, kernels: Sequence[Func]) -> str:
        """One source file for kernels of Kernel IR, which the target's compiler takes as it is."""

    def load(self, kernels: Sequence[Func], source: str) -> Mapping[str, Launch]:
        """A launch for each kernel, by name. TargetCompileError or LaunchError if that fails."""

    def call(self, kernel: Func) -> Callable[..., None]:
        """What runs a kernel that is a library's, on the tensors that are its buffers."""


def is_library(kernel: Func) -> bool:
    """Whether a kernel's mapping only hands it to a library."""
    mapping: TileMapping | None = kernel.attr("mapping")
    return bool(mapping and mapping.uses and not mapping.axes)


class UnknownTarget(RungError, ValueError):
    """No target has this name."""


TARGETS = {  # name: module whose `target(name)` makes it
    "cpu": "rung.targets.cpu.target",
    "cpu.avx512": "rung.targets.cpu.target",
    "cpu.avx2": "rung.targets.cpu.target",
    "cpu.base": "rung.targets.cpu.target",
    "toy": "rung.targets.toy.target",
    "cuda.sm90": "rung.targets.cuda.target",
}


def target(name: str) -> Target:
    """The target called `name`; UnknownTarget names those that exist."""
    if name not in TARGETS:
        raise UnknownTarget(f"no target is called {name!r}; there are {', '.join(TARGETS)}")
    made: Target = import_module(TARGETS[name]).target(name)
    return made


def buffers_of(kernel: Func) -> tuple[Value, ...]:
    """A kernel's tensors, in the order in which a launch takes their addresses."""
    return tuple(v for v in (*kernel.params, *kernel.outs) if isinstance(v.type, TensorType))


def symbols_of(kernel: Func) -> tuple[str, ...]:
    """Size symbols that a kernel reads, in the order in which a launch takes them: by name."""
    sizes = [e for v in buffers_of(kernel) for e in _sizes(v)]
    sizes += [e for op in walk(kernel.body) for e in expressions(op)]
    return tuple(sorted({s for e in sizes for s in e.symbols() if is_size(s)}))


def _sizes(buffer: Value) -> tuple[Expr, ...]:
    assert isinstance(buffer.type, TensorType)
    return (*buffer.type.shape, *(buffer.type.strides or ()))
