"""Which mappings a machine can run: closed-form checks, each with its reason.

In: a kernel, a mapping, a machine. Out: the nest, or a MappingError such as

    illegal: 44 KB x ring 6 = 264 KB > 227 KB of shared

A person's mapping and every candidate of a search go through this one function. What passes can be
lowered by `to_kernel`.
"""

from __future__ import annotations

from math import prod

from rung.core.errors import MappingError
from rung.core.machine import GRID, THREAD, UNROLL, VECTOR, Machine
from rung.core.op import Func
from rung.core.types import axes_of, dtype_of
from rung.loop import ir as loop
from rung.tile import mapping as tile
from rung.tile.budget import check_budget
from rung.tile.mapping import refuse
from rung.tile.match import match, tile_of
from rung.tile.nest import LOOPS, Nest, Split
from rung.tile.places import check_overlap, check_place
from rung.tile.roles import check_roles
from rung.tile.stmt import Stmt
from rung.tile.tree import Loop, Tree, run_of


def check(kernel: Func, mapping: tile.Mapping, machine: Machine) -> Tree:
    """The nest of a mapping. Raise MappingError with the reason if `machine` cannot run it."""
    _statements(mapping, machine)
    tree = Tree(kernel, mapping, machine)
    _levels(tree.nest)
    _vectors(tree)
    _reduced(tree)
    _clashes(tree)
    _stored(tree)
    for place in mapping.places:
        check_place(tree, place)
    for use in mapping.uses:
        _use(tree, use)
    for combine in mapping.combines:
        _combine(tree, combine)
    _order(tree)
    for overlap in mapping.overlaps:
        check_overlap(tree, overlap)
    if mapping.roles:
        check_roles(tree)
    _states(tree)
    check_budget(tree)
    return tree


def is_legal(kernel: Func, mapping: tile.Mapping, machine: Machine) -> bool:
    """Whether `check` passes."""
    try:
        check(kernel, mapping, machine)
    except MappingError:
        return False
    return True


# ---- statement forms
def _statements(m: tile.Mapping, machine: Machine) -> None:
    if m.machine not in (machine.name, machine.name.split(".")[0]):
        refuse(f"the mapping is for {m.machine}, not {machine.name}")
    if len(m.orders) > 1:
        refuse(f"`{m.orders[0]}` and `{m.orders[1]}`")
    for order in m.orders:
        _blocks(m, order, machine)
    names = [v for p in m.places for v in p.values]
    if twice := {n for n in names if names.count(n) > 1}:
        refuse(f"{', '.join(sorted(twice))} is placed twice")


def _blocks(m: tile.Mapping, order: tile.Order, machine: Machine) -> None:
    if order.kind == "flat" and order.group:
        refuse(f"`{order}`: only blocks that stay are dealt tiles in bands")
    if order.kind == "lpt":
        refuse(f"`{order}`: the blocks of a kernel are equally long")
    if order.kind == "flat":
        return
    if not machine.threaded:
        refuse(f"`{order}`: {machine.name} has no blocks that could stay")
    if m.roles:
        refuse(f"`{order}`: the slots of roles would count on from tile to tile")
    if order.group > 1 and sum(level == x.name for line in m.axes for level, _ in line.splits
                               for x in machine.levels if x.kind == GRID) < 2:
        refuse(f"`{order}`: the grid has no rows and columns")


# ---- axis lines
def _levels(nest: Nest) -> None:
    for level in nest.machine.levels:
        here = [s for s in nest.all() if s.level == level.name]
        if level.kind == VECTOR:
            for s in here:
                _lanes(s, level.limit or 64)
            continue
        total = prod(_steps(nest, s) for s in here)
        if level.limit and total > level.limit:
            refuse(f"{total} steps of {level.name} > {level.limit}")
        if level.kind == THREAD and total & (total - 1):
            refuse(f"{total} steps of {level.name}, not a power of two")
    for axis, splits in nest.splits.items() if nest.machine.threaded else ():
        if sum(s.kind == GRID for s in splits) > 1:
            refuse(f"{axis} is on two grid levels")


def _lanes(split: Split, most: int) -> None:
    lanes = split.size or 1
    if lanes & (lanes - 1) or lanes > most:
        refuse(f"{lanes} lanes of {split.name}, the machine has powers of two up to {most}")


def _steps(nest: Nest, split: Split) -> int:
    """Steps of a split; one that is symbolic counts as many."""
    steps = nest.steps(split)
    return 1 << 30 if steps is None else steps


