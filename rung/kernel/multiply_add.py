"""A product that is added to something else, as one fused multiply-add: one rounding instead of two.

    p = x * x                       ->      sum1 = fma(x, x, sum)
    sum1 = sum + p

Not the difference or sum of two products, nor what a square is subtracted from: these may be meant
to cancel exactly, as in a variance. Nor what goes to a function that jumps.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeGuard

from rung.core.op import Block, Builder, Func, Op, Value, names_of, walk
from rung.core.ops import Cast, Map
from rung.core.rewrite import rewrite
from rung.core.scalar import SCALARS
from rung.core.types import dtype_of


def fuse_products(func: Func) -> Func:
    """`func` with fused multiply-adds; its products are gone where nothing else reads them."""
    ops = list(walk(func.body))
    products = {op.result: op for op in ops if _is_product(op)}
    reads = Counter(v for op in ops for v in op.operands())
    held = {v for op in ops if _jumps(op) for v in op.operands()}
    gone = set[Value]()

    def rule(op: Op, builder: Builder) -> tuple[Value, ...] | None:
        if _is_product(op):
            products[op.result] = op  # of what its operands have become
        if not isinstance(op, Map) or op.fn not in ("add", "sub") or op.result in held:
            return None
        inside = [v for v in op.args if v in products]
        if len(inside) != 1 or reads[inside[0]] != 1:
            return None
        fused = _fused(op, products[inside[0]], builder)
        if fused is not None:
            gone.add(inside[0])
        return fused

    made = rewrite(func, rule)
    return made.with_ops(_without(made.body, gone).ops) if gone else func


def _is_product(op: Op) -> TypeGuard[Map]:
    return isinstance(op, Map) and op.fn == "mul" and dtype_of(op.result.type).is_float


def _jumps(op: Op) -> bool:
    return (isinstance(op, Map) and SCALARS[op.fn].jumps) or (
        isinstance(op, Cast) and not op.dtype.is_float)


def _fused(op: Map, product: Map, builder: Builder) -> tuple[Value, ...] | None:
    """`op` as fma, with what it negates; None where the product must stay."""
    a, b = product.args
    x, y = op.args
    rest, negate = (y, op.fn == "sub") if x is product.result else (x, False)
    if op.fn == "sub" and y is product.result:
        if a is b:
            return None
        a = builder.one(Map("neg", (a,)))
    if negate:
        rest = builder.one(Map("neg", (rest,)))
    new = Map("fma", (a, b, rest))
    if new.infer() != (op.result.type,):
        return None
    return builder.add(new, op.result.name)


def _without(block: Block, gone: set[Value]) -> Block:
    """The block without the ops of some values, in nested blocks too."""
    return Block(block.args, tuple(op.map({}, lambda b: _without(b, gone)) for op in block.ops
                                   if gone.isdisjoint(op.results)))
