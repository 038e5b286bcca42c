"""The storage of every value: live ranges, and one workspace with reuse.

In: a program of kernel calls. Out: a Plan, which prints as the host's list of steps.

    storage t    temp    4096 B  at 0      live 0..1   t
    step 0: launch mm_relu(x, w) -> t
    workspace 4096 B, at least 4096 B

Results get storages of their own; views and updates in place alias their operand. Temporaries of
known size get offsets in the workspace, by the best of three greedy orders (within 5% of the lower
bound in published comparisons); those of symbolic size get buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod

from rung.core.expr import Expr
from rung.core.op import Effect, Func, Op, Value, reads
from rung.core.types import TensorType
from rung.program.ir import Apply, Call, Check, Composite, KernelCall, Return, Write
from rung.program.storage import RESHAPE, UPDATE, Aliases, is_reshape

ALIGN = 64


@dataclass(frozen=True)
class Storage:
    """Memory of an alias class, `values`, with live range `first` to `last`, in steps."""

    name: str
    role: str  # input | param | const | mutated | output | temp | call (the callee allocates)
    bytes: Expr
    values: tuple[Value, ...]
    first: int
    last: int
    offset: int | None = None

    def __str__(self) -> str:
        place = "" if self.offset is None else f"at {self.offset}"
        names = ", ".join(v.name for v in self.values)
        return (f"storage {self.name:<8} {self.role:<8} {self.bytes} B {place:<9} "
                f"live {self.first}..{self.last}  {names}")


@dataclass(frozen=True)
class Step:
    """What the host does at one point of the program."""

    kind: str  # launch | view | call | apply | check | write | return
    op: Op

    def __str__(self) -> str:
        given = self.op.args if isinstance(self.op, KernelCall) else self.op.operands()
        names = ", ".join(v.name for v in given)
        what = {KernelCall: "callee", Apply: "callee", Call: "target", Composite: "target"}
        title = getattr(self.op, what[type(self.op)]) if type(self.op) in what else ""
        results = ", ".join(v.name for v in self.op.results)
        return f"{self.kind} {title}({names})" + (f" -> {results}" if results else "")


@dataclass(frozen=True)
class Plan:
    """The host's plan; `peak`, the most bytes live at once, bounds the workspace from below.

    `tensors` are the values that some step needs as a tensor, not by address.
    """

    storages: tuple[Storage, ...]
    steps: tuple[Step, ...]
    workspace: int
    peak: int
    home: dict[Value, Storage] = field(repr=False)
    tensors: frozenset[Value] = field(repr=False)

    @property
    def launches(self) -> int:
        return sum(s.kind == "launch" for s in self.steps)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.storages),
                          *(f"step {n}: {s}" for n, s in enumerate(self.steps)),
                          f"workspace {self.workspace} B, at least {self.peak} B"])


def plan(program: Func, native: Callable[[Op], bool] = lambda op: isinstance(op, KernelCall)
         ) -> Plan:
    """Storages, offsets and steps of one program; pure. Values used by `native` ops and views only
    are in the workspace; other ops need tensors, which live as long as their views."""
    ops = [op for op in program.body.ops if op.results or op.effect is not Effect.PURE]
    storages = _storages(program, ops)
    tensors = frozenset(v for op in ops if not (native(op) or is_reshape(op))
                        for v in (*op.results, *reads(op)))
    fixed = [s for s in storages if s.role == "temp" and s.bytes.const_value is not None
             and tensors.isdisjoint(s.values)]
    offsets, workspace = place(fixed)
    placed = [replace(s, offset=offsets.get(s.name)) for s in storages]
    steps = tuple(Step(_kind(op), op) for op in ops)
    return Plan(tuple(placed), steps, workspace, _peak(fixed, len(ops)),
                {v: s for s in placed for v in s.values}, tensors)


def _peak(storages: Sequence[Storage], steps: int) -> int:
    """The most bytes that are live at one step."""
    change = [0] * (steps + 1)
    for s in storages:
        change[s.first] += _size(s)
        change[s.last + 1] -= _size(s)
    return max(accumulate(change))


def _kind(op: Op) -> str:
    match op:
        case KernelCall():
            return "launch"
        case Call() | Composite():
            return "call"
        case Apply() | Check() | Write() | Return():
            return op.keyword
        case _:
            return "view" if is_reshape(op) else "host"


def _classes(program: Func, ops: Sequence[Op]) -> dict[Value, list[Value]]:
    """First value of each storage to all values in it."""
    shared = Aliases(ops, (RESHAPE, UPDATE))
    classes: dict[Value, list[Value]] = {}
    for value in (*program.params, *(r for op in ops for r in op.results)):
        if isinstance(value.type, TensorType):
            classes.setdefault(shared.root(value), []).append(value)
    return classes


def _storages(program: Func, ops: Sequence[Op]) -> list[Storage]:
    """The storage of each alias class, without offsets."""
    touched: dict[Value, list[int]] = {}
    for n, op in enumerate(ops):
        for v in {*op.results, *reads(op)}:
            touched.setdefault(v, []).append(n)
    returned = {v for op in ops if isinstance(op, Return) for v in op.operands()}
    called = {v for op in ops if isinstance(op, Call | Composite | Apply) for v in op.results}
    params = set(program.params)

    def storage(root: Value, values: list[Value]) -> Storage:
        uses = [n for v in values for n in touched.get(v, ())]
        role = root.role or ("input" if root in params else
                             "output" if not returned.isdisjoint(values) else
                             "call" if root in called else "temp")
        first = 0 if root in params else min(uses)
        return Storage(root.name, role, _bytes(root), tuple(values), first, max(uses, default=0))

    return [storage(root, values) for root, values in _classes(program, ops).items()]


def _bytes(value: Value) -> Expr:
    assert isinstance(value.type, TensorType)
    return prod(value.type.shape, start=Expr.of(value.type.dtype.bytes))


def _size(s: Storage) -> int:
    return -(-(s.bytes.const_value or 0) // ALIGN) * ALIGN


_ORDERS: tuple[Callable[[Storage], tuple[int, ...]], ...] = (
    lambda s: (-_size(s), s.first),
    lambda s: (s.first - s.last, -_size(s)),
    lambda s: (s.first, -_size(s)),
)


def place(storages: Sequence[Storage]) -> tuple[dict[str, int], int]:
    """Offsets by name, without overlap of live ranges, and the workspace's size: the best of three
    orders, each storage at the lowest free offset."""
    plans = [_greedy(sorted(storages, key=order)) for order in _ORDERS]
    return min(plans, key=lambda p: p[1])


def _greedy(storages: Sequence[Storage]) -> tuple[dict[str, int], int]:
    done: list[tuple[int, Storage]] = []  # by offset
    top = 0
    for s in storages:
        at = 0
        for start, other in done:
            if other.first <= s.last and s.first <= other.last:
                if start - at >= _size(s):
                    break
                at = max(at, start + _size(other))
        done.append((at, s))
        done.sort(key=lambda x: x[0])
        top = max(top, at + _size(s))
    return {s.name: at for at, s in done}, top
