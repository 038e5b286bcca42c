"""Atoms: instructions and library calls that a contraction can run on, matched by structure.

`match_matmul` is the one unifier: it recognises `out = post(a @ b [+ bias])` in a normalised kernel
whatever the order of its operands' axes, and says which parameter is what. A library that offers
such a call is an atom like an instruction: a meaning, a price and `use mm with X` in the mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rung.core.expr import Expr
from rung.core.machine import Machine
from rung.core.op import Func, Op, Value
from rung.core.ops import Cast, Map
from rung.core.types import F32, DType, TensorType, dtype_of, shape_of
from rung.loop import ir as loop
from rung.tile.price import known


@dataclass(frozen=True)
class Operand:
    """A parameter read with each of its dimensions along one axis."""

    buffer: Value
    axes: tuple[str, ...]
    dims: tuple[int, ...]  # the dimensions that the axes run along; the others have size 1

    def is_whole(self, extents: Mapping[str, Expr]) -> bool:
        """Whether the axes reach all of the buffer, and not a slice."""
        return all(extents[a] is shape_of(self.buffer.type)[n]
                   for a, n in zip(self.axes, self.dims, strict=True))


@dataclass(frozen=True)
class Matmul:
    """out[batch.., m, n] = post(sum over k of a*b, plus bias[n]), all in one element type."""

    contraction: str
    a: Operand
    b: Operand
    out: Operand
    batch: tuple[str, ...]
    m: str
    n: str
    k: str
    bias: Operand | None
    post: str  # none | relu
    dtype: DType

    def sizes(self, kernel: Func, hints: Mapping[str, int]) -> tuple[int, int, int, int]:
        """(batch, m, n, k) as numbers."""
        at = {a: max(1, known(e, hints)) for a, e in loop.extents_of(kernel).items()}
        batch = 1
        for axis in self.batch:
            batch *= at[axis]
        return batch, at[self.m], at[self.n], at[self.k]


@dataclass(frozen=True)
class Library:
    """A library call: `fits` says whether it computes a matmul, `seconds` what it takes."""

    name: str
    fits: Callable[[Matmul], bool]
    seconds: Callable[[Matmul, Func, Machine, Mapping[str, int]], float]


def match_matmul(kernel: Func) -> Matmul | None:
    """The matmul that `kernel` is, or None. Nothing is assumed: every op must be accounted for."""
    ops = kernel.body.ops
    mains = loop.contractions(kernel)
    stores = [op for op in ops if isinstance(op, loop.Store)]
    if len(mains) != 1 or len(stores) != 1 or stores[0].buf not in kernel.outs:
        return None
    main, store = mains[0], stores[0]
    made = {r: op for op in ops for r in op.results}
    found = _epilogue(store.value, main, made)
    a, b = (_operand(x, made, main.axis) for x in main.args)
    out = _plain(store)
    if not (found and a and b and out and main.sums_products and main.acc == F32):
        return None
    seen, bias, post = found
    extents = loop.extents_of(kernel)
    if not all(x.is_whole(extents) for x in (a, b, out, bias) if x):
        return None
    used = 3 + len(seen) + sum(isinstance(made[x], Cast) for x in main.args)
    if len(set(main.args)) != 2 or used + 1 != len(ops):
        return None
    return _arranged(main, a, b, out, bias, post)


def _arranged(main: loop.Fold, a: Operand, b: Operand, out: Operand, bias: Operand | None,
              post: str) -> Matmul | None:
    """Decide which axis is which; the left operand is the one with the row axis of the output."""
    shared = [x for x in a.axes if x in b.axes and x != main.axis]
    own_a = [x for x in a.axes if x not in b.axes]
    own_b = [x for x in b.axes if x not in a.axes]
    if len(own_a) != 1 or len(own_b) != 1:
        return None
    if out.axes and out.axes[-1] == own_a[0]:
        a, b, own_a, own_b = b, a, own_b, own_a
    types = {dtype_of(x.buffer.type) for x in (a, b, out) if x}
    types |= {dtype_of(bias.buffer.type)} if bias else set()
    if out.axes != (*shared, own_a[0], own_b[0]) or len(types) != 1 or len(shared) > 1:
        return None
    if bias is not None and bias.axes != (own_b[0],):
        return None
    if any(x.axes[: len(shared)] != tuple(shared) for x in (a, b)):
        return None
    return Matmul(main.result.name, a, b, out, tuple(shared), own_a[0], own_b[0], main.axis,
                  bias, post, types.pop())


def _operand(value: Value, made: Mapping[Value, Op], k: str) -> Operand | None:
    op = made.get(value)
    if isinstance(op, Cast) and op.dtype == F32:
        op = made.get(op.x)
    found = _plain(op) if isinstance(op, loop.Load) else None
    return found if found and k in found.axes else None


def _plain(op: loop.Load | loop.Store) -> Operand | None:
    """The access as an operand, if each subscript is one axis, once."""
    t = op.buf.type
    assert isinstance(t, TensorType)
    dims = tuple(n for n, (sub, size) in enumerate(zip(op.subs, t.shape, strict=True)) if not (
        size.is_const(1) and isinstance(sub, Expr) and sub.is_const(0)))
    subs = [op.subs[n] for n in dims]
    names = tuple(str(s) for s in subs if isinstance(s, Expr) and s.is_symbol())
    if len(names) != len(subs) or len(set(names)) != len(names) or op.mask:
        return None
    return Operand(op.buf, names, dims) if t.strides is None else None


def _epilogue(value: Value, main: loop.Fold, made: Mapping[Value, Op]
              ) -> tuple[list[Op], Operand | None, str] | None:
    """The ops between the contraction and the store: [round](relu(mm + bias))."""
    seen: list[Op] = []
    bias, post = None, "none"
    op = made.get(value)
    if isinstance(op, Cast):
        seen, op = [op], made.get(op.x)
    if isinstance(op, Map) and op.fn == "relu":
        seen, post, op = [*seen, op], "relu", made.get(op.args[0])
    if isinstance(op, Map) and op.fn == "add":
        left, right = (made.get(x) for x in op.args)
        if right is main:
            left, right = right, left
        inner = [right] if right is not None else []
        if isinstance(right, Cast):
            inner.append(made[right.x])
        if left is not main or not inner or not isinstance(inner[-1], loop.Load):
            return None
        bias = _plain(inner[-1])
        if bias is None:
            return None
        seen, op = [*seen, op, *inner], main
    return (seen, bias, post) if op is main else None


