"""Axes split where a reshape divides them, and merged where no access distinguishes them.

    y[i,j] = x[i//64,i%64,j]       split ->  y[64*i+k,j] = x[i,k,j]
    y[i,j] = relu(x[i,j])          merge ->  y[i] = relu(x[i])        # i 4096, x: f32[4096]

Splitting makes every subscript affine if the sizes divide; `fuse` does it at each step, so that no
contraction runs over (h*d) with an operand that depends on h. Merging comes last: an axis pair that
every buffer accesses only as n*i + j becomes one axis, and buffers get fewer dimensions (the same
contiguous memory). Sizes may be symbolic. A fold over such a pair is one fold, which reassociates:

    t = fold add x[i,j] over j 64   merge ->   s = fold add x[i] over i 4096
    s = fold add t over i 64
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import prod

from rung.core.expr import ONE, ZERO, Bounds, Expr, FloorDiv, Mod, Sym, is_size, sym
from rung.core.op import Func, Op, Value, uses
from rung.core.ops import IndexValue, Sub
from rung.core.types import TensorType
from rung.loop.emit import Copier, Emitter, rebuilt, shape
from rung.loop.ir import Fold, Load, Store, extents_of, folds, reductions

# --- splitting

def split_axes(func: Func) -> Func:
    """Every axis that occurs as i // n or i % n, with n a divisor of its extent, is two axes."""
    for _ in range(8):
        found = _wanted_split(func)
        if found is None:
            return func
        func = split_axis(func, *found)
    return func


def _wanted_split(func: Func) -> tuple[str, Expr] | None:
    """(axis, n): an axis of extent m*n to be split as n*outer + inner."""
    extents = extents_of(func)
    folded = {op.axis for op in folds(func)}
    for e in expressions(func.body.ops):
        for division in divisions(e):
            for coef, mono in division.num.terms:
                name = mono[0].name if len(mono) == 1 and isinstance(mono[0], Sym) else ""
                if name not in extents or name in folded or coef < 0 or (
                        division.den % coef is not ZERO):
                    continue
                n = division.den // coef
                if n is not ONE and n is not extents[name] and extents[name] % n is ZERO:
                    return name, n
    return None


