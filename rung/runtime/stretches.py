"""Stretches of a plan: which steps run in one native call, and what that call is given.

    step 0: launch add(x) -> t        stretch_0(x, y, at): add, mul
    step 1: launch mul(t, y) -> u     call aten.sort(u)
    step 2: call aten.sort(u)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from rung.core.expr import is_size
from rung.core.op import Op, Value
from rung.core.types import TensorType, dtype_of
from rung.program.ir import CHECKED, Check, KernelCall, Module
from rung.program.memory import Plan, Step, Storage
from rung.targets.base import is_library, strides_of, symbols_of
from rung.targets.device import Checked, Launched, Place, Stretch

LARGE = 1 << 20
"""Bytes of a tensor whose death ends a stretch: within one, results are allocated at its start and
arguments are released at its end."""


@dataclass
class Part:
    """Steps that run together, `first` the number of the first. A stretch, or one step."""

    first: int
    steps: list[Step] = field(default_factory=list)

    @property
    def last(self) -> int:
        return self.first + len(self.steps) - 1


def parts(plan: Plan, native: Callable[[Op], bool]) -> Iterator[Part]:
    """The steps of a plan in order, cut into stretches of those that are `native` (and of views,
    which are nothing there) and single steps."""
    ends = {s.last for s in plan.storages if s.offset is None and is_large(s)}
    part = Part(0)
    for number, step in enumerate(plan.steps):
        joins = step.kind == "view" or native(step.op)
        if part.steps and not joins:
            yield part
            part = Part(number)
        part.steps.append(step)
        if not joins or number in ends:
            yield part
            part = Part(number + 1)


def is_large(s: Storage) -> bool:
    """Whether it matters when a storage dies; one of unknown size is taken to be large."""
    count = s.bytes.const_value
    return s.role not in ("param", "const", "mutated") and (count is None or count >= LARGE)


def native(module: Module) -> Callable[[Op], bool]:
    """Whether an op runs in a stretch, on addresses: generated kernels, checks of integers."""
    generated = {k.name for k in module.kernels if not is_library(k)}

    def runs(op: Op) -> bool:
        if isinstance(op, Check):
            return dtype_of(op.value.type) in CHECKED
        return isinstance(op, KernelCall) and op.callee in generated
    return runs


@dataclass(frozen=True)
class Built:
    """A stretch with the tensors that it is `given` and `made`, and its checks. `workspace`: it
    also takes the address of the workspace."""

    stretch: Stretch
    given: list[Value]
    made: list[Value]
    checks: list[Check]
    workspace: bool


class Builder:
    """Makes the stretch of a part; `type_of` tells as what a tensor is allocated."""

    def __init__(self, plan: Plan, module: Module, type_of: Callable[[Value], TensorType]):
        self.plan, self.type_of = plan, type_of
        self.place_in_params = {p: n for n, p in enumerate(module.main.params)}
        self.symbols = {k.name: symbols_of(k) for k in module.kernels}

    def build(self, name: str, part: Part) -> Built:
        ops = [s.op for s in part.steps]
        made = [v for op in ops if isinstance(op, KernelCall) for v in op.results[len(op.updates):]
                if self.plan.home[v].offset is None]
        roots = dict.fromkeys(self.root(v) for op in ops for v in buffers(op))
        given = sorted((r for r in roots if r and r not in made), key=self._order)
        numbers = {v: n for n, v in enumerate((*given, *made))}
        checks = [op for op in ops if isinstance(op, Check)]
        steps = tuple(self._step(op, numbers) for op in ops
                      if isinstance(op, KernelCall | Check))
        before, after = (tuple(map(self.type_of, values)) for values in (given, made))
        stretch = Stretch(name, before, after, self._sizes(before + after, steps), steps)
        return Built(stretch, given, made, checks, None in roots)

    def root(self, value: Value) -> Value | None:
        """The tensor in whose memory a value lies; None for the workspace."""
        home = self.plan.home[value]
        return home.values[0] if home.offset is None else None

    def _order(self, value: Value) -> int:
        return self.place_in_params.get(value, len(self.place_in_params))

    def _step(self, op: KernelCall | Check, numbers: dict[Value, int]) -> Launched | Checked:
        places = tuple(self._place(v, numbers) for v in buffers(op))
        if isinstance(op, KernelCall):
            return Launched(op.callee, places, self.symbols[op.callee])
        assert isinstance(op.value.type, TensorType)
        return Checked(places[0], op.value.type, op.lo, op.hi)

    def _place(self, value: Value, numbers: dict[Value, int]) -> Place:
        root = self.root(value)
        return (numbers[root], 0) if root else (len(numbers), self.plan.home[value].offset or 0)

    def _sizes(self, types: Sequence[TensorType], steps: Sequence[Launched | Checked]
               ) -> tuple[str, ...]:
        """The size symbols that the stretch reads, in the order of the program's parameters."""
        checked = [s for s in steps if isinstance(s, Checked)]
        exprs = [e for t in (*types, *(s.type for s in checked))
                 for e in (*t.shape, *strides_of(t))]
        exprs += [e for s in checked for e in (s.low, s.high)]
        found = {s for e in exprs for s in e.symbols() if is_size(s)}
        found |= {s for step in steps if isinstance(step, Launched) for s in step.sizes}
        order = {p.name: n for p, n in self.place_in_params.items()}
        return tuple(sorted(found, key=lambda s: (order.get(s, len(order)), s)))


def buffers(op: Op) -> tuple[Value, ...]:
    """The tensors whose addresses a kernel or check takes, in its order."""
    if isinstance(op, KernelCall):
        values = (*op.args, *op.results[len(op.updates):])
        return tuple(v for v in values if isinstance(v.type, TensorType))
    return (op.value,) if isinstance(op, Check) else ()


