"""Which roles a kernel can have on a machine: closed-form checks, each with its reason.

`load` brings tiles, `math` computes, `store` sends tiles off. What one hands to the other lies in
a ring, whose slots are counted: so both run the same loops, whose steps are as many each time, and
none needs to know what another computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from rung.core.machine import THREAD, Teams
from rung.core.op import Op, Value
from rung.loop import ir as loop
from rung.tile import mapping as tile
from rung.tile.mapping import refuse
from rung.tile.nest import Nest, Split
from rung.tile.stmt import Access, Stmt
from rung.tile.tree import Tree

Crew = dict[str, tuple[int, int]]


def check_roles(tree: Tree) -> None:
    """Raise MappingError with the reason if the roles of a mapping cannot be had."""
    mapping, nest, machine = tree.mapping, tree.nest, tree.nest.machine
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
    moves = list(_moved(tree))
    for s, op, place in moves:
        _move(op, place, [node.split for node in tree.paths[s]], tree)
    for name in sorted({*names} - {_mover(op) for _, op, _ in moves} - {"math"}):
        refuse(f"{name} has nothing to move: no place by {', '.join(machine.asynchronous)}")


def _moved(tree: Tree) -> Iterator[tuple[Stmt, Access, tile.Place]]:
    """Accesses whose tiles a role beside `math` moves."""
    crew, movers = tree.mapping.crew(), tree.nest.machine.asynchronous
    for s in tree.stmts:
        for op in s.accesses:
            place = tree.mapping.placed(op.buf.name)
            if place and place.mover in movers and _mover(op) in crew:
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


def _move(op: Access, place: tile.Place, path: Sequence[Split], tree: Tree) -> None:
    """Refuse an access whose tile cannot be moved beside `math`."""
    name, role, nest = op.buf.name, _mover(op), tree.nest
    split = nest.at(place)
    if any(isinstance(x, Value) for x in op.subs):
        refuse(f"{name} follows data, which {role} does not know")
    if split in nest.launch:
        refuse(f"{name} is placed at {place.loop}: roles start inside of that loop")
    for x in path[:path.index(split) + 1]:
        if x not in nest.launch and not nest.uniform(x):
            refuse(f"{name} has slots by the number of steps, and {x.name} has not the "
                   f"same number each time")
    both = {type(x) for s in tree.stmts for x in s.accesses if x.buf is op.buf}
    if len(both) > 1:
        refuse(f"{name} is read and written: nothing orders {role} and math")
