"""The passes between the rungs, as one flat list, and what runs one of them.

The order is the list `PASSES`: each pass with the reason for standing where it stands. A
`compilation.Compilation` runs them all and keeps their `History`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from time import perf_counter

from rung.core import trace
from rung.core.config import Settings
from rung.core.cost import bound
from rung.core.errors import LoweringError, RungError
from rung.core.key import magnitude, structural_key
from rung.core.machine import Machine
from rung.core.op import Effect, Func, Vocabulary, walk
from rung.core.verify import verify
from rung.kernel import alike, arithmetic
from rung.kernel import ir as kernel_ir
from rung.loop import (
    blocks,
    canonical,
    fuse,
    merge_folds,
    normalize,
    overlay,
    siblings,
    split,
    strength,
)
from rung.loop import ir as loop_ir
from rung.loop import simplify as loop_simplify
from rung.program import ir as program_ir
from rung.program import outline, reinplace, views
from rung.program.externs import Externs
from rung.program.ir import Composite, Module
from rung.targets.base import Target, is_library, sizes_of
from rung.tensor import accumulate, empty, to_loop
from rung.tensor import simplify as tensor_simplify
from rung.tile import choose, to_kernel
from rung.tile.choose import Choice
from rung.tile.mapping import Mapping as TileMapping
from rung.tile.match import Library
from rung.tile.price import Price

RUNGS = ("program", "tensor", "loop", "tile", "kernel")
VOCABULARIES: dict[str, Vocabulary] = {
    v.kind: v for v in (program_ir.VOCABULARY, loop_ir.VOCABULARY, kernel_ir.VOCABULARY)}
RULES: dict[str, Callable[[Func], None]] = {
    "program": program_ir.verify_program, "kernel": loop_ir.verify_kernel,
    "kernel-ir": kernel_ir.verify_kernel_ir}


PENALTY = 1.0  # seconds: more than any fusion gains


@dataclass(frozen=True)
class Context:
    """What passes may ask about: the machine, the user's options, what sizes to expect, and what
    was found for the kernels of this compilation before."""

    target: Target
    externs: Externs
    precision: str = "default"
    hints: Mapping[str, int] = field(default_factory=dict)
    mappings: Mapping[str, TileMapping] = field(default_factory=dict)
    careful: bool = False  # no more folds in a kernel than its parts have
    choices: dict[str, Choice] = field(default_factory=dict, compare=False)
    prices: dict[str, Price | None] = field(default_factory=dict, compare=False)
    seconds: dict[Func, float | None] = field(default_factory=dict, compare=False)
    lowered: dict[Func, Func] = field(default_factory=dict, compare=False)

    @property
    def machine(self) -> Machine:
        return self.target.machine

    @property
    def libraries(self) -> list[Library]:
        """The library calls that the target has and that take the front end's tensors."""
        return [x for x in self.target.libraries
                if x.atom.name.partition(".")[0] in self.externs.libraries]

    def bound(self, kernel: Func) -> float:
        """The least seconds that a kernel can take, before anything is known of its mapping."""
        return self._fine(kernel) + self.least(kernel)

    def least(self, kernel: Func) -> float:
        """The same whatever the user asked for."""
        return bound(kernel, self.machine, self.hints).seconds

    def settled(self, kernel: Func) -> float | None:
        """Seconds of a kernel as it will be mapped, or of the parts that it is split into; None
        where it has no mapping."""
        if kernel not in self.seconds:
            late = loop_simplify.simplify(kernel, self.precision)
            late = _overlay(normalize.merge_axes(_merge(late, self)), self)
            self.seconds[kernel] = self._parts(late)
            if self.seconds[kernel] is None and (found := self._cheapest(late)):
                self.seconds[kernel] = found.seconds
        seconds = self.seconds[kernel]
        return None if seconds is None else seconds + self._fine(kernel)

    def like(self, kernel: Func) -> str:
        """Equal for kernels of the same ops and magnitudes of sizes."""
        return magnitude(kernel, self.machine.lanes)

    def _cheapest(self, kernel: Func) -> Price | None:
        key = structural_key(kernel, *map(str, sizes_of(kernel)))
        if key not in self.prices:
            self.prices[key] = choose.cheapest(
                kernel, self.machine, self.target.candidates, self.hints, self.libraries)
        return self.prices[key]

    def _parts(self, kernel: Func) -> float | None:
        """Seconds of the launches that sums of many threads are split into; None where a kernel
        stays whole."""
        machine = self.machine
        if not machine.threaded or not all(op.plain for op in loop_ir.folds(kernel)):
            return None

        def price(kernel: Func) -> tuple[float, float]:
            found = self._cheapest(kernel)
            return (found.seconds, found.cores) if found else (inf, machine.cores)
        found = split.plan(kernel, price, machine.cores, machine.rates, least=self.least)
        return found.seconds if found else None

    def _fine(self, kernel: Func) -> float:
        return PENALTY * max(len(loop_ir.folds(kernel)) - 1, 0) if self.careful else 0.0


