"""Tiles of buffers: the part of a parameter or output that one step of a loop needs, moved to it.

`place x in shared at k.pipe ring 2 by cp.async` gives, before and in the loop over k,

    x_tile = alloc : shared f32[2,32,32]
    transfer x_tile at [0,0,0] from x at [32*ib,0] ...        # step 0
    for kb in 0..16
      wait k_pipe pending 0                                   # step kb has arrived
      transfer x_tile at [(kb+1)%2,0,0] from x at [32*ib,32*kb+32] ...
      ... reads x_tile[kb%2,...]

Under `roles` the transfers are a stream of their own, and the slots of the ring change hands by its
tokens: see `kernel/roles.py`.

A tile covers whole innermost blocks and holds the load's fill beyond an axis' extent, so that its
readers need no mask there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rung.core.errors import MappingError
from rung.core.expr import Expr, is_size
from rung.core.op import Block, Builder, Func, Op, Value
from rung.core.ops import Sub
from rung.core.types import ArrayType, TensorType, axes_of
from rung.kernel.ir import FREE, FULL, Alloc, Await, Commit, If, Ring, Signal, Transfer, Wait
from rung.loop import ir as loop
from rung.tile import mapping as tile
from rung.tile.nest import Nest, Split, Spot

if TYPE_CHECKING:
    from rung.tile.leaf import Leaf
    from rung.tile.to_kernel import Scope, Stmt

Access = loop.Load | loop.Store


@dataclass(frozen=True)
class Form:
    """The box that an access needs: its size, and which dimensions follow one axis exactly.

    `axes[d]` is that axis; `whole[d]` says that the dimension is there from 0 on.
    """

    box: tuple[int, ...]
    axes: tuple[str, ...]
    whole: tuple[bool, ...]

    @property
    def exact(self) -> frozenset[str]:
        """Axes beyond whose extent the tile holds its fill."""
        return frozenset(a for a in self.axes if a)


@dataclass(frozen=True)
class Tile:
    """Where an access finds its elements at this step: `array` holds the buffer from `corner`."""

    array: Value
    corner: tuple[Sub, ...]
    slot: Expr | None
    form: Form

    def local(self, places: Sequence[Sub]) -> list[Sub]:
        """Subscripts of the array for subscripts of the buffer."""
        inside: list[Sub] = [p - c if isinstance(p, Expr) and isinstance(c, Expr) else Expr.of(0)
                             for p, c in zip(places, self.corner, strict=True)]
        return inside if self.slot is None else [self.slot, *inside]


@dataclass(frozen=True, eq=False)
class Batch:
    """The tiles of one `place` line at one run of its loop."""

    place: tile.Place
    group: str  # empty: the mover is synchronous
    moves: tuple[tuple[Access, Form, Value], ...]  # one for each distinct tile
    same: Mapping[Op, Access]  # accesses that share the tile of another
    ring: int
    ahead: int  # steps from the start of a transfer to its use
    roles: bool  # one role fills its slots and another drains them


def tile_form(op: Access, block: Callable[[str], int | None], nest: Nest) -> Form:
    """The box of an access, given each axis' block (None: whole). Raises MappingError."""
    assert isinstance(op.buf.type, TensorType)
    dims = [_dimension(op, sub, size, block, nest)
            for sub, size in zip(op.subs, op.buf.type.shape, strict=True)]
    found = [a for s in op.subs if isinstance(s, Expr) for a in s.symbols()]
    if isinstance(op, loop.Store) and len(set(found)) < len(found):
        raise MappingError(f"illegal: {op.buf.name} is stored along a diagonal, which is no box")
    axes = tuple(axis if found.count(axis) == 1 else "" for _, axis, _ in dims)
    return Form(tuple(n for n, _, _ in dims), axes, tuple(whole for _, _, whole in dims))


