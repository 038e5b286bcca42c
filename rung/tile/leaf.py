"""The innermost part of a nest: values of one block of every axis as families of vectors.

Also owns what outlives a leaf: accumulators of running folds and arrays of placed values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rung.core.errors import LoweringError, MappingError
from rung.core.expr import ZERO, Expr, sym
from rung.core.machine import GRID, THREAD, Machine
from rung.core.op import Func, Op, Value
from rung.core.ops import Cast, Const, IndexValue, Map, Sub, Yield
from rung.core.scalar import MONOIDS
from rung.core.text import LANE
from rung.core.types import ArrayType, VecType, axes_of, dtype_of
from rung.kernel.ir import INTRINSICS, Alloc, Apply, Combine, Fill, If, KernelIndex, Load, Store
from rung.loop import ir as loop
from rung.tile.mapping import Mapping, Place
from rung.tile.nest import Nest, Split, Spot
from rung.tile.stage import Tile, placed_buffer

if TYPE_CHECKING:
    from rung.tile.to_kernel import Scope, Stmt

CHEAP = {"add", "sub", "mul", "neg", "max", "min", "relu", "where"}


@dataclass(frozen=True)
class Stored:
    """A value kept in an array: for each dimension its axis and where the array starts on it."""

    array: Value
    dims: tuple[tuple[str, Expr], ...]
    panel: tuple[str, int] | None = None


class Leaf:
    """Emits statements at leaves; `running` holds the register state of unfinished folds."""

    def __init__(self, kernel: Func, mapping: Mapping, machine: Machine, nest: Nest):
        self.mapping, self.machine, self.nest = mapping, machine, nest
        self.ops = kernel.body.ops
        self.defs = {r: op for op in kernel.body.ops for r in op.results}
        self.running: dict[Op, tuple[Value, ...]] = {}
        self.arrays: dict[Value, Stored] = {}
        self.bounds: dict[str, tuple[int | Expr, int | Expr | None]] = {}
        self.waiting: set[Op] = set()  # folds with a state in arrays that is not final
        self.tiles: dict[Op, Tile] = {}  # of placed buffers, at this step
        self.atoms = {u.contraction: u.atom for u in mapping.uses
                      if u.atom in INTRINSICS and INTRINSICS[u.atom].depth > 1}

    # ---- state of running folds, as the walk threads it through loops and branches
    def state(self, stmts: Sequence[Stmt]) -> tuple[Value, ...]:
        return tuple(v for s in stmts for v in self._mine(s))

    def set_state(self, stmts: Sequence[Stmt], values: Sequence[Value]) -> None:
        rest = list(values)
        for s in stmts:
            if mine := self._mine(s):
                self.running[s.op], rest = tuple(rest[: len(mine)]), rest[len(mine):]

    def _mine(self, stmt: Stmt) -> tuple[Value, ...]:
        return self.running.get(stmt.op, ()) if stmt.carries else ()

    def start(self, stmt: Stmt, nested: set[str], scope: Scope) -> set[str]:
        """Begin a fold: registers with the identity, or arrays over the `nested` axes.

        Returns the axes of arrays that a nest must still fill with the identity.
        """
        op = stmt.op
        if not nested:
            self.running[op] = self._initial(stmt, scope)
            return set()
        in_array(stmt, nested)
        space = self._accumulators()
        for state in op.results:
            if self.mapping.placed(state.name) is None:
                axes = sorted(axes_of(state.type), key=self._lanes)  # those of vectors last
                self.arrays[state] = self._array(state, axes, space, scope, None)
        self.running[op] = ()
        self.waiting.add(op)
        return {a for state in op.results for a in axes_of(state.type)}

    def _lanes(self, axis: str) -> int:
        return self.nest.full(axis, ZERO).lanes

    def _accumulators(self) -> str:
        return "acc" if self.machine.space("acc") else self.machine.spaces[0].name

    def _initial(self, stmt: Stmt, scope: Scope) -> tuple[Value, ...]:
        op, out = stmt.fold, []
        for state, value in zip(op.results, op.rule.identities(op.acc), strict=True):
            family = self._family(state, stmt.carries, scope)
            out.append(scope.builder.one(Fill(value, (family,)), state.name))
        return tuple(out)

    def _family(self, state: Value, axis: str, scope: Scope) -> VecType:
        """The register family of an accumulator: its free splits and the reduced parallel ones."""
        return self._over(state, axis, scope, self.nest.full(axis, Expr.of(0)))

    def _over(self, state: Value, axis: str, scope: Scope, reduced: Spot) -> VecType:
        """The family of a state at a leaf; an instruction sums over the reduced axis by itself."""
        spots = [scope.env[a] for a in axes_of(state.type)]
        spots += [] if state.name in self.atoms else [reduced]
        if sum(s.lanes > 1 for s in spots) > 1:
            raise MappingError(f"illegal: {state.name} varies over two vectorised axes")
        unroll = tuple((u.name, u.count) for s in spots for u in s.units)
        return VecType(dtype_of(state.type), max((s.lanes for s in spots), default=1), unroll)

    def _resumed(self, stmt: Stmt, state: Value, made: Value, scope: Scope) -> Value:
        """What this outer step made, added to what waited in the carry buffer before it."""
        b, base = scope.builder, scope.env[stmt.folds].base
        if base.is_const(0):
            return made
        store = stmt.waits
        assert store is not None
        then, other = b.inner(), b.inner()
        a = self._access(store.subs, store.mask, scope.inside(then))
        old = then.one(Load(store.buf, a.subs, a.mask, 0, a.lanes, a.unroll), "t")
        both = stmt.fold.rule.merge(then.one, (made,), (old,))
        then.add(Yield(both))
        other.add(Yield((made,)))
        return b.one(If((base - 1,), then.block(), other.block(), types=(made.type,)), state.name)

    def finish(self, stmt: Stmt, scope: Scope) -> None:
        """End a fold: collapse its parallel accumulators into the value that readers see."""
        op = stmt.fold
        self.waiting.discard(op)
        state = self.running.pop(op)
        if state and stmt.folds:
            out = self._collapse(op, state, self.nest.full(stmt.folds, Expr.of(0)), scope)
            if stmt.carried:
                out = (self._resumed(stmt, op.results[0], out[0], scope),)
            self._settle(op, out, scope)

    def _settle(self, op: Op, values: Sequence[Value], scope: Scope) -> None:
        """Publish the values of a finished fold, in its array too if it is placed."""
        scope.memo.update(zip(op.results, values, strict=True))
        for r, v in zip(op.results, values, strict=True):
            if r in self.arrays:
                self._put(r, v, scope)

    def _collapse(self, op: loop.Fold, state: Sequence[Value], spot: Spot, scope: Scope
                  ) -> tuple[Value, ...]:
        """One state of those of all copies, lanes and threads of the reduced axis."""
        b = scope.builder
        if not spot.units and not spot.threads and spot.lanes == 1:
            return tuple(state)

        def over(monoid: str, x: Value) -> Value:
            t = x.type
            assert isinstance(t, VecType)
            axes = [u.name for u in spot.units if u.name in dict(t.unroll)]
            axes += [LANE] if spot.lanes > 1 and op.results[0].name not in self.atoms else []
            for axis in (*axes, *(u.name for u in spot.threads if u.count > 1)):
                x = b.one(Combine(monoid, x, axis), x.name)
            return x

        return op.rule.collapse(b.one, state, over)

    # ---- arrays of placed values
    def allocate(self, stmt: Stmt, split: Split, scope: Scope) -> None:
        """The array of a placed value, if this loop is where its mapping puts it."""
        for value in stmt.op.results:
            place = self.mapping.placed(value.name)
            if place and (place.axis, place.level) == (split.axis, split.level):
                axes = axes_of(value.type)
                self.arrays[value] = self._array(value, axes, place.space, scope, place)

    def _array(self, value: Value, axes: Sequence[str], space: str, scope: Scope,
               place: Place | None) -> Stored:
        dims, shape = [], []
        for axis in axes:
            spot = scope.env[axis]
            extent = self.nest.padded(axis) if spot.block is None else spot.block
            if extent is None:
                raise MappingError(f"illegal: {value.name} needs an array over {axis}, whose "
                                   f"extent {self.nest.extents[axis]} is symbolic")
            dims.append((axis, spot.base))
            shape.append(extent)
        panel = place.panel if place else None
        if panel:
            at = list(axes).index(panel[0])
            blocks = -(-shape[at] // panel[1])
            shape = [blocks, *(s for n, s in enumerate(shape) if n != at), panel[1]]
        elif place and place.pad:
            shape[-1] += place.pad
        kind = ArrayType(space, dtype_of(value.type), tuple(shape))
        array = scope.builder.one(Alloc((kind,)), value.name)
        return Stored(array, tuple(dims), panel)

    def _where(self, stored: Stored, scope: Scope) -> tuple[Expr, ...]:
        local = {a: scope.env[a].index - base for a, base in stored.dims}
        if stored.panel is None:
            return tuple(local.values())
        axis, size = stored.panel
        inner = [e for a, e in local.items() if a != axis]
        return tuple(self._tidy(e) for e in (local[axis] // size, *inner, local[axis] % size))

    def _tidy(self, expr: Expr) -> Expr:
        text = str(expr)
        return expr.simplify(self.bounds) if "//" in text or "%" in text else expr

    # ---- statements
    def emit(self, stmts: Sequence[Stmt], scope: Scope) -> None:
        """All statements of one leaf, in order."""
        self._note_bounds(scope)
        for n, s in enumerate(stmts):
            match s.kind:
                case "fold":
                    self._fold(s, scope)
                case "scan":
                    self._scan(s, scope)
                case "init":
                    self._init(s, scope)
                case "place":
                    value = s.op.results[0]
                    self._put(value, self._compute(value, scope), scope)
                case _:
                    assert isinstance(s.op, loop.Store)
                    self._read_before(s.op, stmts[n + 1:], scope)
                    self._store(s, s.op, scope)

    def _read_before(self, store: loop.Store, later: Sequence[Stmt], scope: Scope) -> None:
        """Load what later statements read of elements that a store overwrites."""
        old = loop.overwritten(self.ops, store)
        for load in (x for s in later if old for x in s.loads if x in old):
            self.value(load.result, scope)

    def _note_bounds(self, scope: Scope) -> None:
        for spot in scope.env.values():
            for unit in spot.units:
                self.bounds[unit.name] = (0, unit.count - 1)
            if spot.lanes > 1:
                self.bounds[LANE] = (0, spot.lanes - 1)

    def _init(self, stmt: Stmt, scope: Scope) -> None:
        op = stmt.fold
        for state, number in zip(op.results, op.rule.identities(op.acc), strict=True):
            stored = self.arrays[state]
            access = self._shape_of(self._where(stored, scope), (), scope, axes_of(state.type))
            family = VecType(dtype_of(state.type), access.lanes, access.unroll)
            self._put(state, scope.builder.one(Fill(number, (family,)), state.name), scope)

    def _put(self, value: Value, computed: Value, scope: Scope) -> None:
        stored, axes = self.arrays[value], axes_of(value.type)
        once = self._once(axes, (THREAD,))
        access = self._shape_of(self._where(stored, scope), once, scope, axes)
        scope.builder.add(Store(stored.array, access.subs, computed, access.mask, access.lanes,
                                access.unroll))
        scope.memo[value] = computed

    def _once(self, axes: Sequence[str], kinds: Sequence[str]) -> list[Expr]:
        """Masks that leave one of the threads (and blocks) that all have the same value."""
        return [-sym(s.var) for s in self.nest.launch if s.kind in kinds and s.axis not in axes]

    def _store(self, stmt: Stmt, op: loop.Store, scope: Scope) -> None:
        last, fold = self._last_step(stmt, scope), next((s for s in stmt.needs if s.carried), stmt)
        # A state that is stored as it is gets the same store in every step.
        if last is None or (op is fold.waits and op.value is fold.op.results[0]):
            self._write(op, self.value(op.value, scope), scope)
            return
        then, other = scope.builder.inner(), scope.builder.inner()
        done, partial = scope.inside(then), scope.inside(other)
        self._write(op, self.value(op.value, done), done)
        if op is fold.waits:
            self._write(op, self.value(fold.op.results[0], partial), partial)
        scope.builder.add(If((last,), then.block(), other.block()))

    def _last_step(self, stmt: Stmt, scope: Scope) -> Expr | None:
        """For a store of a carried fold: >= 0 in the last outer step; None when all are last."""
        for axis in {s.axis for s in stmt.carried}:
            spot = scope.env[axis]
            done = spot.base + (spot.block or 0) - self.nest.extents[axis]
            if done.const_value is None or done.const_value < 0:
                return done
        return None

    def _write(self, op: loop.Store, value: Value, scope: Scope) -> None:
        once = self._once(op.nest, (GRID, THREAD))
        a = self._access(op.subs, op.mask, scope, self.tiles.get(op), once)
        buf = self.tiles[op].array if op in self.tiles else op.buf
        if op.combine in MONOIDS:
            b = scope.builder
            old = b.one(Load(buf, a.subs, a.mask, 0, a.lanes, a.unroll), "t")
            value = b.one(Map(MONOIDS[op.combine].combine, (old, value)), "sum")
        scope.builder.add(Store(buf, a.subs, value, a.mask, a.lanes, a.unroll))

    def _fold(self, stmt: Stmt, scope: Scope) -> None:
        op = stmt.fold
        inputs = self._inputs(stmt, scope)
        spot = scope.env[stmt.folds]
        if self.running.get(op):
            self.running[op] = self._step(op, self.running[op], inputs, spot, scope)
            return
        stored = op in self.waiting
        if op.results[0].name in self.atoms and stored:  # goes on from the array's state
            old = tuple(self._get(r, scope) for r in op.results)
            self._keep(op, self._step(op, old, inputs, spot, scope), scope)
            return
        start = [scope.builder.one(Fill(v, (self._over(r, stmt.folds, scope, spot),)), r.name)
                 for r, v in zip(op.results, op.rule.identities(op.acc), strict=True)]
        state = self._step(op, tuple(start), inputs, spot, scope)
        state = self._collapse(op, state, spot, scope)
        if not stored:
            self._settle(op, state, scope)
            return
        old = tuple(self._get(r, scope) for r in op.results)
        self._keep(op, op.rule.merge(scope.builder.one, old, state), scope)

    def _scan(self, stmt: Stmt, scope: Scope) -> None:
        """One step: the new state is the value at this position too."""
        op = stmt.fold
        inputs = [self.value(v, scope) for v in op.args]
        self.running[op] = op.step(scope.builder.one, self.running[op], inputs)
        self._settle(op, self.running[op], scope)

    def _keep(self, op: Op, state: Sequence[Value], scope: Scope) -> None:
        """Write an unfinished state back to its arrays."""
        for r, v in zip(op.results, state, strict=True):
            self._put(r, v, scope)
            del scope.memo[r]

    def _step(self, op: loop.Fold, state: tuple[Value, ...], xs: Sequence[Value], spot: Spot,
              scope: Scope) -> tuple[Value, ...]:
        atom = self.atoms.get(op.results[0].name)
        if atom is None:
            return op.step(scope.builder.one, state, xs)
        (unit,) = spot.units
        return (scope.builder.one(Apply(atom, state[0], xs[0], xs[1], unit.name), state[0].name),)

    def _inputs(self, stmt: Stmt, scope: Scope) -> list[Value]:
        """What a fold's step reads; lanes and copies beyond the extent become the identity."""
        op, b, axis = stmt.fold, scope.builder, stmt.folds
        values = [self.value(v, scope) for v in op.args]
        partial = scope.env[axis].partial
        if op.fuses:
            return [self._inside(v, 0.0, axis, scope) if partial and not self.zero(x, axis)
                    else v for v, x in zip(values, op.args, strict=True)]
        if op.product:
            values = [b.one(Map(op.product, tuple(values)), "p")]
        if not partial:
            return values
        return [self._inside(v, n, axis, scope)
                for v, n in zip(values, op.rule.absent(op.acc), strict=True)]

    def _inside(self, v: Value, neutral: float | int | bool, axis: str, scope: Scope) -> Value:
        """`v` up to the end of the axis, `neutral` beyond."""
        b = scope.builder
        left = self.nest.extents[axis] - 1 - scope.env[axis].index
        shape = self._shape_of((left,), (), scope, (axis,))
        at = b.one(KernelIndex(left, shape.lanes, shape.unroll), "left")
        inside = b.one(Map("ge", (at, b.one(Const(0, dtype_of(at.type))))), "inside")
        return b.one(Map("where", (inside, v, b.one(Const(neutral, dtype_of(v.type))))), v.name)

    def zero(self, v: Value, axis: str) -> bool:
        """Whether `v` is 0 beyond the extent of an axis: masked loads are, and what keeps 0."""
        op = self.defs.get(v)
        if v in self.arrays and not self.nest.masked:
            return False  # a copy that no element needs is not computed
        match op:
            case loop.Load():
                return op.fill == 0 and axis in loop.free_axes(op.subs, op.mask)
            case Map() if op.fn in ("add", "sub", "mul", "neg", "relu", "max", "min", "abs"):
                return all(self.zero(x, axis) for x in op.args)
            case Cast():
                return self.zero(op.x, axis)
            case _:
                return False

    # ---- values
    def value(self, v: Value, scope: Scope) -> Value:
        """The register family of `v` at this leaf, computed once."""
        if v not in scope.memo:
            if v in self.arrays:
                scope.memo[v] = self._get(v, scope)
            else:
                scope.memo[v] = self._compute(v, scope)
        return scope.memo[v]

    def _get(self, v: Value, scope: Scope) -> Value:
        stored = self.arrays[v]
        a = self._shape_of(self._where(stored, scope), (), scope, axes_of(v.type))
        return scope.builder.one(Load(stored.array, a.subs, (), 0, a.lanes, a.unroll), "t")

    def _compute(self, v: Value, scope: Scope) -> Value:
        op, b = self.defs[v], scope.builder
        match op:
            case loop.Load():
                made = self.tiles.get(op)
                a = self._access(op.subs, op.mask, scope, made)
                buf = made.array if made else op.buf
                return b.one(Load(buf, a.subs, a.mask, op.fill, a.lanes, a.unroll), "t")
            case IndexValue():
                axes = loop.free_axes((op.expr,))
                expr = self._tidy(op.expr.subs({x: scope.env[x].index for x in axes}))
                a = self._shape_of((expr,), (), scope, axes)
                return b.one(KernelIndex(expr, a.lanes, a.unroll), v.name)
            case Const():
                return b.one(Const(op.value, op.dtype), "c")
            case Map() | Cast():
                args = {x: self.value(x, scope) for x in op.operands()}
                return b.one(op.map(args), v.name)
            case _:
                raise LoweringError(f"{v.name} is read before its fold is finished")

    @dataclass(frozen=True)
    class Access:
        """Subscripts and mask at a leaf, with the lanes and unrolled axes that they run over."""

        subs: tuple[Sub, ...]
        mask: tuple[Expr, ...]
        lanes: int
        unroll: tuple[tuple[str, int], ...]

    def _access(self, subs: Iterable[Sub], mask: Iterable[Expr], scope: Scope,
                made: Tile | None = None, once: Iterable[Expr] = ()) -> Access:
        """Subscripts at this leaf, of the buffer or of its tile, with the masks that they need."""
        subs = tuple(subs)
        axes = loop.free_axes(subs, mask)
        at = {a: scope.env[a].index for a in axes}
        places: list[Sub] = [s if isinstance(s, Value) else s.subs(at) for s in subs]
        if made is not None:
            places = made.local(places)
        places = [self.value(s, scope) if isinstance(s, Value) else self._tidy(s) for s in places]
        conds = [*once, *(self._tidy(m.subs(at)) for m in mask)]
        kept = [a for a in axes if scope.env[a].partial and not (made and a in made.form.exact)]
        conds += [self.nest.extents[a] - 1 - at[a] for a in kept]
        return self._shape_of(places, conds, scope, axes)

    def _shape_of(self, subs: Iterable[Sub], mask: Iterable[Expr], scope: Scope,
                  axes: Iterable[str]) -> Access:
        subs, mask = tuple(subs), tuple(mask)
        used = {s for e in (*subs, *mask) if isinstance(e, Expr) for s in e.symbols()}
        spots = [scope.env[a] for a in axes]
        unroll = tuple((u.name, u.count) for s in spots for u in s.units if u.name in used)
        wide = [s.lanes for s in spots if s.lanes > 1]
        if len(wide) > 1:
            raise MappingError(f"illegal: one access over two vectorised axes: "
                               f"{', '.join(map(str, subs))}")
        return self.Access(subs, mask, wide[0] if wide and LANE in used else 1, unroll)

    def hoist(self, stmts: Sequence[Stmt], axis: str, open_axes: set[str], scope: Scope) -> None:
        """Compute, before a loop, what its statements read but does not vary inside it."""
        seen: set[Value] = set()
        todo = [v for s in stmts for v in s.op.operands() if s.kind != "init"]
        while todo:
            v = todo.pop()
            op = self.defs.get(v)
            if v in seen or op is None or v in scope.memo or v in self.arrays:
                continue
            seen.add(v)
            if self._movable(v, op, open_axes, scope):
                self._note_bounds(scope)
                self.value(v, scope)
            elif not isinstance(op, loop.Fold):
                todo += op.operands()

    def _movable(self, v: Value, op: Op, open_axes: set[str], scope: Scope) -> bool:
        costly = isinstance(op, Map) and op.fn not in CHEAP
        if not costly or open_axes & set(axes_of(v.type)):
            return False
        return self._ready(v, scope)

    def _ready(self, v: Value, scope: Scope) -> bool:
        """Whether everything that `v` reads is finished here."""
        if v in scope.memo:
            return True
        op = self.defs.get(v)
        if op is None:
            return True
        if placed_buffer(op, self.mapping) and op not in self.tiles:
            return False
        if isinstance(op, loop.Fold):
            return v in self.arrays and op not in self.waiting
        return all(self._ready(x, scope) for x in op.operands())


def in_array(stmt: Stmt, nested: Iterable[str]) -> None:
    """Raise MappingError for a fold whose state cannot be in arrays over the `nested` axes."""
    for axis in sorted(nested):
        if stmt.carried:
            raise MappingError(f"illegal: {stmt.op.results[0].name} is carried, and has a loop "
                               f"over {axis} inside of its own")
        for state in stmt.op.results:
            if axis not in axes_of(state.type):
                raise MappingError(f"illegal: {state.name} does not vary over {axis}, whose loop "
                                   f"inside the fold would step it again")
