"""Table of the overloads that reduce and contract, and of the composites made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from rung.core.errors import Unsupported
from rung.core.op import Value
from rung.core.ops import Cast
from rung.core.types import BOOL, F32, F64, dtype_of
from rung.frontends.torch.emit import Emit, Number, axis_exprs
from rung.frontends.torch.shapes import product
from rung.tensor.ir import Contract, shape_of

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
    return narrowed(e, e.mean(terms(e, x, axes), axes, keep))


def terms(e: Emit, x: Value, axes: Sequence[int]) -> Value:
    """What a sum adds up: in float64 where torch's tree of partial sums is much nearer than one
    sum that runs on in float32, for many numbers and for all of a tensor, which costs no time."""
    a, size = e.operand(x, e.dtype), shape_of(x)
    count = product([size[n] for n in axes]).const_value or 0
    far = count >= LONG or len(axes) == len(size)
    return e.value(a, F64) if dtype_of(a.type) is F32 and far and size else a


def narrowed(e: Emit, x: Value, n: int = 0) -> Value:
    """`x` as result `n`; a float64 value is rounded once."""
    return e.finish(e.value(x, e.result(n).dtype) if dtype_of(x.type) is F64 else x, n)


def extreme(monoid: str) -> Build:
    def build(e: Emit, x: Value, dims: Dims = None, keep: bool = False) -> Value:
        axes = e.axes(x, dims)
        if any(shape_of(x)[n].is_const(0) for n in axes):
            raise Unsupported("the extreme of nothing")
        if e.dtype is BOOL:
            raise Unsupported("an extreme of bools")
        return e.finish(e.reduce(monoid, e.operand(x, e.dtype), axes, keep))
    return build


def truth(monoid: str) -> Build:
    def build(e: Emit, x: Value, dims: Dims = None, keep: bool = False) -> Value:
        return e.finish(e.reduce(monoid, e.value(x, BOOL), e.axes(x, dims), keep))
    return build


def variance(e: Emit, x: Value, dims: Dims, correction: Number | None, keep: bool
             ) -> tuple[Value, Value]:
    """(variance, mean) over `dims`, in float64 as torch computes them."""
    axes = e.axes(x, dims)
    a = e.value(x, F64)
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


def var_mean(e: Emit, x: Value, dims: Dims, correction: Number | None, keep: bool
             ) -> tuple[Value, ...]:
    return tuple(narrowed(e, v, n)
                 for n, v in enumerate(variance(e, x, dims, correction, keep)))


def softmax(log: bool) -> Build:
    """exp(x - max) / sum, or its logarithm x - max - log(sum)."""
    def build(e: Emit, x: Value, dim: int, half_to_float: bool) -> Value:
        a = e.operand(x, dtype_of(x.type))
        axes = e.axes(x, dim)
        if any(shape_of(x)[n].is_const(0) for n in axes):
            return e.finish(a)
        away = e.map("sub", a, e.expand(e.reduce("max", a, axes, keep=True), e.shape))
        powers = e.map("exp", away)
        whole = e.reduce("add", powers, axes, keep=True)
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


def trailing(x: Value, shape: Sequence[object]) -> tuple[int, ...]:
    rank = len(shape_of(x))
    return tuple(range(rank - len(shape), rank))


def affine(e: Emit, x: Value, weight: Value | None, bias: Value | None) -> Value:
    """x * weight + bias, both along the last dimensions."""
    for fn, v in (("mul", weight), ("add", bias)):
        if v is not None:
            x = e.map(fn, x, e.expand(e.operand(v, dtype_of(x.type)), shape_of(x)))
    return x


def layer_norm(e: Emit, x: Value, size: Sequence[object], weight: Value | None,
               bias: Value | None, eps: float) -> tuple[Value, ...]:
    """(y, mean, 1 / sqrt(var + eps))"""
    a = e.operand(x, dtype_of(x.type))
    axes = trailing(x, size)
    centre = e.mean(a, axes, keep=True)
    apart = e.map("sub", a, e.expand(centre, shape_of(a)))
    spread = e.mean(e.map("mul", apart, apart), axes, keep=True)
    scale = e.map("rsqrt", e.map("add", spread, eps))
    y = affine(e, e.map("mul", apart, e.expand(scale, shape_of(a))), weight, bias)
    return e.finish(y), e.finish(centre, 1), e.finish(scale, 2)


def rms_norm(e: Emit, x: Value, size: Sequence[object], weight: Value | None,
             eps: float | None) -> tuple[Value, ...]:
    """(y, 1 / sqrt(mean(x^2) + eps)); eps is the type's epsilon by default."""
    a = e.operand(x, dtype_of(x.type))
    square = e.mean(e.map("mul", a, a), trailing(x, size), keep=True)
    small = float(np.finfo(dtype_of(a.type).numpy).eps) if eps is None else eps
    scale = e.map("rsqrt", e.map("add", square, small))
    y = affine(e, e.map("mul", a, e.expand(scale, shape_of(a))), weight, None)
    return e.finish(y), e.finish(scale, 1)


def contract(e: Emit, formula: str, a: Value, b: Value) -> Value:
    """A product summed over the axes that the result lacks, `ik,kj->ij`, in the computing type."""
    dtype = dtype_of(a.type)
    if not dtype.is_float:
        raise Unsupported(f"a matrix product of {dtype}")
    x, y = (e.operand(v, dtype) for v in (a, b))
    inputs, out = formula.split("->")
    left, right = inputs.split(",")
    return e.op(Contract("add", "mul", x, tuple(left), y, tuple(right), tuple(out),
                         dtype_of(x.type)))


