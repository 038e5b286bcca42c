"""The bytes of a kernel under a mapping: what moves between memories, and in what time.

What crosses a level is what the outermost loops that fit in it touch, each access as often as the
loops outside of them are around it: not those right outside in which it stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod

from rung.core.machine import GRID, THREAD
from rung.core.op import Op
from rung.core.types import dtype_of
from rung.loop import ir as loop
from rung.tile.nest import Split
from rung.tile.stmt import Access, Stmt
from rung.tile.tree import Tree

PAGE = 3072  # bytes; a walk of longer steps misses the TLB and the prefetcher each time


class Traffic:
    """What the loops of a tree move. `sizes` are the extents of axes; `block`, how many elements of
    each are unrolled and in lanes; `loops`, the positions of those around each statement; `shared`,
    whether all cores take part in one."""

    def __init__(self, tree: Tree, sizes: Mapping[str, int],
                 block: tuple[Mapping[str, int], Mapping[str, int]],
                 loops: Mapping[Stmt, Sequence[int]], shared: Callable[[Stmt], bool]):
        self.tree, self.nest, self.sizes = tree, tree.nest, sizes
        self.units, self.lanes = block
        self.loops, self.shared = loops, shared
        self.threads = [s for s in self.nest.all() if s.kind == THREAD]
        self.trips = [self.nest.steps(s) or 1 for s in self.nest.loops]
        self.covered = [dict(sizes)]  # by depth: elements of each axis inside so many loops
        for one in self.nest.loops:
            inside = min(sizes[one.axis], one.step)
            self.covered.append({**self.covered[-1], one.axis: inside})

    def seconds(self, cores: float) -> Iterator[tuple[str, float, float]]:
        """Seconds that each memory behind a cache needs: while the cores compute, and while they
        wait."""
        spaces, accesses = self.nest.machine.spaces, self.tree.accesses
        last, around = len(self.covered) - 1, self._around()
        together = {x for s in self.tree.stmts if self.shared(s) for x in s.accesses}
        first = next((n for n, s in enumerate(self.nest.loops) if s.kind == GRID), last + 1)
        waste = [(x, self._tile(x), self._derate(x)) for x in accesses]
        footprints: dict[int, float] = {}
        for cache, behind in pairwise(spaces):
            fits = 0
            while fits < last:
                if fits not in footprints:
                    footprints[fits] = sum(self._bytes(x, fits) for x in accesses)
                several = cores if fits > first and not cache.owner else 1
                if footprints[fits] <= cache.bytes / several:
                    break
                fits += 1
            near = behind is spaces[1]  # the nearest cache serves any line equally well
            shared = behind.together(cores)
            moved = {False: 0.0, True: 0.0}
            for x, brought, derate in waste:
                depth = fits if brought is None else brought[0]
                again = self._again(x, around[x], depth) / (shared if x in together else 1)
                again *= self._sectors(x) if near else derate
                moved[brought is not None and brought[1]] += again * self._bytes(x, depth)
            yield behind.name, moved[False] / behind.rate, moved[True] / behind.rate

    def _tile(self, op: Access) -> tuple[int, bool] | None:
        """Where a mover brings what an access touches into a scratchpad, as a number of loops, and
        whether that is waited for: a ring brings the next tile meanwhile."""
        place = self.tree.mapping.placed(op.buf.name) if self.nest.machine.scratchpad else None
        if place is None:
            return None
        return self.nest.loops.index(self.nest.at(place)) + 1, place.ring < 2

    def _around(self) -> dict[Op, set[int]]:
        """For each access the positions of the loops that its statements run in."""
        found: dict[Op, set[int]] = {x: set() for x in self.tree.accesses}
        waits: dict[Op, frozenset[Split]] = {
            s.waits: s.carried for s in self.tree.stmts if s.waits}
        for s in self.tree.stmts:
            here = set(self.loops[s])
            if late := waits.get(s.op):
                here |= {n for n, x in enumerate(self.nest.loops) if x in late}
            for op in s.accesses:
                found[op] |= here
        return found

    def _again(self, op: loop.Load | loop.Store, around: set[int], depth: int) -> int:
        """How often the loops outside of `depth` bring what an access touches inside of it."""
        axes, outer, times = op.nest, depth, 1
        while outer and self.nest.loops[outer - 1].axis not in axes:
            outer -= 1
        for n in around:
            if n < outer:
                times *= self.trips[n]
        return times

    def _bytes(self, op: loop.Load | loop.Store, depth: int) -> float:
        covered, total = self.covered[depth], dtype_of(op.buf.type).bytes
        for a in op.nest:
            total *= covered[a]
        return total

    def _sectors(self, op: Access) -> float:
        """How many times its bytes an access of neighbouring threads moves."""
        along = next((a for a in op.nest if loop.stride(op, a) == 1), None)
        if not self.threads or along is None:
            return 1.0
        run = self.units[along] * prod(
            self.nest.steps(s) or 1 for s in self.threads if s.axis == along)
        size = dtype_of(op.buf.type).bytes * min(run, self.sizes[along])
        least = self.nest.machine.rates.flow.sector
        return max(1.0, least / size) if run < self.sizes[along] else 1.0

    def _derate(self, op: loop.Load | loop.Store) -> float:
        """Short contiguous runs waste bandwidth: prefetchers and pages follow long ones."""
        axes = op.nest
        run = next((a for a in axes if loop.stride(op, a) == 1), None)
        if run is None:
            return 4.0 if axes else 1.0
        others = [(n, s) for n, s in enumerate(self.nest.loops) if s.axis in axes
                  and s.axis != run]
        size = dtype_of(op.buf.type).bytes
        walks = [a for a in axes if self.lanes[a] * self.units[a] > 1 and a != run]
        if not others and not walks:
            return 1.0
        depth, far = 0, False
        if others:
            depth, step = others[-1][0] + 1, others[-1][1]
            far = loop.stride(op, step.axis) * size >= PAGE
        return 1 + (6 if far else 1) * 256 / (self.covered[depth][run] * size + 1)