def _vectors(tree: Tree) -> None:
    for op in tree.kernel.body.ops:
        wide = [a for a in op.nest if tree.nest.count(a, VECTOR) > 1]
        if len(wide) > 1:
            name = op.results[0].name if op.results else "a store"
            refuse(f"{name} varies over two vectorised axes, {' and '.join(wide)}")


def _reduced(tree: Tree) -> None:
    """A fold stays in one block; a scan takes one step after the other, each with the positions of
    other axes inside."""
    nest = tree.nest
    for op in loop.reductions(tree.kernel):
        for s in nest.splits[op.axis]:
            if s.kind == GRID and _steps(nest, s) > 1:
                refuse(f"{op.results[0].name} reduces {op.axis} on {s.level}: that needs "
                       f"split_fold")
    for scan in (op for op in loop.folds(tree.kernel) if op.prefix):
        _scanned(nest, scan)


def _scanned(nest: Nest, scan: loop.Fold) -> None:
    """Threads of one block, and what each unrolls, take consecutive parts of a scan."""
    name = scan.result.name
    for s in nest.beside(scan.axis):
        if not nest.machine.threaded or s.kind == GRID:
            refuse(f"{name} scans {scan.axis}, whose steps on {s.level} have no order")
    for s in nest.splits[scan.axis]:
        if s.kind in LOOPS and nest.among_threads(s) and _steps(nest, s) > 1:
            refuse(f"{name} scans {scan.axis}: its threads must be inside of the loop {s.name}")


def _clashes(tree: Tree) -> None:
    """What is combined at places that data say goes in order, if not in one step each, and not
    through a tile."""
    for op in (op for op in tree.kernel.body.ops if isinstance(op, loop.Store) and op.combine):
        if tree.mapping.placed(op.buf.name):
            refuse(f"{op.buf.name} is updated where data say: no tile of it is known")
        for s in (s for a in op.clashing for s in tree.nest.beside(a)):
            if not tree.nest.machine.atomic(op.combine, dtype_of(op.buf.type).name):
                refuse(f"{op.buf.name} is updated along {s.axis}, whose steps on {s.level} may "
                       f"meet")
            if any(x.buf is op.buf and x is not op for x in tree.accesses):
                refuse(f"{op.buf.name} is accessed twice, and its updates along {s.axis} are in "
                       f"no order")


def _stored(tree: Tree) -> None:
    """A store that lacks an axis of the launch is done by the first block or thread along it, while
    no other of them reads what it overwrites."""
    for op in (op for op in tree.accesses if isinstance(op, loop.Store)):
        lacks = {s.axis for s in tree.nest.repeats(op.nest) if _steps(tree.nest, s) > 1}
        for s in tree.stmts if lacks else ():
            alike = isinstance(s.op, loop.Store) and lacks.isdisjoint(s.op.nest)
            if not alike and any(x.buf is op.buf for x in s.loads):
                refuse(f"{op.buf.name} is stored by the first step of {', '.join(sorted(lacks))} "
                       f"and read by all of them")


# ---- atoms and combines
def _use(tree: Tree, u: tile.Use) -> None:
    op = next((f for f in loop.reductions(tree.kernel) if f.results[0].name == u.contraction), None)
    atom = tree.nest.machine.atom(u.atom)
    if atom is None:
        refuse(f"{tree.nest.machine.name} has no atom {u.atom}")
    if op is None or not op.sums_products:
        refuse(f"{u.contraction} is no contraction of products")
    if match(atom, op, tree.made) is None:
        refuse(f"{u.atom} computes {atom.meaning.splitlines()[0]}, not {u.contraction}")
    if tile_of(atom)[2] > 1:
        _matrix(tree.nest, u, op, *tile_of(atom))


