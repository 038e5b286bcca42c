"""A fold's steps at a leaf: what it starts from, what one step adds, how two states merge."""

from __future__ import annotations

from collections.abc import Sequence

from rung.core.op import Builder, Op, Value
from rung.core.ops import Map
from rung.core.scalar import MONOIDS
from rung.loop import ir as loop
from rung.loop.carriers import CARRIERS

Numbers = tuple[float | int | bool, ...]


def identities(op: Op) -> Numbers:
    """What each state of a fold starts from."""
    if isinstance(op, loop.Contract):
        return (MONOIDS[op.combine].identity(op.acc),)
    if isinstance(op, loop.Scan):
        return (MONOIDS[op.monoid].identity(op.acc),)
    assert isinstance(op, loop.Fold)
    return op.rule.init(op.acc)


def absent(op: Op) -> tuple[float | int | bool | None, ...]:
    """For each input of a step, the number that leaves the state as it is (None: any)."""
    if isinstance(op, loop.Contract):
        return (MONOIDS[op.combine].identity(op.acc),)
    assert isinstance(op, loop.Fold)
    return (op.rule.init(op.acc)[0], *([0.0] * (op.rule.inputs - 1)))


def is_fma(op: Op) -> bool:
    """Whether one step is a fused multiply-add."""
    return (isinstance(op, loop.Contract) and op.combine == "add" and op.product == "mul"
            and op.acc.is_float)


def step(b: Builder, op: Op, state: tuple[Value, ...], xs: Sequence[Value]) -> tuple[Value, ...]:
    """The state after one more element (or family of elements)."""
    if isinstance(op, loop.Contract):
        if len(xs) == 2:
            return (b.one(Map("fma", (xs[0], xs[1], state[0])), state[0].name),)
        return (b.one(Map(MONOIDS[op.combine].combine, (state[0], xs[0])), state[0].name),)
    if isinstance(op, loop.Scan):
        return CARRIERS[op.monoid].step(b, state, xs)
    assert isinstance(op, loop.Fold)
    return op.rule.step(b, state, xs)


def merge(b: Builder, op: Op, left: Sequence[Value], right: Sequence[Value]) -> tuple[Value, ...]:
    """Two states as one."""
    if isinstance(op, loop.Contract):
        return CARRIERS[op.combine].merge(b, left, right)
    assert isinstance(op, loop.Fold)
    return op.rule.merge(b, left, right)
