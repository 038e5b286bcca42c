"""Table of the activation functions and their gradients.

At NaN a gradient is what the vectors of torch's kernels give; their loops over strided memory
differ from those.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

from rung.core.op import Value
from rung.core.types import F16, DType
from rung.frontends.torch.emit import Number
from rung.frontends.torch.formulas import (
    Body,
    Term,
    call,
    clamp,
    eq,
    erf,
    exp,
    expm1,
    formula,
    isnan,
    log1p,
    minimum,
    pair,
    sigmoid,
    tanh,
    where,
)
from rung.frontends.torch.tensors import DTYPES

Build = Body | Callable[..., tuple[Value, ...]]


def unary(fn: str) -> Body:
    return formula(lambda x: call(fn, x))


# --- gelu: x Phi(x), Phi by erf, or by tanh(sqrt(2/pi) (x + 0.044715 x^3))

ROOT_HALF, ROOT_TWO_BY_PI, CUBE = math.sqrt(0.5), math.sqrt(2 / math.pi), 0.044715


@cache
def is_nan_at_infinity(dtype: DType) -> bool:
    """Whether eager's gelu is NaN there, as oneDNN's is, which runs on some CPUs."""
    return bool(F.gelu(torch.full((64,), math.inf, dtype=DTYPES[dtype], device="cpu"))[0].isnan())


def gelu(x: Term, approximate: str) -> Term:
    if approximate == "none":
        y = x * 0.5 * (1 + erf(x * ROOT_HALF))
        odd = not x.e.gpu and is_nan_at_infinity(x.e.dtype)
        return where(eq(x, math.inf), math.nan, y) if odd else y
    return x * 0.5 * (1 + tanh((x + x * x * x * CUBE) * ROOT_TWO_BY_PI))


def gelu_backward(grad: Term, x: Term, approximate: str) -> Term:
    if approximate == "none":
        density = exp(x * x * -0.5) * (ROOT_TWO_BY_PI / 2)
        return grad * (0.5 * (1 + erf(x * ROOT_HALF)) + x * density)
    t = tanh((x + x * x * x * CUBE) * ROOT_TWO_BY_PI)
    slope = (1 + x * x * (3 * CUBE)) * ROOT_TWO_BY_PI
    return grad * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope)


# --- elu and its kin

def elu(x: Term, alpha: float, scale: float = 1, input_scale: float = 1) -> Term:
    return where(x < 0, expm1(x * input_scale) * (alpha * scale), x * scale)


def elu_backward(grad: Term, alpha: float, scale: float, input_scale: float, is_result: bool,
                 x: Term) -> Term:
    slope = alpha * scale
    inner = x + slope if is_result else exp(x * input_scale) * slope
    return where(x <= 0, grad * input_scale * inner, grad * scale)  # of NaN, the gradient


def celu(x: Term, alpha: float) -> Term:
    return elu(x, alpha, 1, 1 / alpha)


def softplus(x: Term, beta: Number, threshold: Number) -> Term:
    return where(x * beta > threshold, x, log1p(exp(x * beta)) / beta)


def softplus_backward(grad: Term, x: Term, beta: Number, threshold: Number) -> Term:
    z = exp(x * beta)
    return where(x * beta > threshold, grad, grad * z / (z + 1))


def log_sigmoid(x: Term) -> tuple[Term, Term]:
    """(min(0, x) - log(1 + z), z), z = exp(-|x|)"""
    z = exp(-abs(x))
    return minimum(x, 0) - log1p(z), z


def log_sigmoid_backward(grad: Term, x: Term, z: Term) -> Term:
    share = z / (1 + z)
    return grad * where(x < 0, 1 - share, share)


def sigmoid_backward(grad: Term, y: Term) -> Term:
    """Torch's kernel of f16, unlike that of bf16, rounds each step."""
    kind = grad.e.dtype if grad.e.dtype is F16 else grad.dtype
    return (grad * (1 - y).rounded(kind)).rounded(kind) * y


def mish_backward(grad: Term, x: Term) -> Term:
    t = tanh(log1p(exp(x)))
    return grad * (t + x * sigmoid(x) * (1 - t * t))


def silu_backward(grad: Term, x: Term) -> Term:
    s = sigmoid(x)
    return grad * s * (1 + x * (1 - s))


# --- made of pieces

SIXTH = 0.1666666716337204  # in single precision, as torch has it for every type

def threshold(x: Term, limit: Number, value: Number) -> Term:
    return where(x <= limit, value, x)


def hardswish_backward(grad: Term, x: Term) -> Term:
    return where(x <= -3, 0, where(x >= 3, grad, grad * (x / 3 + 0.5)))


def outside(x: Term, limit: Term | Number) -> Term:
    """Whether x is not within the limits, as its type holds them."""
    kind = x.e.dtype
    near = limit.rounded(kind) if isinstance(limit, Term) else x.e.literal(limit, kind)
    return (x < -near) | (x > near)


