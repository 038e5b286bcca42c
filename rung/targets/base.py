"""What a target is, and targets by name.

A target is what is known of a kind of machine without having one: its table, the mappings worth
pricing, the text of kernels. What runs them is its `device`. A new target is one folder beside this
file and a line in `TARGETS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from rung.core.errors import RungError
from rung.core.expr import Expr, is_size
from rung.core.machine import Machine
from rung.core.op import Func, Value, expressions, walk
from rung.core.types import ArrayType, TensorType, Type, contiguous
from rung.targets import TARGETS
from rung.tile.mapping import Mapping as TileMapping
from rung.tile.match import Library

Sizes = Mapping[str, int]
"""The sizes to expect, by symbol."""


@dataclass(frozen=True)
class Target:
    """One machine to compile for, as data and text; its name is that of `options={"target": name}`.

    `candidates(kernel, machine, hints)` are mappings worth pricing, and `emit(kernels)` is one
    source file for kernels of Kernel IR, which the target's compiler takes as it is.

    Optional features; the defaults mean unsupported. `libraries` are library calls that compute
    whole kernels. `keeps_call(call, operand types, hints)` says whether a library call that could
    be opened is faster as it is. `shares` says that kernels that differ in numbers only are one
    function of the source.
    """

    machine: Machine
    candidates: Callable[[Func, Machine, Sizes], Iterable[TileMapping]]
    emit: Callable[[Sequence[Func]], str]
    libraries: Sequence[Library] = ()
    keeps_call: Callable[[str, Sequence[Type], Sizes], bool] = lambda *_: False
    shares: bool = False

    @property
    def name(self) -> str:
        return self.machine.name


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
    made: Target = import_module(f"{TARGETS[name]}.target").target(name)
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