def _dimension(op: Access, sub: Sub, size: Expr, block: Callable[[str], int | None], nest: Nest
               ) -> tuple[int, str, bool]:
    """(elements, axis that it follows exactly, whether it is there from 0 on)."""
    def refuse(why: str) -> MappingError:
        return MappingError(f"illegal: {op.buf.name}[..,{sub},..] is no box: {why}")

    def length(axis: str) -> int:
        inner = block(axis) or nest.padded(axis)
        if inner is None:
            raise refuse(f"{axis} is symbolic and whole there")
        return inner

    if isinstance(sub, Value):
        if any(length(a) != 1 for a in axes_of(sub.type)):
            raise refuse("it follows data, place it where it is one element")
        return 1, "", False
    axes = sorted(s for s in sub.symbols() if not is_size(s))
    if not axes:
        return 1, "", False
    whole = all(block(a) is None for a in axes)
    factors = {a: sub.coefficient(a) for a in axes}
    steps = [f.const_value if f is not None else None for f in factors.values()]
    exact = len(axes) == 1 and steps == [1] and not op.mask
    stored = isinstance(op, loop.Store)
    if len(axes) == 1 and steps == [1]:
        begins = sub.without(axes[0]).is_const(0)
        if begins or stored:
            return length(axes[0]), axes[0] if exact else "", whole and begins
    if stored and all(length(a) == 1 for a in axes):
        return 1, "", False
    if stored and not _fills(steps, [nest.extents[a].const_value if whole else length(a)
                                     for a in axes]):
        raise refuse("there are places in its box that it does not store to")
    if whole:
        if size.const_value is None:
            raise refuse("its size is symbolic")
        return size.const_value, "", True
    if any(s is None or s < 0 for s in steps) or sub.const < 0:
        if size.const_value is not None:  # all of it, again in each step
            return size.const_value, "", True
        raise refuse("it does not run forward from its corner")
    reach = sum((s or 0) * (length(a) - 1) for a, s in zip(axes, steps, strict=True))
    return 1 + reach, axes[0] if exact else "", False


def _fills(steps: Sequence[int | None], extents: Sequence[int | None]) -> bool:
    """Whether a store along several axes, by their steps and extents, leaves no gaps."""
    covered = 1  # elements that the axes so far cover: the step of the next one
    for step, n in sorted((step or 0, n or 0) for step, n in zip(steps, extents, strict=True)):
        if step != covered:
            return False
        covered *= n
    return True


