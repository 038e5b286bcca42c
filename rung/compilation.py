"""Compiling one program: its way down the rungs as data, and what runs it in the end.

`Compilation.history` runs the passes and keeps, for each, the module before and after it: what
`show`, `explain`, `opt`, `bisect`, `repro` and `verify` read. `compile_program` is what a front end
calls: it looks on disk first, and gives a callable.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

from rung import pipeline
from rung.core import origins, trace
from rung.core.config import Settings
from rung.core.errors import LoweringError, MappingError, RungError
from rung.core.op import Func
from rung.core.options import Options
from rung.core.origins import Origin
from rung.core.parse import parse_module
from rung.core.trace import Event
from rung.pipeline import VOCABULARIES, Context, Pass, run_pass, timed
from rung.program.externs import Externs
from rung.program.ir import Module
from rung.runtime import saved
from rung.runtime.code import Code
from rung.runtime.executable import Executable
from rung.runtime.host import host_code
from rung.targets import base, device
from rung.targets.base import Target, is_library
from rung.targets.device import Device, Launch
from rung.tile.mapping import Mapping as TileMapping
from rung.tile.mapping import parse_mapping

log = logging.getLogger("rung")
PATIENCE = 5.0  # seconds of compiling after which the user is told


@dataclass(frozen=True)
class PassRun:
    """A pass that ran, the module before and after it, its seconds, and what it told, if anybody
    listens."""

    ran: Pass
    before: Module
    after: Module
    seconds: float
    events: tuple[Event, ...] = ()


@dataclass(frozen=True)
class History:
    """The way of a module through passes. `error` says why it ends before the last of them, in the
    pass `failed`; `source` is the target's, once it is emitted."""

    start: Module
    target: Target
    steps: tuple[PassRun, ...]
    failed: Pass | None = None
    error: RungError | None = None
    source: str = ""

    @cached_property
    def modules(self) -> dict[str, Module]:
        """The module at the end of each rung whose passes all ran."""
        following = (*(s.ran for s in self.steps[1:]), self.failed)
        return {s.ran.rung: s.after for s, then in zip(self.steps, following, strict=False)
                if then is None or then.rung != s.ran.rung}

    def reached(self) -> Module:
        """The module after all passes; raises the error if one failed."""
        if self.error:
            raise self.error
        return self.steps[-1].after if self.steps else self.start

    def at(self, rung: str) -> Module:
        """The module at the end of a rung; raises the error that came before it."""
        if self.error and rung not in self.modules:
            raise self.error
        return self.modules[rung]

    def text(self, rung: str) -> str:
        """The dump of a rung; all but `source` are input to `rung opt`."""
        return self.source if rung == "source" else f"{self.at(rung)}\n"


class Compilation:
    """How programs are compiled for one target: `hints` are the sizes to expect, `mappings` the
    user's own by kernel. What was chosen for a kernel is kept for the others like it."""

    def __init__(self, target: Target, externs: Externs, precision: str = "default",
                 hints: Mapping[str, int] | None = None,
                 mappings: Mapping[str, TileMapping] | None = None):
        self.target = target
        self.context = Context(target, externs, precision, hints or {}, mappings or {})

    @cached_property
    def device(self) -> Device:
        """What runs the target's kernels here; LaunchError if nothing does."""
        tensors = self.context.externs.tensors
        return device.device(self.target, tensors.device, tensors.stream)

    def history(self, start: Module | Func, passes: Sequence[Pass] | None = None) -> History:
        """What `passes`, or all of them, make of a program or a module. Where a fused kernel has no
        mapping, they run again with care in fusion."""
        module = Module((start,)) if isinstance(start, Func) else start
        chosen = pipeline.PASSES if passes is None else passes
        found = self._through(module, chosen, self.context)
        if not isinstance(found.error, MappingError):
            return found
        trace.emit("declined", "choose", (*module.programs, *module.kernels)[0].name,
                   str(found.error))
        return self._through(module, chosen, replace(self.context, careful=True))

    def _through(self, module: Module, passes: Sequence[Pass], context: Context) -> History:
        start, steps = module, list[PassRun]()
        for step in passes:
            began, told = perf_counter(), len(trace.heard())
            try:
                after = run_pass(step, module, context)
            except RungError as error:
                return History(start, self.target, tuple(steps), step, error)
            steps.append(PassRun(step, module, after, perf_counter() - began,
                              tuple(trace.heard()[told:])))
            module = after
        return History(start, self.target, tuple(steps))

    def lower(self, program: Func) -> History:
        """All rungs below `program`, and the source. RungError where a rung cannot take it."""
        found = self.history(program)
        return replace(found, source=self.emit(found.reached()))

    def emit(self, module: Module) -> str:
        """The source of a module's kernels, but for those of libraries."""
        with timed("source", "emit"):
            return self.target.emit(generated(module))

    def executable(self, module: Module, constants: Sequence[Any] = (),
                   lines: Mapping[str, str] | None = None, nodes: Sequence[Origin | None] = (),
                   source: str = "") -> Executable:
        """What runs a module of Kernel IR on tensors of the host.

        `lines` are the user's, by the results of calls, `nodes` where the ops of the imported
        program come from, and `source` what was emitted for the module, if it was.
        """
        own, source = generated(module), source or self.emit(module)
        with timed("source", "host"):
            code, stretches = host_code(module, self.context.externs, len(constants))
        with timed("source", "build"):
            launches = self.device.load(own, source, stretches) if own or stretches else {}
        return self._loaded(code, launches, module.kernels, constants, lines, nodes)

    def _loaded(self, code: Code, launches: Mapping[str, Launch], kernels: Iterable[Func],
                constants: Sequence[Any], lines: Mapping[str, str] | None,
                nodes: Sequence[Origin | None]) -> Executable:
        libraries = {k.name: self.device.call(k) for k in kernels if is_library(k)}
        with timed("source", "load"):
            return Executable(code, self.device, self.context.externs, launches, libraries,
                              constants, lines, nodes)

    def unmapped(self, module: Module) -> str:
        """What is wrong with the user's mappings, if they are for none of a module's kernels."""
        given, names = self.context.mappings, [k.name for k in module.kernels]
        if not given or not given.keys().isdisjoint(names):
            return ""
        return (f"the mappings are for {', '.join(given)}, and the graph has "
                f"{', '.join(names) or 'no kernels'}")

    def key(self, program: Func, options: Options) -> str:
        """The key of a program's code on disk."""
        context = self.context
        return saved.key_of(program, self.device.identity(), context.externs.version(),
                            str(options), str(list(context.hints.values())),
                            *map(str, context.mappings.values()))

    def saved(self, key: str, program: Func, constants: Sequence[Any], lines: Mapping[str, str],
              nodes: Sequence[Origin | None]) -> Executable | None:
        """What was compiled before for a program; None if it is not, or not wholly, on disk."""
        found = saved.load(key)
        names = [n for n in found.code.stretches if n != "run"] if found else []
        launches = self.device.reload(found.library, names) if found else None
        if not found or launches is None:
            return None
        kernels = parse_module("\n".join(found.kernels.values()), VOCABULARIES, parse_mapping)
        return self._loaded(found.code, launches, kernels, constants,
                            saved.lines_for(found.nodes, program, lines), nodes)


