"""Where the walk of `to_kernel` puts statements, without emitting anything.

Legality asks what is finished where something is read, candidates where a place can stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from rung.core.errors import MappingError
from rung.core.op import Func
from rung.tile import mapping as tile
from rung.tile.nest import Nest, Split
from rung.tile.to_kernel import Stmt, phases, statements, varies

Path = tuple[tuple[Split, int], ...]  # loops around a statement, each with which run of it


def refuse(reason: str) -> NoReturn:
    raise MappingError(f"illegal: {reason}")


@dataclass
class Route:
    """Where the walk of `to_kernel` puts statements, without emitting anything."""

    nest: Nest
    paths: dict[int, Path] = field(default_factory=dict)  # by statement, its innermost loops
    ends: dict[int, Path] = field(default_factory=dict)  # by fold, the loops around its whole
    runs: int = 0

    def visit(self, stmts: Sequence[Stmt], depth: int, path: Path) -> None:
        if depth == len(self.nest.loops):
            for s in stmts:
                self.paths[id(s)] = path
                self.ends.setdefault(id(s), path)
            return
        split = self.nest.loops[depth]
        for phase in phases(stmts, split) if stmts else ():
            inside = [s for s in phase if varies(s, split)]
            for s in inside:
                if s.folds == split.axis and split not in s.carried:
                    self.ends.setdefault(id(s), path)
            if inside:
                self.runs += 1
                self.visit(inside, depth + 1, (*path, (split, self.runs)))
            self.visit([s for s in phase if s not in inside], depth + 1, path)

    def visible(self, q: Stmt, s: Stmt) -> bool:
        """Whether `s` stands where what `q` finished is still in registers."""
        end = self.ends[id(q)]
        return self.paths[id(s)][:len(end)] == end

    def no_later(self, r: Stmt, s: Stmt) -> bool:
        """Whether a step of `r` is in the same run of all loops as one of `s`, or in one before."""
        first, second = self.paths[id(r)], self.paths[id(s)]
        for (_, run), (_, other) in zip(first, second, strict=False):
            if run != other:
                return run < other
        return len(first) == len(second)

    def around(self, stmts: Sequence[Stmt]) -> list[Split]:
        """Loops that all of some statements are in, outermost first."""
        first, *rest = [[split for split, _ in self.paths[id(s)]] for s in stmts]
        return [split for split in first if all(split in other for other in rest)]

    def shared(self, stmts: Sequence[Stmt]) -> list[Split]:
        """The same where all are in one run of the loop, so that an array made there serves."""
        first, *rest = [self.paths[id(s)] for s in stmts]
        return [x[0] for x in first if all(x in other for other in rest)]


def find_route(kernel: Func, mapping: tile.Mapping, nest: Nest) -> tuple[list[Stmt], Route]:
    """The statements of a kernel and where a mapping puts them."""
    stmts, route = statements(kernel, mapping, nest), Route(nest)
    route.visit(stmts, 0, tuple((s, 0) for s in nest.launch))
    return stmts, route
