"""The loop nest of a kernel under a mapping, as data that prints: between Tile and Kernel IR.

    nest softmax on cpu.avx512
      loop i.core 512 of 1
        array exp in l1
        loop j.seq 32 of 64 folds max
          fold max
        loop j.seq 32 of 64 folds sum
          place exp
          fold sum
        loop j.seq 32 of 64
          store y

`512 of 1` are steps and the elements of each. Two rules make the tree: under one loop, a reader of
a finished fold starts a new loop over that axis; a statement that does not vary over an axis is
outside of its loops. A loop `folds` a state that begins before its first step and is final after
its last one. Legality, price, places and the lowering read the tree; none of them derives it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rung.core.expr import Expr
from rung.core.machine import GRID, Machine
from rung.core.op import Func, Op, Value, made_by
from rung.core.types import axes_of
from rung.loop.ir import Load, Store, contractions, extents_of
from rung.tile import mapping as tile
from rung.tile.mapping import refuse
from rung.tile.match import Match, match, tile_of
from rung.tile.nest import Nest, Split
from rung.tile.stmt import Access, Stmt, check_carries, phases, statements, varies


@dataclass(frozen=True, eq=False)
class Leaf:
    """Statements at one block of every axis, in order."""

    stmts: tuple[Stmt, ...]


@dataclass(frozen=True, eq=False)
class Start:
    """A state that begins before a loop: with loops over its other axes inside, it is an array that
    the nest `fill` gives the identity."""

    stmt: Stmt
    inside: tuple[Split, ...]
    fill: tuple[Loop | Leaf, ...]

    def check(self) -> None:
        """Raise MappingError for a state that cannot be in arrays over the loops inside."""
        for axis in sorted({t.axis for t in self.inside}):
            if self.stmt.carried:
                refuse(f"{self.stmt.name} is carried, and has a loop over {axis} inside of its own")
            for state in self.stmt.op.results:
                if axis not in axes_of(state.type):
                    refuse(f"{state.name} does not vary over {axis}, whose loop inside the fold "
                           f"would step it again")


@dataclass(frozen=True, eq=False)
class Loop:
    """One run of a loop: what begins before it, what is made in each step, and what is inside."""

    split: Split
    trips: Expr  # steps, but for a ragged one that is apart
    ragged: bool  # whether the last block is code of its own
    stmts: tuple[Stmt, ...]  # all inside
    starts: tuple[Start, ...]
    arrays: tuple[tuple[Value, tile.Place], ...]
    tiles: tuple[tuple[tile.Place, tuple[Access, ...]], ...]
    body: tuple[Loop | Leaf, ...]


Node = Loop | Leaf
Path = tuple[Loop, ...]  # the loops around a statement, outermost first


class Tree:
    """A kernel under a mapping: its splits, its statements, and the nest of loops around them."""

    def __init__(self, kernel: Func, mapping: tile.Mapping, machine: Machine,
                 extents: Mapping[str, Expr] | None = None):
        """With `extents`, as if the kernel's axes were so long."""
        self.kernel, self.mapping = kernel, mapping
        self.nest = Nest(extents or extents_of(kernel), mapping, machine)

    @cached_property
    def made(self) -> dict[Value, Op]:
        """The op that gives each value."""
        return made_by(self.kernel)

    @cached_property
    def accesses(self) -> list[Access]:
        return [op for op in self.kernel.body.ops if isinstance(op, Load | Store)]

    @cached_property
    def atoms(self) -> dict[str, Match]:
        """By contraction, the instruction that computes several of its steps at once."""
        folds = {op.result.name: op for op in contractions(self.kernel)}
        found = (match(atom, folds[u.contraction], self.made) for u in self.mapping.uses
                 if (atom := self.nest.machine.atom(u.atom)) and tile_of(atom)[2] > 1
                 and u.contraction in folds)
        return {m.fold: m for m in found if m}

    @cached_property
    def stmts(self) -> list[Stmt]:
        return statements(self.kernel.body, self.mapping, self.nest)

    @cached_property
    def body(self) -> tuple[Node, ...]:
        """The nest. Raises MappingError where the mapping speaks of what is not there."""
        check_carries(self.stmts, self.mapping)
        known = {v.name for v in (*self.made, *self.kernel.params, *self.kernel.outs)}
        if missing := self.mapping.names() - known:
            refuse(f"the kernel has no value {', '.join(sorted(missing))}")
        return self._launched(self.nest.launch)

    # ---- making the nest
    def _launched(self, splits: Sequence[Split]) -> tuple[Node, ...]:
        """The grid and thread loops of machines whose threads start all together, around all."""
        if not splits:  # what only some blocks need comes last, apart from the rest
            apart = sorted(dict.fromkeys(self.once[s] for s in self.stmts), key=len)
            return tuple(node for once in apart for node in self._nodes(
                [s for s in self.stmts if self.once[s] == once], 0, frozenset()))
        first, *rest = splits
        return (self._loop(first, self.stmts, (), self._launched(rest)),)

    def _nodes(self, stmts: Sequence[Stmt], depth: int, begun: frozenset[Stmt]
               ) -> tuple[Node, ...]:
        """What stands inside the loops outside of `depth`."""
        if not stmts:
            return ()
        if depth == len(self.nest.loops):
            return (Leaf(tuple(stmts)),)
        nodes: list[Node] = []
        split = self.nest.loops[depth]
        for phase in phases(stmts, split):
            inside = [s for s in phase if varies(s, split)]
            if inside:
                first = [s for s in inside if s.carries == split.axis and split not in s.carried
                         and s not in begun]
                starts = tuple(self._start(s, depth + 1) for s in first)
                body = self._nodes(inside, depth + 1, begun.union(first))
                nodes.append(self._loop(split, inside, starts, body))
            nodes += self._nodes([s for s in phase if s not in inside], depth + 1, begun)
        return tuple(nodes)

    def _start(self, stmt: Stmt, depth: int) -> Start:
        inside = tuple(t for t in self.nest.loops[depth:]
                       if varies(stmt, t) and t.axis != stmt.carries)
        if not inside:
            return Start(stmt, (), ())
        axes = frozenset(a for r in stmt.op.results for a in axes_of(r.type))
        return Start(stmt, inside, self._nodes([Stmt("init", stmt.op, axes)], depth, frozenset()))

    def _loop(self, split: Split, stmts: Sequence[Stmt], starts: tuple[Start, ...],
              body: tuple[Node, ...]) -> Loop:
        places = [p for p in self.mapping.places if p.loop == split.name]
        arrays = tuple((r, p) for s in stmts if s.kind != "init" for r in s.op.results
                       for p in places if self.mapping.placed(r.name) is p)
        ops = dict.fromkeys(x for s in stmts for x in s.accesses) if places else ()
        tiles = ((p, tuple(x for x in ops if self.mapping.placed(x.buf.name) is p))
                 for p in places)
        ragged = (not self.nest.masked and split.innermost
                  and not (self.nest.extents[split.axis] % split.step).is_const(0))
        return Loop(split, self._trips(split, ragged), ragged, tuple(stmts), starts, arrays,
                    tuple(t for t in tiles if t[1]), body)

    def _trips(self, split: Split, ragged: bool) -> Expr:
        extent, blocks = self.nest.extents[split.axis], split.kind == GRID
        if split.size is not None and not (blocks and split in self.nest.launch):
            return Expr.of(split.size)
        if split.innermost and not self.nest.masked and not (ragged and blocks):
            return extent // split.step  # a ragged one is apart
        return (extent + (split.step - 1)) // split.step

    @cached_property
    def once(self) -> dict[Stmt, frozenset[Split]]:
        """By statement, the grid loops of whose blocks only the first needs it: those over axes
        that no store behind it has."""
        found: dict[Stmt, frozenset[Split]] = {}
        for s in reversed(self.stmts):
            nests = [found[r] for r in self.stmts if s in r.needs]
            nests += [frozenset(x for x in self.nest.repeats(s.op.nest) if x.kind == GRID
                                and self.nest.steps(x) != 1)] if isinstance(s.op, Store) else []
            found[s] = frozenset.intersection(*nests) if nests else frozenset()
        return found

    # ---- reading it
    @cached_property
    def paths(self) -> dict[Stmt, Path]:
        """By statement, the loops around one step of it."""
        found: dict[Stmt, Path] = {}
        todo: list[tuple[Path, Node]] = [((), node) for node in self.body]
        for path, node in todo:
            if isinstance(node, Leaf):
                found.update(dict.fromkeys(node.stmts, path))
            else:
                todo += [((*path, node), inner) for inner in node.body]
        return found

    def start(self, s: Stmt) -> Start | None:
        """Where the state of a statement begins; None if that is within a leaf."""
        return next((x for node in self.paths[s] for x in node.starts if x.stmt is s), None)

    def end(self, s: Stmt) -> Path:
        """The loops around the whole of a fold; of another statement those around one step."""
        path = self.paths[s]
        if s.kind != "fold":
            return path
        return next((path[:n] for n, node in enumerate(path)
                     if any(x.stmt is s for x in node.starts)), path)

    def visible(self, q: Stmt, s: Stmt) -> bool:
        """Whether `s` stands where what `q` finished is still in registers."""
        end = self.end(q)
        return self.paths[s][:len(end)] == end

    def no_later(self, r: Stmt, s: Stmt) -> bool:
        """Whether a step of `r` is in the same run of all loops as one of `s`, or in one before."""
        first, second, body = self.paths[r], self.paths[s], self.body
        for one, other in zip(first, second, strict=False):
            if one is not other:
                return body.index(one) < body.index(other)
            body = one.body
        return len(first) == len(second)

    def around(self, stmts: Sequence[Stmt]) -> list[Split]:
        """Loops that all of some statements are in, outermost first."""
        first, *rest = [[node.split for node in self.paths[s]] for s in stmts]
        return [split for split in first if all(split in other for other in rest)]

    def shared(self, stmts: Sequence[Stmt]) -> list[Split]:
        """The same where all are in one run of the loop, so that an array made there serves."""
        first, *rest = [self.paths[s] for s in stmts]
        return [node.split for node in first if all(node in other for other in rest)]

    def __str__(self) -> str:
        title = f"nest {self.kernel.name} on {self.nest.machine.name}"
        return "\n".join([title, *_lines(self.body, "  ")])


def run_of(path: Path, split: Split) -> Loop | None:
    """The run of a loop that a path is in."""
    return next((node for node in path if node.split is split), None)


def _lines(nodes: Sequence[Node], indent: str) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, Leaf):
            yield from (f"{indent}{s.kind} {s.name}" for s in node.stmts)
            continue
        for start in node.starts:
            yield from _lines(start.fill, indent)
        folds = ", ".join(x.stmt.name for x in node.starts)
        yield (f"{indent}loop {node.split.name} {node.trips} of {node.split.step}"
               + (" and a ragged one" if node.ragged and node.split.kind != GRID else "")
               + (f" folds {folds}" if folds else ""))
        for value, place in node.arrays:
            yield f"{indent}  array {value.name} in {place.space}"
        for place, ops in node.tiles:
            names = dict.fromkeys(x.buf.name for x in ops)
            ring = f" ring {place.ring}" if place.ring > 1 else ""
            yield f"{indent}  tile {', '.join(names)} in {place.space}{ring}"
        yield from _lines(node.body, indent + "  ")
