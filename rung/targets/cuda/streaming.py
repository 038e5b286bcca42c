"""Mappings of kernels that memory limits: pointwise, folds of rows and of columns, transposes.

In: a kernel and the sizes to expect. Out: splits of its axes, likely good ones first:

    y[i] = floor(x[i]) + 1, f32            i: grid *, thread 256, reg 4
    softmax over j<4096, bf16              i: grid *
                                           j: reg 4, thread 128, reg 8
    y[j] = fold add x[i,j] over i, f32     i: seq *, thread 32
                                           j: grid *, thread 8, reg 4

The innermost `reg` is one access of 16 bytes; neighbouring threads take neighbouring accesses. The
axis whose threads come last is the one that lanes of a warp lie along.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from rung.core.cost import known
from rung.core.machine import Machine
from rung.core.op import Func
from rung.core.types import dtype_of
from rung.loop import ir as loop
from rung.tile import mapping as tile
from rung.tile.complete import folded_axes, free_axes
from rung.tile.stmt import Access

Splits = tuple[tuple[str, int | None], ...]
Axes = dict[str, Splits]

BYTES = 16  # of the widest access
COPIES = 8  # at most, so that an access of the widest type is not longer than two of these
KEPT = 32  # elements of a row that a thread keeps in registers
IN_FLIGHT = 16  # elements of columns that a thread loads before it adds them
WARP = 32  # threads that fold without waiting for others
FEW = 8  # vectors that each element of a matrix meets, where reading that is all the work
LONGEST = 32768  # elements of rows that a block keeps in registers
TILE = 64  # rows and columns of what a block transposes
MOST = 1024  # threads of a block
ONCE = 512  # threads of a block that reads a long row once, or sums columns: two share a core


@dataclass(frozen=True)
class Stream:
    """A kernel on a machine, and the sizes to expect."""

    kernel: Func
    hints: Mapping[str, int]
    machine: Machine

    @property
    def free(self) -> list[str]:
        """Axes of stores that no fold runs over."""
        return free_axes(self.kernel, self.machine)

    @property
    def folded(self) -> list[str]:
        """Axes that folds run over."""
        return folded_axes(self.kernel, self.machine)

    @property
    def cores(self) -> int:
        """How many blocks keep the machine busy."""
        return self.machine.cores

    def size(self, axis: str) -> int:
        """Elements of an axis, as far as known."""
        return max(1, known(loop.extents_of(self.kernel)[axis], self.hints))

    def points(self, axes: Iterable[str]) -> int:
        return prod(map(self.size, axes))

    def accesses(self, kind: type[Access]) -> list[Access]:
        """Loads or stores, those of the most elements first."""
        found = [op for op in self.kernel.body.ops if isinstance(op, kind)]
        return sorted(found, key=lambda op: -self.points(op.nest))

    def vector(self, axis: str) -> int:
        """Elements of one wide access along an axis: the narrowest type's, 1 where there is no
        access along it or its rows are not aligned."""
        n, extent = self.widest(axis), loop.extents_of(self.kernel)
        while n > 1 and extent[axis].const_value is not None and extent[axis].const % n:
            n //= 2
        return n

    def widest(self, axis: str) -> int:
        """Elements of one wide access along an axis, if its rows were aligned."""
        widths = [dtype_of(op.buf.type).bytes for kind in (loop.Load, loop.Store)
                  for op in self.accesses(kind) if loop.stride(op, axis) == 1]
        return min(COPIES, BYTES // min(widths, default=BYTES))


def contiguous(op: Access) -> str | None:
    """The axis that an access runs along in memory."""
    return next((a for a in op.nest if loop.stride(op, a) == 1), None)


def power(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def last(axes: list[str], axis: str) -> list[str]:
    """The axes with one of them at the end."""
    return [*(a for a in axes if a != axis), axis]


# ---- pointwise
def flat(s: Stream) -> Iterator[Axes]:
    """One access a thread, which is as fast as copies get, or as many narrow ones as make up one;
    short rows share a block."""
    axes = s.free
    stores = s.accesses(loop.Store)
    along = contiguous(stores[0]) if stores else None
    if along not in axes:
        return
    n, axes = s.vector(along), last(axes, along)
    threads = 256
    while threads > 32 and s.points(axes) < s.cores * threads * n:
        threads //= 2
    lanes = min(threads, power(-(-s.size(along) // n)))
    splits: Axes = {a: (("seq", None),) for a in s.folded}
    splits |= {a: (("grid", None),) for a in axes}
    if len(axes) > 1:
        others = min(threads // lanes, power(s.size(axes[-2])))
        splits[axes[-2]] = (("grid", None), ("thread", others))
    more = s.widest(along) // n if s.size(along) >= 2 * lanes * s.widest(along) else 1
    splits[along] = (("grid", None), ("reg", more), ("thread", lanes), ("reg", n))
    yield splits


def turned(s: Stream) -> Iterator[tuple[Axes, tile.Place]]:
    """Transposes: square tiles come through shared memory, whose rows are one element longer, so
    that a column lies in all banks. Both sides of memory see whole rows of a tile."""
    stores, loads = s.accesses(loop.Store), s.accesses(loop.Load)
    along = contiguous(stores[0]) if stores and not s.folded else None
    across = [a for x in loads if (a := contiguous(x)) and along in x.nest and a != along
              and min(s.size(a), s.size(along or a)) >= TILE // 2]
    if along is None or not across:
        return
    n, axes = s.vector(along), last(last(s.free, across[0]), along)
    lanes = TILE // n
    splits: Axes = {a: (("grid", None),) for a in axes}
    splits[across[0]] = (("grid", None), ("reg", TILE * lanes // 256), ("thread", 256 // lanes))
    splits[along] = (("grid", None), ("thread", lanes), ("reg", n))
    names = sorted({x.buf.name for x in loads if contiguous(x) == across[0]})
    yield splits, tile.Place(tuple(names), "shared", along, "grid", pad=1)


# ---- folds
def rows(s: Stream) -> Iterator[Axes]:
    """Threads along rows that folds run over. Rows that fit are read once, into registers; short
    ones share a block, long ones are read again in each pass, from the cache."""
    free, folded, loads = s.free, s.folded, s.accesses(loop.Load)
    lead = contiguous(loads[0]) if loads else None
    if lead not in folded:
        return
    n, size = s.vector(lead), s.size(lead)
    many = s.points(free) >= 4 * s.cores
    sums = _sums_columns(s, lead)
    kept = max(n, KEPT if many and not sums else COPIES)
    if scanned := any(op.prefix and op.axis == lead for op in loop.folds(s.kernel)):
        n = kept = scan_block(s, lead)
    most = ONCE if sums else MOST
    threads = max(min(most, power(-(-size // kept))), min(WARP, power(-(-size // n))))
    splits: Axes = {a: (("grid", None),) for a in free}
    splits |= {a: (("seq", None),) for a in folded}
    if free and many and threads < 128:
        splits[free[-1]] = (("grid", None), ("thread", 128 // threads))
    lane: Splits = splits.pop(lead)
    fits = size * (1 if scanned else max(1, _held(s, lead))) <= LONGEST
    if not fits and not scanned:
        again = any(lead in op.nest for op in s.accesses(loop.Store))
        for threads in (MOST, ONCE) if again else (ONCE,):
            deep = 4 * s.widest(lead) // n  # as many bytes in flight where accesses are narrow
            yield splits | {lead: (*lane, ("reg", deep), ("thread", threads), ("reg", n))}
        return
    if loop.extents_of(s.kernel)[lead].const_value is not None and fits:
        lane = (("reg", -(-size // (threads * n))),)
    splits[lead] = (*lane, ("thread", threads), ("reg", n))
    yield splits


def _sums_columns(s: Stream, lead: str) -> bool:
    """Whether threads keep sums of columns beside the rows that they work on."""
    return any(op.axis != lead and lead in op.nest for op in loop.reductions(s.kernel))


def scan_block(s: Stream, lead: str) -> int:
    """Elements of a row that neighbour each other in a thread of a scan: two accesses, since each
    step of all threads waits for all of them."""
    n = s.vector(lead)
    return n if n == 1 else COPIES


def _held(s: Stream, lead: str) -> int:
    """How many different rows a block works on at once."""
    return len({op.buf for op in s.accesses(loop.Load) if lead in op.nest and len(op.nest) > 1})


def products(s: Stream) -> Iterator[Axes]:
    """Products of a matrix and a few vectors: a warp folds whole rows of the matrix, all of which
    it asks for at once; no thread waits for another warp."""
    found, loads = loop.contractions(s.kernel), s.accesses(loop.Load)
    lead = contiguous(loads[0]) if loads else None
    along = [a for a in loads[0].nest if a != lead] if loads else []
    if not lead or len(found) != 1 or s.folded != [lead] or not along or s.vector(lead) == 1:
        return
    others = [a for a in s.free if a not in along]
    n, most = s.vector(lead), s.points(others)
    if most > FEW or s.points(along) < WARP * s.cores:
        return
    steps, rows = -(-s.size(lead) // (WARP * n)), 2 if most == 1 else 1
    whole = loop.extents_of(s.kernel)[lead].const_value is not None and steps * rows <= KEPT
    splits: Axes = {a: (("grid", None),) for a in along}
    splits |= {a: (("reg", s.size(a)),) for a in others}
    splits[along[-1]] = (("grid", None), ("thread", 4), ("reg", rows))
    lane: Splits = (("reg", steps),) if whole else (("seq", None), ("reg", 2))
    splits[lead] = (*lane, ("thread", WARP), ("reg", n))
    yield splits


def again(s: Stream) -> Iterator[Axes]:
    """Rows that are read in each pass, where they cannot be kept."""
    wide = [a for a in s.folded if s.vector(a) > 1]
    for lead, threads in itertools.product(wide[:1], (256, 64)):
        splits: Axes = {a: (("grid", None),) for a in s.free}
        splits |= {a: (("seq", None),) for a in s.folded if a != lead}
        yield splits | {lead: (("seq", None), ("thread", threads), ("reg", s.vector(lead)))}


def columns(s: Stream) -> Iterator[Axes]:
    """Lanes along memory, the fold over other threads; blocks of few columns where all are few."""
    free, folded, loads = s.free, s.folded, s.accesses(loop.Load)
    along = contiguous(loads[0]) if loads else None
    if along not in free or not folded:
        return
    n, others = s.vector(along), s.points([a for a in free if a != along])
    size, lanes = s.size(folded[0]), 32

    def few() -> bool:
        return s.size(along) * others < 2 * s.cores * lanes * n
    while lanes > 8 and few():
        lanes //= 2
    while few() and n * dtype_of(loads[0].buf.type).bytes > BYTES:
        n //= 2
    deep = IN_FLIGHT // n if s.points(folded) * lanes >= 256 * IN_FLIGHT else 1
    plain = all(op.plain for op in loop.folds(s.kernel))
    more = [(MOST // lanes, rows) for rows in (deep, 1)] if few() and plain else []
    for down, rows in ((256 // lanes, deep), (256 // lanes, 1), *more, (1, 1)):
        splits: Axes = {a: (("grid", None),) for a in free if a != along}
        splits |= {a: (("seq", None),) for a in folded}
        splits[folded[0]] = (("seq", None), ("thread", min(down, power(size))))
        inner, *rest = splits[folded[-1]]
        splits[folded[-1]] = (inner, ("reg", rows), *rest)
        splits[along] = (("grid", None), ("thread", lanes), ("reg", n))
        yield splits
