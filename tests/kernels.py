"""The kernels of a function, compiled, against their meaning on NumPy.

`kernels_of(fn, args)` compiles a function (and its backward, if its results have gradients) and
gives each kernel as Loop IR, mapped, and as Kernel IR. `differences(made, sizes)` runs one as
compiled and as Loop IR on equal random inputs, with NaN, infinities and -0.0 among them if asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rung.compilation import Compilation, History
from rung.core import trace
from rung.core.errors import Unsupported
from rung.core.expr import is_size
from rung.core.op import Func, Value
from rung.core.scalar import round_bf16
from rung.core.types import BF16, TensorType, dtype_of
from rung.frontends.torch.externs import TORCH
from rung.loop import ir as loop
from rung.runtime.executable import Executable
from rung.targets.base import Target, buffers_of, is_library, symbols_of
from rung.targets.device import device

SPECIAL = (np.nan, np.inf, -np.inf, -0.0, 0.0)
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Made:
    """One kernel on three rungs, and the target that compiles it."""

    kernel: Func
    mapped: Func
    lowered: Func
    target: Target

    @property
    def symbols(self) -> tuple[str, ...]:
        return symbols_of(self.lowered)


def kernels_of(fn: Callable[..., Any], args: Sequence[Any], dynamic: bool | None = False,
               **options: Any) -> list[Made]:
    """The kernels of all graphs of `fn`; library kernels are left out."""
    torch._dynamo.reset()
    with trace.listen() as events:
        out = torch.compile(fn, backend="rung", dynamic=dynamic,
                            options={"strict": True, **options})(*args)
        roots = [x for x in torch.utils._pytree.tree_leaves(out)
                 if isinstance(x, torch.Tensor) and x.requires_grad and x.grad_fn is not None]
        if roots:
            torch.autograd.backward([x.double().sum() for x in roots])
    histories = [e.data["history"] for e in events if e.kind == "compiled"]
    return [made for s in histories for made in _made(s)]


def _made(history: History) -> Iterator[Made]:
    rungs = [history.modules[r].kernels for r in ("loop", "tile", "kernel")]
    for kernel, mapped, lowered in zip(*rungs, strict=True):
        if not is_library(lowered):
            yield Made(kernel, mapped, lowered, history.target)


# ---- running one

def lower(program: Func, where: Target, **how: Any) -> History:
    """All rungs below a program, and the source."""
    return Compilation(where, TORCH, **how).lower(program)


def compiled(program: Func, where: Target) -> Executable:
    """What runs a program, compiled for a target."""
    compilation = Compilation(where, TORCH)
    return compilation.executable(compilation.lower(program).reached())


def draw(func: Func, sizes: Mapping[str, int], seed: int = 0, special: bool = False) -> Arrays:
    """Arrays for a kernel's buffers; outputs hold a pattern that a kernel should overwrite."""
    rng = np.random.default_rng(seed)
    return {v.name: _array(v, sizes, rng, v in func.outs, special) for v in buffers_of(func)}


def _array(value: Value, sizes: Mapping[str, int], rng: np.random.Generator, out: bool,
           special: bool) -> np.ndarray[Any, Any]:
    assert isinstance(value.type, TensorType)
    shape = [int(e.evaluate(sizes)) for e in value.type.shape]
    dtype = value.type.dtype
    if not dtype.is_float:
        high = 2 if min(shape, default=2) > 1 or not shape else 1
        return np.array(rng.integers(0, high, shape), dtype.numpy, order="C")
    data = np.full(shape, -77.0)
    if not out:  # mostly positive, so that few sums are nearly 0
        data = rng.uniform(0.25, 1.75, shape) * np.where(rng.random(shape) < 0.1, -1, 1)
    if special and not out and data.size:
        where = rng.random(shape) < 0.02
        data = np.where(where, rng.choice(SPECIAL, shape), data)
    data = data.astype("f4") if dtype is BF16 else data
    return np.array(round_bf16(data) if dtype is BF16 else data, dtype.numpy, order="C")


def run_compiled(made: Made, arrays: Arrays, sizes: Mapping[str, int]) -> Arrays:
    """What the compiled kernel makes of copies of `arrays`."""
    func = made.lowered
    launch = device(made.target).load([func], made.target.emit([func]))[func.name]
    tensors = {v.name: _tensor(v, arrays[v.name], sizes) for v in buffers_of(func)}
    launch(*(tensors[v.name].data_ptr() for v in buffers_of(func)),
           *(sizes[s] for s in symbols_of(func)))
    return {name: _numpy(t) for name, t in tensors.items()}


def _tensor(value: Value, array: np.ndarray[Any, Any], sizes: Mapping[str, int]) -> torch.Tensor:
    """A copy in the layout and type of a buffer."""
    assert isinstance(value.type, TensorType)
    tensor = torch.from_numpy(array.copy())
    tensor = tensor.bfloat16() if value.type.dtype is BF16 else tensor
    if value.type.strides is None:
        return tensor
    strides = [int(e.evaluate(sizes)) for e in value.type.strides]
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)


def _numpy(x: torch.Tensor) -> np.ndarray[Any, Any]:
    return np.asarray((x.float() if x.dtype is torch.bfloat16 else x).numpy())


def differences(made: Made, sizes: Mapping[str, int] | None = None, seed: int = 0,
                special: bool = False) -> list[str]:
    """Where the compiled kernel differs from its Loop IR by more than the order of sums allows."""
    known = {s: 3 for s in made.symbols} | dict(sizes or {})
    assert all(map(is_size, known))
    arrays = draw(made.lowered, known, seed, special)
    got = run_compiled(made, arrays, known)
    with np.errstate(all="ignore"):
        loop.run_kernel(made.kernel, arrays, known)
    return [text for v in buffers_of(made.lowered)
            if (text := unlike(v, arrays[v.name], got[v.name]))]


def unlike(value: Value, want: np.ndarray[Any, Any], got: np.ndarray[Any, Any]) -> str:
    dtype = dtype_of(value.type)
    if not dtype.is_float:
        bad = want != got
    else:
        eps = 2.0 ** -7 if dtype is BF16 else 2e-5 if dtype.bits == 32 else 1e-12
        finite = want[np.isfinite(want)]
        slack = eps * (np.abs(finite).max(initial=0) + 1)
        with np.errstate(invalid="ignore"):
            near = np.abs(want.astype("f8") - got) <= slack + eps * np.abs(want)
        bad = ~(near | (want == got) | (np.isnan(want) & np.isnan(got)))
    if not bad.any():
        return ""
    at = tuple(int(n) for n in np.argwhere(bad)[0])
    return f"{value.name}{list(at)}: {got[at]!r}, not {want[at]!r} ({int(bad.sum())} differ)"


def indexes_data(kernel: Func) -> bool:
    """Whether a kernel reads or writes at positions that are data, which must exist."""
    return any(isinstance(s, Value) for op in kernel.body.ops
               if isinstance(op, loop.Load | loop.Store) for s in op.subs)


def fuzz(made: Made, sizes: Sequence[int] = (0, 1, 2, 7, 64)) -> list[str]:
    """`differences` for each size of all symbols, with and without special values."""
    found = []
    for size in sizes if made.symbols else (3,):
        if (size < 2 and indexes_data(made.kernel)) or size ** len(made.symbols) > 1 << 16:
            continue
        for special in (False, True):
            try:
                diff = differences(made, dict.fromkeys(made.symbols, size), size, special)
            except Unsupported:
                continue
            found += [f"size {size}, special {special}: {d}" for d in diff]
    return found
