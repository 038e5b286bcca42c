"""The loop nest of a mapping: splits with their steps, and where an axis stands inside it.

An axis of extent N with innermost block s has full blocks up to `N//s*s` and at most one ragged
block after them; every loop of the axis is capped there, and the ragged block is emitted once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from rung.core.errors import MappingError
from rung.core.expr import Expr, sym
from rung.core.machine import SEQ, UNROLL, VECTOR, Machine
from rung.core.text import LANE
from rung.tile.mapping import AxisLine, Mapping


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Unit:
    """An unrolled split at a leaf: `count` copies, `step` elements apart."""

    name: str
    count: int
    step: int


@dataclass(frozen=True)
class Spot:
    """Where an axis stands: its block starts at `base`; `block` is None while it is whole.

    `units` and `lanes` cover the block at a leaf; `partial` says that part of it lies beyond the
    extent, so that accesses need a mask.
    """

    base: Expr
    block: int | None
    units: tuple[Unit, ...] = ()
    lanes: int = 1
    partial: bool = False

    @property
    def index(self) -> Expr:
        """The position on the axis, with unrolled axes and the lane as symbols."""
        total = self.base
        for unit in self.units:
            total = total + sym(unit.name) * unit.step
        return total + sym(LANE) if self.lanes > 1 else total


class Nest:
    """All splits of a mapping for a kernel with the given extents."""

    def __init__(self, extents: dict[str, Expr], mapping: Mapping, machine: Machine):
        self.extents, self.machine = extents, machine
        self.splits: dict[str, list[Split]] = {}
        known = {line.axis for line in mapping.axes}
        lines = [*mapping.axes, *(AxisLine(a, ((self._plain(), None),))
                                  for a in extents if a not in known)]
        for number, line in enumerate(lines):
            if line.axis not in extents:
                raise MappingError(f"illegal: the kernel has no axis {line.axis}")
            self.splits[line.axis] = self._axis(line, number)
        loops = [s for splits in self.splits.values() for s in splits if s.var]
        self.loops = sorted(loops, key=lambda s: s.order)

    def _plain(self) -> str:
        return next(x.name for x in reversed(self.machine.levels) if x.kind == SEQ)

    def _axis(self, line: AxisLine, number: int) -> list[Split]:
        sizes = self._sizes(line)
        out = []
        for n, (name, _) in enumerate(line.splits):
            level = self.machine.level(name)
            if level is None:
                raise MappingError(f"illegal: {self.machine.name} has no level {name}")
            step = prod(s or 1 for s in sizes[n + 1:])
            order = (self.machine.rank(name), number)
            out.append(Split(line.axis, name, level.kind, order, sizes[n], step))
        ranks = [s.order[0] for s in out]
        if ranks != sorted(ranks):
            raise MappingError(f"illegal: the levels of {line.axis} do not nest outer to inner")
        return self._named(out)

    def _sizes(self, line: AxisLine) -> list[int | None]:
        """Sizes with a `*` behind other sizes resolved; what it absorbs must then be known."""
        sizes = [size for _, size in line.splits]
        extent = self.extents[line.axis].const_value
        stars = [n for n, s in enumerate(sizes) if s is None]
        if len(stars) > 1:
            raise MappingError(f"illegal: two * on axis {line.axis}")
        rest = prod(s for s in sizes if s is not None)
        if stars and stars[0] > 0:
            if extent is None:
                raise MappingError(f"illegal: only the first size of {line.axis} can be *, "
                                   f"its extent is symbolic")
            sizes[stars[0]] = max(1, -(-extent // rest))
        if not stars and (extent is None or rest < extent):
            raise MappingError(f"illegal: {line.axis} has {self.extents[line.axis]} elements, "
                               f"the sizes cover {rest}")
        return sizes

    @staticmethod
    def _named(splits: list[Split]) -> list[Split]:
        """Loop variables: k for a loop over elements, kb over blocks, k0 and k1 further out."""
        loops = [s for s in splits if s.kind not in (UNROLL, VECTOR)]
        named = {}
        for n, s in enumerate(loops):
            last = s is loops[-1]
            name = (s.axis if s.step == 1 else f"{s.axis}b") if last else f"{s.axis}{n}"
            named[id(s)] = replace(s, var=name, innermost=last)
        return [named.get(id(s), s) for s in splits]

    def unit(self, axis: str) -> int:
        """Elements of the innermost block of an axis: what one step of its last loop covers."""
        return prod(s.size or 1 for s in self.splits[axis] if not s.var)

    def start(self, axis: str) -> Spot:
        """An axis before any of its loops; one that has none is at its only block already."""
        if any(s.var for s in self.splits[axis]):
            return Spot(Expr.of(0), None)
        return self.ragged(axis, Expr.of(0), shrink=True)

    def full(self, axis: str, base: Expr, masked: bool = False) -> Spot:
        """The innermost block at `base`, all of it inside the extent unless `masked`."""
        return self._cover(axis, base, None, masked)

    def ragged(self, axis: str, base: Expr, shrink: bool) -> Spot:
        """The last block; with a known remainder and `shrink`, only the copies that it needs."""
        left = (self.extents[axis] - base).const_value
        return self._cover(axis, base, left if shrink else None,
                           left is None or left < self.unit(axis))

    def _cover(self, axis: str, base: Expr, left: int | None, partial: bool) -> Spot:
        units, lanes, covered = [], 1, 1
        for s in self.splits[axis]:
            if s.var:
                continue
            if s.kind == VECTOR:
                lanes, covered = s.size or 1, covered * (s.size or 1)
                continue
            count = s.size or 1
            if left is not None:
                count = max(1, min(count, -(-left // s.step)))
            if count > 1:
                units.append(Unit(f"{axis}{'uvw'[len(units)]}{count}", count, s.step))
            covered *= count
            left = left if left is not None and count == 1 else None
        extent = self.extents[axis]
        exact = (extent - base).const_value
        mask = partial and not (exact is not None and exact == covered)
        return Spot(base, self.unit(axis), tuple(units), lanes, mask)
