"""What a kernel costs on a machine, in closed form from its Loop IR: no schedule, no search.

In: a kernel and a machine. Out: a Bound: bytes, operations and seconds, as
`max(bytes / rate, operations / rate) + launch`. Each buffer counts once, at most as a whole; one
that fits into the cache counts at the cache's rate. Operations are points of the op's loop nest
times its cost; an operand of a contraction is recomputed for each tile of the axes it lacks, and a
kernel with too few independent points leaves cores idle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from weakref import WeakKeyDictionary

from rung.core.expr import Expr
from rung.core.machine import Machine
from rung.core.op import Func, Op, Value
from rung.core.ops import Cast, FoldBase, LoadBase, Map, StoreBase
from rung.core.scalar import SCALARS
from rung.core.types import DTYPES, TensorType, axes_of, dtype_of

HINT = 512  # the size that a symbol stands for when nothing better is known
TILE = 1024  # columns (or rows) that one pass over a contraction's operand serves


@dataclass(frozen=True)
class Bound:
    """`reason` names what limits; `recompute` is the largest factor by which an op is repeated."""

    memory: float
    cache: float
    flops: float
    ops: float
    recompute: float
    parallel: float
    seconds: float
    reason: str

    def __str__(self) -> str:
        return (f"{self.seconds * 1e6:.2f} us ({self.reason}): {self.memory:.3g} B memory, "
                f"{self.cache:.3g} B cache, {self.flops:.3g} flop, {self.ops:.3g} op, "
                f"recompute {self.recompute:.3g}, parallel {self.parallel:.3g}")


_memo: WeakKeyDictionary[Func, dict[tuple[int, HintKey], tuple[Machine, Bound]]] = (
    WeakKeyDictionary())
HintKey = tuple[tuple[str, int], ...]


def known(size: Expr, hints: Mapping[str, int]) -> int:
    """A size as a number: its symbols are `hints`, or 512."""
    if size.const_value is not None:
        return size.const_value
    return int(size.evaluate({s: hints.get(s, HINT) for s in size.symbols()}))


def bound(kernel: Func, machine: Machine, hints: Mapping[str, int] | None = None) -> Bound:
    """The least time that `kernel` can take; symbolic sizes are `hints` or 512."""
    key = id(machine), tuple(sorted((hints or {}).items()))  # which is kept, so that it stays its
    table = _memo.setdefault(kernel, {})
    if key not in table:
        table[key] = machine, _Count(kernel, machine, hints or {}).bound()
    return table[key][1]


class _Count:
    """The sums over one kernel's ops."""

    def __init__(self, kernel: Func, machine: Machine, hints: Mapping[str, int]):
        self.kernel, self.machine, self.hints = kernel, machine, hints
        axes = kernel.attr("axes")
        self.extents = {a: known(e, hints) for a, e in axes.extents}
        self.ops = kernel.body.ops
        self.made = {r: op for op in self.ops for r in op.results}
        self.folds = [op for op in self.ops if isinstance(op, FoldBase)]
        self.products = [op for op in self.folds if op.product]
        self.serial = _serial(self.ops)
        self.stores = [op for op in self.ops if isinstance(op, StoreBase)]
        self.repeats = self._repeats()

    def points(self, axes: Iterable[str]) -> int:
        return prod(self.extents[a] for a in axes)

    def bound(self) -> Bound:
        memory, cache = self._bytes()
        flops, seconds = self._contractions()
        work = {id(op): self._work(op) for op in self.ops}
        ops = sum(work.values())
        rates, cores = self.machine.rates, self.machine.cores
        parallel = self._parallel()
        idle = cores / min(cores, max(parallel, 1))
        alone = seconds + 2 * ops / rates.flops["f32"]  # rates are a core's
        compute = alone * idle / cores / (rates.issue.scale if idle < cores else 1.0)
        moved = memory / rates.memory + cache / rates.cache
        shared = self.machine.spaces[-1].together(cores) if self.machine.spaces else cores
        traffic = moved * min(idle, shared) / shared
        top = max(compute, traffic) + (rates.fork if cores > 1 else 0.0)
        if cores > 1 and max(alone, moved) < top:
            compute, traffic, top = alone, moved, max(alone, moved)
        reason = "launch" if top < rates.launch else "compute" if compute > traffic else "memory"
        repeats = max((self.repeats.get(n, 1) for n, w in work.items() if w), default=1)
        return Bound(memory, cache, flops, ops, repeats, parallel, top + rates.launch, reason)

    def _work(self, op: Op) -> float:
        """Operations on vector units, in units of one per element."""
        match op:
            case Map():
                cost = SCALARS[op.fn].cost
            case Cast():
                cost = 1.0
            case FoldBase(product=""):
                cost = 1.0 if len(op.results) == 1 else 30.0
            case _:
                return 0.0
        if self.serial.intersection(op.nest):
            cost *= self.machine.lanes
        return cost * self.points(op.nest) * self.repeats.get(id(op), 1)

    def _contractions(self) -> tuple[float, float]:
        flops = seconds = 0.0
        rates = self.machine.rates.flops
        units = [rates[x.rate] for x in self.machine.atoms if x.rate not in DTYPES]
        for op in self.products:
            n = 2.0 * self.points(op.nest) * self.repeats.get(id(op), 1)
            narrow = {self._stored_as(v) for v in op.operands()}
            rate = rates.get(narrow.pop(), 0) if len(narrow) == 1 else 0
            flops, seconds = flops + n, seconds + n / max(rate or rates["f32"], *units, 0)
        return flops, seconds

    def _stored_as(self, value: Value) -> str:
        """An operand's type in memory, before casts of a load."""
        while isinstance(op := self.made.get(value), Cast):
            value = op.x
        return dtype_of(value.type).name

    def _bytes(self) -> tuple[float, float]:
        """(memory, cache): every buffer's touched elements, loads and stores apart."""
        touched: dict[tuple[Value, bool], float] = {}
        for op in self.ops:
            if isinstance(op, LoadBase | StoreBase):
                key = op.buf, isinstance(op, StoreBase)
                axes = set(op.nest) if key[1] else set(axes_of(op.results[0].type))
                touched[key] = touched.get(key, 0) + self.points(axes)
        limit = sorted(s.bytes for s in self.machine.spaces)[-2:][0] if self.machine.spaces else 0
        memory = cache = 0.0
        for (buf, _), count in touched.items():
            assert isinstance(buf.type, TensorType)
            size = prod(known(n, self.hints) for n in buf.type.shape)
            n = min(count, size) * buf.type.dtype.bytes
            if size * buf.type.dtype.bytes * 2 > limit:
                memory += n
            else:
                cache += n
        return memory, cache

    def _repeats(self) -> dict[int, float]:
        """How often each op's nest is run again: tiles of the contraction axes that it lacks."""
        found: dict[int, float] = {}
        for op in self.products:
            free = axes_of(op.results[0].type)
            if all(self.extents[a] <= TILE for a in free):
                continue
            for inner in behind(op, self.made):
                lacks = [a for a in free if a not in inner.nest]
                again = prod(ceil(self.extents[a] / TILE) for a in lacks)
                found[id(inner)] = max(found.get(id(inner), 1), again)
        for fold in self._out_of_order():
            rest = set().union(*(x.nest for x in self.ops)) - set(fold.nest)
            found[id(fold)] = max(found.get(id(fold), 1), self.points(rest))
        return found

    def _out_of_order(self) -> list[Op]:
        """Folds for which no order of loops has all of the others' free axes around or inside."""
        chain: set[str] | None = None
        bad: list[Op] = []
        stores = set().union(*(op.nest for op in self.stores))
        folds = [op for op in self.folds if not op.product]
        for op in sorted(folds, key=lambda op: len(axes_of(op.results[0].type))):
            free = set(axes_of(op.results[0].type))
            if free >= stores:
                continue
            if chain is not None and not chain <= free:
                bad.append(op)
            chain = free if chain is None else chain | free
        return bad

    def _parallel(self) -> float:
        """Independent points: axes of a store that no fold runs over, and parts of long folds.
        Where all threads of a launch start together, only folds count that the store waits for:
        others are split."""
        folded = {op.axis for op in self.folds}
        most = 1.0
        for op in self.stores:
            waits = {x.axis for x in behind(op, self.made) if isinstance(x, FoldBase)}
            axes = waits if self.machine.threaded else folded
            most = max(most, self.points(a for a in op.nest if a not in axes))
        if not any(folded.intersection(op.nest) for op in self.stores):
            most *= max(1.0, self.points(folded) / 4096)
        return most


def _serial(ops: Sequence[Op]) -> set[str]:
    """Axes of scans that are contiguous in memory: ops over them are sequential."""
    scans = {op.axis for op in ops if isinstance(op, FoldBase) and op.prefix}
    inner = {str(op.subs[-1]) for op in ops if isinstance(op, LoadBase | StoreBase) and op.subs}
    return scans & inner


def behind(op: Op, made: Mapping[Value, Op], until: Collection[Op] = ()) -> list[Op]:
    """The ops that `op` depends on, each once, up to those of `until`."""
    found: dict[int, Op] = {}
    stack = list(op.operands())
    while stack:
        inner = made.get(stack.pop())
        if inner is not None and id(inner) not in found and inner not in until:
            found[id(inner)] = inner
            stack += inner.operands()
    return list(found.values())
