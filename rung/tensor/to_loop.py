"""Tensor IR to Loop IR: every op on whole tensors becomes a kernel of its own.

    h = a + b : f32[4,8]          ->    kernel add(x0: f32[4,8], x1: f32[4,8]) -> y: f32[4,8]
                                          y[i,j] = x0[i,j] + x1[i,j]
                                        h = kernel add(a, b) : f32[4,8]

Dimensions of size 1 get no axis. Scalar constants, indices (transposes, slices, ..) and widening
casts are computed in the kernels that read them, and are kernels only for library calls. A scatter
is a copy and a kernel that updates the copy in place; `reinplace` removes the copy where legal.
Equal kernels are shared, for the memo of `fuse`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from rung.core import origins
from rung.core.errors import LoweringError
from rung.core.expr import ZERO, Expr, FloorDiv, Mod, factors, is_size, sym
from rung.core.op import Builder, Func, Names, Op, Value, attributes, hashable, made_by
from rung.core.ops import Cast, Const, IndexValue, Map, Sub
from rung.core.rewrite import dead_code
from rung.core.scalar import MONOIDS, SCALARS
from rung.core.types import IndexType, TensorType, axes_of, dtype_of
from rung.loop import ir as loop
from rung.program.ir import Call, Composite, KernelCall, Module, Write, copied
from rung.tensor.ir import (
    Concat,
    Contract,
    Full,
    Gather,
    Index,
    Iota,
    Item,
    Reduce,
    Scan,
    Scatter,
    axis_names,
    shape_of,
)

Grid = tuple[Expr, ...]
LOWERED = (Map, Cast, Reduce, Scan, Index, Contract, Gather, Scatter, Full, Iota, Concat)


def to_loop(*programs: Func, whole: bool = False) -> Module:
    """Programs of Tensor IR ops to programs of kernel calls; LoweringError for a composite. With
    `whole`, contractions read whole tensors, as libraries want them, and nothing through what
    takes a part of one or moves it."""
    lowering = _Lowering(whole)
    return Module(tuple(lowering.program(p) for p in programs), tuple(lowering.kernels.values()))


class _Lowering:
    def __init__(self, whole: bool) -> None:
        self.whole = whole
        self.kernels: dict[Hashable, Func] = {}  # equal ones once
        self.names = Names()
        self.made: dict[Value, Op] = {}  # what may be read through

    def program(self, func: Func) -> Func:
        ops: list[Op] = []
        names = Names([v.name for op in func.body.ops for v in op.results])
        func = dead_code(in_order(func, names)) if self.whole else func
        self.made = made_by(func)
        readers: dict[Value, list[Value]] = {op.dst: [] for op in func.body.ops
                                             if isinstance(op, Write)}
        for v, maker in self.made.items():
            for x in readers.keys() & maker.operands():
                readers[x].append(v)
        for op in func.body.ops:
            if isinstance(op, Write):  # later readers must not read the parameter in its new state
                for v in readers[op.dst]:
                    self.made.pop(v, None)
            if isinstance(op, Composite):
                raise LoweringError(f"the composite {op.target} is neither opened nor a call")
            if isinstance(op, Call) and op.updates:  # it updates copies, as far as anyone knows
                copies = [self.copy(v, Value(names(f"{v.name}_old"), v.type)) for v in op.updates]
                ops += copies
                op = replace(op, updates=tuple(c.results[0] for c in copies))
            if isinstance(op, LOWERED) and isinstance(op.result.type, TensorType):
                ops += self.calls(op, names)
                continue
            ops.append(op)
        return dead_code(func.with_ops(ops))

    def calls(self, op: Op, names: Names) -> list[Op]:
        """The kernel calls that compute `op`."""
        if not isinstance(op, Scatter):
            return [self.call(op, op.results[0])]
        copy = Value(names(f"{op.result.name}_old"), op.result.type)
        origins.derive([copy], op.results)
        grid = axis_names(len(shape_of(op.x)))
        same = Index(op.x, grid, shape_of(op.x), tuple(map(sym, grid)), results=(copy,))
        return [self.call(same, copy), self.call(replace(op, x=copy), op.result)]

    def copy(self, value: Value, result: Value) -> Op:
        """An op that copies `value`, or recomputes it."""
        made = self.made.get(value)
        if isinstance(made, Full):
            return self.call(made, result)
        if isinstance(made, Call) and made.memory == "unwritten":
            return replace(made, results=(result,))
        return copied(value, (result,))

    def call(self, op: Op, result: Value) -> KernelCall:
        maker = _Maker(self.made, self.whole)
        _LOWER[type(op)](maker, op)
        stem = op.fn if isinstance(op, Map) else op.keyword
        made = maker.kernel(stem)
        origins.follow_rest(maker.results(), [result])
        key = result if origins.following() else _structure(made)
        if key not in self.kernels:
            self.kernels[key] = replace(made, name=self.names(stem))
        kernel = self.kernels[key]
        origins.derive([result], maker.absorbed)
        updates = tuple(v for v, p in maker.params.items() if p in maker.updated)
        return KernelCall(kernel.name, tuple(maker.params), updates, (result.type,),
                          results=(result,))


def in_order(func: Func, names: Names) -> Func:
    """What is cut or filled up for contractions is laid out as it was before: they read a transpose
    of it, and two that read it either way read the same tensor."""
    written = {op.dst for op in func.body.ops if isinstance(op, Write)}
    work = _InOrder(made_by(func), names, written)
    for op in func.body.ops:
        if isinstance(op, Contract):
            (a, first), (b, second) = work.plain(op.a), work.plain(op.b)
            op = replace(op, a=a, a_axes=tuple(op.a_axes[n] for n in first),
                         b=b, b_axes=tuple(op.b_axes[n] for n in second))
        elif isinstance(op, Index):
            work.known.setdefault(_form(op), op.result)
        work.ops.append(op)
    return func.with_ops(work.ops)


class _InOrder:
    def __init__(self, made: Mapping[Value, Op], names: Names, written: Container[Value]):
        self.made, self.names, self.written = made, names, written
        self.ops: list[Op] = []
        self.known: dict[Hashable, Value] = {}  # what is there already

    def plain(self, value: Value) -> tuple[Value, Sequence[int]]:
        """The elements of `value` in the order of the tensor that they are of, and which dimension
        of `value` each of its dimensions is. What is read of a parameter that is written is read
        where it was, maybe before that."""
        op = self.made.get(value)
        same = range(len(shape_of(value)))
        if isinstance(op, Cast) and dtype_of(op.x.type).bits < op.dtype.bits:
            x, order = self.plain(op.x)
            return (value, same) if x is op.x else (self.add(Cast(x, op.dtype), value), order)
        order = _order(op) if isinstance(op, Index) and not _turns(op) else ()
        if not order or not isinstance(op, Index) or op.x in self.written:
            return value, same
        moved = replace(op, axes=tuple(op.axes[n] for n in order),
                        shape=tuple(op.shape[n] for n in order), results=())
        key = _form(moved)
        if key not in self.known:
            self.known[key] = self.add(moved, value)
        return self.known[key], order

    def add(self, op: Op, like: Value) -> Value:
        (kind,) = op.infer()
        made = Value(self.names(like.name), kind)
        origins.derive([made], [like])
        self.ops.append(replace(op, results=(made,)))
        return made


def _order(op: Index) -> Sequence[int]:
    """The dimensions of a result in the order in which those of `op.x` run along them; () where
    that is theirs already, or where there is none."""
    along = [[op.axes.index(a) for a in op.axes if a in e.symbols()] for e in op.subs]
    found = [n for n, _ in groupby(a[0] for a in along if a)]
    plain = all(len(a) < 2 for a in along) and sorted(found) == [*range(len(op.axes))]
    return found if plain and found != sorted(found) else ()


def _form(op: Index) -> Hashable:
    """Equal for what reads the same elements of the same tensor, under whatever names of axes."""
    named = dict(zip(op.axes, map(sym, axis_names(len(op.axes))), strict=True))
    subs, mask = (tuple(e.subs(named) for e in es) for es in (op.subs, op.mask))
    return op.x, op.shape, subs, mask, repr(op.fill)


def _structure(kernel: Func) -> Hashable:
    """A key, equal for kernels that a `_Maker` built by equal steps: these determine its names."""
    return (kernel.name, kernel.attrs, *((v.type, v.role) for v in (*kernel.params, *kernel.outs)),
            *((type(op), *(_named(x) for _, x in attributes(op))) for op in kernel.body.ops))


def _named(x: object) -> Hashable:
    if isinstance(x, Value):
        return x.name
    if isinstance(x, tuple):
        return tuple(map(_named, x))
    return hashable(x)


class _Maker:
    """One kernel under construction; `params` maps the program's values to its parameters."""

    def __init__(self, made: dict[Value, Op], whole: bool):
        self.made, self.whole = made, whole
        self.builder = Builder(Names([*axis_names(26), "y"]))
        self.axes: dict[str, Expr] = {}
        self.params: dict[Value, Value] = {}
        self.outs: list[Value] = []
        self.updated: set[Value] = set()
        self.absorbed: list[Value] = []  # what is not read but computed in this kernel

    def kernel(self, name: str) -> Func:
        return loop.make_kernel(name, self.params.values(), self.outs, self.builder, self.axes)

    def grid(self, shape: Sequence[Expr]) -> Grid:
        """A new axis for each dimension that is not 1, and 0 for those that are."""
        free = iter(axis_names(26, tuple(self.axes)))
        subs: list[Expr] = []
        for size in shape:
            if size.is_const(1):
                subs.append(ZERO)
                continue
            name = next(free)
            self.axes[name] = size
            subs.append(sym(name))
        return tuple(subs)

    def one(self, op: Op, hint: str = "") -> Value:
        return self.builder.one(op, hint or op.keyword)

    def param(self, value: Value, role: str = "") -> Value:
        if value not in self.params:
            name = self.builder.names(f"x{len(self.params)}")
            self.params[value] = Value(name, value.type, role)
        return self.params[value]

    def load(self, value: Value, subs: Sequence[Sub], mask: Grid = (),
             fill: float | int | bool = 0) -> Value:
        """An element of a tensor, or the number that a scalar operand is."""
        if isinstance(value.type, TensorType):
            before = len(self.builder.ops)
            through = self.through(value, subs, mask, fill)
            if through is not None:
                self.absorbed.append(value)
                origins.follow_rest(self.results(before), [value])
                return through
            return self.one(loop.Load(self.param(value), tuple(subs), mask, fill), "t")
        if isinstance(value.type, IndexType) and is_size(value.name):
            return self.one(IndexValue(sym(value.name)))
        op = self.made.get(value)
        self.absorbed.append(value)
        if isinstance(op, Item):
            return self.load(op.x, ())
        if not isinstance(op, Const | Map | Cast | IndexValue):
            raise LoweringError(f"{value.name}: {value.type} is no tensor, constant or size")
        return self.one(replace(op.map({v: self.load(v, ()) for v in op.operands()}), results=()))

    def results(self, since: int = 0) -> Iterator[Value]:
        """Of the ops from a place on."""
        return (r for op in self.builder.ops[since:] for r in op.results)

    def varying(self, value: Value, subs: Sequence[Expr], over: Sequence[Expr]) -> Value:
        """An element of a tensor that is folded over some axes, or is an index of an accumulation
        over them, and so has to vary over them: an expanded tensor is read from memory."""
        found = self.load(value, subs)
        if all(axis is ZERO or str(axis) in axes_of(found.type) for axis in over):
            return found
        return self.read(value, subs)

    def multiplied(self, value: Value, subs: Sequence[Expr]) -> Value:
        """An element of a contraction's operand. What moves the elements into another order stays a
        kernel of its own, which `fuse` may put here: libraries want plain operands."""
        made = self.made.get(value)
        match made if self.whole else None:
            case Cast(x, dtype) if dtype_of(x.type).bits < dtype.bits:
                return self.one(Cast(self.multiplied(x, subs), dtype))
            case Index() as op if _turns(op):
                at = dict(zip(op.axes, subs, strict=True))
                found = self.multiplied(op.x, [self.index(e.subs(at)) for e in op.subs])
                origins.follow([found], [value])
                return found
            case Index():
                return self.read(value, subs)
        moves = isinstance(made, Index) and any(
            isinstance(a, FloorDiv | Mod) for e in made.subs for a in factors(e))
        return self.read(value, subs) if moves else self.load(value, subs)

    def read(self, value: Value, subs: Sequence[Sub]) -> Value:
        """An element of a tensor as it is in memory."""
        return self.one(loop.Load(self.param(value), tuple(subs)), "t")

    def through(self, value: Value, subs: Sequence[Sub], mask: Grid,
                fill: float | int | bool) -> Value | None:
        """The element, read through indices and lossless casts, which are free here."""
        match self.made.get(value):
            case Cast(x, dtype) if (dtype_of(x.type) == dtype or dtype_of(x.type).bits < dtype.bits
                                    ) and not (mask and fill != 0):
                return self.one(Cast(self.load(x, subs, mask), dtype))
            case Index() as op if not (op.mask and mask and repr(op.fill) != repr(fill)):
                at = {a: s for a, s in zip(op.axes, subs, strict=True) if isinstance(s, Expr)}
                data = {a: s for a, s in zip(op.axes, subs, strict=True) if isinstance(s, Value)}
                if any(data.keys() & e.symbols() for e in (*op.subs, *op.mask)
                       if not (e in op.subs and e.is_symbol())):
                    return None  # arithmetic on indices that are data
                inner = [data.get(str(e)) or self.index(e.subs(at)) for e in op.subs]
                more = tuple(self.index(e.subs(at)) for e in op.mask)
                return self.load(op.x, inner, (*mask, *more), op.fill if op.mask else fill)
        return None

    def index(self, e: Expr) -> Expr:
        return e.simplify({a: (0, n - 1) for a, n in self.axes.items()})

    def store(self, value: Value, like: TensorType, subs: Sequence[Sub]) -> None:
        """Store into the one output, which is made on the first call."""
        if not self.outs:
            self.outs.append(Value("y", like))
        self.builder.add(loop.Store(self.outs[0], tuple(subs), value))


