"""Helpers: graphs of functions, their programs, and the pipeline's stand-in (the oracle)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from rung.core import trace
from rung.core.interp import Interp, bind_sizes
from rung.core.op import Func, Value
from rung.core.parse import parse_module
from rung.core.types import INDEX, TensorType
from rung.core.verify import verify
from rung.frontends.torch import oracle
from rung.frontends.torch.aten import lower
from rung.frontends.torch.importer import Imported, import_graph
from rung.program import ir as program


def run_program(func: Func, inputs: Sequence[torch.Tensor | int]) -> tuple[torch.Tensor, ...]:
    """The results of `func` with the strides of their types; mutated parameters are updated.

    `inputs` are the graph's inputs, then the constants. Calls that are left run through torch.
    """
    sizes = sizes_of(func.params, inputs)
    interp = Interp(sizes)
    interp.callees["call"] = oracle.run
    for param, x in zip(func.params, inputs, strict=True):
        interp.values[param] = oracle.to_numpy(x) if isinstance(x, torch.Tensor) else np.asarray(x)
    out = interp.block(func.body)
    for param, x in zip(func.params, inputs, strict=True):
        if param.role == "mutated" and isinstance(x, torch.Tensor):
            x.copy_(oracle.to_tensor(interp.values[param], param.type))
    last = func.body.last
    assert isinstance(last, program.Return)
    values = [replace(v, type=t) for v, t in zip(
        last.values, last.layouts or [v.type for v in last.values], strict=True)]
    return tuple(oracle.laid_out(oracle.to_tensor(x, v.type), v, sizes)
                 for x, v in zip(out, values, strict=True))


def sizes_of(params: Sequence[Value], inputs: Sequence[torch.Tensor | int]) -> dict[str, int]:
    """The size symbols' values, from sizes passed as such and from shapes."""
    pairs = list(zip(params, inputs, strict=True))
    sizes = bind_sizes([(p.type.shape, x.shape) for p, x in pairs
                        if isinstance(p.type, TensorType) and isinstance(x, torch.Tensor)])
    return sizes | {p.name: int(x) for p, x in pairs if p.type == INDEX}


def traced(fn: Callable[..., Any], args: Sequence[Any], mode: str = "fake") -> Imported:
    """The program of `fn`, traced below autograd; `mode` symbolic makes all sizes dynamic."""
    with torch.no_grad():
        gm = make_fx(lambda *xs: _tuple(fn(*xs)), tracing_mode=mode,
                     _allow_non_fake_inputs=True)(*args)
    return import_graph(gm)


def _tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, tuple | list) else (x,)


def check(func: Func) -> None:
    """The function verifies, and its text parses back to the same text."""
    verify(func, program.VOCABULARY)
    (parsed,) = parse_module(str(func), {"program": program.VOCABULARY})
    assert str(parsed) == str(func)


def calls(func: Func) -> list[str]:
    """Targets of the calls that are left."""
    return [op.target for op in func.body.ops if isinstance(op, program.Call)]


def composites(func: Func) -> list[str]:
    return [op.target for op in func.body.ops if isinstance(op, program.Composite)]


def declined(events: Sequence[trace.Event]) -> list[str]:
    """The targets that the table did not lower."""
    return [e.subject for e in events if (e.kind, e.place) == ("declined", "lower")]


def run(imported: Imported, args: Sequence[Any]) -> tuple[tuple[torch.Tensor, ...], Func]:
    """Results of the lowered program on the oracle, and that program."""
    lowered = lower(imported.func)
    for func in (imported.func, lowered):
        check(func)
    inputs = [a for a in args if isinstance(a, torch.Tensor | int)]
    return run_program(lowered, [*inputs, *imported.constants]), lowered


class OraclePipeline:
    """Stands in for the passes: runs each lowered program on NumPy and keeps it."""

    def __init__(self) -> None:
        self.imported: list[Func] = []
        self.lowered: list[Func] = []
        self.options: list[Any] = []

    def compiled(self, imported: Imported, options: Any, hints: Mapping[str, int]
                 ) -> Callable[..., Any]:
        func, constants = imported.func, imported.constants
        low = lower(func)
        for f in (func, low):
            check(f)
        self.imported.append(func)
        self.lowered.append(low)
        self.options.append(options)

        def run(args: list[Any]) -> tuple[torch.Tensor, ...]:
            inputs = [*args, *constants]
            args.clear()
            return run_program(low, inputs)
        return run
