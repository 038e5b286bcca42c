"""Values at a leaf: for one block of every axis, the family of vectors that holds a value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rung.core import origins
from rung.core.errors import LoweringError
from rung.core.expr import Expr
from rung.core.op import Block, Op, Value, walk
from rung.core.ops import Cast, Const, IndexValue, Map, Sub
from rung.core.scalar import SCALARS
from rung.core.text import LANE
from rung.core.types import axes_of, dtype_of
from rung.kernel.ir import KernelIndex, Load
from rung.loop import ir as loop
from rung.tile.box import Tile
from rung.tile.mapping import refuse
from rung.tile.scope import Scope, Stored
from rung.tile.stmt import Stmt


@dataclass(frozen=True)
class Address:
    """Subscripts and mask at a leaf, with the lanes and unrolled axes that they run over."""

    subs: tuple[Sub, ...]
    mask: tuple[Expr, ...]
    lanes: int
    unroll: tuple[tuple[str, int], ...]


def value(v: Value, scope: Scope) -> Value:
    """The register family of `v` at this leaf, computed once."""
    if v not in scope.memo:
        before = len(scope.builder.ops)
        scope.memo[v] = kept(v, scope) if v in scope.arrays else compute(v, scope)
        follow(scope, before, [v])
    return scope.memo[v]


def follow(scope: Scope, before: int, values: Iterable[Value]) -> None:
    """What was built since then has the origins of these values."""
    if origins.following():
        made = walk(Block((), tuple(scope.builder.ops[before:])))
        origins.follow_rest((r for op in made for r in op.results), values)


def kept(v: Value, scope: Scope) -> Value:
    """`v` as it is in its array."""
    stored = scope.arrays[v]
    a = spread(place_in(stored, scope), (), scope, axes_of(v.type))
    return scope.builder.one(Load(stored.array, a.subs, (), 0, a.lanes, a.unroll), "t")


def compute(v: Value, scope: Scope) -> Value:
    """`v` from what its op reads. Raises LoweringError where that is not finished."""
    op, b = scope.tree.made[v], scope.builder
    match op:
        case loop.Load():
            made = scope.tiles.get(op)
            a = address(op.subs, op.mask, scope, made)
            buf = made.array if made else op.buf
            return b.one(Load(buf, a.subs, a.mask, op.fill, a.lanes, a.unroll), "t")
        case IndexValue():
            axes = loop.free_axes((op.expr,))
            expr = tidy(op.expr.subs({x: scope.env[x].index for x in axes}), scope)
            a = spread((expr,), (), scope, axes)
            return b.one(KernelIndex(expr, a.lanes, a.unroll), v.name)
        case Const():
            return b.one(Const(op.value, op.dtype), "c")
        case Map() | Cast():
            args = {x: value(x, scope) for x in op.operands()}
            return b.one(op.map(args), v.name)
        case _:
            raise LoweringError(f"{v.name} is read before its fold is finished")


# ---- addresses
def address(subs: Iterable[Sub], mask: Iterable[Expr], scope: Scope, made: Tile | None = None,
            once: Iterable[Expr] = ()) -> Address:
    """Subscripts at this leaf, of the buffer or of its tile, with the masks that they need."""
    subs = tuple(subs)
    axes = loop.free_axes(subs, mask)
    at = {a: scope.env[a].index for a in axes}
    places: list[Sub] = [s if isinstance(s, Value) else s.subs(at) for s in subs]
    if made is not None:
        places = made.local(places)
    places = [value(s, scope) if isinstance(s, Value) else tidy(s, scope) for s in places]
    conds = [*once, *(tidy(m.subs(at), scope) for m in mask)]
    beyond = [a for a in axes if scope.env[a].partial and not (made and a in made.form.exact)]
    conds += [scope.tree.nest.extents[a] - 1 - at[a] for a in beyond]
    return spread(places, conds, scope, axes)


def spread(subs: Iterable[Sub], mask: Iterable[Expr], scope: Scope, axes: Iterable[str]) -> Address:
    """Subscripts with the lanes and copies of the axes that they vary over."""
    subs, mask = tuple(subs), tuple(mask)
    used = {s for e in (*subs, *mask) if isinstance(e, Expr) for s in e.symbols()}
    spots = [scope.env[a] for a in axes]
    unroll = tuple((u.name, u.count) for s in spots for u in s.units if u.name in used)
    wide = [s.lanes for s in spots if s.lanes > 1]
    if len(wide) > 1:
        refuse(f"one access over two vectorised axes: {', '.join(map(str, subs))}")
    return Address(subs, mask, wide[0] if wide and LANE in used else 1, unroll)


def place_in(stored: Stored, scope: Scope) -> tuple[Expr, ...]:
    """Where this leaf is in an array."""
    local = {a: scope.env[a].index - base for a, base in stored.dims}
    if stored.panel is None:
        return tuple(local.values())
    return tuple(tidy(e, scope) for e in stored.panel.place(local))


def tidy(expr: Expr, scope: Scope) -> Expr:
    text = str(expr)
    return expr.simplify(scope.bounds) if "//" in text or "%" in text else expr


def note_bounds(scope: Scope) -> None:
    """What is known of the copies and lanes of a leaf."""
    for spot in scope.env.values():
        for unit in spot.units:
            scope.bounds[unit.name] = (0, unit.count - 1)
        if spot.lanes > 1:
            scope.bounds[LANE] = (0, spot.lanes - 1)


# ---- ragged blocks
def within(v: Value, neutral: float | int | bool, axis: str, scope: Scope) -> Value:
    """`v` up to the end of the axis, `neutral` beyond."""
    b = scope.builder
    left = scope.tree.nest.extents[axis] - 1 - scope.env[axis].index
    shape = spread((left,), (), scope, (axis,))
    at = b.one(KernelIndex(left, shape.lanes, shape.unroll), "left")
    inside = b.one(Map("ge", (at, b.one(Const(0, dtype_of(at.type))))), "inside")
    return b.one(Map("where", (inside, v, b.one(Const(neutral, dtype_of(v.type))))), v.name)


def is_zero(v: Value, axis: str, scope: Scope) -> bool:
    """Whether `v` is 0 beyond the extent of an axis: masked loads are, and what keeps 0."""
    op = scope.tree.made.get(v)
    if v in scope.arrays and not scope.tree.nest.masked and axis not in scope.arrays[v].groups:
        return False  # a copy that no element needs is not computed
    match op:
        case loop.Load():
            return op.fill == 0 and axis in loop.free_axes(op.subs, op.mask)
        case Map() if op.fn in ("add", "sub", "mul", "neg", "relu", "max", "min", "abs"):
            return all(is_zero(x, axis, scope) for x in op.args)
        case Cast():
            return is_zero(op.x, axis, scope)
        case _:
            return False


# ---- what leaves a loop
def hoist(stmts: Sequence[Stmt], inside: set[str], scope: Scope) -> None:
    """Compute, before a loop, what its statements read but does not vary over the axes `inside`."""
    seen: set[Value] = set()
    todo = [v for s in stmts for v in s.op.operands() if s.kind != "init"]
    while todo:
        v = todo.pop()
        op = scope.tree.made.get(v)
        if v in seen or op is None or v in scope.memo or v in scope.arrays:
            continue
        seen.add(v)
        if _movable(v, op, inside, scope):
            note_bounds(scope)
            value(v, scope)
        elif not isinstance(op, loop.Fold):
            todo += op.operands()


def _movable(v: Value, op: Op, inside: set[str], scope: Scope) -> bool:
    costly = isinstance(op, Map) and not SCALARS[op.fn].light
    if not costly or inside & set(axes_of(v.type)):
        return False
    return _ready(v, scope)


def _ready(v: Value, scope: Scope) -> bool:
    """Whether everything that `v` reads is finished here."""
    if v in scope.memo:
        return True
    op = scope.tree.made.get(v)
    if op is None:
        return True
    if isinstance(op, loop.Load) and op not in scope.tiles and scope.tree.mapping.placed(
            op.buf.name):
        return False
    if isinstance(op, loop.Fold):
        return v in scope.arrays and not scope.waits(op)
    return all(_ready(x, scope) for x in op.operands())
