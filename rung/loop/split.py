"""A fold split across launches: partial states to a workspace, then merged (split-K, split-KV).

    s = fold add x[i] over i 4096   ->   s = fold add x[512*p+i] over i 512;  ws[p] = s
    y[] = s                              s = fold add ws[p] over p 8;         y[] = s

The partial kernel has a further parallel axis p; the merge kernel is the old one with the fold
replaced by the carrier's merge of the states. Reassociates.
"""

from __future__ import annotations

from collections.abc import Sequence

from rung.core.cost import behind
from rung.core.expr import ZERO, Expr, sym
from rung.core.op import Func, Op, Value
from rung.core.ops import Const, Map
from rung.core.scalar import MONOIDS
from rung.core.types import TensorType, axes_of, dtype_of
from rung.loop.emit import Copier, Declined, Emitter
from rung.loop.ir import Contract, Fold, Load, Store, extents_of

Halves = tuple[Func, Func, tuple[TensorType, ...]]


def split_fold(kernel: Func, axis: str, parts: int) -> Halves:
    """(partial kernel, merge kernel, types of the workspaces that connect them).

    The workspaces are the partial kernel's outputs and the merge kernel's last parameters. Raises
    Declined when folds over `axis` read each other (merge them first).
    """
    folds = [op for op in kernel.body.ops if isinstance(op, Fold | Contract) and op.axis == axis]
    if not folds:
        raise Declined(f"nothing folds over {axis}")
    made = {r: op for op in kernel.body.ops for r in op.results}
    if any(inner in folds for op in folds for inner in behind(op, made)):
        raise Declined(f"one fold over {axis} reads another's result")
    spaces = _workspaces(kernel, folds, parts)
    return (_partial(kernel, folds, axis, parts, spaces), _merge(kernel, folds, parts, spaces),
            tuple(t for v in spaces.values() if isinstance(t := v.type, TensorType)))


def _workspaces(kernel: Func, folds: Sequence[Op], parts: int) -> dict[Value, Value]:
    """For each state of each fold the buffer [parts, free axes] that it goes through."""
    extents = extents_of(kernel)
    states = [r for op in folds for r in op.results]
    return {r: Value(f"ws{n}", TensorType(dtype_of(r.type), (
        Expr.of(parts), *(extents[a] for a in axes_of(r.type))))) for n, r in enumerate(states)}


def _partial(kernel: Func, folds: Sequence[Op], axis: str, parts: int,
             spaces: dict[Value, Value]) -> Func:
    extents = extents_of(kernel)
    whole = extents[axis]
    chunk = (whole + parts - 1) // parts
    out = Emitter({**extents, axis: chunk}, [v.name for v in (*kernel.params, *spaces.values())])
    part = out.axis("p", Expr.of(parts))
    at = sym(part) * chunk + sym(axis)
    ragged = whole % parts is not ZERO
    copier = _Chunk(out, {axis: at}, {p: p for p in kernel.params})
    copier.inner, copier.mask = axis, ((whole - 1 - at,) if ragged else ())
    made = {r: op for op in kernel.body.ops for r in op.results}
    needed = {id(x) for op in folds for x in (op, *behind(op, made))}
    for op in kernel.body.ops:
        if id(op) in needed:
            copier.op(op)
    for state, space in spaces.items():
        subs = (sym(part), *(sym(a) for a in axes_of(state.type)))
        out.add(Store(space, subs, copier.values[state]))
    buffers = {op.buf for op in out.ops if isinstance(op, Load)}
    return out.kernel(f"{kernel.name}_part", [p for p in kernel.params if p in buffers],
                      spaces.values())


class _Chunk(Copier):
    """Copies with the folded axis running over one chunk; what lies behind the end is neutral."""

    inner: str

    def _moved(self, op: Op) -> Op:
        if not isinstance(op, Fold | Contract) or op.axis != self.inner:
            return super()._moved(op)
        new = op.map(self.values)
        extent = self.out.axes[self.inner]
        if isinstance(new, Contract):
            a = self.valid(new.a, 0.0)
            return Contract(new.combine, new.product, a, new.b, self.inner, extent, new.acc)
        assert isinstance(new, Fold)
        neutral = new.rule.init(new.acc)[0]
        first, *rest = new.args
        return Fold(new.carrier, (self.valid(first, neutral), *rest), self.inner, extent, new.acc)

    def valid(self, value: Value, neutral: float | int | bool) -> Value:
        if not self.mask:
            return value
        return self.out.where(self.mask, value,
                              self.out.one(Const(neutral, dtype_of(value.type))))


def _merge(kernel: Func, folds: Sequence[Op], parts: int, spaces: dict[Value, Value]) -> Func:
    buffers = (*kernel.params, *kernel.outs)
    out = Emitter(extents_of(kernel), [v.name for v in (*buffers, *spaces.values())])
    part = out.axis("p", Expr.of(parts))
    copier = Copier(out, values={v: v for v in buffers})
    for op in kernel.body.ops:
        if op not in folds:
            copier.op(op)
            continue
        states = [out.one(Load(spaces[r], (sym(part), *(sym(a) for a in axes_of(r.type)))))
                  for r in op.results]
        copier.values.update(zip(op.results, _merged(out, op, states, part), strict=True))
    used = {v for op in out.ops for v in op.operands()}
    params = [p for p in kernel.params if p in used]
    return out.kernel(f"{kernel.name}_merge", [*params, *spaces.values()], kernel.outs)


def _merged(out: Emitter, op: Op, states: list[Value], part: str) -> list[Value]:
    """The states of all parts as one: a monoid's fold, or sums rescaled to the common maximum."""
    extent = out.axes[part]

    def fold(name: str, x: Value) -> Value:
        return out.one(Fold(name, (x,), part, extent, dtype_of(x.type)))

    name = op.combine if isinstance(op, Contract) else op.carrier if isinstance(op, Fold) else ""
    if name in MONOIDS:
        return [fold(name, states[0])]
    top = fold("max", states[0])
    gone = out.one(Map("eq", (states[0], out.one(Const(float("-inf"), dtype_of(top.type))))))
    zero = out.one(Const(0.0, dtype_of(top.type)))
    scale = out.one(Map("exp", (out.one(Map("sub", (states[0], top))),)))
    scale = out.one(Map("where", (gone, zero, scale)))
    return [top, *(fold("add", out.one(Map("mul", (x, scale)))) for x in states[1:])]


