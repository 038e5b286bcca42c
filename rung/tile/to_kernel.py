"""Tile IR to Kernel IR: walks the nest of the mapping and emits its loops.

The nest (`tile/tree.py`) says which loops there are and what begins, is kept and is read in each.
Here they become code: full blocks and ragged ones, states that loops carry and branches give back.
An accumulator's extents are the free splits nested inside the fold's outermost reduced loop
(registers when those are unrolled, an array when they are loops), plus the reduced splits on
parallel levels, which are combined at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from rung.core.expr import ZERO, Expr, sym
from rung.core.machine import GRID, Machine
from rung.core.op import Block, Builder, Func, Names, Value, walk
from rung.core.ops import Yield
from rung.kernel.ir import For, If, Raster, Role, Roles, Unrolled
from rung.tile import leaf
from rung.tile import mapping as tile
from rung.tile.nest import Split, Spot
from rung.tile.scope import Scope
from rung.tile.stage import Batch, Stage
from rung.tile.states import allocate, begin, finish, set_states, states
from rung.tile.stmt import Stmt
from rung.tile.tree import Leaf, Loop, Node, Tree
from rung.tile.values import hoist


def to_kernel(kernel: Func, machine: Machine, tree: Tree | None = None) -> Func:
    """Kernel IR of a kernel under its mapping, whose nest may be known already.

    Raises MappingError for what cannot be lowered.
    """
    mapping: tile.Mapping = kernel.attr("mapping")
    body = Walk(tree or Tree(kernel, mapping, machine)).run()
    unroll = unrolled_in(body)
    attrs: tuple[tuple[str, object], ...] = (("unroll", Unrolled(unroll)),) if unroll else ()
    attrs += tuple((o.kind, Raster(max(1, o.group))) for o in mapping.orders if o.kind != "flat")
    return Func("kernel-ir", kernel.name, kernel.params, kernel.outs, body, attrs)


class Walk:
    """The walk over the nest of one mapping."""

    def __init__(self, tree: Tree):
        self.tree, self.nest, self.stage = tree, tree.nest, Stage(tree)
        self.extents = tree.nest.extents

    def run(self) -> Block:
        kernel = self.tree.kernel
        taken = [v.name for v in (*kernel.params, *kernel.outs)]
        taken += [s.var for s in self.nest.all()] + list(self.extents)
        builder = Builder(Names(taken))
        env = {a: self.nest.start(a) for a in self.extents}
        self.launch(self.tree.body, Scope(self.tree, env, builder))
        return builder.block()

    def launch(self, nodes: Sequence[Node], scope: Scope) -> None:
        """The grid and thread loops of machines whose threads start all together, around all."""
        first = next((x for x in nodes if isinstance(x, Loop)
                      and x.split in self.nest.launch), None)
        blocks = first is not None and first.split.kind == GRID
        if self.tree.mapping.roles and not scope.streams and not blocks:
            self._roles(nodes, scope)
            return
        if first is None:
            self.stage.home = self.stage.home or (
                scope.builder if self.nest.machine.threaded else None)
            for once, group in groupby(nodes, self._once):
                self._guarded(once, list(group), scope)
            return
        split, builder = first.split, scope.builder.inner()
        inner = scope.inside(builder)
        if blocks:
            base = sym(split.var) * split.step
            spot = self.nest.full(split.axis, base) if split.innermost else Spot(base, split.step)
            inner = inner.at(split.axis, spot)
        scope.bounds[split.var] = (0, first.trips - 1)
        self._step(first, inner, None, lambda s: self.launch(first.body, s))
        scope.builder.add(For(split.var, first.trips, builder.block(), None, split.level))

    def _roles(self, nodes: Sequence[Node], scope: Scope) -> None:
        """One walk writes what each role does; arrays that they share stand before them."""
        crew = self.tree.mapping.crew()
        self.stage.home, parts = scope.builder, scope.divided(crew)
        self.launch(nodes, parts)
        builders = {"math": parts.builder, **parts.streams}
        roles = scope.builder.inner()
        for name, (count, regs) in crew.items():
            roles.add(Role(name, builders[name].block(), count, regs))
        scope.builder.add(Roles(roles.block()))

    def _once(self, node: Node) -> frozenset[Split]:
        return frozenset.intersection(*(self.tree.once[s] for s in node.stmts))

    def _guarded(self, once: frozenset[Split], nodes: Sequence[Node], scope: Scope) -> None:
        """What only the first of some blocks needs: the others skip it, but for a role, which
        would wait for it."""
        if not once or scope.streams:
            self.emit(nodes, scope)
            return
        then, other = scope.builder.inner(), scope.builder.inner()
        self.emit(nodes, scope.inside(then))
        first = tuple(-sym(s.var) for s in sorted(once, key=lambda s: s.order))
        scope.builder.add(If(first, then.block(), other.block()))

    def emit(self, nodes: Sequence[Node], scope: Scope) -> None:
        for node in nodes:
            if isinstance(node, Leaf):
                leaf.emit(node.stmts, scope)
            else:
                self.loop(node, scope)

    def loop(self, node: Loop, scope: Scope) -> None:
        for start in node.starts:
            begin(start, scope)
            self.emit(start.fill, scope)
        hoist(node.stmts, self.nest.inside(node.split), scope)
        if node.split.innermost:
            self._last(node, scope)
        else:
            self._for(node, self._cap(node, scope, whole=True), scope,
                      lambda base: Spot(base, node.split.step))
        for start in node.starts:
            finish(start.stmt, scope)

    def _cap(self, node: Loop, scope: Scope, whole: bool) -> Expr | None:
        """The steps until the axis ends, `whole` with a ragged one, where they may be fewer than
        the loop's."""
        split, extent = node.split, self.extents[node.split.axis]
        if split.size is None or self.nest.among_threads(split):
            return None
        spot = scope.env[split.axis]
        if spot.block is not None and self.nest.uniform(split):
            return None
        total = (extent + (split.step - 1 if whole else 0)) // split.step
        return total if spot.block is None else total - spot.base // split.step

    def _last(self, node: Loop, scope: Scope) -> None:
        """The innermost loop of an axis: full blocks, then the ragged one."""
        split = node.split
        if node.ragged and split.kind == GRID:
            self._grid(node, scope)
            return
        if not (self.extents[split.axis] // split.step).is_const(0) or self.nest.masked:
            self._for(node, self._cap(node, scope, whole=self.nest.masked), scope,
                      lambda base: self.nest.full(split.axis, base))
        if node.ragged:
            self._tail(node, scope)

    def _spot(self, node: Loop) -> Spot:
        """Where the ragged block is."""
        split = node.split
        whole = any(p.panel and split.axis in p.panel.groups for p in self.tree.mapping.places)
        shrink = not whole and not any(s.folds == split.axis for s in node.stmts)
        start = self.extents[split.axis] // split.step * split.step
        return self.nest.ragged(split.axis, start, shrink)

    def _tail(self, node: Loop, scope: Scope) -> None:
        """The ragged block, once, where the current block contains it."""
        axis, ragged = node.split.axis, self._spot(node)
        spot, conds = scope.env[axis], []
        if spot.block is not None:
            conds = [ragged.base - spot.base, spot.base + (spot.block - 1) - ragged.base]
        if self.extents[axis].const_value is None:
            conds.append(self.extents[axis] - ragged.base - 1)

        def last(inner: Scope) -> None:
            self._only(node, inner.at(axis, ragged))

        if conds:
            self._branch(conds, node.stmts, scope, last)
        else:
            last(scope)

    def _only(self, node: Loop, scope: Scope) -> None:
        """A step that stands alone."""
        self._step(node, scope, None, lambda inner: self.emit(node.body, inner))

    def _grid(self, node: Loop, scope: Scope) -> None:
        """A parallel loop with the ragged block as one of its steps."""
        axis, step = node.split.axis, node.split.step
        full, ragged = self.extents[axis] // step, self._spot(node)

        def body(inner: Scope) -> None:
            base = inner.env[axis].base
            self._branch([full * step - base - 1], node.stmts, inner,
                         lambda s: self.emit(node.body, s.at(axis, self.nest.full(axis, base))),
                         lambda s: self.emit(node.body, s.at(axis, ragged)))

        if full.is_const(0):
            self._only(node, scope.at(axis, ragged))
        else:
            self._for(node, self._cap(node, scope, whole=True), scope, lambda b: Spot(b, step),
                      body)

    def _branch(self, conds: Sequence[Expr], stmts: Sequence[Stmt], scope: Scope,
                then: Callable[[Scope], None], other: Callable[[Scope], None] | None = None
                ) -> None:
        """`if conds >= 0` around statements whose running folds come out as results."""
        state = states(stmts, scope)
        blocks = []
        for emit in (then, other):
            builder = scope.builder.inner()
            set_states(stmts, state, scope)
            if emit:
                emit(scope.inside(builder))
            if state:
                builder.add(Yield(states(stmts, scope)))
            blocks.append(builder.block())
        op = If(tuple(conds), blocks[0], blocks[1], tuple(v.type for v in state))
        set_states(stmts, scope.builder.add(op, *(v.name for v in state)), scope)

    def _for(self, node: Loop, cap: Expr | None, scope: Scope, spot: Callable[[Expr], Spot],
             body: Callable[[Scope], None] | None = None) -> None:
        """One loop; running folds of its statements are carried."""
        split, hi = node.split, node.trips
        start = scope.env[split.axis].base

        def rest(inner: Scope) -> None:
            body(inner) if body else self.emit(node.body, inner)

        if hi.is_const(1) and cap is None:
            self._step(node, scope.at(split.axis, spot(start)), None, rest)
            return
        if scope.streams and cap is not None and hi.const_value and cap.const_value:
            hi, cap = Expr.of(min(hi.const_value, cap.const_value)), None
        trips = [hi] if cap is None else [hi, cap]

        def around(n: Expr) -> Spot:
            return spot(start + n * split.step)

        rings = self.stage.rings(node, scope)
        self.stage.prologue(rings, split, scope, trips, around)
        state = states(node.stmts, scope)
        inner = scope.at(split.axis, around(sym(split.var))).looped(split.var, hi)
        builder = inner.builder
        args = tuple(Value(builder.names(v.name), v.type) for v in state)
        set_states(node.stmts, args, scope)
        scope.bounds[split.var] = (0, hi - 1)
        self._step(node, inner, rings, rest, sym(split.var), trips, around)
        if state:
            builder.add(Yield(states(node.stmts, scope)))
        level = split.level if split.kind == GRID or split.level == "unroll" else ""
        op = For(split.var, hi, builder.block(args), cap, level, state)
        set_states(node.stmts, scope.builder.add(op, *(v.name for v in state)), scope)
        for role, stream in inner.streams.items():
            if stream.ops:
                scope.streams[role].add(For(split.var, hi, stream.block(), cap, level))
        self.stage.drain(rings, scope)

    def _step(self, node: Loop, scope: Scope, rings: Sequence[Batch] | None,
              rest: Callable[[Scope], None], step: Expr = ZERO, trips: Sequence[Expr] = (),
              spot: Callable[[Expr], Spot] | None = None) -> None:
        """The body of one loop step (the only one, if `rings` is None): what is placed here, then
        the loops further in."""
        allocate(node, scope)
        here = scope.env[node.split.axis]
        batches = [*(rings or ()), *self.stage.plain(node, scope, rings is None)]
        tiles = self.stage.enter(batches, node.split, scope, step, trips, spot or (lambda n: here))
        rest(scope)
        self.stage.leave(batches, scope, tiles)


def unrolled_in(block: Block) -> tuple[tuple[str, int], ...]:
    """Unrolled axes that any op of a block uses, in order of appearance."""
    found: dict[str, int] = {}
    for op in walk(block):
        for value in op.results:
            found.update(getattr(value.type, "unroll", ()))
        found.update(getattr(op, "unroll", ()))
    return tuple(found.items())