def generated(module: Module) -> tuple[Func, ...]:
    """The kernels that are not a library's."""
    return tuple(k for k in module.kernels if not is_library(k))


# --- for a front end

def compile_program(program: Func, options: Options, constants: Sequence[Any],
                    hints: Mapping[str, int], externs: Externs
                    ) -> Callable[[list[Any]], Sequence[Any]]:
    """The callable of a program: it takes the list of the inputs, which it empties, and gives the
    tensors that the program returns. RungError where some rung, or the target, cannot take it."""
    try:
        target = base.target(options.target)
        if options.deterministic:
            target = replace(target, machine=target.machine.deterministic())
        compilation = Compilation(target, externs, options.precision, hints,
                                  read_mappings(options.mappings))
        lines, nodes = lines_of(program), nodes_of(program)
        settings, key = Settings.from_environment(), ""
        if not (trace.active() or settings.check or settings.fresh or settings.keep):
            key = compilation.key(program, options)
            if warm := compilation.saved(key, program, constants, lines, nodes):
                return warm.run
        started = perf_counter()
        history = compilation.lower(program)
        module = history.reached()
        if why := compilation.unmapped(module):
            log.warning("rung: no mapping of %s is used: %s", options.mappings, why)
        count = len(generated(module))
        words = f"compiling, {count} kernel{'s' * (count != 1)}"
        with trace.notice(words, PATIENCE - (perf_counter() - started)):
            made = compilation.executable(module, constants, lines, nodes, history.source)
        trace.emit("compiled", "compilation", program.name, history=history)
        if key and made.library:
            texts = {k.name: str(k) for k in module.kernels if is_library(k)}
            saved.save(key, program, made.code, made.library, texts)
        return made.run
    except RungError:
        raise
    except Exception as error:  # a bug of ours must not stop the user's model
        raise LoweringError(f"internal error: {type(error).__name__}: {error}") from error


def lines_of(program: Func) -> dict[str, str]:
    """The user's line of each result of a call, where it is known."""
    found = {r.name: origins.of(r) for op in program.body.ops for r in op.results}
    return {name: f"{of[0].line}: {of[0].code}" for name, of in found.items() if of and of[0].line}


def nodes_of(program: Func) -> list[Origin | None]:
    """Where each op of an imported program comes from."""
    return [next(iter(origins.of_all(op.results)), None) for op in program.body.ops]


def read_mappings(path: str) -> dict[str, TileMapping]:
    """The mappings in a file, by kernel; none for no file. ParseError, or OSError of the file."""
    text = Path(path).read_text() if path else ""
    text = re.sub(r"#.*", "", text)
    parts = [part for part in re.split(r"^(?=map )", text, flags=re.M) if part.strip()]
    found = [parse_mapping(part) for part in parts]
    return {m.kernel: m for m in found}
