"""Places that axis lines alone leave open: values read in a later loop, buffers in a scratchpad.

In: a kernel and a mapping with axis lines. Out: the mapping with `place` lines, or None where no
place is possible; whether the result is legal is for `legality.check` to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from rung.core.errors import MappingError
from rung.core.machine import GRID, THREAD, Machine
from rung.core.op import Func, Value
from rung.core.types import axes_of, dtype_of
from rung.loop import ir as loop
from rung.tile import mapping as tile
from rung.tile.box import tile_form
from rung.tile.nest import Nest, Split
from rung.tile.stmt import Access, Stmt
from rung.tile.tree import Tree

SHARE = 4  # 1/SHARE of the scratchpad is the most that one tile takes at first


def with_values(kernel: Func, mapping: tile.Mapping, machine: Machine, space: str
                ) -> tile.Mapping | None:
    """The mapping with a place for each value that a later loop reads."""
    for _ in range(8):
        tree = Tree(kernel, mapping, machine)
        lost = next((q for s in tree.stmts for q in s.needs
                     if not tree.visible(q, s) and mapping.placed(q.name) is None), None)
        if lost is None:
            return mapping
        readers = [s for s in tree.stmts if lost in s.needs]
        loops = [s for s in tree.shared([lost, *readers]) if s.kind != THREAD]
        loops = loops or _teams(tree.nest, lost.op.results[0])
        if not loops:
            return None
        place = tile.Place((lost.name,), space, loops[-1].axis, loops[-1].level)
        mapping = replace(mapping, places=(*mapping.places, place))
    return None


def _teams(nest: Nest, value: Value) -> list[Split]:
    """The outermost loop, if it only deals parts to cores: each computes `value` for itself."""
    return [s for s in nest.loops[:1] if s.kind == GRID and s.size is not None
            and s.axis not in axes_of(value.type)]


def with_buffers(kernel: Func, mapping: tile.Mapping, machine: Machine, space: str, ring: int
                 ) -> tile.Mapping | None:
    """The mapping with all buffers in a scratchpad: each as far out as its tile is small enough."""
    tree = Tree(kernel, mapping, machine)
    capacity = machine.space(space)
    if capacity is None:
        return None
    places = []
    for name, uses in _uses(tree.stmts).items():
        loops = list(_loops(tree.nest, [op for op, _ in uses], tree.around([s for _, s in uses])))
        small = [x for x in loops if x[1] * (ring if x[2] else 1) <= capacity.bytes // SHARE]
        chosen = small[0] if small else min(loops, key=lambda x: x[1], default=None)
        if chosen is None:
            return None
        split, _, ahead = chosen
        places.append(tile.Place((name,), space, split.axis, split.level, None, 0,
                                 ring if ahead else 1, machine.asynchronous[0]))
    return replace(mapping, places=(*mapping.places, *merged(places)))


def merged(places: Sequence[tile.Place]) -> Iterator[tile.Place]:
    """Places that differ only in what they hold, as one."""
    groups: dict[tile.Place, list[str]] = {}
    for p in places:
        groups.setdefault(replace(p, values=()), []).extend(p.values)
    for p, names in groups.items():
        yield replace(p, values=tuple(names))


def _uses(stmts: Sequence[Stmt]) -> dict[str, list[tuple[Access, Stmt]]]:
    found: dict[str, list[tuple[Access, Stmt]]] = {}
    for s in stmts:
        for op in s.accesses:
            found.setdefault(op.buf.name, []).append((op, s))
    return found


def _loops(nest: Nest, uses: Sequence[Access], around: Sequence[Split]
           ) -> Iterator[tuple[Split, int, bool]]:
    for split in around:
        try:
            forms = {(type(op), tile_form(op, split, nest)) for op in uses}
        except MappingError:
            continue
        follows = any(isinstance(s, Value) for op in uses for s in op.subs)
        size = sum(prod(form.box) for _, form in forms)
        yield split, size * dtype_of(uses[0].buf.type).bytes, not follows


def vector_sets(kernel: Func, axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Sets of axes of which no op has two, each grown from another axis first."""
    together = [set(op.nest) for op in kernel.body.ops]
    seen = set()
    for first in axes:
        chosen = [first]
        for a in axes:
            if a not in chosen and not any(a in t and t & set(chosen) for t in together):
                chosen.append(a)
        if (key := frozenset(chosen)) not in seen:
            seen.add(key)
            yield tuple(chosen)


def free_axes(kernel: Func, machine: Machine | None = None) -> list[str]:
    """Axes of stores that no fold runs over, in the order of their subscripts."""
    stores = [op for op in kernel.body.ops if isinstance(op, loop.Store)]
    folded = set(folded_axes(kernel, machine))
    return [a for a in dict.fromkeys(a for op in stores for a in op.nest)
            if a not in folded]


def folded_axes(kernel: Func, machine: Machine | None = None) -> list[str]:
    """Axes that folds run over; those whose folds read others' results come first. So are those
    along which stores clash, but where `machine` makes each of their updates in one step."""
    folds = [op.axis for op in loop.folds(kernel)]
    folds += [a for op in kernel.body.ops if isinstance(op, loop.Store) for a in op.clashing
              if not (machine and machine.atomic(op.combine, dtype_of(op.buf.type).name))]
    return list(dict.fromkeys(reversed(folds)))


def late_axes(kernel: Func) -> list[str]:
    """Free axes that some fold knows nothing of: a loop over them repeats that fold."""
    folds = loop.reductions(kernel)
    return [a for a in free_axes(kernel) if not all(a in op.nest for op in folds)]


def contractions(kernel: Func) -> list[tuple[loop.Fold, tuple[str, ...], tuple[str, ...]]]:
    """Each sum of products with the free axes of its first and of its second operand alone."""
    found = []
    for op in loop.folds(kernel):
        if op.sums_products:
            a, b = ([x for x in axes_of(v.type) if x != op.axis] for v in op.args)
            found.append((op, tuple(x for x in a if x not in b), tuple(x for x in b if x not in a)))
    return found
