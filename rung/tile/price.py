"""The cost of a kernel under a mapping: closed form, from the machine table alone.

    time = max(vector operations, bytes to each cache level / its rate) / cores + start

A statement outside of every parallel loop has one core.

Operations are counted at the leaves: a value over the unrolled axes r, q costs r*q vectors in each
step of its statement's nest, so register blocking, broadcast loads and short dependency chains
show. What moves between memories is counted by `traffic`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from math import ceil, inf, prod

from rung.core.cost import known
from rung.core.expr import Expr
from rung.core.machine import GRID, SEQ, THREAD, UNROLL, VECTOR, Machine
from rung.core.op import Func, Op, Value
from rung.core.ops import Cast, Map
from rung.core.scalar import SCALARS
from rung.core.types import axes_of, dtype_of
from rung.loop import ir as loop
from rung.tile import mapping as tile
from rung.tile.match import Match, group_of
from rung.tile.nest import Split
from rung.tile.stmt import Stmt
from rung.tile.traffic import PAGE, Traffic
from rung.tile.tree import Tree

TURN = 16.0  # the same, for a vector that is transposed in registers on its way to a panel
LOOP = 2.0  # what one more step of a loop costs, in vector operations
EXPOSED = 0.3  # of the shorter of operations and memory takes time beside the longer
EXPOSED_THREADS = 0.1  # of the operations do, where other threads go on while some wait
STATES = 30.0  # operations of a step of a fold of several states
STEP = 18.0  # the same for each element, where one step takes a block of them
SCATTER = 2.0  # times what a scattered load takes, a scattered store does: it reads lines too


@dataclass(frozen=True)
class Price:
    """Seconds, what they are made of, and how many cores the launch keeps busy."""

    seconds: float
    compute: float
    traffic: tuple[tuple[str, float], ...]
    cores: float = inf

    @property
    def streams(self) -> bool:
        """Whether memory takes longer than arithmetic."""
        return self.compute <= max((seconds for _, seconds in self.traffic), default=0.0)

    def __str__(self) -> str:
        parts = [f"compute {self.compute * 1e6:.1f} us"]
        parts += [f"{name} {seconds * 1e6:.1f} us" for name, seconds in self.traffic]
        return f"{self.seconds * 1e6:.1f} us ({', '.join(parts)})"


def price(kernel: Func, mapping: tile.Mapping, machine: Machine,
          hints: Mapping[str, int] | None = None) -> Price:
    """The price of one launch, with all of the machine's cores if the mapping shares the work."""
    return _Pricing(kernel, mapping, machine, _known(kernel, hints or {})).total()


def _known(kernel: Func, hints: Mapping[str, int]) -> dict[str, int]:
    """The extents of a kernel's axes as numbers."""
    return {a: max(1, known(e, hints)) for a, e in loop.extents_of(kernel).items()}


def rising(kernel: Func, mappings: Iterable[tile.Mapping], machine: Machine,
           hints: Mapping[str, int]) -> Iterator[tuple[Price, tile.Mapping]]:
    """Mappings with their prices, the cheapest first: what one moves is counted only when it could
    be the next by what it computes."""
    sizes = _known(kernel, hints)
    made = [(_Pricing(kernel, m, machine, sizes), m) for m in mappings]
    queue: list[tuple[float, bool, int, Price | None]] = [
        (one.least(), False, n, None) for n, (one, _) in enumerate(made)]
    heapify(queue)
    while queue:
        _, _, n, cost = heappop(queue)
        if cost is None:
            cost = made[n][0].total()
            heappush(queue, (cost.seconds, True, n, cost))
        else:
            yield cost, made[n][1]


