"""Which `place` and `overlap` lines a machine can have: checks, each with its reason."""

from __future__ import annotations

from rung.core.machine import THREAD
from rung.core.op import Value
from rung.core.types import axes_of
from rung.loop import ir as loop
from rung.tile import mapping as tile
from rung.tile.box import tile_form
from rung.tile.mapping import refuse
from rung.tile.nest import Nest, Split
from rung.tile.tree import Tree, run_of


def check_place(tree: Tree, p: tile.Place) -> None:
    """Raise MappingError with the reason if values or buffers cannot be placed so."""
    machine, values = tree.nest.machine, {v.name: v for v in tree.made}
    space, split = machine.space(p.space), tree.nest.at(p)
    if space is None:
        refuse(f"{machine.name} has no space {p.space}")
    if machine.scratchpad and not space.explicit:
        refuse(f"`{p}`: only a scratchpad holds placed values")
    if machine.threaded and not space.owner:
        refuse(f"`{p}`: {p.space} does not belong to a block")
    if p.mover and p.mover not in machine.movers:
        refuse(f"{machine.name} has no mover {p.mover}")
    if p.ring > 1 and p.mover not in machine.asynchronous:
        refuse(f"`{p}`: a ring needs an asynchronous mover")
    for name in p.values:
        if name in values:
            _value(tree.nest, p, values[name], split)
        else:
            _buffer(tree, p, name, split, explicit=space.explicit)


def _value(nest: Nest, p: tile.Place, value: Value, split: Split) -> None:
    axes = axes_of(value.type)
    if p.ring > 1 or p.mover:
        refuse(f"{value.name} is computed: no mover brings it and no ring holds it")
    for axis, _ in p.panel.blocks if p.panel else ():
        if axis not in axes:
            refuse(f"{value.name} does not vary over {axis}")
    for a in axes:
        extent_in(nest, value.name, a, nest.block_at(a, split))


def extent_in(nest: Nest, name: str, axis: str, size: int | None) -> int:
    """The elements of an axis in an array, where `size` are left of it (None: all)."""
    threads = [s.step * (s.size or 1) for s in nest.splits[axis] if s.kind == THREAD]
    if size is not None and any(t > size for t in threads):
        refuse(f"the array of {name} is made inside a loop of {axis} that is inside its threads")
    size = nest.padded(axis) if size is None else size
    if size is None:
        refuse(f"{name} needs an array over {axis}, whose extent {nest.extents[axis]} is symbolic")
    return size


def _buffer(tree: Tree, p: tile.Place, name: str, split: Split, explicit: bool) -> None:
    mine, nest = [op for op in tree.accesses if op.buf.name == name], tree.nest
    if not mine:
        refuse(f"the kernel has no value or buffer {name}")
    if p.panel:
        refuse(f"{name} is a buffer: panels are for computed values")
    if explicit and p.mover not in nest.machine.asynchronous:
        refuse(f"only {', '.join(nest.machine.asynchronous)} brings {name} to {p.space}")
    for op in mine:
        tile_form(op, split, nest)
        for a in loop.free_axes(op.subs):
            if nest.block_at(a, split) is not None:
                extent_in(nest, name, a, nest.block_at(a, split))
        if p.ring > 1 and any(isinstance(s, Value) for s in op.subs):
            refuse(f"{name} follows data: its next box is not known ahead, so no ring")
        for sub in (s for s in op.subs if isinstance(s, Value)):
            _followed(tree, name, sub, split)
        if isinstance(op, loop.Store):
            _stored(tree, op)


def _followed(tree: Tree, name: str, sub: Value, split: Split) -> None:
    """What a box follows is there when the step of its loop begins."""
    todo = [sub]
    for v in (v for v in todo if v in tree.made):
        place = tree.mapping.placed(v.name)
        if place and tree.nest.at(place).order >= split.order:
            refuse(f"{name} follows {v.name}, which is computed inside of {split.name}")
        todo += tree.made[v].operands()


def _stored(tree: Tree, op: loop.Store) -> None:
    name = op.buf.name
    if tree.nest.machine.threaded:
        refuse(f"{name} is stored from registers, not from an array")
    if op.mask:
        refuse(f"{name} is stored under a mask: its tile would not be whole")
    if any(c.buffer == name for c in tree.mapping.carries):
        refuse(f"{name} carries a state and is placed")


def check_overlap(tree: Tree, o: tile.Overlap) -> None:
    """What a mover brings may be asked for some steps before the one that reads it."""
    place = tree.mapping.placed(o.first)
    if o.first in {v.name for v in tree.made}:
        refuse(f"{o.first} is computed: only what a mover brings is issued ahead")
    if place is None or place.ring == 1:
        refuse(f"{o.first} has no ring: nothing holds what is issued ahead")
    if tree.mapping.roles:
        refuse(f"`{o}`: a role that loads runs ahead as far as slots are free")
    if not 1 <= o.distance < place.ring or o.distance != tree.mapping.ahead(place):
        refuse(f"`{o}`: one distance from 1 to {place.ring - 1} fits a ring of {place.ring}")
    split = tree.nest.at(place)
    if not any(run_of(tree.paths[s], split) and any(x.buf.name == o.first for x in s.loads)
               for s in tree.stmts if o.second in [v.name for v in s.op.results]):
        refuse(f"{o.second} does not read {o.first} in {place.loop}")
