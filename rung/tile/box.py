"""Boxes: the part of a buffer that an access needs in one step of a loop, and its tile.

A tile covers whole innermost blocks and holds the load's fill beyond an axis' extent, so that its
readers need no mask there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from rung.core.expr import Expr, is_size
from rung.core.op import Value
from rung.core.ops import Sub
from rung.core.types import TensorType, axes_of
from rung.loop import ir as loop
from rung.tile import mapping as tile
from rung.tile.nest import Nest, Split
from rung.tile.stmt import Access


@dataclass(frozen=True)
class Form:
    """The box that an access needs: its size, and which dimensions follow one axis exactly.

    `axes[d]` is that axis; `whole[d]` says that the dimension is there from 0 on.
    """

    box: tuple[int, ...]
    axes: tuple[str, ...]
    whole: tuple[bool, ...]

    @property
    def exact(self) -> frozenset[str]:
        """Axes beyond whose extent the tile holds its fill."""
        return frozenset(a for a in self.axes if a)


@dataclass(frozen=True)
class Tile:
    """Where an access finds its elements at this step: `array` holds the buffer from `corner`."""

    array: Value
    corner: tuple[Sub, ...]
    slot: Expr | None
    form: Form

    def local(self, places: Sequence[Sub]) -> list[Sub]:
        """Subscripts of the array for subscripts of the buffer."""
        inside: list[Sub] = [p - c if isinstance(p, Expr) and isinstance(c, Expr) else Expr.of(0)
                             for p, c in zip(places, self.corner, strict=True)]
        return inside if self.slot is None else [self.slot, *inside]


def tile_form(op: Access, split: Split, nest: Nest) -> Form:
    """The box of an access in one step of a loop. Raises MappingError."""
    assert isinstance(op.buf.type, TensorType)
    dims = [_dimension(op, sub, size, split, nest)
            for sub, size in zip(op.subs, op.buf.type.shape, strict=True)]
    found = [a for s in op.subs if isinstance(s, Expr) for a in s.symbols()]
    if isinstance(op, loop.Store) and len(set(found)) < len(found):
        tile.refuse(f"{op.buf.name} is stored along a diagonal, which is no box")
    axes = tuple(axis if found.count(axis) == 1 else "" for _, axis, _ in dims)
    return Form(tuple(n for n, _, _ in dims), axes, tuple(whole for _, _, whole in dims))


def _dimension(op: Access, sub: Sub, size: Expr, split: Split, nest: Nest
               ) -> tuple[int, str, bool]:
    """(elements, axis that it follows exactly, whether it is there from 0 on)."""
    def refuse(why: str) -> NoReturn:
        tile.refuse(f"{op.buf.name}[..,{sub},..] is no box: {why}")

    def length(axis: str) -> int:
        inner = nest.block_at(axis, split) or nest.padded(axis)
        if inner is None:
            refuse(f"{axis} is symbolic and whole there")
        return inner

    if isinstance(sub, Value):
        if any(length(a) != 1 for a in axes_of(sub.type)):
            refuse("it follows data, place it where it is one element")
        return 1, "", False
    axes = sorted(s for s in sub.symbols() if not is_size(s))
    if not axes:
        return 1, "", False
    whole = all(nest.block_at(a, split) is None for a in axes)
    factors = {a: sub.coefficient(a) for a in axes}
    steps = [f.const_value if f is not None else None for f in factors.values()]
    exact = len(axes) == 1 and steps == [1] and not op.mask
    stored = isinstance(op, loop.Store)
    if len(axes) == 1 and steps == [1]:
        begins = sub.without(axes[0]).is_const(0)
        if begins or stored:
            return length(axes[0]), axes[0] if exact else "", whole and begins
    if stored and all(length(a) == 1 for a in axes):
        return 1, "", False
    if stored and not _fills(steps, [nest.extents[a].const_value if whole else length(a)
                                     for a in axes]):
        refuse("there are places in its box that it does not store to")
    if whole:
        if size.const_value is None:
            refuse("its size is symbolic")
        return size.const_value, "", True
    if any(s is None or s < 0 for s in steps) or sub.const < 0:
        if size.const_value is not None:  # all of it, again in each step
            return size.const_value, "", True
        refuse("it does not run forward from its corner")
    reach = sum((s or 0) * (length(a) - 1) for a, s in zip(axes, steps, strict=True))
    return 1 + reach, axes[0] if exact else "", False


def _fills(steps: Sequence[int | None], extents: Sequence[int | None]) -> bool:
    """Whether a store along several axes, by their steps and extents, leaves no gaps."""
    covered = 1  # elements that the axes so far cover: the step of the next one
    for step, n in sorted((step or 0, n or 0) for step, n in zip(steps, extents, strict=True)):
        if step != covered:
            return False
        covered *= n
    return True
