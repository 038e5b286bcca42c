"""The splits of a mapping: the levels of each axis with their steps, and where it stands in them.

An axis of extent N with innermost block s has full blocks up to `N//s*s` and at most one ragged
block after them. Its loops are capped there and the ragged block is emitted once, or, on machines
that mask, it is one more step of the loop. Steps of a thread level run in lockstep: no loop, but a
part of each position, wherever it stands in its axis line.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from rung.core.expr import Expr, sym
from rung.core.machine import GRID, SEQ, THREAD, UNROLL, VECTOR, Level, Machine
from rung.core.text import LANE
from rung.tile import mapping as tile

LOOPS = (GRID, SEQ)


@dataclass(frozen=True, eq=False)
class Split:
    """One level of one axis: `size` steps (None: what is left) of `step` elements each."""

    axis: str
    level: str
    kind: str
    order: tuple[int, int]
    size: int | None
    step: int
    var: str = ""
    innermost: bool = False  # the last split of its axis that is a loop

    @property
    def name(self) -> str:
        return f"{self.axis}.{self.level}"


@dataclass(frozen=True)
class Unit:
    """A split at a leaf: `count` copies (or threads), `step` elements apart."""

    name: str
    count: int
    step: int


@dataclass(frozen=True)
class Spot:
    """Where an axis stands: its block starts at `base`; `block` is None while it is whole.

    `units`, `threads` and `lanes` cover the block at a leaf; `partial` says that part of it lies
    beyond the extent, so that accesses need a mask.
    """

    base: Expr
    block: int | None
    units: tuple[Unit, ...] = ()
    threads: tuple[Unit, ...] = ()
    lanes: int = 1
    partial: bool = False

    @property
    def index(self) -> Expr:
        """The position on the axis, with threads, unrolled axes and the lane as symbols."""
        total = self.base
        for unit in (*self.threads, *self.units):
            total = total + sym(unit.name) * unit.step
        return total + sym(LANE) if self.lanes > 1 else total


@lru_cache(1 << 12)
def _splits(line: tile.AxisLine, number: int, extent: Expr, machine: str,
            known: tuple[Level, ...]) -> tuple[Split, ...]:
    """The splits of an axis by its line, the one of that number in a mapping. Loop variables are
    k for a loop over elements, kb over blocks, k0 and k1 further out."""
    ranks = {x.name: n for n, x in enumerate(known)}
    if missing := [name for name, _ in line.splits if name not in ranks]:
        tile.refuse(f"{machine} has no level {missing[0]}, only {', '.join(ranks)}")
    levels = [known[ranks[name]] for name, _ in line.splits]
    sizes = _sizes(line, levels, extent)
    nested = [ranks[x.name] for x in levels if x.kind != THREAD]
    if nested != sorted(nested):
        tile.refuse(f"the levels of {line.axis} do not nest outer to inner")
    found, loops, threads = [], 0, 0
    last = max((n for n, x in enumerate(levels) if x.kind in LOOPS), default=-1)
    for n, level in enumerate(levels):
        step, var = prod(s or 1 for s in sizes[n + 1:]), ""
        if level.kind in LOOPS:
            blocks = line.axis if step == 1 else f"{line.axis}b"
            var, loops = blocks if n == last else f"{line.axis}{loops}", loops + 1
        elif level.kind == THREAD:
            var, threads = f"{line.axis}t{threads or ''}", threads + 1
        order = (ranks[level.name], number)
        found.append(Split(line.axis, level.name, level.kind, order, sizes[n], step, var,
                           n == last))
    return tuple(found)


def _sizes(line: tile.AxisLine, levels: Sequence[Level], extent: Expr) -> list[int | None]:
    """Sizes with a `*` resolved where it is no outermost loop; the extent is then known."""
    sizes = [size for _, size in line.splits]
    stars = [n for n, s in enumerate(sizes) if s is None]
    if len(stars) > 1:
        tile.refuse(f"two * on axis {line.axis}")
    if any(s is not None and s < 1 for s in sizes):
        tile.refuse(f"a size of {line.axis} is not positive")
    rest, whole = prod(s for s in sizes if s is not None), extent.const_value
    if stars and (stars[0] > 0 or levels[0].kind not in LOOPS):
        if whole is None:
            tile.refuse(f"only the first loop of {line.axis} can be *, its extent is symbolic")
        sizes[stars[0]] = max(1, -(-whole // rest))
    if not stars and (whole is None or rest < whole):
        tile.refuse(f"{line.axis} has {extent} elements, the sizes cover {rest}")
    return sizes


class Nest:
    """All splits of a mapping for a kernel with the given extents."""

    def __init__(self, extents: Mapping[str, Expr], mapping: tile.Mapping, machine: Machine):
        self.extents, self.machine = extents, machine
        self.masked = machine.masked
        self.splits: dict[str, list[Split]] = {}
        known = {line.axis for line in mapping.axes}
        lines = [*mapping.axes, *(tile.AxisLine(a, ((self._plain(), None),))
                                  for a in extents if a not in known)]
        for number, line in enumerate(lines):
            if line.axis not in extents:
                tile.refuse(f"the kernel has no axis {line.axis}")
            if line.axis in self.splits:
                tile.refuse(f"two lines for axis {line.axis}")
            self.splits[line.axis] = list(_splits(
                line, number, extents[line.axis], machine.name, machine.levels))
        splits = sorted(self.all(), key=lambda s: s.order)
        first = (GRID, THREAD) if machine.threaded else ()
        self.launch = [s for s in splits if s.kind in first]
        self.loops = [s for s in splits if s.kind in LOOPS and s not in self.launch]

    def all(self) -> Iterator[Split]:
        for splits in self.splits.values():
            yield from splits

    def _plain(self) -> str:
        names = [x.name for x in reversed(self.machine.levels) if x.kind == SEQ]
        return "seq" if "seq" in names else names[0]

    def at(self, place: tile.Place) -> Split:
        """The loop that a place stands at. Raises MappingError when the mapping has none."""
        for split in self.splits.get(place.axis, ()):
            if split.level == place.level and split.var:
                return split
        tile.refuse(f"there is no loop {place.loop}")

    def count(self, axis: str, kind: str) -> int:
        """Steps of an axis on all levels of a kind: its lanes, its copies, its threads."""
        return prod(s.size or 1 for s in self.splits[axis] if s.kind == kind)

    def steps(self, split: Split) -> int | None:
        """Steps of a split, those of a ragged block included; None where they are symbolic."""
        extent = self.extents[split.axis].const_value
        return split.size or (None if extent is None else -(-extent // split.step))

    def repeats(self, axes: Collection[str]) -> list[Split]:
        """The launch loops whose steps all compute the same of a value over `axes`."""
        return [s for s in self.launch if s.axis not in axes]

    def beside(self, axis: str) -> list[Split]:
        """The splits of an axis whose steps run beside each other, in no order."""
        return [s for s in self.splits[axis] if (s.kind not in LOOPS or s.kind == GRID)
                and self.steps(s) != 1]

    def inside(self, split: Split) -> set[str]:
        """Axes with a loop that is this one or inside of it."""
        return {s.axis for s in self.loops[self.loops.index(split):]}

    def unit(self, axis: str) -> int:
        """Elements of the innermost block of an axis: what one step of its last loop covers."""
        return prod(s.size or 1 for s in self.splits[axis] if s.kind not in LOOPS)

    def span(self, axis: str) -> int:
        """Elements that an axis must be padded to a multiple of: all threads' parts are whole."""
        return max([self.unit(axis), *(s.step * (s.size or 1) for s in self.splits[axis]
                                       if s.kind == THREAD)])

    def among_threads(self, split: Split) -> bool:
        """Whether a loop is inside each thread's part: it runs in full, under masks."""
        splits = self.splits[split.axis]
        return any(s.kind == THREAD for s in splits[:splits.index(split)])

    def outer(self, split: Split) -> Split | None:
        """The loop over the same axis right outside of one."""
        splits = self.splits[split.axis]
        return next((s for s in reversed(splits[:splits.index(split)]) if s.kind in LOOPS), None)

    def uniform(self, split: Split) -> bool:
        """Whether a loop has the same number of steps each time that it runs."""
        outer, extent = self.outer(split), self.extents[split.axis].const_value
        if self.among_threads(split):
            return True
        if outer is None:
            return split.size is None or extent is not None
        return extent is not None and extent % outer.step == 0

    def padded(self, axis: str) -> int | None:
        """The extent rounded up to whole innermost blocks; None where it is symbolic."""
        extent, unit = self.extents[axis].const_value, self.span(axis)
        return None if extent is None else -(-extent // unit) * unit

    def block_at(self, axis: str, split: Split) -> int | None:
        """Elements of the block of an axis inside one step of a loop; None while it is whole."""
        inside = [s for s in self.splits[axis] if s.kind in LOOPS and s.order <= split.order]
        return inside[-1].step if inside else None

    def start(self, axis: str) -> Spot:
        """An axis before any of its loops; one that has none is at its only block already."""
        if any(s.kind in LOOPS for s in self.splits[axis]):
            return Spot(Expr.of(0), None)
        if self.masked:
            return self.full(axis, Expr.of(0))
        return self.ragged(axis, Expr.of(0), shrink=True)

    def full(self, axis: str, base: Expr) -> Spot:
        """The innermost block at `base`; all inside the extent unless ragged blocks are masked."""
        ragged = not (self.extents[axis] % self.span(axis)).is_const(0)
        return self._cover(axis, base, None, self.masked and ragged)

    def ragged(self, axis: str, base: Expr, shrink: bool) -> Spot:
        """The last block; with a known remainder and `shrink`, only the copies that it needs."""
        left = (self.extents[axis] - base).const_value
        return self._cover(axis, base, left if shrink else None,
                           left is None or left < self.unit(axis))

    def _cover(self, axis: str, base: Expr, left: int | None, partial: bool) -> Spot:
        units: list[Unit] = []
        threads: list[Unit] = []
        lanes, covered = 1, 1
        for s in self.splits[axis]:
            if s.kind == VECTOR:
                lanes, covered = s.size or 1, covered * (s.size or 1)
            elif s.kind == THREAD:
                threads.append(Unit(s.var, s.size or 1, s.step))
                covered *= s.size or 1
            elif s.kind == UNROLL:
                count = s.size or 1
                if left is not None:
                    count = max(1, min(count, -(-left // s.step)))
                if count > 1:
                    units.append(Unit(f"{axis}{'uvw'[len(units)]}{count}", count, s.step))
                covered *= count
                left = left if left is not None and count == 1 else None
        exact = (self.extents[axis] - base).const_value
        mask = partial and not (exact is not None and exact == covered)
        return Spot(base, self.unit(axis), tuple(units), tuple(threads), lanes, mask)
