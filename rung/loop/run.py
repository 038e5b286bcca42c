"""The oracle of a whole module: programs by each op's `run`, kernels by `run_kernel`, on NumPy.

In: a module and its main program's arguments (bf16 held in float32). Out: what `return` gives.
Mutated parameters and buffers updated in place change as they would on a machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rung.core.interp import Interp, bind_sizes
from rung.core.op import Func
from rung.core.types import IndexType, TensorType
from rung.loop.ir import run_kernel
from rung.program.ir import Apply, KernelCall, Module


def run_module(module: Module, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Run the main program on arrays (and ints for sizes), one for each parameter."""
    return _run(module, module.main, inputs)


def _run(module: Module, program: Func, inputs: Sequence[Any]) -> tuple[Any, ...]:
    given = [(p.type, x) for p, x in zip(program.params, inputs, strict=True)]
    interp = Interp(bind_sizes([(t.shape, np.shape(x)) for t, x in given
                                if isinstance(t, TensorType)]))
    for param, x in zip(program.params, inputs, strict=True):
        if isinstance(param.type, IndexType):
            interp.symbols[param.name] = x

    def kernel(op: KernelCall, operands: Sequence[Any], interp: Interp) -> Any:
        return _call(module, op, operands, interp)

    def apply(op: Apply, operands: Sequence[Any], interp: Interp) -> Any:
        out = _run(module, module.program(op.callee), operands)
        return out if len(op.types) > 1 else out[0]

    interp.callees |= {"kernel": kernel, "apply": apply}
    interp.values.update(zip(program.params, inputs, strict=True))
    return tuple(interp.block(program.body))


def _call(module: Module, op: KernelCall, operands: Sequence[Any], interp: Interp) -> Any:
    """Results: the new states of `updates`, in their own arrays, then the outputs."""
    func = module.kernel(op.callee)
    arrays: dict[str, Any] = {}
    for param, array in zip(func.params, operands, strict=True):
        if isinstance(param.type, TensorType):
            shape = [int(interp.index(n)) for n in param.type.shape]
            array = np.asarray(array).reshape(shape)  # a view: parameters are contiguous
        arrays[param.name] = array
    for out in func.outs:
        assert isinstance(out.type, TensorType)
        shape = [int(interp.index(n)) for n in out.type.shape]
        arrays[out.name] = np.zeros(shape, out.type.dtype.numpy)
    run_kernel(func, arrays, interp.symbols)
    states = [operands[op.args.index(x)] for x in op.updates]
    outs = [arrays[o.name] for o in func.outs]
    for n, t in enumerate(op.types[len(states):]):
        assert isinstance(t, TensorType)
        outs[n] = outs[n].reshape([int(interp.index(s)) for s in t.shape])
    return (*states, *outs) if len(states) + len(outs) > 1 else (*states, *outs)[0]
