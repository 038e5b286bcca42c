"""The passes between the rungs, as one flat list, and what runs them.

In: a program of ATen calls. Out: `Stages`, the module at the end of every rung and the target's
source; `compile_program` makes a callable of them for the torch backend.

The order is the list `PASSES`: each pass with the reason for standing where it stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch

from rung.core import origins, trace
from rung.core.config import Settings
from rung.core.cost import bound
from rung.core.errors import LoweringError, MappingError, RungError
from rung.core.expr import sym
from rung.core.key import structural_key
from rung.core.machine import Machine
from rung.core.op import Effect, Func, Vocabulary, walk
from rung.core.origins import Origin
from rung.core.parse import parse_module
from rung.core.types import TensorType
from rung.core.verify import verify
from rung.frontends.torch import aten
from rung.frontends.torch.titles import title
from rung.kernel import ir as kernel_ir
from rung.loop import blocks, canonical, fuse, merge_folds, normalize, siblings, split
from rung.loop import ir as loop_ir
from rung.loop import simplify as loop_simplify
from rung.program import ir as program_ir
from rung.program import outline, reinplace, views
from rung.program.ir import Composite, Module
from rung.runtime import saved
from rung.runtime.executable import Executable
from rung.runtime.host import host_code
from rung.targets.base import Target, is_library, sizes_of, target
from rung.tensor import accumulate, empty, to_loop
from rung.tensor import simplify as tensor_simplify
from rung.tile import choose, to_kernel
from rung.tile.choose import Choice
from rung.tile.mapping import Mapping as TileMapping
from rung.tile.mapping import parse_mapping

RUNGS = ("program", "tensor", "loop", "tile", "kernel")
VOCABULARIES: dict[str, Vocabulary] = {
    v.kind: v for v in (program_ir.VOCABULARY, loop_ir.VOCABULARY, kernel_ir.VOCABULARY)}
RULES: dict[str, Callable[[Func], None]] = {
    "program": program_ir.verify_program, "kernel": loop_ir.verify_kernel,
    "kernel-ir": kernel_ir.verify_kernel_ir}


FOLDS = loop_ir.Fold | loop_ir.Contract | loop_ir.Scan
PENALTY = 1.0  # seconds: more than any fusion gains


@dataclass(frozen=True)
class Context:
    """What passes may ask about: the machine, the user's options, and what sizes to expect."""

    target: Target
    precision: str = "default"
    hints: Mapping[str, int] = field(default_factory=dict)
    mappings: Mapping[str, TileMapping] = field(default_factory=dict)
    careful: bool = False  # no more folds in a kernel than its parts have

    @property
    def machine(self) -> Machine:
        return self.target.machine

    def price(self, kernel: Func) -> float:
        """Modelled seconds of a kernel, by our code or a library's."""
        folds = [op for op in kernel.body.ops if isinstance(op, FOLDS)]
        fine = PENALTY * max(len(folds) - 1, 0) if self.careful else 0.0
        return fine + choose.estimate(kernel, self.machine, self.target.libraries, self.hints)


@dataclass(frozen=True)
class Pass:
    """One step. `kind` says what it may do to results: exact | reassociates | changes-values."""

    rung: str
    name: str
    run: Callable[[Module, Context], Module]
    kind: str
    why: str


def _programs(change: Callable[[Func], Func]) -> Callable[[Module, Context], Module]:
    """A pass that changes each program."""
    return lambda module, _: Module(tuple(map(change, module.programs)), module.kernels)


def _kernels(change: Callable[[Func, Context], Func]) -> Callable[[Module, Context], Module]:
    """A pass that changes each kernel."""
    return lambda module, context: Module(
        module.programs, tuple(change(k, context) for k in module.kernels))


# --- policies that no rung can decide by itself

def _lower_calls(module: Module, context: Context) -> Module:
    """ATen calls lowered, as far as the precision lets them be."""
    return Module(tuple(aten.lower(p, precision=context.precision) for p in module.programs),
                  module.kernels)


def _open_composites(module: Module, context: Context) -> Module:
    """Composites opened, but for those that the target has a better library for."""
    def keep(op: Composite) -> bool:
        types = [v.type for v in op.operands()]
        return context.target.keeps_call(op.target, types, context.hints)

    return Module(tuple(tensor_simplify.open_composites(p, keep) for p in module.programs),
                  module.kernels)


def merges_folds(kernel: Func, machine: Machine) -> bool:
    """Whether one fold over a row is better than several: where the row does not fit the nearest
    memory, or a contraction would be computed again for each of them."""
    folds = [op for op in kernel.body.ops if isinstance(op, loop_ir.Fold)]
    if any(isinstance(op, loop_ir.Contract) for op in kernel.body.ops):
        return True
    near = min((s.bytes for s in machine.spaces), default=0)
    return any(4 * (op.extent.const_value or near) > near for op in folds)


