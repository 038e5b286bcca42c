"""What outlives a leaf: states of folds and scans until they are final, and arrays.

A state that is unfinished is in registers, which loops carry and branches give back, or in arrays
where a loop inside of the fold steps its elements one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rung.core.expr import ZERO, sym
from rung.core.machine import THREAD
from rung.core.op import Op, Value
from rung.core.ops import Yield
from rung.core.text import LANE
from rung.core.types import ArrayType, VecType, axes_of, dtype_of
from rung.kernel.ir import Alloc, Combine, Fill, If, Load, Store
from rung.loop import ir as loop
from rung.tile.mapping import Place, refuse
from rung.tile.nest import Spot
from rung.tile.scope import Scope, Stored
from rung.tile.stmt import Stmt
from rung.tile.tree import Loop, Start
from rung.tile.values import address, follow, place_in, spread


# ---- as the walk threads them through loops and branches
def states(stmts: Sequence[Stmt], scope: Scope) -> tuple[Value, ...]:
    return tuple(v for s in stmts if s.carries for v in scope.running.get(s.op, ()))


def set_states(stmts: Sequence[Stmt], values: Sequence[Value], scope: Scope) -> None:
    rest = list(values)
    for s in stmts:
        if mine := states([s], scope):
            scope.running[s.op], rest = tuple(rest[: len(mine)]), rest[len(mine):]


def begin(start: Start, scope: Scope) -> None:
    """Registers with the identity, or arrays that are still to be filled with it."""
    start.check()
    before = len(scope.builder.ops)
    if start.inside:
        _state_arrays(start.stmt, scope)
        scope.running[start.stmt.op] = ()
    else:
        op = start.stmt.fold
        spot = Spot(ZERO, None) if op.prefix else scope.tree.nest.full(op.axis, ZERO)
        scope.running[op] = initial(op, spot, scope)
    follow(scope, before, start.stmt.op.results)


def finish(stmt: Stmt, scope: Scope) -> None:
    """Collapse the parallel accumulators of a fold into the value that readers see."""
    op, before = stmt.fold, len(scope.builder.ops)
    state = scope.running.pop(op)
    if state and stmt.folds:
        out = collapse(op, state, scope.tree.nest.full(stmt.folds, ZERO), scope)
        if stmt.carried:
            out = (_resumed(stmt, op.results[0], out[0], scope),)
        settle(op, out, scope)
    follow(scope, before, op.results)


# ---- families
def initial(op: loop.Fold, reduced: Spot, scope: Scope) -> tuple[Value, ...]:
    """The identity, in registers for the free splits and the parallel ones of the folded axis."""
    reduced = replace(reduced, units=()) if in_blocks(op, scope) else reduced
    return tuple(scope.builder.one(Fill(number, (_family(r, op.axis, reduced, scope),)), r.name)
                 for r, number in zip(op.results, op.rule.identities(op.acc), strict=True))


def in_blocks(op: loop.Fold, scope: Scope) -> bool:
    """Whether a step takes all copies of the reduced axis, which then have one state."""
    return op.rule.block is not None and scope.tree.nest.machine.threaded


def _family(state: Value, axis: str, reduced: Spot, scope: Scope) -> VecType:
    """The family of a state at a leaf; an instruction sums over the reduced axis by itself."""
    spots = [scope.env[a] for a in axes_of(state.type) if a != axis]
    spots += [] if state.name in scope.tree.atoms else [reduced]
    if sum(s.lanes > 1 for s in spots) > 1:
        refuse(f"{state.name} varies over two vectorised axes")
    unroll = tuple((u.name, u.count) for s in spots for u in s.units)
    return VecType(dtype_of(state.type), max((s.lanes for s in spots), default=1), unroll)


def collapse(op: loop.Fold, state: Sequence[Value], spot: Spot, scope: Scope
             ) -> tuple[Value, ...]:
    """One state of those of all copies, lanes and threads of the reduced axis."""
    b = scope.builder
    if not spot.units and not spot.threads and spot.lanes == 1:
        return tuple(state)

    def over(monoid: str, x: Value) -> Value:
        x = over_copies(monoid, x, spot, scope)
        axes = [LANE] if spot.lanes > 1 and op.results[0].name not in scope.tree.atoms else []
        for axis in (*axes, *(u.name for u in spot.threads if u.count > 1)):
            x = b.one(Combine(monoid, x, axis), x.name)
        return x

    return op.rule.collapse(b.one, state, over)


def over_copies(monoid: str, x: Value, spot: Spot, scope: Scope) -> Value:
    """One value of those of all copies of an axis."""
    t = x.type
    assert isinstance(t, VecType)
    for axis in [u.name for u in spot.units if u.name in dict(t.unroll)]:
        x = scope.builder.one(Combine(monoid, x, axis), x.name)
    return x


# ---- final values
def settle(op: Op, values: Sequence[Value], scope: Scope) -> None:
    """Publish the values of a finished fold, in its array too if it is placed."""
    scope.memo.update(zip(op.results, values, strict=True))
    for r, v in zip(op.results, values, strict=True):
        if r in scope.arrays:
            put(r, v, scope)


def _resumed(stmt: Stmt, state: Value, made: Value, scope: Scope) -> Value:
    """What this outer step made, added to what waited in the carry buffer before it."""
    b, base, store = scope.builder, scope.env[stmt.folds].base, stmt.waits
    if base.is_const(0):
        return made
    assert store is not None
    then, other = b.inner(), b.inner()
    a = address(store.subs, store.mask, scope.inside(then))
    old = then.one(Load(store.buf, a.subs, a.mask, 0, a.lanes, a.unroll), "t")
    both = stmt.fold.rule.merge(then.one, (made,), (old,))
    then.add(Yield(both))
    other.add(Yield((made,)))
    return b.one(If((base - 1,), then.block(), other.block(), types=(made.type,)), state.name)


# ---- arrays
def allocate(node: Loop, scope: Scope) -> None:
    """The arrays that one step of a loop has."""
    for value, place in node.arrays:
        scope.arrays[value] = _array(value, axes_of(value.type), place.space, scope, place)


def _state_arrays(stmt: Stmt, scope: Scope) -> None:
    """Arrays for the states of a fold, where no place gives them one."""
    machine, nest = scope.tree.nest.machine, scope.tree.nest
    space = "acc" if machine.space("acc") else machine.spaces[0].name
    for state in stmt.op.results:
        if scope.tree.mapping.placed(state.name) is None:
            wide_last = sorted(axes_of(state.type), key=lambda a: nest.full(a, ZERO).lanes)
            scope.arrays[state] = _array(state, wide_last, space, scope, None)


def _array(value: Value, axes: Sequence[str], space: str, scope: Scope, place: Place | None
           ) -> Stored:
    dims, sizes, nest = [], [], scope.tree.nest
    for axis in axes:
        spot = scope.env[axis]
        extent = nest.padded(axis) if spot.block is None else spot.block
        if extent is None:
            refuse(f"{value.name} needs an array over {axis}, whose extent {nest.extents[axis]} "
                   f"is symbolic")
        dims.append((axis, spot.base))
        sizes.append(extent)
    panel = place.panel if place else None
    shape = panel.shape(dict(zip(axes, sizes, strict=True))) if panel else tuple(sizes)
    if place and place.pad and not panel:
        shape = (*shape[:-1], shape[-1] + place.pad)
    kind = ArrayType(space, dtype_of(value.type), shape)
    return Stored(scope.builder.one(Alloc((kind,)), value.name), tuple(dims), panel)


def put(value: Value, computed: Value, scope: Scope) -> None:
    """Write what this leaf has of a value to its array."""
    stored, axes = scope.arrays[value], axes_of(value.type)
    mask = [-sym(s.var) for s in scope.tree.nest.repeats(axes) if s.kind == THREAD]
    a = spread(place_in(stored, scope), mask, scope, axes)
    scope.builder.add(Store(stored.array, a.subs, computed, a.mask, a.lanes, a.unroll))
    scope.memo[value] = computed


def fill(stmt: Stmt, scope: Scope) -> None:
    """The identity, in the arrays of a fold's states."""
    op = stmt.fold
    for state, number in zip(op.results, op.rule.identities(op.acc), strict=True):
        a = spread(place_in(scope.arrays[state], scope), (), scope, axes_of(state.type))
        family = VecType(dtype_of(state.type), a.lanes, a.unroll)
        put(state, scope.builder.one(Fill(number, (family,)), state.name), scope)
