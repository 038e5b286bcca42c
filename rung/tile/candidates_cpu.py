"""Candidate mappings for CPUs: a few dozen, from the shape of the kernel.

Which axes are vectorised (never two in one statement), how many rows and vectors a register tile
has, which axis is shared by cores, and whether a costly value is kept between phases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from rung.core.cost import known
from rung.core.layout import Panel
from rung.core.machine import Machine
from rung.core.op import Block, Func, Op, Value, made_by, uses
from rung.core.ops import Cast, IndexValue, Map
from rung.core.scalar import SCALARS
from rung.core.types import axes_of, dtype_of
from rung.loop import ir as loop
from rung.tile.legality import is_legal
from rung.tile.mapping import AxisLine, Carry, Place
from rung.tile.mapping import Mapping as TileMapping
from rung.tile.stmt import facts_of

# Register tiles (rows, vectors): for 32 and 16 registers, and where the reduced axis is vectorised.
WIDE = ((14, 2), (8, 3), (6, 4), (4, 4), (7, 2), (4, 3), (2, 8), (2, 4), (1, 8), (1, 4), (1, 1))
NARROW = ((6, 2), (4, 3), (4, 2), (3, 2), (2, 4), (2, 2), (1, 8), (1, 4), (1, 1))
REDUCED = ((4, 6), (6, 4), (4, 3), (2, 6), (3, 2), (1, 8), (1, 4), (4, 2), (8, 1), (4, 1), (2, 1),
           (1, 1))
SHARE = 20  # times more operations a point may take than an FMA
BLOCK = 256  # elements of a contraction's axis between which the state waits in the output


@dataclass(frozen=True)
class Shape:
    """What a kernel looks like to the generator; sizes are numbers, hinted where symbolic."""

    kernel: Func
    sizes: dict[str, int]
    free: tuple[str, ...]  # axes that some store varies over
    reduced: tuple[str, ...]  # axes that some fold runs over
    main: loop.Fold | None  # the contraction of most work
    scanned: frozenset[str] = frozenset()  # axes whose steps have an order

    @property
    def points(self) -> int:
        return max((_product(self.sizes, op.nest) for op in self.kernel.body.ops),
                   default=1)


def candidates(kernel: Func, machine: Machine, hints: Mapping[str, int]
               ) -> Iterator[TileMapping]:
    """Mappings worth pricing; not all of them need be legal. A long contraction runs in blocks
    where it can: its sum is then as exact as a short one, and its operands stay in the caches."""
    shape, blocks = _shape(kernel, hints), False
    for vectors in _vector_sets(shape, machine):
        for lines in _axis_lines(shape, vectors, machine):
            for places in _places(shape, lines, machine):
                base = TileMapping(kernel.name, machine.name, lines, places)
                blocked = list(_blocked(shape, base))
                if shape.main is not None and shape.main.axis not in vectors:
                    blocks = blocks or any(is_legal(kernel, m, machine) for m in blocked)
                if not (blocks and blocked):
                    yield base
                yield from blocked


def _shape(kernel: Func, hints: Mapping[str, int]) -> Shape:
    sizes = {a: max(1, known(e, hints)) for a, e in loop.extents_of(kernel).items()}
    ops = kernel.body.ops
    stored = [a for op in ops if isinstance(op, loop.Store) for a in op.nest]
    scanned = [op.axis for op in loop.folds(kernel) if op.prefix]
    scanned += [a for op in ops if isinstance(op, loop.Store) for a in op.clashing]
    folded = [*scanned, *(op.axis for op in loop.reductions(kernel))]
    main = max(loop.contractions(kernel), key=lambda op: _product(sizes, op.nest), default=None)
    return Shape(kernel, sizes, tuple(dict.fromkeys(stored)), tuple(dict.fromkeys(folded)), main,
                 frozenset(scanned))


@lru_cache(64)
def _readers(body: Block) -> Mapping[Value, list[Op]]:
    return uses(body)


def _product(sizes: Mapping[str, int], axes: tuple[str, ...]) -> int:
    total = 1
    for a in axes:
        total *= sizes[a]
    return total


# ---- vectorised axes
def _vector_sets(shape: Shape, machine: Machine) -> Iterator[dict[str, int]]:
    """Sets of axes to vectorise, with their lanes: greedy by weight, and with each axis first; or
    none beside a scan, whose own memory is not contiguous along them."""
    weights = _weights(shape)
    ranked = sorted((a for a in weights if shape.sizes[a] > 1), key=lambda a: -weights[a])
    nests = [set(op.nest) for op in shape.kernel.body.ops]
    seen = set()
    for first in ranked[:2] or [""]:
        chosen: list[str] = []
        for axis in dict.fromkeys([first, *ranked]):
            if axis and not any(
                    axis in n and n & set(chosen) for n in nests):
                chosen.append(axis)
        if frozenset(chosen) not in seen:
            seen.add(frozenset(chosen))
            yield {a: _lanes(shape.kernel, a, machine) for a in chosen}
    if shape.scanned and frozenset() not in seen:
        yield {}


def _lanes(kernel: Func, axis: str, machine: Machine) -> int:
    """As many as a register holds of the widest type that varies along an axis: C compilers keep
    wider vectors in memory. Positions that are converted or compared with 0 are made narrow."""
    readers = _readers(kernel.body)
    widest = max((dtype_of(v.type).bytes for op in kernel.body.ops for v in op.results
                  if axis in op.nest and not (isinstance(op, IndexValue) and all(
                      isinstance(x, Cast) or (isinstance(x, Map) and x.fn == "ge")
                      for x in readers.get(v, ())))), default=4)
    return max(1, machine.lanes * 4 // max(widest, 4))


def _weights(shape: Shape) -> dict[str, float]:
    """How much memory is contiguous along each axis; a free axis counts a little more."""
    weights: dict[str, float] = {}
    for op in shape.kernel.body.ops:
        if isinstance(op, loop.Load | loop.Store):
            box = _product(shape.sizes, op.nest)
            for axis in op.nest:
                if loop.stride(op, axis) == 1 and axis not in shape.scanned:
                    bonus = 1.2 if axis in shape.free else 1.0
                    weights[axis] = weights.get(axis, 0) + box * bonus
    return weights


# ---- axis lines
def _axis_lines(shape: Shape, vectors: dict[str, int], machine: Machine
                ) -> Iterator[tuple[AxisLine, ...]]:
    for tile in _tiles(shape, vectors, machine):
        for shared, teams in _shares(shape, machine):
            for order in _orders(shape, vectors):
                yield _lines(shape, vectors, tile, shared, order, teams)
            if shape.reduced and not teams and _few_rows(shape, vectors):
                yield from _column_first(shape, vectors, tile, shared, machine.cores)


def _few_rows(shape: Shape, vectors: dict[str, int]) -> bool:
    """Whether no contraction needs a register tile of several rows."""
    rows = shape.main.nest if shape.main else ()
    return all(shape.sizes[a] <= 2 for a in rows if a not in vectors and a != (
        shape.main.axis if shape.main else ""))


def _orders(shape: Shape, vectors: dict[str, int]) -> Iterator[list[str]]:
    """Free axes outside, reduced ones inside; for a contraction either operand may stay. Axes along
    which the values of a scan are repeated are inside of its steps."""
    inner = [a for a in shape.sizes if a in shape.reduced]
    outer = sorted((a for a in shape.sizes if a not in shape.reduced), key=lambda a: a in vectors)
    yield [*outer, *inner]
    if shape.main is not None and len(outer) > 1:
        yield [*outer[::-1], *inner]
    scans = [set(op.nest) for op in loop.folds(shape.kernel) if op.prefix]
    if repeated := [a for a in outer if any(a not in axes for axes in scans)]:
        yield [a for a in (*outer, *inner) if a not in repeated] + repeated


def _tiles(shape: Shape, vectors: dict[str, int], machine: Machine) -> Iterator[dict[str, int]]:
    """Unrolled copies of each axis: a register tile for a contraction, more chains for a fold."""
    if shape.main is None:
        yield {}
        rows = [a for a in shape.sizes if a not in shape.reduced] if shape.scanned else []
        for first in (list(vectors) or rows)[:1]:
            yield from ({first: n} for n in (2, 4) if _fits(shape, first, vectors, n))
        yield from ({a: machine.lanes} for a in _across(shape, vectors))
        return
    free = [a for a in shape.main.nest if a != shape.main.axis]
    free.sort(key=lambda a: -shape.sizes[a])
    wide = [a for a in free if a in vectors]
    rows = [a for a in free if a not in vectors]
    table = WIDE if machine.registers > 16 else NARROW
    together = sum(set(op.nest) == set(shape.main.nest)
                   for op in loop.contractions(shape.kernel))
    for down, across in table if wide else REDUCED:
        if down * across * together > machine.registers - 3 and together > 1:
            continue
        if down > 1 and (not rows or down > 2 * shape.sizes[rows[0]]):
            continue
        yield from _tile(shape, vectors, wide, rows, down, across)


def _across(shape: Shape, vectors: dict[str, int]) -> list[str]:
    """Of a kernel without folds, the axes along which memory is contiguous that lanes walk across:
    as many copies as lanes use whole lines of it, as in a transpose."""
    if shape.reduced:
        return []
    walked = [op for op in shape.kernel.body.ops if isinstance(op, loop.Load | loop.Store)
              and any(loop.stride(op, a) != 1 for a in op.nest if a in vectors)]
    return list(dict.fromkeys(a for op in walked for a in op.nest if a not in vectors
                              and loop.stride(op, a) == 1))


def _tile(shape: Shape, vectors: dict[str, int], wide: list[str], rows: list[str], down: int,
          across: int) -> Iterator[dict[str, int]]:
    tile: dict[str, int] = {}
    if rows and down > 1:
        tile[rows[0]] = min(down, shape.sizes[rows[0]])
    second = wide[0] if wide else rows[1] if len(rows) > 1 else None
    if across > 1:
        if second is None or not _fits(shape, second, vectors, across):
            return
        tile[second] = across
    if not wide and shape.main and shape.main.axis in vectors and down * across < 4:
        tile[shape.main.axis] = 4 // (down * across)
    yield tile


def _fits(shape: Shape, axis: str, vectors: dict[str, int], copies: int) -> bool:
    return copies == 1 or shape.sizes[axis] >= vectors.get(axis, 1) * copies


def _shares(shape: Shape, machine: Machine) -> Iterator[tuple[str | None, int]]:
    """The axis that cores share, one that no fold runs over, and into how many parts (0: as many
    as there are steps). One part on one core is still a loop to keep values in. A core alone is
    worth pricing where it could be done by the time that others have started."""
    able = [a for a in shape.free if a not in shape.reduced and shape.sizes[a] > 1]
    folds = loop.reductions(shape.kernel)
    stores = [op for op in shape.kernel.body.ops if isinstance(op, loop.Store)]
    nests = [set(op.nest) for op in (*folds, *stores)]
    best = [a for a in able if all(a in n for n in nests)] or able
    cores, rates = machine.cores, machine.rates
    least = rates.fork * rates.flops["f32"] / 2  # an FMA a point
    if alone := shape.points < least or cores == 1:
        yield None, 0
        yield from ((a, 1) for a in best[:1] if len(folds) > 1 and _known(shape, a))
    if shape.points * SHARE < least or cores == 1:
        return
    for axis in best[:2]:
        yield axis, 0
        if _known(shape, axis):
            yield axis, cores
    if not best and not alone:
        yield None, 0


def _known(shape: Shape, axis: str) -> bool:
    """Whether a contraction's axis can be cut into one part for each core beforehand."""
    extent = loop.extents_of(shape.kernel)[axis].const_value
    return shape.main is not None and extent is not None


