"""Table of the overloads that move elements or make them: views, concatenation, creation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rung.core.errors import Unsupported
from rung.core.expr import ZERO, Expr
from rung.core.op import Value
from rung.frontends.torch import shapes
from rung.frontends.torch.emit import Emit, Number, Operand, axis_exprs, dimension
from rung.tensor.ir import Concat, Full, Iota, shape_of

Build = Callable[..., Value | tuple[Value, ...]]
Size = int | Expr
MAX_PARTS = 32  # of a concatenation; each is a loop nest and a buffer of its kernel


def reshape(e: Emit, x: Value, *_: object) -> Value:
    return e.reshape(x, e.shape)


def expand(e: Emit, x: Value, *_: object) -> Value:
    return e.expand(x, e.shape)


def permute(e: Emit, x: Value, dims: Sequence[int]) -> Value:
    order = [dimension(d, len(dims)) for d in dims]
    return e.remap(x, e.shape, lambda at: [at[order.index(n)] for n in range(len(order))])


def transpose(e: Emit, x: Value, first: int, second: int) -> Value:
    rank = len(shape_of(x))
    order = list(range(rank))
    a, b = dimension(first, rank), dimension(second, rank)
    if rank:
        order[a], order[b] = order[b], order[a]
    return permute(e, x, order)


def t(e: Emit, x: Value) -> Value:
    return transpose(e, x, 0, 1) if len(e.shape) == 2 else x


def piece(e: Emit, x: Value, dim: int, begin: Expr, shape: Sequence[Expr], step: int = 1) -> Value:
    """The elements begin, begin + step, ... of `dim`."""
    return e.remap(x, shape, lambda at: [begin + a * step if n == dim else a
                                         for n, a in enumerate(at)])


def slice_(e: Emit, x: Value, dim: int, start: Size | None, end: Size | None,
           step: int) -> Value:
    dim = dimension(dim, len(e.shape))
    size = shape_of(x)[dim]
    begin = shapes.slice_start(Expr.of(start or 0) if isinstance(start, int | None) else start,
                               stop_of(end, size), step, size, e.shape[dim])
    return piece(e, x, dim, begin, e.shape, step)


def stop_of(end: Size | None, size: Expr) -> Expr:
    """Where a slice ends; no end, and torch's largest integer, are `size`."""
    if end is None or (isinstance(end, int) and end >= 2**62):
        return size
    return Expr.of(end) + size if isinstance(end, int) and end < 0 else Expr.of(end)


def position(index: Size, size: Expr) -> Expr:
    return Expr.of(index) + size if isinstance(index, int) and index < 0 else Expr.of(index)


def pick(e: Emit, x: Value, dim: int, at: Expr) -> Value:
    """x[.., at, ..] without dimension `dim`."""
    shape = shape_of(x)
    return e.remap(x, (*shape[:dim], *shape[dim + 1:]),
                   lambda axes: [*axes[:dim], at, *axes[dim:]])


def select(e: Emit, x: Value, dim: int, index: Size) -> Value:
    dim = dimension(dim, len(shape_of(x)))
    return pick(e, x, dim, position(index, shape_of(x)[dim]))


def unbind(e: Emit, x: Value, dim: int) -> tuple[Value, ...]:
    return tuple(select(e, x, dim, n) for n in range(len(e.types)))


def split(e: Emit, x: Value, sizes: object, dim: int) -> tuple[Value, ...]:
    """The parts that the result types say; their sizes add up to the whole."""
    dim = dimension(dim, len(shape_of(x)))
    begin, parts = ZERO, []
    for n in range(len(e.types)):
        parts.append(piece(e, x, dim, begin, e.result(n).shape))
        begin = begin + e.result(n).shape[dim]
    return tuple(parts)


def cat(e: Emit, xs: Sequence[Value], dim: int) -> Value:
    """Side by side; empty vectors, which torch takes beside any shape, are left out."""
    parts = [e.value(x, e.dtype) for x in xs
             if len(shape_of(x)) == len(e.shape) and not _is_legacy_empty(x, e)]
    return joined(e, parts, dimension(dim, len(e.shape)))


def _is_legacy_empty(x: Value, e: Emit) -> bool:
    return len(e.shape) > 1 and [s.const_value for s in shape_of(x)] == [0]


def joined(e: Emit, parts: Sequence[Value], dim: int) -> Value:
    if len(parts) > MAX_PARTS:
        raise Unsupported(f"a concatenation of {len(parts)} parts")
    return parts[0] if len(parts) == 1 else e.op(Concat(tuple(parts), dim))


