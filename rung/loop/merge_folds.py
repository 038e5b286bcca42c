"""Dependent folds over one axis as one fold: the online softmax.

    m = fold max x[i,j] over j           m, s = fold softmax x[i,j] over j
    e = exp(x[i,j] - m)              ->  y[i,j] = exp(x[i,j] - m) / s
    s = fold add e over j
    y[i,j] = e / s

and with a third sum of e*v (attention) `fold attend`, whose result is divided by s afterwards. B
reads A's m through f(x, m) = exp(x - m), and f(x, m') = exp(m - m') * f(x, m): a factor that
commutes with the sum, whose exponent is <= 0 because m only rises (arXiv 1805.02867). Reassociates.
Profitability is up to the caller: on a CPU, keeping e in L1 is faster for short rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rung.core import origins
from rung.core.op import Func, Op, Value, made_by
from rung.core.ops import Map
from rung.loop.carriers import CARRIERS, PEAK, Carrier, is_weight
from rung.loop.emit import Copier, Emitter
from rung.loop.ir import Fold, Store, extents_of, folds

Reason = str
Made = dict[Value, Op]


@dataclass(frozen=True)
class Group:
    """Folds that merge: the maximum, a sum of exp(x - m), and weighted sums (op, values v)."""

    top: Fold
    sum: Fold
    weighted: tuple[tuple[Fold, Value, bool], ...] = ()  # True: divided by s

    def inputs(self) -> list[Value]:
        """The inputs of the merged fold."""
        return [self.top.args[0], *(v for _, v, _ in self.weighted)]

    def results(self) -> tuple[Value, ...]:
        """The values of the folds, in the order of the merged fold's states."""
        return (self.top.result, self.sum.result, *(op.result for op, *_ in self.weighted))

    @property
    def carrier(self) -> Carrier | None:
        """The merged fold's carrier, if there is one of these states."""
        monoids = (PEAK, *(self.sum.carrier for _ in self.results()[1:]))
        return next((c for c in CARRIERS.values() if c.monoids == monoids), None)


def can_merge(kernel: Func, top: Fold, total: Fold) -> Reason | None:
    """Why fold `total` cannot join fold `top`; None is the proof that it can."""
    if not (top.plain and top.carrier == PEAK):
        return "the first fold is no maximum"
    if not (total.plain and total.carrier == "add" and total.axis == top.axis):
        return "the second fold is no sum over the same axis"
    made = made_by(kernel)
    if not is_weight(made, total.args[0], top.args[0], top.result):
        return "what is summed is not exp(x - m) of the maximum's x"
    return None


def merge(kernel: Func) -> Func:
    """`kernel` with every maximum, its sums and weighted sums as one fold each."""
    made = made_by(kernel)
    by_value: dict[Value, Group] = {}
    for top in folds(kernel):
        if (group := _group(kernel, made, top, by_value)) is not None:
            by_value |= dict.fromkeys(group.results(), group)
    if not by_value:
        return kernel
    buffers = (*kernel.params, *kernel.outs)
    out = Emitter(extents_of(kernel), [v.name for v in buffers])
    copier = _Merging(out, values={v: v for v in buffers}, made=made, by_value=by_value)
    for op in kernel.body.ops:
        if isinstance(op, Store):
            for value in op.operands():
                copier.want(value)
            copier.copy(op)
    return out.kernel(kernel.name, kernel.params, kernel.outs)


def _group(kernel: Func, made: Made, top: Fold, others: Mapping[Value, Group]) -> Group | None:
    """The folds that join the maximum `top`, given the groups so far; None if there are none."""
    sums = [op for op in folds(kernel) if can_merge(kernel, top, op) is None]
    if not sums or _needs(made, top.args[0], group := Group(top, sums[0]), others):
        return None
    for op in folds(kernel):
        found = _weighted(made, op, group)
        if found and not _needs(made, found[1], group, others):
            more = replace(group, weighted=(*group.weighted, found))
            group = more if more.carrier else group
    return group


def _weighted(made: Made, op: Fold, group: Group) -> tuple[Fold, Value, bool] | None:
    """(op, v, divided): `op` sums exp(x - m)*v, or that divided by s, over the group's axis."""
    top = group.top
    match op:
        case Fold("add", (a, b), top.axis, product="mul"):
            pairs = [(a, b), (b, a)]
        case Fold("add", (x,), top.axis, prefix=False):
            inner = made.get(x)
            if not (isinstance(inner, Map) and inner.fn == "mul"):
                return None
            pairs = [(inner.args[0], inner.args[1]), (inner.args[1], inner.args[0])]
        case _:
            return None
    for weight, value in pairs:
        if is_weight(made, weight, top.args[0], top.result):
            return op, value, False
        match made.get(weight):
            case Map("div", (e, s)) if s is group.sum.result:
                if is_weight(made, e, top.args[0], top.result):
                    return op, value, True
    return None


def _needs(made: Made, value: Value, group: Group, others: Mapping[Value, Group]) -> bool:
    """Whether `value` depends on the group's fold, directly or through other groups."""
    goals, seen, waiting = set(group.results()), set[Value](), [value]
    while waiting:
        v = waiting.pop()
        if v in goals:
            return True
        if v not in seen and (op := made.get(v)):
            waiting += others[v].inputs() if v in others else op.operands()
        seen.add(v)
    return False


@dataclass
class _Merging(Copier):
    """Copies required values, operands first; a group's values are the merged fold's results."""

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
        self.copy(op)

    def fold(self, group: Group) -> None:
        inputs = group.inputs()
        for v in inputs:
            self.want(v)
        assert group.carrier
        new = replace(group.top, carrier=group.carrier.name, results=(),
                      args=tuple(self.values[v] for v in inputs))
        states = self.out.add(new, "max", "sum", "out")
        self.values.update(zip(group.results(), states, strict=True))
        for state, old in zip(states, group.results(), strict=True):
            origins.follow([state], [old])
        for op, _, divided in group.weighted:
            if divided:
                self.values[op.result] = self.out.one(
                    Map("div", (self.values[op.result], states[1])))
                origins.follow([self.values[op.result]], [op.result])