def _lines(shape: Shape, vectors: dict[str, int], tile: dict[str, int], shared: str | None,
           order: list[str], teams: int) -> tuple[AxisLine, ...]:
    """`teams` cores take a part each, so that loops outside of the axis's own run in each."""
    lines = []
    for axis in order:
        level = "seq" if axis in shape.reduced else "l1"
        loops: tuple[tuple[str, int | None], ...] = ((level, None),)
        if axis == shared:
            loops = (("core", teams), *loops) if teams else (("core", None),)
        lines.append(AxisLine(axis, (*loops, *_inside(axis, vectors, tile))))
    return tuple(lines)


def _column_first(shape: Shape, vectors: dict[str, int], tile: dict[str, int],
                  shared: str | None, cores: int) -> Iterator[tuple[AxisLine, ...]]:
    """Reduced axes outside: the input streams by rows, the accumulators wait in an array, where
    several rows at once find them. A scan has its own loop inside of all others."""
    if any(a in vectors for a in shape.reduced) or any(
            op.prefix for op in loop.folds(shape.kernel)):
        return
    extents = loop.extents_of(shape.kernel)
    split = shared is not None and cores > 1 and extents[shared].const_value is not None
    last = shape.reduced[0]
    for rows in (1, 8) if shape.main is None and shape.sizes[last] >= 8 else (1,):
        more = {**tile, last: rows} if rows > 1 else tile
        lines = [AxisLine(a, (("l1", None), *_inside(a, vectors, more)))
                 for a in reversed(shape.reduced)]
        for axis in shape.sizes:
            if axis not in shape.reduced:
                share = (("core", cores),) if split and axis == shared else ()
                lines.append(AxisLine(axis, (*share, ("seq", None), *_inside(
                    axis, vectors, more))))
        yield tuple(lines)


