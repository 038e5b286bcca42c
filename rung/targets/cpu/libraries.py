"""Library matmuls of the CPU as atoms: ATen (MKL) and oneDNN, beside our own kernels by price.

What each reaches is a figure of the CPU: a share of its peak, and where it has only a few rows, of
the rate at which all cores read memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from rung.core.cost import known
from rung.core.expr import Expr
from rung.core.machine import Machine, Reach
from rung.core.op import Func
from rung.core.types import BF16, F32, I8, TensorType, Type
from rung.targets.libraries import BYTES, LINEAR, MATMUL, POSTS, Seconds, amounts, matmul
from rung.tile.match import LibraryCall

SKINNY = 8  # rows below which a library's matmul is bound by how it streams the matrix
UNKNOWN = Reach(0.4, 0.9, 5e-6)


def _seconds(name: str) -> Seconds:
    def seconds(call: LibraryCall, kernel: Func, machine: Machine, hints: Mapping[str, int]
                ) -> float:
        dtype, m, operations, moved = amounts(call, kernel, hints)
        rates, cores, memory = machine.rates, machine.cores, machine.spaces[-1]
        reach = rates.reach.get(f"{name} {dtype}", UNKNOWN)
        stream = memory.rate * memory.together(cores) * (reach.stream if m < SKINNY else 0.9)
        peak = rates.flops["f32"] * reach.peak * cores * (rates.issue.scale if cores > 1 else 1.0)
        work = operations / peak if m >= SKINNY else 0.0
        return max(work, moved / stream) + reach.dispatch + (rates.fork if cores > 1 else 0.0)

    return seconds


LIBRARIES = (
    *(matmul(MATMUL, _seconds(MATMUL), dtype, batch=batch, bias=bias) for dtype in (F32, BF16)
      for batch, bias in ((False, False), (True, False), (False, True))),
    matmul(BYTES, _seconds(BYTES), I8),
    *(matmul(LINEAR, _seconds(LINEAR), F32, bias=bias, post=post)
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
