"""Library matmuls of the CPU as atoms: ATen (MKL) and oneDNN, beside our own kernels by price.

Shares of the peak were measured on a Zen 5 core: MKL 0.40 in fp32, oneDNN 0.78 in fp32 and 0.92 of
the bf16 peak, which is 1.83 times that of fp32. One row is bound by memory, and torch streams a
bf16 matrix at a third of the bandwidth. `dispatch` is the host's part: what a call takes whose
matrices are tiny.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from rung.core.cost import known
from rung.core.expr import Expr
from rung.core.machine import Machine
from rung.core.op import Func
from rung.core.types import BF16, F32, I8, TensorType, Type, dtype_of
from rung.loop.ir import extents_of
from rung.targets.cpu.machine import features
from rung.targets.libraries import BYTES, LINEAR, MATMUL, POSTS, Seconds, matmul
from rung.tile.match import LibraryCall

SKINNY = 8  # rows below which a library's matmul is bound by how it streams the matrix


def _seconds(share: float, dispatch: float) -> Seconds:
    def seconds(call: LibraryCall, kernel: Func, machine: Machine, hints: Mapping[str, int]
                ) -> float:
        extents, dtype = extents_of(kernel), dtype_of(call.tensors["a"].buffer.type)
        batch, m, n, k = (max(1, known(extents[call.axes[a]], hints)) if a in call.axes else 1
                          for a in "hijk")
        peak = machine.rates.flops["f32"] * machine.cores
        if dtype == BF16:
            peak *= 1.83 * 0.92 / share if "avx512_bf16" in features() else 0.2
        if dtype == I8:
            peak *= 4.0 * 0.87 / share if "avx512_vnni" in features() else 1.0
        bytes_ = dtype.bytes * batch * (m * k + k * n + m * n)
        stream = machine.rates.memory * (0.35 if dtype == BF16 and m < SKINNY else 0.9)
        work = 2.0 * batch * m * n * k / (peak * share) if m >= SKINNY else 0.0
        fork = machine.rates.fork if machine.cores > 1 else 0.0
        return max(work, bytes_ / stream) + dispatch + fork

    return seconds


LIBRARIES = (
    *(matmul(MATMUL, _seconds(0.40, 5e-6), dtype, batch=batch, bias=bias) for dtype in (F32, BF16)
      for batch, bias in ((False, False), (True, False), (False, True))),
    matmul(BYTES, _seconds(0.40, 5e-6), I8),
    *(matmul(LINEAR, _seconds(0.78, 18e-6), F32, bias=bias, post=post)
      for bias in (False, True) for post in POSTS))


ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
ATTENTION_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
GROUP_NORM = "aten.native_group_norm.default"
INT_MATMUL = "aten._int_mm.default"
QUERIES = 8  # from as many on, ATen's attention took 0.3 to 0.7 of the time of our own kernel
HALF_QUERIES = 256  # below, ATen's backward of bf16 took 1.5 to 5 times ours; else 0.5 to 1.1
ELEMENTS = 1 << 13  # from as many on, ATen's group norm took 0.5 to 0.9 of the time of ours


def keeps_call(call: str, operands: Sequence[Type], hints: Mapping[str, int], machine: Machine
               ) -> bool:
    """Whether an ATen call, which could be opened, is faster as it is: attention of many queries,
    which ATen computes in blocks, without the tiles that a causal mask hides, its backward,
    group norm of more than a cache's worth, which it reads once less, and products of bytes where
    no atom computes them."""
    if call == INT_MATMUL:
        return not any(x.rate == "i8" for x in machine.atoms)
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
