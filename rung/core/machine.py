"""Machines as data: levels, memory spaces, movers and atoms that the same passes read.

A level is a place in the loop nest where a split of an axis may run; its kind says how: `grid` on
cores or blocks, `thread` in lockstep, `seq` as a loop, `unroll` as copies, `vector` as lanes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rung.core.layout import Panel
from rung.core.types import DTYPES

GRID, THREAD, SEQ, UNROLL, VECTOR = "grid", "thread", "seq", "unroll", "vector"


@dataclass(frozen=True)
class Level:
    """One level. `limit` caps the product of its sizes over all axes; 0 is no cap."""

    name: str
    kind: str
    limit: int = 0


@dataclass(frozen=True)
class Space:
    """A memory space: capacity in bytes, a core's rate in bytes a second, whom it belongs to (a
    level), and the rate of all cores together (0: not known).

    `atomics` are the updates, each a monoid and an element type, that it makes in one step, so that
    threads and blocks may meet at an element.
    """

    name: str
    bytes: int
    rate: float
    owner: str = ""
    explicit: bool = False  # a scratchpad: nothing is there that a mover did not bring
    atomics: tuple[tuple[str, str], ...] = ()
    most: float = 0.0

    def together(self, cores: float) -> float:
        """How many times the rate of one core so many have together; where nothing is known, each
        further one adds 0.8."""
        if self.owner:
            return cores
        return min(cores, self.most / self.rate) if self.most else 1 + 0.8 * (cores - 1)


@dataclass(frozen=True)
class Reach:
    """What a library call reaches: shares of the f32 peak of all cores, and of the rate at which
    these read memory where it has only a few rows; and seconds of a call that does nothing."""

    peak: float
    stream: float
    dispatch: float


@dataclass(frozen=True)
class Issue:
    """What a core's instructions cost, in vector operations."""

    latency: float = 8.0  # that could start while one result is awaited
    load: float = 0.5  # of a broadcast from the nearest cache
    scale: float = 1.0  # of its operations/s a core keeps while all compute


@dataclass(frozen=True)
class Flow:
    """How threads reach memory, in bytes: the widest access of one, what those of a core have to
    ask for until memory has its rate, and the least that it brings."""

    access: int = 1
    flight: int = 0
    sector: int = 1


@dataclass(frozen=True)
class Rates:
    """Measured ceilings of one core for the cost model: bytes/s, operations/s by dtype name.

    `forms` are scalar functions that cost less than what they can replace: see `loop/strength.py`
    and `kernel/arithmetic.py`. `reach` has the library calls by atom and dtype.
    """

    memory: float
    cache: float
    flops: dict[str, float] = field(hash=False)
    launch: float = 1e-6
    fork: float = 0.0  # seconds to start and join a team of threads
    forms: tuple[str, ...] = ()
    flow: Flow = Flow()
    part: int = 256  # steps of a fold that are worth a part of their own
    issue: Issue = Issue()
    reach: dict[str, Reach] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Operand:
    """What an atom takes for one parameter of its meaning: in which space, and how it lies there.

    A layout speaks of the meaning's axes; None is that of the meaning's subscripts, or with
    `turns` also with the last two the other way round.
    """

    space: str
    layout: Panel | None = None
    turns: bool = False


@dataclass(frozen=True)
class Atom:
    """An instruction or a library call that a contraction can run on.

    `meaning` is what one call computes, as Loop IR: rows i, columns j (its lanes) and depth k, with
    the types of its operands. `rate` is the entry of `Rates.flops` at which it runs, `text` how the
    target writes it, and `excess` what that sums too much, from the second operand alone.
    """

    name: str
    meaning: str
    operands: tuple[Operand, ...]
    rate: str = "f32"
    text: str = ""
    excess: str = ""


@dataclass(frozen=True)
class Teams:
    """What runs a kernel's roles concurrently: queues, or teams of `threads` each.

    `most` threads and `registers` are those of a block.
    """

    roles: tuple[str, ...]
    threads: int = 0  # 0: each role is a queue of the machine
    most: int = 0
    registers: int = 0


@dataclass(frozen=True)
class Machine:
    """Everything that legality, price and lowering ask about a target."""

    name: str
    levels: tuple[Level, ...]
    spaces: tuple[Space, ...]
    rates: Rates
    lanes: int
    registers: int
    movers: tuple[str, ...] = ()
    atoms: tuple[Atom, ...] = ()
    cores: int = 1
    asynchronous: tuple[str, ...] = ()  # the movers whose transfers end at a wait
    teams: Teams | None = None  # None: a kernel has no roles

    @property
    def threaded(self) -> bool:
        """Whether blocks of threads run in lockstep: grid and thread loops stand outside all."""
        return any(x.kind == THREAD for x in self.levels)

    @property
    def scratchpad(self) -> bool:
        """Whether ops access only a memory that a mover fills."""
        return any(s.explicit for s in self.spaces)

    @property
    def masked(self) -> bool:
        """Whether the tail of an axis is one more masked step instead of separate code."""
        return self.threaded or self.scratchpad

    def atomic(self, monoid: str, dtype: str) -> bool:
        """Whether the memory of buffers makes such an update in one step."""
        return (monoid, dtype) in self.spaces[-1].atomics

    def deterministic(self) -> Machine:
        """The machine without atomic updates whose results depend on their order: sums of floats
        round."""
        def exact(monoid: str, dtype: str) -> bool:
            return monoid != "add" or not DTYPES[dtype].is_float

        return replace(self, spaces=tuple(
            replace(s, atomics=tuple(x for x in s.atomics if exact(*x))) for s in self.spaces))

    def level(self, name: str) -> Level | None:
        return next((x for x in self.levels if x.name == name), None)

    def rank(self, name: str) -> int:
        """Position of a level, outermost first."""
        return [x.name for x in self.levels].index(name)

    def atom(self, name: str) -> Atom | None:
        return next((x for x in self.atoms if x.name == name), None)

    def space(self, name: str) -> Space | None:
        return next((x for x in self.spaces if x.name == name), None)
