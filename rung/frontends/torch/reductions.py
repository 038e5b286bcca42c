"""Table of the overloads that reduce and contract, and of the composites made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rung.core.errors import Unsupported
from rung.core.op import Value
from rung.core.types import BOOL, F32, F64, I8, I32, I64, dtype_of
from rung.frontends.torch.emit import Emit, Number, compute_dtype, dimension
from rung.frontends.torch.shapes import product
from rung.tensor.ir import Contract, Full, Scan, shape_of

LONG = 1 << 13  # terms of a sum that are many
Dims = int | Sequence[int] | None
Build = Callable[..., Value | tuple[Value, ...]]


def total(e: Emit, x: Value, dims: Dims = None, keep: bool = False, *_: object) -> Value:
    axes = e.axes(x, dims)
    return narrowed(e, e.reduce("add", terms(e, x, axes), axes, keep))


def mean(e: Emit, x: Value, dims: Dims = None, keep: bool = False, *_: object) -> Value:
    if not e.dtype.is_float:
        raise Unsupported("a mean of integers")
    axes = e.axes(x, dims)
    return e.finish(e.mean(terms(e, x, axes), axes, keep, dtype=compute_dtype(e.dtype)))


def terms(e: Emit, x: Value, axes: Sequence[int]) -> Value:
    """What a sum over `axes` of `x` adds up."""
    return widened(e, e.operand(x, e.dtype), axes)


def plain_total(e: Emit, x: Value, dims: Dims, *_: object) -> Value:
    """A sum in the type of its result, as in a softmax: of terms that are no less than 0."""
    return e.finish(e.reduce("add", e.operand(x, e.dtype), e.axes(x, dims)))


def widened(e: Emit, a: Value, axes: Sequence[int]) -> Value:
    """Terms in float64 where torch's tree of partial sums is much nearer than one sum that runs
    on in float32, for many numbers and for all of a tensor, which costs no time."""
    size = shape_of(a)
    count = product([size[n] for n in axes]).const_value or 0
    far = count >= LONG or len(axes) == len(size)
    return e.summed(a) if dtype_of(a.type) is F32 and far and size else a


def narrowed(e: Emit, x: Value, n: int = 0) -> Value:
    """`x` as result `n`; a float64 value is rounded once."""
    return e.finish(e.value(x, e.result(n).dtype) if dtype_of(x.type) is F64 else x, n)


def prefixes(monoid: str) -> Build:
    """A running sum or product: in float64 for float32, in int64 for integers, as torch has it."""
    def build(e: Emit, x: Value, dim: int, *_: object) -> Value:
        if e.dtype is BOOL:
            raise Unsupported("a running result of bools")
        a = e.operand(x, e.dtype)
        if not shape_of(x):
            return e.finish(a)
        kind = dtype_of(a.type)
        acc = {F32: F32 if e.dtype is not F32 or e.gpu else F64, F64: F64}.get(kind, I64)
        scan = e.op(Scan(monoid, e.value(a, acc), dimension(dim, len(e.shape)), acc))
        return e.finish(e.value(scan, kind))
    return build


def extreme(monoid: str) -> Callable[..., Value]:
    def build(e: Emit, x: Value, dims: Dims = None, keep: bool = False) -> Value:
        axes = e.axes(x, dims)
        if any(shape_of(x)[n].is_const(0) for n in axes):
            raise Unsupported("the extreme of nothing")
        return e.finish(e.reduce(monoid, e.operand(x, e.dtype), axes, keep))
    return build


def both_extremes(e: Emit, x: Value, dim: int | None, keep: bool) -> tuple[Value, Value]:
    return extreme("min")(e, x, dim, keep), extreme("max")(e, x, dim, keep)


def hits(e: Emit, a: Value, best: Value) -> Value:
    """Where `a` is `best`, or a NaN."""
    hit = e.map("eq", a, best)
    return e.map("or", hit, e.map("ne", a, a)) if dtype_of(a.type).is_float else hit


def first_of(e: Emit, a: Value, best: Value, axis: int) -> Value:
    """Where along `axis` the first NaN stands, else the first that is `best`; `axis` stays."""
    size = shape_of(a)[axis]
    narrow = size.const_value is not None and size.const_value < 1 << 31
    dtype = I32 if narrow else I64
    hit = hits(e, a, e.expand(best, shape_of(a)))
    places = e.value(e.positions(shape_of(a), axis), dtype)
    none = e.value((1 << dtype.bits - 1) - 1, dtype)
    return e.value(e.reduce("min", e.map("where", hit, places, none), (axis,), keep=True), I64)


def running_extreme(monoid: str) -> Build:
    """(the extreme so far, the last place where it stands, or a NaN)"""
    def build(e: Emit, x: Value, dim: int) -> tuple[Value, Value]:
        if e.dtype is BOOL or not shape_of(x):
            raise Unsupported("a running extreme of bools, or of a scalar")
        a, axis = e.operand(x, e.dtype), dimension(dim, len(e.shape))
        best = e.op(Scan(monoid, a, axis, dtype_of(a.type)))
        places = e.map("where", hits(e, a, best), e.positions(e.shape, axis), e.value(0, I64))
        return e.finish(best), e.op(Scan("max", places, axis, I64))
    return build


def extreme_at(monoid: str) -> Callable[..., tuple[Value, Value]]:
    """(the extreme along one dimension, the first place where it stands)"""
    def build(e: Emit, x: Value, dim: int, keep: bool) -> tuple[Value, Value]:
        a, axes = e.operand(x, dtype_of(x.type)), e.axes(x, dim)
        if dtype_of(x.type) is BOOL or any(shape_of(x)[n].is_const(0) for n in axes):
            raise Unsupported("the extreme of nothing, or of bools")
        if not axes:
            return x, e.op(Full(0, I64, ()))
        (axis,) = axes
        best = e.reduce(monoid, a, (axis,), keep=True)
        at = first_of(e, a, best, axis)
        kept = shape_of(best) if keep else tuple(n for m, n in enumerate(shape_of(a)) if m != axis)
        return e.value(e.reshape(best, kept), dtype_of(x.type)), e.reshape(at, kept)
    return build


def place_of_extreme(monoid: str) -> Build:
    def build(e: Emit, x: Value, dim: int | None, keep: bool) -> Value:
        if dim is None:
            flat = e.reshape(x, (product(shape_of(x)),))
            return e.reshape(extreme_at(monoid)(e, flat, 0, True)[1], e.shape)
        return extreme_at(monoid)(e, x, dim, keep)[1]
    return build


def product_of(e: Emit, x: Value, dim: int | None = None, keep: bool = False, *_: object) -> Value:
    return e.finish(e.reduce("mul", e.operand(x, e.dtype), e.axes(x, dim), keep))


def count_nonzero(e: Emit, x: Value, dims: Dims) -> Value:
    return e.reduce("add", e.value(e.value(x, BOOL), I64), e.axes(x, dims))


def logsumexp(e: Emit, x: Value, dims: Dims, keep: bool) -> Value:
    """max + log(sum(exp(x - max))), with 0 for a maximum that is infinite."""
    a, axes = e.operand(x, e.dtype), e.axes(x, dims)
    if any(shape_of(x)[n].is_const(0) for n in axes):
        raise Unsupported("logsumexp of nothing")
    top = e.reduce("max", a, axes, keep=True)
    top = e.map("where", e.map("eq", e.map("abs", top), math.inf), e.value(0, dtype_of(a.type)),
                top)
    powers = e.map("exp", e.map("sub", a, e.expand(top, shape_of(a))))
    out = e.map("add", e.map("log", e.reduce("add", powers, axes, keep=True)), top)
    return e.finish(e.reshape(out, e.shape))


def norm(e: Emit, x: Value, order: Number | None, dims: Dims = None, keep: bool = False,
         *_: object) -> Value:
    """(sum |x|^p)^(1/p) for p = 1 and 2, the largest or smallest |x|, or how many are not 0."""
    axes, a = e.axes(x, dims), e.operand(x, e.dtype)
    match float(2 if order is None else order):
        case 2.0:
            wide = widened(e, a, axes)
            square = e.reduce("add", e.map("mul", wide, wide), axes, keep)
            return e.finish(e.map("sqrt", e.value(square, dtype_of(a.type))))
        case 1.0:
            return narrowed(e, e.reduce("add", widened(e, e.map("abs", a), axes), axes, keep))
        case 0.0:
            ones = e.value(e.map("ne", a, 0), dtype_of(a.type))
            return narrowed(e, e.reduce("add", widened(e, ones, axes), axes, keep))
        case p if math.isinf(p) and not any(shape_of(x)[n].is_const(0) for n in axes):
            return e.finish(e.reduce("max" if p > 0 else "min", e.map("abs", a), axes, keep))
    raise Unsupported(f"a norm of order {order}")


def truth(monoid: str) -> Build:
    def build(e: Emit, x: Value, dims: Dims = None, keep: bool = False) -> Value:
        return e.finish(e.reduce(monoid, e.value(x, BOOL), e.axes(x, dims), keep))
    return build


def variance(e: Emit, x: Value, dims: Dims, correction: Number | None, keep: bool
             ) -> tuple[Value, Value]:
    """(variance, mean) over `dims`, in float64 as torch computes them."""
    if not e.dtype.is_float:
        raise Unsupported(f"a variance of {e.dtype}")
    axes = e.axes(x, dims)
    a = e.summed(x)
    centre = e.mean(a, axes, keep=True)
    apart = e.map("sub", a, e.expand(centre, shape_of(a)))
    less = 1 if correction is None else correction
    squares = e.map("mul", apart, apart)
    shape = e.shape
    return e.mean(squares, axes, keep, less), centre if keep else e.reshape(centre, shape)


def var(e: Emit, x: Value, dims: Dims, correction: Number | None, keep: bool) -> Value:
    return narrowed(e, variance(e, x, dims, correction, keep)[0])


def std(e: Emit, x: Value, dims: Dims, correction: Number | None, keep: bool) -> Value:
    return narrowed(e, e.map("sqrt", variance(e, x, dims, correction, keep)[0]))


def std_mean(e: Emit, x: Value, dims: Dims, correction: Number | None, keep: bool
             ) -> tuple[Value, ...]:
    spread, centre = variance(e, x, dims, correction, keep)
    return narrowed(e, e.map("sqrt", spread)), narrowed(e, centre, 1)


def var_mean(e: Emit, x: Value, dims: Dims, correction: Number | None, keep: bool
             ) -> tuple[Value, ...]:
    return tuple(narrowed(e, v, n)
                 for n, v in enumerate(variance(e, x, dims, correction, keep)))


def softmax(log: bool = False, safe: bool = False) -> Build:
    """exp(x - max) / sum, or its logarithm x - max - log(sum); if `safe`, 0 for a row of -inf."""
    def build(e: Emit, x: Value, dim: int, dtype: object) -> Value:
        a = e.operand(x, dtype_of(x.type))
        axes = e.axes(x, dim)
        if any(shape_of(x)[n].is_const(0) for n in axes):
            return e.finish(a)
        top = e.reduce("max", a, axes, keep=True)
        if safe:
            low = e.map("eq", top, -math.inf)
            top = e.map("where", low, e.value(0, dtype_of(top.type)), top)
        away = e.map("sub", a, e.expand(top, e.shape))
        powers = e.map("exp", away)
        whole = e.reduce("add", powers, axes, keep=True)
        if safe:
            whole = e.map("where", low, e.value(1, dtype_of(whole.type)), whole)
        if log:
            return e.finish(e.map("sub", away, e.expand(e.map("log", whole), e.shape)))
        return e.finish(e.map("div", powers, e.expand(whole, e.shape)))
    return build


def softmax_backward(log: bool) -> Build:
    """y (g - sum(g y)), or g - exp(y) sum(g) for the logarithm."""
    def build(e: Emit, grad: Value, y: Value, dim: int, dtype: object) -> Value:
        g, a = (e.operand(v, dtype_of(v.type)) for v in (grad, y))
        axes = e.axes(y, dim)
        terms = g if log else e.map("mul", g, a)
        whole = e.expand(e.reduce("add", terms, axes, keep=True), e.shape)
        if log:
            return e.finish(e.map("sub", g, e.map("mul", e.map("exp", a), whole)))
        return e.finish(e.map("mul", a, e.map("sub", g, whole)))
    return build


def contract(e: Emit, formula: str, a: Value, b: Value) -> Value:
    """A product summed over the axes that the result lacks, `ik,kj->ij`, in the computing type."""
    dtype = dtype_of(a.type)
    if not dtype.is_float:
        raise Unsupported(f"a matrix product of {dtype}")
    return products(e, formula, *(e.operand(v, dtype) for v in (a, b)))


def products(e: Emit, formula: str, x: Value, y: Value) -> Value:
    """That of two values in the computing type."""
    inputs, out = formula.split("->")
    left, right = inputs.split(",")
    return e.op(Contract("add", "mul", x, tuple(left), y, tuple(right), tuple(out),
                         dtype_of(x.type)))


def multiplied(e: Emit, formula: str, a: Value, b: Value) -> Value:
    """A contraction of what torch multiplies: matrices of one type."""
    if dtype_of(a.type) != dtype_of(b.type):
        raise Unsupported("matrices of two types")
    return contract(e, formula, a, b)


def matmul(formula: str) -> Build:
    return lambda e, a, b: e.finish(multiplied(e, formula, a, b))


def int_matmul(e: Emit, a: Value, b: Value) -> Value:
    """Of bytes, exact in i32."""
    if {dtype_of(v.type) for v in (a, b)} != {I8}:
        raise Unsupported("an integer product of other types than i8")
    return products(e, "ik,kj->ij", *(e.value(v, I32) for v in (a, b)))


def added_matmul(formula: str) -> Build:
    """beta x + alpha a @ b, rounded once; with beta = 0 nothing of x counts, NaN neither."""
    def build(e: Emit, x: Value, a: Value, b: Value, beta: Number, alpha: Number) -> Value:
        out = multiplied(e, formula, a, b)
        if alpha != 1:
            out = e.map("mul", out, alpha)
        if beta == 0:
            return e.finish(out)
        first = e.operand(x, e.dtype)
        if beta != 1:
            first = e.map("mul", first, beta)
        return e.finish(e.map("add", out, e.expand(first, e.shape)))
    return build


TYPED = "bool keepdim=False, *, ScalarType? dtype=None"
REDUCTIONS: dict[str, Build] = {
    "aten::sum(Tensor self, *, ScalarType? dtype=None) -> Tensor":
        lambda e, x, dtype: total(e, x),
    f"aten::sum.dim_IntList(Tensor self, int[1]? dim, {TYPED}) -> Tensor": total,
    "prims::sum(Tensor inp, int[]? dims, *, ScalarType? output_dtype=None) -> Tensor": plain_total,
    "aten::mean(Tensor self, *, ScalarType? dtype=None) -> Tensor": lambda e, x, dtype: mean(e, x),
    f"aten::mean.dim(Tensor self, int[1]? dim, {TYPED}) -> Tensor": mean,
    **{f"aten::{name}(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor": prefixes(monoid)
       for name, monoid in (("cumsum", "add"), ("cumprod", "mul"))},
    **{f"aten::cum{n}(Tensor self, int dim) -> (Tensor values, Tensor indices)":
       running_extreme(n) for n in ("max", "min")},
    "aten::amax(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor": extreme("max"),
    "aten::amin(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor": extreme("min"),
    "aten::max(Tensor self) -> Tensor": extreme("max"),
    "aten::min(Tensor self) -> Tensor": extreme("min"),
    "aten::aminmax(Tensor self, *, int? dim=None, bool keepdim=False) -> (Tensor min, Tensor max)":
        both_extremes,
    **{f"aten::{n}.dim(Tensor self, int dim, bool keepdim=False) "
       "-> (Tensor values, Tensor indices)": extreme_at(n) for n in ("max", "min")},
    **{f"aten::arg{n}(Tensor self, int? dim=None, bool keepdim=False) -> Tensor":
       place_of_extreme(n) for n in ("max", "min")},
    "aten::prod(Tensor self, *, ScalarType? dtype=None) -> Tensor":
        lambda e, x, dtype: product_of(e, x),
    "aten::prod.dim_int(Tensor self, int dim, bool keepdim=False, *, ScalarType? dtype=None) "
    "-> Tensor": product_of,
    "aten::count_nonzero(Tensor self, int? dim=None) -> Tensor": count_nonzero,
    "aten::count_nonzero.dim_IntList(Tensor self, int[] dim) -> Tensor": count_nonzero,
    "aten::linalg_vector_norm(Tensor self, Scalar ord=2, int[1]? dim=None, bool keepdim=False, "
    "*, ScalarType? dtype=None) -> Tensor": norm,
    "aten::norm.Scalar(Tensor self, Scalar p=2) -> Tensor": norm,
    "aten::norm.ScalarOpt_dim(Tensor self, Scalar? p, int[1] dim, bool keepdim=False) -> Tensor":
        norm,
    "aten::any(Tensor self) -> Tensor": truth("or"),
    "aten::any.dim(Tensor self, int dim, bool keepdim=False) -> Tensor": truth("or"),
    "aten::any.dims(Tensor self, int[]? dim=None, bool keepdim=False) -> Tensor": truth("or"),
    "aten::all(Tensor self) -> Tensor": truth("and"),
    "aten::all.dim(Tensor self, int dim, bool keepdim=False) -> Tensor": truth("and"),
    "aten::all.dims(Tensor self, int[]? dim=None, bool keepdim=False) -> Tensor": truth("and"),
    "aten::mm(Tensor self, Tensor mat2) -> Tensor": matmul("ik,kj->ij"),
    "aten::bmm(Tensor self, Tensor mat2) -> Tensor": matmul("nik,nkj->nij"),
    "aten::addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) "
    "-> Tensor": added_matmul("ik,kj->ij"),
    "aten::baddbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) "
    "-> Tensor": added_matmul("nik,nkj->nij"),
    "aten::addmv(Tensor self, Tensor mat, Tensor vec, *, Scalar beta=1, Scalar alpha=1) "
    "-> Tensor": added_matmul("ik,k->i"),
    "aten::mv(Tensor self, Tensor vec) -> Tensor": matmul("ik,k->i"),
    "aten::dot(Tensor self, Tensor tensor) -> Tensor": matmul("k,k->"),
}
COMPOSITES: dict[str, Build] = {
    "aten::_int_mm(Tensor self, Tensor mat2) -> Tensor": int_matmul,
    "aten::var.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, "
    "bool keepdim=False) -> Tensor": var,
    "aten::std.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, "
    "bool keepdim=False) -> Tensor": std,
    "aten::var_mean.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, "
    "bool keepdim=False) -> (Tensor, Tensor)": var_mean,
    "aten::std_mean.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, "
    "bool keepdim=False) -> (Tensor, Tensor)": std_mean,
    "aten::logsumexp(Tensor self, int[1] dim, bool keepdim=False) -> Tensor": logsumexp,
    "aten::_softmax(Tensor self, int dim, bool half_to_float) -> Tensor": softmax(),
    "aten::_safe_softmax(Tensor self, int dim, ScalarType? dtype=None) -> Tensor":
        softmax(safe=True),
    "aten::_log_softmax(Tensor self, int dim, bool half_to_float) -> Tensor": softmax(log=True),
    "aten::_softmax_backward_data(Tensor grad_output, Tensor output, int dim, "
    "ScalarType input_dtype) -> Tensor": softmax_backward(log=False),
    "aten::_log_softmax_backward_data(Tensor grad_output, Tensor output, int dim, "
    "ScalarType input_dtype) -> Tensor": softmax_backward(log=True),
}