def softshrink(x: Term, limit: Number) -> Term:
    return where(x > limit, x - limit, where(x < -limit, x + limit, where(isnan(x), x, 0)))


def prelu_backward(grad: Term, x: Term, weight: Term) -> tuple[Term, Term]:
    return where(x > 0, grad, weight * grad), where(x > 0, 0, x * grad)


def threshold_backward(grad: Term, x: Term, limit: Number) -> Term:
    """The gradient where x > limit or is NaN."""
    return where(x <= limit, 0, grad)


FORMULAS: dict[str, Callable[..., Term]] = {
    'gelu(Tensor self, *, str approximate="none") -> Tensor': gelu,
    'gelu_backward(Tensor grad_output, Tensor self, *, str approximate="none") -> Tensor':
        gelu_backward,
    "silu_backward(Tensor grad_output, Tensor self) -> Tensor": silu_backward,
    "mish(Tensor self) -> Tensor": lambda x: x * tanh(log1p(exp(x))),
    "mish_backward(Tensor grad_output, Tensor self) -> Tensor": mish_backward,
    "sigmoid_backward(Tensor grad_output, Tensor output) -> Tensor": sigmoid_backward,
    "tanh_backward(Tensor grad_output, Tensor output) -> Tensor":
        lambda grad, y: grad * (1 - y * y),
    "elu(Tensor self, Scalar alpha=1, Scalar scale=1, Scalar input_scale=1) -> Tensor": elu,
    "elu_backward(Tensor grad_output, Scalar alpha, Scalar scale, Scalar input_scale, "
    "bool is_result, Tensor self_or_result) -> Tensor": elu_backward,
    "celu(Tensor self, Scalar alpha=1.) -> Tensor": celu,
    "softplus(Tensor self, Scalar beta=1, Scalar threshold=20) -> Tensor": softplus,
    "softplus_backward(Tensor grad_output, Tensor self, Scalar beta, Scalar threshold) -> Tensor":
        softplus_backward,
    "log_sigmoid_backward(Tensor grad_output, Tensor self, Tensor buffer) -> Tensor":
        log_sigmoid_backward,
    "threshold(Tensor self, Scalar threshold, Scalar value) -> Tensor": threshold,
    "threshold_backward(Tensor grad_output, Tensor self, Scalar threshold) -> Tensor":
        threshold_backward,
    "leaky_relu(Tensor self, Scalar negative_slope=0.01) -> Tensor":
        lambda x, slope: where(x > 0, x, x * slope),
    "leaky_relu_backward(Tensor grad_output, Tensor self, Scalar negative_slope, "
    "bool self_is_result) -> Tensor":
        lambda grad, x, slope, is_result: where(x > 0, grad, grad * slope),
    "_prelu_kernel(Tensor self, Tensor weight) -> Tensor":
        lambda x, weight: where(x > 0, x, weight * x),
    "hardtanh(Tensor self, Scalar min_val=-1, Scalar max_val=1) -> Tensor": clamp,
    "hardtanh_backward(Tensor grad_output, Tensor self, Scalar min_val, Scalar max_val) -> Tensor":
        lambda grad, x, low, high: where((x > low) & (x < high), grad, 0),
    "hardswish(Tensor self) -> Tensor": lambda x: x * clamp(x + 3, 0, 6) / 6,
    "hardswish_backward(Tensor grad_output, Tensor self) -> Tensor": hardswish_backward,
    "hardsigmoid(Tensor self) -> Tensor": lambda x: clamp(x + 3, 0, 6) / 6,
    "hardsigmoid_backward(Tensor grad_output, Tensor self) -> Tensor":
        lambda grad, x: where((x > -3) & (x < 3), grad * SIXTH, 0),
    "hardshrink(Tensor self, Scalar lambd=0.5) -> Tensor":
        lambda x, limit: where(outside(x, limit) | isnan(x), x, 0),
    "hardshrink_backward(Tensor grad_out, Tensor self, Scalar lambd) -> Tensor":
        lambda grad, x, limit: where(outside(x, limit), grad, 0),
    "softshrink(Tensor self, Scalar lambd=0.5) -> Tensor": softshrink,
    "softshrink_backward(Tensor grad_output, Tensor self, Scalar lambd) -> Tensor":
        lambda grad, x, limit: where(outside(x, limit), grad, 0),
}
PAIRS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "log_sigmoid_forward(Tensor self) -> (Tensor output, Tensor buffer)": log_sigmoid,
    "_prelu_kernel_backward(Tensor grad_output, Tensor self, Tensor weight) -> (Tensor, Tensor)":
        prelu_backward,
}
ACTIVATIONS: dict[str, Build] = {
    **{f"aten::{fn}(Tensor self) -> Tensor": unary(fn) for fn in (
        "relu", "sigmoid", "silu", "tanh")},
    **{f"aten::{schema}": formula(write) for schema, write in FORMULAS.items()},
    **{f"aten::{schema}": pair(write) for schema, write in PAIRS.items()},
}
