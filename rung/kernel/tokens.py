"""Rules of roles: balanced tokens, guarded slots, no deadlock.

In: a block of Kernel IR. Out: nothing, or a VerifyError at the op at fault. The rules are those of
a marked graph: a token is given as often as it is awaited, and each cycle through roles has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NoReturn

from rung.core.errors import VerifyError
from rung.core.expr import ZERO, Expr, sym
from rung.core.op import Block, Op, Value, walk
from rung.core.ops import LoadBase, StoreBase
from rung.core.types import ArrayType
from rung.kernel.loops import THREADS, For, If
from rung.kernel.moves import Transfer
from rung.kernel.roles import FREE, FULL, Await, Ring, Role, Roles, Signal

Token = Await | Signal


@dataclass(frozen=True)
class Position:
    """An op's position in a role: the enclosing loops, and the index in each block."""

    op: Op
    role: Role
    loops: tuple[For, ...]
    trail: tuple[tuple[Block, int], ...]

    @property
    def trips(self) -> list[tuple[Expr, Expr | None]]:
        return [(x.hi, x.cap) for x in self.loops]

    def between(self, first: Position, last: Position) -> bool:
        """Whether it is after `first` and before `last`, which share a block."""
        block, start = first.trail[-1]
        return last.trail[-1][0] is block and any(
            b is block and start < n < last.trail[-1][1] for b, n in self.trail)


def steps_of(loops: Sequence[For]) -> Expr:
    """The number of earlier runs of the innermost loop's body, from all loop variables."""
    total = ZERO
    for x in loops:
        total = total * x.hi + sym(x.var)
    return total


def verify_roles(body: Block) -> None:
    """Raise VerifyError unless the roles of a kernel keep all rules."""
    ops = list(walk(body))
    groups = [op for op in ops if isinstance(op, Roles)]
    inside = {op for group in groups for op in walk(group.body)}
    for op in ops:
        if isinstance(op, Token) and op not in inside:
            raise VerifyError("only roles have tokens", op)
        if isinstance(op, Roles | Ring) and op in inside:
            raise VerifyError(f"a {op.keyword} inside of a role", op)
        if isinstance(op, Role) and op not in inside:
            raise VerifyError("a role outside of `roles`", op)
    rings = [op for op in ops if isinstance(op, Ring)]
    for group in groups:
        _Group(group, rings).verify()


class _Group:
    """Concurrent roles, and the rings between them."""

    def __init__(self, group: Roles, rings: Sequence[Ring]):
        self.roles = [op for op in group.body.ops if isinstance(op, Role)]
        self.rings = {r.name: r for r in rings}
        self.sites = [s for r in self.roles for s in _sites(r, r.body, (), ())]

    def verify(self) -> None:
        for n, role in enumerate(self.roles):
            if role.name in [r.name for r in self.roles[:n]]:
                raise VerifyError(f"two roles are called {role.name}", role)
        for s in self.sites:
            if isinstance(s.op, Token) and s.op.ring not in self.rings:
                raise VerifyError(f"there is no ring {s.op.ring}", s.op)
        for ring in self.rings.values():
            self.ring(ring)
        self.private()
        _no_cycle([r.body for r in self.roles])

    def ring(self, ring: Ring) -> None:
        """One role fills it and one drains it, each in one place and in equal loops."""
        fills = self.tokens(ring, Await, FREE), self.tokens(ring, Signal, FULL)
        drains = self.tokens(ring, Await, FULL), self.tokens(ring, Signal, FREE)
        if fills[0].role is drains[0].role:
            raise VerifyError(f"{ring.name} is filled and drained by one role", fills[0].op)
        for first, last in (fills, drains):
            if first.role is not last.role or last.trail[-1][0] is not first.trail[-1][0]:
                raise VerifyError(f"{ring.name} changes hands in another block", last.op)
        for s in (*fills, *drains):
            if s.trips != fills[0].trips or any(cap is not None for _, cap in s.trips):
                raise VerifyError(f"{ring.name} is filled and drained in unlike loops", s.op)
            assert isinstance(s.op, Token)
            if not (steps_of(s.loops) - s.op.step).is_const(0):
                raise VerifyError(f"the step is {steps_of(s.loops)} here", s.op)
        for s in self.sites:
            for value, at, writes in _accesses(s.op):
                if value in ring.arrays:
                    self.access(ring, s, at, *(fills if writes else drains))

    def tokens(self, ring: Ring, kind: type[Token], token: str) -> Position:
        found = [s for s in self.sites if isinstance(s.op, kind)
                 and (s.op.ring, s.op.token) == (ring.name, token)]
        if len(found) != 1:
            verb = "awaited" if kind is Await else "signalled"
            raise VerifyError(f"{ring.name} {token} is {verb} in {len(found)} places, not one",
                              found[1].op if found else ring)
        return found[0]

    def access(self, ring: Ring, s: Position, at: Sequence[Expr | Value], first: Position,
               last: Position) -> None:
        if not s.between(first, last):
            self.unguarded(ring, s, first)
        if ring.slots > 1:
            slot, want = at[0], steps_of(first.loops) % ring.slots
            bounds = {x.var: (0, x.hi - 1) for x in first.loops}
            if not isinstance(slot, Expr) or slot.simplify(bounds) is not want.simplify(bounds):
                raise VerifyError(f"the slot of {ring.name} is {want} here", s.op)

    def unguarded(self, ring: Ring, s: Position, first: Position) -> NoReturn:
        assert isinstance(first.op, Token)
        raise VerifyError(f"the slot of {ring.name} is not held here: that is after `await "
                          f"{ring.name} {first.op.token}` and before the signal", s.op)

    def private(self) -> None:
        """An array outside of rings that a role writes is accessed by that role only."""
        guarded = {v for r in self.rings.values() for v in r.arrays}
        touched: dict[Value, Position] = {}
        written = {v for s in self.sites for v, _, writes in _accesses(s.op) if writes}
        for s in self.sites:
            for value, _, _ in _accesses(s.op):
                if value in guarded or value not in written:
                    continue
                if touched.setdefault(value, s).role is not s.role:
                    raise VerifyError(f"{value.name} passes between roles without a ring", s.op)


