"""Layouts: where an array keeps the element at given coordinates.

    panel(j 32, k 2)      x[k,j] at [j//32, k//2, j%32, k%2]

A panel reads from beginning to end in one register tile's loop; its last blocks are what an
instruction takes at once, such as pairs along the reduced axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rung.core.expr import Expr


@dataclass(frozen=True)
class Panel:
    """Blocks of the first axis stand outermost; inside, all blocks are innermost, in this order."""

    blocks: tuple[tuple[str, int], ...]

    @property
    def groups(self) -> frozenset[str]:
        """Axes of which whole blocks are there, also beyond an extent."""
        return frozenset(axis for axis, _ in self.blocks[1:])

    def __str__(self) -> str:
        return f"panel({', '.join(f'{axis} {size}' for axis, size in self.blocks)})"

    def renamed(self, names: Mapping[str, str]) -> Panel:
        return Panel(tuple((names.get(axis, axis), size) for axis, size in self.blocks))

    def shape(self, extents: Mapping[str, int]) -> tuple[int, ...]:
        """That of an array for axes of these extents, with whole blocks."""
        sizes = dict(self.blocks)
        return (*(-(-extents[a] // sizes.get(a, 1)) for a in self._order(extents)),
                *sizes.values())

    def place(self, at: Mapping[str, Expr]) -> tuple[Expr, ...]:
        """The subscripts of the element at these coordinates."""
        sizes = dict(self.blocks)
        return (*(at[a] // sizes[a] if a in sizes else at[a] for a in self._order(at)),
                *(at[a] % size for a, size in self.blocks))

    def _order(self, axes: Mapping[str, object]) -> list[str]:
        first = self.blocks[0][0]
        return [first, *(a for a in axes if a != first)]
