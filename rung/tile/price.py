"""The cost of a kernel under a mapping: closed form, from the machine table alone.

    time = max(vector operations, bytes to each cache level / its rate) / cores + start

A statement outside of every parallel loop has one core.

Operations are counted at the leaves: a value over the unrolled axes r, q costs r*q vectors in each
step of its statement's nest, so register blocking, broadcast loads and short dependency chains
show. A level's traffic is what the outermost loops that fit in it touch, each access as often as
the loops outside of them are around it: not those right outside in which it stays the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
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
from rung.tile.stmt import Access, Stmt
from rung.tile.tree import Tree

LATENCY = 8.0  # vector operations that could start while one result is awaited
TURN = 16.0  # the same, for a vector that is transposed in registers on its way to a panel
LOOP = 2.0  # what one more step of a loop costs, in vector operations
EXPOSED = 0.3  # of the operations take time beside that of memory
EXPOSED_THREADS = 0.1  # the same where other threads go on while some wait
STATES = 30.0  # operations of a step of a fold of several states
STEP = 18.0  # the same for each element, where one step takes a block of them
PAGE = 3072  # bytes; a walk of longer steps misses the TLB and the prefetcher each time


@dataclass(frozen=True)
class Price:
    """Seconds, what they are made of, and how many cores the launch keeps busy."""

    seconds: float
    compute: float
    traffic: tuple[tuple[str, float], ...]
    cores: float = inf

    def __str__(self) -> str:
        parts = [f"compute {self.compute * 1e6:.1f} us"]
        parts += [f"{name} {seconds * 1e6:.1f} us" for name, seconds in self.traffic]
        return f"{self.seconds * 1e6:.1f} us ({', '.join(parts)})"


def price(kernel: Func, mapping: tile.Mapping, machine: Machine,
          hints: Mapping[str, int] | None = None) -> Price:
    """The price of one launch, with all of the machine's cores if the mapping shares the work."""
    return _Pricing(kernel, mapping, machine, hints or {}).total()


