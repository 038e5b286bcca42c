"""Copies of whole boxes by a mover: DMA, cp.async, or ordinary loads and stores.

    transfer x_tile at [1,0,0] from x at [16*ib,0] box [16,64] valid [40-16*ib,64] by dma group k
    commit k
    wait k pending 1

An asynchronous transfer completes only at a `wait` of its group that leaves at most `pending`
commits in flight. On NumPy its destination is poisoned until then, which exposes a missing wait or
a ring of too few slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from rung.core.errors import VerifyError
from rung.core.expr import Expr
from rung.core.interp import Interp
from rung.core.op import Effect, Op, Value
from rung.core.ops import LoadBase, StoreBase, Sub, rank_of
from rung.core.types import ArrayType, dtype_of

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Flight:
    """A started transfer: `inner` of the destination gets the source, the rest `fill`."""

    dst: np.ndarray
    box: Box
    inner: Box
    src: np.ndarray
    part: Box
    fill: float | int | bool | None

    def land(self) -> None:
        if self.fill is not None:
            self.dst[self.box] = self.fill
        self.dst[self.inner] = self.src[self.part].reshape(self.dst[self.inner].shape)

    def poison(self) -> None:
        self.dst[self.box if self.fill is not None else self.inner] = (
            np.nan if self.dst.dtype.kind == "f" else np.array(77).astype(self.dst.dtype))


class Engine(Interp):
    """An interpreter with transfers in flight: committed batches by group, oldest first.

    `tokens` are the available ones of rings, `counts` how often each was given and taken.
    """

    def __init__(self, symbols: Mapping[str, int] | None = None, axes: Sequence[str] = ()):
        super().__init__(symbols, axes)
        self.open: dict[str, list[Flight]] = {}
        self.flying: dict[str, deque[list[Flight]]] = {}
        self.tokens: dict[tuple[str, str], int] = {}
        self.counts: dict[tuple[str, str, type[Op]], int] = {}

    def fork(self) -> Engine:
        """An engine for one role: own loop variables, everything else shared."""
        twin = copy(self)
        twin.symbols = dict(self.symbols)
        return twin

    def turn(self, ready: Sequence[str]) -> str:
        """Schedules one of the ready roles; here the first, so that loads run ahead."""
        return ready[0]

    def start(self, group: str, flight: Flight) -> None:
        flight.poison()
        self.open.setdefault(group, []).append(flight)

    def commit(self, group: str) -> None:
        self.flying.setdefault(group, deque()).append(self.open.pop(group, []))

    def wait(self, group: str, pending: int) -> None:
        batches = self.flying.get(group, deque())
        while len(batches) > pending:
            for flight in batches.popleft():
                flight.land()
            for later in chain(self.open.get(group, ()), *batches):  # into the same slot, perhaps
                later.poison()


@dataclass(frozen=True, eq=False)
class Transfer(Op):
    """Copies a box's elements below `valid` in each dimension.

    The box covers the last dimensions of both sides; leading ones are indexed. The rest of the box
    becomes `fill` in an array and is unchanged in a tensor.
    """

    dst: Value
    dst_at: tuple[Sub, ...]
    src: Value
    src_at: tuple[Sub, ...]
    box: tuple[int, ...]
    valid: tuple[Expr, ...]
    fill: float | int | bool = 0
    mover: str = ""
    group: str = ""
    keyword: ClassVar[str] = "transfer"
    form: ClassVar[str] = ("transfer {dst} at [{dst_at}] from {src} at [{src_at}] box [{box}] "
                           "valid [{valid}]< fill {fill}>< by {mover}>< group {group}>")
    effect: ClassVar[Effect] = Effect.MUTATES

    def check(self) -> None:
        if dtype_of(self.dst.type) != dtype_of(self.src.type):
            raise VerifyError(f"moves {self.src.type} into {self.dst.type}")
        for value, at in ((self.dst, self.dst_at), (self.src, self.src_at)):
            if len(at) != rank_of(value.type) or len(at) < len(self.box):
                raise VerifyError(f"{value.name} has {rank_of(value.type)} dimensions, "
                                  f"not {len(at)}")
        if len(self.box) != len(self.valid):
            raise VerifyError(f"{len(self.valid)} valid extents for a box of {len(self.box)}")

    def accesses(self) -> tuple[LoadBase, StoreBase]:
        """The same as element accesses, for rules about reads and writes."""
        return LoadBase(self.src, self.src_at), StoreBase(self.dst, self.dst_at, self.src)

    def run(self, interp: Interp, *operands: Any) -> Any:
        assert isinstance(interp, Engine)
        dst, src = interp.values[self.dst], interp.values[self.src]
        count = [max(0, min(n, int(interp.index(e).item())))
                 for n, e in zip(self.box, self.valid, strict=True)]
        to, start = _corner(interp, self.dst_at), _corner(interp, self.src_at)
        inner, part = _slices(dst, to, count), _slices(src, start, count)
        whole = isinstance(self.dst.type, ArrayType)
        box = _slices(dst, to, self.box) if whole else inner
        flight = Flight(dst, box, inner, src, part, self.fill if whole else None)
        if self.group:
            interp.start(self.group, flight)
        else:
            flight.land()


def _corner(interp: Interp, at: Sequence[Sub]) -> list[int]:
    """A corner's position; data-dependent subscripts are the same for all threads."""
    found = (interp.index(s) if isinstance(s, Expr) else np.asarray(interp.values[s]) for s in at)
    return [int(x.item()) for x in found]


def _slices(array: np.ndarray, at: Sequence[int], count: Sequence[int]) -> Box:
    lead = len(at) - len(count)
    sizes = [1] * lead + list(count)
    for dim, (start, size) in enumerate(zip(at, sizes, strict=True)):
        if size and not 0 <= start <= array.shape[dim] - size:
            raise IndexError(f"a box [{start}, {start + size}) of dimension {dim}, which has "
                             f"{array.shape[dim]}")
    return tuple(slice(start, start + size) for start, size in zip(at, sizes, strict=True))


@dataclass(frozen=True, eq=False)
class Commit(Op):
    """Closes the batch of transfers that its group started since the last commit."""

    group: str
    keyword: ClassVar[str] = "commit"
    form: ClassVar[str] = "commit {group}"
    effect: ClassVar[Effect] = Effect.ORDERED

    def run(self, interp: Interp, *operands: Any) -> Any:
        assert isinstance(interp, Engine)
        interp.commit(self.group)


@dataclass(frozen=True, eq=False)
class Wait(Op):
    """Waits until at most the newest `pending` batches of a group are in flight."""

    group: str
    pending: int
    keyword: ClassVar[str] = "wait"
    form: ClassVar[str] = "wait {group} pending {pending}"
    effect: ClassVar[Effect] = Effect.ORDERED

    def run(self, interp: Interp, *operands: Any) -> Any:
        assert isinstance(interp, Engine)
        interp.wait(self.group, self.pending)