def stack(e: Emit, xs: Sequence[Value], dim: int) -> Value:
    dim = dimension(dim, len(e.shape))
    shape = [Expr.of(1) if n == dim else s for n, s in enumerate(e.shape)]
    return joined(e, [e.reshape(e.value(x, e.dtype), shape) for x in xs], dim)


def replaced(e: Emit, x: Value, part: Value, dim: int, begin: Expr) -> Value:
    """`x` with the elements of `dim` from `begin` on replaced by `part`."""
    shape = list(shape_of(x))
    end = begin + shape_of(part)[dim]
    before, after = [*shape], [*shape]
    before[dim], after[dim] = begin, shape[dim] - end
    parts = [piece(e, x, dim, ZERO, before), e.value(part, e.dtype), piece(e, x, dim, end, after)]
    return joined(e, [p for p in parts if not shape_of(p)[dim].is_const(0)] or parts[:1], dim)


def slice_scatter(e: Emit, x: Value, part: Value, dim: int, start: Size | None, end: Size | None,
                  step: int) -> Value:
    if step != 1:
        raise Unsupported("a step between the written elements")
    dim = dimension(dim, len(e.shape))
    size, length = e.shape[dim], shape_of(part)[dim]
    first = Expr.of(start or 0) if isinstance(start, int | None) else start
    return replaced(e, x, part, dim, shapes.slice_start(first, stop_of(end, size), 1, size,
                                                        length))


def select_scatter(e: Emit, x: Value, part: Value, dim: int, index: Size) -> Value:
    dim = dimension(dim, len(e.shape))
    shape = [Expr.of(1) if n == dim else s for n, s in enumerate(e.shape)]
    return replaced(e, x, e.reshape(part, shape), dim, position(index, e.shape[dim]))


def pad(e: Emit, x: Value, widths: Sequence[Size], value: Number) -> Value:
    """Widths are (before, after) of the last dimension, then of the one before it, ..."""
    before = [ZERO] * len(e.shape)
    for n, width in enumerate(widths[::2]):
        before[len(e.shape) - 1 - n] = Expr.of(width)
    source = shape_of(x)
    moved = [n for n, size in enumerate(source)
             if e.shape[n] is not size or not before[n].is_const(0)]
    at = [a - b for a, b in zip(axis_exprs(len(e.shape)), before, strict=True)]
    mask = [bound for n in moved for bound in (at[n], source[n] - 1 - at[n])]
    return e.index(x, e.shape, at, mask, e.literal(value, e.dtype))


def flip(e: Emit, x: Value, dims: Sequence[int]) -> Value:
    turned = {dimension(d, len(e.shape)) for d in dims}
    return e.remap(x, e.shape, lambda at: [e.shape[n] - 1 - a if n in turned else a
                                           for n, a in enumerate(at)])


def repeat(e: Emit, x: Value, counts: Sequence[Size]) -> Value:
    """Copies side by side, `counts` of them in each dimension."""
    source = shape_of(x)
    lead = len(counts) - len(source)
    return e.remap(x, e.shape, lambda at: [
        a if size is e.shape[lead + n] else a % size
        for n, (a, size) in enumerate(zip(at[lead:], source, strict=True))])


def triangle(lower: bool) -> Build:
    """The elements on and below (or above) a diagonal, zeros elsewhere."""
    def build(e: Emit, x: Value, diagonal: Size) -> Value:
        axes = axis_exprs(len(e.shape))
        above = axes[-1] - axes[-2] - diagonal
        return e.index(x, e.shape, axes, [-above if lower else above])
    return build


def full(e: Emit, value: Operand) -> Value:
    """The result's shape, filled with one number."""
    if isinstance(value, Expr):
        return e.map("add", full(e, 0), value)
    if isinstance(value, Value):
        raise Unsupported("a fill that is a tensor")
    return e.op(Full(e.literal(value, e.dtype), e.dtype, e.shape))


def filled(value: Number) -> Build:
    return lambda e, *_: full(e, value)


def arange(e: Emit, start: Operand, end: Operand, step: Operand = 1) -> Value:
    """start + step * (0, 1, ...), of integers."""
    if isinstance(step, float) or not isinstance(start, int):
        raise Unsupported("a range that is not over integers")
    at = e.op(Iota(e.shape[0]))
    if step != 1:
        at = e.map("mul", at, step)
    if start != 0:
        at = e.map("add", at, start)
    return e.value(at, e.dtype)


LIKE = ("ScalarType? dtype=None, Layout? layout=None, Device? device=None, "
        "bool? pin_memory=None")
