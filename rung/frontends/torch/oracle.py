"""The meaning of a program on NumPy: the oracle for Program and Tensor IR on real graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rung.core.interp import Interp, bind_sizes
from rung.core.op import Func, Value
from rung.core.types import BF16, INDEX, TensorType
from rung.frontends.torch.calls import run_call
from rung.program.ir import Call

Array = np.ndarray[Any, np.dtype[Any]]


def run_program(func: Func, inputs: Sequence[torch.Tensor | int]) -> tuple[torch.Tensor, ...]:
    """The results of `func` with the strides of their types; mutated parameters are updated.

    `inputs` are the graph's inputs, then the constants. Calls that are left run through torch.
    """
    sizes = sizes_of(func.params, inputs)
    interp = Interp(sizes)
    interp.callees["call"] = _call
    for param, x in zip(func.params, inputs, strict=True):
        interp.values[param] = to_numpy(x) if isinstance(x, torch.Tensor) else np.asarray(x)
    out = interp.block(func.body)
    for param, x in zip(func.params, inputs, strict=True):
        if param.role == "mutated" and isinstance(x, torch.Tensor):
            x.copy_(to_tensor(interp.values[param], param.type))
    values = func.body.last.operands()
    return tuple(laid_out(to_tensor(x, v.type), v, sizes) for x, v in zip(out, values, strict=True))


def sizes_of(params: Sequence[Value], inputs: Sequence[torch.Tensor | int]) -> dict[str, int]:
    """The size symbols' values, from sizes passed as such and from shapes."""
    pairs = list(zip(params, inputs, strict=True))
    sizes = bind_sizes([(p.type.shape, x.shape) for p, x in pairs
                        if isinstance(p.type, TensorType) and isinstance(x, torch.Tensor)])
    return sizes | {p.name: int(x) for p, x in pairs if p.type == INDEX}


def _call(op: Call, operands: Mapping[Value, Array], interp: Interp) -> Any:
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
    shared = [n for n, s in enumerate(strides) if s == 0]
    small = x
    for n in shared:
        small = small.narrow(n, 0, min(1, x.shape[n]))
    out = torch.empty_strided(small.shape, strides, dtype=x.dtype).copy_(small)
    return out.expand(x.shape)