def _merge(kernel: Func, context: Context) -> Func:
    return merge_folds.merge(kernel) if merges_folds(kernel, context.machine) else kernel


_choices: dict[str, Choice] = {}


def _choice(kernel: Func, context: Context) -> Choice:
    """The user's mapping of a kernel, or one that is chosen once in a process for each structure,
    machine and bucket of sizes."""
    machine, given = context.machine, context.mappings.get(kernel.name)
    if given and given.machine == machine.name:
        return choose.given(kernel, given, machine, context.hints)
    sizes = sorted((n, _bucket(size)) for n, size in context.hints.items())
    named = [str(e) for e in sizes_of(kernel)]  # a choice is of a kernel by its names
    key = structural_key(kernel, kernel.name, machine.name, str(sizes), *named)
    if key not in _choices:
        _choices[key] = choose.choose(kernel, machine, context.target.candidates, context.hints,
                                      context.target.libraries)
    return _choices[key]


def _bucket(size: int) -> int:
    """`size` rounded up to a power of two."""
    return 1 << max(size - 1, 0).bit_length()


def _settled(kernel: Func, context: Context) -> float | None:
    """Seconds of a kernel as it will be mapped; None where it has no mapping."""
    late = loop_simplify.simplify(kernel, context.precision)
    try:
        return _choice(normalize.merge_axes(_merge(late, context)), context).price.seconds
    except MappingError:
        return None


def _mapped(kernel: Func, context: Context) -> Func:
    choice = _choice(kernel, context)
    if choice.lowered:
        _lowered[choice.kernel] = choice.lowered
    return choice.kernel


_lowered: WeakKeyDictionary[Func, Func] = WeakKeyDictionary()


def _to_kernel(kernel: Func, context: Context) -> Func:
    """Kernel IR, which a choice brings along. What goes to a library stays as it is."""
    if kernel not in _lowered and is_library(kernel):
        return kernel
    return _lowered.get(kernel) or to_kernel.to_kernel(kernel, context.machine)


def _split(module: Module, context: Context) -> Module:
    """Kernels that the user mapped stay whole."""
    own = tuple(k for k in module.kernels if k.name in context.mappings)

    def price(kernel: Func) -> tuple[float, float]:
        cost = _choice(kernel, context).price
        return cost.seconds, cost.cores if kernel not in own else context.machine.cores
    return split.split(module, price, context.machine.cores)


PASSES = (
    Pass("program", "outline", lambda m, _: outline.outline(m.main), "exact",
         "first, so that everything after it sees a repeated layer once"),
    Pass("tensor", "lower", _lower_calls, "reassociates",
         "meanings replace names before anything is decided by them"),
    Pass("tensor", "open_composites", _open_composites, "reassociates",
         "before simplify, which then sees across the borders of what was opened"),
    Pass("tensor", "simplify", _programs(tensor_simplify.simplify), "exact",
         "while index maps are still whole-tensor ops that compose"),
    Pass("tensor", "accumulate", lambda m, c: m if c.precision == "eager" else
         _programs(accumulate.accumulate)(m, c), "reassociates",
         "after simplify, when what is added is no longer behind index maps"),
    Pass("tensor", "drop_empty", _programs(empty.drop_empty), "exact",
         "last of the rung: below it no extent is 0, but in a kernel that stores nothing"),
    Pass("loop", "to_loop", lambda m, _: to_loop.to_loop(*m.programs), "reassociates",
         "one kernel an op, so that fusion alone decides what a kernel is"),
    Pass("loop", "fuse", lambda m, c: fuse.fuse(m, c.price), "exact",
         "on the smallest kernels, whose prices are simple"),
    Pass("loop", "siblings", lambda m, c: siblings.join_siblings(
        m, c.price, partial(_settled, context=c)), "exact",
         "after fusion, which brings what several kernels read into each of them"),
    Pass("loop", "inline_applies", lambda m, _: outline.inline_applies(m), "exact",
         "after the costliest passes; memory is planned over the whole program"),
    Pass("loop", "simplify", _kernels(
        lambda k, c: loop_simplify.simplify(k, c.precision)), "changes-values",
         "after fusion, when a rounding is known to lie inside a kernel"),
    Pass("loop", "merge_folds", _kernels(_merge), "reassociates",
         "after simplify, whose rules do not know carriers of several states"),
    Pass("loop", "views", lambda m, _: views.views(m, aten.is_view), "exact",
         "after fusion, which swallows most copies"),
    Pass("loop", "reinplace", lambda m, _: reinplace.reinplace(m), "exact",
         "once it is settled which kernel writes what"),
    Pass("loop", "merge_axes", _kernels(lambda k, _: normalize.merge_axes(k)), "reassociates",
         "once nothing but `split` changes nests"),
    Pass("loop", "canonical", lambda m, _: canonical.canonical(m, title), "exact",
         "equal kernels are one from here on, under the name that stays"),
    Pass("loop", "split", _split, "reassociates",
         "under the kernels' final names, so that what stays whole is priced once"),
    Pass("loop", "in_blocks", _kernels(lambda k, _: blocks.in_blocks(k)), "reassociates",
         "after `split`, whose parts may be short enough"),
    Pass("tile", "choose", _kernels(_mapped), "exact",
         "a mapping belongs to a structure, not to a call"),
    Pass("kernel", "to_kernel", _kernels(_to_kernel), "reassociates",
         "the mapping says all that this needs"),
)


