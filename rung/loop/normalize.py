"""Axes split where a reshape divides them, and merged back where nothing tells them apart.

    y[i,j] = x[i//64,i%64,j]       split ->  y[64*i+k,j] = x[i,k,j]
    y[i,j] = relu(x[i,j])          merge ->  y[i] = relu(x[i])        # i 4096, x: f32[4096]

Splitting makes every subscript affine if the sizes divide; `fuse` does it at each step, so that
no contraction runs over (h*d) for what depends on h. Merging comes last: an axis pair of which
every buffer sees only n*i + j becomes one axis, and buffers are declared flatter (the same
contiguous memory). Sizes may be symbolic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from rung.core.expr import ONE, ZERO, Bounds, Expr, FloorDiv, Mod, Sym, is_size, sym
from rung.core.op import Func, Op, Value
from rung.core.ops import IndexValue, Sub
from rung.core.types import TensorType
from rung.loop.emit import Copier, Emitter, rebuilt, shape
from rung.loop.ir import Contract, Fold, Load, Scan, Store, extents_of, op_axes

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
    folded = {op.axis for op in func.body.ops if isinstance(op, Fold | Contract | Scan)}
    for e in expressions(func.body.ops):
        for atom in divisions(e):
            for coef, mono in atom.num.terms:
                name = mono[0].name if len(mono) == 1 and isinstance(mono[0], Sym) else ""
                if name not in extents or name in folded or coef < 0 or (
                        atom.den % coef is not ZERO):
                    continue
                n = atom.den // coef
                if n is not ONE and n is not extents[name] and extents[name] % n is ZERO:
                    return name, n
    return None


def split_axis(func: Func, axis: str, n: Expr) -> Func:
    """`axis` as n*outer + inner, where n divides its extent; a monoid's fold over it is two."""
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
        if not (isinstance(op, Fold) and op.axis in self.halves):
            return super().op(op)
        states = tuple(self.values[v] for v in op.args)
        for axis in self.halves[op.axis]:
            states = self.out.add(Fold(op.carrier, states, axis, self.out.axes[axis], op.acc),
                                  *(r.name for r in op.results))
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
        for atom in mono:
            if isinstance(atom, FloorDiv | Mod):
                yield from divisions(atom.num)
                yield atom


# --- flattening

def flatten_buffers(func: Func) -> Func:
    """Buffers declared without dimensions of size 1 (that follow no data: an update varies over the
    axes of its subscripts), and with neighbouring dimensions as one where that takes a division out
    of the subscripts: x[i//16,i%16] of f32[4,16] is x[i] of f32[64]."""
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
    at = 0
    while at < len(sizes) and len(sizes) > 1:
        if sizes[at].is_const(1) and not any(isinstance(s[at], Value) for s in subs):
            del sizes[at]
            for s in subs:
                del s[at]
            continue
        joined = [_joined(s[at:at + 2], sizes[at:at + 2], bounds) for s in subs]
        if at + 1 < len(sizes) and all(e is not None for e in joined):
            sizes[at:at + 2] = [sizes[at] * sizes[at + 1]]
            for s, e in zip(subs, joined, strict=True):
                assert e is not None
                s[at:at + 2] = [e]
            at = max(at - 1, 0)
            continue
        at += 1
    return sizes, subs


def _joined(pair: list[Sub], sizes: list[Expr], bounds: Bounds) -> Expr | None:
    """Two subscripts as one without division; None when there was none, or one remains."""
    if len(pair) < 2 or not (isinstance(pair[0], Expr) and isinstance(pair[1], Expr)):
        return None
    if not any(divisions(pair[0])) and not any(divisions(pair[1])):
        return None
    e = (pair[0] * sizes[1] + pair[1]).simplify(bounds)
    return None if any(divisions(e)) else e


def _redeclared(func: Func, buffers: dict[Value, Value],
                subs: dict[int, tuple[Sub, ...]]) -> Func:
    """`func` over other buffers; `subs` are the new subscripts by op. The axes of a value come in
    the order of its subscripts, so types are inferred again."""
    values, ops = dict(buffers), list[Op]()
    for op in func.body.ops:
        new = op.map(values)
        if isinstance(new, Load | Store) and id(op) in subs:
            new = replace(new, subs=subs[id(op)])
        results = tuple(r if r.type == t else replace(r, type=t)
                        for r, t in zip(op.results, new.infer(), strict=True))
        values.update(zip(op.results, results, strict=True))
        ops.append(replace(new, results=results))
    func = func.with_ops(ops)
    return replace(func, params=tuple(buffers.get(v, v) for v in func.params),
                   outs=tuple(buffers.get(v, v) for v in func.outs))


# --- merging

def merge_axes(func: Func) -> Func:
    """Pairs of axes that every access sees as one run of memory are one axis, in flat buffers."""
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
    """Axes in neighbouring dimensions of the first store, or in one as n*i + j."""
    stores = [op for op in func.body.ops if isinstance(op, Store)]
    axes = [a for sub in stores[0].subs if isinstance(sub, Expr) for a in by_stride(sub)]
    yield from pairwise(axes)


def by_stride(sub: Expr) -> list[str]:
    """The axes of an affine subscript, the one of largest coefficient first (as printed)."""
    return [mono[0].name for _, mono in sub.terms
            if isinstance(mono[0], Sym) and not is_size(mono[0].name)]


def _merged(func: Func, outer: str, inner: str) -> Func | None:
    """The kernel with `outer`, `inner` as one axis; None when some op tells them apart."""
    extents = extents_of(func)
    nests = [op_axes(op) for op in func.body.ops if not isinstance(op, Load)]
    if any((outer in nest) != (inner in nest) for nest in nests if nest):
        return None
    if any(isinstance(op, Fold | Contract | Scan) and op.axis in (outer, inner)
           for op in func.body.ops):
        return None
    if any(isinstance(op, IndexValue) and {outer, inner} & op.expr.symbols()
           for op in func.body.ops):
        return None
    flat = _Flatten(func, outer, inner, extents[inner])
    return flat.run() if flat.possible() else None


class _Flatten:
    """Merges one pair of axes: `dims` says for each buffer which dimensions melt together."""

    def __init__(self, func: Func, outer: str, inner: str, n: Expr):
        self.func, self.outer, self.inner, self.n = func, outer, inner, n
        self.dims: dict[Value, int | None] = {}

    def possible(self) -> bool:
        return all(self.fits(op) for op in self.func.body.ops if isinstance(op, Load | Store))

    def fits(self, op: Load | Store) -> bool:
        """Whether both axes stand in adjacent dimensions, alone, or in one as n*i + j."""
        if any(isinstance(s, Value) for s in op.subs) or op.mask:
            apart = not {self.outer, self.inner} & set(op_axes(op))
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
    """Copies with `outer` as the merged axis and `inner` gone."""

    flat: _Flatten

    def _moved(self, op: Op) -> Op:
        if not isinstance(op, Load | Store):
            return super()._moved(op)
        subs = self.melted(op)
        if isinstance(op, Load):
            return replace(op, buf=self.values[op.buf], subs=subs)
        return replace(op, buf=self.values[op.buf], subs=subs, value=self.values[op.value])

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