def matmul(formula: str) -> Build:
    return lambda e, a, b: e.finish(contract(e, formula, a, b))


def added_matmul(formula: str) -> Build:
    """x + a @ b, rounded once."""
    def build(e: Emit, x: Value, a: Value, b: Value, beta: Number, alpha: Number) -> Value:
        if (beta, alpha) != (1, 1):
            raise Unsupported(f"beta {beta}, alpha {alpha}")
        product = contract(e, formula, a, b)
        return e.finish(e.map("add", product, e.expand(e.operand(x, e.dtype), e.shape)))
    return build


def attention(e: Emit, q: Value, k: Value, v: Value, dropout: float, causal: bool,
              mask: Value | None, scale: float | None) -> tuple[Value, ...]:
    """softmax(scale q k^T + mask) v and the log-sum-exp of the scores; 0 for a row all masked."""
    width = shape_of(q)[-1].const_value
    if dropout or width is None:
        raise Unsupported("attention with dropout or a head of unknown size")
    scores = e.map("mul", contract(e, "bhid,bhjd->bhij", q, k), scale or width ** -0.5)
    shape = shape_of(scores)
    if causal:
        axes = axis_exprs(4)
        scores = e.index(scores, shape, axes, [axes[2] - axes[3]], -math.inf)
    if mask is not None:
        scores = e.map("add", scores, e.expand(e.operand(mask, dtype_of(mask.type)), shape))
    top = e.reduce("max", scores, (3,), keep=True)
    top = e.map("where", e.map("eq", top, -math.inf), e.value(0, dtype_of(top.type)), top)
    powers = e.map("exp", e.map("sub", scores, e.expand(top, shape)))
    whole = e.reduce("add", powers, (3,), keep=True)
    whole = e.map("where", e.map("eq", whole, 0), e.value(1, dtype_of(top.type)), whole)
    weights = e.map("div", powers, e.expand(whole, shape))
    out = e.op(Contract("add", "mul", weights, ("b", "h", "i", "j"),
                        e.operand(v, dtype_of(v.type)), ("b", "h", "j", "d"),
                        ("b", "h", "i", "d"), dtype_of(weights.type)))
    sums = e.reshape(e.map("add", e.map("log", whole), top), shape[:3])
    if e.result(1).dtype is F32 and dtype_of(sums.type) is F64:  # as torch 2.11 has it
        sums = e.op(Cast(sums, F32))
    return e.finish(out), e.finish(sums, 1)


TYPED = "bool keepdim=False, *, ScalarType? dtype=None"
REDUCTIONS: dict[str, Build] = {
    "aten::sum(Tensor self, *, ScalarType? dtype=None) -> Tensor":
        lambda e, x, dtype: total(e, x),
    f"aten::sum.dim_IntList(Tensor self, int[1]? dim, {TYPED}) -> Tensor": total,
    "aten::mean(Tensor self, *, ScalarType? dtype=None) -> Tensor": lambda e, x, dtype: mean(e, x),
    f"aten::mean.dim(Tensor self, int[1]? dim, {TYPED}) -> Tensor": mean,
    "aten::amax(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor": extreme("max"),
    "aten::amin(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor": extreme("min"),
    "aten::max(Tensor self) -> Tensor": extreme("max"),
    "aten::min(Tensor self) -> Tensor": extreme("min"),
    "aten::any(Tensor self) -> Tensor": truth("or"),
    "aten::any.dim(Tensor self, int dim, bool keepdim=False) -> Tensor": truth("or"),
    "aten::any.dims(Tensor self, int[]? dim=None, bool keepdim=False) -> Tensor": truth("or"),
    "aten::all(Tensor self) -> Tensor": truth("and"),
    "aten::all.dim(Tensor self, int dim, bool keepdim=False) -> Tensor": truth("and"),
    "aten::mm(Tensor self, Tensor mat2) -> Tensor": matmul("ik,kj->ij"),
    "aten::bmm(Tensor self, Tensor mat2) -> Tensor": matmul("nik,nkj->nij"),
    "aten::addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) "
    "-> Tensor": added_matmul("ik,kj->ij"),
    "aten::baddbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) "
    "-> Tensor": added_matmul("nik,nkj->nij"),
    "aten::mv(Tensor self, Tensor vec) -> Tensor": matmul("ik,k->i"),
    "aten::dot(Tensor self, Tensor tensor) -> Tensor": matmul("k,k->"),
}
COMPOSITES: dict[str, Build] = {
    "aten::var.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, "
    "bool keepdim=False) -> Tensor": var,
    "aten::std.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, "
    "bool keepdim=False) -> Tensor": std,
    "aten::var_mean.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, "
    "bool keepdim=False) -> (Tensor, Tensor)": var_mean,
    "aten::_softmax(Tensor self, int dim, bool half_to_float) -> Tensor": softmax(log=False),
    "aten::_log_softmax(Tensor self, int dim, bool half_to_float) -> Tensor": softmax(log=True),
    "aten::_softmax_backward_data(Tensor grad_output, Tensor output, int dim, "
    "ScalarType input_dtype) -> Tensor": softmax_backward(log=False),
    "aten::_log_softmax_backward_data(Tensor grad_output, Tensor output, int dim, "
    "ScalarType input_dtype) -> Tensor": softmax_backward(log=True),
    "aten::native_layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, "
    "Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)": layer_norm,
    "aten::_fused_rms_norm(Tensor input, int[] normalized_shape, Tensor? weight, float? eps) "
    "-> (Tensor, Tensor)": rms_norm,
    "aten::_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, "
    "float dropout_p=0., bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) "
    "-> (Tensor output, Tensor logsumexp)": attention,
}
