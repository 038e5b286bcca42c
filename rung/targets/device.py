"""What a device is: it runs a target's kernels, and has the memory that they work in.

Code is generated without one. Each kernel and stretch that a device loads becomes a function that
the host calls with addresses: `launch(address of each buffer..., size symbols...)`, in the order of
`buffers_of` and `symbols_of`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

from rung.core.errors import LaunchError
from rung.core.expr import Expr
from rung.core.op import Func
from rung.core.types import TensorType
from rung.targets import TARGETS
from rung.targets.base import Target

Launch = Callable[..., Any]
Refuse = Callable[[int, int, int], None]
"""Raises what an error word says, if it says anything."""
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


ALIGN = 64
Memory = Callable[[int], tuple[object, int]]
"""Allocates so many bytes of undefined content: what keeps them, and their address."""


class Workspace:
    """At least `bytes` bytes from `address`, a multiple of 64."""

    __slots__ = ("address", "bytes", "memory")

    def __init__(self, count: int, memory: Memory):
        self.memory, start = memory(count + ALIGN)
        self.address = -(-start // ALIGN) * ALIGN
        self.bytes = count


Workspaces = tuple[Callable[[int], Any], Callable[[Any], None]]
"""Take and give back the memory of temporaries: `take(count).address` is that of so many bytes."""


@dataclass(frozen=True)
class Device(ABC):
    """What runs the kernels of one target here; `number` tells it from others of its kind.

    Tensors belong to the front end and lie where `runs_on` says; a device with another memory
    copies what a launch reads and writes. Launches run in the order of their calls, or of the
    stream that `stream()` gives for each.

    Optional features; the defaults mean unsupported: a cache of loaded code, a faster call than
    Python's, library calls.
    """

    target: Target
    number: int = 0
    stream: Callable[[], int] = lambda: 0
    runs_on: ClassVar[str] = "cpu"

    def identity(self) -> str:
        """All that loaded code depends on besides the kernels: machine, compiler, flags."""
        return self.target.name

    @abstractmethod
    def load(self, kernels: Sequence[Func], source: str, stretches: Sequence[Stretch] = ()
             ) -> Mapping[str, Launch]:
        """A launch for each kernel and stretch, by name. TargetCompileError or LaunchError if
        that fails."""

    @abstractmethod
    def workspaces(self, memory: Memory) -> Workspaces:
        """The workspaces of launches, from the front end's memory or of its own."""

    def reload(self, library: str, stretches: Sequence[str]) -> Mapping[str, Launch] | None:
        """The launches of stretches from the library in the cache that is called as the `file` of
        a launch said; None if it is gone."""
        return None

    def refusing(self, refuse: Refuse, launch: Launch, checks: int) -> Refuse:
        """`refuse`, which knows the error words of the checks in a stretch, for those of the device
        too."""
        return refuse

    def bind(self, signature: Signature, launch: Launch, slow: Launch, refuse: Refuse,
             **rest: Any) -> Launch:
        """`slow`, Python that calls the launch of a stretch, or what does the same faster; `rest`
        is what that needs of the host."""
        return slow

    def call(self, kernel: Func) -> Launch:
        """What runs a kernel that is a library's, on the tensors that are its parameters, and gives
        its output."""
        raise LaunchError(f"{self.target.name} calls no libraries")


LATE: list[Callable[[bool], None]] = []
"""What raises what the checks of a device found that are told of later, after waiting for it or
not."""


def settle(wait: bool = True) -> None:
    """Raise what the checks of devices found so far, or, after waiting, at all."""
    for look in LATE:
        look(wait)


def device(target: Target, place: str = "cpu", stream: Callable[[], int] = lambda: 0) -> Device:
    """The device of this machine that runs a target's kernels on the tensors of a place, such as
    `cuda:1`; LaunchError if there is none."""
    module = f"{TARGETS[target.name]}.device"
    if find_spec(module) is None:
        raise LaunchError(f"kernels for {target.name} are not launched yet, only emitted")
    kind, (where, _, number) = import_module(module).DEVICE, place.partition(":")
    if where != kind.runs_on:
        raise LaunchError(f"kernels for {target.name} run on tensors of {kind.runs_on}, and these "
                          f"are on {place}")
    made: Device = kind(target, int(number or 0), stream)
    return made
