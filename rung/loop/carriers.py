"""Carriers: the states of a fold, how states merge, and when two folds become one.

A carrier is data: the monoid of each of its states, and functions that make ops. The monoids are
carriers of one state. `softmax` keeps a running maximum m and the sum s of exp(x - m); `attend`
also a sum of exp(x - m)*v. Both are the online normaliser of Milakov and Gimelshein (arXiv
1805.02867): when the maximum rises, the sums are rescaled by exp(m - m'), whose exponent is never
positive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rung.core.op import Op, Value
from rung.core.ops import Const, Map
from rung.core.scalar import MONOIDS
from rung.core.types import DType, dtype_of

Make = Callable[[Op, str], Value]  # appends an op of one result, called by the name if there is one
Step = Callable[[Make, Sequence[Value], Sequence[Value]], tuple[Value, ...]]
Over = Callable[[str, Value], Value]  # a monoid over all parallel directions of a value
Block = Callable[[Make, Sequence[Value], Sequence[Value], Over], tuple[Value, ...]]
Numbers = tuple[float | int | bool, ...]
PEAK = "max"  # the monoid of the state from which the weights of the others are computed


@dataclass(frozen=True)
class Carrier:
    """`reads[k]` are the inputs that state k depends on, which determine its axes.

    `monoids[k]` merges state k, after states are scaled to a common first one. `collapse` merges
    the states of lanes, unrolled copies and launches. `block`, where there is one, is a step over
    several elements at once, which it collapses: cheaper than as many steps, or a state for each.
    """

    name: str
    inputs: int
    monoids: tuple[str, ...]
    reads: tuple[tuple[int, ...], ...]
    step: Step
    merge: Step
    collapse: Callable[[Make, Sequence[Value], Over], tuple[Value, ...]]
    numpy: Callable[[Sequence[np.ndarray], int], Any]
    block: Block | None = None

    def identities(self, dtype: DType) -> Numbers:
        """The initial value of each state."""
        return tuple(MONOIDS[name].identity(dtype) for name in self.monoids)

    def absent(self, dtype: DType) -> Numbers:
        """For each input of a step, the neutral value: the step changes no state."""
        return (self.identities(dtype)[0], *([0.0] * (self.inputs - 1)))


def _monoid(name: str) -> Carrier:
    fn = MONOIDS[name].combine

    def step(make: Make, state: Sequence[Value], xs: Sequence[Value]) -> tuple[Value, ...]:
        return (make(Map(fn, (state[0], xs[0])), state[0].name),)

    return Carrier(name, 1, (name,), ((0,),), step, step,
                   lambda make, state, over: (over(name, state[0]),),
                   lambda xs, at: np.expand_dims(MONOIDS[name].reduce(xs[0], (at,)), at))


def _weight(make: Make, x: Value, m: Value) -> Value:
    """exp(x - m), and 0 where x is -inf, so that rows of -inf do not give -inf - -inf."""
    gone = make(Map("eq", (x, make(Const(float("-inf"), dtype_of(x.type)), ""))), "gone")
    kept = make(Map("exp", (make(Map("sub", (x, m)), "d"),)), "p")
    return make(Map("where", (gone, make(Const(0.0, dtype_of(x.type)), ""), kept)), "p")


def is_weight(made: Mapping[Value, Op], value: Value, x: Value, m: Value) -> bool:
    """Whether `value` is exp(x - m)."""
    match made.get(value):
        case Map("exp" | "exp_approx", (d,)):
            match made.get(d):
                case Map("sub", args):
                    return args == (x, m)
    return False


def _softmax_step(make: Make, state: Sequence[Value], xs: Sequence[Value]) -> tuple[Value, ...]:
    m, x = state[0], xs[0]
    top = make(Map("max", (m, x)), "m")
    scale, p = _weight(make, m, top), _weight(make, x, top)
    out = [top, make(Map("fma", (state[1], scale, p)), "s")]
    if len(state) == 3:
        kept = make(Map("mul", (state[2], scale)), "o")
        out.append(make(Map("fma", (p, xs[1], kept)), "o"))
    return tuple(out)


def _softmax_block(make: Make, state: Sequence[Value], xs: Sequence[Value], over: Over
                   ) -> tuple[Value, ...]:
    """One new maximum for all elements, and one scale. A maximum of -inf counts as 0, so that
    exp(x - m) is 0 for each x of -inf."""
    top = make(Map("max", (state[0], over(PEAK, xs[0]))), "m")
    low, zero = (make(Const(c, dtype_of(top.type)), "") for c in (float("-inf"), 0.0))
    base = make(Map("where", (make(Map("eq", (top, low)), "none"), zero, top)), "base")
    scale, p = (make(Map("exp", (make(Map("sub", (x, base)), "d"),)), "p")
                for x in (state[0], xs[0]))
    parts = [p, *(make(Map("mul", (p, x)), "o") for x in xs[1:])]
    return (top, *(make(Map("fma", (old, scale, over("add", part))), old.name)
                   for old, part in zip(state[1:], parts, strict=True)))


def _softmax_merge(make: Make, left: Sequence[Value], right: Sequence[Value]
                   ) -> tuple[Value, ...]:
    top = make(Map("max", (left[0], right[0])), "m")
    p, q = _weight(make, left[0], top), _weight(make, right[0], top)
    rest = [make(Map("fma", (x, p, make(Map("mul", (y, q)), "t"))), "s")
            for x, y in zip(left[1:], right[1:], strict=True)]
    return (top, *rest)


def _softmax_collapse(make: Make, state: Sequence[Value], over: Over) -> tuple[Value, ...]:
    top = over(PEAK, state[0])
    scale = _weight(make, state[0], top)
    return (top, *(over("add", make(Map("mul", (x, scale)), "s")) for x in state[1:]))


def _softmax_numpy(xs: Sequence[np.ndarray], at: int) -> Any:
    m = xs[0].max(at, keepdims=True, initial=-np.inf).astype(xs[0].dtype)
    with np.errstate(invalid="ignore"):
        p = np.where(xs[0] == -np.inf, np.zeros((), xs[0].dtype), np.exp(xs[0] - m))
    sums = [p.sum(at, keepdims=True)]
    if len(xs) == 2:
        sums.append((p * xs[1]).sum(at, keepdims=True))
    return (m, *sums)


CARRIERS: dict[str, Carrier] = {name: _monoid(name) for name in MONOIDS} | {
    "softmax": Carrier("softmax", 1, (PEAK, "add"), ((0,), (0,)),
                       _softmax_step, _softmax_merge, _softmax_collapse, _softmax_numpy,
                       _softmax_block),
    "attend": Carrier("attend", 2, (PEAK, "add", "add"), ((0,), (0,), (0, 1)),
                      _softmax_step, _softmax_merge, _softmax_collapse, _softmax_numpy,
                      _softmax_block),
}
