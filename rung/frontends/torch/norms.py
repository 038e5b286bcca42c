"""Table of the norms: layer, RMS, batch and group norm, and their backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rung.core.errors import Unsupported
from rung.core.expr import Expr
from rung.core.op import Value
from rung.core.types import F64, dtype_of
from rung.frontends.torch.emit import Emit
from rung.frontends.torch.reductions import narrowed, widened
from rung.frontends.torch.shapes import product
from rung.tensor.ir import Full, shape_of

Build = Callable[..., Value | tuple[Value, ...]]


def trailing(x: Value, shape: Sequence[object]) -> tuple[int, ...]:
    rank = len(shape_of(x))
    return tuple(range(rank - len(shape), rank))


def affine(e: Emit, x: Value, weight: Value | None, bias: Value | None) -> Value:
    """x * weight + bias, both along the last dimensions."""
    for fn, v in (("mul", weight), ("add", bias)):
        if v is not None:
            x = e.map(fn, x, e.expand(e.operand(v, dtype_of(x.type)), shape_of(x)))
    return x


def alike(x: Value, *others: Value | None) -> None:
    """Unsupported where `x` meets parameters of another type, which eager refuses; beside
    half-precision `x` it saves statistics of their type, which torch does not say."""
    kind = dtype_of(x.type)
    if any(v is not None and dtype_of(v.type) != kind for v in others):
        raise Unsupported(f"statistics of {kind} with parameters of another type")


def layer_norm(e: Emit, x: Value, size: Sequence[object], weight: Value | None,
               bias: Value | None, eps: float) -> tuple[Value, ...]:
    """(y, mean, 1 / sqrt(var + eps))"""
    alike(x, weight, bias)
    a = e.operand(x, dtype_of(x.type))
    axes = trailing(x, size)
    centre, apart, scale = standard(e, a, axes, eps)
    y = affine(e, e.map("mul", apart, e.expand(scale, shape_of(a))), weight, bias)
    return e.finish(y), e.finish(centre, 1), e.finish(scale, 2)


def standard(e: Emit, a: Value, axes: Sequence[int], eps: float) -> tuple[Value, Value, Value]:
    """(mean, a - mean, 1 / sqrt(var + eps)) over `axes`, which stay as sizes of 1."""
    centre = e.mean(a, axes, keep=True)
    apart = e.map("sub", a, e.expand(centre, shape_of(a)))
    spread = e.mean(e.map("mul", apart, apart), axes, keep=True)
    return centre, apart, inverse_deviation(e, spread, eps)


def rms_norm(e: Emit, x: Value, size: Sequence[object], weight: Value | None,
             eps: float | None) -> tuple[Value, ...]:
    """(y, 1 / sqrt(mean(x^2) + eps)); eps is the type's epsilon by default."""
    a = e.operand(x, dtype_of(x.type))
    square = e.mean(e.map("mul", a, a), trailing(x, size), keep=True)
    small = float(np.finfo(dtype_of(a.type).numpy).eps) if eps is None else eps
    scale = inverse_deviation(e, square, small)
    y = affine(e, e.map("mul", a, e.expand(scale, shape_of(a))), weight, None)
    return e.finish(y), e.finish(scale, 1)


def layer_norm_backward(e: Emit, grad: Value, x: Value, size: Sequence[object], mean: Value,
                        scale: Value, weight: Value | None, bias: Value | None,
                        wanted: Sequence[bool]) -> tuple[Value, ...]:
    """Gradients of x, weight and bias, those that are `wanted`."""
    alike(x, weight, bias)
    g, a, centre, factor = (e.operand(v, dtype_of(v.type)) for v in (grad, x, mean, scale))
    hat = normal(e, a, centre, factor)
    axes = trailing(x, size)
    return _given(e, wanted, (
        lambda: norm_backward(e, affine(e, g, weight, None), hat, factor, axes),
        lambda: _sum_beside(e, e.map("mul", g, hat), axes),
        lambda: _sum_beside(e, g, axes)))


