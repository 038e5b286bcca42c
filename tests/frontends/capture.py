"""Helpers: graphs of functions, their programs, and the pipeline's stand-in (the oracle)."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from rung.core.op import Func, walk
from rung.core.ops import IndexValue
from rung.core.parse import Vocabulary, parse_module
from rung.frontends.torch.aten import lower
from rung.frontends.torch.importer import Imported, import_graph
from rung.frontends.torch.oracle import run_program
from rung.program import ir as program
from rung.tensor import ir as tensor

VOCABULARIES = {"program": Vocabulary("program", (*program.OPS, *tensor.OPS, IndexValue))}


def traced(fn: Callable[..., Any], args: Sequence[Any], mode: str = "fake") -> Imported:
    """The program of `fn`, traced below autograd; `mode` symbolic makes all sizes dynamic."""
    with torch.no_grad():
        gm = make_fx(lambda *xs: _tuple(fn(*xs)), tracing_mode=mode)(*args)
    return import_graph(gm)


def _tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, tuple | list) else (x,)


def check_text(func: Func) -> None:
    """The text parses back to the same text."""
    (parsed,) = parse_module(str(func), VOCABULARIES)
    assert str(parsed) == str(func)


def calls(func: Func) -> list[str]:
    """Targets of the calls that are left."""
    return [op.target for op in func.body.ops if isinstance(op, program.Call)]


def composites(func: Func) -> list[str]:
    return [op.target for op in func.body.ops if isinstance(op, program.Composite)]


def verify(func: Func) -> None:
    for op in walk(func.body):
        assert tuple(r.type for r in op.results) == op.infer(), op
        op.check()


def run(imported: Imported, args: Sequence[Any]) -> tuple[tuple[torch.Tensor, ...], Func]:
    """Results of the lowered program on the oracle, and that program."""
    lowered = lower(imported.func)
    for func in (imported.func, lowered):
        verify(func)
        check_text(func)
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
            verify(f)
            check_text(f)
        self.imported.append(func)
        self.lowered.append(low)
        self.options.append(options)

        def run(args: list[Any]) -> tuple[torch.Tensor, ...]:
            inputs = [*args, *constants]
            args.clear()
            return run_program(low, inputs)
        return run
