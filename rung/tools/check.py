"""Both sides of a pass through the oracles: does a module still compute what it did?

In: modules of any rung and arguments on NumPy (bf16 held in float32). Out: what `return` gives,
then the arguments as they are left. `draw` makes arguments for a program's parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rung.core.cost import HINT
from rung.core.errors import RungError
from rung.core.interp import Interp, bind_sizes
from rung.core.op import Func, walk
from rung.core.scalar import round_bf16
from rung.core.types import BF16, BOOL, F16, F32, F64, IndexType, TensorType
from rung.frontends.torch import oracle
from rung.kernel.ir import run_kernel_ir
from rung.loop.ir import run_kernel
from rung.program.ir import Apply, KernelCall, Module

Arrays = Sequence[Any]
TOLERANCE = {F64: 1e-9, F32: 1e-3, F16: 1e-2, BF16: 2e-2}
LIMIT = 1 << 22  # elements over which a pass is not compared: the oracles are slow


class WrongResult(RungError):
    """A pass changed what a module computes."""


def compare(before: Module, after: Module, inputs: Arrays, exact: bool, where: str) -> None:
    """Raise WrongResult unless both give the same on `inputs`: bits, or up to roundings."""
    with np.errstate(all="ignore"):
        old, new = results(before, inputs), results(after, inputs)
    if found := difference(old, new, 0.0 if exact else tolerance(before)):
        raise WrongResult(f"{where} changes {found}\nbefore:\n{before}\n\nafter:\n{after}")


@dataclass(frozen=True)
class Difference:
    """Result `number` is off by `error`, where its largest element is `size`."""

    number: int
    error: float
    size: float

    def __str__(self) -> str:
        return f"result {self.number} by {self.error:.3g} of {self.size:.3g}"


def difference(old: Arrays, new: Arrays, bound: float) -> Difference | None:
    """The first result that is not the same bits, nor of floats within `bound` of its largest one;
    what is left of larger numbers that cancel counts as at least a thousandth of those, and under
    the bounds of 16-bit floats as a tenth: one rounding of theirs is not below that."""
    share = 0.1 if bound > TOLERANCE[F32] else 1e-3
    noise = share * max((_size(x) for x in old if _rounds(x)), default=0.0)
    for n, (a, b) in enumerate(zip(old, new, strict=True)):
        if np.array_equal(a, b, equal_nan=True):
            continue
        limit = bound * max(_size(a), noise) if _rounds(a) else 0.0
        a, b = (np.asarray(x, complex if np.iscomplexobj(x) else float) for x in (a, b))
        if a.shape != b.shape or not np.array_equal(np.isnan(a), np.isnan(b)):
            return Difference(n, np.inf, _size(a))
        error = float(np.max(np.abs(a - b), initial=0, where=(a != b) & ~np.isnan(a)))
        if not error <= limit:
            return Difference(n, error, _size(a))
    return None


def _rounds(x: Any) -> bool:
    return np.asarray(x).dtype.kind in "fc"


def _size(x: Any) -> float:
    x = np.abs(np.asarray(x))
    return float(np.max(x, initial=1e-30, where=np.isfinite(x)))


def tolerance(module: Module) -> float:
    """How far a sum in another order may be off, by the widest roundings in a module's programs."""
    values = [v for p in module.programs for v in (*p.params, *(
        r for op in walk(p.body) for r in op.results))]
    return max((TOLERANCE.get(v.type.dtype, 0.0) for v in values
                if isinstance(v.type, TensorType)), default=0.0)


def results(module: Module, inputs: Arrays) -> list[Any]:
    """What the module returns, and its arguments afterwards."""
    given = [np.array(x) for x in inputs]
    return [*map(np.array, _run(module, module.main, given)), *given]


def _run(module: Module, program: Func, inputs: Arrays) -> tuple[Any, ...]:
    shapes = [(p.type.shape, np.shape(x)) for p, x in zip(program.params, inputs, strict=True)
              if isinstance(p.type, TensorType)]
    interp = Interp(bind_sizes(shapes))
    for param, x in zip(program.params, inputs, strict=True):
        interp.values[param] = x
        if isinstance(param.type, IndexType):
            interp.symbols[param.name] = int(x)

    def kernel(op: KernelCall, operands: Arrays, interp: Interp) -> Any:
        return _kernel(module.kernel(op.callee), op, operands, interp)

    def apply(op: Apply, operands: Arrays, interp: Interp) -> Any:
        return _one(_run(module, module.program(op.callee), operands))

    interp.callees |= {"kernel": kernel, "apply": apply, "call": oracle.run}
    return tuple(interp.block(program.body))


def _kernel(func: Func, op: KernelCall, operands: Arrays, interp: Interp) -> Any:
    """Results: the new states of `updates`, in their own arrays, then the outputs."""
    arrays: dict[str, Any] = {}
    for param, array in zip(func.params, operands, strict=True):
        arrays[param.name] = array
        if isinstance(param.type, TensorType):
            arrays[param.name] = np.asarray(array).reshape(_sizes(param.type, interp))
    for out in func.outs:
        assert isinstance(out.type, TensorType)
        arrays[out.name] = np.zeros(_sizes(out.type, interp), out.type.dtype.numpy)
    if func.kind == "kernel":
        run_kernel(func, arrays, interp.symbols)
    else:
        run_kernel_ir(func, arrays)
    states = [operands[op.args.index(x)] for x in op.updates]
    outs = [arrays[o.name].reshape(_sizes(t, interp)) for o, t in
            zip(func.outs, op.types[len(states):], strict=True) if isinstance(t, TensorType)]
    return _one((*states, *outs))


def _one(out: tuple[Any, ...]) -> Any:
    return out if len(out) > 1 else out[0]


def _sizes(kind: TensorType, interp: Interp) -> list[int]:
    return [int(interp.index(n)) for n in kind.shape]


def draw(program: Func, sizes: Mapping[str, int] | None = None, seed: int = 0) -> list[Any] | None:
    """Random arguments, integers 0 or 1 so that they can be indices; None if they are too large, or
    no tensors and sizes."""
    rng = np.random.default_rng(seed)
    known = _Sizes(sizes or {})
    out: list[Any] = []
    if not all(isinstance(p.type, TensorType | IndexType) for p in program.params):
        return None
    for p in program.params:
        if not isinstance(p.type, TensorType):
            out.append(np.asarray(known[p.name]))
            continue
        shape = [int(n.evaluate(known)) for n in p.type.shape]
        if np.prod(shape, dtype=float) > LIMIT:
            return None
        out.append(_array(rng, shape, p.type))
    return out


class _Sizes(dict[str, int]):
    """Sizes by name; those that nobody gave are small and all different."""

    def __missing__(self, name: str) -> int:
        return self.setdefault(name, min(HINT, 5 + 2 * len(self)))


def _array(rng: np.random.Generator, shape: Sequence[int], kind: TensorType) -> Any:
    if kind.dtype is BOOL:
        return rng.random(shape) < 0.5
    if not kind.dtype.is_float:
        return rng.integers(0, 2, shape).astype(kind.dtype.numpy)
    x = rng.standard_normal(shape).astype(np.float32)
    return round_bf16(x) if kind.dtype is BF16 else x.astype(kind.dtype.numpy)
