"""Carriers: what a fold keeps between steps, how states merge, and when two folds become one.

A carrier is state, init, step, merge and project. The monoids are carriers of one state. `softmax`
keeps a running maximum m and the sum s of exp(x - m); `attend` also a sum of exp(x - m)*v. Both are
the online normaliser of Milakov and Gimelshein (arXiv 1805.02867): when the maximum rises, what was
summed is rescaled by exp(m - m'), whose exponent is never positive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rung.core.op import Builder, Value
from rung.core.ops import Const, Map
from rung.core.scalar import MONOIDS
from rung.core.types import DType, dtype_of

Step = Callable[[Builder, Sequence[Value], Sequence[Value]], tuple[Value, ...]]
Over = Callable[[str, Value], Value]  # a monoid over all parallel directions of a value


@dataclass(frozen=True)
class Carrier:
    """`reads[k]` are the inputs that state k depends on: they decide the axes it varies over.

    `collapse` makes one state of the many that lanes and unrolled copies hold.
    """

    name: str
    inputs: int
    reads: tuple[tuple[int, ...], ...]
    init: Callable[[DType], tuple[float | int | bool, ...]]
    step: Step
    merge: Step
    collapse: Callable[[Builder, Sequence[Value], Over], tuple[Value, ...]]
    numpy: Callable[[Sequence[np.ndarray], int], Any]


def _monoid(name: str) -> Carrier:
    fn = MONOIDS[name].combine

    def step(b: Builder, state: Sequence[Value], xs: Sequence[Value]) -> tuple[Value, ...]:
        return (b.one(Map(fn, (state[0], xs[0])), state[0].name),)

    return Carrier(name, 1, ((0,),), lambda d: (MONOIDS[name].identity(d),), step, step,
                   lambda b, state, over: (over(name, state[0]),),
                   lambda xs, at: np.expand_dims(MONOIDS[name].reduce(xs[0], (at,)), at))


def _shift(b: Builder, x: Value, m: Value) -> Value:
    """exp(x - m), and 0 where x is -inf, so that rows of -inf do not give -inf - -inf."""
    low = b.one(Const(float("-inf"), dtype_of(x.type)))
    gone = b.one(Map("eq", (x, low)), "gone")
    kept = b.one(Map("exp", (b.one(Map("sub", (x, m)), "d"),)), "p")
    return b.one(Map("where", (gone, b.one(Const(0.0, dtype_of(x.type))), kept)), "p")


def _softmax_step(b: Builder, state: Sequence[Value], xs: Sequence[Value]) -> tuple[Value, ...]:
    m, x = state[0], xs[0]
    top = b.one(Map("max", (m, x)), "m")
    scale, p = _shift(b, m, top), _shift(b, x, top)
    out = [top, b.one(Map("fma", (state[1], scale, p)), "s")]
    if len(state) == 3:
        kept = b.one(Map("mul", (state[2], scale)), "o")
        out.append(b.one(Map("fma", (p, xs[1], kept)), "o"))
    return tuple(out)


def _softmax_merge(b: Builder, left: Sequence[Value], right: Sequence[Value]) -> tuple[Value, ...]:
    top = b.one(Map("max", (left[0], right[0])), "m")
    p, q = _shift(b, left[0], top), _shift(b, right[0], top)
    rest = [b.one(Map("fma", (x, p, b.one(Map("mul", (y, q)), "t"))), "s")
            for x, y in zip(left[1:], right[1:], strict=True)]
    return (top, *rest)


def _softmax_collapse(b: Builder, state: Sequence[Value], over: Over) -> tuple[Value, ...]:
    top = over("max", state[0])
    scale = _shift(b, state[0], top)
    return (top, *(over("add", b.one(Map("mul", (x, scale)), "s")) for x in state[1:]))


def _softmax_numpy(xs: Sequence[np.ndarray], at: int) -> Any:
    m = xs[0].max(at, keepdims=True, initial=-np.inf).astype(xs[0].dtype)
    with np.errstate(invalid="ignore"):
        p = np.where(xs[0] == -np.inf, np.zeros((), xs[0].dtype), np.exp(xs[0] - m))
    sums = [p.sum(at, keepdims=True)]
    if len(xs) == 2:
        sums.append((p * xs[1]).sum(at, keepdims=True))
    return (m, *sums)


CARRIERS: dict[str, Carrier] = {name: _monoid(name) for name in MONOIDS} | {
    "softmax": Carrier("softmax", 1, ((0,), (0,)), lambda d: (float("-inf"), 0.0),
                       _softmax_step, _softmax_merge, _softmax_collapse, _softmax_numpy),
    "attend": Carrier("attend", 2, ((0,), (0,), (0, 1)), lambda d: (float("-inf"), 0.0, 0.0),
                      _softmax_step, _softmax_merge, _softmax_collapse, _softmax_numpy),
}
