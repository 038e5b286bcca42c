"""The ATen graphs of a function, as programs, and where Dynamo broke it.

In: a function or module and arguments. Out: a `Capture`. The function runs once (with its backward
for `train`), on the graphs themselves, so this also works where a later rung would fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from rung.core.errors import RungError
from rung.frontends.torch import compat, observed
from rung.frontends.torch.backend import as_it_is, traced
from rung.frontends.torch.importer import Imported, import_graph
from rung.frontends.torch.sources import FRAME, TORCH
from rung.frontends.torch.tensors import cloned
from rung.tools.given import SEED, Args, Given, UserError, failure, inputs_of


@dataclass(frozen=True)
class Graph:
    """One graph of AOTAutograd; `refused` is why it has no program. `kind` is inference, forward
    or backward; `hints` are the sizes of the arguments at hand, `inputs` copies of the first
    call's arguments, where those were asked for."""

    kind: str
    module: fx.GraphModule
    imported: Imported | None
    refused: str
    hints: dict[str, int]
    inputs: list[Any] = field(default_factory=list)

    @property
    def code(self) -> str:
        return str(self.module.print_readable(print_output=False))


@dataclass(frozen=True)
class Break:
    """Where Dynamo ended a graph, and why."""

    line: str
    reason: str


@dataclass(frozen=True)
class Capture:
    """Graphs, and Dynamo's frames around them, in the order in which they were compiled, `first`
    of them in the first call; `recompiles` has the reason of each, `breaks` each break once."""

    graphs: list[Graph] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    frames: list[observed.Frame] = field(default_factory=list)
    recompiles: list[str] = field(default_factory=list)
    first: list[Graph] = field(default_factory=list)

    @property
    def nothing(self) -> str:
        """Why there is no graph."""
        why = self.breaks[0] if self.breaks else None
        return "no graph was captured: " + (
            f"{why.line}: {why.reason}" if why else "there is no tensor operation")


def capture(given: Given, train: bool = False, inputs: bool = False) -> Capture:
    """Compile and run `given` once, and again with its other arguments, with copies of each
    graph's inputs where they are asked for; UserError if that fails."""
    found, stops = Capture(), list[Break]()
    torch._dynamo.reset()
    breaks = observed.break_reasons()

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        forward, inference = (partial(_record, found, inputs, kind)
                              for kind in ("forward", "inference"))

        def refused(error: RungError) -> None:
            kind, why = "forward" if train else "inference", f"{type(error).__name__}: {error}"
            found.graphs.append(Graph(kind, gm, None, why, {}))
        try:
            return traced(gm, examples, forward, forward, inference, refused)
        except Exception as error:  # Dynamo breaks the graph, or leaves the function to eager
            lines = [f"{path}:{line}" for path, line, _ in FRAME.findall(str(error))] or [""]
            why = str(error).partition("\n")[0]
            stops.append(Break(lines[-1], f"{type(error).__name__}: {why}"))
            raise

    compiled, watch = observed.watched(given.function, backend, found.frames, found.recompiles)
    try:
        for args in (given.args, *given.again):
            known = len(breaks)
            _run(compiled, args, given.kwargs, train)
            found.breaks.extend(b for b in (*dict.fromkeys(stops), *map(_break, breaks[known:]))
                                if args is given.args or b not in found.breaks)
            stops.clear()
            found.first.extend(found.graphs if not found.first else ())
    except RungError:
        raise
    except Exception as error:
        raise failure(given.label, _in_eager(given, train) or error) from error
    finally:
        watch.remove()
    for frame in found.frames:
        frame.read_guards()
    torch._dynamo.reset()
    return found


def _in_eager(given: Given, train: bool) -> Exception | None:
    """What the function itself raises: it names the user's line, where Dynamo's error has many."""
    try:
        _run(given.function, given.args, given.kwargs, train)
    except Exception as error:
        return error
    return None


def _run(compiled: Callable[..., Any], args: Args, kwargs: Mapping[str, Any], train: bool
         ) -> None:
    if not train:
        with torch.no_grad():
            compiled(*args, **kwargs)
        return
    for x in inputs_of((args, kwargs)):
        if x.is_floating_point() and x.is_leaf:
            x.requires_grad_()
    outputs = [y for y in inputs_of((compiled(*args, **kwargs),)) if y.requires_grad]
    if not outputs:
        raise UserError("no result needs a gradient, so there is nothing to train")
    torch.manual_seed(SEED)
    torch.autograd.backward(outputs, [torch.randn_like(y) for y in outputs])


def _record(found: Capture, keep: bool, kind: str, gm: fx.GraphModule,
            examples: Sequence[Any]) -> compat.Boxed:
    """A compiler for AOTAutograd that keeps the graph and runs it as it is."""
    kind = "backward" if compat.is_backward(gm) else kind
    imported, refused = None, ""
    with compat.unset_fake_temporarily():
        try:
            imported = import_graph(gm, kind, compat.static_inputs(gm))
        except RungError as error:
            refused = f"{type(error).__name__}: {error}"
    graph = Graph(kind, gm, imported, refused, _hints(gm))
    found.graphs.append(graph)
    run = as_it_is(gm)

    def keeping(args: list[Any]) -> Sequence[Any]:
        if not graph.inputs:
            graph.inputs.extend(cloned(args))
        return run(args)
    return compat.boxed(keeping) if keep else run


def _hints(gm: fx.GraphModule) -> dict[str, int]:
    """What each size symbol was when the graph was captured."""
    values = [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"]
    sizes = [s for v in values for s in (v.shape if isinstance(v, torch.Tensor) else (v,))
             if isinstance(s, torch.SymInt)]
    return {str(compat.size_expr(s)): int(s.node.hint) for s in sizes if s.node.hint is not None}


def _break(reason: Any) -> Break:
    own = [f for f in reason.user_stack if not f.filename.startswith(TORCH)] or reason.user_stack
    line = f"{own[-1].filename}:{own[-1].lineno}" if own else ""
    return Break(line, WORDS.get(str(reason.reason), str(reason.reason).strip()))


WORDS = {"step_unsupported": "Dynamo could not go on with the graph that it had"}
"""Names that Dynamo has for reasons, in words."""
