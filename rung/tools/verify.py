"""`options={"verify": 0.01}`: a share of live calls run again in eager, on copies of their inputs.

At a difference (beyond roundings, and further from float64 than eager is) it says once which kernel
and line of the user come first, writes a reproducer, and that graph runs in eager from then on.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from rung import pipeline
from rung.core import origins
from rung.core.config import Settings
from rung.core.op import Value
from rung.core.options import Options
from rung.frontends.torch.importer import Imported
from rung.frontends.torch.oracle import to_numpy
from rung.pipeline import Context, Stages
from rung.program.ir import KernelCall, Module, Return
from rung.runtime.tensors import cloned
from rung.targets.base import target
from rung.tools import check, repro
from rung.tools.capture import Graph
from rung.tools.check import Difference
from rung.tools.given import SEED
from rung.tools.repro import Recorder

log = logging.getLogger("rung")
Args = list[Any]
Results = Sequence[Any]
Run = Callable[[Args], Results]
WORSE = 4.0  # times eager's own error that a result may be off


class Verified:
    """`run`, of which the share `options.verify` of calls is compared with `module` itself."""

    def __init__(self, run: Run, module: fx.GraphModule, imported: Imported, options: Options):
        self.run, self.module, self.imported, self.options = run, module, imported, options
        self.bound = check.tolerance(Module((imported.func,)))
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
        out: Results = self.module(*values)
        return out

    def checked(self, args: Args) -> Results:
        """One call by both; what eager gives where they differ."""
        given, before, seed = list(args), cloned(args), torch.get_rng_state()
        found = self.run(args)
        after = torch.get_rng_state()
        twin = cloned(before)
        torch.set_rng_state(seed)
        with torch.no_grad():
            wanted: Results = self.module(*twin)
        torch.set_rng_state(after)
        off = self.difference([*found, *given], [*wanted, *twin], before, seed)
        if off is None:
            return found
        self.trusted = False
        _warn(off, self.graph(before), self.options)
        with torch.no_grad():
            for real, right in zip(given, twin, strict=True):
                if isinstance(real, torch.Tensor) and not torch.equal(real, right):
                    real.copy_(right)
        return wanted

    def difference(self, found: Results, wanted: Results, inputs: Results,
                   seed: torch.Tensor) -> Difference | None:
        """Where a result is off by more than its type's roundings, and by more than eager's is."""
        new, old = ([to_numpy(x) for x in xs if x is not None] for xs in (found, wanted))
        off = check.difference(old, new, self.bound)
        if off is None:
            return None
        exact = widened(self.module, inputs, seed)
        if exact is None:
            return off
        true = [to_numpy(x) for x in exact if x is not None]
        for n, (a, b, c) in enumerate(zip(old, new, true, strict=True)):
            if check.difference([a], [b], self.bound) and not _error(c, b) <= WORSE * _error(c, a):
                return replace(off, number=n, error=_error(a, b))
        return None

    def graph(self, inputs: Args) -> Graph:
        """This graph with the inputs of one call."""
        hints = pipeline.hints_of(self.imported.func, inputs)
        return Graph("graph", self.module, self.imported, "", hints, inputs)


def verified(run: Run, module: fx.GraphModule, imported: Imported, options: Options) -> Run:
    """`run` as it is where `options` ask for no verification."""
    return Verified(run, module, imported, options) if options.verify else run


def _error(true: Any, found: Any) -> float:
    off = check.difference([true], [found], 0.0)
    return off.error if off else 0.0


# --- float64

class _Wide(fx.Interpreter):
    """Runs a graph in float64, whatever types its nodes name."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        def wide(x: Any) -> Any:
            return torch.float64 if x in HALVES else x
        args, kwargs = torch.utils._pytree.tree_map_only(torch.dtype, wide, (args, kwargs))
        return super().call_function(target, args, kwargs)


HALVES = (torch.float32, torch.bfloat16, torch.float16)


def widened(module: fx.GraphModule, inputs: Results, seed: torch.Tensor) -> Args | None:
    """Results and arguments afterwards in float64; None where torch cannot do that."""
    wide = [x.double() if isinstance(x, torch.Tensor) and x.dtype in HALVES else x
            for x in cloned(inputs)]
    now = torch.get_rng_state()
    torch.set_rng_state(seed)
    try:
        with torch.no_grad():
            return [*_Wide(module).run(*wide), *wide]
    except Exception:  # an operator without float64, or one that wants other types to be equal
        return None
    finally:
        torch.set_rng_state(now)


# --- telling

def _warn(off: Difference, graph: Graph, options: Options) -> None:
    where = "no single kernel is at fault"
    try:
        where = culprit(graph, options) or where
        path = _written(graph, str(off), options)
    except Exception as error:  # the user's program goes on, right, whatever this runs into
        path = f"none, {type(error).__name__}: {error}"
    log.warning("verify: rung differs from eager in %s; %s; reproducer: %s; this graph runs in "
                "eager from now on", off, where, path)


def _written(graph: Graph, title: str, options: Options) -> str:
    settings = Settings.from_environment()
    folder = settings.keep or settings.cache_dir / "repro"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = hashlib.sha256(str(graph.module.code).encode()).hexdigest()[:16]
    path = Path(folder, f"{name}.py")
    path.write_text(repro.text(graph, f"rung and eager differ: {title}", options.target,
                               str(path)))
    return str(path)


def culprit(graph: Graph, options: Options) -> str:
    """The first kernel whose result is that of none of the operators it stands for, and where the
    user wrote them; layers are not outlined, so that each kernel has operators of its own."""
    assert graph.imported is not None
    context = Context(target(options.target), options.precision, graph.hints,
                      pipeline.read_mappings(options.mappings))
    module, made = Module((graph.imported.func,)), dict[str, Module]()
    for p in pipeline.PASSES:
        if p.name != "outline":
            module = pipeline.run_pass(p, module, context)
        made[p.rung] = module
    calls = [(op, r) for op in module.main.body.ops if isinstance(op, KernelCall)
             for r in op.results[len(op.updates):]]
    values = _values(module, [r for _, r in calls], graph, context, made)
    right = {n.name: x for n, x in Recorder(graph.module).record(graph.inputs).items()
             if isinstance(x, torch.Tensor)}
    bound = check.tolerance(Module((graph.imported.func,)))
    for (op, result), value in zip(calls, values, strict=True):
        known = [right[o.node] for o in origins.of(result) if o.node in right]
        same = [x for x in known if (x.numel(), x.dtype) == (value.numel(), value.dtype)]
        if same and not any(_alike(value, x, bound) for x in same):
            lines = dict.fromkeys(o.line for o in origins.of(result) if o.line)
            return f"first in kernel {op.callee} ({', '.join(lines)})"
    return ""


def _values(module: Module, results: Sequence[Value], graph: Graph, context: Context,
            made: dict[str, Module]) -> Sequence[torch.Tensor]:
    """What the kernels of a module give, in one run that returns all of it."""
    assert graph.imported is not None
    main = module.main.with_ops([*module.main.body.ops[:-1], Return(tuple(results))])
    lowest = Module((main, *module.programs[1:]), module.kernels)
    source = context.target.emit(pipeline.generated(module))
    run = pipeline.executable(Stages(made | {"kernel": lowest}, context.target, source),
                              graph.imported.constants)
    torch.manual_seed(SEED)
    with torch.no_grad():
        return run(cloned(graph.inputs))


def _alike(a: torch.Tensor, b: torch.Tensor, bound: float) -> bool:
    right, found = ([to_numpy(x.reshape(-1))] for x in (b, a))
    return check.difference(right, found, bound) is None
