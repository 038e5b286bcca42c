"""Library matmuls of CUDA as atoms: ATen (cuBLAS), beside our own kernels by price.

Shares of the peaks were measured on an H200: products of 8192 in bf16 at 790 TFLOP/s, in fp32 at
0.9 of what FFMA can do; products over 50,257 classes at 5.5 to 7.8 times the time of 50,264.
"""

from __future__ import annotations

from collections.abc import Mapping

from rung.core.cost import known
from rung.core.machine import Machine
from rung.core.op import Func
from rung.core.types import BF16, F16, F32, F64, shape_of
from rung.targets.libraries import MATMUL, amounts, matmul
from rung.tile.match import LibraryCall

FLOPS = {BF16: 750e12, F16: 750e12, F32: 50e12, F64: 55e12}
MEMORY = 4.0e12  # B/s at which matrices are read
ROWS, LOOSE = 16, 6.0  # bytes of which rows of halves begin at a multiple; times the work otherwise


def seconds(call: LibraryCall, kernel: Func, machine: Machine, hints: Mapping[str, int]) -> float:
    """What a product takes: its work or its bytes, and a launch."""
    dtype, _, operations, moved = amounts(call, kernel, hints)
    work = operations / FLOPS[dtype]
    rows = [known(shape_of(t.buffer.type)[t.dims[-1]], hints) * dtype.bytes
            for name, t in call.tensors.items() if name in "aby"]
    work *= LOOSE if dtype.bytes == 2 and any(n % ROWS for n in rows) else 1
    return max(work, moved / MEMORY) + machine.rates.launch


LIBRARIES = tuple(matmul(MATMUL, seconds, dtype, batch=batch, bias=bias) for dtype in FLOPS
                  for batch, bias in ((False, False), (True, False), (False, True)))
