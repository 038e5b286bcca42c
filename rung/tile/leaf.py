"""The innermost part of a nest: values of one block of every axis as families of vectors.

Also owns what outlives a leaf: accumulators of running folds and arrays of placed values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rung.core.errors import LoweringError, MappingError
from rung.core.expr import Expr, sym
from rung.core.machine import Machine
from rung.core.op import Block, Func, Op, Value
from rung.core.ops import Cast, Const, IndexValue, Map
from rung.core.scalar import MONOIDS
from rung.core.text import LANE
from rung.core.types import ArrayType, DType, VecType, axes_of, dtype_of
from rung.kernel.ir import Alloc, Combine, Fill, If, KernelIndex, Load, Store
from rung.loop import ir as loop
from rung.loop.carriers import CARRIERS
from rung.tile.mapping import Mapping, Place
from rung.tile.nest import Nest, Split

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
        self.stores = [op for op in kernel.body.ops if isinstance(op, loop.Store)]
        self.defs = {r: op for op in kernel.body.ops for r in op.results}
        self.running: dict[Op, tuple[Value, ...]] = {}
        self.arrays: dict[Value, Stored] = {}
        self.bounds: dict[str, tuple[int | Expr, int | Expr | None]] = {}
        self.waiting: set[Op] = set()  # folds with a state in arrays that is not final

    # ---- state of running folds, as the walk threads it through loops and branches
    def state(self, stmts: Sequence[Stmt]) -> tuple[Value, ...]:
        return tuple(v for s in stmts for v in self._mine(s))

    def set_state(self, stmts: Sequence[Stmt], values: Sequence[Value]) -> None:
        rest = list(values)
        for s in stmts:
            if mine := self._mine(s):
                self.running[s.op], rest = tuple(rest[: len(mine)]), rest[len(mine):]

    def _mine(self, stmt: Stmt) -> tuple[Value, ...]:
        return self.running.get(stmt.op, ()) if stmt.kind == "fold" else ()

    def start(self, stmt: Stmt, nested: set[str], scope: Scope) -> set[str]:
        """Begin a fold: registers with the identity, or arrays over the `nested` axes.

        Returns the axes of arrays that a nest must still fill with the identity.
        """
        op = stmt.op
        if not nested:
            self.running[op] = self._initial(stmt, scope)
            return set()
        space = self._accumulators()
        for state in op.results:
            self.arrays[state] = self._array(state, axes_of(state.type), space, scope, None)
        self.running[op] = ()
        self.waiting.add(op)
        return {a for state in op.results for a in axes_of(state.type)}

    def _accumulators(self) -> str:
        spaces = [s.name for s in self.machine.spaces if s.bytes <= 1 << 17]
        return "acc" if "acc" in spaces else spaces[0]

    def _initial(self, stmt: Stmt, scope: Scope) -> tuple[Value, ...]:
        op, out = stmt.op, []
        for state, value in zip(op.results, identities(op), strict=True):
            family = self._family(state, stmt.folds, scope)
            fill = scope.builder.one(Fill(value, (family,)), state.name)
            if stmt.carried:
                fill = self._resume(stmt, state, fill, family, scope)
            out.append(fill)
        return tuple(out)

    def _family(self, state: Value, axis: str, scope: Scope) -> VecType:
        """The register family of an accumulator: its free splits and the reduced parallel ones."""
        axes = (*axes_of(state.type), axis)
        spots = [scope.env[a] if a != axis else self.nest.full(a, Expr.of(0)) for a in axes]
        lanes = {s.lanes for s in spots} - {1}
        if sum(s.lanes > 1 for s in spots) > 1:
            raise MappingError(f"illegal: {state.name} varies over two vectorised axes")
        unroll = tuple((u.name, u.count) for s in spots for u in s.units)
        return VecType(dtype_of(state.type), max(lanes, default=1), unroll)

    def _resume(self, stmt: Stmt, state: Value, fill: Value, family: VecType,
                scope: Scope) -> Value:
        """The state that waited in the carry buffer, or the identity in the first outer step."""
        b = scope.builder
        base = scope.env[stmt.folds].base
        if base.is_const(0):
            return fill
        store = self._carry_store(state)
        then, other = b.inner(), b.inner()
        old = self._access(store.subs, store.mask, scope.inside(then))
        lanes, unroll = old.lanes, old.unroll
        kept = then.one(Load(store.buf, old.subs, old.mask, 0, lanes, unroll), state.name)
        from rung.kernel.ir import Yield

        then.add(Yield((kept,)))
        other.add(Yield((fill,)))
        return b.one(If((base - 1,), then.block(), other.block(), (family,)), state.name)

    def _carry_store(self, state: Value) -> loop.Store:
        name = self.mapping.carried(state.name)
        for op in self.stores:
            if op.buf.name == name:
                return op
        raise LoweringError(f"{state.name} is carried in {name}, which is not stored")

    def finish(self, stmt: Stmt, scope: Scope) -> None:
        """End a fold: collapse its parallel accumulators into the value that readers see."""
        op = stmt.op
        self.waiting.discard(op)
        state = self.running.pop(op)
        if state:
            whole = self.nest.full(stmt.folds, Expr.of(0))
            out = self._collapse(op, state, [u.name for u in whole.units], whole.lanes, scope)
            self._settle(op, out, scope)

    def _settle(self, op: Op, values: Sequence[Value], scope: Scope) -> None:
        """Publish the values of a finished fold, in its array too if it is placed."""
        scope.memo.update(zip(op.results, values, strict=True))
        for r, v in zip(op.results, values, strict=True):
            if r in self.arrays:
                self._put(r, v, scope)

    def _collapse(self, op: Op, state: Sequence[Value], units: Sequence[str], lanes: int,
                  scope: Scope) -> tuple[Value, ...]:
        b = scope.builder
        axes = [*units, *([LANE] if lanes > 1 else [])]
        if not axes:
            return tuple(state)

        def over(monoid: str, x: Value) -> Value:
            for axis in axes:
                if axis == LANE or axis in dict(getattr(x.type, "unroll", ())):
                    x = b.one(Combine(monoid, x, axis), x.name)
            return x

        if isinstance(op, loop.Contract):
            return (over(op.combine, state[0]),)
        assert isinstance(op, loop.Fold)
        return op.rule.collapse(b, state, over)

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
            extent = self.nest.extents[axis].const_value if spot.block is None else spot.block
            if extent is None:
                raise MappingError(f"illegal: {value.name} needs an array over {axis}, whose "
                                   f"extent {self.nest.extents[axis]} is symbolic")
            unit = self.nest.unit(axis)
            dims.append((axis, spot.base))
            shape.append(-(-extent // unit) * unit)
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
        for s in stmts:
            match s.kind:
                case "fold":
                    self._fold(s, scope)
                case "init":
                    self._init(s, scope)
                case "place":
                    value = s.op.results[0]
                    self._put(value, self._compute(value, scope), scope)
                case _:
                    assert isinstance(s.op, loop.Store)
                    self._store(s, s.op, scope)

    def _note_bounds(self, scope: Scope) -> None:
        for spot in scope.env.values():
            for unit in spot.units:
                self.bounds[unit.name] = (0, unit.count - 1)
            if spot.lanes > 1:
                self.bounds[LANE] = (0, spot.lanes - 1)

    def _init(self, stmt: Stmt, scope: Scope) -> None:
        for state, number in zip(stmt.op.results, identities(stmt.op), strict=True):
            stored = self.arrays[state]
            access = self._shape_of(self._where(stored, scope), (), scope, axes_of(state.type))
            family = VecType(dtype_of(state.type), access.lanes, access.unroll)
            self._put(state, scope.builder.one(Fill(number, (family,)), state.name), scope)

    def _put(self, value: Value, computed: Value, scope: Scope) -> None:
        stored = self.arrays[value]
        access = self._shape_of(self._where(stored, scope), (), scope, axes_of(value.type))
        scope.builder.add(Store(stored.array, access.subs, computed, (), access.lanes,
                                access.unroll))
        scope.memo[value] = computed

    def _store(self, stmt: Stmt, op: loop.Store, scope: Scope) -> None:
        last = self._last_step(stmt, scope)
        if last is None:
            self._write(op, self.value(op.value, scope), scope)
            return
        fold = next(s.op for s in stmt.needs if s.carried)
        then, other = scope.builder.inner(), scope.builder.inner()
        done, partial = scope.inside(then), scope.inside(other)
        self._write(op, self.value(op.value, done), done)
        self._write(op, self.value(fold.results[0], partial), partial)
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
        access = self._access(op.subs, op.mask, scope)
        scope.builder.add(Store(op.buf, access.subs, value, access.mask, access.lanes,
                                access.unroll))

    def _fold(self, stmt: Stmt, scope: Scope) -> None:
        op = stmt.op
        inputs = self._inputs(stmt, scope)
        if op in self.running and self.running[op]:
            self.running[op] = step(scope, op, self.running[op], inputs)
            return
        spot = scope.env[stmt.folds]
        start = [scope.builder.one(Fill(v, (self._leaf_family(r, stmt.folds, scope),)), r.name)
                 for r, v in zip(op.results, identities(op), strict=True)]
        state = step(scope, op, tuple(start), inputs)
        state = self._collapse(op, state, [u.name for u in spot.units], spot.lanes, scope)
        if op not in self.waiting:
            self._settle(op, state, scope)
            return
        old = [self._get(r, scope) for r in op.results]
        for r, v in zip(op.results, merge(scope, op, old, state), strict=True):
            self._put(r, v, scope)
            del scope.memo[r]

    def _leaf_family(self, state: Value, axis: str, scope: Scope) -> VecType:
        spots = [scope.env[a] for a in (*axes_of(state.type), axis)]
        if sum(s.lanes > 1 for s in spots) > 1:
            raise MappingError(f"illegal: {state.name} varies over two vectorised axes")
        unroll = tuple((u.name, u.count) for s in spots for u in s.units)
        return VecType(dtype_of(state.type), max(s.lanes for s in spots), unroll)

    def _inputs(self, stmt: Stmt, scope: Scope) -> list[Value]:
        """What a fold's step reads; lanes and copies beyond the extent become the identity."""
        op, b = stmt.op, scope.builder
        values = [self.value(v, scope) for v in op.args]  # type: ignore[attr-defined]
        spot = scope.env[stmt.folds]
        if isinstance(op, loop.Contract) and (spot.partial or not _is_fma(op)):
            values = [b.one(Map(op.product, tuple(values)), "p")]
        if not spot.partial:
            return values
        left = self.nest.extents[stmt.folds] - 1 - spot.index
        shape = self._shape_of((left,), (), scope, (stmt.folds,))
        at = b.one(KernelIndex(left, shape.lanes, shape.unroll), "left")
        inside = b.one(Map("ge", (at, b.one(Const(0, dtype_of(at.type))))), "inside")
        neutral = absent(op)
        return [v if n is None else
                b.one(Map("where", (inside, v, b.one(Const(n, dtype_of(v.type))))), v.name)
                for v, n in zip(values, neutral, strict=True)]

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
                a = self._access(op.subs, op.mask, scope)
                return b.one(Load(op.buf, a.subs, a.mask, op.fill, a.lanes, a.unroll), "t")
            case IndexValue():
                a = self._access((op.expr,), (), scope)
                (expr,) = a.subs
                assert isinstance(expr, Expr)
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

        subs: tuple[Expr | Value, ...]
        mask: tuple[Expr, ...]
        lanes: int
        unroll: tuple[tuple[str, int], ...]

    def _access(self, subs: Iterable[Expr | Value], mask: Iterable[Expr], scope: Scope) -> Access:
        subs = tuple(subs)
        axes = loop.free_axes(subs, mask)
        at = {a: scope.env[a].index for a in axes}
        places = [self.value(s, scope) if isinstance(s, Value) else self._tidy(s.subs(at))
                  for s in subs]
        conds = [self._tidy(m.subs(at)) for m in mask]
        conds += [self.nest.extents[a] - 1 - at[a] for a in axes if scope.env[a].partial]
        return self._shape_of(places, conds, scope, axes)

    def _shape_of(self, subs: Iterable[Expr | Value], mask: Iterable[Expr], scope: Scope,
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
            elif not isinstance(op, loop.Fold | loop.Contract):
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
        if isinstance(op, loop.Fold | loop.Contract):
            return v in self.arrays and op not in self.waiting
        return all(self._ready(x, scope) for x in op.operands())


def identities(op: Op) -> tuple[float | int | bool, ...]:
    """What each state of a fold starts from."""
    if isinstance(op, loop.Contract):
        return (MONOIDS[op.combine].identity(op.acc),)
    assert isinstance(op, loop.Fold)
    return op.rule.init(op.acc)


def absent(op: Op) -> tuple[float | int | bool | None, ...]:
    """For each input of a step, the number that leaves the state as it is (None: any)."""
    if isinstance(op, loop.Contract):
        return (MONOIDS[op.combine].identity(op.acc),)
    assert isinstance(op, loop.Fold)
    return (op.rule.init(op.acc)[0], *([0.0] * (op.rule.inputs - 1)))


def _is_fma(op: loop.Contract) -> bool:
    return op.combine == "add" and op.product == "mul" and op.acc.is_float


def step(scope: Scope, op: Op, state: tuple[Value, ...], xs: Sequence[Value]) -> tuple[Value, ...]:
    """The state after one more element (or family of elements)."""
    b = scope.builder
    if isinstance(op, loop.Contract):
        if len(xs) == 2:
            return (b.one(Map("fma", (xs[0], xs[1], state[0])), state[0].name),)
        return (b.one(Map(MONOIDS[op.combine].combine, (state[0], xs[0])), state[0].name),)
    assert isinstance(op, loop.Fold)
    return op.rule.step(b, state, xs)


def merge(scope: Scope, op: Op, left: Sequence[Value], right: Sequence[Value]
          ) -> tuple[Value, ...]:
    """Two states as one."""
    rule = CARRIERS[op.combine] if isinstance(op, loop.Contract) else op.rule  # type: ignore[attr-defined]
    return rule.merge(scope.builder, left, right)


