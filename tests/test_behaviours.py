"""Kinds of programs that users reported of compilers, a row each: what eager does is right.

A row whose name begins with a number has the shape of that public report, in a collection of them
that is not in the repository; tests marked `report` in other files have the shapes of the rest.
Integers, special values, types, reductions, windows, indices, memory, calls and errors are here,
modules and Python in `tests/test_around_graphs.py`; `tests/test_cases.py` has what went wrong here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import agrees, rung
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError
from torch.nn import functional as F

Make = Callable[[], Sequence[Any]]
Rows = dict[str, tuple[Callable[..., Any], Make]]
NAN, INF = float("nan"), float("inf")

pytestmark = pytest.mark.usefixtures("fresh")


def numbers(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """More than a vector of the values, over and over."""
    return torch.tensor(values, dtype=dtype).repeat(7)


def odd() -> Sequence[torch.Tensor]:
    return [numbers(NAN, INF, -INF, -0.0, 0.0, 2.5, -3.5, 1e-40)]


def learnt(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


# ---- integers, to the bit
def _quotients(x: torch.Tensor, y: torch.Tensor) -> Any:
    typed = [(x.to(t), y.to(t)) for t in (torch.int8, torch.int16, torch.int32, torch.int64)]
    return [(a // b, a % b, torch.fmod(a, b), torch.div(a, b, rounding_mode="trunc"))
            for a, b in typed]


def _ages(x: torch.Tensor) -> Any:
    i = torch.arange(11)
    return i * torch.tensor([10 ** 9]), i * 3_000_000_000 + x, (i * 2 ** 40) // 2 ** 38


def _bits(x: torch.Tensor) -> Any:
    b = x.view(torch.int32)
    return (((b >> 23) & 255) - 127, ((b & 0x7FFFFF) | 0x3F800000).view(torch.float32),
            (b >> 2).view(torch.float32))


INTEGERS: Rows = {
    "1 quotients of all signs": (_quotients, lambda: [
        numbers(7, -7, 6, -6, -100, dtype=torch.int64), numbers(2, 2, -4, -3, 7)]),
    "9 unsigned bytes": (lambda x: (
        -x, -x < 4, -x < torch.tensor(4, dtype=torch.uint8), ~x > 250), lambda: [
        numbers(6, 0, 1, 255, dtype=torch.uint8)]),
    "11 bytes that overflow": (lambda c, x: (
        a := c * (x + c), b := c * x + c * c, a == b, (a > 100).sum(), (c * x).to(torch.int32)),
        lambda: [numbers(100, -128, 3, dtype=torch.int8), numbers(5, -1, 99, dtype=torch.int8)]),
    "13 more than 32 bits": (_ages, lambda: [torch.arange(11)]),
    "15 whether any byte is set is a byte": (
        lambda x: (x.any(), x.any(0), x.all(), x.any() * 200 + 100), lambda: [
            torch.tensor([[0, 3], [0, 0]], dtype=torch.uint8)]),
    "19 shifts by too much": (lambda x, s, b: (
        x << s, x >> s, x << 63, x >> 64, b << 7, b >> 9), lambda: [
        numbers(1000, -1000, 1, -1, dtype=torch.int64), numbers(64, 65, 1, -1, dtype=torch.int64),
        numbers(1, -1, 127, dtype=torch.int8)]),
    "21 bits of floats": (_bits, lambda: [numbers(1, -1.5, 1e10, 3e-5)]),
    "sums of bools and bytes": (lambda b, i: (b.sum(), b.cumsum(0), i.sum(0), i.prod(), i.cumsum(
        0, dtype=torch.float32), b.sum(dtype=torch.int8)), lambda: [
        numbers(1, 0, 1, dtype=torch.bool), numbers(1, -1, 2, dtype=torch.int8)]),
}


# ---- values and types
def _braid(x: torch.Tensor, y: torch.Tensor) -> Any:
    for _ in range(60):  # as a tree, this would be of 2^60 leaves
        x, y = torch.sin(x + y), torch.cos(x - y) * 0.5
    return x, y


def _constant(x: torch.Tensor) -> Any:
    ones = torch.ones(2, 4)
    none = torch.log2(torch.atan2(ones, ones)).arccosh()
    return torch.softmax(none, 0), x + none[0, 0]


def _clamps(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> Any:
    one, zero = torch.tensor(1.0), torch.tensor(0.0)
    return (x.clamp(min=0), x.clamp(-1, 1), x.clamp(max=NAN), x.clamp(min=2, max=1), x.clamp(min=y),
            torch.maximum(x, one), torch.minimum(x, y), torch.fmin(x, zero), torch.fmax(x, y),
            x.relu(), F.hardtanh(x), x.amax(), i.clamp(min=0.5), torch.maximum(i, i + 0.5))


def _rounded(x: torch.Tensor) -> Any:
    whole = x.round()
    return (whole, 1 / whole, x.trunc(), x.floor(), torch.round(x * 1.005, decimals=2),
            torch.round(x * 10, decimals=-1), x.double().round(), x.half().round(),
            x.bfloat16().round())


def _found_in_a_view(x: torch.Tensor) -> Any:
    x = x.clone()
    x.sin_()
    return x.t().argmax(), x.t().argmin(), x.t().cumsum(0).argmax()


def _largest_of_groups(x: torch.Tensor, s: torch.Tensor) -> Any:
    groups = torch.full((2,), -INF).index_reduce(
        0, torch.tensor([0, 0, 0, 1, 1]), s, "amax", include_self=False)
    return x.amax(-1), x.max(), x.aminmax(dim=0), x.max(0).values, groups


VALUES: Rows = {
    "5 quotients just below a whole number": (lambda x, y, z: (x // 0.1, x % 0.1, torch.div(
        x, 3, rounding_mode="floor"), torch.remainder(x, -0.7), x // y, z // y.double()), lambda: [
        numbers(0.3, 1.0, -0.6), numbers(0.1, 0.1, 0.2),
        numbers(0.5, 1.0, 6.0, dtype=torch.float64)]),
    "23 a constant that is NaN": (_constant, odd),
    "25 clamps": (_clamps, lambda: [*odd(), odd()[0].roll(1), numbers(
        *range(-2, 6), dtype=torch.int64)]),
    "the sign of a zero at a bound": (lambda x: [1 / y for y in (
        x.clamp(min=0), x.clamp(max=0), x.clamp(0, 1), F.relu6(x), x.relu())], odd),
    "27 the sign of what is left of a zero": (
        lambda x: (x.frac(), 1 / x.frac(), (x - 1.25).frac()), odd),
    "29 signs of zero and NaN": (lambda x: (x.sign(), x.signbit(), torch.copysign(torch.ones_like(
        x), torch.special.log_ndtr(x * 40)), x.abs(), -x, x.sgn()), odd),
    "31 places of NaN": (lambda x: (x.argmax(), x.view(7, 8).argmin(1), x.max(0), x.view(
        7, 8).amax(0), x.isnan().any(), torch.nan_to_num(x), x.log1p().argmin()), odd),
    "33 places in a view of what changed": (_found_in_a_view, lambda: [torch.randn(5, 7)]),
    "35 places among sums of every second row": (lambda x: [y.argmax() for y in (
        x.sum((-1, -2)), x.amax(-1), x.mean(-1).flatten(), x.var(-1), x.logsumexp(-1))], lambda: [
        torch.randn(4, 6, 5, 3).permute(0, 3, 1, 2)[:, :, ::2]]),
    "37 tied extremes": (_largest_of_groups, lambda: [torch.ones(3, 4, requires_grad=True),
        torch.tensor([0.5, 2.0, 2.0, -1.0, 4.0], requires_grad=True)]),
    "overflow of a half": (lambda x: (x * 2 / 2, (x * x).sum(), (x + x - x).float()), lambda: [
        numbers(40000, 1, -300, dtype=torch.float16)]),
    "powers of halves": (lambda x: (x ** 0.5, x ** -0.5, x ** -1), lambda: [odd()[0].half()]),
    "41 rounding": (_rounded, lambda: [
        numbers(0.5, 1.5, 2.5, -0.5, -2.5, 0.49999997, 8388609, INF, NAN)]),
    "43 inverse pairs": (lambda x, y: (torch.log(torch.exp(y)), torch.sqrt(y * y), torch.tan(
        torch.atan(x)), 1 / (1 / x), x - x, x / x, x * 0, (y + 1e30) - 1e30), lambda: [
        *odd(), numbers(89, 100, -200, 1e20)]),
    "45 xor with itself": (lambda x: (e := ((x != 0) ^ (x != 0)).float(), torch.atan2(e, e),
        torch.hypot(e, e), torch.xlogy(e, e)), odd),
    "53 long constants": (lambda x: (x * 3.141592653589793 + 1e-17, x + 2e50, x * 1e-300, x * (
        0.12 * x.shape[0]), torch.full((9,), 1e200, dtype=torch.float64) + x), lambda: [
        torch.ones(9, dtype=torch.float64)]),
    "55 a pole in half precision": (lambda x: (torch.tan(math.pi * (x - 0.5)).sign(),
        torch.distributions.Cauchy(0.0, 1.0).icdf(x).sign()), lambda: [
        torch.tensor([0.0, 0.25, 1.0], dtype=torch.float16)]),
    "an update read by two loops": (
        lambda b, c: (torch.atan(c) * 0.25, b.mT.mul_(c) + torch.atan(c)),
        lambda: [torch.randn(33, 4, dtype=torch.float64), torch.randn(4, 1, dtype=torch.float64)]),
    "57 standard deviations far from one": (
        lambda a, b, c: (a.std(), b.std() * 1e30, a.std(0), b.var(0) * 1e30 * 1e30, c.var()),
        lambda: [x.requires_grad_() for x in (
            torch.randn(300, 2) * 1e30, torch.randn(300, 2) * 1e-30, torch.randn(300) + 1e5)]),
    "67 rows without a number": (lambda x: (torch.softmax(x, -1), torch.log_softmax(x, -1),
        torch.logsumexp(x, -1), torch.softmax(x, 0)), lambda: [torch.tensor(
            [[-INF, -INF, -INF], [0, -INF, 1], [1, 2, 3], [INF, 0, 0]])]),
    "products of softmaxes": (lambda x: 1 - F.linear(x.softmax(1), x.softmax(1)) / 8, lambda: [
        torch.randn(32, 2, dtype=torch.float64)]),
    "shrunk to nothing": (lambda x: (F.softshrink(x), F.hardshrink(x)), lambda: [
        odd()[0][:48].requires_grad_()]),
    "sums that overflow": (lambda x: ((x * x).mean().sqrt(), x.norm(), x.mean()), lambda: [
        torch.full((300, 4), 1e18)]),
    "whether any or all are true, as sums": (lambda x: (
        x.sum(dtype=torch.bool), x.prod(dtype=torch.bool)), odd),
    "191 values that each use two before them": (_braid, lambda: [
        torch.arange(7.0), torch.arange(7.0) / 10]),
}
TYPES: Rows = {
    "7 a number beside halves": (lambda x, h: (torch.fmod(x, 1.7), x % 1.7, x * 0.1, x + 1e-3,
        x > 0.1, h % 3.14), lambda: [numbers(1.703125, -1.703125, 0.1, dtype=torch.bfloat16),
                                     numbers(-4, 0.1, 3.140625, dtype=torch.float16)]),
    "47 a round trip through half": (lambda x: (y := x.half().float(), x.bfloat16().float() + x, (
        x - y).abs() > 0, x.to(torch.int8).float(), x.double().float()), lambda: [
        (torch.arange(20.0).view(5, 4) / 7).t()]),
    "49 whole powers of two": (lambda b, h, x, i: (torch.ldexp(b, h), torch.ldexp(h, x),
        torch.ldexp(x, i), torch.ldexp(i, h.bfloat16())), lambda: [
        torch.tensor([True, False, True]), torch.tensor([1.0, 2.0, -1.0]).half(),
        torch.tensor([1.0, -2.0, 3.0]), torch.arange(3)]),
    "65 running sums of constants and bytes": (lambda x: (torch.ones(2, 4, 4, dtype=torch.bool
        ).cumsum(1, dtype=torch.bfloat16), torch.full((3,), 1.7).cumsum(0, dtype=torch.int64),
        x.cumsum(0), x.to(torch.int8).cumsum(0), x.cumprod(0), torch.logcumsumexp(x.float(), 0)),
        lambda: [torch.tensor([100, 100, 100], dtype=torch.int32)]),
    "promotion": (lambda b, h, i: (b + h, h * i, i / 2, b.float() + i, b * 2.5,
        torch.where(b, h, 1.5), torch.add(i, i, alpha=2)), lambda: [
        torch.tensor([True, False, True]), torch.ones(3, dtype=torch.float16), torch.arange(3)]),
    "181 a type of another tensor": (lambda x, y: (x.to(y.device, y.dtype), x.type_as(y), x.to(
        y), x.cpu(), x.float(), x.contiguous(), x.new_zeros(2) + 1, torch.empty_like(
        y, device=x.device).fill_(1)), lambda: [torch.arange(3.0), torch.arange(2)]),
}


# ---- reductions, windows, libraries
def _nothing(e: torch.Tensor, x: torch.Tensor) -> Any:
    return (e.sum(), e.prod(), e.mean(), e.cumsum(0), torch.cat([e, e]), e.norm(), x.sum(0),
            x.prod(0), x.mean(0), x.var(0), x.logsumexp(0), x.sum(1), (x > 0).any(0), (x > 0).all(),
            torch.cat([x, torch.ones(1, 3)]), x @ torch.ones(3, 2), x.t() @ x, x.t().softmax(0))


def _libraries(a: torch.Tensor, b: torch.Tensor) -> Any:
    s = a @ a.t() + 3 * torch.eye(4, dtype=a.dtype)
    return (torch.linalg.solve(s, b) + 1, torch.linalg.cholesky(s) * 2, torch.linalg.inv(s).sum(0),
            torch.linalg.eigvalsh(s), torch.linalg.slogdet(s), torch.cdist(a, b).relu(),
            torch.median(a, 1), a.quantile(0.3), torch.linalg.svdvals(a), a.mode(1),
            torch.linalg.det(s), torch.linalg.matrix_norm(a),
            torch.linalg.solve_triangular(s.tril(), b, upper=False))


def _wide(b: torch.Tensor, h: torch.Tensor) -> Any:
    """Sums that a half could not count up to."""
    square = b.view(64, 64)
    return (b.sum(), square.sum(0), b.float().sum(), b.norm(), (b * 2).cumsum(0)[:8], b.var(),
            square @ square, square.softmax(1).sum(), h.mean(), h.sum(dtype=torch.float32),
            h[:3000].sum())


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    seen = torch.ones(5, 5).tril().bool() & (torch.arange(5) != 2)[:, None]
    dark = torch.zeros(5, 5).masked_fill(~seen, -INF)
    return [F.scaled_dot_product_attention(q, k, v, attn_mask=mask) for mask in (seen, dark)]


def _means(x: torch.Tensor) -> Any:
    return (F.avg_pool2d(x, 3, 2, ceil_mode=True), F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
            F.avg_pool2d(x, 2, 2, 1, ceil_mode=True, count_include_pad=False),
            F.avg_pool2d(x, (2, 3), divisor_override=2), F.avg_pool1d(x[0], 4, 3, 2),
            F.adaptive_avg_pool2d(x, (3, 2)), F.adaptive_max_pool1d(x[0], 4))


def _largest(x: torch.Tensor) -> Any:
    half, places = F.max_pool2d(x, 2, return_indices=True)
    return (F.max_pool2d(x, 1, 2, ceil_mode=True), F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
            *F.max_pool2d(x, (3, 2), (2, 1), 1, (1, 2), return_indices=True),
            F.max_pool1d(x[0], 2), F.max_unpool2d(half, places, 2, output_size=x.shape))


def _resampled(x: torch.Tensor) -> Any:
    modes = (("bilinear", True), ("bilinear", False), ("bicubic", True), ("bicubic", False),
             ("nearest-exact", None), ("area", None))
    return [F.interpolate(x, size, mode=mode, align_corners=a) for mode, a in modes
            for size in ((7, 3), (1, 1))], (
        F.interpolate(x[0], size=13, mode="linear"), F.interpolate(x, 3, mode="bilinear",
        antialias=True), F.interpolate(x[:, :, None], (2, 5, 7), mode="trilinear"))


def _convolved(x: torch.Tensor, w: torch.Tensor, one: torch.Tensor) -> Any:
    return (F.conv2d(x, w, padding="same"), F.conv2d(x, one, groups=4, padding=2, dilation=2),
            F.conv2d(x, w[:, :2], groups=2, stride=2), F.conv2d(x[0], w, stride=(2, 1), padding=1),
            F.conv1d(x.flatten(2), w[:, :, 0], padding=1), F.conv3d(x[:, :, None], w[:, :, None]),
            F.conv2d(x.contiguous(memory_format=torch.channels_last), w),
            F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), w),
            F.conv1d(x[:, :, :, 0].mT.mT, one[:, :, 0], groups=4, padding=2)[..., :1],
            F.conv_transpose2d(x, w, stride=2, output_padding=1))


def _resized_to_pooled(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = F.interpolate(x, scale_factor=(1.5, 1.25), mode="bilinear")[:, :, 1:7, 1:8]
    c = F.conv2d(y, w, b, padding=1)
    return torch.where(c.detach() > 0.1, c, F.max_pool2d(c, 3, 1, 1))


def _einsums(s: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
             t: torch.Tensor) -> Any:
    return [torch.einsum(text, *of) for text, *of in (
        ("ii->i", s), ("ii", s), ("ij->ji", t), ("ij,ij", s, s), ("ij->", s), ("i,j", s[0], s[1]),
        ("bij,jk,kl->bil", a, b[0], c), ("...ij,...jk->...ik", a, b), ("aij,ajk->aik", a[:1], b),
        ("ij,kl->ikjl", s, c), ("bij->j", a), ("bij,bij->b", a, a), ("bij,jk->kbi", a, c[:5]))]


def _normed_constants(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> Any:
    rows = torch.linspace(-2, 2, 720, dtype=x.dtype).view(6, 10, 12)
    return F.group_norm(F.elu(F.batch_norm(rows, mean, var)), 5) + x, F.batch_norm(
        x.expand(6, 10, 12), mean, var)


def _complex(x: torch.Tensor, y: torch.Tensor) -> Any:
    return (torch.view_as_complex(x), torch.view_as_complex(x.double()) * 2, torch.fft.rfft(y),
            torch.fft.ifft(torch.fft.fft(y)).real, torch.complex(y, -y).prod())


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    turns = torch.polar(torch.ones_like(angles), angles)
    z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(z * turns[:, None]).flatten(-2).type_as(x)


def _joined(a: torch.Tensor, b: torch.Tensor) -> Any:
    c = torch.cat([a, b * 2, a[:, :3]], 1)
    p = torch.softmax(c, 1)
    return p, c.amax(1), p.argmax(1), (p * c).sum(1), c


def _many_parts(*xs: torch.Tensor) -> Any:
    return torch.cat([x * (i % 7) + 1 for i, x in enumerate(xs)]), torch.stack(
        [x.sum() for x in xs])


def _jacobians(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    def one(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        grad, value = torch.func.jacrev(lambda y: (torch.exp(-((y - t) ** 2)),) * 2,
                                        has_aux=True)(x + 1)
        return 4 - 0.14 / value * grad
    return torch.vmap(one, in_dims=(0, None))(x, t)


SHAPES: Rows = {
    "59 reductions over nothing": (_nothing, lambda: [torch.zeros(0), torch.zeros(0, 3)]),
    "views of nothing": (lambda x: (x.view(0, 2, 3), x.reshape(3, 0).sum(1), x.mean(0).sum()),
        lambda: [torch.zeros(0, 6)]),
    "69 queries that see no key": (_attended, lambda: [learnt(2, 2, 5, 8) for _ in "qkv"]),
    "73 means of windows over the edge": (_means, lambda: [learnt(2, 3, 7, 6)]),
    "75 a mean of one element and its padding": (lambda x: F.avg_pool1d(x, 4, 3, 2), lambda: [
        torch.tensor([[1.7641]])]),
    "77 the largest in windows over the edge": (_largest, lambda: [learnt(1, 2, 6, 7)]),
    "79 nearest pixels": (lambda x: (
        F.interpolate(x, scale_factor=1.3, mode="nearest"), F.interpolate(x, size=(5, 7))),
        lambda: [torch.randn(1, 1, 3, 2, dtype=torch.float64)]),
    "an empty batch of more pixels": (lambda x: [F.interpolate(
        x, (7, 3), mode=mode) for mode in ("nearest", "nearest-exact", "bilinear")],
        lambda: [torch.zeros(0, 3, 4, 5)]),
    "81 resampling": (_resampled, lambda: [learnt(2, 3, 4, 5)]),
    "83 convolutions": (_convolved, lambda: [
        learnt(2, 4, 7, 6), learnt(4, 4, 3, 3), learnt(4, 1, 3, 3)]),
    "channels that change places": (lambda x: (
        torch.channel_shuffle(x, 2), F.pixel_shuffle(x, 2), x.flatten(2).mT), lambda: [
            torch.randn(2, 4, 3, 5).to(memory_format=torch.channels_last)]),
    "129 a join, its softmax and its extremes": (_joined, lambda: [
        torch.randn(33, 17), torch.randn(33, 12)]),
    "131 complex numbers that rotate": (_rotated, lambda: [
        learnt(2, 5, 3, 8), torch.randn(5, 4)]),
    "133 complex views of strided memory": (_complex, lambda: [
        torch.arange(8.0).view(2, 2, 2).transpose(0, 1), torch.arange(6.0)]),
    "135 norms of constants": (_normed_constants, lambda: [
        torch.ones(1).double(), torch.randn(10).double(), torch.rand(10).double() + 0.5]),
    "143 resized, convolved, pooled and chosen": (_resized_to_pooled, lambda: [
        learnt(2, 3, 6, 8), learnt(4, 3, 3, 3), learnt(4)]),
    "147 a number where a tensor is wanted": (_jacobians, lambda: [
        torch.linspace(-2, 2, 9), torch.tensor(0.3)]),
    "179 einsum": (_einsums, lambda: [
        learnt(4, 4), learnt(2, 3, 5), learnt(2, 5, 6), learnt(6, 4), learnt(3, 2)]),
    "183 calls of libraries between kernels": (_libraries, lambda: [
        torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)]),
    "193 more parts than a kernel takes": (_many_parts, lambda: [
        torch.randn(1 + i % 3, 2) for i in range(70)]),
    "195 more results than a kernel gives": (lambda x: [
        (x[:1 + i % 9] * i).cumsum(0) + x[i % 9] for i in range(70)], lambda: [torch.arange(9.0)]),
    "203 long sums of halves": (_wide, lambda: [
        torch.ones(4096, dtype=torch.bfloat16), torch.ones(70000, dtype=torch.float16)]),
    "parts and their join": (lambda x: (
        torch.cat([x.flip(0), x[1:] * 2, x[:0]]).softmax(0), *x.chunk(2), x.roll(1, 0),
        x.unfold(0, 3, 2)), lambda: [learnt(6, 4)]),
}


# ---- indices
def _two_of_four(x: torch.Tensor, w: torch.Tensor) -> Any:
    """The two largest of each four weights, the first of equal ones."""
    fours = w.view(len(w), -1, 4)
    best = fours.abs().argsort(dim=-1, descending=True, stable=True)[..., :2]
    kept = torch.zeros_like(fours, dtype=torch.bool).scatter(-1, best, True)
    sparse = (fours * kept).view_as(w)
    return x @ sparse.t(), kept.sum(-1), fours.gather(-1, best.sort(-1).values), sparse


def _added_up(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> Any:
    z = torch.zeros(6, dtype=s.dtype)
    return (z.index_put((i,), s, accumulate=True), z.scatter_add(0, i, s), torch.bincount(
        i, minlength=6), z.index_add(0, i, s, alpha=2), x.scatter_reduce(0, i, s, "mean"),
        x.scatter_reduce(0, i, s, "amax"), x.scatter_reduce(0, i, s, "prod", include_self=False),
        z.int().index_put((i,), i.int(), accumulate=True), torch.histc(s, 4, -1, 1),
        torch.zeros(6, 6).index_put((i, i.flip(0)), s.float(), accumulate=True))


def _one_row(x: torch.Tensor, i: torch.Tensor) -> Any:
    row = torch.zeros(1, x.shape[1]).scatter_add(0, i[:, None].expand(-1, x.shape[1]), x)
    return row.index_select(0, i), row


INDICES: Rows = {
    "39 a search in a slice": (lambda o, v: (torch.searchsorted(o[1:], v, right=True),
        torch.searchsorted(o[::2].contiguous(), v), torch.bucketize(v, (o * 2)[1:])), lambda: [
        torch.tensor([0, 3, 7, 12, 20]), torch.arange(21)]),
    "105 one row read after it is added to": (_one_row, lambda: [
        learnt(8, 4), torch.zeros(8, dtype=torch.int64)]),
    "107 duplicates in all ways": (_added_up, lambda: [torch.randn(6, dtype=torch.float64),
        torch.tensor([0, 5, 5, 2, 0, 1]), torch.randn(6, dtype=torch.float64)]),
    "gradients of duplicates": (lambda x, i: (x.index_add(0, i, x[i]), x.scatter_add(
        0, i[:, None].expand(-1, 4), x[i]), x.index_put((i,), x[i], accumulate=True)), lambda: [
        learnt(5, 4), torch.tensor([0, 3, 3, -2 + 5, 0])]),
    "an index that is computed": (
        lambda x, i: x.gather(0, (i * 2) % 5) * x.scatter(0, i, 2.0), lambda: [
            learnt(5, 4), torch.arange(5).repeat(4, 1).t()]),
    "a mask": (lambda x: (x.masked_fill(x[:1] > 0, -1.0), torch.where(x > 0, x, 0.0).sum(), x * (
        x > 0)), lambda: [learnt(4, 5)]),
    "109 a slice is replaced": (lambda x, y, v, w: (x.slice_scatter(y, 1, 0, 6).sum(1),
        x.select_scatter(y[:, 0], 1, 2).sum(1), v.slice_scatter(w, 0, 1, 4).sum()), lambda: [
        learnt(4, 13, 5), learnt(4, 6, 5), learnt(6), learnt(3)]),
    "139 rows of a table": (lambda w, i: (
        F.embedding(i, w, padding_idx=0), F.embedding(i, w, padding_idx=-1), F.embedding(i, w),
        F.embedding(i, w, scale_grad_by_freq=True) * 2), lambda: [
        learnt(7, 5), torch.tensor([[0, 1, 1, 6], [6, 3, 0, 1]])]),
    "185 weights of which half are kept": (_two_of_four, lambda: [
        torch.randn(3, 16), torch.arange(-64, 64).remainder(7).float().view(8, 16) - 3]),
    "the largest of each row": (lambda x: (*x.topk(2), x.sort(-1).values, x.argsort(0), x.cummax(0)[
        0]), lambda: [learnt(5, 6)]),
}


# ---- memory, to the bit
def _scattered(x: torch.Tensor) -> torch.Tensor:
    x.index_put_((torch.arange(len(x)),), x * 2.0)
    x.add_(x.flip(0))
    return x


def _adam(p: torch.Tensor, g: torch.Tensor) -> Any:
    m, v, steps = torch.zeros_like(p), torch.zeros_like(p), torch.zeros(())
    for _ in range(3):
        steps.add_(1)
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        n = steps.item()
        scale = (v.sqrt() / (1 - 0.999 ** n) ** 0.5).add_(1e-8)
        p.addcdiv_(m, scale, value=-0.001 / (1 - 0.9 ** n))
    return p, m, v


def _windows(z: torch.Tensor, s: torch.Tensor) -> Any:
    return (z.select(1, 2), s.as_strided((3, 4), (2, 1)) * 2, s.as_strided((5,), (1,), 7) + 0,
            z.as_strided((2, 2), (1, 3), z.storage_offset()) + 1)


def _doubled(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_strided(x.size(), x.stride())
    y[:] = x + x
    return y


def _both(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.add_(1)
    z = x * y
    y.mul_(2)
    return z, x + 0


def _metadata(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.t_()
    y.unsqueeze_(0)
    return x * 2, y + 1


def _before(x: torch.Tensor) -> Any:
    a, b = x + 1, x.view(-1)[::2]
    s = b.sum()
    x.mul_(3)
    c = a * 2
    a.relu_()
    return s, b * 1, c, a, x.sum(), x.clone()


def _masked(x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> Any:
    before = x.masked_fill(mask, 0)
    x[:, 1:].masked_fill_(mask[:, 1:], value)
    x[mask.expand_as(x).logical_not()] = -1.0
    return before, x.masked_scatter(mask, torch.arange(64.0))


def _resized(x: torch.Tensor) -> Any:
    y, z, out = torch.empty(0), torch.empty(0), torch.empty(3, 2)
    y.resize_(3, 2).copy_(x)
    z.set_(y)
    torch.add(x, 1, out=out)
    return y + z, out, x.new_full((2, 2), 5.0), x.as_strided((8,), (0,)) * 2


def _padded(x: torch.Tensor) -> Any:
    """Results in the memory order of an argument, which changes after they are computed."""
    padded, doubled = F.pad(x, (1, 1)), F.interpolate(x, scale_factor=2)
    x.relu_()
    return padded, doubled, x * 2


def _swap(x: torch.Tensor, y: torch.Tensor) -> Any:
    old = x.clone()
    x.copy_(y)
    y.copy_(old)
    return old.t(), x + y


def _copies(x: torch.Tensor) -> Any:
    """Copies of an argument, seen in several ways, one of them after it has changed."""
    whole, turned, window = x.clone(), x.clone().t(), x.clone().as_strided((2, 2), (2, 1))
    x.mul_(2)
    return whole, turned, window, x.t(), x.clone()


def _filled_wide(x: torch.Tensor) -> Any:
    """What AOTAutograd would sum over the rows of the wide view."""
    return x.expand(3, *x.shape).fill_(0.5) * 2


def _own_flip(x: torch.Tensor) -> Any:
    y = torch.zeros_like(x)
    y[1:3] = x[1:3]
    y += y.flip(0)
    return y


def _columns(x: torch.Tensor, y: torch.Tensor) -> Any:
    """What later kernels read lies in arguments with gaps."""
    x.mul_(2)
    y.add_(x)
    return x * y, x.cumsum(0), x @ y.t(), y.sort(0)


def _scanned(x: torch.Tensor) -> Any:
    """The kernel that makes the last value of the argument does not read it."""
    c = x.cumsum(0)
    x.add_(c)
    total = x.logcumsumexp(0)
    x.mul_(total.exp().sum())
    return c, x.cumsum(0)


def _view_of_the_second(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.add_(100)
    return y[0], y[:, :1].unsqueeze(1), y.mT


MEMORY: Rows = {
    "99 scattered into, then added to its mirror image": (_scattered, lambda: [torch.rand(4, 8)]),
    "101 a number in the loop of an optimizer": (_adam, lambda: [torch.randn(9), torch.randn(9)]),
    "111 windows into arguments that begin later": (_windows, lambda: [
        torch.arange(360.0).view(3, 4, 5, 6)[2], torch.arange(20.0)[5:15]]),
    "113 strides of the result": (_doubled, lambda: [
        torch.arange(256.0).as_strided((16, 8), (16, 1))]),
    "115 one tensor as two arguments": (_both, lambda: [torch.arange(5.0)] * 2),
    "117 arguments and views of them": (lambda x, y: (
        z := x + y, x, x.view(-1), y.t(), z[0], z, x.detach(), x + 0), lambda: [
        torch.arange(6.0).view(2, 3), torch.ones(2, 3)]),
    "119 the shapes of arguments change": (_metadata, lambda: [torch.ones(4, 3), torch.ones(4)]),
    "121 read before it is written": (_before, lambda: [torch.arange(-6.0, 6.0).view(3, 4)]),
    "123 a mask of rows": (_masked, lambda: [torch.rand(2, 4, 8), torch.tensor(
        [1, 0, 1, 1, 0, 1, 0, 0], dtype=torch.bool).view(2, 4, 1), torch.tensor(5.0)]),
    "125 fresh memory is resized": (_resized, lambda: [torch.ones(3, 2)]),
    "a view of one of two arguments in one memory": (_view_of_the_second, lambda: [
        x := torch.arange(24.0).view(4, 6), x[1:]]),
    "a view of one of two arguments beside each other in one memory": (
        _view_of_the_second, lambda: [(x := torch.arange(24.0).view(4, 6))[:, :3], x[:, 3:]]),
    "arguments are swapped": (_swap, lambda: [torch.randn(3, 3), torch.randn(3, 3)]),
    "copies before an update": (_copies, lambda: [torch.randn(4, 3)]),
    "columns change": (_columns, lambda: [(x := torch.arange(24.0).view(6, 4))[:, :2], x[:, 2:]]),
    "columns change twice": (_scanned, lambda: [torch.zeros(5, 4)[:, 1:3]]),
    "transposed arguments change": (_columns, lambda: [
        torch.arange(12.0).view(2, 6).t(), torch.arange(12.0).view(2, 6).t()]),
    "padded, channels last, before an update": (_padded, lambda: [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)]),
    "written through elements that share memory": (_filled_wide, lambda: [torch.randn(4)]),
    "views of copies": (lambda x: (x.clone().t(), x.clone().as_strided((2,), (2,)), x.t()),
        lambda: [torch.randn(4, 3)]),
    "masks that share memory": (
        lambda x: (x[:, :, None] & x[:, None], x[:1].expand(2, 3) | x, x[:1].expand(2, 3) ^ x),
        lambda: [torch.arange(6).view(2, 3)]),
    "added to its own mirror image": (_own_flip, lambda: [torch.randn(5, 2)]),
}


DECLINED = {  # faults of AOTAutograd: see faults.py
    "written through elements that share memory", "a view of one of two arguments in one memory"}


PROGRAMS = INTEGERS | VALUES | TYPES | SHAPES | INDICES | MEMORY


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_as_in_eager(name: str) -> None:
    fn, make = PROGRAMS[name]
    agrees(fn, make(), exact=name in INTEGERS | MEMORY, strict=name not in DECLINED)


# ---- several calls
def _added_where_computed(i: torch.Tensor, y: torch.Tensor) -> Any:
    at = i + 10
    y[at] += y[at]
    return at


def _scheduled(p: torch.Tensor, g: torch.Tensor, rate: float) -> None:
    p.add_(g, alpha=-rate)
    p.mul_(1 - rate * 0.1)
    p.sub_(rate * g.sign())


def _rows(x: torch.Tensor, w: torch.Tensor) -> Any:
    h = torch.relu(x @ w)
    return (h, h.flatten(), h.t().contiguous().view(-1), x.new_zeros(len(x) + 1).sum(),
            torch.cat([x, x[:1]]))


def _counted(x: torch.Tensor) -> Any:
    n, m = x.shape
    return (torch.full((1,), n) + torch.arange(n) * m, x.view(-1)[:(n * m) // 3] * (n / m), n * m,
            torch.linspace(0, 1, n) * n ** 2 % 7, x.reshape(m, n) if n > m else x, -n // 2,
            torch.full((n, n), float(m)).triu(), torch.tensor(n), (n - 5) % 3, x / n + m)


def _turned(x: torch.Tensor) -> Any:
    y = x.repeat_interleave(2, 0)
    return (y.flip(0), y.flip(0, 1).roll((1, -2), (0, 1)), torch.rot90(y), x.repeat(2, 3).flip(1),
            y.fliplr().tril())


def _branches(x: torch.Tensor) -> Any:
    y = x * 2 if x.sum() > 0 else x - 1
    size, n = int(x.abs().max()) + 1, 0
    while y.sum() < 50 and n < 6:
        y, n = y * 2 + 1, n + 1
    return y, size, torch.zeros(size) + n, x.mean().item(), x[:2].tolist(), x[x > 0] * n


def _ranks() -> Sequence[torch.Tensor]:
    r = torch.arange(120.0)
    return [r[:3], r[:6].view(2, 3), r[:24].view(2, 3, 4), r[:24].view(4, 3, 2).permute(2, 1, 0),
            r[:20:2], r.view(2, 3, 4, 5), r[:12].view(3, 4).t(), r[:1].expand(4, 3), r.double(),
            r.view(2, 60)[:, ::7], r[:5].half()]


CALLS: dict[str, tuple[Callable[..., Any], bool | None, Callable[[], Sequence[Sequence[Any]]]]] = {
    "103 added to itself where it is computed": (_added_where_computed, True, lambda: [
        (torch.tensor([[-10, -9, -10]]), torch.randn(3, 5)),
        (torch.full((1, 2), -10), torch.randn(2, 32))]),
    "167 another learning rate in each step": (_scheduled, None, lambda: [
        (torch.randn(5), torch.randn(5), 0.1 * 0.5 ** n) for n in range(5)]),
    "169 one row, then others": (_rows, True, lambda: [
        (torch.randn(n, 4), torch.randn(4, 3)) for n in (1, 2, 3, 17)]),
    "171 sizes that are numbers too": (_counted, None, lambda: [
        (torch.arange(4.0 * n).view(n, 4),) for n in (3, 5, 8, 2)]),
    "173 turned and repeated": (_turned, True, lambda: [
        (torch.arange(2.0 * n).view(n, 2),) for n in (3, 5, 4)]),
    "175 branches on data": (_branches, None, lambda: [(torch.tensor(x),) for x in (
        [1.0, 2, 3], [-1.0, -2, -3.5], [30.0, 40, -1], [0.5, 2, 3])]),
    "197 ranks, strides and types": (
        lambda x: (x - x.mean(-1, keepdim=True)).relu().sum(-1), None,
        lambda: [(x,) for x in _ranks()]),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_does_as_in_eager(name: str) -> None:
    fn, dynamic, make = CALLS[name]
    first, *more = make()
    agrees(fn, first, more=more, dynamic=dynamic)


# ---- errors
def _transposed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.tanh(F.conv_transpose2d(x, w, padding=1, output_padding=1))


FAULTS: Rows = {  # of AOTAutograd too: see faults.py
    "floats written to whole numbers": (lambda x: x.clone().logit_(), lambda: [torch.arange(2)]),
    "a product written to them": (lambda x: x.clone().ldexp_(x), lambda: [torch.arange(2)]),
    "complex numbers written to floats": (lambda x: x.clone().add_(1j), lambda: [torch.ones(2)]),
    "results of two types": (lambda x: torch.aminmax(x, dim=0, out=(
        torch.zeros(2), torch.zeros(2).double())), lambda: [torch.ones(3, 2)]),
    "a complex number of another width": (lambda x: torch.complex(
        x, x, out=torch.zeros(3, dtype=torch.complex64)), lambda: [torch.ones(3).double()]),
    "classes of bytes": (lambda x: F.one_hot(x, 2), lambda: [torch.ones(3).byte()]),
    "no classes": (lambda x: F.one_hot(x, 0), lambda: [torch.ones(0).long()]),
    "no classes for some": (lambda x: F.one_hot(x, 0), lambda: [torch.ones(2).long()]),
    "the largest of whole numbers": (lambda x: F.max_pool1d(x, 2), lambda: [
        torch.ones(2, 4).long()]),
    **{f"memory that overlaps, written by {name}": (fn, lambda: [torch.ones(4)])
       for name, fn in {
           "a list": lambda x: torch._foreach_add_([x.expand(3, 4)], 1.0),
           "an overload": lambda x: torch.ops.aten.add_.Tensor(x[1:], x[:3]),
           "an operator": lambda x: x[1:].__iadd__(x[:3])}.items()},
}

RAISES: Rows = {
    "3 a remainder by zero": (lambda x, y: torch.remainder(x, y) + 1, lambda: [
        torch.arange(9, dtype=torch.uint8), torch.tensor([3, 2, 1, 4, 0, 5, 6, 7, 8]).byte()]),
    "a quotient by zero": (lambda x, y: x // y, lambda: [
        torch.ones(2).long(), torch.zeros(2).long()]),
    "17 a bool minus a bool": (lambda x: (x - x).sum(), lambda: [torch.tensor([True])]),
    "51 a whole number to a negative power": (lambda x: x ** -1 + 1, lambda: [torch.arange(1, 4)]),
    "61 an index into nothing": (lambda x: x[[0]] * 2, lambda: [torch.zeros(0)]),
    "an index that is data, into nothing": (lambda x, i: x[i] + 1, lambda: [
        torch.randn(0, 2), torch.tensor([0])]),
    "63 a size that nothing tells": (lambda x: x.view(0, -1, 4) + 1, lambda: [torch.zeros(0, 8)]),
    "a shape that does not fit": (lambda x, y: x + y, lambda: [torch.ones(3), torch.ones(4)]),
    "71 a mask of another type": (lambda q, m: F.scaled_dot_product_attention(
        q, q, q, attn_mask=m), lambda: [torch.randn(1, 2, 4, 8), torch.zeros(4, 4).double()]),
    "85 padding of an output": (_transposed, lambda: [
        torch.ones(1, 1, 8, 8), torch.ones(1, 1, 3, 3)]),
    "87 types that do not mix": (nn.Linear(3, 2), lambda: [torch.ones(4, 3).half()]),
    "89 a negative width": (
        lambda x: F.smooth_l1_loss(x, x + 1, beta=-1.0), lambda: [torch.ones(3)]),
    "91 an index beyond the end": (lambda x: x.index_select(0, torch.tensor([2])) + 1, lambda: [
        torch.ones(2, 2)]),
    "an index that is data, beyond the end": (lambda x, i: x[i] + 1, lambda: [
        torch.randn(3, 2), torch.tensor([0, 3])]),
    "a row before the start": (lambda w, i: F.embedding(i, w), lambda: [
        torch.randn(3, 2), torch.tensor([-1])]),
    "a class beyond the last": (lambda x: F.one_hot(x, 3) + 1, lambda: [torch.tensor([0, 3])]),
    "a class before the first": (lambda x: F.one_hot(x, 3) + 1, lambda: [torch.tensor([0, -1])]),
    "93 a place beyond the end": (
        lambda x: torch.cat([(y := x.unsqueeze(1)).select(1, 0), y.select(1, 1)], -1), lambda: [
            torch.ones(3, 2)]),
    "95 a scatter before the start": (lambda x, i: x.scatter_reduce(0, i, x, "sum"), lambda: [
        torch.ones(3), torch.tensor([0, -1, 1])]),
    "97 a window beyond the end": (lambda x: torch.full((1, 2), 1.0).as_strided(
        (64, 64, 3), (1, 64, 192)).cumsum(1).sum() + x.sum(), lambda: [torch.ones(4, 1)]),
    **{f"a number too large to {name}": (fn, lambda: [torch.ones(3).half()]) for name, fn in {
        "fill with": lambda x: x.masked_fill(x > 0, -1e9), "be a bound": lambda x: x.clamp(max=1e9),
        "make a tensor of": lambda x: torch.full_like(x, 1e9) + x, "raise to": lambda x: x ** 1e9,
        "choose": lambda x: torch.where(x.float() > 0, x.float(), 1e300)}.items()},
    **{f"bytes {name}": (fn, lambda: [torch.ones(3, dtype=torch.uint8)]) for name, fn in {
        "with a negative edge": lambda x: F.pad(x, (1, 1), value=-1),
        "taken from true": lambda x: True - x,
        "less true": lambda x: x - True, "less a bool": lambda x: x - torch.tensor(True),
        "times true": lambda x: torch.add(x, x, alpha=True)}.items()},
    **FAULTS,
    **{f"a tensor of the inference mode, {name}": (fn, lambda: [
        torch.inference_mode()(torch.ones)(3)]) for name, fn in {
            "changed and returned": lambda x: x.add_(1),
            "changed": lambda x: (x.mul_(2), None)[1]}.items()},
    "bools times a number": (lambda x: torch.add(x, x, alpha=1.0), lambda: [torch.tensor([True])]),
    **{f"{name} of whole numbers": (fn, lambda: [torch.ones(2, 4).long()]) for name, fn in {
        "a scaled quotient": lambda x: torch.addcdiv(x, x, x), "a gate": F.glu,
        "a variance": torch.var_mean, "a loss": lambda x: F.nll_loss(x, x[:, 0]),
        "shrinkage": F.hardshrink, "a margin": lambda x: F.multi_margin_loss(x, x[:, 0]),
        "more pixels": lambda x: F.interpolate(x[None], 5)}.items()},
    **{f"{name} of bools": (fn, lambda: [torch.ones(2, 4).bool()]) for name, fn in {
        "rounding": torch.ceil, "a power": lambda x: x ** x, "bounds": lambda x: x.clamp(x, x),
        "a remainder": lambda x: x % x, "a mirrored edge": lambda x: F.pad(x, (1, 1), "reflect"),
        "the place": lambda x: x[0, 0].argmax(0)}.items()},
    **{name: (fn, lambda: [torch.ones(5, 3)]) for name, fn in {
        "a width of nothing": lambda x: F.celu(x, 0.0),
        "a dimension that a number has not": lambda x: x[0, 0].softmax(1),
        "a diagonal that is too short": lambda x: x.diagonal_scatter(x[0, :2]),
        "a slice with a dimension too few": lambda x: x[:, None].select_scatter(x[0], 0, 1),
        "statistics of another type": lambda x: F.batch_norm(
            x, x[0].double(), x[0].double())}.items()},
}


@pytest.mark.parametrize("name", RAISES)
def test_an_error_is_raised_as_in_eager(name: str) -> None:
    fn, make = RAISES[name]
    with pytest.raises((RuntimeError, IndexError)) as eager:
        fn(*make())
    with pytest.raises((eager.type, TorchRuntimeError)) as found:  # Dynamo's, where it finds out
        rung(fn, strict=name not in FAULTS)(*make())
    assert not isinstance(found.value, BackendCompilerFailed)


def test_a_gradient_that_eager_refuses() -> None:
    """What an activation in place gave does not tell its argument where the slope is negative."""
    for fn in (lambda x: F.elu_(x * 1, -1.0), lambda x: F.leaky_relu_(x * 1, -0.5)):
        with pytest.raises(RuntimeError, match="negative slope"):
            rung(fn)(learnt(3)).sum().backward()


def test_every_report_has_a_test() -> None:
    """Rows here, and marks of tests in any file; reports of even numbers are kept apart."""
    found = [int(name.split()[0]) for name in (*PROGRAMS, *CALLS, *RAISES) if name[0].isdigit()]
    for path in Path(__file__).parent.rglob("test_*.py"):
        marks = re.findall(r"^@pytest\.mark\.report\(([\d, ]+)\)$", path.read_text(), re.M)
        found += [int(n) for mark in marks for n in mark.split(",")]
    assert sorted(found) == [*range(1, 204, 2), 205, 231, 241]


# ---- norms of other types
NORMS: dict[str, Callable[..., Any]] = {
    "batch norm in training": lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, training=True),
    "batch norm": lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b),
    "instance norm": lambda x, w, b, m, v: F.instance_norm(x, m, v, w, b),
    "group norm": lambda x, w, b, m, v: F.group_norm(x, 3, w, b),
    "layer norm": lambda x, w, b, m, v: F.layer_norm(x.mT, w.shape, w, b),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_halves_with_parameters_in_single(
        name: str, grad: bool, dtype: torch.dtype) -> None:
    """Eager's statistics are then of another type than torch states."""
    x = torch.randn(4, 6, 5).to(dtype).requires_grad_(grad)
    weight, bias = (torch.rand(6, requires_grad=grad) for _ in range(2))
    agrees(NORMS[name], [x, weight, bias, torch.zeros(6), torch.ones(6)])


@pytest.mark.parametrize("mode, rank", [("nearest", 1), ("nearest-exact", 2), ("linear", 1),
                                        ("bilinear", 2), ("bicubic", 2), ("trilinear", 3)])
def test_resampling_to_a_size_of_another_tensor_trains(mode: str, rank: int) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, y.shape[2:], mode=mode) * 2
    for size in (3, 4):
        x, y = (torch.randn(2, 3, *[n] * rank) for n in (size, 2 * size))
        agrees(fn, [x.requires_grad_(), y], dynamic=True)
