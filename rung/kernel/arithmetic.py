"""Fewer instructions for the steps of folds, and for products that are added.

    sum = fill 0.0
    p = x * x                       ->      p = x * x
    sum1 = sum + p
    y = p * w                       ->      y1 = fma(p, w, b)
    y1 = y + b

A fused multiply-add rounds once instead of twice. A sum or difference of two products stays, and so
does what a square is subtracted from: these may be meant to cancel exactly, as in a variance. So
does what goes to a function that jumps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TypeGuard

from rung.core.op import Block, Builder, Func, Op, Value, walk
from rung.core.ops import Cast, LoadBase, Map
from rung.core.rewrite import rewrite
from rung.core.scalar import MONOIDS, SCALARS
from rung.core.types import dtype_of
from rung.kernel.ir import Fill


def first_steps(func: Func) -> Func:
    """`func` where a step from a monoid's identity is what is folded. A zero may get a sign."""
    fills = {op.result: op for op in walk(func.body) if isinstance(op, Fill)}

    def rule(op: Op, builder: Builder) -> tuple[Value, ...] | None:
        if not isinstance(op, Map) or fills.keys().isdisjoint(op.args):
            return None
        *xs, state = op.args if op.fn == "fma" else op.args[::-1]
        if not _is_identity("add" if op.fn == "fma" else op.fn, fills.get(state)):
            return None
        if op.fn == "fma":
            new = Map("mul", tuple(xs))
            return builder.add(new, op.result.name) if new.infer() == (op.result.type,) else None
        return (xs[0],) if xs[0].type == op.result.type else None

    return _without_unread(rewrite(func, rule))


def _is_identity(fn: str, fill: Fill | None) -> bool:
    monoid = next((m for m in MONOIDS.values() if m.combine == fn), None)
    return bool(fill and monoid and fill.value == monoid.identity(dtype_of(fill.result.type)))


def fuse_products(func: Func) -> Func:
    """`func` with fused multiply-adds of floats."""
    ops = list(walk(func.body))
    products = {op.result: op for op in ops if _is_product(op)}
    made = {r: op for op in ops for r in op.results}
    squares = {v for v, op in products.items() if len({_key(made, x) for x in op.args}) == 1}
    reads = Counter(v for op in ops for v in op.operands())
    held = {v for op in ops if _jumps(op) for v in op.operands()}

    def rule(op: Op, builder: Builder) -> tuple[Value, ...] | None:
        if _is_product(op):
            products[op.result] = op  # of what its operands have become
        if not isinstance(op, Map) or op.fn not in ("add", "sub") or op.result in held:
            return None
        inside = [v for v in op.args if v in products]
        if len(inside) != 1 or reads[inside[0]] != 1:
            return None
        if op.fn == "sub" and op.args[1] in squares:
            return None
        return _fused(op, products[inside[0]], builder)

    return _without_unread(rewrite(func, rule))


def _is_product(op: Op) -> TypeGuard[Map]:
    return isinstance(op, Map) and op.fn == "mul" and dtype_of(op.result.type).is_float


def _key(made: Mapping[Value, Op], value: Value) -> Hashable:
    """Equal for a value and another load of the same element."""
    op = made.get(value)
    return op.key() if isinstance(op, LoadBase) else value


def _jumps(op: Op) -> bool:
    return (isinstance(op, Map) and SCALARS[op.fn].jumps) or (
        isinstance(op, Cast) and not op.dtype.is_float)


def _fused(op: Map, product: Map, builder: Builder) -> tuple[Value, ...] | None:
    """`op` as fma, with what it negates; None where the product must stay."""
    (a, b), (x, y) = product.args, op.args
    if op.fn == "sub" and y is product.result:
        rest, a = x, builder.one(Map("neg", (a,)), "neg")
    else:
        rest = y if x is product.result else x
        rest = builder.one(Map("neg", (rest,)), "neg") if op.fn == "sub" else rest
    new = Map("fma", (a, b, rest))
    return builder.add(new, op.result.name) if new.infer() == (op.result.type,) else None


def _without_unread(func: Func) -> Func:
    """Without the fills and products that nothing reads, in nested blocks too."""
    read = {v for op in walk(func.body) for v in op.operands()}
    gone: set[Op] = {op for op in walk(func.body) if (isinstance(op, Fill) or _is_product(op))
            and op.result not in read}
    return func.with_ops(_without(func.body, gone).ops) if gone else func


def _without(block: Block, gone: set[Op]) -> Block:
    return Block(block.args, tuple(op.map({}, lambda b: _without(b, gone)) for op in block.ops
                                   if op not in gone))
