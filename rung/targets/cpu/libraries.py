"""Library matmuls of the CPU as atoms: ATen (MKL) and oneDNN, beside our own kernels by price.

Shares of the peak were measured on a Zen 5 core: MKL 0.40 in fp32, oneDNN 0.78 in fp32 and 0.92 of
the bf16 peak, which is 1.83 times that of fp32. One row is bound by memory, and torch streams a
bf16 matrix at a third of the bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch

from rung.core.expr import Expr
from rung.core.machine import Machine
from rung.core.op import Func
from rung.core.types import BF16, F32, TensorType, Type, shape_of
from rung.targets.cpu.machine import features
from rung.tile.atoms import Library, Matmul, Operand
from rung.tile.price import known

DISPATCH = 3e-6  # seconds that one library call costs the host
SKINNY = 8  # rows below which a library's matmul is bound by how it streams the matrix


def _seconds(share: float) -> Callable[[Matmul, Func, Machine, Mapping[str, int]], float]:
    def seconds(mm: Matmul, kernel: Func, machine: Machine, hints: Mapping[str, int]) -> float:
        batch, m, n, k = mm.sizes(kernel, hints)
        peak = machine.rates.flops["f32"] * machine.cores
        if mm.dtype == BF16:
            peak *= 1.83 * 0.92 / share if "avx512_bf16" in features() else 0.2
        bytes_ = mm.dtype.bytes * batch * (m * k + k * n + m * n)
        stream = machine.rates.memory * (0.35 if mm.dtype == BF16 and m < SKINNY else 0.9)
        work = 2.0 * batch * m * n * k / (peak * share) if m >= SKINNY else 0.0
        return max(work, bytes_ / stream) + DISPATCH

    return seconds


def _has_onednn() -> bool:
    built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return built and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _fits_aten(mm: Matmul) -> bool:
    return mm.post == "none" and mm.dtype in (F32, BF16) and not (mm.bias and mm.batch)


def _fits_linear(mm: Matmul) -> bool:
    plain = not mm.batch and mm.a.axes == (mm.m, mm.k) and mm.b.axes == (mm.n, mm.k)
    return plain and mm.dtype == F32 and _has_onednn()


LIBRARIES = (Library("aten.matmul", _fits_aten, _seconds(0.40)),
             Library("onednn.linear", _fits_linear, _seconds(0.78)))


ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
ATTENTION_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
GROUP_NORM = "aten.native_group_norm.default"
QUERIES = 8  # from as many on, ATen's attention took 0.3 to 0.7 of the time of our own kernel
HALF_QUERIES = 256  # below, ATen's backward of bf16 took 1.5 to 5 times ours; else 0.5 to 1.1
ELEMENTS = 1 << 13  # from as many on, ATen's group norm took 0.5 to 0.9 of the time of ours


def keeps_call(call: str, operands: Sequence[Type], hints: Mapping[str, int]) -> bool:
    """Whether an ATen call, which could be opened, is faster as it is: attention of many queries,
    which ATen computes in blocks, without the tiles that a causal mask hides, its backward, and
    group norm of more than a cache's worth, which it reads once less."""
    first = operands[0] if operands else None
    if not isinstance(first, TensorType):
        return False
    if call == GROUP_NORM:
        return known(prod(first.shape, start=Expr.of(1)), hints) >= ELEMENTS
    if call not in (ATTENTION, ATTENTION_BACKWARD):
        return False
    queries = known(first.shape[-2], hints)
    if call == ATTENTION:
        return queries >= QUERIES
    return first.dtype != BF16 or queries >= HALF_QUERIES


def _whole(at: Mapping[str, torch.Tensor], x: Operand) -> torch.Tensor:
    """A view of an operand without the dimensions of size 1 that no axis runs along."""
    tensor = at[x.buffer.name]
    return tensor[tuple(slice(None) if n in x.dims else 0 for n in range(tensor.dim()))]


def run(name: str, mm: Matmul, at: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The matmul of tensors by parameter name; in the output's own memory if that is among them."""
    a, b = _whole(at, mm.a), _whole(at, mm.b)
    out = _whole(at, mm.out) if mm.out.buffer.name in at else None
    made = _matmul(name, mm, a, b, _whole(at, mm.bias) if mm.bias else None, out)
    rank = len(shape_of(mm.out.buffer.type))
    return made[tuple(slice(None) if n in mm.out.dims else None for n in range(rank))]


def _matmul(name: str, mm: Matmul, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None,
            out: torch.Tensor | None) -> torch.Tensor:
    if name == "onednn.linear":
        made: torch.Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias, mm.post, [], "")
        return made if out is None else out.copy_(made)
    a = a if mm.a.axes[-1] == mm.k else a.transpose(-1, -2)
    b = b if mm.b.axes[-1] == mm.n else b.transpose(-1, -2)
    if bias is not None:
        return torch.addmm(bias, a, b, out=out)
    return torch.bmm(a, b, out=out) if mm.batch else torch.mm(a, b, out=out)
