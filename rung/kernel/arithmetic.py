"""Fewer instructions for the steps of folds, for what loads mask, and for products that are added.

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
from dataclasses import replace
from math import inf
from typing import TypeGuard

from rung.core.expr import Expr
from rung.core.op import Block, Builder, Func, Op, Value, walk
from rung.core.ops import Cast, Const, LoadBase, Map
from rung.core.rewrite import rewrite
from rung.core.scalar import MONOIDS, SCALARS
from rung.core.types import dtype_of
from rung.kernel.ir import Fill, KernelIndex, Load

SCALAR_OPS = (Fill, Const, KernelIndex, Map)


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


def fill_loads(func: Func) -> Func:
    """`func` where a load has the value that its only reader puts in place of what it masks.

        v = where(index(n-1-i) >= 0, f32(x[i | n-1-i]), -inf)   ->   v = f32(x[i | n-1-i else -inf])
    """
    made = {r: op for op in walk(func.body) for r in op.results}
    read = Counter(v for op in walk(func.body) for v in op.operands())
    fills, gone = dict[Value, float](), set[Value]()
    for op in made.values():
        match op:
            case Map("where", (inside, v, other)):
                load, number = made.get(v), made.get(other)
                while isinstance(load, Cast) and read[load.result] == 1 and load.dtype.is_float:
                    load = made.get(load.x)
                if not isinstance(load, Load) or not dtype_of(load.result.type).is_float:
                    continue  # integers have no infinity
                if (isinstance(number, Const) and read[load.result] == 1
                        and number.value in (0.0, inf, -inf) and _tests(made, inside) == load.mask):
                    fills[load.result] = number.value
                    gone.add(op.result)

    def rule(op: Op, builder: Builder) -> tuple[Value, ...] | None:
        if isinstance(op, Load) and op.result in fills:
            return builder.add(replace(op, fill=fills[op.result], results=()), op.result.name)
        return (op.args[1],) if isinstance(op, Map) and op.result in gone else None

    return _without_unread(rewrite(func, rule)) if gone else func


def _tests(made: Mapping[Value, Op], value: Value) -> tuple[Expr, ...]:
    """The expression that is not below 0 where `value` is true; () where that is unknown."""
    match made.get(value):
        case Map("ge", (index, zero)):
            place, number = made.get(index), made.get(zero)
            if isinstance(place, KernelIndex) and isinstance(number, Const) and not number.value:
                return (place.expr,)
    return ()


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
    """Without the numbers, indices and functions that nothing reads, in nested blocks too."""
    while True:
        read = {v for op in walk(func.body) for v in op.operands()}
        gone: set[Op] = {op for op in walk(func.body) if isinstance(op, SCALAR_OPS)
                         and op.result not in read}
        if not gone:
            return func
        func = func.with_ops(_without(func.body, gone).ops)


def _without(block: Block, gone: set[Op]) -> Block:
    return Block(block.args, tuple(op.map({}, lambda b: _without(b, gone)) for op in block.ops
                                   if op not in gone))