def _inside(axis: str, vectors: dict[str, int], tile: dict[str, int]
            ) -> tuple[tuple[str, int | None], ...]:
    """The unrolled and vectorised splits of an axis."""
    copies = tile.get(axis, 1)
    return (*((("reg", copies),) if copies > 1 else ()),
            *((("simd", vectors[axis]),) if axis in vectors else ()))


# ---- kept values
def _places(shape: Shape, lines: tuple[AxisLine, ...], machine: Machine
            ) -> Iterator[tuple[Place, ...]]:
    """Nothing, the costly maps that several phases read, or a prologue once for each core."""
    costly = [v for v in _costly(shape) if axes_of(v.type)]
    prologue = _prologue(shape, lines)
    for extra in dict.fromkeys(((), tuple(costly), tuple(prologue))):
        places = tuple(p for v in extra if (p := _place(shape, v, lines, machine)))
        yield places


def _prologue(shape: Shape, lines: tuple[AxisLine, ...]) -> list[Value]:
    """What a contraction reads, if each core can compute it once before its part of the work."""
    teams = any(x.splits[0][0] == "core" and x.splits[0][1] is not None for x in lines)
    if shape.main is None or not teams:
        return []
    made = made_by(shape.kernel)
    return [v for v in shape.main.args if isinstance(made[v], Map)]


