"""`rung bisect`: the first pass that changes what a graph computes, on the arguments given.

A graph goes down the ladder pass by pass. Every module runs on the NumPy oracles, on the graph's
real inputs, and is compared with the module before it: bits where the pass is exact, roundings
elsewhere. Around the passes stand torch's own results, above, and those of the compiled code below.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rung import pipeline
from rung.core.cost import bound
from rung.core.errors import RungError
from rung.frontends.torch.oracle import to_numpy
from rung.pipeline import Context, Stages
from rung.program.ir import Module
from rung.runtime.tensors import cloned
from rung.targets.base import target
from rung.tools import check
from rung.tools.capture import Graph, capture
from rung.tools.check import Arrays
from rung.tools.given import SEED, Given, UserError
from rung.tools.show import Request, context_of

IMPORT, SOURCE = "program.import", "source"


@dataclass(frozen=True)
class Step:
    """A pass that ran; `change` says by how much its result is off, `note` why it has none."""

    name: str
    change: str = ""
    note: str = ""

    def __str__(self) -> str:
        return f"  {self.name:<24} {'changes ' + self.change if self.change else self.note or 'ok'}"


def bisect(given: Given, request: Request) -> tuple[str, bool]:
    """The report, and whether no pass is wrong. UserError if nothing can be captured."""
    found = capture(given, request.train, inputs=True)
    if not found.graphs:
        raise UserError(f"{given.label}: no graph was captured: there is no tensor operation")
    lines, wrong = [], ""
    for n, graph in enumerate(found.graphs, 1):
        title = f"graph {n} of {len(found.graphs)}: {graph.kind}"
        lines.append(title)
        for step in steps(graph, context_of(graph, target(request.target), request)):
            lines.append(str(step))
            if step.change and not wrong:
                wrong = f"{step.name} is the first wrong pass, in {title}: it changes {step.change}"
    lines.append(wrong or "no pass changes the result")
    return "\n".join(lines) + "\n", not wrong


def first_wrong(graph: Graph, context: Context) -> Step | None:
    """The first step of a graph that is wrong."""
    return next((s for s in steps(graph, context) if s.change), None)


def steps(graph: Graph, context: Context) -> Iterator[Step]:
    """What each pass did to the result, down to the first that is wrong."""
    if graph.imported is None:
        yield Step(IMPORT, note=f"runs as it is: {graph.refused}")
        return
    module = Module((graph.imported.func,))
    inputs = [*graph.inputs, *graph.imported.constants]
    arrays = [to_numpy(x) for x in inputs]
    old, rounded = by_torch(graph), check.tolerance(module)
    new = _by_oracles(module, arrays)
    yield (last := _step(IMPORT, old, new, rounded))
    modules: dict[str, Module] = {}
    for p in pipeline.PASSES:
        if last.change:
            return
        name, before, old = f"{p.rung}.{p.name}", module, new
        try:
            module = modules[p.rung] = pipeline.run_pass(p, module, context)
            slow = p.rung == "kernel" and _is_slow(before, context)
            new = old if slow or module is before else _by_oracles(module, arrays)
        except (RungError, IndexError) as error:
            yield Step(name, f"it to {type(error).__name__}: {str(error).splitlines()[0]}")
            return
        last = _step(name, old, new, 0.0 if p.kind == "exact" else rounded)
        yield Step(name, note="compared with the source, for its size") if slow else last
    if not last.change:
        yield _step(SOURCE, new, compiled(graph, modules, context), rounded)


def _step(name: str, old: Arrays, new: Arrays, bound: float) -> Step:
    found = check.difference(old, new, bound)
    return Step(name, str(found) if found else "")


def _is_slow(module: Module, context: Context) -> bool:
    """Whether Kernel IR takes too long as Python."""
    return sum(bound(k, context.machine, context.hints).ops + bound(
        k, context.machine, context.hints).flops for k in module.kernels) > pipeline.SLOW


def by_torch(graph: Graph) -> list[Any]:
    """Results and arguments afterwards, by the graph itself."""
    assert graph.imported is not None
    args = cloned(graph.inputs)
    torch.manual_seed(SEED)
    out = graph.module(*args)
    tensors = [x for x in out if isinstance(x, torch.Tensor)]
    return [to_numpy(x) for x in (*tensors, *args, *graph.imported.constants)]


def _by_oracles(module: Module, arrays: Arrays) -> list[Any]:
    torch.manual_seed(SEED)
    with np.errstate(all="ignore"):
        return check.results(module, arrays)


def compiled(graph: Graph, modules: dict[str, Module], context: Context) -> list[Any]:
    """The same by the code that runs in the end."""
    assert graph.imported is not None
    source = context.target.emit(pipeline.generated(modules["kernel"]))
    constants = graph.imported.constants
    run = pipeline.executable(Stages(modules, context.target, source), constants)
    args = cloned(graph.inputs)
    torch.manual_seed(SEED)
    return [to_numpy(x) for x in (*run(list(args)), *args, *constants)]
