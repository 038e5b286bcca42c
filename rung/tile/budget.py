"""What a block keeps: arrays against the capacity of spaces, accumulators against registers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from rung.core.machine import SEQ, THREAD, UNROLL
from rung.core.op import Value
from rung.core.types import axes_of, dtype_of
from rung.loop import ir as loop
from rung.tile import mapping as tile
from rung.tile.box import tile_form
from rung.tile.mapping import refuse
from rung.tile.nest import LOOPS, Split
from rung.tile.places import extent_in
from rung.tile.stmt import Access, Stmt
from rung.tile.tree import Path, Tree, run_of

SPARE = 48  # registers of a thread for addresses and operands
Array = tuple[str, int, int]  # (space, bytes, ring)


def check_budget(tree: Tree) -> None:
    """Raise MappingError if a block's arrays or accumulators do not fit, or have no known size."""
    machine, arrays = tree.nest.machine, list(_arrays(tree))
    if not machine.masked:
        return  # a cache that overflows is slow, not wrong
    for space in machine.spaces:
        parts = [(size, ring) for name, size, ring in arrays if name == space.name]
        total = sum(size * ring for size, ring in parts)
        if total > space.bytes:
            names = " + ".join(f"{_kb(size)}" + (f" x ring {ring}" if ring > 1 else "")
                               for size, ring in parts)
            refuse(f"{names} = {_kb(total)} > {_kb(space.bytes)} of {space.name}")
    if machine.threaded:
        _registers(tree)


def _arrays(tree: Tree) -> Iterator[Array]:
    """All arrays of a block."""
    nest, values = tree.nest, {v.name: v for v in tree.made}
    for p in tree.mapping.places:
        split = nest.at(p)
        for name in p.values:
            if name in values:
                sizes = [extent_in(nest, name, a, nest.block_at(a, split))
                         for a in axes_of(values[name].type)]
                yield p.space, _bytes(values[name], sizes, p.pad), 1
                continue
            yield from _tiles(tree, p, name, split)
    teams = nest.machine.teams
    if tree.mapping.roles and teams and teams.threads:
        for p in tree.mapping.places:  # a full and a free token of 8 B for each slot
            yield p.space, 16, p.ring
    for s in tree.stmts:
        if s.kind == "fold":
            yield from _state(tree, s)


def _tiles(tree: Tree, p: tile.Place, name: str, split: Split) -> Iterator[Array]:
    seen = set()
    for op in tree.accesses:
        if op.buf.name == name:
            form = tile_form(op, split, tree.nest)
            key = (type(op), form, tuple(None if w else str(s)
                                         for s, w in zip(op.subs, form.whole, strict=True)))
            if key not in seen:
                seen.add(key)
                for _ in range(_copies(tree, op, split)):
                    yield p.space, _bytes(op.buf, form.box, p.pad), p.ring


def _copies(tree: Tree, op: Access, split: Split) -> int:
    """Tiles of one access: under roles, loops that follow each other have one each."""
    paths = [tree.paths[s] for s in tree.stmts if op in s.accesses]
    return len({run_of(path, split) for path in paths}) if tree.mapping.roles else 1


def _bytes(value: Value, sizes: Sequence[int], pad: int) -> int:
    sizes = [*sizes[:-1], sizes[-1] + pad] if sizes else []
    return prod(sizes) * dtype_of(value.type).bytes


def _state(tree: Tree, s: Stmt) -> Iterator[Array]:
    """A fold's state: arrays where loops over its free axes are inside it, else registers."""
    nest, start = tree.nest, tree.start(s)
    own = nest.machine.space("acc")
    for state in s.op.results if start else ():
        axes = axes_of(state.type)
        if start and start.inside:
            sizes = [_left(tree, state.name, a, tree.end(s)) for a in axes]
            yield (own or nest.machine.spaces[0]).name, _bytes(state, sizes, 0), 1
        elif own:
            sizes = [nest.unit(a) for a in axes]
            sizes += [] if state.name in tree.atoms else [nest.unit(s.folds)]
            yield own.name, _bytes(state, sizes, 0), 1


def _left(tree: Tree, name: str, axis: str, path: Path) -> int:
    """Elements of an axis that the loops around leave to those inside."""
    steps = [n.split.step for n in path if n.split.axis == axis and n.split.kind in LOOPS]
    return extent_in(tree.nest, name, axis, steps[-1] if steps else None)


def _registers(tree: Tree) -> None:
    nest, crew, teams = tree.nest, tree.mapping.crew(), tree.nest.machine.teams
    looped = {x.axis for x in nest.loops if x.kind == SEQ}  # a fold without a loop ends at once
    total = 0
    for op in loop.reductions(tree.kernel):
        copies = [op.axis] if op.axis in looped and not op.rule.block else []
        total += sum(prod(nest.count(a, UNROLL) for a in (*axes_of(r.type), *copies))
                     for r in op.results)
    threads = prod(s.size or 1 for s in nest.all() if s.kind == THREAD)
    if teams:
        threads = sum(count for count, _ in crew.values()) * teams.threads or threads
    share = teams.registers // threads if teams and teams.registers else nest.machine.registers
    most = crew.get("math", (1, 0))[1] or min(nest.machine.registers, share // 8 * 8)
    if total > most - SPARE:
        refuse(f"{total} accumulators a thread + {SPARE} > {most} registers")


def _kb(size: int) -> str:
    return f"{size >> 10} KB" if size >= 1 << 10 else f"{size} B"