@dataclass(frozen=True)
class Stages:
    """The module at the end of each rung, and the target's source."""

    modules: dict[str, Module]
    target: Target
    source: str = ""

    def text(self, rung: str) -> str:
        """The dump of a rung; all but `source` are input to `rung opt`."""
        return self.source if rung == "source" else f"{self.modules[rung]}\n"


def lower_module(program: Func, machine: Target, precision: str = "default",
                 hints: Mapping[str, int] | None = None,
                 mappings: Mapping[str, TileMapping] | None = None) -> Stages:
    """All rungs below `program` for one target; `hints` are the sizes to expect, `mappings` the
    user's own by kernel. Where a fused kernel has no mapping, fusion is tried again with care.
    RungError where a rung cannot take the program."""
    context = Context(machine, precision, hints or {}, mappings or {})
    try:
        return _lower(program, context)
    except MappingError as error:
        trace.emit("declined", "choose", program.name, str(error))
        return _lower(program, replace(context, careful=True))


def _lower(program: Func, context: Context) -> Stages:
    machine = context.target
    module, modules = Module((program,)), dict[str, Module]()
    for step in PASSES:
        module = run_pass(step, module, context)
        modules[step.rung] = module
    with _timed("source", "emit"):
        source = machine.emit(generated(module))
    return Stages(modules, machine, source)


def generated(module: Module) -> tuple[Func, ...]:
    """The kernels that are not a library's."""
    return tuple(k for k in module.kernels if not is_library(k))


def run_pass(step: Pass, module: Module, context: Context) -> Module:
    """The module after one pass, verified at the border of a rung; with RUNG_CHECK after every
    pass, and compared with the module before."""
    with _timed(step.rung, step.name):
        after = step.run(module, context)
    checking = Settings.from_environment().check
    if checking or step.name in BORDERS:
        verify_module(after, step.name)
    if checking and after is not module:
        _compare(step, module, after, context)
    return after


BORDERS = {p.name for p, q in zip(PASSES, (*PASSES[1:], None), strict=True)
           if q is None or p.rung != q.rung}


@contextmanager
def _timed(rung: str, name: str) -> Iterator[None]:
    started = perf_counter()
    yield
    trace.emit("ran", rung, name, seconds=perf_counter() - started)


def verify_module(module: Module, where: str = "") -> None:
    """Verify each function of a module by the rules of its kind."""
    for func in (*module.programs, *module.kernels):
        verify(func, VOCABULARIES[func.kind], RULES[func.kind], where)
    program_ir.verify_calls(module)


SLOW = 1 << 20  # operations over which Kernel IR is not run as Python


def _compare(step: Pass, before: Module, after: Module, context: Context) -> None:
    """Run both sides on the oracles, unless that takes too long or the program draws numbers."""
    from rung.tools import check

    inputs = check.draw(before.main, context.hints)
    work = sum(bound(k, context.machine, context.hints).ops for k in before.kernels
               if step.rung == "kernel")
    effects = {op.effect for f in before.programs for op in walk(f.body)}
    if inputs is None or work > SLOW or Effect.RNG in effects:
        trace.emit("declined", "check", step.name, "too large, or random")
        return
    check.compare(before, after, inputs, step.kind == "exact", f"{step.rung}.{step.name}")


# --- for the torch backend

PATIENCE = 5.0  # seconds of compiling after which the user is told