def _matrix(nest: Nest, u: tile.Use, op: loop.Fold, height: int, width: int, depth: int) -> None:
    """Rows and depth unrolled, columns in lanes, all in multiples of the instruction."""
    k = op.axis
    inner = [s for s in nest.splits[k] if s.kind not in LOOPS]
    if len(inner) != 1 or inner[0].kind != UNROLL or (inner[0].size or 1) % depth:
        refuse(f"{u.atom} needs {k} unrolled by a multiple of {depth}")
    looped = nest.masked or any(s.kind in LOOPS for s in nest.splits[k])
    if not looped and not (nest.extents[k] % nest.unit(k)).is_const(0):
        refuse(f"{u.atom} needs a loop over {k}, whose last block is padded")
    a, b = (set(axes_of(x.type)) for x in op.args)
    cols = [x for x in axes_of(op.result.type) if nest.count(x, VECTOR) > 1]
    if len(cols) != 1 or nest.count(cols[0], VECTOR) != width or (cols[0] in a & b):
        refuse(f"{u.atom} needs {width} lanes of an axis of one operand of {u.contraction}")
    other = (a if cols[0] in b else b) - (a & b)
    rows = prod(nest.count(x, UNROLL) for x in other if x != k)
    if rows % height:
        refuse(f"{u.atom} needs a multiple of {height} rows, not {rows}")
    for x in (a & b) - {k}:
        if nest.count(x, UNROLL) > 1:
            refuse(f"{x} is in both operands of {u.contraction}: {u.atom} takes one at a time")


def _combine(tree: Tree, c: tile.Combine) -> None:
    op = next((f for f in loop.reductions(tree.kernel) if f.results[0].name == c.fold), None)
    if op is None:
        refuse(f"{c.fold} is no fold")
    levels = {s.level for s in tree.nest.splits[op.axis]
              if s.kind not in LOOPS and (s.size or 1) > 1}
    if levels != set(c.levels):
        refuse(f"{c.fold} is split over {', '.join(sorted(levels)) or 'no parallel level'}, and "
               f"combined there")


# ---- order of statements
def _order(tree: Tree) -> None:
    """What a statement reads must be finished and still there. Raises MappingError."""
    for s in tree.stmts:
        _explicit(tree, s)
    for s in tree.stmts:
        for name in (v.name for v in s.op.results if tree.mapping.placed(v.name)):
            _placed_run(tree, s, name)
        for q in s.needs:
            _reads(tree, s, q)
    for s in tree.stmts:
        _updated(tree, s)


def _explicit(tree: Tree, s: Stmt) -> None:
    """On a machine with a scratchpad blocks of elements are there, and single ones anywhere."""
    for op in s.accesses:
        place, name = tree.mapping.placed(op.buf.name), op.buf.name
        if place is None:
            if tree.nest.machine.scratchpad and any(
                    tree.nest.count(a, kind) > 1 for a in op.nest for kind in (VECTOR, UNROLL)):
                refuse(f"{name} is not placed in the scratchpad, and accessed in blocks")
        elif not run_of(tree.paths[s], tree.nest.at(place)):
            refuse(f"{name} is placed at {place.loop}, where no loop around its use is")


def _placed_run(tree: Tree, s: Stmt, name: str) -> Loop:
    place = tree.mapping.placed(name)
    assert place is not None
    run = run_of(tree.end(s), tree.nest.at(place))
    if run is None:
        refuse(f"{name} is placed at {place.loop}, but computed outside of it")
    return run


def _reads(tree: Tree, s: Stmt, q: Stmt) -> None:
    if tree.visible(q, s):
        return
    read = {v for op in tree.kernel.body.ops for v in op.operands()}
    for name in (v.name for v in q.op.results if v in read):
        place = tree.mapping.placed(name)
        if place is None:
            refuse(f"{name} is read in a later loop than the one that computes it: place it")
        if run_of(tree.paths[s], tree.nest.at(place)) is not _placed_run(tree, q, name):
            refuse(f"{name} is read outside of {place.loop}, where it is placed")


def _updated(tree: Tree, s: Stmt) -> None:
    """What a store overwrites is read by the step that stores it, or earlier."""
    if not isinstance(s.op, loop.Store):
        return
    old = loop.overwritten(tree.kernel.body.ops, s.op)
    for r in tree.stmts if old else ():
        if old.intersection(r.loads) and not tree.no_later(r, s):
            refuse(f"{s.op.buf.name} is read in a later loop than the one that updates it")


def _states(tree: Tree) -> None:
    """The states of folds can be where the loops inside put them; those of scans in registers."""
    for s in tree.stmts:
        start = tree.start(s)
        if s.kind == "fold" and start:
            start.check()
        if s.kind == "scan":
            _alone(tree, s)


def _alone(tree: Tree, s: Stmt) -> None:
    """The state of a scan is in registers: no loop of another axis is inside of its own."""
    path = [node.split for node in tree.paths[s] if node.split not in tree.nest.launch]
    first = next((n for n, t in enumerate(path) if t.axis == s.carries), len(path))
    for t in path[first:]:
        if t.axis != s.carries:
            refuse(f"{s.name} scans {s.carries}, and has a loop over {t.axis} inside of its own")