def normal(e: Emit, a: Value, centre: Value, factor: Value) -> Value:
    """(a - centre) * factor"""
    apart = e.map("sub", a, e.expand(centre, shape_of(a)))
    return e.map("mul", apart, e.expand(factor, shape_of(a)))


def norm_backward(e: Emit, g: Value, hat: Value, factor: Value, axes: Sequence[int]) -> Value:
    """factor (g - mean(g) - hat mean(g hat)): `hat` is what was normalised over `axes`."""
    shape = shape_of(g)
    along = e.mean(e.map("mul", g, hat), axes, keep=True)
    rest = e.map("sub", g, e.expand(e.mean(g, axes, keep=True), shape))
    rest = e.map("sub", rest, e.map("mul", hat, e.expand(along, shape)))
    return e.map("mul", rest, e.expand(factor, shape))


def _sum_beside(e: Emit, x: Value, axes: Sequence[int]) -> Value:
    """The sum over all dimensions but `axes`."""
    others = [n for n in range(len(shape_of(x))) if n not in axes]
    return e.reduce("add", widened(e, x, others), others)


def _given(e: Emit, wanted: Sequence[bool], makers: Sequence[Callable[[], Value]]
           ) -> tuple[Value, ...]:
    """The results that are wanted; the call has no others."""
    made = (make() for make, want in zip(makers, wanted, strict=True) if want)
    return tuple(narrowed(e, v, n) for n, v in enumerate(made))


# --- batch norm: statistics of a channel, dimension 1, in float64 as torch sums them --------------

def channels(x: Value) -> list[int]:
    """The dimensions that are no channels."""
    return [n for n in range(len(shape_of(x))) if n != 1]


def beside(e: Emit, v: Value, like: Value) -> Value:
    """A vector of one number a channel, expanded to the shape of `like`."""
    return e.remap(v, shape_of(like), lambda at: [at[1]])


def normalized(e: Emit, x: Value, mean: Value, scale: Value, weight: Value | None,
               bias: Value | None) -> Value:
    """(x - mean) * (scale * weight) + bias, all but x one number a channel."""
    a = e.operand(x, dtype_of(x.type))
    inner = dtype_of(a.type)
    mean, scale = e.value(mean, inner), e.value(scale, inner)
    if weight is not None:
        scale = e.map("mul", scale, e.operand(weight, dtype_of(weight.type)))
    y = e.map("mul", e.map("sub", a, beside(e, mean, a)), beside(e, scale, a))
    if bias is not None:
        y = e.map("add", y, beside(e, e.operand(bias, dtype_of(bias.type)), a))
    return e.finish(y)


def inverse_deviation(e: Emit, spread: Value, eps: float) -> Value:
    return e.map("rsqrt", e.map("add", spread, eps))


def batch_stats(e: Emit, x: Value) -> tuple[Value, Value]:
    """(mean, mean square deviation) of each channel, as f64"""
    a, axes = e.summed(x), channels(x)
    mean = e.mean(a, axes)
    apart = e.map("sub", a, beside(e, mean, a))
    return e.value(mean, F64), e.value(e.mean(e.map("mul", apart, apart), axes), F64)


def batch_norm(e: Emit, x: Value, weight: Value | None, bias: Value | None, training: bool,
               momentum: float, eps: float) -> tuple[Value, ...]:
    """(y, mean, 1 / sqrt(var + eps)) of the batch's own statistics."""
    alike(x, weight, bias)
    if not training:
        raise Unsupported("batch norm without statistics")
    mean, spread = batch_stats(e, x)
    scale = inverse_deviation(e, spread, eps)
    return (normalized(e, x, mean, scale, weight, bias), narrowed(e, mean, 1),
            narrowed(e, scale, 2))


