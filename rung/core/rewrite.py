"""Rewriting: apply a rule to every op, substitute values, drop dead ops, merge equal ones.

All functions are pure and keep unchanged ops and values (the same objects). New ops inherit the
origins of replaced ops, and of values that only those read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace

from rung.core import origins
from rung.core.op import Block, Builder, Effect, Func, Op, Value, names_of, reads
from rung.core.ops import LoadBase
from rung.core.types import INDEX

# A rule appends ops to the builder and returns the values for the op's results, or None to decline.
Rule = Callable[[Op, Builder], Sequence[Value] | None]


def rewrite(func: Func, rule: Rule) -> Func:
    """`func` with `rule` tried once on each op, in order, operands already substituted."""
    builder = Builder(names_of(func))
    values: dict[Value, Value] = {}
    body = _rewrite(func.body, rule, builder, values)
    return func if body is func.body else replace(func, body=body)


def _rewrite(block: Block, rule: Rule, builder: Builder, values: dict[Value, Value]) -> Block:
    for old in block.ops:
        op = old.map(values, lambda b: _rewrite(b, rule, builder.inner(), values))
        mark = len(builder.ops)
        new = rule(op, builder)
        if new is None:
            builder.ops[mark:] = [op]
            continue
        made = [r for made in builder.ops[mark:] for r in made.results]
        read = {v for made in builder.ops[mark:] for v in made.operands()}
        origins.derive(made, (*old.results, *(v for v in op.operands() if v not in read)))
        values.update(zip(old.results, new, strict=True))
        for result, gone in zip(new, old.results, strict=True):
            origins.absorb(result, gone)
    if len(builder.ops) == len(block.ops) and all(
            a is b for a, b in zip(builder.ops, block.ops, strict=True)):
        return block
    return Block(block.args, tuple(builder.ops))


def substitute(ops: Sequence[Op], values: Mapping[Value, Value]) -> list[Op]:
    """Ops with operands replaced, in nested blocks too."""
    def inner(block: Block) -> Block:
        new = tuple(substitute(block.ops, values))
        same = all(a is b for a, b in zip(new, block.ops, strict=True))
        return block if same else Block(block.args, new)

    return [op.map(values, inner) for op in ops]


def is_pure(op: Op) -> bool:
    """Whether the op and its blocks only compute results, none a size that is read by name."""
    if op.effect is not Effect.PURE or any(r.type is INDEX for r in op.results):
        return False
    return all(is_pure(x) for b in op.blocks() for x in b.ops)


def dead_code(func: Func) -> Func:
    """Without pure ops whose results nobody reads."""
    live: set[Value] = set()
    kept: list[Op] = []
    for op in reversed(func.body.ops):
        if is_pure(op) and not any(r in live for r in op.results):
            continue
        kept.append(op)
        live |= reads(op)
    return func if len(kept) == len(func.body.ops) else func.with_ops(kept[::-1])


def merge_equal(func: Func, classes: tuple[type[Op], ...] = (Op,),
                apart: Collection[Value] = ()) -> Func:
    """Common subexpressions: pure ops of equal class, operands and attributes become one.

    Ops that give values of `apart`, or were merged with such ops, are not merged with each other.
    """
    apart = set(apart)
    seen: dict[Hashable, Op] = {}
    loads: list[Hashable] = []  # keys in `seen` of what the next effect may change
    values: dict[Value, Value] = {}
    kept: list[Op] = []
    for old in func.body.ops:
        op = old.map(values)
        key = op.key()
        if not is_pure(op):
            while loads:
                seen.pop(loads.pop(), None)
        if not is_pure(op) or op.blocks() or not isinstance(op, classes):
            kept.append(op)
        elif key in seen and not (any(r in apart for r in old.results)
                                  and any(r in apart for r in seen[key].results)):
            values.update(zip(old.results, seen[key].results, strict=True))
            apart.update(new for new, r in zip(seen[key].results, old.results, strict=True)
                         if r in apart)
            for kept_one, gone in zip(seen[key].results, old.results, strict=True):
                origins.unite(kept_one, gone)
        else:
            seen[key] = op
            kept.append(op)
            if isinstance(op, LoadBase) and not op.on_entry:
                loads.append(key)
    return func if not values else func.with_ops(kept)


def renamed(value: Value, name: str) -> Value:
    """A value of the same type under another name."""
    return value if name == value.name else replace(value, name=name)