def compile_program(func: Func, options: Any, constants: Sequence[Any],
                    example_inputs: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
    """The callable of a program: it takes the list of the inputs, which it empties, and gives the
    tensors that the program returns. RungError where some rung, or the target, cannot take it."""
    try:
        machine, hints = target(options.target), hints_of(func, example_inputs)
        mappings, lines, nodes = read_mappings(options.mappings), lines_of(func), nodes_of(func)
        settings, key = Settings.from_environment(), ""
        if not (trace.active() or settings.check or settings.fresh or settings.keep):
            key = saved.key_of(func, machine.identity(), str(options), str(list(hints.values())),
                               *map(str, mappings.values()))
            if warm := _warm(key, func, machine, constants, lines, nodes):
                return warm.run
        started = perf_counter()
        stages = lower_module(func, machine, options.precision, hints, mappings)
        count = len(generated(stages.modules["kernel"]))
        words = f"compiling, {count} kernel{'s' * (count != 1)}"
        with trace.notice(words, PATIENCE - (perf_counter() - started)):
            made = executable(stages, constants, lines, nodes)
        trace.emit("compiled", "pipeline", func.name, stages=stages)
        if key and made.library:
            texts = {k.name: str(k) for k in stages.modules["kernel"].kernels if is_library(k)}
            saved.save(key, func, made.code, made.library, texts)
        return made.run
    except RungError:
        raise
    except Exception as error:  # a bug of ours must not stop the user's model
        raise LoweringError(f"internal error: {type(error).__name__}: {error}") from error


def verified(run: Callable[[list[Any]], Sequence[Any]], gm: Any, imported: Any, options: Any
             ) -> Callable[[list[Any]], Sequence[Any]]:
    """`run`, with the share of its calls that `options` ask for compared with the graph itself."""
    from rung.tools import verify

    return verify.verified(run, gm, imported, options)


def _warm(key: str, func: Func, machine: Target, constants: Sequence[Any],
          lines: Mapping[str, str], nodes: Sequence[Origin | None]) -> Executable | None:
    """What was compiled before for a program, unless it is not, or not wholly, in the cache."""
    found = saved.load(key)
    names = [n for n in found.code.stretches if n != "run"] if found else []
    launches = machine.reload(found.library, names) if found else None
    if not found or launches is None:
        return None
    kernels = parse_module("\n".join(found.kernels.values()), VOCABULARIES, parse_mapping)
    return Executable(found.code, machine, launches, {k.name: machine.call(k) for k in kernels},
                      constants, saved.lines_for(found.nodes, func, lines), nodes)


def lines_of(func: Func) -> dict[str, str]:
    """The user's line of each result of a call, where it is known."""
    found = {r.name: origins.of(r) for op in func.body.ops for r in op.results}
    return {name: f"{of[0].line}: {of[0].code}" for name, of in found.items() if of and of[0].line}


def nodes_of(func: Func) -> list[Origin | None]:
    """Where each op of an imported program comes from."""
    return [next(iter(origins.of_all(op.results)), None) for op in func.body.ops]


def hints_of(func: Func, example_inputs: Sequence[Any]) -> dict[str, int]:
    """What each size symbol is in the inputs that the graph was traced with."""
    hints: dict[str, int] = {}
    for param, x in zip(func.params, example_inputs, strict=False):
        pairs = [(sym(param.name), x)]
        if isinstance(param.type, TensorType):
            pairs = list(zip(param.type.shape, x.shape, strict=True))
        for size, actual in pairs:
            number = actual.node.hint if isinstance(actual, torch.SymInt) else actual
            if size.is_symbol() and isinstance(number, int):
                hints[str(size)] = number
    return hints


def read_mappings(path: str) -> dict[str, TileMapping]:
    """The mappings in a file, by kernel; none for no file. ParseError, or OSError of the file."""
    text = Path(path).read_text() if path else ""
    text = re.sub(r"#.*", "", text)
    parts = [part for part in re.split(r"^(?=map )", text, flags=re.M) if part.strip()]
    found = [parse_mapping(part) for part in parts]
    return {m.kernel: m for m in found}


def executable(stages: Stages, constants: Sequence[Any] = (),
               lines: Mapping[str, str] | None = None, nodes: Sequence[Origin | None] = ()
               ) -> Executable:
    """What runs the lowest rung of `stages` on tensors of the host; `lines` are the user's, by the
    results of calls, and `nodes` where the ops of the imported program come from."""
    module, machine = stages.modules["kernel"], stages.target
    own = generated(module)
    with _timed("source", "host"):
        code, stretches = host_code(module, len(constants))
    with _timed("source", "build"):
        launches = machine.load(own, stages.source, stretches) if own or stretches else {}
    libraries = {k.name: machine.call(k) for k in module.kernels if is_library(k)}
    with _timed("source", "load"):
        return Executable(code, machine, launches, libraries, constants, lines, nodes)
