"""A place in a nest as it is lowered: the spot of each axis, what is computed and what is kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from rung.core.expr import ZERO, Expr, sym
from rung.core.layout import Panel
from rung.core.op import Builder, Op, Value
from rung.tile.box import Tile
from rung.tile.nest import Spot
from rung.tile.tree import Tree


@dataclass(frozen=True)
class Stored:
    """A value kept in an array: for each dimension its axis and where the array starts on it."""

    array: Value
    dims: tuple[tuple[str, Expr], ...]
    panel: Panel | None = None

    @property
    def groups(self) -> frozenset[str]:
        """Axes of which it has whole blocks, also beyond the extent."""
        return self.panel.groups if self.panel else frozenset()


@dataclass
class Scope:
    """A place in the nest. What is computed, and the tiles of buffers, are of this place and those
    inside of it; what runs and what is in arrays is one table for the whole walk.

    `running` has the states of unfinished folds and scans; () where they are in arrays.
    """

    tree: Tree
    env: dict[str, Spot]
    builder: Builder
    memo: dict[Value, Value] = field(default_factory=dict)
    tiles: dict[Op, Tile] = field(default_factory=dict)
    running: dict[Op, tuple[Value, ...]] = field(default_factory=dict)
    arrays: dict[Value, Stored] = field(default_factory=dict)
    bounds: dict[str, tuple[int | Expr, int | Expr | None]] = field(default_factory=dict)
    streams: Mapping[str, Builder] = field(default_factory=dict)  # what roles beside `math` do
    step: Expr = ZERO  # how often the body of the loops around ran since the roles started

    def waits(self, op: Op) -> bool:
        """Whether a fold has a state in arrays that is not final."""
        return self.running.get(op) == ()

    def at(self, axis: str, spot: Spot) -> Scope:
        return replace(self.inside(self.builder), env={**self.env, axis: spot})

    def inside(self, builder: Builder) -> Scope:
        return replace(self, memo=dict(self.memo), tiles=dict(self.tiles), builder=builder)

    def divided(self, roles: Iterable[str]) -> Scope:
        """The same place in each of some roles; `math` is the one that `builder` builds."""
        return replace(self.inside(self.builder.inner()),
                       streams={r: self.builder.inner() for r in roles if r != "math"})

    def looped(self, var: str, hi: Expr) -> Scope:
        """Inside of a loop, in all roles."""
        return replace(self.inside(self.builder.inner()), step=self.step * hi + sym(var),
                       streams={r: b.inner() for r, b in self.streams.items()})
