"""Many torch programs compiled at once: one library of all their kernels, instead of one each.

A program takes the way of `torch.compile`, Dynamo apart: traced symbolically, functionalized by
AOTAutograd, lowered; what AOTAutograd gets is a callable that is filled in once the kernels of the
whole batch are built. Names of kernels get a prefix, since two programs may share one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import fx

from rung.compilation import Compilation, History, generated
from rung.core.cost import bound
from rung.core.errors import Unsupported
from rung.frontends.torch import compat
from rung.frontends.torch.backend import with_results
from rung.frontends.torch.externs import TORCH
from rung.frontends.torch.importer import Imported, import_graph
from rung.frontends.torch.oracle import to_numpy
from rung.frontends.torch.tensors import cloned
from rung.frontends.torch.tracing import compile_graphs
from rung.program.ir import Module
from rung.runtime.executable import Executable
from rung.runtime.host import host_code
from rung.targets.base import Target, is_library
from rung.targets.device import Launched, Stretch
from rung.targets.device import device as device_of
from rung.tools import check, judge
from rung.tools.fuzz.programs import Program

Run = Callable[[list[Any]], Any]


@dataclass
class TracedGraph:
    """The graph of one program on its way to code; `run` is there once `build` has been."""

    imported: Imported
    history: History
    prefix: str
    run: Run | None = None
    watched: bool = False
    seen: tuple[list[Any], list[Any]] = ([], [])  # what it was given, if watched, and gave

    def wrong(self, bound: float) -> str:
        """On which rung the oracle gives something else than the code did when it ran last."""
        for rung, module in self.history.modules.items():
            if rung != "kernel" or not self.slow:
                for found in self._differences(module, bound):
                    return f"the code changes {found} of {rung} IR"
        return ""

    def _differences(self, module: Module, bound: float) -> Iterator[judge.Difference]:
        """Of what the code gave from what a module does, by more than roundings of the arguments
        change that: terms may cancel, so that roundings are all that is left."""
        given, got = self.seen[0], [x for x in self.seen[1] if isinstance(x, torch.Tensor)]

        def oracle(args: judge.Args) -> judge.Results:
            inputs = [to_numpy(x) for x in (*args, *self.imported.constants)]
            return check.results(module, inputs)[:len(got)]

        return judge.wrong(got, oracle(given), bound, judge.Reference(lambda: None, cache(
            lambda: [oracle(judge.off_by_roundings(given, n)) for n in range(judge.SEEDS)])))

    @property
    def slow(self) -> bool:
        machine, kernels = self.history.target.machine, self.history.at("tile").kernels
        costs = [bound(k, machine) for k in kernels]
        return sum(c.ops + c.flops for c in costs) > SLOW

    @property
    def module(self) -> Module:
        return self.history.at("kernel")


@dataclass
class Lowered:
    """A program that is called like its function, once its parts are built."""

    program: Program
    call: Callable[..., Any]
    parts: list[TracedGraph] = field(default_factory=list)

    def watch(self) -> None:
        """Keep what each part is given and gives."""
        for part in self.parts:
            part.watched = True


def lowered(program: Program, target: Target, prefix: str) -> Lowered:
    """Down to Kernel IR. RungError where a rung refuses, which torch.compile would hide;
    Unsupported also where AOTAutograd does, with any backend."""
    parts, failed = list[TracedGraph](), list[Exception]()

    def compiler(gm: fx.GraphModule, examples: Sequence[Any]) -> compat.Boxed:
        try:
            part = _part(gm, program, target, f"{prefix}{len(parts)}_")
        except Exception as error:
            failed.append(error)
            raise
        parts.append(part)
        return compat.boxed(lambda args: _run(part, args))

    gm = fx.symbolic_trace(program.function())
    try:
        with torch.no_grad():
            call = compile_graphs(gm, program.arguments(), compiler, compiler, compiler)
    except Exception as error:
        if failed:
            raise
        raise Unsupported(f"AOTAutograd: {error}") from error
    return Lowered(program, call, parts)


def _part(gm: fx.GraphModule, program: Program, target: Target, prefix: str) -> TracedGraph:
    precision = dict(program.options).get("precision", "default")
    with compat.unset_fake_temporarily():
        imported = import_graph(gm, static=compat.static_inputs(gm))
        history = Compilation(target, TORCH, precision).lower(imported.func)
        return TracedGraph(imported, history, prefix)


def _run(part: TracedGraph, args: list[Any]) -> Any:
    assert part.run is not None
    given = cloned(args) if part.watched else []
    out = part.run(args)
    if part.watched:
        part.seen = given, list(out)
    return out


SLOW = 1 << 15  # operations over which Kernel IR is not run as Python


def build(programs: Sequence[Lowered], target: Target) -> None:
    """Code for the parts of all programs, as one library. TargetCompileError if it has none."""
    parts = [p for x in programs for p in x.parts]
    codes = [host_code(p.module, TORCH, len(p.imported.constants)) for p in parts]
    kernels = [replace(k, name=p.prefix + k.name) for p in parts for k in generated(p.module)]
    stretches = [_renamed(s, p.prefix) for p, (_, found) in zip(parts, codes, strict=True)
                 for s in found]
    device = device_of(target)
    launches = device.load(kernels, target.emit(kernels), stretches) if kernels or stretches else {}
    for part, (code, _) in zip(parts, codes, strict=True):
        own = {name.removeprefix(part.prefix): x for name, x in launches.items()
               if name.startswith(part.prefix)}
        libraries = {k.name: device.call(k) for k in part.module.kernels if is_library(k)}
        made = Executable(code, device, TORCH, own, libraries, part.imported.constants)
        part.run = with_results(made.run, part.imported)


def _renamed(stretch: Stretch, prefix: str) -> Stretch:
    steps = tuple(replace(x, kernel=prefix + x.kernel) if isinstance(x, Launched) else x
                  for x in stretch.steps)
    return replace(stretch, name=prefix + stretch.name, steps=steps)
