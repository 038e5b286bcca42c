"""Candidate mappings for GPUs: a few of each family, from the kernel's structure.

Contractions get square register tiles with operands in shared memory; folds and scans along
contiguous memory spread a row over threads; those across it give each thread a column; the rest is
flat. What has no such mapping runs one store's axes in parallel, or, at worst, in one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import prod

from rung.core.cost import known
from rung.core.errors import MappingError
from rung.core.expr import Expr
from rung.core.machine import Machine
from rung.core.op import Func
from rung.loop import ir as loop
from rung.targets.cuda import streaming
from rung.targets.cuda.streaming import Splits, Stream
from rung.tile import mapping as tile
from rung.tile.candidates_explicit import MOST
from rung.tile.complete import contractions, folded_axes, free_axes, late_axes, with_values
from rung.tile.legality import is_legal

Draft = tuple[dict[str, Splits], tuple[tile.Place, ...], tuple[tile.Use, ...]]


def candidates(kernel: Func, machine: Machine, hints: Mapping[str, int] | None = None
               ) -> Iterator[tile.Mapping]:
    """Legal mappings of the first family that has any, likely good ones first; of all families
    where stores are over unlike axes, of which a family may leave some serial."""
    nests = {frozenset(op.nest) for op in kernel.body.ops if isinstance(op, loop.Store)}
    stream = Stream(kernel, hints or {}, machine)
    for drafts in (_drafts(streaming.products(stream)), _tiles(kernel, hints or {}), _folds(stream),
                   _drafts(streaming.again(stream)), _rows(kernel, machine), _turned(stream),
                   _drafts(streaming.flat(stream)),
                   _flat(kernel, machine), _alone(kernel, machine)):
        if found := list(islice(_legal(kernel, machine, drafts), MOST)):
            yield from found
            if len(nests) == 1:
                return


def _legal(kernel: Func, machine: Machine, found: Iterable[Draft]) -> Iterator[tile.Mapping]:
    seen = set()
    for splits, places, uses in found:
        order = dict.fromkeys([*splits, *_ordered(kernel, machine)])
        lines = tuple(tile.AxisLine(a, tuple(s for s in splits.get(a, (("seq", None),))
                                             if s[1] != 1 or len(splits[a]) == 1)) for a in order)
        drafts = [tile.Mapping(kernel.name, machine.name, lines, places, uses=uses)]
        drafts += [replace(drafts[0], places=())] if uses else []
        for draft in drafts:
            try:
                made = with_values(kernel, draft, machine, "shared")
            except MappingError:
                continue
            if made is not None and str(made) not in seen and is_legal(kernel, made, machine):
                seen.add(str(made))
                yield made


def _ordered(kernel: Func, machine: Machine) -> list[str]:
    free, folded = free_axes(kernel, machine), folded_axes(kernel, machine)
    return list(dict.fromkeys([*free, *folded, *loop.extents_of(kernel)]))


def _size(kernel: Func, axis: str, hints: Mapping[str, int]) -> int:
    return known(loop.extents_of(kernel)[axis], hints)


# ---- contractions
def _tiles(kernel: Func, hints: Mapping[str, int]) -> Iterator[Draft]:
    """Register tiles of 16x16 threads; both operands come to shared memory at the loop over k."""
    for op, rows, cols in contractions(kernel):
        free = free_axes(kernel)
        if len(folded_axes(kernel)) > 1 or not rows or not cols:
            continue
        row, col = rows[-1], cols[-1]
        if free.index(row) > free.index(col):
            row, col = col, row
        small = _size(kernel, row, hints) < 8
        for r in (1,) if small else (4, 2, 1):
            splits: dict[str, Splits] = {a: (("grid", None),) for a in free}
            splits[row] = ((("grid", None), ("reg", min(4, _size(kernel, row, hints))))
                           if small else (("grid", None), ("thread", 16), ("reg", r)))
            splits[col] = (("grid", None), ("thread", 64 if small else 16), ("reg", r))
            splits[op.axis] = (("pipe", None), ("unroll", 16 if r == 4 else 32))
            buffers = sorted({x.buf.name for x in kernel.body.ops if isinstance(x, loop.Load)
                              and len(set(x.nest) - {op.axis}) > 0
                              and op.axis in x.nest})
            for ring in (2, 3):
                place = tile.Place(tuple(buffers), "shared", op.axis, "pipe", None, 1, ring,
                                   "cp.async")
                yield splits, (place,), (tile.Use(op.result.name, "ffma"),)


# ---- folds
def _folds(s: Stream) -> Iterator[Draft]:
    """Rows or columns at the rate of memory, and folds of folds."""
    if s.folded:
        yield from _chained(s.kernel) if late_axes(s.kernel) else ()
        yield from _drafts(streaming.rows(s))
        yield from _drafts(streaming.columns(s))


def _drafts(found: Iterable[dict[str, Splits]]) -> Iterator[Draft]:
    return ((splits, (), ()) for splits in found)


def _rows(kernel: Func, machine: Machine) -> Iterator[Draft]:
    """Threads along the folded axis where that is contiguous, else along the free one."""
    free, folded = free_axes(kernel, machine), folded_axes(kernel, machine)
    along = _contiguous(kernel)
    if not folded:
        return
    lead = next((a for a in folded if a in along), None)
    if lead is None:
        yield from _columns(free, folded)
        return
    copies = 4 if any(op.prefix and op.axis == lead for op in loop.folds(kernel)) else 1
    for threads in (256, 64, 32, 1024, 8):
        splits: dict[str, Splits] = {a: (("grid", None),) for a in free}
        splits[lead] = (("seq", None), ("thread", threads), ("reg", copies))
        yield splits, (), ()


def _columns(free: Sequence[str], folded: Sequence[str]) -> Iterator[Draft]:
    """A thread for each contiguous free element, neighbours side by side; more threads share the
    fold."""
    for across, down in ((32, 8), (32, 32), (64, 4), (128, 1), (32, 1), (8, 32)):
        for last in free[-1:]:
            splits: dict[str, Splits] = {a: (("grid", None),) for a in free[:-1]}
            splits[folded[0]] = (("seq", None), ("thread", down))
            splits[last] = (("grid", None), ("thread", across))
            yield splits, (), ()


def _chained(kernel: Func) -> Iterator[Draft]:
    """Folds of folds, as in attention: the axes that the first one lacks stay in the block."""
    late, folded = late_axes(kernel), folded_axes(kernel)
    for down, across in ((32, 8), (16, 16), (64, 4), (32, 1), (8, 32)):
        splits: dict[str, Splits] = {a: (("grid", None),) for a in free_axes(kernel)}
        splits |= {a: (("seq", None),) for a in late}
        splits[late[-1]] = (("seq", None), ("thread", across))
        splits[folded[0]] = (("seq", None), ("thread", down))
        yield splits, (), ()
        yield {**splits, late[-1]: (("thread", across), ("reg", None))}, (), ()


def _contiguous(kernel: Func) -> set[str]:
    """Axes that some load runs along in memory."""
    found: set[str] = set()
    for op in kernel.body.ops:
        if isinstance(op, loop.Load) and op.subs and isinstance(op.subs[-1], Expr):
            found |= op.subs[-1].symbols()
    return found


# ---- pointwise
def _turned(s: Stream) -> Iterator[Draft]:
    return ((splits, (place,), ()) for splits, place in streaming.turned(s))


def _flat(kernel: Func, machine: Machine) -> Iterator[Draft]:
    """The last axis over threads, others over blocks; folds as loops of each thread. Of stores over
    unlike axes those of one may be parallel, and the others loops of the first block."""
    free, folded = free_axes(kernel, machine), folded_axes(kernel, machine)
    stores = [op for op in kernel.body.ops if isinstance(op, loop.Store)]
    own = dict.fromkeys(tuple(a for a in free if a in op.nest) for op in stores)
    for axes in dict.fromkeys([*([tuple(free)] if _blocks(kernel, free) else []), *own]):
        for threads, copies in ((256, 1), (256, 4), (128, 1), (32, 1), (32, 4)):
            splits: dict[str, Splits] = {a: (("seq", None),) for a in (*free, *folded)}
            splits |= {a: (("grid", None),) for a in axes}
            for last in axes[-1:]:
                splits[last] = (("grid", None), ("reg", copies), ("thread", threads))
            yield splits, (), ()


def _blocks(kernel: Func, axes: Iterable[str]) -> bool:
    """Whether a grid can have a block for each point of these axes."""
    return prod(_size(kernel, a, {}) for a in axes) < 1 << 31


def _alone(kernel: Func, machine: Machine) -> Iterator[Draft]:
    """All in one thread."""
    yield {a: (("seq", None),) for a in _ordered(kernel, machine)}, (), ()
