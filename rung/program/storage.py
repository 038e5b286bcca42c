"""Alias analysis: which values of a program lie in the memory of others, and why.

    t = kernel neg(x) : f32[4,6]
    u = index t [i] of [24] -> [i//6,i%6] : f32[24]      # reshape of t: its root is t
    v = call aten.select.int(u, 0, 3) as view : f32[]    # view of u: its root is t
    w = kernel fill(t) in place t : f32[4,6]             # update of t: its root is t
    y = call mine.head.default(w) : f32[4]               # unknown: may lie in w, its root is y

`TABLE` alone has the rules of each kind of op. Before `to_loop`, reshapes and updates make new
tensors, so only views and unknown memory count (`CALLS`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rung.core.expr import ZERO, Expr, sym
from rung.core.op import Func, Op, Value, reads
from rung.core.ranges import prove_eq
from rung.core.types import TensorType
from rung.program.ir import Apply, Call, Composite, KernelCall, is_view, states
from rung.tensor.ir import Index

RESHAPE = "reshape"  # all of the operand in the order of its memory, at its address
VIEW = "view"  # elements of the operand, anywhere in its memory
UPDATE = "update"  # the operand's new state
UNKNOWN = "unknown"  # memory of its own, or that of any operand: nobody says
CERTAIN = (RESHAPE, VIEW, UPDATE)
HOWS = (*CERTAIN, UNKNOWN)
CALLS = (VIEW, UNKNOWN)


@dataclass(frozen=True)
class Link:
    """How the result of `op` lies in its `sources`: in one of them, unless it is `unknown`."""

    how: str
    op: Op
    sources: tuple[Value, ...]


class Aliases:
    """The links of a program's values, of the kinds `hows`, in the order of the program."""

    def __init__(self, ops: Iterable[Op] = (), hows: Collection[str] = HOWS):
        self.hows = hows
        self.links: dict[Value, Link] = {}
        for op in ops:
            self.add(op)

    def add(self, op: Op) -> None:
        """Go on with the next op."""
        for how, rule in TABLE.get(type(op), {}).items():
            if how in self.hows:
                self.links |= {r: Link(how, op, sources) for r, sources in rule(op).items()}

    def root(self, value: Value, through: Collection[str] = CERTAIN) -> Value:
        """The value in whose memory `value` lies, by links of these kinds."""
        while (link := self.links.get(value)) and link.how in through:
            (value,) = link.sources
        return value

    def behind(self, values: Iterable[Value]) -> set[Value]:
        """`values`, and all values they may lie in."""
        found = set(values)
        for value in reversed(self.links):
            if value in found:
                found.update(self.links[value].sources)
        return found

    def within(self, values: Iterable[Value]) -> set[Value]:
        """`values`, and all values that may lie in them."""
        found = set(values)
        for value, link in self.links.items():
            if not found.isdisjoint(link.sources):
                found.add(value)
        return found


def leaving(program: Func, hows: Collection[str] = CALLS) -> set[Value]:
    """The results of a program, and all values they may alias."""
    return Aliases(program.body.ops, hows).behind(program.body.last.operands())


# --- the table

Sources = Mapping[Value, tuple[Value, ...]]


def is_reshape(op: Op) -> bool:
    """Whether an `index` op keeps the order of memory, so that it can be a view."""
    if not isinstance(op, Index) or op.mask:
        return False
    bounds = {a: (0, n - 1) for a, n in zip(op.axes, op.shape, strict=True)}
    return prove_eq(linear(op.subs, op.x), linear([sym(a) for a in op.axes], op.result), bounds)


def linear(subs: Sequence[Expr], value: Value) -> Expr:
    """The offset, in elements, of an index into a tensor's memory."""
    assert isinstance(value.type, TensorType)
    offset = ZERO
    if value.type.strides is not None:
        return sum((sub * n for sub, n in zip(subs, value.type.strides, strict=True)), offset)
    for sub, n in zip(subs, value.type.shape, strict=True):
        offset = offset * n + sub
    return offset


def _reshaped(op: Index) -> Sources:
    return {op.result: (op.x,)} if is_reshape(op) else {}


def _viewed(op: Call) -> Sources:
    return dict.fromkeys(op.results, op.operands()[:1]) if is_view(op) else {}


def _updated(op: Call | KernelCall) -> Sources:
    return {new: (old,) for new, old in states(op).items()}


def _unknown(op: Op) -> Sources:
    """A library call may return an operand or a view of it, except copies, new memory, and calls
    with updates."""
    if isinstance(op, Call) and (op.memory or op.updates):
        return {}
    given = tuple(v for v in reads(op) if isinstance(v.type, TensorType))
    return dict.fromkeys(op.results, given)


TABLE: dict[type[Op], dict[str, Callable[[Any], Sources]]] = {
    Index: {RESHAPE: _reshaped},
    Call: {VIEW: _viewed, UPDATE: _updated, UNKNOWN: _unknown},
    KernelCall: {UPDATE: _updated},
    Composite: {UNKNOWN: _unknown},
    Apply: {UNKNOWN: _unknown},
}