def batch_norm_updating(e: Emit, x: Value, weight: Value | None, bias: Value | None,
                        running_mean: Value, running_var: Value, training: bool, momentum: float,
                        eps: float) -> tuple[Value, ...]:
    """`batch_norm` and the new running statistics; they take the variance without bias."""
    if not training:
        return (*batch_norm_eval(e, x, weight, bias, running_mean, running_var, momentum, eps),
                running_mean, running_var)
    alike(x, weight, bias, running_mean, running_var)
    mean, spread = batch_stats(e, x)
    scale = inverse_deviation(e, spread, eps)
    count = product([shape_of(x)[n] for n in channels(x)])
    terms = e.value(count, F64)
    fair = e.map("mul", spread, e.map("div", terms, e.map("sub", terms, 1)))
    states = (e.map("add", e.map("mul", new, momentum),
                    e.map("mul", e.value(old, F64), 1 - momentum))
              for new, old in ((mean, running_mean), (fair, running_var)))
    return (normalized(e, x, mean, scale, weight, bias), narrowed(e, mean, 1),
            narrowed(e, scale, 2), *(narrowed(e, s, n) for n, s in enumerate(states, 3)))


def batch_norm_eval(e: Emit, x: Value, weight: Value | None, bias: Value | None, mean: Value,
                    spread: Value, momentum: float, eps: float) -> tuple[Value, ...]:
    """`x` by the running statistics, and two empty tensors."""
    alike(x, weight, bias, mean, spread)
    known, var = (e.operand(v, dtype_of(v.type)) for v in (mean, spread))
    y = normalized(e, x, known, inverse_deviation(e, var, eps), weight, bias)
    return y, *(e.op(Full(0.0, e.result(n).dtype, e.result(n).shape)) for n in (1, 2))


def batch_norm_backward(e: Emit, grad: Value, x: Value, weight: Value | None,
                        running_mean: Value | None, running_var: Value | None,
                        mean: Value | None, scale: Value | None, training: bool, eps: float,
                        wanted: Sequence[bool]) -> tuple[Value, ...]:
    """Gradients of x, weight and bias, those that are `wanted`."""
    alike(x, weight, running_mean, running_var)
    g, a = (e.operand(v, dtype_of(v.type)) for v in (grad, x))
    inner = dtype_of(a.type)
    if not training and running_mean is not None and running_var is not None:
        mean = running_mean
        scale = inverse_deviation(e, e.operand(running_var, dtype_of(running_var.type)), eps)
    if mean is None or scale is None:
        raise Unsupported("batch norm without statistics")
    centre, factor = (e.value(v, inner) for v in (mean, scale))
    axes = channels(x)
    apart = e.map("sub", a, beside(e, centre, a))
    bias = e.value(e.reduce("add", e.summed(g), axes), F64)
    dot = e.value(e.reduce("add", e.summed(e.map("mul", g, apart)), axes), F64)
    slope = e.map("mul", dot, e.value(factor, F64))

    def of_x() -> Value:
        left = g
        if training:
            terms = e.value(product([shape_of(x)[n] for n in axes]), F64)
            low = e.value(e.map("div", bias, terms), inner)
            tilt = e.value(e.map("div", e.map("mul", slope, e.value(factor, F64)), terms), inner)
            left = e.map("sub", e.map("sub", g, beside(e, low, g)),
                         e.map("mul", apart, beside(e, tilt, g)))
        by = factor if weight is None else e.map("mul", factor, e.operand(
            weight, dtype_of(weight.type)))
        return e.map("mul", left, beside(e, by, g))

    return _given(e, wanted, (of_x, lambda: slope, lambda: bias))


# --- group norm: statistics of a group of neighbouring channels -----------------------------------