def _turns(op: Index) -> bool:
    """Whether an index only gives the dimensions of a tensor another order."""
    return (not op.mask and sorted(map(str, op.subs)) == sorted(op.axes)
            and all(shape_of(op.x)[n] is op.shape[op.axes.index(str(e))]
                    for n, e in enumerate(op.subs)))


def _result(op: Op) -> TensorType:
    (kind,) = op.infer()
    assert isinstance(kind, TensorType)
    return kind


def _elementwise(m: _Maker, op: Map | Cast) -> None:
    grid = m.grid(_result(op).shape)
    new = op.map({v: m.load(v, grid) for v in op.operands()})
    m.store(m.one(replace(new, results=())), _result(op), grid)


def _index(m: _Maker, op: Index) -> None:
    grid = m.grid(op.shape)
    at = dict(zip(op.axes, grid, strict=True))
    subs = [m.index(e.subs(at)) for e in op.subs]
    mask = tuple(m.index(e.subs(at)) for e in op.mask)
    m.store(m.load(op.x, subs, mask, op.fill), _result(op), grid)


def _reduce(m: _Maker, op: Reduce) -> None:
    shape = shape_of(op.x)
    kept = m.grid([n for at, n in enumerate(shape) if at not in op.axes])
    folded = m.grid([n for at, n in enumerate(shape) if at in op.axes])
    free, gone = iter(kept), iter(folded)
    value = m.varying(op.x, [next(gone if at in op.axes else free) for at in range(len(shape))],
                      folded)
    for axis in reversed(folded):
        if axis is not ZERO:
            value = _fold(m, op.monoid, value, axis)
    m.store(value, _result(op), kept)


