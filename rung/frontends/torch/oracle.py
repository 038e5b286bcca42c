"""The meaning of a program on NumPy: the oracle for Program and Tensor IR on real graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rung.core.interp import Interp
from rung.core.op import Value
from rung.core.types import BF16, INDEX, TensorType
from rung.frontends.torch.calls import run_call
from rung.frontends.torch.tensors import fit
from rung.program.ir import Call

Array = np.ndarray[Any, np.dtype[Any]]


def run(op: Call, operands: Mapping[Value, Array], interp: Interp) -> Any:
    """A call, run through torch."""
    values = {v: laid_out(to_tensor(x, v.type), v, interp.symbols) for v, x in operands.items()}
    out = [to_numpy(x) for x in run_call(op, values, interp.symbols)]
    interp.symbols.update((r.name, int(x)) for r, x in zip(op.results, out, strict=True)
                          if r.type == INDEX)
    return out[0] if len(op.results) == 1 else tuple(out)


def to_numpy(x: Any) -> Array:
    """A copy as the interpreter holds it: bf16, and others that NumPy lacks, in float32."""
    if not isinstance(x, torch.Tensor):
        return np.asarray(x)
    if x.dtype == torch.complex32:
        x = x.to(torch.complex64)
    elif x.dtype == torch.bfloat16 or (x.is_floating_point() and x.itemsize == 1):
        x = x.float()
    return np.array(x.numpy(force=True))


def to_tensor(x: Array, kind: Any) -> torch.Tensor:
    """The inverse of `to_numpy`; contiguous."""
    tensor = torch.from_numpy(np.array(x, order="C"))
    dtype = kind.dtype if isinstance(kind, TensorType) else None
    return tensor.to(torch.bfloat16) if dtype is BF16 else tensor


def laid_out(x: torch.Tensor, value: Value, sizes: Mapping[str, int]) -> torch.Tensor:
    """`x` with the strides of the value's type."""
    if not isinstance(value.type, TensorType) or value.type.strides is None:
        return x
    strides = [int(np.asarray(s.evaluate(sizes))) for s in value.type.strides]
    return fit(x, x.shape, strides, x.dtype)
