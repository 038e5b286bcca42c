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
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rung.core.expr import Expr
from rung.core.op import Block, Builder, Op, Value
from rung.core.ops import Sub
from rung.core.types import ArrayType, TensorType
from rung.kernel.ir import FREE, FULL, Alloc, Await, Commit, If, Ring, Signal, Transfer, Wait
from rung.loop import ir as loop
from rung.tile import mapping as tile
from rung.tile.box import Form, Tile, tile_form
from rung.tile.nest import Split, Spot
from rung.tile.scope import Scope
from rung.tile.stmt import Access
from rung.tile.tree import Loop, Tree
from rung.tile.values import value


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


class Stage:
    """Emits the transfers of all `place` lines that name buffers."""

    def __init__(self, tree: Tree):
        self.nest, self.mapping, self.machine = tree.nest, tree.mapping, tree.nest.machine
        self.arrays: dict[tuple[Builder, Op], Value] = {}
        self.crew = tree.mapping.crew()
        self.home: Builder | None = None  # where a block's arrays are made once for all phases

    # ---- around a loop
    def rings(self, node: Loop, scope: Scope) -> list[Batch]:
        """The batches with rings at this loop; their arrays are made here, outside of it."""
        return [x for place, ops in node.tiles if place.ring > 1
                for x in self._batch(node.split, place, ops, scope, place.ring)]

    def plain(self, node: Loop, scope: Scope, single: bool) -> list[Batch]:
        """The batches whose arrays belong to one step; a `single` step needs no ring."""
        return [x for place, ops in node.tiles if single or place.ring == 1
                for x in self._batch(node.split, place, ops, scope, 1 if single else place.ring)]

    def _batch(self, split: Split, place: tile.Place, ops: Sequence[Access], scope: Scope,
               ring: int) -> list[Batch]:
        asynchronous = place.mover in self.machine.asynchronous
        moves: list[tuple[Access, Form, Value]] = []
        same: dict[Op, Access] = {}
        for op in ops:
            form = tile_form(op, split, self.nest)
            twin = next((m[0] for m in moves if _twins(op, form, m[0], m[1])), None)
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
            scope.tiles.update(tiles)  # a later batch may follow data that this one brought
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
        return tuple(value(s, scope) if isinstance(s, Value)
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


def _twins(a: Access, one: Form, b: Access, two: Form) -> bool:
    """Whether two loads need the same box of one buffer."""
    if not (isinstance(a, loop.Load) and isinstance(b, loop.Load)) or a.buf is not b.buf:
        return False
    corners = all(w or p is q for p, q, w in zip(a.subs, b.subs, one.whole, strict=True))
    return (one.box, one.whole, a.fill) == (two.box, two.whole, b.fill) and corners


def _loads(batch: Batch) -> bool:
    return isinstance(batch.moves[0][0], loop.Load)
