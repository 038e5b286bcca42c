"""Folds that read each other's results, over one axis, as one fold: the online softmax.

    m = fold max x[i,j] over j           m, s = fold softmax x[i,j] over j
    e = exp(x[i,j] - m)              ->  y[i,j] = exp(x[i,j] - m) / s
    s = fold add e over j
    y[i,j] = e / s

and with a third sum of e*v (attention) `fold attend`, whose result is divided by s afterwards. B
reads A's m through f(x, m) = exp(x - m), and f(x, m') = exp(m - m') * f(x, m): a factor that
commutes with the sum, whose exponent is <= 0 because m only rises (arXiv 1805.02867). Reassociates.
Whether merging pays is the caller's question: on a CPU, keeping e in L1 is faster for short rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rung.core.op import Func, Op, Value
from rung.core.ops import Map
from rung.loop.emit import Copier, Emitter
from rung.loop.ir import Contract, Fold, Store, extents_of

Reason = str
Made = dict[Value, Op]


@dataclass
class Group:
    """Folds that merge: the maximum, the sums of exp(x - m), and weighted sums (op, values v)."""

    top: Fold
    sums: list[Fold] = field(default_factory=list)
    weighted: list[tuple[Op, Value, bool]] = field(default_factory=list)  # True: divided by s

    def inputs(self) -> list[Value]:
        """What the merged fold reads."""
        return [self.top.args[0], *(v for _, v, _ in self.weighted)]


def can_merge(kernel: Func, top: Op, total: Op) -> Reason | None:
    """Why fold `total` cannot join fold `top`; None is the proof that it can."""
    made = {r: op for op in kernel.body.ops for r in op.results}
    if not (isinstance(top, Fold) and top.carrier == "max"):
        return "the first fold is no maximum"
    if not (isinstance(total, Fold) and total.carrier == "add" and total.axis == top.axis):
        return "the second fold is no sum over the same axis"
    if not _is_shifted(made, total.args[0], top):
        return "what is summed is not exp(x - m) of the maximum's x"
    return None


def merge(kernel: Func) -> Func:
    """`kernel` with every maximum, its sums and weighted sums as one fold each."""
    made = {r: op for op in kernel.body.ops for r in op.results}
    by_value: dict[Value, Group] = {}
    for op in kernel.body.ops:
        if (group := _group(kernel, made, op, by_value)) is not None:
            by_value |= dict.fromkeys(_values(group), group)
    if not by_value:
        return kernel
    buffers = (*kernel.params, *kernel.outs)
    out = Emitter(extents_of(kernel), [v.name for v in buffers])
    copier = _Merging(out, values={v: v for v in buffers}, made=made, by_value=by_value)
    for op in kernel.body.ops:
        if isinstance(op, Store):
            for value in op.operands():
                copier.want(value)
            copier.op(op)
    return out.kernel(kernel.name, kernel.params, kernel.outs)


def _group(kernel: Func, made: Made, top: Op, others: Mapping[Value, Group]) -> Group | None:
    """All that joins the maximum `top`, beside the groups that there are; None for nothing."""
    if not (isinstance(top, Fold) and top.carrier == "max"):
        return None
    sums = [op for op in kernel.body.ops
            if isinstance(op, Fold) and can_merge(kernel, top, op) is None]
    group = Group(top, sums[:1])
    if not sums or _needs(made, top.args[0], group, others):
        return None
    for op in kernel.body.ops:
        if group.weighted:  # `attend` carries one weighted sum
            break
        found = _weighted(made, op, group)
        if found and not _needs(made, found[1], group, others):
            group.weighted.append(found)
    return group


def _weighted(made: Made, op: Op, group: Group) -> tuple[Op, Value, bool] | None:
    """(op, v, divided): `op` sums exp(x - m)*v, or that divided by s, over the group's axis."""
    match op:
        case Contract("add", "mul", a, b, axis) if axis == group.top.axis:
            pairs = [(a, b), (b, a)]
        case Fold("add", (x,), axis) if axis == group.top.axis:
            inner = made.get(x)
            if not (isinstance(inner, Map) and inner.fn == "mul"):
                return None
            pairs = [(inner.args[0], inner.args[1]), (inner.args[1], inner.args[0])]
        case _:
            return None
    for weight, value in pairs:
        if _is_shifted(made, weight, group.top):
            return op, value, False
        match made.get(weight):
            case Map("div", (e, s)) if s is group.sums[0].result:
                if _is_shifted(made, e, group.top):
                    return op, value, True
    return None


def _is_shifted(made: Made, e: Value, top: Fold) -> bool:
    """Whether e is exp(x - m) with m the maximum `top` of that x."""
    match made.get(e):
        case Map("exp", (d,)):
            match made.get(d):
                case Map("sub", (x, m)):
                    return x is top.args[0] and m is top.result
    return False


def _needs(made: Made, value: Value, group: Group, others: Mapping[Value, Group]) -> bool:
    """Whether `value` is known only after the group's fold, directly or through other groups."""
    goals, seen, waiting = set(_values(group)), set[Value](), [value]
    while waiting:
        v = waiting.pop()
        if v in goals:
            return True
        if v not in seen and (op := made.get(v)):
            waiting += others[v].inputs() if v in others else op.operands()
        seen.add(v)
    return False


def _values(group: Group) -> Sequence[Value]:
    return (group.top.result, *(op.result for op in group.sums),
            *(op.results[0] for op, *_ in group.weighted))


@dataclass
class _Merging(Copier):
    """Copies what is wanted, operands first; a value of a group comes out of the merged fold."""

    made: Made = field(default_factory=dict)
    by_value: dict[Value, Group] = field(default_factory=dict)

    def want(self, value: Value) -> None:
        if value in self.values:
            return
        if value in self.by_value:
            self.fold(self.by_value[value])
            return
        op = self.made[value]
        for v in op.operands():
            self.want(v)
        self.op(op)

    def fold(self, group: Group) -> None:
        inputs = group.inputs()
        for v in inputs:
            self.want(v)
        top = group.top
        name = "attend" if group.weighted else "softmax"
        states = self.out.add(Fold(name, tuple(self.values[v] for v in inputs), top.axis,
                                   top.extent, top.acc), "max", "sum", "out")
        self.values[top.result], self.values[group.sums[0].result] = states[:2]
        for (op, _, divided), state in zip(group.weighted, states[2:], strict=True):
            ratio = self.out.one(Map("div", (state, states[1]))) if divided else state
            self.values[op.results[0]] = ratio
