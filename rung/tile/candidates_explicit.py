"""Candidate mappings for machines with a scratchpad: small families, from the kernel's structure.

Rows, columns and depth of a contraction on the matrix unit; otherwise one vectorised axis in each
statement, a few rows at a time, with the reduced axes inside or outside of the free ones. Every
buffer gets a place, double-buffered where its next box is known. What has no such mapping, as it
reads or updates where data say or has no loop, works on single elements where they lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from rung.core.errors import MappingError
from rung.core.machine import Machine
from rung.core.op import Func
from rung.loop import ir as loop
from rung.tile import mapping as tile
from rung.tile.complete import (
    contractions,
    folded_axes,
    free_axes,
    late_axes,
    vector_sets,
    with_buffers,
    with_values,
)
from rung.tile.legality import is_legal
from rung.tile.match import tile_of

Lines = tuple[tile.AxisLine, ...]
Splits = tuple[tuple[str, int | None], ...]
MOST = 24  # mappings yielded for one kernel


def candidates(kernel: Func, machine: Machine, hints: Mapping[str, int] | None = None
               ) -> Iterator[tile.Mapping]:
    """Legal mappings, likely good ones first; with the matrix unit wherever it can be used."""
    for drafts, rings in ((_matrix(kernel, machine), (2, 1)), (_vector(kernel, machine), (2, 1)),
                          (_scalar(kernel), (0,))):
        if found := list(islice(_legal(kernel, machine, drafts, rings), MOST)):
            yield from found
            return


def _legal(kernel: Func, machine: Machine, drafts: Iterable[tuple[Lines, tuple[tile.Use, ...]]],
           rings: Sequence[int]) -> Iterator[tile.Mapping]:
    scratch = next(s.name for s in machine.spaces if s.explicit)
    seen = set()
    for lines, uses in drafts:
        for ring in rings:
            made = _complete(kernel, tile.Mapping(kernel.name, machine.name, lines, uses=uses),
                             machine, scratch, ring)
            if made is not None and str(made) not in seen and is_legal(kernel, made, machine):
                seen.add(str(made))
                yield made


def _complete(kernel: Func, mapping: tile.Mapping, machine: Machine, space: str, ring: int
              ) -> tile.Mapping | None:
    try:
        found = with_values(kernel, mapping, machine, space)
        return with_buffers(kernel, found, machine, space, ring) if found and ring else found
    except MappingError:
        return None


def _matrix(kernel: Func, machine: Machine) -> Iterator[tuple[Lines, tuple[tile.Use, ...]]]:
    """The first contraction that has rows and columns of its own, on the matrix unit."""
    for op, rows, cols in contractions(kernel):
        for atom in machine.atoms:
            tall, wide, deep = tile_of(atom)
            for row, col in ((r, c) for one, two in ((rows, cols), (cols, rows))
                             for r in one[-1:] for c in two[-1:]):
                for height, width in ((4, 4), (2, 4), (1, 4), (1, 1)):
                    special: dict[str, Splits] = {
                        row: (("seq", None), ("atom", height * tall)),
                        col: (("seq", None), ("atom", width), ("lane", wide)),
                        op.axis: (("pipe", None), ("atom", 2 * deep))}
                    yield (_lines(kernel, special, reduced_outside=False),
                           (tile.Use(op.result.name, atom.name),))


def _vector(kernel: Func, machine: Machine) -> Iterator[tuple[Lines, tuple[tile.Use, ...]]]:
    axes = _ordered(kernel, False)[::-1]
    for outside in (False, True):
        for wide in vector_sets(kernel, axes):
            for vectors, rows in ((4, 1), (1, 1), (2, 8), (1, 4)):
                special: dict[str, Splits] = {
                    a: (("seq", None), ("atom", vectors), ("lane", machine.lanes)) for a in wide}
                others = [a for a in axes if a not in wide]
                special |= {a: (("seq", None), ("atom", rows)) for a in others[:1] if rows > 1}
                yield _lines(kernel, special, outside), ()


def _scalar(kernel: Func) -> Iterator[tuple[Lines, tuple[tile.Use, ...]]]:
    for outside in (False, True):
        yield _lines(kernel, {}, outside), ()


def _ordered(kernel: Func, reduced_outside: bool) -> list[str]:
    """Free axes, folded ones inside or outside of them, and axes that would repeat a fold last."""
    free, folded, late = free_axes(kernel), folded_axes(kernel), late_axes(kernel)
    free = [a for a in free if a not in late]
    first = [*folded[:1], *late] if late else []
    rest = [*first, *(a for a in (*folded, *loop.extents_of(kernel)) if a not in (*first, *free))]
    return list(dict.fromkeys([*rest, *free] if reduced_outside else [*free, *rest]))


def _lines(kernel: Func, special: Mapping[str, Splits], reduced_outside: bool) -> Lines:
    plain: Splits = (("seq", None),)
    splits = {a: tuple(s for s in special.get(a, plain) if s[1] != 1)
              for a in _ordered(kernel, reduced_outside)}
    for a in late_axes(kernel) if _states(kernel) else ():  # no loop over them inside such a fold
        lanes = tuple(s for s in splits[a] if s[0] == "lane")
        splits[a] = (("atom", None), *lanes)
    return tuple(tile.AxisLine(a, s) for a, s in splits.items())


def _states(kernel: Func) -> bool:
    """Whether some fold has states over different axes."""
    return any(len({r.type for r in op.results}) > 1 for op in kernel.body.ops)