def _place(shape: Shape, value: Value, lines: tuple[AxisLine, ...], machine: Machine
           ) -> Place | None:
    """In the cache of which it takes no more than two thirds, or a quarter of the next."""
    near, next_, *_ = machine.spaces
    first = next((x for x in lines if x.splits[0][0] == "core"), lines[0])
    inside = [a for a in axes_of(value.type) if a != first.axis]
    bytes_ = 4 * _product(shape.sizes, tuple(inside))
    if 4 * bytes_ > next_.bytes:
        return None
    space = near if 3 * bytes_ <= 2 * near.bytes else next_
    return Place((value.name,), space.name, first.axis, first.splits[0][0])


def _costly(shape: Shape) -> list[Value]:
    """Expensive maps with several readers."""
    readers = _readers(shape.kernel.body)
    return [op.result for op in shape.kernel.body.ops if isinstance(op, Map)
            and SCALARS[op.fn].cost >= 4 and len(set(readers.get(op.result, ()))) > 1]


# ---- blocked contractions
def _blocked(shape: Shape, base: TileMapping) -> Iterator[TileMapping]:
    """Split the reduced axis of a large contraction; its state waits in the output between."""
    main = shape.main
    if main is None or shape.sizes[main.axis] < 512:
        return
    store = _carrying(shape.kernel, main)
    line = base.axis(main.axis)
    if store is None or line is None:
        return
    unit = prod(size or 1 for _, size in line.splits[1:])
    split = AxisLine(main.axis, (("l3", None), ("seq", max(1, BLOCK // unit)), *line.splits[1:]))
    axes = tuple(split if x.axis == main.axis else x for x in base.axes)
    pack = _pack(shape, base)
    for places in ((), pack) if pack else ((),):
        yield TileMapping(base.kernel, base.machine, axes, (*base.places, *places),
                          (Carry(main.result.name, store.buf.name),))


def _carrying(kernel: Func, main: loop.Fold) -> loop.Store | None:
    """A store whose buffer can hold the contraction's state, if only stores read that, and no
    other fold: one is not finished in every outer step. Best is the store of the state itself."""
    facts = facts_of(kernel.body, frozenset())
    state = next(n for n, fact in enumerate(facts) if fact.op is main)
    readers = [fact for fact in facts if state in fact.needs]
    stores = [fact.op for fact in readers
              if isinstance(fact.op, loop.Store) and fact.needs == (state,)]
    able = [op for op in stores if op.buf in kernel.outs and dtype_of(op.buf.type) == main.acc]
    able.sort(key=lambda op: op.value is not main.result)
    return able[0] if able and len(stores) == len(readers) else None


def _pack(shape: Shape, base: TileMapping) -> tuple[Place, ...]:
    """The prologue of the row operand, computed once into panels of the register tile's rows."""
    main = shape.main
    assert main is not None
    made = made_by(shape.kernel)
    for value in main.args:
        if not isinstance(made.get(value), Map):
            continue
        rows = [a for a in axes_of(value.type) if a != main.axis]
        line = base.axis(rows[0]) if len(rows) == 1 else None
        copies = next((n for lv, n in line.splits if lv == "reg"), None) if line else None
        if copies and line and not any(lv == "simd" for lv, _ in line.splits):
            reduced = base.axis(main.axis)
            along = reduced is not None and any(lv == "simd" for lv, _ in reduced.splits)
            panel = None if along else Panel(((rows[0], copies),))  # lanes along k want rows of k
            return (Place((value.name,), "l2", main.axis, "l3", panel),)
    return ()
