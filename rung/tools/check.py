"""Both sides of a pass through the oracles: does a module still compute what it did?

In: modules of any rung and arguments on NumPy (bf16 held in float32). Out: what `return` gives,
then the arguments as they are left. `draw` makes arguments for a program's parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rung.core.cost import HINT
from rung.core.errors import RungError
from rung.core.interp import Interp, bind_sizes
from rung.core.op import Func
from rung.core.scalar import round_bf16
from rung.core.types import BF16, BOOL, F32, IndexType, TensorType
from rung.frontends.torch import oracle
from rung.kernel.ir import run_kernel_ir
from rung.loop.ir import run_kernel
from rung.program.ir import Apply, KernelCall, Module
from rung.tools.judge import TOLERANCE, Arrays, difference, tolerance

LIMIT = 1 << 22  # elements over which a pass is not compared: the oracles are slow


class WrongResult(RungError):
    """A pass changed what a module computes."""


def compare(before: Module, after: Module, inputs: Arrays, exact: bool, where: str) -> None:
    """Raise WrongResult unless both give the same on `inputs` up to roundings. An exact pass has
    those of the oracle alone, whose sums go in the order of memory."""
    with np.errstate(all="ignore"):
        old, new = results(before, inputs), results(after, inputs)
    bound = tolerance(before)
    if found := difference(old, new, bound * 1e-2 if exact and bound <= TOLERANCE[F32] else bound):
        raise WrongResult(f"{where} changes {found}\nbefore:\n{before}\n\nafter:\n{after}")


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
