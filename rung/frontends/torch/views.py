"""Table of the overloads that move elements or make them: views, concatenation, creation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rung.core.errors import Unsupported
from rung.core.expr import ZERO, Expr
from rung.core.op import Value
from rung.core.types import BOOL, U8
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
    return _beside(e, parts, dim)


def slice_scatter(e: Emit, x: Value, part: Value, dim: int, start: Size | None, end: Size | None,
                  step: int) -> Value:
    dim = dimension(dim, len(e.shape))
    size, length = e.shape[dim], shape_of(part)[dim]
    first = Expr.of(start or 0) if isinstance(start, int | None) else start
    begin = shapes.slice_start(first, stop_of(end, size), step, size, length)
    return (replaced(e, x, part, dim, begin) if step == 1 else
            interleaved(e, x, part, dim, begin, step))


def interleaved(e: Emit, x: Value, part: Value, dim: int, begin: Expr, step: int) -> Value:
    """`x` with every element of `dim` that is n steps after `begin` that of `part` at n."""
    at = list(axis_exprs(len(e.shape)))
    away = at[dim] - begin
    at[dim] = away // step
    mask = [away, (shape_of(part)[dim] - 1) * step - away, -(away % step)]
    known = e.op(Full(True, BOOL, shape_of(part)))
    hit, new = (e.index(v, e.shape, at, mask) for v in (known, e.value(part, e.dtype)))
    return e.map("where", hit, new, x)


def select_scatter(e: Emit, x: Value, part: Value, dim: int, index: Size) -> Value:
    dim = dimension(dim, len(e.shape))
    if shape_of(part) != (*e.shape[:dim], *e.shape[dim + 1:]):
        raise Unsupported("a part of another shape")
    return replaced(e, x, e.reshape(part, resized(x, dim, 1)), dim, position(index, e.shape[dim]))


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


Edge = Callable[[Emit, Value, int, int, int], Value]


def padded(edges: Edge) -> Build:
    """Widths as for `pad`; what lies beyond an edge is made of the elements inside."""
    def build(e: Emit, x: Value, widths: Sequence[Size]) -> Value:
        for n, (before, after) in enumerate(zip(widths[::2], widths[1::2], strict=True)):
            if e.dtype is BOOL or not isinstance(before, int) or not isinstance(after, int):
                raise Unsupported("padding of bools, or of unknown width")
            x = edges(e, x, len(e.shape) - 1 - n, before, after)
        return x
    return build


def resized(x: Value, dim: int, size: Expr | int) -> list[Expr]:
    """The shape of `x` with another size of `dim`."""
    return [Expr.of(size) if n == dim else s for n, s in enumerate(shape_of(x))]


def along(e: Emit, x: Value, dim: int, size: Expr | int, at: Callable[[Expr], Expr]) -> Value:
    """`size` elements of `dim`, the ones that `at` gives for 0, 1, ..."""
    return e.remap(x, resized(x, dim, size),
                   lambda axes: [at(a) if n == dim else a for n, a in enumerate(axes)])


def reflected(e: Emit, x: Value, dim: int, before: int, after: int) -> Value:
    """c b [a b c d] c b: mirrored, the edge itself once."""
    if before < 0 or after < 0:
        raise Unsupported("negative padding")
    size = shape_of(x)[dim]
    parts = [along(e, x, dim, before, lambda a: before - a), x,
             along(e, x, dim, after, lambda a: size - 2 - a)]
    return _beside(e, parts, dim)


def replicated(e: Emit, x: Value, dim: int, before: int, after: int) -> Value:
    """a a [a b c d] d d; negative widths cut elements off."""
    size = shape_of(x)[dim]
    parts = [along(e, x, dim, max(before, 0), lambda a: ZERO),
             along(e, x, dim, size + min(before, 0) + min(after, 0), lambda a: a - min(before, 0)),
             along(e, x, dim, max(after, 0), lambda a: size - 1)]
    return _beside(e, parts, dim)


def _beside(e: Emit, parts: Sequence[Value], dim: int) -> Value:
    """Side by side, without those that are empty."""
    return joined(e, [p for p in parts if not shape_of(p)[dim].is_const(0)] or parts[:1], dim)


def roll(e: Emit, x: Value, shifts: Sequence[Size], dims: Sequence[int]) -> Value:
    """Elements pushed out at one end come in at the other; without `dims`, of the flat tensor."""
    if not dims:
        flat = roll(e, e.reshape(x, [shapes.product(e.shape)]), shifts, [0])
        return e.reshape(flat, e.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        dim = dimension(dim, len(shape_of(x)))
        size = shape_of(x)[dim].const_value
        if size is None or not isinstance(shift, int):
            raise Unsupported("a roll by or of an unknown size")
        first = -shift % max(size, 1)
        x = _beside(e, [piece(e, x, dim, Expr.of(begin), resized(x, dim, count)) for begin, count
                        in ((first, size - first), (0, first))], dim)
    return x


def unfold(e: Emit, x: Value, dim: int, size: int, step: int) -> Value:
    """Windows of `size` elements, `step` apart; the last dimension runs inside a window."""
    rank = len(shape_of(x))
    if not rank:
        raise Unsupported("windows of a scalar")
    dim = dimension(dim, rank)
    return e.remap(x, e.shape, lambda at: [a * step + at[rank] if n == dim else a
                                           for n, a in enumerate(at[:rank])])


def diagonal(e: Emit, x: Value, offset: int, first: int, second: int) -> Value:
    """The diagonal of two dimensions, as the last one."""
    rank = len(shape_of(x))
    a, b = dimension(first, rank), dimension(second, rank)

    def subs(at: Sequence[Expr]) -> list[Expr]:
        rest = iter(at[:-1])
        place = {a: at[-1] + max(-offset, 0), b: at[-1] + max(offset, 0)}
        return [place[n] if n in place else next(rest) for n in range(rank)]

    return e.remap(x, e.shape, subs)


def embedded(e: Emit, x: Value, offset: int, first: int, second: int) -> Value:
    """The last dimension of `x` as a diagonal of the result's, zeros elsewhere."""
    axes = axis_exprs(len(e.shape))
    a, b = (dimension(d, len(axes)) for d in (first, second))
    rest = [axis for n, axis in enumerate(axes) if n not in (a, b)]
    right = axes[b] - axes[a] - offset
    return e.index(x, e.shape, [*rest, axes[a] if offset >= 0 else axes[b]], [right, -right])


