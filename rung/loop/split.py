"""A fold split across launches: partial states to a workspace, then merged (split-K, split-KV).

    s = fold add x[i] over i 4096   ->   s = fold add x[512*p+i] over i 512;  ws[p] = s
    y[] = s                              s = fold add ws[p] over p 8;         y[] = s

The partial kernel has a further parallel axis p; the merge kernel is the old one with the fold
replaced by the carrier's merge of the states. What a kernel stores along the axis without waiting
for the fold, as a norm's backward pass does for each row beside sums over rows, the parts store:
they read that once. A scan is split so too: the second kernel scans each part again, on top of what
the parts before it come to. Reassociates. Legality is `can_split`, policy `plan` (idle cores, and
prices), mechanism `split_fold`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TypeAlias

from rung.core import origins, trace
from rung.core.cost import behind
from rung.core.errors import RungError
from rung.core.expr import ZERO, Expr, sym
from rung.core.machine import Rates
from rung.core.op import Func, Op, Value, made_by
from rung.core.ops import Cast, Const, Map
from rung.core.scalar import MONOIDS
from rung.core.types import TensorType, axes_of, axes_type, dtype_of
from rung.loop.emit import Copier, Declined, Emitter
from rung.loop.ir import Fold, Load, Store, extents_of, folds, reductions
from rung.loop.merge_folds import merge
from rung.program.ir import KernelCall, Module

Halves = tuple[Func, Func, tuple[TensorType, ...]]
Reason: TypeAlias = str
Way: TypeAlias = tuple[str, int, Halves]  # an axis, in so many parts
Price = Callable[[Func], tuple[float, float]]  # seconds of a launch, and cores that it keeps busy
Least = Callable[[Func], float]  # seconds of a launch, at least
BUSY = 0.95  # of the cores at work is as good as all
GAIN = 0.8  # of the unsplit launch's time is the most that two may take
NEAR = 0.9  # of as many parts as were wanted is near enough, where those are equally long
RATES = Rates(0.0, 0.0, {}, 0.0)  # of a machine of which nothing else is known
MORE = (1, 2, 4)  # times as many parts as would keep each core busy


# --- legality

def can_split(kernel: Func, axis: str) -> Reason | None:
    """Why the folds over `axis` cannot be split; None if they can."""
    found = _folds(kernel, axis)
    made = made_by(kernel)
    if not found:
        return f"nothing folds over {axis}"
    if any(op.prefix for op in found) and (
            len(found) > 1 or found[0].product or found[0].carrier not in MONOIDS):
        return f"a scan runs along {axis}"
    if any(op.product and not op.sums_products for op in found):
        return f"what is combined over {axis} is no sum of products, which ends with zeros"
    if any(inner in found for op in found for inner in behind(op, made)):
        return f"one fold over {axis} reads another's result"
    return None


def _folds(kernel: Func, axis: str) -> list[Fold]:
    return [op for op in folds(kernel) if op.axis == axis]


# --- policy

@dataclass(frozen=True)
class SplitPlan:
    """Two launches instead of one, with the modelled seconds of both and of the one."""

    axis: str
    parts: int
    halves: Halves
    seconds: float
    whole: float

    def __str__(self) -> str:
        return (f"{self.whole * 1e6:.1f} -> {self.seconds * 1e6:.1f} us, {self.axis} in "
                f"{self.parts} parts")


def plan(kernel: Func, price: Price, cores: int, rates: Rates = RATES, scans: bool = False,
         least: Least = lambda _: 0.0) -> SplitPlan | None:
    """The cheapest split of a fold, or of a scan too, whose launch leaves cores idle, if clearly
    profitable. Splits that take longer even by `least` are not priced."""
    axes = dict.fromkeys(op.axis for op in (folds(kernel) if scans else reductions(kernel)))
    if cores == 1 or not axes:
        return None
    seconds, busy = price(kernel)
    if busy >= BUSY * cores or GAIN * seconds <= 2 * rates.launch:
        return None
    best: SplitPlan | None = None
    ways = [way for axis in axes for way in _ways(kernel, axis, cores / busy, rates.part)]
    for low, (axis, parts, halves) in sorted(
            ((sum(map(least, way[2][:2])), way) for way in ways), key=lambda x: x[0]):
        limit = best.seconds if best else GAIN * seconds
        if low >= limit:
            break
        try:
            one = SplitPlan(axis, parts, halves, sum(price(k)[0] for k in halves[:2]), seconds)
        except RungError as error:
            trace.emit("declined", "split", kernel.name, str(error))
            continue
        trace.emit("priced", "split", kernel.name, str(one))
        best = one if one.seconds < limit else best
    return best


def _wanted(share: float) -> Iterator[int]:
    """How many parts may keep all cores busy, where the whole keeps one of so many."""
    for n in MORE:
        yield ceil(share) * n
        yield int(share * n)  # blocks of which no core has one more than others


def _even(size: int | None, parts: int) -> int:
    """Nearly as many parts, all of one length where that can be: no element is masked then."""
    near = (n for n in range(parts, ceil(NEAR * parts) - 1, -1) if size and size % n == 0)
    return next(near, parts)


def _ways(kernel: Func, axis: str, share: float, least: int) -> Iterator[Way]:
    """The splits of one axis, as it is or with its folds merged into one."""
    size = extents_of(kernel)[axis].const_value
    for parts in dict.fromkeys(_even(size, n) for n in _wanted(share)):
        if parts == 1 or (size is not None and size < least * parts):
            continue
        for made in dict.fromkeys((kernel, merge(kernel))):
            try:
                yield axis, parts, split_fold(made, axis, parts)
            except Declined as declined:
                trace.emit("declined", "split", kernel.name, str(declined))


# --- the pass

def split(module: Module, price: Price, cores: int, rates: Rates = RATES, scans: bool = False,
          least: Least = lambda _: 0.0) -> Module:
    """The module with folds split where one launch would leave cores idle."""
    plans = {k.name: found for k in module.kernels
             if (found := plan(k, price, cores, rates, scans, least))}
    if not plans:
        return module
    for name, one in plans.items():
        trace.emit("fired", "split", name, str(one))
    kernels = [k for old in module.kernels for k in (
        plans[old.name].halves[:2] if old.name in plans else (old,))]
    programs = [p.with_ops([new for op in p.body.ops for new in _launches(op, plans, module)])
                for p in module.programs]
    return Module(tuple(programs), tuple(kernels))


def _launches(op: Op, plans: dict[str, SplitPlan], module: Module) -> Iterator[Op]:
    """A call of a split kernel as its two launches; other ops unchanged."""
    if not isinstance(op, KernelCall) or op.callee not in plans:
        yield op
        return
    first, second, spaces = plans[op.callee].halves
    whole = module.kernel(op.callee)
    given = dict(zip((p.name for p in whole.params), op.args, strict=True))
    results = {v.name: r for v, r in zip(whole.outs, op.results[len(op.updates):], strict=True)}
    states = tuple(Value(f"{op.results[0].name}_{v.name}", t)
                   for v, t in zip(first.outs, spaces, strict=False))
    origins.derive(states, op.results)
    given |= {v.name: state for v, state in zip(first.outs, states, strict=False)}
    stored = [results.pop(v.name) for v in first.outs[len(spaces):]]
    yield KernelCall(first.name, tuple(given[p.name] for p in first.params), (),
                     (*spaces, *(r.type for r in stored)), results=(*states, *stored))
    left = (*op.results[:len(op.updates)], *results.values())
    yield replace(op, callee=second.name, args=tuple(given[p.name] for p in second.params),
                  types=tuple(r.type for r in left), results=left)


# --- mechanism

def split_fold(kernel: Func, axis: str, parts: int) -> Halves:
    """(partial kernel, merge kernel, types of the workspaces that connect them).

    The workspaces are the partial kernel's first outputs and the merge kernel's last parameters.
    Raises Declined where `can_split` refuses.
    """
    if reason := can_split(kernel, axis):
        raise Declined(reason)
    found, start = _folds(kernel, axis), kernel
    scan = found[0] if found[0].prefix else None
    stored = [] if scan else _stored(kernel, found, axis)
    if scan:
        found = [_total(scan)]
        start = kernel.with_ops([found[0] if op is scan else op for op in kernel.body.ops])
    spaces = _workspaces(kernel, found, parts)
    first = _partial(start, found, axis, parts, spaces, stored)
    second = (_continued(kernel, scan, parts, *spaces.values()) if scan
              else _merge(kernel, found, parts, spaces, stored))
    return first, second, tuple(
        t for v in spaces.values() if isinstance(t := v.type, TensorType))


def _stored(kernel: Func, found: Sequence[Fold], axis: str) -> list[Value]:
    """The outputs of which each part computes its own elements: all stores to them run along the
    axis, and read no fold over it."""
    made, stores = made_by(kernel), [op for op in kernel.body.ops if isinstance(op, Store)]
    late = {op.buf for op in stores if axis not in op.nest or op.combine
            or not set(found).isdisjoint(behind(op, made))}
    return [v for v in kernel.outs if v not in late]


def _workspaces(kernel: Func, found: Sequence[Fold], parts: int) -> dict[Value, Value]:
    """For each state of each fold, its buffer [parts, free axes of the fold]: a carrier's narrower
    states are replicated for each point, so that one nest stores all."""
    extents = extents_of(kernel)
    states = [(r, _free(op)) for op in found for r in op.results]
    return {r: Value(f"ws{n}", TensorType(dtype_of(r.type), (
        Expr.of(parts), *(extents[a] for a in axes)))) for n, (r, axes) in enumerate(states)}


def _free(op: Op) -> tuple[str, ...]:
    return tuple(dict.fromkeys(a for r in op.results for a in axes_of(r.type)))


def _partial(kernel: Func, found: Sequence[Fold], axis: str, parts: int,
             spaces: dict[Value, Value], stored: Sequence[Value]) -> Func:
    extents = extents_of(kernel)
    whole = extents[axis]
    chunk = (whole + parts - 1) // parts
    out = Emitter({**extents, axis: chunk}, [v.name for v in (*kernel.params, *spaces.values())])
    part = out.axis("p", Expr.of(parts))
    at = sym(part) * chunk + sym(axis)
    ragged = whole % parts is not ZERO
    copier = _Chunk(out, {axis: at}, {p: p for p in (*kernel.params, *stored)})
    copier.inner, copier.mask = axis, ((whole - 1 - at,) if ragged else ())
    made = made_by(kernel)
    roots = [op for op in kernel.body.ops if op in found or (
        isinstance(op, Store) and op.buf in stored)]
    needed = {id(x) for op in roots for x in (op, *behind(op, made))}
    for op in kernel.body.ops:
        if id(op) in needed:
            copier.copy(op)
    for op in found:
        subs = (sym(part), *(sym(a) for a in _free(op)))
        for state in op.results:
            out.add(Store(spaces[state], subs, copier.values[state]))
    buffers = {op.buf for op in out.ops if isinstance(op, Load)}
    return out.kernel(f"{kernel.name}_part{parts}", [p for p in kernel.params if p in buffers],
                      [*spaces.values(), *stored])


class _Chunk(Copier):
    """Copies with the folded axis over one chunk; elements past the end are neutral."""

    inner: str

    def _moved(self, op: Op) -> Op:
        if not isinstance(op, Fold) or op.axis != self.inner:
            return super()._moved(op)
        first, *rest = (self.values[x] for x in op.args)
        neutral = 0.0 if op.product else op.rule.identities(op.acc)[0]
        return replace(op, args=(self.valid(first, neutral), *rest),
                       extent=self.out.axes[self.inner])

    def valid(self, value: Value, neutral: float | int | bool) -> Value:
        if not self.mask or (neutral == 0 and self.zero(value)):
            return value
        return self.out.where(self.mask, value,
                              self.out.one(Const(neutral, dtype_of(value.type))))


    def zero(self, value: Value) -> bool:
        """Whether a value is 0 past the end because its loads are."""
        match next((op for op in self.out.ops if value in op.results), None):
            case Load() as load:
                return load.fill == 0 and set(self.mask) <= set(load.mask)
            case Cast(x=x):
                return self.zero(x)
            case Map("mul", args):
                return all(map(self.zero, args))
        return False


def _total(scan: Fold) -> Fold:
    """The fold whose result is the last of a scan."""
    axes = tuple(a for a in axes_of(scan.result.type) if a != scan.axis)
    return replace(scan, prefix=False, results=(
        Value(scan.result.name, axes_type(scan.acc, axes)),))


def _continued(kernel: Func, scan: Fold, parts: int, space: Value) -> Func:
    """Each part of a scan, whose first term has the totals of the parts before it."""
    extents, axis, buffers = extents_of(kernel), scan.axis, (*kernel.params, *kernel.outs)
    chunk = (extents[axis] + parts - 1) // parts
    out = Emitter({**extents, axis: chunk}, [v.name for v in (*buffers, space)])
    part, earlier = (out.axis(name, Expr.of(parts)) for name in "pq")
    at = sym(part) * chunk + sym(axis)
    copier = _Chunk(out, {axis: at}, {v: v for v in buffers})
    copier.inner = axis
    copier.mask = (extents[axis] - 1 - at,) if extents[axis] % parts is not ZERO else ()
    for op in kernel.body.ops:
        if op is scan:
            subs = (sym(earlier), *(sym(a) for a in _free(_total(scan))))
            neutral = out.one(Const(scan.rule.identities(scan.acc)[0], scan.acc))
            total = out.where((sym(part) - 1 - sym(earlier),), out.one(Load(space, subs)), neutral)
            before = out.one(Fold(scan.carrier, (total,), earlier, out.axes[earlier], scan.acc))
            term = copier.values[scan.args[0]]
            first = out.one(Map(MONOIDS[scan.carrier].combine, (before, term)))
            copier.values[scan.args[0]] = out.where((-sym(axis),), first, term)
            copier.copy(op)
            copier.values[scan.args[0]] = term
        else:
            copier.copy(op)
    whole = out.kernel(f"{kernel.name}_merge{parts}", [*kernel.params, space], kernel.outs)
    used = {v for op in whole.body.ops for v in op.operands()}
    return replace(whole, params=tuple(p for p in whole.params if p in used))


def _merge(kernel: Func, found: Sequence[Fold], parts: int, spaces: dict[Value, Value],
           stored: Sequence[Value]) -> Func:
    buffers = (*kernel.params, *kernel.outs)
    out = Emitter(extents_of(kernel), [v.name for v in (*buffers, *spaces.values())])
    part = out.axis("p", Expr.of(parts))
    copier = Copier(out, values={v: v for v in buffers})
    for op in kernel.body.ops:
        if not isinstance(op, Fold) or op not in found:
            if not (isinstance(op, Store) and op.buf in stored):
                copier.copy(op)
            continue
        subs = (sym(part), *(sym(a) for a in _free(op)))
        states = [out.one(Load(spaces[r], subs)) for r in op.results]
        before = len(out.ops) - len(states)
        copier.values.update(zip(op.results, _merged(out, op, states, part), strict=True))
        origins.follow_rest((r for x in out.ops[before:] for r in x.results), op.results)
    made = out.kernel(f"{kernel.name}_merge{parts}", [*kernel.params, *spaces.values()],
                      [v for v in kernel.outs if v not in stored])
    used = {v for op in made.body.ops for v in op.operands()}
    return replace(made, params=tuple(p for p in made.params if p in used))


def _merged(out: Emitter, op: Fold, states: list[Value], part: str) -> tuple[Value, ...]:
    """The states of all parts, collapsed by the carrier."""
    def over(monoid: str, x: Value) -> Value:
        return out.one(Fold(monoid, (x,), part, out.axes[part], op.acc))

    return op.rule.collapse(lambda new, _: out.one(new), states, over)
