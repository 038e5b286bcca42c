"""Small programs of Tensor IR ops for the tests of the middle rungs, and running both sides.

`Prog` is the fuzzer's builder. `check` runs two modules on the same inputs and compares bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rung.core.cost import bound
from rung.core.expr import is_size
from rung.core.machine import Machine, Rates, Space
from rung.core.op import Func
from rung.core.scalar import round_bf16
from rung.core.types import BF16, BOOL, TensorType
from rung.program.ir import Module
from rung.tools.check import results
from rung.tools.fuzz.tensors import Prog, size

CPU = Machine("test", (), (Space("dram", 1 << 34, 37e9), Space("l3", 32 << 20, 117e9)),
              Rates(37e9, 117e9, {"f32": 272e9, "bf16": 498e9}, 1e-6), 16, 32, cores=2)


def price(kernel: Func) -> float:
    """Seconds of a kernel on `CPU`, for the passes that compare prices."""
    return bound(kernel, CPU).seconds


def draw(program: Func, sizes: dict[str, int] | None = None, seed: int = 0,
         ints: int = 2) -> list[Any]:
    """Random arguments; integers are below `ints`, bf16 is held, rounded, in float32."""
    rng = np.random.default_rng(seed)
    out: list[Any] = []
    for p in program.params:
        assert isinstance(p.type, TensorType)
        shape = [int(n.evaluate(sizes or {})) for n in p.type.shape]
        if p.type.dtype.kind in "iu":
            x = rng.permutation(max(ints, int(np.prod(shape))))[:int(np.prod(shape))] % ints
            out.append(x.reshape(shape).astype(p.type.dtype.numpy))
        elif p.type.dtype is BOOL:
            out.append(rng.random(shape) < 0.5)
        else:
            x = rng.standard_normal(shape).astype(np.float32)
            out.append(round_bf16(x) if p.type.dtype is BF16 else x.astype(p.type.dtype.numpy))
    return out


def check(before: Module, after: Module, inputs: Sequence[Any], exact: bool = True) -> None:
    """Both modules give the same on `inputs` (bits, or to rounding)."""
    for a, b in zip(results(before, inputs), results(after, inputs), strict=True):
        if exact:
            np.testing.assert_array_equal(a, b)
        else:
            top = np.abs(a[np.isfinite(a)]).max(initial=1.0)
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6 * top)


__all__ = ["CPU", "Prog", "check", "draw", "is_size", "results", "size"]
