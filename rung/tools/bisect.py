"""`rung bisect`: the first pass that changes what a graph computes, on the arguments given.

A graph goes down the ladder pass by pass. Every module runs on the NumPy oracles, on the graph's
real inputs, and is judged against torch's own results as `rung certify` judges: rounding is no
fault. So are the results of the compiled code in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rung import pipeline
from rung.compilation import Compilation
from rung.core.cost import bound
from rung.core.errors import RungError
from rung.frontends.torch import generators
from rung.frontends.torch.oracle import to_numpy
from rung.frontends.torch.tensors import cloned
from rung.program.ir import Module
from rung.tools import check, judge
from rung.tools.capture import Graph, capture
from rung.tools.given import SEED, Given, UserError
from rung.tools.judge import Arrays
from rung.tools.show import Request, compilation_of, target_of

IMPORT, SOURCE = "program.import", "source"


@dataclass(frozen=True)
class Compared:
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
        raise UserError(f"{given.label}: {found.nothing}")
    lines, wrong = [], ""
    for n, graph in enumerate(found.graphs, 1):
        title = f"graph {n} of {len(found.graphs)}: {graph.kind}"
        lines.append(title)
        for step in steps(graph, compilation_of(graph, target_of([graph], request), request)):
            lines.append(str(step))
            if step.change and not wrong:
                wrong = f"{step.name} is the first wrong pass, in {title}: it changes {step.change}"
    lines.append(wrong or "no pass changes the result")
    return "\n".join(lines) + "\n", not wrong


def steps(graph: Graph, compilation: Compilation) -> Iterator[Compared]:
    """What each pass did to the result, down to the first that is wrong."""
    if graph.imported is None:
        yield Compared(IMPORT, note=f"runs as it is: {graph.refused}")
        return
    arrays = [to_numpy(x) for x in (*graph.inputs, *graph.imported.constants)]
    history, verdict = compilation.history(graph.imported.func), verdict_of(graph)
    new = _by_oracles(history.start, arrays)
    yield (last := Compared(IMPORT, verdict(new)))
    slow = False
    for step in history.steps:
        if last.change:
            return
        name = step.ran.full_name
        slow = slow or (step.ran.rung == "kernel" and _is_slow(step.before, compilation))
        try:
            if not slow and step.after is not step.before:
                new = _by_oracles(step.after, arrays)
        except (RungError, IndexError) as error:
            yield _raised(name, error)
            return
        last = Compared(name, verdict(new))
        yield Compared(name, note="compared with the source, for its size") if slow else last
    if last.change:
        return
    if history.failed and history.error:
        yield _raised(history.failed.full_name, history.error)
    else:
        yield Compared(SOURCE, verdict(compiled(graph, compilation, history.at("kernel"))))


def _raised(name: str, error: Exception) -> Compared:
    return Compared(name, f"it to {type(error).__name__}: {str(error).splitlines()[0]}")


def verdict_of(graph: Graph) -> Callable[[Arrays], str]:
    """What says which of a graph's results, and arguments afterwards, is wrong, or ""."""
    assert graph.imported is not None
    wanted, bound = _outcome(graph, graph.module), judge.tolerance(Module((graph.imported.func,)))
    seed = generators.seeded(SEED)
    whole = judge.of_graph(graph.module, graph.inputs, seed)
    reference = judge.Reference(lambda: _ordered(graph, whole.exact()),
                                lambda: (_ordered(graph, x) for x in whole.near()))
    return lambda found: str(next(judge.wrong(found, wanted, bound, reference), ""))


def _is_slow(module: Module, compilation: Compilation) -> bool:
    """Whether what is lowered from Loop IR takes too long as Python."""
    context = compilation.context
    costs = [bound(k, context.machine, context.hints) for k in module.kernels if k.attr("axes")]
    return sum(c.ops + c.flops for c in costs) > pipeline.SLOW


def _by_oracles(module: Module, arrays: Arrays) -> list[Any]:
    torch.manual_seed(SEED)
    with np.errstate(all="ignore"):
        return check.results(module, arrays)


def compiled(graph: Graph, compilation: Compilation, module: Module) -> list[Any]:
    """The same by the code that runs in the end."""
    assert graph.imported is not None
    run = compilation.executable(module, graph.imported.constants)
    return _outcome(graph, lambda *args: run(list(args)))


def _outcome(graph: Graph, run: Callable[..., Sequence[Any]]) -> list[Any]:
    args = cloned(graph.inputs)
    torch.manual_seed(SEED)
    return _ordered(graph, [*run(*args), *args]) or []


def _ordered(graph: Graph, made: Sequence[Any] | None) -> list[Any] | None:
    """Results that are tensors, arguments and constants, from all results and the arguments."""
    if made is None:
        return None
    assert graph.imported is not None
    outs = made[:len(made) - len(graph.inputs)]
    tensors = [x for x in outs if isinstance(x, torch.Tensor)]
    return [to_numpy(x) for x in (*tensors, *made[len(outs):], *graph.imported.constants)]
