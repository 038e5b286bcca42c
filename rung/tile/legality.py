"""Which mappings a machine can run: closed-form checks, each with its reason.

In: a kernel, a mapping, a machine. Out: nothing, or a MappingError such as

    illegal: 44 KB x ring 6 = 264 KB > 227 KB of shared

A person's mapping and every candidate of a search go through this one function. What passes can be
lowered by `to_kernel`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from rung.core.errors import MappingError
from rung.core.machine import GRID, THREAD, UNROLL, VECTOR, Machine
from rung.core.op import Func, Op, Value
from rung.core.types import axes_of, dtype_of
from rung.kernel.ir import INTRINSICS
from rung.loop import ir as loop
from rung.tile import mapping as tile
from rung.tile.leaf import in_array
from rung.tile.nest import LOOPS, Nest, Split
from rung.tile.roles import check_roles
from rung.tile.route import Path, find_route, refuse
from rung.tile.stage import find_split, placed_buffer, tile_form
from rung.tile.to_kernel import Stmt

SPARE = 48  # registers of a thread for addresses and operands


def check(kernel: Func, mapping: tile.Mapping, machine: Machine) -> None:
    """Raise MappingError with the reason if `machine` cannot run `mapping`."""
    _Check(kernel, mapping, machine).all()


def is_legal(kernel: Func, mapping: tile.Mapping, machine: Machine) -> bool:
    """Whether `check` passes."""
    try:
        check(kernel, mapping, machine)
    except MappingError:
        return False
    return True


class _Check:
    def __init__(self, kernel: Func, mapping: tile.Mapping, machine: Machine):
        self.kernel, self.mapping, self.machine = kernel, mapping, machine
        self.ops = kernel.body.ops
        self.folds = loop.reductions(kernel)
        self.accesses = [op for op in self.ops if isinstance(op, loop.Load | loop.Store)]
        self.values = {v.name: v for op in self.ops for v in op.results}

    def all(self) -> None:
        self.statements()
        self.nest = Nest(loop.extents_of(self.kernel), self.mapping, self.machine)
        self.levels()
        self.vectors()
        self.reduced()
        self.scanned()
        self.clashes()
        self.stored()
        for place in self.mapping.places:
            self.place(place)
        for use in self.mapping.uses:
            self.use(use)
        for combine in self.mapping.combines:
            self.combine(combine)
        self.stmts, self.route = find_route(self.kernel, self.mapping, self.nest)
        self.explicit()
        self.order()
        self.updated()
        for overlap in self.mapping.overlaps:
            self.overlap(overlap)
        if self.mapping.roles:
            check_roles(self.mapping, self.machine, self.nest, self.stmts, self.route)
        for s in self.stmts:
            if s.kind == "fold":
                in_array(s, {t.axis for t in self.nested(s)})
            if s.kind == "scan":
                self.alone(s)
        self.budget()

    # ---- statement forms
    def statements(self) -> None:
        m = self.mapping
        if m.machine not in (self.machine.name, self.machine.name.split(".")[0]):
            refuse(f"the mapping is for {m.machine}, not {self.machine.name}")
        if len(m.orders) > 1:
            refuse(f"`{m.orders[0]}` and `{m.orders[1]}`")
        for order in m.orders:
            self.blocks(order)
        names = [v for p in m.places for v in p.values]
        if twice := {n for n in names if names.count(n) > 1}:
            refuse(f"{', '.join(sorted(twice))} is placed twice")

    def blocks(self, order: tile.Order) -> None:
        if order.kind == "flat" and order.group:
            refuse(f"`{order}`: only blocks that stay are dealt tiles in bands")
        if order.kind == "lpt":
            refuse(f"`{order}`: the blocks of a kernel are equally long")
        if order.kind == "flat":
            return
        if not self.machine.threaded:
            refuse(f"`{order}`: {self.machine.name} has no blocks that could stay")
        if self.mapping.roles:
            refuse(f"`{order}`: the slots of roles would count on from tile to tile")
        if order.group > 1 and sum(level == x.name for line in self.mapping.axes for level, _ in
                                   line.splits for x in self.machine.levels if x.kind == GRID) < 2:
            refuse(f"`{order}`: the grid has no rows and columns")

    def levels(self) -> None:
        for level in self.machine.levels:
            here = [s for s in self.nest.all() if s.level == level.name]
            if level.kind == VECTOR:
                for s in here:
                    self.vector(s, level.limit)
                continue
            total = prod(self.trips(s) for s in here)
            if level.limit and total > level.limit:
                refuse(f"{total} steps of {level.name} > {level.limit}")
            if level.kind == THREAD and total & (total - 1):
                refuse(f"{total} steps of {level.name}, not a power of two")
        if not self.machine.threaded:
            return
        for axis, splits in self.nest.splits.items():
            if sum(s.kind == GRID for s in splits) > 1:
                refuse(f"{axis} is on two grid levels")

    def trips(self, split: Split) -> int:
        """Steps of a split; one that is symbolic counts as many."""
        extent = self.nest.extents[split.axis].const_value
        return split.size or (1 << 30 if extent is None else -(-extent // split.step))

    def vector(self, split: Split, limit: int) -> None:
        lanes = split.size or 1
        if split.step != 1:
            refuse(f"{split.axis}.{split.level} is not the last level of {split.axis}")
        if lanes & (lanes - 1) or lanes > (limit or 64):
            refuse(f"{lanes} lanes of {split.axis}.{split.level}, the machine has powers of two "
                   f"up to {limit or 64}")

    def lanes(self, axis: str) -> int:
        return prod(s.size or 1 for s in self.nest.splits[axis] if s.kind == VECTOR)

    def units(self, axis: str) -> int:
        return prod(s.size or 1 for s in self.nest.splits[axis] if s.kind == UNROLL)

    def vectors(self) -> None:
        for op in self.ops:
            wide = [a for a in op.nest if self.lanes(a) > 1]
            if len(wide) > 1:
                name = op.results[0].name if op.results else "a store"
                refuse(f"{name} varies over two vectorised axes, {' and '.join(wide)}")

    def reduced(self) -> None:
        for op in self.folds:
            for s in self.nest.splits[op.axis]:
                name = op.results[0].name
                if s.kind == GRID and self.trips(s) > 1:
                    refuse(f"{name} reduces {op.axis} on {s.level}: that needs split_fold")

    def scanned(self) -> None:
        """A scan takes one step after the other, each with the positions of other axes inside."""
        for op in (op for op in loop.folds(self.kernel) if op.prefix):
            for s in self.nest.splits[op.axis]:
                if (s.kind not in LOOPS or s.kind == GRID) and self.trips(s) > 1:
                    refuse(f"{op.result.name} scans {op.axis}, whose steps on {s.level} have no "
                           f"order")

    def clashes(self) -> None:
        """What is combined at places that data say goes in order, and not through a tile."""
        for op in (op for op in self.ops if isinstance(op, loop.Store) and op.combine):
            if self._scratchpad() or self.mapping.placed(op.buf.name):
                refuse(f"{op.buf.name} is updated where data say: no tile of it is known")
            for s in (s for a in op.clashing for s in self.nest.splits[a]):
                if (s.kind not in LOOPS or s.kind == GRID) and self.trips(s) > 1:
                    refuse(f"{op.buf.name} is updated along {s.axis}, whose steps on {s.level} "
                           f"may meet")

    def stored(self) -> None:
        """On machines whose blocks start together no block repeats another's stores."""
        for op in self.ops if self.machine.threaded else ():
            if isinstance(op, loop.Store):
                for s in self.nest.launch:
                    if s.kind == GRID and s.axis not in op.nest and self.trips(s) > 1:
                        refuse(f"every block of {s.axis} would store {op.buf.name} again")

    # ---- places
    def place(self, p: tile.Place) -> None:
        space, split = self.machine.space(p.space), find_split(p, self.nest)
        if space is None:
            refuse(f"{self.machine.name} has no space {p.space}")
        if any(s.explicit for s in self.machine.spaces) and not space.explicit:
            refuse(f"`{p}`: only a scratchpad holds placed values")
        if self.machine.threaded and not space.owner:
            refuse(f"`{p}`: {p.space} does not belong to a block")
        if p.mover and p.mover not in self.machine.movers:
            refuse(f"{self.machine.name} has no mover {p.mover}")
        if p.ring > 1 and p.mover not in self.machine.asynchronous:
            refuse(f"`{p}`: a ring needs an asynchronous mover")
        for name in p.values:
            if name in self.values:
                self.placed_value(p, self.values[name], split)
            else:
                self.placed_buffer(p, name, split, explicit=space.explicit)

    def placed_value(self, p: tile.Place, value: Value, split: Split) -> None:
        axes = axes_of(value.type)
        if p.ring > 1 or p.mover:
            refuse(f"{value.name} is computed: no mover brings it and no ring holds it")
        if p.panel and p.panel[0] not in axes:
            refuse(f"{value.name} does not vary over {p.panel[0]}")
        for a in axes:
            self.block(value.name, a, split)

    def block(self, name: str, axis: str, split: Split) -> int:
        """Elements of an axis that an array placed at a loop holds."""
        return self.whole(name, axis, self.nest.block_at(axis, split))

    def whole(self, name: str, axis: str, size: int | None) -> int:
        """The elements of an axis in an array, where `size` are left of it (None: all)."""
        threads = [s.step * (s.size or 1) for s in self.nest.splits[axis] if s.kind == THREAD]
        if size is not None and any(t > size for t in threads):
            refuse(f"the array of {name} is made inside a loop of {axis} that is inside its "
                   f"threads")
        size = self.nest.padded(axis) if size is None else size
        if size is None:
            refuse(f"{name} needs an array over {axis}, whose extent {self.nest.extents[axis]} "
                   f"is symbolic")
        return size

    def placed_buffer(self, p: tile.Place, name: str, split: Split, explicit: bool) -> None:
        mine = [op for op in self.accesses if op.buf.name == name]
        if not mine:
            refuse(f"the kernel has no value or buffer {name}")
        if p.panel:
            refuse(f"{name} is a buffer: panels are for computed values")
        if explicit and p.mover not in self.machine.asynchronous:
            refuse(f"only {', '.join(self.machine.asynchronous)} brings {name} to {p.space}")
        for op in mine:
            tile_form(op, lambda a: self.nest.block_at(a, split), self.nest)
            for a in loop.free_axes(op.subs):
                if self.nest.block_at(a, split) is not None:
                    self.block(name, a, split)
            if p.ring > 1 and any(isinstance(s, Value) for s in op.subs):
                refuse(f"{name} follows data: its next box is not known ahead, so no ring")
            for sub in (s for s in op.subs if isinstance(s, Value)):
                self.followed(name, sub, split)
            if isinstance(op, loop.Store):
                self.placed_store(op)

    def followed(self, name: str, sub: Value, split: Split) -> None:
        """What a box follows is there when the step of its loop begins."""
        made = {v: op for op in self.ops for v in op.results}
        todo = [sub]
        for v in (v for v in todo if v in made):
            place = self.mapping.placed(v.name)
            if place and find_split(place, self.nest).order >= split.order:
                refuse(f"{name} follows {v.name}, which is computed inside of {split.axis}."
                       f"{split.level}")
            todo += made[v].operands()

    def placed_store(self, op: loop.Store) -> None:
        name = op.buf.name
        if self.machine.threaded:
            refuse(f"{name} is stored from registers, not from an array")
        if op.mask:
            refuse(f"{name} is stored under a mask: its tile would not be whole")
        if any(c.buffer == name for c in self.mapping.carries):
            refuse(f"{name} carries a state and is placed")

    def overlap(self, o: tile.Overlap) -> None:
        """What a mover brings may be asked for some steps before the one that reads it."""
        place = self.mapping.placed(o.first)
        if o.first in self.values:
            refuse(f"{o.first} is computed: only what a mover brings is issued ahead")
        if place is None or place.ring == 1:
            refuse(f"{o.first} has no ring: nothing holds what is issued ahead")
        if self.mapping.roles:
            refuse(f"`{o}`: a role that loads runs ahead as far as slots are free")
        if not 1 <= o.distance < place.ring or o.distance != self.mapping.ahead(place):
            refuse(f"`{o}`: one distance from 1 to {place.ring - 1} fits a ring of {place.ring}")
        split = find_split(place, self.nest)
        if not any(self._inside(self.route.paths[id(s)], split) and any(
                placed_buffer(x, self.mapping) is place for x in s.loads)
                for s in self.stmts if o.second in [v.name for v in s.op.results]):
            refuse(f"{o.second} does not read {o.first} in {place.axis}.{place.level}")

    # ---- atoms and combines
    def use(self, u: tile.Use) -> None:
        op = next((f for f in self.folds if f.results[0].name == u.contraction), None)
        if u.atom not in self.machine.atoms or u.atom not in INTRINSICS:
            refuse(f"{self.machine.name} has no atom {u.atom}")
        if op is None or not op.sums_products:
            refuse(f"{u.contraction} is no contraction of products")
        atom = INTRINSICS[u.atom]
        if op.acc != atom.acc:
            refuse(f"{u.atom} accumulates {atom.acc}, {u.contraction} is {op.acc}")
        if atom.depth > 1:
            self.matrix(u, op)

    def matrix(self, u: tile.Use, op: loop.Fold) -> None:
        """Rows and depth unrolled, columns in lanes, all in multiples of the instruction."""
        atom, k = INTRINSICS[u.atom], op.axis
        depth = [s for s in self.nest.splits[k] if s.kind not in LOOPS]
        if len(depth) != 1 or depth[0].kind != UNROLL or (depth[0].size or 1) % atom.depth:
            refuse(f"{u.atom} needs {k} unrolled by a multiple of {atom.depth}")
        a, b = (set(axes_of(x.type)) for x in op.args)
        cols = [x for x in axes_of(op.result.type) if self.lanes(x) > 1]
        if len(cols) != 1 or self.lanes(cols[0]) != atom.cols or (cols[0] in a & b):
            refuse(f"{u.atom} needs {atom.cols} lanes of an axis of one operand of {u.contraction}")
        other = (a if cols[0] in b else b) - (a & b)
        rows = prod(self.units(x) for x in other if x != k)
        if rows % atom.rows:
            refuse(f"{u.atom} needs a multiple of {atom.rows} rows, not {rows}")
        for x in (a & b) - {k}:
            if self.units(x) > 1:
                refuse(f"{x} is in both operands of {u.contraction}: {u.atom} takes one at a time")

    def combine(self, c: tile.Combine) -> None:
        op = next((f for f in self.folds if f.results[0].name == c.fold), None)
        if op is None:
            refuse(f"{c.fold} is no fold")
        levels = {s.level for s in self.nest.splits[op.axis]
                  if s.kind not in LOOPS and (s.size or 1) > 1}
        if levels != set(c.levels):
            refuse(f"{c.fold} is split over {', '.join(sorted(levels)) or 'no parallel level'}, "
                   f"and combined there")

    # ---- order of statements
    def explicit(self) -> None:
        """On a machine with a scratchpad nothing is read or written elsewhere."""
        for s in self.stmts:
            for op in (*s.loads, s.op):
                place = placed_buffer(op, self.mapping)
                if place is None:
                    if isinstance(op, loop.Load | loop.Store) and self._scratchpad():
                        refuse(f"{op.buf.name} is not placed in the scratchpad")
                elif not self._inside(self.route.paths[id(s)], find_split(place, self.nest)):
                    name = op.buf.name  # type: ignore[attr-defined]
                    refuse(f"{name} is placed at {place.axis}.{place.level}, where no loop around "
                           f"its use is")

    def _scratchpad(self) -> bool:
        return any(s.explicit for s in self.machine.spaces)

    def _inside(self, path: Path, split: Split) -> int:
        """Which run of a loop a path is in; 0 for a launch loop means the only one."""
        return next((run + 1 for s, run in path if s == split), 0)

    def order(self) -> None:
        """What a statement reads must be finished and still there."""
        for s in self.stmts:
            for name in (v.name for v in s.op.results if self.mapping.placed(v.name)):
                self._placed_run(s, name)
            for q in s.needs:
                self._reads(s, q)

    def _placed_run(self, s: Stmt, name: str) -> int:
        place = self.mapping.placed(name)
        assert place is not None
        path = self.route.ends[id(s)] if s.kind == "fold" else self.route.paths[id(s)]
        run = self._inside(path, find_split(place, self.nest))
        if not run:
            refuse(f"{name} is placed at {place.axis}.{place.level}, but computed outside of it")
        return run

    def _reads(self, s: Stmt, q: Stmt) -> None:
        if self.route.visible(q, s):
            return
        path, read = self.route.paths[id(s)], {v for op in self.ops for v in op.operands()}
        for name in (v.name for v in q.op.results if v in read):
            place = self.mapping.placed(name)
            if place is None:
                refuse(f"{name} is read in a later loop than the one that computes it: place it")
            if self._inside(path, find_split(place, self.nest)) != self._placed_run(q, name):
                refuse(f"{name} is read outside of {place.axis}.{place.level}, where it is placed")

    def updated(self) -> None:
        """What a store overwrites is read by the step that stores it, or earlier."""
        for s in self.stmts:
            if not isinstance(s.op, loop.Store):
                continue
            old = loop.overwritten(self.ops, s.op)
            for r in self.stmts if old else ():
                if old.intersection(r.loads) and not self.route.no_later(r, s):
                    refuse(f"{s.op.buf.name} is read in a later loop than the one that updates it")

    # ---- budgets
    def budget(self) -> None:
        arrays = list(self._arrays())
        if not self.machine.masked:
            return  # a cache that overflows is slow, not wrong
        for space in self.machine.spaces:
            parts = [part for part in arrays if part[0] == space.name]
            total = sum(size * ring for _, _, size, ring in parts)
            if total > space.bytes:
                names = " + ".join(f"{_kb(size)}" + (f" x ring {ring}" if ring > 1 else "")
                                   for _, _, size, ring in parts)
                refuse(f"{names} = {_kb(total)} > {_kb(space.bytes)} of {space.name}")
        if self.machine.threaded:
            self._registers()

    def _arrays(self) -> Iterator[tuple[str, str, int, int]]:
        """(space, name, bytes, ring) of all arrays of a block."""
        for p in self.mapping.places:
            split = find_split(p, self.nest)
            for name in p.values:
                if name in self.values:
                    value = self.values[name]
                    sizes = [self.block(name, a, split) for a in axes_of(value.type)]
                    yield p.space, name, self._bytes(value, sizes, p.pad), 1
                    continue
                yield from self._tiles(p, name, split)
        if self.mapping.roles and self.machine.teams and self.machine.teams.threads:
            for p in self.mapping.places:  # a full and a free token of 8 B for each slot
                yield p.space, "tokens", 16, p.ring
        accumulators = "acc" if self.machine.space("acc") else self.machine.spaces[0].name
        for s in self.stmts:
            if s.kind == "fold":
                yield from self._state(s, accumulators)

    def _tiles(self, p: tile.Place, name: str, split: Split) -> Iterator[tuple[str, str, int, int]]:
        seen = set()
        for op in self.accesses:
            if op.buf.name == name:
                form = tile_form(op, lambda a: self.nest.block_at(a, split), self.nest)
                key = (type(op), form, tuple(None if w else str(s)
                                             for s, w in zip(op.subs, form.whole, strict=True)))
                if key not in seen:
                    seen.add(key)
                    for _ in range(self._copies(op, split)):
                        yield p.space, name, self._bytes(op.buf, form.box, p.pad), p.ring

    def _copies(self, op: Op, split: Split) -> int:
        """Tiles of one access: under roles, loops that follow each other have one each."""
        paths = [self.route.paths[id(s)] for s in self.stmts if op in (*s.loads, s.op)]
        return len({self._inside(path, split) for path in paths}) if self.mapping.roles else 1

    def _bytes(self, value: Value, sizes: Sequence[int], pad: int) -> int:
        sizes = [*sizes[:-1], sizes[-1] + pad] if sizes else []
        return prod(sizes) * dtype_of(value.type).bytes

    def _state(self, s: Stmt, space: str) -> Iterator[tuple[str, str, int, int]]:
        """A fold's state: arrays where loops over its free axes are inside it, else registers."""
        end, op = self.route.ends[id(s)], s.op
        nested = self.nested(s)
        started = any(t.axis == s.folds for t, _ in self.route.paths[id(s)][len(end):])
        for state in op.results:
            if not nested:
                if self.machine.space("acc") and started:
                    sizes = [self.nest.unit(a) for a in axes_of(state.type)]
                    sizes += [] if self._matrix(state.name) else [self.nest.unit(s.folds)]
                    yield space, state.name, self._bytes(state, sizes, 0), 1
                continue
            sizes = [self._left(state.name, a, end) for a in axes_of(state.type)]
            yield space, state.name, self._bytes(state, sizes, 0), 1

    def alone(self, s: Stmt) -> None:
        """The state of a scan is in registers: no loop of another axis is inside of its own."""
        path = [t for t, _ in self.route.paths[id(s)]]
        first = next((n for n, t in enumerate(path) if t.axis == s.carries), len(path))
        for t in path[first:]:
            if t.axis != s.carries:
                refuse(f"{s.op.results[0].name} scans {s.carries}, and has a loop over {t.axis} "
                       f"inside of its own")

    def nested(self, s: Stmt) -> list[Split]:
        """Loops over a fold's free axes that are inside the fold."""
        inside = self.route.paths[id(s)][len(self.route.ends[id(s)]):]
        return [t for t, _ in inside if t.axis != s.folds]

    def _matrix(self, name: str) -> bool:
        return any(u.contraction == name and INTRINSICS[u.atom].depth > 1
                   for u in self.mapping.uses)

    def _left(self, name: str, axis: str, path: Path) -> int:
        steps = [s.step for s, _ in path if s.axis == axis and s.kind in LOOPS]
        return self.whole(name, axis, steps[-1] if steps else None)

    def _registers(self) -> None:
        total = sum(prod(self.units(a) for a in (*axes_of(r.type), op.axis))
                    for op in self.folds for r in op.results)
        most = self.mapping.crew().get("math", (1, 0))[1] or self.machine.registers
        if total > most - SPARE:
            refuse(f"{total} accumulators a thread + {SPARE} > {most} registers")


def _kb(size: int) -> str:
    return f"{size >> 10} KB" if size >= 1 << 10 else f"{size} B"


