"""The statements of a kernel under a mapping: what its loop nest executes, and inside which loops.

A statement is a fold's step, a scan's, a placed value, a store, or the initial value of an array.
All other ops are computed where a statement reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from rung.core.cost import behind
from rung.core.op import Block, Op, Value
from rung.core.types import dtype_of
from rung.loop import ir as loop
from rung.tile import mapping as tile
from rung.tile.mapping import refuse
from rung.tile.nest import LOOPS, Nest, Split

Access = loop.Load | loop.Store


@dataclass(eq=False)
class Stmt:
    """What a nest executes: a fold's step, a placed value, a store, an array's initial value."""

    kind: str  # fold | scan | place | store | init
    op: Op
    axes: frozenset[str]
    needs: tuple[Stmt, ...] = ()
    loads: tuple[loop.Load, ...] = ()  # what it reads from buffers, directly or through maps
    behind: tuple[Op, ...] = ()  # all that it computes of what it reads
    within: frozenset[Split] = frozenset()  # loops around the place where its array lives
    carried: frozenset[Split] = frozenset()  # outer reduced loops that it stays inside of
    waits: loop.Store | None = None  # where the state of a fold waits between those loops

    @property
    def fold(self) -> loop.Fold:
        """The op of a fold's step or of its initial value."""
        assert isinstance(self.op, loop.Fold)
        return self.op

    @property
    def folds(self) -> str:
        """The axis that this statement folds over, if any."""
        return self.fold.axis if self.kind == "fold" else ""

    @property
    def carries(self) -> str:
        """The axis along which this statement has a state, if any."""
        return self.fold.axis if self.kind in ("fold", "scan") else ""

    @property
    def name(self) -> str:
        """Its value's name, or that of the buffer that it stores to."""
        return self.op.results[0].name if self.op.results else self.accesses[-1].buf.name

    @property
    def accesses(self) -> tuple[Access, ...]:
        """The loads behind it, and the store that it is."""
        return (*self.loads, self.op) if isinstance(self.op, loop.Store) else self.loads


def varies(stmt: Stmt, split: Split) -> bool:
    """Whether a statement belongs inside a loop."""
    return split.axis in stmt.axes or split in stmt.carried or split in stmt.within


def statements(body: Block, mapping: tile.Mapping, nest: Nest) -> list[Stmt]:
    """Folds, scans, placed values and stores in order, each with the statements that it reads."""
    if not (mapping.places or mapping.carries):
        return list(_plain(body))
    stmts: list[Stmt] = []
    for fact in facts_of(body, frozenset(v for p in mapping.places for v in p.values)):
        stmts.append(_stmt(fact, stmts, _around(fact, mapping, nest)))
    for carry in mapping.carries:
        _carry(carry, stmts, nest)
    return stmts


@lru_cache(64)
def _plain(body: Block) -> tuple[Stmt, ...]:
    """The statements of a kernel that keeps nothing between its loops, the same in every nest."""
    stmts: list[Stmt] = []
    for fact in facts_of(body, frozenset()):
        stmts.append(_stmt(fact, stmts, frozenset()))
    return tuple(stmts)


def _stmt(fact: Fact, before: Sequence[Stmt], within: frozenset[Split]) -> Stmt:
    return Stmt(fact.kind, fact.op, fact.axes, tuple(before[n] for n in fact.needs), fact.loads,
                fact.behind, within)


@dataclass(frozen=True)
class Fact:
    """What a statement is under each mapping that has places for the same values."""

    kind: str
    op: Op
    axes: frozenset[str]
    needs: tuple[int, ...]
    loads: tuple[loop.Load, ...]
    behind: tuple[Op, ...]


@lru_cache(64)
def facts_of(body: Block, placed: frozenset[str]) -> tuple[Fact, ...]:
    """The statements of a kernel, where values of those names are placed."""
    reads: dict[Value, tuple[int, ...]] = {}
    loads: dict[Value, tuple[loop.Load, ...]] = {}
    kinds = {op: kind for op in body.ops if (kind := _kind(op, placed))}
    made = {r: op for op in body.ops for r in op.results}
    facts: list[Fact] = []
    for op in body.ops:
        needs = tuple(dict.fromkeys(n for v in op.operands() for n in reads.get(v, ())))
        seen = tuple(dict.fromkeys(x for v in op.operands() for x in loads.get(v, ())))
        seen += (op,) if isinstance(op, loop.Load) else ()
        if op in kinds:
            facts.append(Fact(kinds[op], op, frozenset(op.nest), needs, seen,
                              tuple(behind(op, made, kinds))))
            needs, seen = (len(facts) - 1,), ()
        for r in op.results:
            reads[r], loads[r] = needs, seen
    return tuple(facts)


def _kind(op: Op, placed: frozenset[str]) -> str:
    if isinstance(op, loop.Fold):
        return "scan" if op.prefix else "fold"
    if isinstance(op, loop.Store):
        return "store"
    return "place" if any(r.name in placed for r in op.results) else ""


def _around(fact: Fact, mapping: tile.Mapping, nest: Nest) -> frozenset[Split]:
    """The loops from the outermost to the one where a value of a statement is placed."""
    names = {p.loop for r in fact.op.results if (p := mapping.placed(r.name))}
    at = max((n for n, s in enumerate(nest.loops) if s.name in names), default=-1) if names else -1
    return frozenset(nest.loops[: at + 1])


def _carry(carry: tile.Carry, stmts: Sequence[Stmt], nest: Nest) -> None:
    """Keep the readers of a carried fold inside the outer loops of its reduced axis."""
    fold = next((s for s in stmts if s.kind == "fold" and s.name == carry.fold), None)
    if fold is None:
        return
    readers = [s for s in stmts if fold in s.needs]
    fold.waits = next((s.op for s in readers if isinstance(s.op, loop.Store)
                       and s.op.buf.name == carry.buffer), None)
    fold.carried = frozenset([s for s in nest.splits[fold.folds] if s.kind in LOOPS][:-1])
    for s in readers:
        s.carried = s.carried | fold.carried


def check_carries(stmts: Sequence[Stmt], mapping: tile.Mapping) -> None:
    """Raise MappingError with the reason if the state of a carried fold cannot wait there."""
    folds = {s.name: s for s in stmts if s.kind == "fold" and len(s.op.results) == 1}
    for carry in mapping.carries:
        fold = folds.get(carry.fold)
        if fold is None:
            refuse(f"{carry.fold} is not a fold of one state")
        if any(fold in s.needs and s.kind != "store" for s in stmts):
            refuse(f"carry {carry.fold}: it is read by more than stores")
        if fold.waits is None:
            refuse(f"carry {carry.fold}: nothing stores it in {carry.buffer}")
        holds, acc = dtype_of(fold.waits.buf.type), dtype_of(fold.op.results[0].type)
        if holds != acc:
            refuse(f"{carry.buffer} holds {holds}, the state of {carry.fold} is {acc}")
        if fold.waits.combine:
            refuse(f"carry {carry.fold}: {carry.buffer} is updated where data say")


def phases(stmts: Sequence[Stmt], split: Split) -> list[list[Stmt]]:
    """Statements grouped so that no loop over the axis reads a fold that it has not finished."""
    level: dict[Stmt, int] = {}
    for s in stmts:
        mine = 0
        for q in s.needs:
            if q not in level:
                continue
            over = q.folds == split.axis and split not in q.carried
            bump = over or varies(q, split) != varies(s, split)
            mine = max(mine, level[q] + bump)
        level[s] = mine
    count = max(level.values(), default=0) + 1
    return [[s for s in stmts if level[s] == n] for n in range(count)]