VIEWS: dict[str, Build] = {
    "aten::view(Tensor(a) self, SymInt[] size) -> Tensor(a)": reshape,
    "aten::_unsafe_view(Tensor self, SymInt[] size) -> Tensor": reshape,
    "aten::reshape(Tensor(a) self, SymInt[] shape) -> Tensor(a)": reshape,
    "aten::_reshape_alias(Tensor(a) self, SymInt[] size, SymInt[] stride) -> Tensor(a)": reshape,
    "aten::squeeze(Tensor(a) self) -> Tensor(a)": reshape,
    "aten::squeeze.dim(Tensor(a) self, int dim) -> Tensor(a)": reshape,
    "aten::squeeze.dims(Tensor(a) self, int[] dim) -> Tensor(a)": reshape,
    "aten::unsqueeze(Tensor(a) self, int dim) -> Tensor(a)": reshape,
    "aten::expand(Tensor(a) self, SymInt[] size, *, bool implicit=False) -> Tensor(a)": expand,
    "aten::permute(Tensor(a) self, int[] dims) -> Tensor(a)": permute,
    "aten::transpose.int(Tensor(a) self, int dim0, int dim1) -> Tensor(a)": transpose,
    "aten::t(Tensor(a) self) -> Tensor(a)": t,
    "aten::slice.Tensor(Tensor(a) self, int dim=0, SymInt? start=None, SymInt? end=None, "
    "SymInt step=1) -> Tensor(a)": slice_,
    "aten::select.int(Tensor(a) self, int dim, SymInt index) -> Tensor(a)": select,
    "aten::unbind.int(Tensor(a -> *) self, int dim=0) -> Tensor(a)[]": unbind,
    "aten::split.Tensor(Tensor(a -> *) self, SymInt split_size, int dim=0) -> Tensor(a)[]": split,
    "aten::split_with_sizes(Tensor(a -> *) self, SymInt[] split_sizes, int dim=0) "
    "-> Tensor(a)[]": split,
}
MOVES: dict[str, Build] = {
    "aten::cat(Tensor[] tensors, int dim=0) -> Tensor": cat,
    "aten::stack(Tensor[] tensors, int dim=0) -> Tensor": stack,
    "aten::slice_scatter(Tensor self, Tensor src, int dim=0, SymInt? start=None, "
    "SymInt? end=None, SymInt step=1) -> Tensor": slice_scatter,
    "aten::select_scatter(Tensor self, Tensor src, int dim, SymInt index) -> Tensor":
        select_scatter,
    "aten::constant_pad_nd(Tensor self, SymInt[] pad, Scalar value=0) -> Tensor": pad,
    "aten::repeat(Tensor self, SymInt[] repeats) -> Tensor": repeat,
    "aten::tril(Tensor self, SymInt diagonal=0) -> Tensor": triangle(lower=True),
    "aten::triu(Tensor self, SymInt diagonal=0) -> Tensor": triangle(lower=False),
    "aten::flip(Tensor self, int[] dims) -> Tensor": flip,
    f"aten::full(SymInt[] size, Scalar fill_value, *, {LIKE}) -> Tensor":
        lambda e, size, value, *_: full(e, value),
    f"aten::full_like(Tensor self, Scalar fill_value, *, {LIKE}, "
    "MemoryFormat? memory_format=None) -> Tensor": lambda e, x, value, *_: full(e, value),
    f"aten::scalar_tensor(Scalar s, *, {LIKE}) -> Tensor": lambda e, value, *_: full(e, value),
    f"aten::zeros(SymInt[] size, *, {LIKE}) -> Tensor": filled(0),
    f"aten::ones(SymInt[] size, *, {LIKE}) -> Tensor": filled(1),
    f"aten::new_zeros(Tensor self, SymInt[] size, *, {LIKE}) -> Tensor": filled(0),
    f"aten::new_ones(Tensor self, SymInt[] size, *, {LIKE}) -> Tensor": filled(1),
    f"aten::zeros_like(Tensor self, *, {LIKE}, MemoryFormat? memory_format=None) -> Tensor":
        filled(0),
    f"aten::ones_like(Tensor self, *, {LIKE}, MemoryFormat? memory_format=None) -> Tensor":
        filled(1),
    f"aten::arange(Scalar end, *, {LIKE}) -> Tensor": lambda e, end, *_: arange(e, 0, end),
    f"aten::arange.start(Scalar start, Scalar end, *, {LIKE}) -> Tensor":
        lambda e, start, end, *_: arange(e, start, end),
    f"aten::arange.start_step(Scalar start, Scalar end, Scalar step=1, *, {LIKE}) -> Tensor":
        lambda e, start, end, step, *_: arange(e, start, end, step),
}