def grouped(e: Emit, x: Value, groups: int) -> Value:
    """[N, C, ..] as [N, groups, C / groups, ..], in the computing type."""
    rows, width, *rest = shape_of(x)
    return e.reshape(e.operand(x, dtype_of(x.type)),
                     (rows, Expr.of(groups), width // groups, *rest))


def by_group(e: Emit, v: Value, like: Value, per_row: bool) -> Value:
    """[N, groups], or else [C], expanded to the shape of `like` as `grouped` gives it."""
    size = shape_of(like)
    v = e.operand(v, dtype_of(v.type))
    if per_row:
        return e.remap(e.reshape(v, size[:2]), size, lambda at: at[:2])
    return e.remap(v, size, lambda at: [at[1] * size[2] + at[2]])


def group_affine(e: Emit, x: Value, weight: Value | None, bias: Value | None) -> Value:
    for fn, v in (("mul", weight), ("add", bias)):
        if v is not None:
            x = e.map(fn, x, by_group(e, v, x, per_row=False))
    return x


def group_norm(e: Emit, x: Value, weight: Value | None, bias: Value | None, n: object, c: object,
               hxw: object, groups: int, eps: float) -> tuple[Value, ...]:
    """(y, mean, 1 / sqrt(var + eps)), the latter two of each group."""
    alike(x, weight, bias)
    a = grouped(e, x, groups)
    axes = range(2, len(shape_of(a)))
    centre, _, scale = standard(e, widened(e, a, axes), axes, eps)
    stats = [e.value(v, dtype_of(a.type)) for v in (centre, scale)]
    y = group_affine(e, normal(e, a, *stats), weight, bias)
    kept = (e.finish(e.reshape(v, shape_of(a)[:2]), n) for n, v in enumerate(stats, 1))
    return e.finish(e.reshape(y, shape_of(x))), *kept


def group_norm_backward(e: Emit, grad: Value, x: Value, mean: Value, scale: Value,
                        weight: Value | None, n: object, c: object, hxw: object, groups: int,
                        wanted: Sequence[bool]) -> tuple[Value, ...]:
    """Gradients of x, weight and bias, those that are `wanted`."""
    alike(x, weight)
    g, a = grouped(e, grad, groups), grouped(e, x, groups)
    factor = by_group(e, scale, a, per_row=True)
    hat = e.map("mul", e.map("sub", a, by_group(e, mean, a, per_row=True)), factor)
    axes = range(2, len(shape_of(a)))

    def along_channels(v: Value) -> Value:
        sums = _sum_beside(e, v, (1, 2))
        return e.reshape(sums, (product(shape_of(sums)),))

    return _given(e, wanted, (
        lambda: e.reshape(norm_backward(e, group_affine(e, g, weight, None), hat, factor,
                                        axes), shape_of(x)),
        lambda: along_channels(e.map("mul", g, hat)), lambda: along_channels(g)))


STATS = "Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var"
THREE = "-> (Tensor, Tensor, Tensor)"
GROUPS = "SymInt N, SymInt C, SymInt HxW, int group"
NORMS: dict[str, Build] = {
    "aten::native_layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, "
    f"Tensor? bias, float eps) {THREE}": layer_norm,
    "aten::native_layer_norm_backward(Tensor grad_out, Tensor input, SymInt[] normalized_shape, "
    f"Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, bool[3] output_mask) {THREE}":
        layer_norm_backward,
    "aten::_fused_rms_norm(Tensor input, int[] normalized_shape, Tensor? weight, float? eps) "
    "-> (Tensor, Tensor)": rms_norm,
    "aten::_native_batch_norm_legit.no_stats(Tensor input, Tensor? weight, Tensor? bias, "
    f"bool training, float momentum, float eps) {THREE}": batch_norm,
    f"aten::_native_batch_norm_legit_functional(Tensor input, {STATS}, bool training, "
    "float momentum, float eps) -> (Tensor, Tensor, Tensor, Tensor running_mean_out, "
    "Tensor running_var_out)": batch_norm_updating,
    f"aten::_native_batch_norm_legit_no_training(Tensor input, {STATS}, float momentum, "
    f"float eps) {THREE}": batch_norm_eval,
    "aten::native_batch_norm_backward(Tensor grad_out, Tensor input, Tensor? weight, "
    "Tensor? running_mean, Tensor? running_var, Tensor? save_mean, Tensor? save_invstd, "
    f"bool train, float eps, bool[3] output_mask) {THREE}": batch_norm_backward,
    "aten::native_group_norm(Tensor input, Tensor? weight, Tensor? bias, "
    f"{GROUPS}, float eps) {THREE}": group_norm,
    "aten::native_group_norm_backward(Tensor grad_out, Tensor input, Tensor mean, Tensor rstd, "
    f"Tensor? weight, {GROUPS}, bool[3] output_mask) {THREE}": group_norm_backward,
}
