"""Tile IR to Kernel IR: walks the levels of the mapping and emits the loop nest.

The contract, in three rules:
1. phases: under one loop, a reader of a finished fold starts a new loop over that axis;
2. an accumulator's extents are the free splits nested inside the fold's outermost reduced loop
   (registers when those are unrolled, an array when they are loops), plus the reduced splits on
   parallel levels, which are combined at the end;
3. an op that does not vary over an axis leaves its loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rung.core.errors import MappingError
from rung.core.expr import ZERO, Expr, sym
from rung.core.machine import GRID, Machine
from rung.core.op import Block, Builder, Func, Names, Op, Value, walk
from rung.core.ops import Yield
from rung.core.types import dtype_of
from rung.kernel.ir import For, If, Raster, Role, Roles, Unrolled
from rung.loop import ir as loop
from rung.tile import mapping as tile
from rung.tile.leaf import Leaf
from rung.tile.nest import LOOPS, Nest, Split, Spot
from rung.tile.stage import Batch, Stage

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(eq=False)
class Stmt:
    """What a nest executes: a fold's step, a placed value, a store, an array's initial value."""

    kind: str  # fold | scan | place | store | init
    op: Op
    axes: frozenset[str]
    needs: list[Stmt] = field(default_factory=list)
    carried: frozenset[Split] = frozenset()  # outer reduced loops that it stays inside of
    waits: loop.Store | None = None  # where the state of a fold waits between those loops
    loads: tuple[Op, ...] = ()  # what it reads from buffers, directly or through maps
    within: frozenset[Split] = frozenset()  # loops around the place where its array lives

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


@dataclass
class Scope:
    """Where the walk stands: the spot of each axis and the values computed so far."""

    env: dict[str, Spot]
    memo: dict[Value, Value]
    builder: Builder
    streams: Mapping[str, Builder] = field(default_factory=dict)  # what roles beside `math` do
    step: Expr = ZERO  # how often the body of the loops around ran since the roles started

    def at(self, axis: str, spot: Spot) -> Scope:
        return replace(self, env={**self.env, axis: spot}, memo=dict(self.memo))

    def inside(self, builder: Builder) -> Scope:
        return replace(self, memo=dict(self.memo), builder=builder)

    def divided(self, roles: Iterable[str]) -> Scope:
        """The same place in each of some roles; `math` is the one that `builder` builds."""
        return replace(self, memo=dict(self.memo), builder=self.builder.inner(),
                       streams={r: self.builder.inner() for r in roles if r != "math"})

    def looped(self, var: str, hi: Expr) -> Scope:
        """Inside of a loop, in all roles."""
        return replace(self.inside(self.builder.inner()), step=self.step * hi + sym(var),
                       streams={r: b.inner() for r, b in self.streams.items()})


def to_kernel(kernel: Func, machine: Machine) -> Func:
    """Kernel IR of a kernel under its mapping. Raises MappingError for what cannot be lowered."""
    mapping: tile.Mapping = kernel.attr("mapping")
    body, unroll = Walk(kernel, mapping, machine).run()
    attrs: tuple[tuple[str, object], ...] = (("unroll", Unrolled(unroll)),) if unroll else ()
    attrs += tuple((o.kind, Raster(max(1, o.group))) for o in mapping.orders if o.kind != "flat")
    return Func("kernel-ir", kernel.name, kernel.params, kernel.outs, body, attrs)


class Walk:
    """The walk over the levels of one mapping."""

    def __init__(self, kernel: Func, mapping: tile.Mapping, machine: Machine):
        self.kernel, self.mapping, self.machine = kernel, mapping, machine
        self.extents = loop.extents_of(kernel)
        self.nest = Nest(self.extents, mapping, machine)
        taken = [v.name for v in (*kernel.params, *kernel.outs)]
        taken += [s.var for s in self.nest.all()] + list(self.extents)
        self.leaf = Leaf(kernel, mapping, machine, self.nest)
        self.stage = Stage(kernel, mapping, self.nest, self.leaf)
        self.builder = Builder(Names(taken))

    def run(self) -> tuple[Block, tuple[tuple[str, int], ...]]:
        stmts = statements(self.kernel, self.mapping, self.nest)
        env = {a: self.nest.start(a) for a in self.extents}
        self.launch(stmts, self.nest.launch, Scope(env, {}, self.builder))
        block = self.builder.block()
        return block, unrolled_in(block)

    def launch(self, stmts: Sequence[Stmt], splits: Sequence[Split], scope: Scope) -> None:
        """The grid and thread loops of machines whose threads start all together, around all."""
        if self.mapping.roles and not scope.streams and (not splits or splits[0].kind != GRID):
            self._roles(stmts, splits, scope)
            return
        if not splits:
            self.stage.home = self.stage.home or (scope.builder if self.machine.threaded else None)
            self.emit(stmts, 0, scope)
            return
        split, builder = splits[0], scope.builder.inner()
        inner, hi = scope.inside(builder), Expr.of(split.size or 1)
        if split.kind == GRID:
            hi = (self.extents[split.axis] + (split.step - 1)) // split.step
            base = sym(split.var) * split.step
            spot = self.nest.full(split.axis, base) if split.innermost else Spot(base, split.step)
            inner = inner.at(split.axis, spot)
        self.leaf.bounds[split.var] = (0, hi - 1)
        self._step(split, stmts, inner, None, lambda s: self.launch(stmts, splits[1:], s))
        scope.builder.add(For(split.var, hi, builder.block(), None, split.level))

    def _roles(self, stmts: Sequence[Stmt], splits: Sequence[Split], scope: Scope) -> None:
        """One walk writes what each role does; arrays that they share stand before them."""
        crew = self.mapping.crew()
        self.stage.home, parts = scope.builder, scope.divided(crew)
        self.launch(stmts, splits, parts)
        builders = {"math": parts.builder, **parts.streams}
        roles = scope.builder.inner()
        for name, (count, regs) in crew.items():
            roles.add(Role(name, builders[name].block(), count, regs))
        scope.builder.add(Roles(roles.block()))

    def emit(self, stmts: Sequence[Stmt], depth: int, scope: Scope) -> None:
        """Emit statements inside the loops outside of `depth`."""
        if not stmts:
            return
        if depth == len(self.nest.loops):
            self.leaf.emit(stmts, scope)
            return
        split = self.nest.loops[depth]
        for phase in phases(stmts, split):
            inside = [s for s in phase if varies(s, split)]
            outside = [s for s in phase if not varies(s, split)]
            if inside:
                self.loop(split, inside, depth, scope)
            self.emit(outside, depth + 1, scope)

    def loop(self, split: Split, stmts: Sequence[Stmt], depth: int, scope: Scope) -> None:
        starts = [s for s in stmts if s.carries == split.axis and split not in s.carried
                  and s.op not in self.leaf.running]
        for s in starts:
            inits = self.leaf.start(s, self._nested(s, depth), scope)
            if inits:
                self.emit([Stmt("init", s.op, frozenset(inits))], depth + 1, scope)
        self.leaf.hoist(stmts, split.axis, self._open(depth), scope)
        if split.innermost:
            self._last(split, stmts, depth, scope)
        else:
            hi, cap = self._trips(split, scope, self.extents[split.axis] + (split.step - 1))
            self._for(split, hi, cap, stmts, depth, scope,
                      lambda base: Spot(base, split.step))
        for s in starts:
            self.leaf.finish(s, scope)

    def _nested(self, stmt: Stmt, depth: int) -> set[str]:
        """Free axes of a fold that still have loops inside `depth`: its array's axes."""
        return {s.axis for s in self.nest.loops[depth + 1:] if s.axis in stmt.axes
                and s.axis != stmt.carries}

    def _open(self, depth: int) -> set[str]:
        """Axes with a loop at or inside `depth`."""
        return {s.axis for s in self.nest.loops[depth:]}

    def _trips(self, split: Split, scope: Scope, end: Expr) -> tuple[Expr, Expr | None]:
        """Number of steps in the block, and the number until `end` where that may be fewer."""
        spot = scope.env[split.axis]
        if self.nest.among_threads(split):
            return Expr.of(split.size or 1), None
        total = end // split.step
        if spot.block is None:
            if split.size is not None:
                return Expr.of(split.size), total
            return total, None
        left = total - spot.base // split.step
        if self._divides(split, spot.block):
            return Expr.of(spot.block // split.step), None
        return Expr.of(spot.block // split.step), left

    def _divides(self, split: Split, block: int) -> bool:
        extent = self.extents[split.axis].const_value
        return extent is not None and extent % block == 0

    def _last(self, split: Split, stmts: Sequence[Stmt], depth: int, scope: Scope) -> None:
        """The innermost loop of an axis: full blocks, then the ragged one."""
        step, extent = split.step, self.extents[split.axis]
        if self.nest.masked:
            hi, cap = self._trips(split, scope, extent + (step - 1))
            self._for(split, hi, cap, stmts, depth, scope,
                      lambda base: self.nest.full(split.axis, base))
            return
        rest = (extent % step).const_value
        if split.kind == GRID and rest != 0:
            self._grid(split, stmts, depth, scope)
            return
        full = extent // step
        hi, cap = self._trips(split, scope, extent)
        if not full.is_const(0):
            self._for(split, hi, cap, stmts, depth, scope,
                      lambda base: self.nest.full(split.axis, base))
        if rest != 0:
            self._tail(split, stmts, depth, scope)

    def _spot(self, split: Split, stmts: Sequence[Stmt]) -> Spot:
        shrink = not any(s.folds == split.axis for s in stmts)
        start = self.extents[split.axis] // split.step * split.step
        return self.nest.ragged(split.axis, start, shrink)

    def _tail(self, split: Split, stmts: Sequence[Stmt], depth: int, scope: Scope) -> None:
        """The ragged block, once, where the current block contains it."""
        spot, ragged = scope.env[split.axis], self._spot(split, stmts)
        conds = []
        if spot.block is not None:
            conds = [ragged.base - spot.base, spot.base + (spot.block - 1) - ragged.base]
        if self.extents[split.axis].const_value is None:
            conds.append(self.extents[split.axis] - ragged.base - 1)
        def last(inner: Scope) -> None:
            self._only(split, stmts, depth, inner.at(split.axis, ragged))

        if conds:
            self._branch(conds, stmts, scope, last)
        else:
            last(scope)

    def _only(self, split: Split, stmts: Sequence[Stmt], depth: int, scope: Scope) -> None:
        """A step that stands alone."""
        self._step(split, stmts, scope, None, lambda inner: self.emit(stmts, depth + 1, inner))

    def _grid(self, split: Split, stmts: Sequence[Stmt], depth: int, scope: Scope) -> None:
        """A parallel loop with the ragged block as one of its steps."""
        axis, step = split.axis, split.step
        full = self.extents[axis] // step
        ragged = self._spot(split, stmts)
        hi, cap = self._trips(split, scope, self.extents[axis] + (step - 1))

        def body(inner: Scope) -> None:
            spot = inner.env[axis]
            cond = full * step - spot.base - 1
            then = lambda s: self.emit(  # noqa: E731
                stmts, depth + 1, s.at(axis, self.nest.full(axis, spot.base)))
            other = lambda s: self.emit(  # noqa: E731
                stmts, depth + 1, s.at(axis, ragged))
            self._branch([cond], stmts, inner, then, other)

        if full.is_const(0):
            self._only(split, stmts, depth, scope.at(axis, ragged))
        else:
            self._for(split, hi, cap, stmts, depth, scope, lambda b: Spot(b, step), body)

    def _branch(self, conds: Sequence[Expr], stmts: Sequence[Stmt], scope: Scope,
                then: Callable[[Scope], None], other: Callable[[Scope], None] | None = None
                ) -> None:
        """`if conds >= 0` around statements whose running folds come out as results."""
        state = self.leaf.state(stmts)
        blocks = []
        for emit in (then, other):
            builder = scope.builder.inner()
            self.leaf.set_state(stmts, state)
            if emit:
                emit(scope.inside(builder))
            if state:
                builder.add(Yield(self.leaf.state(stmts)))
            blocks.append(builder.block())
        types = tuple(v.type for v in state)
        op = If(tuple(conds), blocks[0], blocks[1], types)
        out = scope.builder.add(op, *(v.name for v in state))
        self.leaf.set_state(stmts, out)

    def _for(self, split: Split, hi: Expr, cap: Expr | None, stmts: Sequence[Stmt], depth: int,
             scope: Scope, spot: Callable[[Expr], Spot],
             body: Callable[[Scope], None] | None = None) -> None:
        """One loop; running folds of its statements are carried."""
        start = scope.env[split.axis].base
        def rest(inner: Scope) -> None:
            body(inner) if body else self.emit(stmts, depth + 1, inner)

        if hi.is_const(1) and cap is None:
            self._step(split, stmts, scope.at(split.axis, spot(start)), None, rest)
            return
        if scope.streams and cap is not None and hi.const_value and cap.const_value:
            hi, cap = Expr.of(min(hi.const_value, cap.const_value)), None
        trips = [hi] if cap is None else [hi, cap]

        def around(n: Expr) -> Spot:
            return spot(start + n * split.step)

        rings = self.stage.rings(split, stmts, scope)
        self.stage.prologue(rings, split, scope, trips, around)
        state = self.leaf.state(stmts)
        inner = scope.at(split.axis, around(sym(split.var))).looped(split.var, hi)
        builder = inner.builder
        args = tuple(Value(builder.names(v.name), v.type) for v in state)
        self.leaf.set_state(stmts, args)
        self.leaf.bounds[split.var] = (0, hi - 1)
        self._step(split, stmts, inner, rings, rest, sym(split.var), trips, around)
        if state:
            builder.add(Yield(self.leaf.state(stmts)))
        level = split.level if split.kind == GRID or split.level == "unroll" else ""
        op = For(split.var, hi, builder.block(args), cap, level, state)
        self.leaf.set_state(stmts, scope.builder.add(op, *(v.name for v in state)))
        for role, stream in inner.streams.items():
            if stream.ops:
                scope.streams[role].add(For(split.var, hi, stream.block(), cap, level))
        self.stage.drain(rings, scope)

    def _step(self, split: Split, stmts: Sequence[Stmt], scope: Scope,
              rings: Sequence[Batch] | None, rest: Callable[[Scope], None], step: Expr = ZERO,
              trips: Sequence[Expr] = (), spot: Callable[[Expr], Spot] | None = None) -> None:
        """The body of one loop step (the only one, if `rings` is None): what is placed here, then
        the loops further in."""
        for s in stmts:
            if s.kind in ("place", "fold", "scan"):
                self.leaf.allocate(s, split, scope)
        outer = dict(self.leaf.tiles)
        here = scope.env[split.axis]
        batches = [*(rings or ()), *self.stage.plain(split, stmts, scope, rings is None)]
        tiles = self.stage.enter(batches, split, scope, step, trips,
                                 spot or (lambda n: here))
        rest(scope)
        self.stage.leave(batches, scope, tiles)
        self.leaf.tiles = outer


def varies(stmt: Stmt, split: Split) -> bool:
    """Whether a statement belongs inside a loop."""
    return split.axis in stmt.axes or split in stmt.carried or split in stmt.within


def phases(stmts: Sequence[Stmt], split: Split) -> list[list[Stmt]]:
    """Statements grouped so that no loop over the axis reads a fold that it has not finished."""
    level: dict[int, int] = {}
    for s in stmts:
        mine = 0
        for q in s.needs:
            if id(q) not in level:
                continue
            over = q.folds == split.axis and split not in q.carried
            bump = over or varies(q, split) != varies(s, split)
            mine = max(mine, level[id(q)] + bump)
        level[id(s)] = mine
    count = max(level.values(), default=0) + 1
    return [[s for s in stmts if level[id(s)] == n] for n in range(count)]


def statements(kernel: Func, mapping: tile.Mapping, nest: Nest) -> list[Stmt]:
    """Folds, placed values and stores in order, each with the statements that it reads."""
    made: dict[Value, Stmt] = {}
    reads: dict[Value, list[Stmt]] = {}
    loads: dict[Value, tuple[Op, ...]] = {}
    out: list[Stmt] = []
    for op in kernel.body.ops:
        needs = list({id(s): s for v in op.operands() for s in reads.get(v, [])}.values())
        seen = tuple(dict.fromkeys(x for v in op.operands() for x in loads.get(v, ())))
        seen += (op,) if isinstance(op, loop.Load) else ()
        kind = _kind(op, mapping)
        if kind:
            stmt = Stmt(kind, op, frozenset(op.nest), needs, loads=seen,
                        within=_around(op, mapping, nest))
            out.append(stmt)
            made.update(dict.fromkeys(op.results, stmt))
            needs, seen = [stmt], ()
        for r in op.results:
            reads[r], loads[r] = needs, seen
    for carry in mapping.carries:
        _carry(carry.fold, carry.buffer, out, nest)
    known = {v.name for op in kernel.body.ops for v in op.results}
    known |= {v.name for v in (*kernel.params, *kernel.outs)}
    if missing := mapping.names() - known:
        raise MappingError(f"illegal: the kernel has no value {', '.join(sorted(missing))}")
    return out


def _around(op: Op, mapping: tile.Mapping, nest: Nest) -> frozenset[Split]:
    """The loops from the outermost to the one where a value of `op` is placed."""
    places = [p for r in op.results if (p := mapping.placed(r.name))]
    at = [n for n, s in enumerate(nest.loops) for p in places
          if (s.axis, s.level) == (p.axis, p.level)]
    return frozenset(nest.loops[: max(at, default=-1) + 1])


def _kind(op: Op, mapping: tile.Mapping) -> str:
    if isinstance(op, loop.Fold):
        return "scan" if op.prefix else "fold"
    if isinstance(op, loop.Store):
        return "store"
    return "place" if any(mapping.placed(r.name) for r in op.results) else ""


def _carry(name: str, buffer: str, stmts: list[Stmt], nest: Nest) -> None:
    """Keep the readers of a carried fold inside the outer loops of its reduced axis."""
    fold = next((s for s in stmts if s.kind == "fold" and s.op.results[0].name == name), None)
    if fold is None or len(fold.op.results) != 1:
        raise MappingError(f"illegal: {name} is not a fold of one state")
    readers = [s for s in stmts if fold in s.needs]
    stores = [s.op for s in readers if isinstance(s.op, loop.Store)]
    if len(stores) < len(readers):
        raise MappingError(f"illegal: carry {name}: it is read by more than stores")
    fold.waits = next((op for op in stores if op.buf.name == buffer), None)
    if fold.waits is None:
        raise MappingError(f"illegal: carry {name}: nothing stores it in {buffer}")
    holds, acc = dtype_of(fold.waits.buf.type), dtype_of(fold.op.results[0].type)
    if holds != acc:
        raise MappingError(f"illegal: {buffer} holds {holds}, the state of {name} is {acc}")
    if fold.waits.combine:
        raise MappingError(f"illegal: carry {name}: {buffer} is updated where data say")
    loops = [s for s in nest.splits[fold.folds] if s.kind in LOOPS]
    outer = frozenset(loops[:-1])
    fold.carried = outer
    for s in readers:
        s.carried = s.carried | outer


def unrolled_in(block: Block) -> tuple[tuple[str, int], ...]:
    """Unrolled axes that any op of a block uses, in order of appearance."""
    found: dict[str, int] = {}
    for op in walk(block):
        for value in op.results:
            found.update(getattr(value.type, "unroll", ()))
        found.update(getattr(op, "unroll", ()))
    return tuple(found.items())


