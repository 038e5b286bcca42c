"""The innermost part of a nest: the statements at one block of every axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rung.core.expr import ZERO, Expr, sym
from rung.core.machine import THREAD
from rung.core.op import Op, Value
from rung.core.ops import Map
from rung.core.scalar import MONOIDS
from rung.core.types import VecType
from rung.kernel.ir import Apply, Combine, If, Load, Prefix, Store
from rung.loop import ir as loop
from rung.loop.carriers import Make
from rung.tile.nest import Spot
from rung.tile.scope import Scope
from rung.tile.states import collapse, fill, in_blocks, initial, over_copies, put, settle
from rung.tile.stmt import Stmt
from rung.tile.values import address, compute, follow, is_zero, kept, note_bounds, value, within


def emit(stmts: Sequence[Stmt], scope: Scope) -> None:
    """All statements of one leaf, in order."""
    note_bounds(scope)
    for n, s in enumerate(stmts):
        before = len(scope.builder.ops)
        match s.kind:
            case "fold":
                _fold(s, scope)
            case "scan":
                _scan(s, scope)
            case "init":
                fill(s, scope)
            case "place":
                put(s.op.result, compute(s.op.result, scope), scope)
            case _:
                assert isinstance(s.op, loop.Store)
                _read_before(s.op, stmts[n + 1:], scope)
                _store(s, s.op, scope)
        follow(scope, before, s.op.results or s.op.operands())


# ---- stores
def _read_before(store: loop.Store, later: Sequence[Stmt], scope: Scope) -> None:
    """Load what later statements read of elements that a store overwrites."""
    old = loop.overwritten(scope.tree.kernel.body.ops, store)
    for load in (x for s in later if old for x in s.loads if x in old):
        value(load.result, scope)


def _store(stmt: Stmt, op: loop.Store, scope: Scope) -> None:
    last, fold = _last_step(stmt, scope), next((s for s in stmt.needs if s.carried), stmt)
    # A state that is stored as it is gets the same store in every step.
    if last is None or (op is fold.waits and op.value is fold.op.results[0]):
        _write(op, value(op.value, scope), scope)
        return
    then, other = scope.builder.inner(), scope.builder.inner()
    done, partial = scope.inside(then), scope.inside(other)
    _write(op, value(op.value, done), done)
    if op is fold.waits:
        _write(op, value(fold.op.results[0], partial), partial)
    scope.builder.add(If((last,), then.block(), other.block()))


def _last_step(stmt: Stmt, scope: Scope) -> Expr | None:
    """For a store of a carried fold: >= 0 in the last outer step; None when all are last."""
    for axis in {s.axis for s in stmt.carried}:
        spot = scope.env[axis]
        done = spot.base + (spot.block or 0) - scope.tree.nest.extents[axis]
        if done.const_value is None or done.const_value < 0:
            return done
    return None


def _write(op: loop.Store, stored: Value, scope: Scope) -> None:
    made, b = scope.tiles.get(op), scope.builder
    once = [-sym(s.var) for s in scope.tree.nest.repeats(op.nest) if s.kind == THREAD
            or scope.streams]  # else the others skip it
    a = address(op.subs, op.mask, scope, made, once)
    buf = made.array if made else op.buf
    if any(map(scope.tree.nest.beside, op.clashing)):
        b.add(Store(buf, a.subs, stored, a.mask, a.lanes, a.unroll, op.combine))
        return
    if op.combine in MONOIDS:
        old = b.one(Load(buf, a.subs, a.mask, 0, a.lanes, a.unroll), "t")
        stored = b.one(Map(MONOIDS[op.combine].combine, (old, stored)), "sum")
    b.add(Store(buf, a.subs, stored, a.mask, a.lanes, a.unroll))


# ---- steps of folds and scans
def _fold(stmt: Stmt, scope: Scope) -> None:
    op, spot = stmt.fold, scope.env[stmt.folds]
    inputs = _inputs(stmt, scope)
    if scope.running.get(op):
        scope.running[op] = _step(op, scope.running[op], inputs, spot, scope)
        return
    stored = scope.waits(op)
    if op.results[0].name in scope.tree.atoms and stored:  # goes on from the array's state
        old = tuple(kept(r, scope) for r in op.results)
        _keep(op, _step(op, old, inputs, spot, scope), scope)
        return
    state = _step(op, initial(op, spot, scope), inputs, spot, scope)
    state = collapse(op, state, spot, scope)
    if not stored:
        settle(op, state, scope)
        return
    old = tuple(kept(r, scope) for r in op.results)
    _keep(op, op.rule.merge(scope.builder.one, old, state), scope)


def _scan(stmt: Stmt, scope: Scope) -> None:
    """One step: the new state is the value at this position too; beside each other, the copies and
    threads of one step have the parts from innermost to outermost, each with all before it."""
    op, b, spot = stmt.fold, scope.builder, scope.env[stmt.carries]
    (x,) = [value(v, scope) for v in op.args]
    state = scope.running.get(op) or initial(op, Spot(ZERO, None), scope)
    units = [u for u in (*spot.units, *spot.threads) if u.count > 1]
    family = x.type
    assert isinstance(family, VecType)
    if any((u.name, u.count) not in family.unroll for u in spot.units):  # the same in all copies
        x, = op.step(b.one, initial(op, spot, scope), (x,))
    found, total, looped = x, x, op in scope.running
    for n, unit in enumerate(sorted(units, key=lambda u: u.step), 1):
        before = b.one(Prefix(op.carrier, total, unit.name, n > 1), op.result.name)
        found = op.step(b.one, (before,), (found,))[0] if n > 1 else before
        if looped or n < len(units) or unit not in spot.threads:  # else all threads would wait
            total = b.one(Combine(op.carrier, total, unit.name), "total")
    last = op.step(b.one, state, (total,))
    if looped:
        scope.running[op] = last
    settle(op, op.step(b.one, state, (found,)) if units else last, scope)


def _keep(op: Op, state: Sequence[Value], scope: Scope) -> None:
    """Write an unfinished state back to its arrays."""
    for r, v in zip(op.results, state, strict=True):
        put(r, v, scope)
        del scope.memo[r]


def _step(op: loop.Fold, state: tuple[Value, ...], xs: Sequence[Value], spot: Spot, scope: Scope
          ) -> tuple[Value, ...]:
    found = scope.tree.atoms.get(op.results[0].name)
    if found is None and op.rule.block and in_blocks(op, scope):
        return op.rule.block(_weighing(scope), state, xs,
                             lambda monoid, x: over_copies(monoid, x, spot, scope))
    if found is None:
        return op.step(_weighing(scope), state, xs)
    (unit,), name = spot.units, found.atom.name
    return (scope.builder.one(Apply(name, state[0], xs[0], xs[1], unit.name), state[0].name),)


def _weighing(scope: Scope) -> Make:
    """The builder's way to append an op; each exp in a step is the weight of a term of a sum, and
    1 is one of the weights."""
    one = scope.builder.one
    if "exp_approx" not in scope.tree.nest.machine.rates.forms:
        return one
    return lambda op, hint: one(replace(op, fn="exp_approx") if isinstance(op, Map)
                                and op.fn == "exp" else op, hint)


def _inputs(stmt: Stmt, scope: Scope) -> list[Value]:
    """What a fold's step reads; lanes and copies beyond the extent become the identity."""
    op, b, axis = stmt.fold, scope.builder, stmt.folds
    found = scope.tree.atoms.get(op.results[0].name)
    args = found.args if found else op.args
    values = [value(v, scope) for v in args]
    partial = scope.env[axis].partial
    if op.is_fma or found:
        zero = op.rule.absent(op.acc)[0]
        return [within(v, zero, axis, scope) if partial and not is_zero(x, axis, scope) else v
                for v, x in zip(values, args, strict=True)]
    if op.product:
        values = [b.one(Map(op.product, tuple(values)), "p")]
    if not partial:
        return values
    return [within(v, n, axis, scope)
            for v, n in zip(values, op.rule.absent(op.acc), strict=True)]
