"""Helpers: graphs of functions, their programs, and the pipeline's stand-in (the oracle)."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from rung.core import trace
from rung.core.op import Func
from rung.core.parse import parse_module
from rung.core.verify import verify
from rung.frontends.torch.aten import lower
from rung.frontends.torch.importer import Imported, import_graph
from rung.frontends.torch.oracle import run_program
from rung.program import ir as program


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


class OraclePipeline(types.ModuleType):
    """Stands in for `rung.pipeline`: runs each lowered program on NumPy and keeps it."""

    def __init__(self) -> None:
        super().__init__("rung.pipeline")
        self.imported: list[Func] = []
        self.lowered: list[Func] = []
        self.options: list[Any] = []

    def compile_program(self, func: Func, options: Any, constants: Sequence[torch.Tensor],
                        example_inputs: Sequence[Any]) -> Callable[..., Any]:
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