def _sites(role: Role, block: Block, loops: tuple[For, ...], trail: tuple[tuple[Block, int], ...]
           ) -> Iterator[Position]:
    for n, op in enumerate(block.ops):
        here = (*trail, (block, n))
        yield Position(op, role, loops, here)
        if isinstance(op, If):
            for x in walk(Block((), (op,))):
                if isinstance(x, Token):
                    raise VerifyError("a token under a condition", x)
        for inner in op.blocks():
            loop = (op,) if isinstance(op, For) and op.level not in THREADS else ()
            yield from _sites(role, inner, (*loops, *loop), here)


def _accesses(op: Op) -> Iterator[tuple[Value, Sequence[Expr | Value], bool]]:
    """(array, subscripts, whether it is a write) of each access of an op."""
    found = op.accesses() if isinstance(op, Transfer) else (op,)
    for x in found:
        if isinstance(x, LoadBase | StoreBase) and isinstance(x.buf.type, ArrayType):
            yield x.buf, x.subs, isinstance(x, StoreBase)


# ---- order

def _no_cycle(blocks: Sequence[Block]) -> None:
    """No deadlock: without the initial tokens (`free`), the dependences of ops are acyclic. Loops
    that share a ring count as one."""
    lines = [list(_through(b)) for b in blocks]
    loops = [op for line in lines for op in line if isinstance(op, For)]
    teams = _teams(loops)
    node: dict[Op, Op] = {op: team[0] for team in teams for op in team}
    before: TopologicalSorter[Op] = TopologicalSorter()
    for line in lines:
        for early, late in pairwise(line):
            if node.get(early, early) is not node.get(late, late):
                before.add(node.get(late, late), node.get(early, early))
    given = {op.ring: op for line in lines for op in line
             if isinstance(op, Signal) and op.token == FULL}
    for op in (op for line in lines for op in line):
        if isinstance(op, Await) and op.token == FULL and op.ring in given:
            before.add(op, given[op.ring])
    try:
        before.prepare()
    except CycleError as error:
        stuck = next(op for op in error.args[1] if isinstance(op, Token))
        raise VerifyError("roles wait for each other without a token", stuck) from None
    for team in teams:
        _no_cycle([op.body for op in team])


def _through(block: Block) -> Iterator[Op]:
    """The tokens of a block and the loops that hold some; threads are not loops."""
    for op in block.ops:
        if isinstance(op, Token):
            yield op
        elif isinstance(op, For) and _rings(op):
            yield from _through(op.body) if op.level in THREADS else (op,)


def _rings(op: For) -> set[str]:
    return {x.ring for x in walk(op.body) if isinstance(x, Token)}


def _teams(loops: Sequence[For]) -> list[list[For]]:
    """Loops in groups that share rings."""
    teams: list[tuple[set[str], list[For]]] = []
    for op in loops:
        names, members = _rings(op), [op]
        for team in [t for t in teams if t[0] & names]:
            teams.remove(team)
            names, members = names | team[0], [*team[1], *members]
        teams.append((names, members))
    return [members for _, members in teams]