def diagonal_scatter(e: Emit, x: Value, part: Value, offset: int, first: int, second: int) -> Value:
    a, b = (dimension(d, len(e.shape)) for d in (first, second))
    sides = e.shape[a] + min(offset, 0), e.shape[b] - max(offset, 0)
    if min(sides, key=lambda s: s.const_value or 0) is not shape_of(part)[-1]:
        raise Unsupported("a part that may not be as long as the diagonal")
    apart = e.map("sub", e.positions(e.shape, b), e.positions(e.shape, a))
    new = embedded(e, e.value(part, e.dtype), offset, first, second)
    return e.map("where", e.map("eq", apart, offset), new, x)


def eye(e: Emit, *_: object) -> Value:
    return e.value(e.map("eq", e.positions(e.shape, 0), e.positions(e.shape, 1)), e.dtype)


def nearest_places(e: Emit, size: Expr, wanted: Expr, scale: float | None, half: float
                   ) -> Callable[[Expr], Expr]:
    """The source of each element along a dimension that is resampled from `size` to `wanted`:
    floor((i + half) * size / wanted), where torch, who rounds the ratio to float32, finds it too.
    """
    n, m = size.const_value, wanted.const_value
    if n is None or m is None or not n:
        raise Unsupported("resampling of an unknown size")
    if not e.dtype.is_float and e.dtype is not U8:
        raise Unsupported(f"resampling of {e.dtype}")
    step = np.float32(1 / scale) if scale else np.float32(n) / np.float32(m)
    at = np.arange(m, dtype=np.float32) + np.float32(half)
    twice = int(2 * half)
    exact = (2 * np.arange(m) + twice) * n // (2 * m)
    if not np.array_equal(np.minimum((at * step).astype(np.int64), n - 1), exact):
        raise Unsupported(f"resampling from {n} to {m} in float32")
    return lambda a: ((2 * a + twice) * n // (2 * m)).simplify({str(a): (0, m - 1)})


def nearest(half: float) -> Build:
    """Each element from the nearest one, by dimensions from 2 on."""
    def build(e: Emit, x: Value, size: object, *scales: float | None) -> Value:
        places = [nearest_places(e, n, m, s, half) for n, m, s in
                  zip(shape_of(x)[2:], e.shape[2:], scales, strict=True)]
        return e.remap(x, e.shape, lambda at: [
            *at[:2], *(f(a) for f, a in zip(places, at[2:], strict=True))])
    return build


def nearest_backward(half: float) -> Build:
    """The sum over the elements that came from each, for sizes that divide."""
    def build(e: Emit, grad: Value, size: object, source: object, *scales: float | None) -> Value:
        g, split = e.operand(grad, e.dtype), list(e.shape[:2])
        for n, m, s in zip(e.shape[2:], shape_of(grad)[2:], scales, strict=True):
            nearest_places(e, n, m, s, half)
            if m % n is not ZERO:
                raise Unsupported(f"resampling from {n} to {m}")
            split += [n, m // n]
        return e.finish(e.reduce("add", e.reshape(g, split), range(3, len(split), 2)))
    return build


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
    if isinstance(value, Expr | Value):
        return e.expand(e.value(value, e.dtype), e.shape)
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
NEAREST = {"upsample_nearest": 0.0, "_upsample_nearest_exact": 0.5}
SCALES = {1: "float? scales=None", 2: "float? scales_h=None, float? scales_w=None",
          3: "float? scales_d=None, float? scales_h=None, float? scales_w=None"}
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
    "aten::unfold(Tensor(a) self, int dimension, int size, int step) -> Tensor(a)": unfold,
    "aten::diagonal(Tensor(a) self, int offset=0, int dim1=0, int dim2=1) -> Tensor(a)": diagonal,
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
    "aten::diagonal_scatter(Tensor self, Tensor src, int offset=0, int dim1=0, int dim2=1) "
    "-> Tensor": diagonal_scatter,
    "aten::diagonal_copy(Tensor self, int offset=0, int dim1=0, int dim2=1) -> Tensor": diagonal,
    "aten::diag_embed(Tensor self, int offset=0, int dim1=-2, int dim2=-1) -> Tensor": embedded,
    "aten::unfold_copy(Tensor self, int dimension, int size, int step) -> Tensor": unfold,
    "aten::roll(Tensor self, SymInt[1] shifts, int[1] dims=[]) -> Tensor": roll,
    **{f"aten::{name}_pad{n}d(Tensor self, SymInt[{2 * n}] padding) -> Tensor": padded(edges)
       for name, edges in (("reflection", reflected), ("replication", replicated))
       for n in (1, 2, 3)},
    **{f"aten::{name}{n}d(Tensor self, SymInt[{n}] output_size, {scales}) -> Tensor": nearest(half)
       for name, half in NEAREST.items() for n, scales in SCALES.items()},
    **{f"aten::{name}{n}d_backward(Tensor grad_output, SymInt[{n}] output_size, "
       f"SymInt[{n + 2}] input_size, {scales}) -> Tensor": nearest_backward(half)
       for name, half in NEAREST.items() for n, scales in SCALES.items()},
    "aten::copy(Tensor self, Tensor src, bool non_blocking=False) -> Tensor":
        lambda e, x, source, *_: e.expand(e.value(source, e.dtype), e.shape),
    f"aten::eye(SymInt n, *, {LIKE}) -> Tensor": eye,
    f"aten::eye.m(SymInt n, SymInt m, *, {LIKE}) -> Tensor": eye,
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