class Stage:
    """Emits the transfers of all `place` lines that name buffers."""

    def __init__(self, kernel: Func, mapping: tile.Mapping, nest: Nest, leaf: Leaf):
        self.nest, self.leaf, self.mapping = nest, leaf, mapping
        self.machine = nest.machine
        self.placed: dict[Op, tuple[tile.Place, Form]] = {}
        self.arrays: dict[tuple[Builder, Op], Value] = {}
        self.crew = mapping.crew()
        self.home: Builder | None = None  # where a block's arrays are made once for all phases
        for op in kernel.body.ops:
            place = placed_buffer(op, mapping)
            if place:
                assert isinstance(op, loop.Load | loop.Store)
                split = find_split(place, nest)
                self.placed[op] = place, tile_form(
                    op, lambda a, split=split: nest.block_at(a, split), nest)  # type: ignore[misc]

    # ---- around a loop
    def rings(self, split: Split, stmts: Sequence[Stmt], scope: Scope) -> list[Batch]:
        """The batches with rings at this loop; their arrays are made here, outside of it."""
        return self._batches(split, stmts, scope, lambda p: p.ring > 1)

    def plain(self, split: Split, stmts: Sequence[Stmt], scope: Scope, single: bool
              ) -> list[Batch]:
        """The batches whose arrays belong to one step; a `single` step needs no ring."""
        return self._batches(split, stmts, scope, lambda p: single or p.ring == 1, single)

    def _batches(self, split: Split, stmts: Sequence[Stmt], scope: Scope,
                 wanted: Callable[[tile.Place], bool], single: bool = False) -> list[Batch]:
        batches = []
        for place in self.mapping.places:
            if (place.axis, place.level) == (split.axis, split.level) and wanted(place):
                batches += self._batch(place, stmts, scope, 1 if single else place.ring)
        return batches

    def _batch(self, place: tile.Place, stmts: Sequence[Stmt], scope: Scope, ring: int
               ) -> list[Batch]:
        used = {op: None for s in stmts for op in (*s.loads, s.op)}
        ops = [op for op in used if op in self.placed and self.placed[op][0] is place]
        asynchronous = place.mover in self.machine.asynchronous
        moves: list[tuple[Access, Form, Value]] = []
        same: dict[Op, Access] = {}
        for op in ops:
            assert isinstance(op, loop.Load | loop.Store)
            form = self.placed[op][1]
            twin = next((m[0] for m in moves if self._twins(op, m[0])), None)
            if twin is None:
                apart = asynchronous and self._apart(op)
                moves.append((op, form, self._array(op, form, place, scope, ring, apart)))
            same[op] = twin or op
        group = f"{place.axis}_{place.level}" if asynchronous else ""
        groups = [[m for m in moves if isinstance(m[0], kind)] for kind in (loop.Load, loop.Store)]
        ahead = self.mapping.ahead(place) if ring > 1 else 0
        return [self._named(Batch(place, group and group + end, tuple(g), same, ring, ahead,
                                  asynchronous and self._apart(g[0][0])))
                for g, end in zip(groups, ("", "_out"), strict=True) if g]

    def _apart(self, op: Access) -> bool:
        """Whether another role than `math` moves the tile of an access."""
        return ("load" if isinstance(op, loop.Load) else "store") in self.crew

    def _named(self, batch: Batch) -> Batch:
        """Under roles, declares the ring of a batch, with a name that no other has."""
        if not batch.roles:
            return batch
        assert self.home is not None
        name = self.home.names(batch.group)
        self.home.add(Ring(name, batch.ring, tuple(array for _, _, array in batch.moves)))
        return replace(batch, group=name)

    def _twins(self, a: Access, b: Access) -> bool:
        """Whether two loads need the same box of one buffer."""
        if not (isinstance(a, loop.Load) and isinstance(b, loop.Load)) or a.buf is not b.buf:
            return False
        one, two = self.placed[a][1], self.placed[b][1]
        corners = all(w or p is q for p, q, w in zip(a.subs, b.subs, one.whole, strict=True))
        return (one.box, one.whole, a.fill) == (two.box, two.whole, b.fill) and corners

    def _array(self, op: Access, form: Form, place: tile.Place, scope: Scope, ring: int,
               apart: bool) -> Value:
        key = self.home or scope.builder, op
        if key not in self.arrays or apart:  # loops that follow each other need rings of their own
            assert isinstance(op.buf.type, TensorType)
            shape = (*form.box[:-1], form.box[-1] + place.pad) if form.box else ()
            shape = (ring, *shape) if ring > 1 else shape
            kind = ArrayType(place.space, op.buf.type.dtype, shape)
            self.arrays[key] = key[0].one(Alloc((kind,)), f"{op.buf.name}_tile")
        return self.arrays[key]

    # ---- in its steps
    def prologue(self, batches: Sequence[Batch], split: Split, scope: Scope,
                 trips: Sequence[Expr], spot: Callable[[Expr], Spot]) -> None:
        """Start the transfers of the first steps of rings."""
        for batch in batches:
            for n in range(batch.ahead) if _loads(batch) and not batch.roles else ():
                self._start(batch, split, scope, Expr.of(n), trips, spot)

    def enter(self, batches: Sequence[Batch], split: Split, scope: Scope, step: Expr,
              trips: Sequence[Expr], spot: Callable[[Expr], Spot]) -> dict[Op, Tile]:
        """Make this step's tiles arrive and start those of a later step; the tiles by access."""
        tiles: dict[Op, Tile] = {}
        for batch in batches:
            if batch.ring > 1 and batch.group and not batch.roles:
                late = (batch.ahead if _loads(batch) else batch.ring) - 1
                scope.builder.add(Wait(batch.group, late))
        for batch in batches:
            if batch.roles:
                self._take(batch, scope)
            elif _loads(batch):
                self._start(batch, split, scope, step + batch.ahead,
                            trips if batch.ring > 1 else (), spot)
                if batch.ring == 1 and batch.group:
                    scope.builder.add(Wait(batch.group, 0))
            slot = (scope.step if batch.roles else step) % batch.ring if batch.ring > 1 else None
            made = {op: Tile(array, self._corner(op, form, scope.env, scope), slot, form)
                    for op, form, array in batch.moves}
            tiles.update({op: made[twin] for op, twin in batch.same.items() if twin in made})
            self.leaf.tiles.update(tiles)  # a later batch may follow data that this one brought
        return tiles

    def leave(self, batches: Sequence[Batch], scope: Scope, tiles: Mapping[Op, Tile]) -> None:
        """Send this step's output tiles off."""
        for batch in batches:
            if batch.roles:
                self._hand_over(batch, scope, tiles)
            elif not _loads(batch):
                self._send(scope.builder, batch, scope, tiles, batch.group)
                self._commit(scope.builder, batch, 0 if batch.ring == 1 else None)

    def _send(self, builder: Builder, batch: Batch, scope: Scope, tiles: Mapping[Op, Tile],
              group: str) -> None:
        for op, form, array in batch.moves:
            made = tiles[op]
            start = [Expr.of(0)] * len(form.box)
            at = start if made.slot is None else [made.slot, *start]
            builder.add(Transfer(
                op.buf, made.corner, array, tuple(at), form.box,
                self._valid(op, form, made.corner, scope.env), 0, batch.place.mover, group))

    # ---- between roles
    def _take(self, batch: Batch, scope: Scope) -> None:
        """`math` waits for this step's slot, full or free; `load` fills it when it is free."""
        ring, step = batch.group, scope.step
        if not _loads(batch):
            scope.builder.add(Await(ring, FREE, step))
            return
        load = scope.streams["load"]
        load.add(Await(ring, FREE, step))
        slot = step % batch.ring if batch.ring > 1 else None
        self._fetch(load, batch, scope, scope.env, slot)
        load.add(Signal(ring, FULL, step))
        scope.builder.add(Await(ring, FULL, step))

    def _hand_over(self, batch: Batch, scope: Scope, tiles: Mapping[Op, Tile]) -> None:
        """`math` gives this step's slot back, or on to `store`, which sends it off."""
        ring, step = batch.group, scope.step
        scope.builder.add(Signal(ring, FREE if _loads(batch) else FULL, step))
        if not _loads(batch):
            store = scope.streams["store"]
            store.add(Await(ring, FULL, step))
            self._send(store, batch, scope, tiles, "")
            store.add(Signal(ring, FREE, step))

    def drain(self, batches: Sequence[Batch], scope: Scope) -> None:
        """After the loop: what is still on its way out arrives."""
        for batch in batches:
            if not _loads(batch) and batch.ring > 1 and batch.group and not batch.roles:
                scope.builder.add(Wait(batch.group, 0))

    def _start(self, batch: Batch, split: Split, scope: Scope, step: Expr, trips: Sequence[Expr],
               spot: Callable[[Expr], Spot]) -> None:
        """Start the transfers of a step, if there is such a step."""
        left = [t - step - 1 for t in trips]
        conds = tuple(e for e in left if e.const_value is None or e.const_value < 0)
        builder = scope.builder.inner() if conds else scope.builder
        ahead = batch.ring > 1
        env = {**scope.env, split.axis: spot(step)} if ahead else scope.env
        self._fetch(builder, batch, scope, env, step % batch.ring if ahead else None)
        if conds:
            scope.builder.add(If(conds, builder.block(), Block((), ())))
        self._commit(scope.builder, batch, None)

    def _fetch(self, builder: Builder, batch: Batch, scope: Scope, env: Mapping[str, Spot],
               slot: Expr | None) -> None:
        """The transfers that bring what a step at `env` needs, into a slot if there are some."""
        for op, form, array in batch.moves:
            assert isinstance(op, loop.Load)
            corner = self._corner(op, form, env, scope)
            start = [Expr.of(0)] * len(form.box)
            at = start if slot is None else [slot, *start]
            builder.add(Transfer(array, tuple(at), op.buf, corner, form.box,
                                 self._valid(op, form, corner, env), op.fill, batch.place.mover,
                                 batch.group))

    @staticmethod
    def _commit(builder: Builder, batch: Batch, pending: int | None) -> None:
        if batch.group:
            builder.add(Commit(batch.group))
            if pending is not None:
                builder.add(Wait(batch.group, pending))

    def _corner(self, op: Access, form: Form, env: Mapping[str, Spot], scope: Scope
                ) -> tuple[Sub, ...]:
        base = {a: spot.base for a, spot in env.items()}
        return tuple(self.leaf.value(s, scope) if isinstance(s, Value)
                     else Expr.of(0) if whole else s.subs(base)
                     for s, whole in zip(op.subs, form.whole, strict=True))

    def _valid(self, op: Access, form: Form, corner: Sequence[Sub], env: Mapping[str, Spot]
               ) -> tuple[Expr, ...]:
        """Elements from the corner to the end of the axis, or of the dimension."""
        assert isinstance(op.buf.type, TensorType)
        out = []
        for n, size, axis, at in zip(form.box, op.buf.type.shape, form.axes, corner, strict=True):
            if axis:
                out.append(self.nest.extents[axis] - env[axis].base)
            else:
                beyond = n > 1 or op.mask  # one element that no mask covers is there
                out.append(size - at if isinstance(at, Expr) and beyond else Expr.of(1))
        return tuple(out)


def _loads(batch: Batch) -> bool:
    return isinstance(batch.moves[0][0], loop.Load)


def placed_buffer(op: Op, mapping: tile.Mapping) -> tile.Place | None:
    """The place of the buffer that an op reads or writes."""
    return mapping.placed(op.buf.name) if isinstance(op, loop.Load | loop.Store) else None


def find_split(place: tile.Place, nest: Nest) -> Split:
    """The loop that a place stands at. Raises MappingError when the mapping has none."""
    for split in nest.splits.get(place.axis, ()):
        if split.level == place.level and split.var:
            return split
    raise MappingError(f"illegal: there is no loop {place.axis}.{place.level}")
