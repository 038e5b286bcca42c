"""Which roles a kernel can have on a machine: closed-form checks, each with its reason.

`load` brings tiles, `math` computes, `store` sends tiles off. What one hands to the other lies in
a ring, whose slots are counted: so both run the same loops, whose steps are as many each time, and
none needs to know what another computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from rung.core.machine import THREAD, Machine, Teams
from rung.core.op import Op, Value
from rung.loop import ir as loop
from rung.tile import mapping as tile
from rung.tile.nest import Nest, Split
from rung.tile.route import Route, refuse
from rung.tile.stage import Access, find_split, placed_buffer
from rung.tile.to_kernel import Stmt

Crew = dict[str, tuple[int, int]]


def check_roles(mapping: tile.Mapping, machine: Machine, nest: Nest, stmts: Sequence[Stmt],
                route: Route) -> None:
    """Raise MappingError with the reason if the roles of a mapping cannot be had."""
    names = [name for line in mapping.roles for name, _, _ in line.roles]
    if machine.teams is None:
        refuse(f"`{mapping.roles[0]}`: {machine.name} has no roles, a thread does all")
    for name in names:
        if name not in machine.teams.roles:
            refuse(f"{machine.name} has no role {name}, only {', '.join(machine.teams.roles)}")
        if names.count(name) > 1:
            refuse(f"two roles are called {name}")
    for name in ("load", "math"):
        if name not in names:
            refuse(f"`{mapping.roles[0]}`: there is no role {name}")
    _team(mapping.crew(), machine.teams, nest)
    moves = list(moved(mapping, machine, stmts))
    for s, op, place in moves:
        _move(op, place, [x for x, _ in route.paths[id(s)]], nest, stmts)
    for name in sorted({*names} - {_mover(op) for _, op, _ in moves} - {"math"}):
        refuse(f"{name} has nothing to move: no place by {', '.join(machine.asynchronous)}")


def moved(mapping: tile.Mapping, machine: Machine, stmts: Sequence[Stmt]
          ) -> Iterator[tuple[Stmt, Access, tile.Place]]:
    """Accesses whose tiles a role beside `math` moves."""
    for s in stmts:
        for op in dict.fromkeys((*s.loads, s.op)):
            place = placed_buffer(op, mapping)
            if place and place.mover in machine.asynchronous and _mover(op) in mapping.crew():
                assert isinstance(op, loop.Load | loop.Store)
                yield s, op, place


def _mover(op: Op) -> str:
    return "load" if isinstance(op, loop.Load) else "store"


def _team(crew: Crew, teams: Teams, nest: Nest) -> None:
    """A queue is there once; teams of threads are as many as the mapping's threads, and share the
    registers of a block."""
    if not teams.threads:
        for name, (count, regs) in crew.items():
            if count != 1 or regs:
                refuse(f"{name} is one queue, without registers of its own")
        return
    threads, count = prod(s.size or 1 for s in nest.all() if s.kind == THREAD), crew["math"][0]
    if count * teams.threads != threads:
        refuse(f"math x{count} is {count * teams.threads} threads, the axes have {threads}")
    total = sum(count for count, _ in crew.values()) * teams.threads
    if total > teams.most or any(count < 1 for count, _ in crew.values()):
        refuse(f"{total} threads in all roles, a block has up to {teams.most}")
    if any(regs for _, regs in crew.values()):
        _registers(crew, teams, total)


def _registers(crew: Crew, teams: Teams, total: int) -> None:
    """Each team gets or gives registers in eights, from those that all threads started with."""
    for name, (_, regs) in crew.items():
        if regs % 8 or not 24 <= regs <= 256:
            refuse(f"{name} regs {regs}: a thread has a multiple of 8 from 24 to 256")
    start = teams.registers // total // 8 * 8
    used = sum(count * regs for count, regs in crew.values()) * teams.threads
    if used > start * total:
        refuse(f"{used} registers in all roles > {start} of each of {total} threads")


def _move(op: Access, place: tile.Place, path: Sequence[Split], nest: Nest, stmts: Sequence[Stmt]
          ) -> None:
    """Refuse an access whose tile cannot be moved beside `math`."""
    name, role, split = op.buf.name, _mover(op), find_split(place, nest)
    if any(isinstance(x, Value) for x in op.subs):
        refuse(f"{name} follows data, which {role} does not know")
    if split in nest.launch:
        refuse(f"{name} is placed at {place.axis}.{place.level}: roles start inside of that loop")
    for x in path[:path.index(split) + 1]:
        if x not in nest.launch and not nest.uniform(x):
            refuse(f"{name} has slots by the number of steps, and {x.axis}.{x.level} has not the "
                   f"same number each time")
    both = {type(x) for s in stmts for x in (*s.loads, s.op)
            if isinstance(x, loop.Load | loop.Store) and x.buf is op.buf}
    if len(both) > 1:
        refuse(f"{name} is read and written: nothing orders {role} and math")
