"""What a target is, and targets by name.

A target turns Kernel IR into source and, where it can run here, source into functions that the
host calls with addresses: `launch(address of each buffer..., size symbols...)`, in the order of
`buffers_of` and `symbols_of`. A new target is one folder beside this file and a line in `TARGETS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from rung.core.errors import LaunchError, RungError
from rung.core.expr import Expr, is_size
from rung.core.machine import Machine
from rung.core.op import Func, Value, expressions, walk
from rung.core.types import ArrayType, TensorType, Type, contiguous
from rung.targets import TARGETS
from rung.tile.mapping import Mapping as TileMapping
from rung.tile.match import Library

Launch = Callable[..., Any]
Place = tuple[int, int]
"""Where a buffer of a stretch lies: the number of an address, and bytes after it."""


@dataclass(frozen=True)
class Launched:
    """One kernel of a stretch, with the places of its buffers."""

    kernel: str
    places: tuple[Place, ...]
    sizes: tuple[str, ...]


@dataclass(frozen=True)
class Checked:
    """One check of a stretch: an error unless low <= v < high for all elements at `place`."""

    place: Place
    type: TensorType
    low: Expr
    high: Expr


@dataclass(frozen=True)
class Stretch:
    """Kernels and checks that run one after the other in one native call.

    The launch of a stretch takes a sequence of addresses (of tensors `given`, then of those `made`
    for it, then of the workspace if there is one) and one of `sizes`. It gives its error word:
    the number of the check that failed, from 1, the first element at fault and the upper limit;
    or three times 0. It may have a method `step`, which takes the number of a step before these,
    to run that one alone. Equal ones may differ in name.
    """

    name: str = field(compare=False)
    given: tuple[TensorType, ...]
    made: tuple[TensorType, ...]
    sizes: tuple[str, ...]
    steps: tuple[Launched | Checked, ...]


@dataclass(frozen=True)
class Signature:
    """How Python calls a stretch.

    `kinds` has a word for each argument, in order: `f32/2` for a tensor's type and rank, `size`,
    `address` or `unused`; `made` the same for the tensors that the call makes, of which `results`
    are returned. `boxed`: the arguments come in one list, which is emptied.
    """

    kinds: tuple[str, ...]
    made: tuple[str, ...]
    results: tuple[int, ...]
    boxed: bool = False


class Target(ABC):
    """One machine to compile for; `name` is that of `options={"target": name}`.

    What a machine need not have says no here: libraries, a cache of its code, faster calls.
    """

    name: str
    machine: Machine

    @property
    def libraries(self) -> Sequence[Library]:
        """Library calls that compute whole kernels."""
        return ()

    def keeps_call(self, call: str, operands: Sequence[Type], hints: Mapping[str, int]) -> bool:
        """Whether an ATen overload, which could be opened, is better called as it is."""
        return False

    @abstractmethod
    def candidates(self, kernel: Func, machine: Machine, hints: Mapping[str, int]
                   ) -> Iterable[TileMapping]:
        """Mappings worth pricing for a kernel."""

    @abstractmethod
    def emit(self, kernels: Sequence[Func]) -> str:
        """One source file for kernels of Kernel IR, which the target's compiler takes as it is."""

    @abstractmethod
    def load(self, kernels: Sequence[Func], source: str, stretches: Sequence[Stretch] = ()
             ) -> Mapping[str, Launch]:
        """A launch for each kernel and stretch, by name. TargetCompileError or LaunchError if
        that fails."""

    def identity(self) -> str:
        """All that source and libraries depend on besides the kernels: machine, compiler, flags."""
        return self.name

    def reload(self, library: str, stretches: Sequence[str]) -> Mapping[str, Launch] | None:
        """The launches of stretches from the library in the cache that is called as the `file` of
        a launch said; None if it is gone."""
        return None

    def bind(self, signature: Signature, launch: Launch, slow: Launch, **rest: Any) -> Launch:
        """`slow`, Python that calls the launch of a stretch, or what does the same faster; `rest`
        is what that needs of the host."""
        return slow

    def call(self, kernel: Func) -> Launch:
        """What runs a kernel that is a library's, on the tensors that are its parameters, and gives
        its output."""
        raise LaunchError(f"{self.name} calls no libraries")


def is_library(kernel: Func) -> bool:
    """Whether a kernel's mapping only hands it to a library."""
    mapping: TileMapping | None = kernel.attr("mapping")
    return bool(mapping and mapping.uses and not mapping.axes)


class UnknownTarget(RungError, ValueError):
    """No target has this name."""


def target(name: str) -> Target:
    """The target called `name`; UnknownTarget names those that exist."""
    if name not in TARGETS:
        raise UnknownTarget(f"no target is called {name!r}; there are {', '.join(TARGETS)}")
    made: Target = import_module(TARGETS[name]).target(name)
    return made


def buffers_of(kernel: Func) -> tuple[Value, ...]:
    """A kernel's tensors, in the order in which a launch takes their addresses."""
    return tuple(v for v in (*kernel.params, *kernel.outs) if isinstance(v.type, TensorType))


def strides_of(kind: Type) -> tuple[Expr, ...]:
    """Strides in elements; those of contiguous memory are as torch has them, none is 0."""
    assert isinstance(kind, TensorType | ArrayType)
    given = kind.strides if isinstance(kind, TensorType) else None
    return contiguous(kind.shape) if given is None else given


def sizes_of(kernel: Func) -> Iterator[Expr]:
    """The expressions of a kernel in which there are size symbols, in order."""
    whole = (*(e for v in buffers_of(kernel) for e in _sizes(v)),
             *(e for op in walk(kernel.body) for e in expressions(op)))
    return (e for e in whole if any(map(is_size, e.symbols())))


def symbols_of(kernel: Func) -> tuple[str, ...]:
    """Size symbols that a kernel reads, in the order in which a launch takes them: by name."""
    return tuple(sorted({s for e in sizes_of(kernel) for s in e.symbols() if is_size(s)}))


def _sizes(buffer: Value) -> tuple[Expr, ...]:
    assert isinstance(buffer.type, TensorType)
    return (*buffer.type.shape, *(buffer.type.strides or ()))
