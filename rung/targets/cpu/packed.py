"""Mappings of contractions on instructions whose lanes take groups along the reduced axis.

In: a mapping with a register tile. Out: the same with the reduced axis unrolled by some groups, and
the operand of the lanes brought to panels of them, once for all rows that a core has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod

from rung.core.layout import Panel
from rung.core.machine import Machine
from rung.core.op import Func, Value, made_by
from rung.core.types import axes_of
from rung.loop import ir as loop
from rung.targets.cpu.groups import ROWS
from rung.tile.legality import is_legal
from rung.tile.mapping import AxisLine, Mapping, Place, Use
from rung.tile.match import Match, deep, group_of

SHORT, LONG = 64, 1024  # extents of a reduced axis


def packed(kernel: Func, machine: Machine, mappings: Iterable[Mapping]) -> Iterator[Mapping]:
    """Each mapping also on the atoms that compute the kernel's contractions; where these only make
    panels, lanes across memory are never worth it without."""
    made = made_by(kernel)
    found = [(op, m) for op in loop.contractions(kernel) if (m := deep(machine, op, made))]
    whole = all(group_of(m.atom) == 1 for _, m in found)
    for plain in mappings:
        on_atoms: Mapping | None = plain if found else None
        for op, m in found:
            on_atoms = on_atoms and _on(kernel, op, m, on_atoms)
        legal = on_atoms is not None and is_legal(kernel, on_atoms, machine)
        if on_atoms and legal:
            yield on_atoms
        if not (legal and whole):
            yield plain


def _on(kernel: Func, op: loop.Fold, m: Match, mapping: Mapping) -> Mapping | None:
    """One contraction on its atom."""
    reduced = mapping.axis(op.axis)
    wide = next((v for v in m.args if _lanes(mapping, v)), None)
    if wide is None or reduced is None:
        return None
    group, column = group_of(m.atom), _lanes(mapping, wide)
    lines, depth = [x.axis for x in mapping.axes], _inside(reduced)
    rows = [a for v in m.args if v is not wide for a in axes_of(v.type) if a != op.axis]
    if column in rows or any(lines.index(a) < lines.index(column) for a in rows):
        return None  # its panels would be made again for each row
    if group == 1 and _in_order(kernel, wide, column):
        return None  # it is read as it is
    if depth == 1:
        many = _depth(kernel, op, group)
        loops = [(x, n and max(1, n // many)) for x, n in reduced.splits]
        deeper = replace(reduced, splits=(*loops, ("reg", many)))
        mapping = replace(mapping, axes=tuple(
            deeper if x.axis == op.axis else x for x in mapping.axes))
    elif depth % group:
        return None
    places = () if mapping.placed(wide.name) else (_panel(mapping, wide, column, op.axis, group),)
    return replace(mapping, places=(*mapping.places, *places),
                   uses=(*mapping.uses, Use(op.result.name, m.atom.name)))


def _depth(kernel: Func, op: loop.Fold, group: int) -> int:
    """Elements of the reduced axis in a step: one group of a short axis, else what is transposed
    together; twice that where no block is ragged, which reads far rows less often."""
    extent, turned = loop.extents_of(kernel)[op.axis].const_value or 0, ROWS * group
    if extent >= LONG and extent % (2 * turned) == 0:
        return 2 * turned
    return turned if extent % turned == 0 or extent > SHORT else group


def _lanes(mapping: Mapping, value: Value) -> str:
    """The axis of a value that is vectorised; "" if none is."""
    return next((a for a in axes_of(value.type) if (line := mapping.axis(a))
                 and any(level == "simd" for level, _ in line.splits)), "")


def _inside(line: AxisLine) -> int:
    """Elements of the innermost block."""
    return prod(size or 1 for level, size in line.splits if level in ("reg", "simd"))


def _panel(mapping: Mapping, value: Value, column: str, depth: str, group: int) -> Place:
    """Where a panel of the register tile's columns is made: in the innermost loop over these."""
    line = mapping.axis(column)
    assert line is not None
    level = [x for x, _ in line.splits if x not in ("reg", "simd")][-1]
    blocks = ((column, _inside(line)), (depth, group))
    return Place((value.name,), "l1", column, level, Panel(blocks if group > 1 else blocks[:1]))


def _in_order(kernel: Func, value: Value, axis: str) -> bool:
    """Whether an operand is read along an axis as it lies in memory."""
    loads = [op for op in kernel.body.ops if isinstance(op, loop.Load) and op.result is value]
    return any(loop.stride(op, axis) == 1 for op in loads)