def _fold(m: _Maker, monoid: str, value: Value, axis: Expr) -> Value:
    name = str(axis)
    return m.one(loop.Fold(monoid, (value,), name, m.axes[name], dtype_of(value.type)))


def _scan(m: _Maker, op: Scan) -> None:
    grid = m.grid(shape_of(op.x))
    along = grid[op.dim]
    value = m.varying(op.x, grid, [along])
    if along is ZERO:  # one element, to which the identity is added as to any other
        monoid = MONOIDS[op.monoid]
        first = m.one(Const(monoid.identity(op.acc), op.acc))
        value = m.one(Map(monoid.combine, (first, value)))
    else:
        value = m.one(loop.Fold(op.monoid, (value,), str(along), m.axes[str(along)], op.acc,
                                prefix=True), "cum")
    m.store(value, _result(op), grid)


def _contract(m: _Maker, op: Contract) -> None:
    sizes = op.sizes()
    names = [*op.out_axes, *(a for a in sizes if a not in op.out_axes)]
    at = dict(zip(names, m.grid([sizes[a] for a in names]), strict=True))
    gone = [at[x] for x in names[len(op.out_axes):] if at[x] is not ZERO]
    a = m.multiplied(op.a, [at[x] for x in op.a_axes])
    b = m.multiplied(op.b, [at[x] for x in op.b_axes])
    missing = [axis for axis in gone if str(axis) not in (*axes_of(a.type), *axes_of(b.type))]
    if missing:
        b = m.read(op.b, [at[x] for x in op.b_axes])
    inner = [x for x in op.out_axes if at[x] is not ZERO][-1:]
    if SCALARS[op.product].commutative and set(inner) <= set(op.a_axes) - set(op.b_axes):
        a, b = b, a  # the second operand is the one that varies over the last axis
    if gone:
        axis = str(gone[-1])
        value = m.one(loop.Fold(op.combine, (a, b), axis, m.axes[axis], op.acc, op.product),
                      "contract")
    else:
        value = m.one(Map(op.product, (a, b)))
    for outer in reversed(gone[:-1]):
        value = _fold(m, op.combine, value, outer)
    m.store(value, _result(op), [at[x] for x in op.out_axes])


