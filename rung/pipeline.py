"""The passes between the rungs, as one flat list, and what runs them.

In: a program of ATen calls. Out: `Stages`, the module at the end of every rung and the target's
source; `compile_program` makes a callable of them for the torch backend.

The order is the list `PASSES`: each pass with the reason for standing where it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

from rung.core import trace
from rung.core.config import Settings
from rung.core.cost import bound
from rung.core.expr import Expr
from rung.core.key import structural_key
from rung.core.machine import Machine
from rung.core.op import Func, Vocabulary, walk
from rung.core.verify import verify
from rung.frontends.torch import aten
from rung.kernel import ir as kernel_ir
from rung.loop import canonical, fuse, merge_folds, normalize
from rung.loop import ir as loop_ir
from rung.loop import simplify as loop_simplify
from rung.program import ir as program_ir
from rung.program import memory, outline, reinplace, views
from rung.program.ir import Composite, KernelCall, Module
from rung.runtime.executable import Executable
from rung.targets.base import Target, target
from rung.tensor import simplify as tensor_simplify
from rung.tensor import to_loop
from rung.tile import to_kernel
from rung.tile.choose import Choice, choose

RUNGS = ("program", "tensor", "loop", "tile", "kernel")
VOCABULARIES: dict[str, Vocabulary] = {
    v.kind: v for v in (program_ir.VOCABULARY, loop_ir.VOCABULARY, kernel_ir.VOCABULARY)}
RULES: dict[str, Callable[[Func], None]] = {
    "program": program_ir.verify_program, "kernel": loop_ir.verify_kernel,
    "kernel-ir": kernel_ir.verify_kernel_ir}


@dataclass(frozen=True)
class Context:
    """What passes may ask about: the machine and the user's options."""

    target: Target
    precision: str = "default"

    @property
    def machine(self) -> Machine:
        return self.target.machine

    def price(self, kernel: Func) -> float:
        """Modelled seconds of a kernel."""
        return bound(kernel, self.machine).seconds


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

def keeps_call(op: Composite) -> bool:
    """Whether a composite stays the library call that it names."""
    return False


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
    """The mapping of a kernel, chosen once in a process for each structure and machine."""
    key = structural_key(kernel, kernel.name, context.machine.name)
    if key not in _choices:
        _choices[key] = choose(kernel, context.machine, context.target.candidates)
    return _choices[key]


def _lowered(kernel: Func, context: Context) -> Func:
    """Kernel IR; the choice has it already, unless the mapping is somebody else's."""
    known = _choices.get(structural_key(kernel.with_attr("mapping", None), kernel.name,
                                        context.machine.name))
    if known and known.kernel is kernel and known.lowered:
        return known.lowered
    return to_kernel.to_kernel(kernel, context.machine)


PASSES = (
    Pass("program", "outline", lambda m, _: outline.outline(m.main), "exact",
         "first, so that everything after it sees a repeated layer once"),
    Pass("tensor", "lower", _programs(aten.lower), "exact",
         "meanings replace names before anything is decided by them"),
    Pass("tensor", "open_composites", _programs(
        partial(tensor_simplify.open_composites, keep=keeps_call)), "reassociates",
         "before simplify, which then sees across the borders of what was opened"),
    Pass("tensor", "simplify", _programs(tensor_simplify.simplify), "exact",
         "while index maps are still whole-tensor ops that compose"),
    Pass("loop", "to_loop", lambda m, _: to_loop.to_loop(*m.programs), "exact",
         "one kernel an op, so that fusion alone decides what a kernel is"),
    Pass("loop", "fuse", lambda m, c: fuse.fuse(m, c.price), "exact",
         "on the smallest kernels, whose prices are simple"),
    Pass("loop", "inline_applies", lambda m, _: outline.inline_applies(m), "exact",
         "after fusion, the costliest pass; memory is planned over the whole program"),
    Pass("loop", "simplify", _kernels(
        lambda k, c: loop_simplify.simplify(k, c.precision)), "changes-values",
         "after fusion, when a rounding is known to lie inside a kernel"),
    Pass("loop", "merge_folds", _kernels(_merge), "reassociates",
         "after simplify, whose rules do not know carriers of several states"),
    Pass("loop", "views", lambda m, _: views.views(m), "exact",
         "after fusion, which swallows most copies"),
    Pass("loop", "reinplace", lambda m, _: reinplace.reinplace(m), "exact",
         "once it is settled which kernel writes what"),
    Pass("loop", "merge_axes", _kernels(lambda k, _: normalize.merge_axes(k)), "exact",
         "last of what changes nests: nothing will split an axis again"),
    Pass("loop", "canonical", lambda m, _: canonical.canonical(m), "exact",
         "names from structure, so that equal kernels are one from here on"),
    Pass("tile", "choose", _kernels(lambda k, c: _choice(k, c).kernel), "exact",
         "a mapping belongs to a structure, not to a call"),
    Pass("kernel", "to_kernel", _kernels(_lowered), "reassociates",
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


def lower_module(program: Func, machine: Target, precision: str = "default") -> Stages:
    """All rungs below `program` for one target. RungError where a rung cannot take it."""
    context = Context(machine, precision)
    module, modules = Module((program,)), dict[str, Module]()
    for step in PASSES:
        module = run_pass(step, module, context)
        modules[step.rung] = module
    started = perf_counter()
    source = machine.emit(module.kernels)
    trace.emit("ran", "source", "emit", seconds=perf_counter() - started)
    return Stages(modules, machine, source)


def run_pass(step: Pass, module: Module, context: Context) -> Module:
    """The module after one pass, verified at the border of a rung (always, if RUNG_CHECK)."""
    started = perf_counter()
    after = step.run(module, context)
    trace.emit("ran", step.rung, step.name, seconds=perf_counter() - started)
    if Settings.from_environment().check or step.name in BORDERS:
        verify_module(after, step.name)
    return after


BORDERS = {p.name for p, q in zip(PASSES, (*PASSES[1:], None), strict=True)
           if q is None or p.rung != q.rung}


def verify_module(module: Module, where: str = "") -> None:
    """Verify each function of a module by the rules of its kind."""
    for func in (*module.programs, *module.kernels):
        verify(func, VOCABULARIES[func.kind], RULES[func.kind], where)


def compile_program(func: Func, options: Any, constants: Sequence[Any],
                    example_inputs: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
    """The callable of a program: it takes the list of the inputs, which it empties, and gives the
    tensors that the program returns. RungError where some rung, or the target, cannot take it."""
    stages = lower_module(func, target(options.target), options.precision)
    return executable(stages, constants)


def executable(stages: Stages, constants: Sequence[Any] = ()) -> Executable:
    """What runs the lowest rung of `stages` on tensors of the host."""
    module = stages.modules["kernel"]
    launches = stages.target.load(module.kernels, stages.source) if module.kernels else {}
    return Executable(memory.plan(module.main), module, launches, constants)