def split_axis(func: Func, axis: str, n: Expr) -> Func:
    """`axis` as n*outer + inner, where n divides its extent; a monoid's fold over it becomes
    two."""
    extents = extents_of(func)
    sizes = {a: e for a, e in extents.items() if a != axis}
    outer = _fresh(axis, extents)
    inner = _fresh(axis, {**extents, outer: n})
    sizes |= {outer: extents[axis] // n, inner: n}
    return rebuilt(func, {axis: sym(outer) * n + sym(inner)}, sizes,
                   partial(_Splitting, halves={axis: (inner, outer)}))


@dataclass
class _Splitting(Copier):
    """Copies with an axis as its `halves`, the inner one first."""

    halves: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def op(self, op: Op) -> tuple[Value, ...]:
        if not (isinstance(op, Fold) and op.plain and op.axis in self.halves):
            return super().op(op)
        states = tuple(self.values[v] for v in op.args)
        for axis in self.halves[op.axis]:
            new = replace(op, args=states, axis=axis, extent=self.out.axes[axis], results=())
            states = self.out.add(new, *(r.name for r in op.results))
        self.values.update(zip(op.results, states, strict=True))
        return states


def _fresh(axis: str, taken: Iterable[str]) -> str:
    stem = axis.rstrip("0123456789")
    return next(name for k in range(1, 99) if (name := f"{stem}{k}") not in taken)


def expressions(ops: Iterable[Op]) -> Iterator[Expr]:
    """All index expressions of a kernel's ops."""
    for op in ops:
        match op:
            case Load() | Store():
                yield from (s for s in op.subs if isinstance(s, Expr))
                yield from op.mask
            case IndexValue():
                yield op.expr


def divisions(e: Expr) -> Iterator[FloorDiv | Mod]:
    """The `//` and `%` in an expression, innermost first."""
    for _, mono in e.terms:
        for division in mono:
            if isinstance(division, FloorDiv | Mod):
                yield from divisions(division.num)
                yield division


# --- flattening

def flatten_buffers(func: Func) -> Func:
    """Buffers without dimensions of size 1 (unless data-dependent: an update varies over the axes
    of its subscripts), and with neighbouring dimensions merged where that removes a division from
    the subscripts: x[i//16,i%16] of f32[4,16] is x[i] of f32[64]."""
    accesses: dict[Value, list[Load | Store]] = {}
    for op in func.body.ops:
        if isinstance(op, Load | Store):
            accesses.setdefault(op.buf, []).append(op)
    new: dict[int, tuple[Sub, ...]] = {}
    buffers: dict[Value, Value] = {}
    bounds = {a: (0, n - 1) for a, n in extents_of(func).items()}
    for buf, ops in accesses.items():
        assert isinstance(buf.type, TensorType)
        if buf.type.strides is not None:
            continue
        flat, subs = _flatten(list(buf.type.shape), [list(op.subs) for op in ops], bounds)
        if len(flat) < len(buf.type.shape):
            buffers[buf] = replace(buf, type=TensorType(buf.type.dtype, tuple(flat)))
            new |= {id(op): tuple(s) for op, s in zip(ops, subs, strict=True)}
    return _redeclared(func, buffers, new) if buffers else func


def _flatten(sizes: list[Expr], subs: list[list[Sub]], bounds: Bounds) -> (
        tuple[list[Expr], list[list[Sub]]]):
    """Sizes and each access's subscripts, with dimensions dropped or melted."""
    kept = [n for n, size in enumerate(sizes) if not size.is_const(1)
            or any(isinstance(s[n], Value) for s in subs)] or [0][:len(sizes)]
    sizes, subs = [sizes[n] for n in kept], [[s[n] for n in kept] for s in subs]
    while run := _run(sizes, subs, bounds):
        at, end, joined = run
        sizes[at:end] = [prod(sizes[at:end], start=ONE)]
        for s, e in zip(subs, joined, strict=True):
            s[at:end] = [e]
    return sizes, subs


def _run(sizes: list[Expr], subs: list[list[Sub]], bounds: Bounds
         ) -> tuple[int, int, list[Expr]] | None:
    """The shortest range of dimensions that each access can subscript as one: start, end,
    subscripts."""
    for count in range(2, len(sizes) + 1):
        for at in range(len(sizes) - count + 1):
            span = slice(at, at + count)
            joined = [e for s in subs if (e := _joined(s[span], sizes[span], bounds)) is not None]
            if len(joined) == len(subs):
                return at, at + count, joined
    return None


def _joined(subs: list[Sub], sizes: list[Expr], bounds: Bounds) -> Expr | None:
    """Subscripts as one without division; None if there was no division, or one remains."""
    plain = [s for s in subs if isinstance(s, Expr)]
    if len(plain) < len(subs) or not any(d for s in plain for d in divisions(s)):
        return None
    e = plain[0]
    for sub, size in zip(plain[1:], sizes[1:], strict=True):
        e = e * size + sub
    e = e.simplify(bounds)
    return None if any(divisions(e)) else e


def _redeclared(func: Func, buffers: dict[Value, Value],
                subs: dict[int, tuple[Sub, ...]]) -> Func:
    """`func` over other buffers; `subs` are the new subscripts by op. A value's axes are in the
    order of its subscripts, so types are inferred again."""
    values, ops = dict(buffers), list[Op]()
    for op in func.body.ops:
        new = op.map(values)
        if isinstance(new, Load | Store) and id(op) in subs:
            new = new.with_fields(subs=subs[id(op)])
        results = tuple(r if r.type == t else replace(r, type=t)
                        for r, t in zip(op.results, new.infer(), strict=True))
        values.update(zip(op.results, results, strict=True))
        ops.append(new.with_fields(results=results))
    func = func.with_ops(ops)
    return replace(func, params=tuple(buffers.get(v, v) for v in func.params),
                   outs=tuple(buffers.get(v, v) for v in func.outs))


# --- merging

def merge_axes(func: Func) -> Func:
    """Pairs of axes that are contiguous in every access become one axis, in flat buffers."""
    func = flatten_buffers(func)
    for _ in range(8):
        for outer, inner in _pairs(func):
            flat = _merged(func, outer, inner)
            if flat is not None:
                func = flat
                break
        else:
            return func
    return func


def _pairs(func: Func) -> Iterator[tuple[str, str]]:
    """Axes in neighbouring dimensions of the first store, or in one as n*i + j, and those that one
    fold after the other runs over."""
    stores = [op for op in func.body.ops if isinstance(op, Store)]
    axes = [a for sub in stores[0].subs if isinstance(sub, Expr) for a in by_stride(sub)]
    yield from pairwise(axes)
    for first, last in _chained(func).items():
        yield first.axis, last.axis
        yield last.axis, first.axis


def _chained(func: Func) -> dict[Fold, Fold]:
    """For each fold whose only reader is a fold of the same monoid, that reader."""
    readers, found = uses(func.body), dict[Fold, Fold]()
    for op in reductions(func):
        match readers.get(op.results[0]):
            case [Fold(op.carrier, acc=op.acc) as last] if last.plain:
                found[op] = last
    return found


def by_stride(sub: Expr) -> list[str]:
    """The axes of an affine subscript, the one of largest coefficient first (as printed)."""
    return [mono[0].name for _, mono in sub.terms
            if isinstance(mono[0], Sym) and not is_size(mono[0].name)]


def _merged(func: Func, outer: str, inner: str) -> Func | None:
    """The kernel with `outer`, `inner` as one axis; None if some op distinguishes them."""
    extents, pair = extents_of(func), {outer, inner}
    chained = {op: last for op, last in _chained(func).items() if {op.axis, last.axis} == pair}
    last = set(chained.values())
    nests = [op.nest for op in func.body.ops if not isinstance(op, Load) and op not in last]
    if any((outer in nest) != (inner in nest) for nest in nests if nest):
        return None
    if any(op.axis in pair and op not in chained and op not in last for op in folds(func)):
        return None
    if any(isinstance(op, IndexValue) and pair & op.expr.symbols() for op in func.body.ops):
        return None
    flat = _Flatten(func, outer, inner, extents[inner], chained)
    return flat.run() if flat.possible() else None


class _Flatten:
    """Merges one pair of axes: `dims` has for each buffer the dimensions that are merged."""

    def __init__(self, func: Func, outer: str, inner: str, n: Expr,
                 folds: Mapping[Fold, Fold]):
        self.func, self.outer, self.inner, self.n, self.folds = func, outer, inner, n, folds
        self.dims: dict[Value, int | None] = {}

    def possible(self) -> bool:
        return all(self.fits(op) for op in self.func.body.ops if isinstance(op, Load | Store))

    def fits(self, op: Load | Store) -> bool:
        """Whether both axes are alone in adjacent dimensions, or in one as n*i + j."""
        if any(isinstance(s, Value) for s in op.subs) or op.mask:
            apart = not {self.outer, self.inner} & set(op.nest)
            return apart and self.dims.setdefault(op.buf, None) is None
        places = [n for n, s in enumerate(op.subs) if isinstance(s, Expr)
                  and {self.outer, self.inner} & s.symbols()]
        at = self.place(op, places)
        if at is False:
            return False
        return self.dims.setdefault(op.buf, at) == at

    def place(self, op: Load | Store, places: list[int]) -> int | bool | None:
        """The first of two dimensions to melt; None for no change of shape; False: impossible."""
        i, j = sym(self.outer), sym(self.inner)
        subs = op.subs
        if not places:
            return None
        if len(places) == 1:
            e = subs[places[0]]
            assert isinstance(e, Expr)
            a, b = e.coefficient(self.outer), e.coefficient(self.inner)
            return None if a is not None and b is not None and a is b * self.n else False
        assert isinstance(op.buf.type, TensorType)
        if op.buf.type.strides is not None:
            return False
        first, second = places[0], places[-1]
        whole = len(places) == 2 and subs[first] is i and subs[second] is j
        between = all(n.is_const(1) for n in shape(op.buf)[first + 1:second])
        return first if whole and between and shape(op.buf)[second] is self.n else False

    def run(self) -> Func:
        func, extents = self.func, extents_of(self.func)
        buffers = {v: self.buffer(v) for v in (*func.params, *func.outs)}
        sizes = {a: e * self.n if a == self.outer else e for a, e in extents.items()
                 if a != self.inner}
        out = Emitter(sizes, [v.name for v in buffers])
        copier = _Melting(out, {self.inner: ZERO}, dict(buffers))
        copier.flat = self
        copier.ops(func.body.ops)
        return out.kernel(func.name, [buffers[v] for v in func.params],
                          [buffers[v] for v in func.outs])

    def buffer(self, v: Value) -> Value:
        at = self.dims.get(v)
        if at is None:
            return v
        assert isinstance(v.type, TensorType)
        return replace(v, type=TensorType(v.type.dtype, tuple(self.melt(v, list(shape(v))))))

    def melt(self, v: Value, items: list[Expr]) -> list[Expr]:
        """A shape with the two dimensions (and those of size 1 between) multiplied."""
        at = self.dims[v]
        assert at is not None
        end = next(n for n in range(at + 1, len(items)) if shape(v)[n] is self.n
                   and all(shape(v)[k].is_const(1) for k in range(at + 1, n)))
        return [*items[:at], items[at] * items[end], *items[end + 1:]]


class _Melting(Copier):
    """Copies with `outer` as the merged axis, without `inner`."""

    flat: _Flatten

    def op(self, op: Op) -> tuple[Value, ...]:
        if op not in self.flat.folds.values():
            return super().op(op)
        values = tuple(self.values[v] for v in op.operands())  # what was folded over both
        self.values.update(zip(op.results, values, strict=True))
        return values

    def _moved(self, op: Op) -> Op:
        if isinstance(op, Fold) and op in self.flat.folds:
            outer = self.flat.outer
            return op.map(self.values).with_fields(axis=outer, extent=self.out.axes[outer])
        if not isinstance(op, Load | Store):
            return super()._moved(op)
        subs = self.melted(op)
        if isinstance(op, Load):
            return op.with_fields(buf=self.values[op.buf], subs=subs)
        return op.with_fields(buf=self.values[op.buf], subs=subs, value=self.values[op.value])

    def melted(self, op: Load | Store) -> tuple[Sub, ...]:
        flat, at = self.flat, self.flat.dims.get(op.buf)
        if at is None:  # n*i + j inside one subscript: the merged axis takes j's factor
            return tuple(self.values[s] if isinstance(s, Value) else self.inside(s)
                         for s in op.subs)
        end = next(n for n, s in enumerate(op.subs) if s is sym(flat.inner))
        return (*op.subs[:at], sym(flat.outer), *op.subs[end + 1:])

    def inside(self, e: Expr) -> Expr:
        coef = e.coefficient(self.flat.inner)
        if coef is None or coef is ZERO:
            return e
        return e.without(self.flat.inner).without(self.flat.outer) + coef * sym(self.flat.outer)
