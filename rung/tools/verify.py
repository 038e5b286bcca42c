"""`options={"verify": 0.01}`: a share of live calls run again in eager, on copies of their inputs.

At a difference (beyond roundings, and further from float64 than eager is, or in what is raised) it
says once which kernel and line of the user come first, writes a reproducer, and that graph runs in
eager from then on.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from rung import pipeline
from rung.compilation import Compilation, lines_of, read_mappings
from rung.core import origins
from rung.core.config import Settings
from rung.core.op import Effect, Func, Op, Value, walk
from rung.core.options import Options
from rung.frontends.torch import generators
from rung.frontends.torch.externs import torch_on
from rung.frontends.torch.generators import States
from rung.frontends.torch.importer import Imported
from rung.frontends.torch.oracle import to_numpy
from rung.frontends.torch.sources import origin_of
from rung.frontends.torch.tensors import cloned
from rung.frontends.torch.types import hints_of
from rung.program.ir import Call, Check, KernelCall, Module, Return
from rung.targets.base import target
from rung.tools import judge, repro
from rung.tools.capture import Graph
from rung.tools.given import SEED
from rung.tools.repro import Recorder

log = logging.getLogger("rung")
Args = list[Any]
Results = Sequence[Any]
Run = Callable[[Args], Results]


class Verified:
    """`run`, of which the share `options.verify` of calls is compared with `module` itself."""

    def __init__(self, run: Run, module: fx.GraphModule, imported: Imported, options: Options):
        self.run, self.module, self.imported, self.options = run, module, imported, options
        self.bound = judge.tolerance(Module((imported.func,)))
        self.written = _written(imported.func)
        self.calls, self.trusted = 0, True

    def __call__(self, args: Args) -> Results:
        if not self.trusted:
            return self.eager(args)
        share, n = self.options.verify, self.calls
        self.calls += 1
        if n and int(n * share) == int((n - 1) * share):
            return self.run(args)
        return self.checked(args)

    def eager(self, args: Args) -> Results:
        values = tuple(args)
        args.clear()
        with torch.no_grad():
            out: Results = self.module(*values)
        return out

    def checked(self, args: Args) -> Results:
        """One call by both; where they differ it is taken back, and eager runs it."""
        given, before, seed = list(args), cloned(args, self.written), generators.states()
        ours = eager = Outcome()
        try:
            ours, drawn = outcome(self.run, args), generators.states()
            twin = cloned(before, self.written)
            generators.restore(seed)
            eager = outcome(self.eager, list(twin))
            if type(ours.error) is not type(eager.error):
                off = f"what it raises: {ours.error!r} instead of {eager.error!r}"
            elif not eager.error and not generators.alike(drawn, generators.states()):
                off = "the random numbers that it draws"
            else:
                off = self.difference([*ours.results, *given], [*eager.results, *twin], before,
                                      seed)
            if not off:
                return ours.get()
            self.trusted = False
            _warn(off, self.graph(before), ours.error, self.options)
            restore(given, before)
            generators.restore(seed)
            return self.eager(given)
        finally:  # an error's traceback has this frame, which must not hold the error
            ours = eager = Outcome()

    def difference(self, found: Results, wanted: Results, inputs: Results,
                   seed: States) -> str:
        """Which result or argument is wrong, or what else differs."""
        if list(map(_kind, found)) != list(map(_kind, wanted)):
            return "types or shapes"
        reference = judge.of_graph(self.module, inputs, seed)
        return str(next(judge.wrong(found, wanted, self.bound, reference), ""))

    def graph(self, inputs: Args) -> Graph:
        """This graph with the inputs of one call."""
        hints = hints_of(self.imported.func, inputs)
        return Graph("graph", self.module, self.imported, "", hints, inputs)


def verified(run: Run, module: fx.GraphModule, imported: Imported, options: Options) -> Run:
    """`run` as it is where `options` ask for no verification."""
    return Verified(run, module, imported, options) if options.verify else run


@dataclass(frozen=True)
class Outcome:
    """What a call gives, or what it raises."""

    results: Results = ()
    error: Exception | None = None

    def get(self) -> Results:
        try:
            if self.error:
                raise self.error
            return self.results
        finally:
            del self  # as in `checked`


def outcome(run: Callable[[Args], Any], args: Args) -> Outcome:
    try:
        return Outcome(run(args))
    except Exception as error:
        return Outcome(error=error)


def _written(func: Func) -> Sequence[int] | None:
    """The places of the arguments that a program may write to; None for any."""
    if any(isinstance(op, Call) and op.effect is Effect.MUTATES for op in walk(func.body)):
        return None
    return [n for n, p in enumerate(func.params) if p.role == "mutated"]


def restore(args: Args, before: Args) -> None:
    """Give arguments the values that they had."""
    for x, old in zip(args, before, strict=True):
        if isinstance(x, torch.Tensor) and x is not old and not x.equal(old):
            x.untyped_storage().copy_(old.untyped_storage())


def _kind(x: object) -> object:
    return (x.dtype, x.shape) if isinstance(x, torch.Tensor) else type(x)


# --- telling

def _warn(off: str, graph: Graph, error: Exception | None, options: Options) -> None:
    # The user's program goes on, right, whatever this runs into.
    where, path = "", ""
    with suppress(Exception):
        where = culprit(graph, options, error)
    try:
        path = _saved(graph, off, options)
    except Exception as failed:
        path = f"none, {type(failed).__name__}: {failed}"
    log.warning("rung: verify: it differs from eager in %s; %s; reproducer: %s; this graph runs in "
                "eager from now on", off, where or "no single kernel is at fault", path)


def _saved(graph: Graph, title: str, options: Options) -> str:
    settings = Settings.from_environment()
    folder = settings.keep or settings.cache_dir / "repro"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = hashlib.sha256(str(graph.module.code).encode()).hexdigest()[:16]
    path = Path(folder, f"{name}.py")
    path.write_text(repro.text(graph, f"rung and eager differ: {title}", options.target,
                               str(path)))
    return str(path)


def culprit(graph: Graph, options: Options, error: Exception | None = None) -> str:
    """The first kernel whose result is that of none of the operators it stands for, and where the
    user wrote them; else the check that raised `error`, or the operator that raises in eager.

    Layers are not outlined, so that each kernel has operators of its own.
    """
    assert graph.imported is not None
    compilation = Compilation(target(options.target), torch_on(graph.imported.home),
                              options.precision, graph.hints, read_mappings(options.mappings))
    passes = [p for p in pipeline.PASSES if p.name != "outline"]
    module = compilation.history(graph.imported.func, passes).reached()
    ops, at = _until(error, module.main.body.ops, lines_of(graph.imported.func))
    recorder = Recorder(graph.module)
    eager = outcome(recorder.record, graph.inputs)
    kernel = _diverging(module.main.with_ops(ops), module, graph, compilation, recorder.values)
    if not (kernel or at) and eager.error:
        node = next(n for n in graph.module.graph.nodes if n not in recorder.values)
        at = f"{node.target} ({origin_of(node).line}), which raises in eager"
    return kernel or (at and f"first in {at}")


def _until(error: Exception | None, ops: Sequence[Op], lines: Mapping[str, str]
           ) -> tuple[Sequence[Op], str]:
    """The ops before the check that raised an error, and what that is; all where none did."""
    notes = getattr(error, "__notes__", ())
    for n, op in enumerate(ops):
        if isinstance(op, Check) and (line := lines.get(op.node)) in notes:
            return ops[:n], f"the check of {op.value.name} at {line}"
    return ops[:-1], ""


def _diverging(main: Func, module: Module, graph: Graph, compilation: Compilation,
               known: Mapping[fx.Node, object]) -> str:
    """The first kernel of `main` whose result is not among what is `known` of its operators."""
    assert graph.imported is not None
    right = {n.name: x for n, x in known.items() if isinstance(x, torch.Tensor)}
    bound = judge.tolerance(Module((graph.imported.func,)))
    calls = [(op, r) for op in main.body.ops if isinstance(op, KernelCall)
             for r in op.results[len(op.updates):]]
    values = _values(main, module, [r for _, r in calls], graph, compilation)
    for (op, result), value in zip(calls, values, strict=True):
        theirs = [right[o.node] for o in origins.of(result) if o.node in right]
        same = [x for x in theirs if (x.numel(), x.dtype) == (value.numel(), value.dtype)]
        if same and not any(_alike(value, x, bound) for x in same):
            lines = dict.fromkeys(o.line for o in origins.of(result) if o.line)
            return f"first in kernel {op.callee} ({', '.join(lines)})"
    return ""


def _values(main: Func, module: Module, results: Sequence[Value], graph: Graph,
            compilation: Compilation) -> Sequence[torch.Tensor]:
    """What the kernels of `main` give, in one run that returns all of it."""
    assert graph.imported is not None
    main = main.with_ops([*main.body.ops, Return(tuple(results))])
    lowest = Module((main, *module.programs[1:]), module.kernels)
    run = compilation.executable(lowest, graph.imported.constants)
    torch.manual_seed(SEED)
    with torch.no_grad():
        return run(cloned(graph.inputs))


def _alike(a: torch.Tensor, b: torch.Tensor, bound: float) -> bool:
    right, found = ([to_numpy(x.reshape(-1))] for x in (b, a))
    return judge.difference(right, found, bound) is None