@dataclass(frozen=True)
class Pass:
    """One step. `kind` says what it may do to results: exact | reassociates | changes-values."""

    rung: str
    name: str
    run: Callable[[Module, Context], Module]
    kind: str
    why: str

    @property
    def full_name(self) -> str:
        return f"{self.rung}.{self.name}"


def _programs(change: Callable[[Func], Func]) -> Callable[[Module, Context], Module]:
    """A pass that changes each program."""
    return lambda module, _: Module(tuple(map(change, module.programs)), module.kernels)


def _kernels(change: Callable[[Func, Context], Func]) -> Callable[[Module, Context], Module]:
    """A pass that changes each kernel."""
    return lambda module, context: Module(
        module.programs, tuple(change(k, context) for k in module.kernels))


# --- policies that no rung can decide by itself

def _lower_calls(module: Module, context: Context) -> Module:
    """Calls lowered, as far as the precision lets them be."""
    return Module(tuple(context.externs.lower(p, context.precision) for p in module.programs),
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
    near = min((s.bytes for s in machine.spaces), default=0)
    if machine.teams and machine.teams.registers:  # half of a block's, of 4 bytes each
        near = min(near, 2 * machine.teams.registers)
    return any(op.product or 4 * (op.extent.const_value or near) > near
               for op in loop_ir.reductions(kernel))


def _merge(kernel: Func, context: Context) -> Func:
    return merge_folds.merge(kernel) if merges_folds(kernel, context.machine) else kernel


def _forms(context: Context) -> tuple[str, ...]:
    """The scalar functions that the machine prefers, where they may round otherwise than eager."""
    return context.machine.rates.forms if context.precision == "default" else ()


def _overlay(kernel: Func, context: Context) -> Func:
    """Fewer axes where all of a launch start together; elsewhere a store has loops of its own."""
    return overlay.overlay(kernel) if context.machine.threaded else kernel


def _choice(kernel: Func, context: Context) -> Choice:
    """The user's mapping of a kernel, or one that is chosen once for each structure."""
    machine, given = context.machine, context.mappings.get(kernel.name)
    if given and given.machine == machine.name:
        return choose.given(kernel, given, machine, context.hints)
    named = [str(e) for e in sizes_of(kernel)]  # a choice is of a kernel by its names
    key = structural_key(kernel, kernel.name, *named)
    if key not in context.choices:
        context.choices[key] = choose.choose(kernel, machine, context.target.candidates,
                                             context.hints, context.libraries)
    return context.choices[key]


def _mapped(kernel: Func, context: Context) -> Func:
    choice = _choice(kernel, context)
    if choice.lowered:
        context.lowered[choice.kernel] = choice.lowered
    return choice.kernel


def _to_kernel(kernel: Func, context: Context) -> Func:
    """Kernel IR, which a choice brings along. What goes to a library stays as it is."""
    if is_library(kernel):
        return kernel
    return context.lowered.get(kernel) or to_kernel.to_kernel(kernel, context.machine)


def _first_steps(kernel: Func, context: Context) -> Func:
    """Without steps from nothing, where many threads each take only a few of a fold."""
    few = context.machine.threaded and not is_library(kernel)
    return arithmetic.first_steps(kernel) if few else kernel


def _fill_loads(kernel: Func, context: Context) -> Func:
    """Loads that fill in what folds leave out, where masked steps do so."""
    masked = context.machine.threaded and not is_library(kernel)
    return arithmetic.fill_loads(kernel) if masked else kernel


def _multiply_add(kernel: Func, context: Context) -> Func:
    fused = "fma" in _forms(context) and not is_library(kernel)
    return arithmetic.fuse_products(kernel) if fused else kernel


def _alike(module: Module, context: Context) -> Module:
    """Kernels that are bound by memory and alike may be one function, where the target has that."""
    if not context.target.shares:
        return module
    streams = {c.kernel.name for c in context.choices.values() if c.price.streams}
    return Module(module.programs, alike.alike(module.kernels, lambda k: k.name in streams))


def _split(module: Module, context: Context) -> Module:
    """Kernels that the user mapped stay whole."""
    own = tuple(k for k in module.kernels if k.name in context.mappings)

    def price(kernel: Func) -> tuple[float, float]:
        cost = _choice(kernel, context).price
        return cost.seconds, cost.cores if kernel not in own else context.machine.cores
    machine = context.machine
    return split.split(module, price, machine.cores, machine.rates, not machine.threaded,
                       context.least)


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
    Pass("loop", "to_loop", lambda m, c: to_loop.to_loop(
        *m.programs, whole=c.machine.threaded), "reassociates",
         "one kernel an op, so that fusion alone decides what a kernel is"),
    Pass("loop", "fuse", lambda m, c: fuse.fuse(
        m, c.bound, c.settled, c.machine.threaded, c.like), "exact",
         "on the smallest kernels, whose prices are simple"),
    Pass("loop", "siblings", lambda m, c: siblings.join_siblings(
        m, c.bound, c.settled, c.like), "exact",
         "after fusion, which brings what several kernels read into each of them"),
    Pass("loop", "inline_applies", lambda m, _: outline.inline_applies(m), "exact",
         "after the costliest passes; memory is planned over the whole program"),
    Pass("loop", "simplify", _kernels(
        lambda k, c: loop_simplify.simplify(k, c.precision)), "changes-values",
         "after fusion, when a rounding is known to lie inside a kernel"),
    Pass("loop", "merge_folds", _kernels(_merge), "reassociates",
         "after simplify, whose rules do not know carriers of several states"),
    Pass("loop", "strength", _kernels(
        lambda k, c: strength.reduce_strength(k, _forms(c))), "changes-values",
         "after merge_folds, which knows a softmax by its division"),
    Pass("loop", "views", lambda m, _: views.views(m), "exact",
         "after fusion, which swallows most copies"),
    Pass("loop", "reinplace", lambda m, _: reinplace.reinplace(m), "exact",
         "once it is settled which kernel writes what"),
    Pass("loop", "merge_axes", _kernels(lambda k, _: normalize.merge_axes(k)), "reassociates",
         "once nothing but `split` changes nests"),
    Pass("loop", "overlay", _kernels(_overlay), "exact",
         "after merge_axes, which takes no masks"),
    Pass("loop", "canonical", lambda m, c: canonical.canonical(m, c.externs.title), "exact",
         "equal kernels are one from here on, under the name that stays"),
    Pass("loop", "split", _split, "reassociates",
         "under the kernels' final names, so that what stays whole is priced once"),
    Pass("loop", "in_blocks", _kernels(lambda k, _: blocks.in_blocks(k)), "reassociates",
         "after `split`, whose parts may be short enough"),
    Pass("tile", "choose", _kernels(_mapped), "exact",
         "a mapping belongs to a structure, not to a call"),
    Pass("kernel", "to_kernel", _kernels(_to_kernel), "reassociates",
         "the mapping says all that this needs"),
    Pass("kernel", "first_steps", _kernels(_first_steps), "reassociates",
         "once the steps of folds are ops"),
    Pass("kernel", "fill_loads", _kernels(_fill_loads), "exact",
         "before products are fused, after which steps look otherwise"),
    Pass("kernel", "multiply_add", _kernels(_multiply_add), "changes-values",
         "on the products and sums that are left"),
    Pass("kernel", "alike", _alike, "exact",
         "last: kernels are alike as they are emitted"),
)