def _gather(m: _Maker, op: Gather) -> None:
    grid = m.grid(_result(op).shape)
    end = op.dim + len(shape_of(op.at)) - op.batch
    at = m.load(op.at, (*grid[:op.batch], *grid[op.dim:end]))
    m.store(m.load(op.x, (*grid[:op.dim], at, *grid[end:])), _result(op), grid)


def _scatter(m: _Maker, op: Scatter) -> None:
    grid = m.grid(shape_of(op.src))
    into = m.param(op.x, "mutated")
    each = len(shape_of(op.at)) == len(grid)
    along = grid[op.dim:op.dim + 1]
    at = m.varying(op.at, grid if each else along, along)
    value = m.load(op.src, grid)
    m.updated.add(into)
    subs: tuple[Sub, ...] = (*grid[:op.dim], at, *grid[op.dim + 1:])
    m.builder.add(loop.Store(into, subs, value, (), op.combine))


def _full(m: _Maker, op: Full) -> None:
    m.store(m.one(Const(op.value, op.dtype)), _result(op), m.grid(op.shape))


def _iota(m: _Maker, op: Iota) -> None:
    grid = m.grid([op.size])
    m.store(m.one(IndexValue(grid[0])), _result(op), grid)


def _concat(m: _Maker, op: Concat) -> None:
    result, start = _result(op), ZERO
    rest = m.grid([n for at, n in enumerate(result.shape) if at != op.dim])
    for x in op.xs:
        size = shape_of(x)[op.dim]
        (axis,) = m.grid([size])
        value = m.load(x, (*rest[:op.dim], axis, *rest[op.dim:]))
        m.store(value, result, (*rest[:op.dim], axis + start, *rest[op.dim:]))
        start = start + size


_LOWER: dict[type[Op], Callable[..., None]] = {
    Map: _elementwise, Cast: _elementwise, Reduce: _reduce, Scan: _scan, Index: _index,
    Contract: _contract, Gather: _gather, Scatter: _scatter, Full: _full, Iota: _iota,
    Concat: _concat}