class _Pricing:
    def __init__(self, kernel: Func, mapping: tile.Mapping, machine: Machine,
                 hints: Mapping[str, int]):
        self.sizes = {a: max(1, known(e, hints)) for a, e in loop.extents_of(kernel).items()}
        self.tree = Tree(kernel, mapping, machine, {a: Expr.of(n) for a, n in self.sizes.items()})
        self.nest = nest = self.tree.nest
        self.lanes = {a: nest.count(a, VECTOR) for a in self.sizes}
        self.units = {a: min(nest.count(a, UNROLL), ceil(n / self.lanes[a]))
                      for a, n in self.sizes.items()}
        self.threads = [s for s in nest.all() if s.kind == THREAD]
        self.grid = [s for s in nest.all() if s.kind == GRID]
        self.trips = [self._steps(s) for s in nest.loops]
        self.covered = [self.sizes]  # by depth: elements of each axis inside so many loops
        for one in nest.loops:
            inside = min(self.sizes[one.axis], one.step)
            self.covered.append({**self.covered[-1], one.axis: inside})
        self.leaves: dict[Op, float] = {}

    def total(self) -> Price:
        cores, spill = self._cores(), self._spill()
        kept: set[tuple[object, ...]] = set()  # values, with the loops in which they are
        costs = [(self._statement(s, kept), self._shared(s)) for s in self.tree.stmts]
        alone = sum(cost for cost, _ in costs) * spill
        spread = sum(cost / (cores if shared else 1) for cost, shared in costs) * spill
        compute = spread * _slot(self.nest.machine) / self._busy()
        fed = self._fed()
        flows = [(name, hidden / fed, awaited) for name, hidden, awaited in self._traffic(cores)]
        traffic = tuple((name, hidden + awaited) for name, hidden, awaited in flows)
        seconds = max(compute, *(hidden for _, hidden, _ in flows))
        seconds += (EXPOSED_THREADS if self.threads else EXPOSED) * compute
        seconds += sum(awaited for *_, awaited in flows)
        rates = self.nest.machine.rates
        start = rates.launch + (rates.fork if cores > 1 else 0.0)
        return Price(seconds + start, compute, traffic, alone / spread)

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
        wanted = self.nest.machine.rates.flight
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

    def _statement(self, s: Stmt, kept: set[tuple[object, ...]]) -> float:
        """Vector operations of one statement over its whole nest."""
        around = self._around(s)
        steps = prod(self.trips[n] for n in around)
        steps *= prod(map(self._steps, self.nest.launch))  # each thread does all of it
        atom = _grouped(self.tree, s)
        does = {*s.fold.args, *filter(self._whole, atom.args)} if atom else set(_unit(self.tree, s))
        here = [x for x in s.behind if x.result not in does]
        if self.threads:  # statements of the same loops are one leaf, which keeps its values
            here = [x for x in here if (x, *around) not in kept]
            kept.update((x, *around) for x in here)
        inside = sum(map(self._leaf, here))
        if atom:
            inside += 0.7 * sum(self._vectors(axes_of(v.type)) for v in atom.args
                                if self._whole(v)) / group_of(atom.atom)
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
        """Vector operations of a map or load at a leaf."""
        if op not in self.leaves:
            match op:
                case loop.Load():
                    cost = self._access(op)
                case Map():
                    cost = max(1.0, SCALARS[op.fn].cost) * self._width(op.result)
                case Cast():
                    cost = (1.0 if self.threads else 2.0) * self._width(op.result)
                case _:
                    cost = 0.0
            self.leaves[op] = self._vectors(op.nest) * cost
        return self.leaves[op]

    def _width(self, value: Value) -> float:
        """Machine vectors that one family member of this type takes."""
        lanes = prod(self.lanes[a] for a in axes_of(value.type))
        return max(1.0, dtype_of(value.type).bytes * lanes / (4 * self.nest.machine.lanes))

    def _access(self, op: loop.Load | loop.Store) -> float:
        """Cost of one load or store: scattered lanes go one by one."""
        wide = [a for a in op.nest if self.lanes[a] > 1]
        if self.threads and self.threads[-1].axis in op.nest:  # neighbours read together
            along, size = self.threads[-1].axis, dtype_of(op.buf.type).bytes
            copies = min(self.units[along], max(1, self.nest.machine.rates.access // size))
            return 0.7 / copies if loop.stride(op, along) == 1 else 8.0
        if not wide:
            return 0.5
        steps = max(loop.stride(op, a) for a in wide)
        if steps == 1:
            return 0.7
        place = self.tree.mapping.placed(op.result.name) if isinstance(op, loop.Load) else None
        if place and place.panel and any(
                loop.stride(op, a) == 1 and self.units[a] > 1 for a in op.nest if a not in wide):
            return TURN
        far = steps * dtype_of(op.buf.type).bytes >= PAGE  # the lanes' lines share a cache set
        return self.lanes[wide[0]] * (8.0 if far else 1.5)

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
        if atom := _grouped(self.tree, s):
            return LATENCY * self.units[s.carries] / group_of(atom.atom)
        return LATENCY * (1 if len(s.op.results) == 1 else 6)

    # ---- bytes
    def _traffic(self, cores: float) -> Iterator[tuple[str, float, float]]:
        """Seconds that each memory behind a cache needs: while the cores compute, and while they
        wait."""
        spaces, accesses = self.nest.machine.spaces, self.tree.accesses
        depths, around = range(len(self.covered)), self._loops_around()
        together = {x for s in self.tree.stmts if self._shared(s) for x in s.accesses}
        first = next((n for n, s in enumerate(self.nest.loops) if s.kind == GRID), len(depths))
        footprints = [sum(self._bytes(x, d) for x in accesses) for d in depths]
        for cache, behind in pairwise(spaces):
            room = [cache.bytes / (cores if d > first and not cache.owner else 1) for d in depths]
            fits = next((d for d in depths if footprints[d] <= room[d]), depths[-1])
            waste = behind is not spaces[1]  # the nearest cache serves any line equally well
            shared = cores if behind.owner else 1 + (cores - 1) * 0.8
            moved = {False: 0.0, True: 0.0}
            for x in accesses:
                tile = self._tile(x)
                depth = fits if tile is None else tile[0]
                again = self._again(x, around[x], depth) / (shared if x in together else 1)
                again *= self._derate(x) if waste else self._sectors(x)
                moved[tile is not None and tile[1]] += again * self._bytes(x, depth)
            yield behind.name, moved[False] / behind.rate, moved[True] / behind.rate

    def _tile(self, op: Access) -> tuple[int, bool] | None:
        """Where a mover brings what an access touches into a scratchpad, as a number of loops, and
        whether that is waited for: a ring brings the next tile meanwhile."""
        place = self.tree.mapping.placed(op.buf.name)
        if place is None or not self.nest.machine.scratchpad:
            return None
        return self.nest.loops.index(self.nest.at(place)) + 1, place.ring < 2

    def _loops_around(self) -> dict[Op, set[int]]:
        """For each access the positions of the loops that its statements run in."""
        found: dict[Op, set[int]] = {x: set() for x in self.tree.accesses}
        waits: dict[Op, frozenset[Split]] = {
            s.waits: s.carried for s in self.tree.stmts if s.waits}
        for s in self.tree.stmts:
            here = set(self._around(s))
            here |= {n for n, x in enumerate(self.nest.loops) if x in waits.get(s.op, ())}
            for op in s.accesses:
                found[op] |= here
        return found

    def _again(self, op: loop.Load | loop.Store, around: set[int], depth: int) -> int:
        """How often the loops outside of `depth` bring what an access touches inside of it."""
        axes, outer = op.nest, depth
        while outer and self.nest.loops[outer - 1].axis not in axes:
            outer -= 1
        return prod(self.trips[n] for n in range(outer) if n in around)

    def _bytes(self, op: loop.Load | loop.Store, depth: int) -> float:
        covered = self.covered[depth]
        return dtype_of(op.buf.type).bytes * prod(covered[a] for a in op.nest)

    def _sectors(self, op: Access) -> float:
        """How many times its bytes an access of neighbouring threads moves."""
        along = next((a for a in op.nest if loop.stride(op, a) == 1), None)
        if not self.threads or along is None:
            return 1.0
        run = self.units[along] * prod(self._steps(s) for s in self.threads if s.axis == along)
        size = dtype_of(op.buf.type).bytes * min(run, self.sizes[along])
        return max(1.0, self.nest.machine.rates.sector / size) if run < self.sizes[along] else 1.0

    def _derate(self, op: loop.Load | loop.Store) -> float:
        """Short contiguous runs waste bandwidth: prefetchers and pages follow long ones."""
        axes = op.nest
        run = next((a for a in axes if loop.stride(op, a) == 1), None)
        if run is None:
            return 4.0 if axes else 1.0
        others = [(n, s) for n, s in enumerate(self.nest.loops) if s.axis in axes
                  and s.axis != run]
        size = dtype_of(op.buf.type).bytes
        walks = [a for a in axes if self.lanes[a] * self.units[a] > 1 and a != run]
        if not others and not walks:
            return 1.0
        depth, far = 0, False
        if others:
            depth, step = others[-1][0] + 1, others[-1][1]
            far = loop.stride(op, step.axis) * size >= PAGE
        return 1 + (6 if far else 1) * 256 / (self.covered[depth][run] * size + 1)


def _slot(machine: Machine) -> float:
    """Seconds of one vector operation at full throughput."""
    return 2 * machine.lanes / machine.rates.flops["f32"]


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