def run_pass(step: Pass, module: Module, context: Context) -> Module:
    """The module after one pass, verified at the border of a rung; with RUNG_CHECK after every
    pass, and compared with the module before. RungError, also for what is a bug of the pass."""
    try:
        with timed(step.rung, step.name):
            after = step.run(module, context)
    except RungError:
        raise
    except Exception as error:  # which costs the user a graph, not the program
        raise LoweringError(f"a bug in {step.full_name}: {type(error).__name__}: {error}"
                            ) from error
    checking = Settings.from_environment().check
    if checking or step.name in BORDERS:
        verify_module(after, step.name)
    if checking and after != module:
        _compare(step, module, after, context)
    return after


BORDERS = {p.name for p, q in zip(PASSES, (*PASSES[1:], None), strict=True)
           if q is None or p.rung != q.rung}


@contextmanager
def timed(rung: str, name: str) -> Iterator[None]:
    """Tell how long a step took."""
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
               if step.rung == "kernel" and k.attr("axes"))
    effects = {op.effect for f in before.programs for op in walk(f.body)}
    if inputs is None or work > SLOW or Effect.RNG in effects:
        trace.emit("declined", "check", step.name, "too large, or random")
        return
    check.compare(before, after, inputs, step.kind == "exact", step.full_name)