class _Pricing:
    def __init__(self, kernel: Func, mapping: tile.Mapping, machine: Machine,
                 sizes: dict[str, int]):
        self.sizes = sizes
        self.tree = Tree(kernel, mapping, machine, {a: Expr.of(n) for a, n in self.sizes.items()})
        self.nest = nest = self.tree.nest
        self.lanes = {a: nest.count(a, VECTOR) for a in self.sizes}
        self.units = {a: min(nest.count(a, UNROLL), ceil(n / self.lanes[a]))
                      for a, n in self.sizes.items()}
        self.threads = [s for s in nest.all() if s.kind == THREAD]
        self.trips = [self._steps(s) for s in nest.loops]
        self.around = {s: self._around(s) for s in self.tree.stmts}
        self.leaves: dict[Op, float] = {}
        self.kept: set[tuple[object, ...]] = set()  # values, with the loops in which they are

    @cached_property
    def grid(self) -> list[Split]:
        return [s for s in self.nest.all() if s.kind == GRID]

    @cached_property
    def work(self) -> tuple[float, float, float]:
        """The cores that share the work, seconds of arithmetic, and how many cores it keeps
        busy."""
        cores, spill = self._cores(), self._spill()
        costs = [(self._statement(s), self._shared(s)) for s in self.tree.stmts]
        alone = sum(cost for cost, _ in costs) * spill
        spread = sum(cost / (cores if shared else 1) for cost, shared in costs) * spill
        slot = self._slot() / (self.nest.machine.rates.issue.scale if cores > 1 else 1.0)
        return cores, spread * slot / self._busy(), alone / spread

    def least(self) -> float:
        """Seconds, if nothing were moved."""
        return self._seconds(0.0, 0.0)

    def total(self) -> Price:
        cores, compute, busy = self.work
        fed = self._fed()
        moved = Traffic(self.tree, self.sizes, (self.units, self.lanes), self.around, self._shared)
        flows = [(name, hidden / fed, awaited) for name, hidden, awaited in moved.seconds(cores)]
        traffic = tuple((name, hidden + awaited) for name, hidden, awaited in flows)
        seconds = self._seconds(max(hidden for _, hidden, _ in flows),
                                sum(awaited for *_, awaited in flows))
        return Price(seconds, compute, traffic, busy)

    def _seconds(self, hidden: float, awaited: float) -> float:
        cores, compute, _ = self.work
        exposed = EXPOSED_THREADS * compute if self.threads else EXPOSED * min(compute, hidden)
        rates = self.nest.machine.rates
        return (max(compute, hidden) + exposed + awaited
                + (rates.launch + (rates.fork if cores > 1 else 0.0)))

    def _slot(self) -> float:
        """Seconds of one vector operation at full throughput."""
        machine = self.nest.machine
        return 2 * machine.lanes / machine.rates.flops["f32"]

    def _cores(self) -> float:
        most = prod(min(self._steps(s), ceil(self.sizes[s.axis] / s.step)) for s in self.grid)
        cores = self.nest.machine.cores
        return most / ceil(most / cores) if most > 1 else 1

    def _busy(self) -> float:
        """How much of a core its threads keep busy: all of it from 256 on, which hide latency,
        whether they are of one block or of several that share the core."""
        if not self.threads:
            return 1.0
        blocks = prod(map(self._steps, self.grid))
        threads = prod(map(self._steps, self.threads))
        return min(1.0, threads * ceil(blocks / self.nest.machine.cores) / 256)

    def _fed(self) -> float:
        """How much of memory's rate the threads of a core ask for in a loop, all loads of one step
        being under way at once. What a mover brings is asked for earlier."""
        loads = [x for x in self.tree.accesses if isinstance(x, loop.Load)]
        ahead = any(self.tree.mapping.placed(x.buf.name) for x in loads)
        wanted = self.nest.machine.rates.flow.flight
        if not (wanted and loads) or ahead or max(self.trips, default=1) == 1:
            return 1.0
        blocks = prod(map(self._steps, self.grid)) / self.nest.machine.cores
        threads = prod(map(self._steps, self.threads)) * max(1.0, blocks)
        asked = sum(self._vectors(x.nest) * dtype_of(x.buf.type).bytes for x in loads)
        return min(1.0, threads * asked / wanted)

    def _steps(self, split: Split) -> int:
        return self.nest.steps(split) or 1

    # ---- operations
    def _shared(self, s: Stmt) -> bool:
        """Whether some parallel loop is around a statement."""
        return bool(s.within) or any(g.axis in s.axes for g in self.grid)

    def _spill(self) -> float:
        """How much slower the work is when accumulators and operands exceed the registers."""
        used: dict[frozenset[str], float] = {}
        for s in self.tree.stmts:
            if s.carries and not _unit(self.tree, s):
                states, state = len(s.op.results), s.op.results[0]
                one = _grouped(self.tree, s) or (self.threads and _at_once(self.tree, s.op))
                copies = axes_of(state.type) if one else s.op.nest
                used[s.axes] = used.get(s.axes, 0) + states * self._vectors(
                    copies) * self._width(state)
        registers = self.nest.machine.registers
        return 1 + 4 * max(0.0, max(used.values(), default=0) + 3 - registers) / registers

    def _statement(self, s: Stmt) -> float:
        """Vector operations of one statement over its whole nest."""
        around = self.around[s]
        steps = prod(self.trips[n] for n in around)
        steps *= prod(map(self._steps, self.nest.launch))  # each thread does all of it
        atom = _grouped(self.tree, s)
        does = {*s.fold.args, *filter(self._whole, atom.args)} if atom else set(_unit(self.tree, s))
        here = [x for x in s.behind if x.result not in does]
        if self.threads:  # statements of the same loops are one leaf, which keeps its values
            here = [x for x in here if (x, *around) not in self.kept]
            self.kept.update((x, *around) for x in here)
        inside = sum(map(self._leaf, here))
        if atom:
            whole = sum(self._vectors(axes_of(v.type)) for v in atom.args if self._whole(v))
            inside += 1.4 * self.nest.machine.rates.issue.load * whole / group_of(atom.atom)
        return steps * (max(inside + self._own(s.op), self._chain(s)) + LOOP)

    def _whole(self, value: Value) -> bool:
        """Whether what an atom takes at once lies side by side in memory."""
        op, place = self.tree.made[value], self.tree.mapping.placed(value.name)
        if place or not isinstance(op, loop.Load):
            return bool(place and place.panel)
        return all(self.lanes[a] == 1 for a in op.nest) and any(
            loop.stride(op, a) == 1 and self.units[a] > 1 for a in op.nest)

    def _around(self, s: Stmt) -> list[int]:
        """The positions of the loops in each step of which a statement runs as a whole: around a
        carried fold the readers of its state wait for the last one."""
        return [n for n, split in enumerate(self.nest.loops)
                if split.axis in s.axes or split in s.within]

    def _vectors(self, axes: tuple[str, ...]) -> int:
        return prod(self.units[a] for a in axes)

    def _leaf(self, op: Op) -> float:
        if op not in self.leaves:
            self.leaves[op] = self._values(op)
        return self.leaves[op]

    def _values(self, op: Op) -> float:
        """Vector operations of a map or load at a leaf."""
        count = self._vectors(op.nest)
        match op:
            case loop.Load():
                return count * self._access(op)
            case Map():
                return count * max(1.0, SCALARS[op.fn].cost) * self._width(op.result)
            case Cast():
                return count * (1.0 if self.threads else 2.0) * self._width(op.result)
            case _:
                return 0.0

    def _width(self, value: Value) -> float:
        """Machine vectors that one family member of this type takes."""
        lanes = prod(self.lanes[a] for a in axes_of(value.type))
        return max(1.0, dtype_of(value.type).bytes * lanes / (4 * self.nest.machine.lanes))

    def _access(self, op: loop.Load | loop.Store) -> float:
        """Cost of one load or store: scattered lanes go one by one."""
        wide = [a for a in op.nest if self.lanes[a] > 1]
        if self.threads and self.threads[-1].axis in op.nest:  # neighbours read together
            along, size = self.threads[-1].axis, dtype_of(op.buf.type).bytes
            copies = min(self.units[along], max(1, self.nest.machine.rates.flow.access // size))
            return 0.7 / copies if loop.stride(op, along) == 1 else 8.0
        near = self.nest.machine.rates.issue.load
        if not wide:
            return near
        steps = max(loop.stride(op, a) for a in wide)
        if steps == 1:
            return 1.4 * near if isinstance(op, loop.Load) else 0.7
        place = self.tree.mapping.placed(op.result.name) if isinstance(op, loop.Load) else None
        if place and place.panel and any(
                loop.stride(op, a) == 1 and self.units[a] > 1 for a in op.nest if a not in wide):
            return TURN
        far = steps * dtype_of(op.buf.type).bytes >= PAGE  # the lanes' lines share a cache set
        each = 1.0 if isinstance(op, loop.Load) else SCATTER
        return each * self.lanes[wide[0]] * (8.0 if far else 1.5)

    def _own(self, op: Op) -> float:
        count = self._vectors(op.nest)
        if isinstance(op, loop.Store):
            return count * self._access(op) * (2 if op.combine else 1)
        if isinstance(op, loop.Fold) and op.product:
            return count / _speed(op, self.tree.mapping, self.nest.machine) + self._kept(op)
        if isinstance(op, loop.Fold):
            many = STEP if self.threads and op.rule.block else STATES
            return count * (1.0 if len(op.results) == 1 else many) + self._kept(op)
        return self._leaf(op) + count * 0.7  # a placed value, and its store

    def _kept(self, op: loop.Fold) -> float:
        """Cost of a state that waits in an array from step to step: where loops over free axes
        run inside of the one over the axis that is folded."""
        last = max((n for n, s in enumerate(self.nest.loops) if s.axis == op.axis), default=0)
        free = tuple(a for a in op.nest if a != op.axis)
        inside = any(s.axis in free for s in self.nest.loops[last + 1:])
        return 1.2 * len(op.results) * self._vectors(free) if inside and not self.threads else 0.0

    def _chain(self, s: Stmt) -> float:
        if not s.carries or self.threads:
            return 0.0
        latency = self.nest.machine.rates.issue.latency
        if atom := _grouped(self.tree, s):
            return latency * self.units[s.carries] / group_of(atom.atom)
        return latency * (1 if len(s.op.results) == 1 else 6)


def _speed(op: loop.Fold, mapping: tile.Mapping, machine: Machine) -> float:
    """How many vector operations the atom of a contraction replaces in the same time."""
    used = next((u.atom for u in mapping.uses if u.contraction == op.result.name), "")
    atom, flops = machine.atom(used), machine.rates.flops
    return flops[atom.rate] / flops["f32"] if atom else 1.0


def _at_once(tree: Tree, op: Op) -> bool:
    """Whether copies along a folded axis have one state: in no loop, or by a step for all."""
    return isinstance(op, loop.Fold) and (op.rule.block is not None or not any(
        n.axis == op.axis and n.kind == SEQ for n in tree.nest.loops))


def _unit(tree: Tree, s: Stmt) -> tuple[Value, ...]:
    """What a matrix unit reads for a statement, whose state it keeps; empty where it is none that
    computes it."""
    found = tree.atoms.get(s.name) if s.kind == "fold" else None
    return found.args if found and not group_of(found.atom) else ()


def _grouped(tree: Tree, s: Stmt) -> Match | None:
    """The vector instruction of a statement that takes several elements a lane."""
    found = tree.atoms.get(s.name) if s.kind == "fold" else None
    return found if found and group_of(found.atom) else None
