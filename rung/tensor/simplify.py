"""Exact rules on whole tensors, and the policy of composites.

    t = index x [i,j] of [6,5] -> [j,i]
    u = index t [i,j] of [5,6] -> [j,i]     ->    y = x + 1.0
    y = u + full(1.0)

Each rule is a function under its equation; it gets an op with simplified operands and gives an
equal value, or None. Every op is visited once, so time is linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from rung.core import origins
from rung.core.expr import sym
from rung.core.op import Builder, Func, Op, Value
from rung.core.ops import Cast, Const, Map, Yield
from rung.core.rewrite import dead_code, merge_equal, rewrite, substitute
from rung.core.scalar import cast
from rung.core.types import BF16, TensorType, dtype_of
from rung.program.ir import Call, Composite, Write
from rung.program.storage import leaving
from rung.tensor.ir import Concat, Full, Index, Reduce

_EXACT = {("bf16", "f32"), ("f16", "f32"), ("bf16", "f64"), ("f16", "f64"), ("f32", "f64"),
          ("i32", "i64"), ("i16", "i64"), ("i8", "i64"), ("u8", "i64"), ("i32", "f64")}


def simplify(program: Func) -> Func:
    """`program` after one sweep of the rules, equal ops merged, dead code dropped; exact."""
    ops = program.body.ops
    first = next((n for n, op in enumerate(ops) if isinstance(op, Write)), len(ops))
    state = _Sweep(frozenset(v for op in ops[first:] for v in op.operands()),
                   leaving(program) | set(program.params))
    # a copy that was asked for is not another one, whatever views of them are returned
    copies = {r for op in ops if isinstance(op, Call) and op.memory == "copy"
              for r in op.results}
    return dead_code(merge_equal(rewrite(program, state.rule), apart=state.apart | copies))


@dataclass
class _Sweep:
    """`made` has the op of each value; new ops go to `builder`.

    `late` values are read after parameters were written, so they must not become a parameter, and
    no op after the write may start to read one of the `written`; the `apart` (results, what these
    may alias, parameters) have memory of their own, so none may become another.
    """

    late: frozenset[Value] = frozenset()
    apart: set[Value] = field(default_factory=set)
    made: dict[Value, Op] = field(default_factory=dict)
    written: set[Value] = field(default_factory=set)
    builder: Builder = field(default_factory=Builder)

    def rule(self, op: Op, builder: Builder) -> tuple[Value, ...] | None:
        self.note(op)
        self.builder = builder
        for rule in RULES.get(type(op), ()):
            new = rule(self, op)
            if isinstance(new, Value):
                if self.may_become(op.results[0], new):
                    return (new,)
            elif new is not None and not self.written.intersection(new.operands()):
                return self.again(replace(new, results=op.results))
        return None

    def may_become(self, old: Value, new: Value) -> bool:
        """Whether all readers of `old` may read the equal value `new`."""
        if old not in self.apart:
            return new.role != "mutated" or old not in self.late
        if new in self.apart:
            return False
        self.apart.add(new)
        return True

    def again(self, op: Op) -> tuple[Value, ...]:
        """Append a new op, simplified."""
        made = self.rule(op, self.builder)
        if made is None:
            made = self.builder.add(op, op.results[0].name)
            self.note(self.builder.ops[-1])
            if op.results[0] in self.apart:
                self.apart.update(made)
        return made

    def scalar(self, value: Value) -> Value:
        full = self.made[value]
        assert isinstance(full, Full)
        return self.builder.one(Const(full.value, full.dtype))

    def note(self, op: Op) -> None:
        self.made.update(dict.fromkeys(op.results, op))
        if isinstance(op, Write):
            self.written.add(op.dst)


Rule = Callable[[_Sweep, Op], Op | Value | None]


# index (index x) -> index x with composed subscripts
def index_of_index(s: _Sweep, op: Op) -> Op | None:
    assert isinstance(op, Index)
    inner = s.made.get(op.x)
    if not isinstance(inner, Index):
        return None
    if inner.mask and op.mask and _bits(inner.fill) != _bits(op.fill):
        return None
    at = dict(zip(inner.axes, op.subs, strict=True))
    bounds = {a: (0, n - 1) for a, n in zip(op.axes, op.shape, strict=True)}
    subs = tuple(e.subs(at).simplify(bounds) for e in inner.subs)
    mask = (*op.mask, *(e.subs(at).simplify(bounds) for e in inner.mask))
    fill = op.fill if op.mask else inner.fill
    return Index(inner.x, op.axes, op.shape, subs, mask, fill)


# index x [i,j] -> [i,j] is x
def identity_index(s: _Sweep, op: Op) -> Value | None:
    assert isinstance(op, Index)
    same = op.subs == tuple(sym(a) for a in op.axes) and not op.mask
    return op.x if same and (op.x.type,) == op.infer() else None


# index (full c) -> full c      (masked: if what it fills in is c as well)
def index_of_full(s: _Sweep, op: Op) -> Op | None:
    assert isinstance(op, Index)
    inner = s.made.get(op.x)
    if isinstance(inner, Full) and (not op.mask or _bits(op.fill) == _bits(inner.value)):
        return Full(inner.value, inner.dtype, op.shape)
    return None


# T(x) is x if x is T, but bf16(x), which is there to keep a rounding;
# T(wide(x)) is x if x is T and wide holds all of T
def cast_back(s: _Sweep, op: Op) -> Value | None:
    assert isinstance(op, Cast)
    if dtype_of(op.x.type) == op.dtype:
        return None if op.dtype is BF16 else op.x
    inner = s.made.get(op.x)
    if isinstance(inner, Cast) and dtype_of(inner.x.type) == op.dtype:
        return inner.x if (op.dtype.name, inner.dtype.name) in _EXACT else None
    return None


# T(full c) -> full T(c)
def cast_of_full(s: _Sweep, op: Op) -> Op | None:
    assert isinstance(op, Cast)
    inner = s.made.get(op.x)
    if not isinstance(inner, Full):
        return None
    held = np.asarray(inner.value, inner.dtype.numpy)
    return Full(cast(held, inner.dtype, op.dtype).item(), op.dtype, inner.shape)


# f(x, full c) -> f(x, c)
def map_of_full(s: _Sweep, op: Op) -> Op | None:
    assert isinstance(op, Map)
    fulls = [v for v in op.args if isinstance(s.made.get(v), Full)]
    rest = [v for v in op.args if isinstance(v.type, TensorType) and v not in fulls]
    if not fulls or not rest:
        return None
    return op.map({v: s.scalar(v) for v in fulls})


# x * 1 -> x,  x / 1 -> x
def map_by_one(s: _Sweep, op: Op) -> Value | None:
    match op:
        case Map("mul" | "div", (x, y)) if x.type == op.results[0].type:
            one = s.made.get(y)
            return x if isinstance(one, Const | Full) and one.value == 1 else None
    return None


# concat x -> x
def concat_of_one(s: _Sweep, op: Op) -> Value | None:
    assert isinstance(op, Concat)
    return op.xs[0] if len(op.xs) == 1 else None


# reduce x over no axes -> x
def reduce_over_nothing(s: _Sweep, op: Op) -> Value | None:
    assert isinstance(op, Reduce)
    return op.x if not op.axes else None


def _bits(x: float | int | bool) -> tuple[type, str]:
    return type(x), repr(x)


RULES: dict[type[Op], tuple[Rule, ...]] = {
    Index: (index_of_full, index_of_index, identity_index),
    Cast: (cast_back, cast_of_full),
    Map: (map_by_one, map_of_full),
    Concat: (concat_of_one,),
    Reduce: (reduce_over_nothing,),
}


def open_composites(program: Func, keep: Callable[[Composite], bool]) -> Func:
    """Every composite as its library call, if `keep` says so, or as its body."""
    values: dict[Value, Value] = {}
    ops: list[Op] = []
    for op in program.body.ops:
        (op,) = substitute([op], values)
        if not isinstance(op, Composite):
            ops.append(op)
        elif keep(op):
            ops.append(Call(op.target, op.args, op.types, results=op.results))
        else:
            body = list(_opened(op, keep))
            last = body.pop()
            assert isinstance(last, Yield)
            values.update(zip(op.results, last.values, strict=True))
            own = {r for x in body for r in x.results}
            origins.derive((v for v in last.values[:1] if v in own), op.results[:1])
            ops += body
    return program.with_ops(ops)


def _opened(op: Composite, keep: Callable[[Composite], bool]) -> Iterator[Op]:
    inner = open_composites(Func("program", "body", (), (), op.body), keep)
    yield from inner.body.ops

