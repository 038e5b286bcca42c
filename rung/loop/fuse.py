"""Fusion: which kernels become one. Legality, policy (prices) and mechanism are apart.

    t = kernel add(x, b)                 ->    y = kernel relu(x, b)
    y = kernel relu(t)                           # y[i,j] = relu(x[i,j] + b[j])

Every producer meets its readers: it goes *into* a lone reader, is *kept* as a further output of one
of several readers, or is *sunk* into all of them, if the modelled time falls. Cheap, certain steps
go first: what follows a contraction, chains of maps, what follows a fold; the rest goes by gain.
Reads a module of one kernel per op (`to_loop`); gives the same programs over fewer kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from itertools import count
from math import inf, prod
from typing import TypeAlias

from rung.core import origins, trace
from rung.core.cost import behind, known
from rung.core.expr import ONE, Expr
from rung.core.op import Func, Op, Value, made_by
from rung.core.ops import Const
from rung.core.types import axes_of
from rung.loop.carriers import PEAK
from rung.loop.emit import Declined
from rung.loop.graph import Graph, Memo, called
from rung.loop.ir import (
    Fold,
    Load,
    Store,
    contractions,
    extents_of,
    folds,
    reductions,
)
from rung.loop.normalize import divisions, expressions
from rung.loop.splice import Piece, splice
from rung.program.ir import Module

Reason: TypeAlias = str
Price = Callable[[Func], float]  # seconds of a kernel, at least
Settle = Callable[[Func], float | None]  # seconds as it will be mapped; None: it has no mapping
Like = Callable[[Func], Hashable]  # equal for kernels whose prices are decided alike
Settled = dict[Hashable, tuple[float, ...]]  # seconds before and after steps, by what they are like
MAX_AXES, MAX_CONTRACTIONS, MAX_READERS = 7, 2, 3
MAX_OPS = 128  # of a kernel: a longer one saves little traffic, and growing it takes square time
MAX_DIVISIONS = 16  # of an index: simplifying a longer one takes exponential time
TOO_LONG = f"more than {MAX_OPS} ops"


# --- legality

def can_fuse(producer: Piece, consumer: Piece, epochs: tuple[int, int] = (0, 0)) -> Reason | None:
    """Why `producer` must not be computed inside `consumer`; None if it may, as far as the two
    tell apart. What the fused kernel looks like is judged by `can_be`."""
    shared = set(producer.results)
    if _least(producer.func) + _least(consumer.func) > MAX_OPS:
        return TOO_LONG
    if epochs[0] != epochs[1]:
        return "a parameter is written between the two"
    if producer.updates:
        return "the producer updates a buffer in place"
    if shared & set(consumer.updates):
        return "the consumer updates the value in place"
    if set(producer.args) & set(consumer.updates):
        return "the producer reads what the consumer updates"
    if contractions(producer.func) and _reads(consumer, shared) > 1:
        return "the contraction would be computed twice"
    return None


def can_be(fused: Func) -> Reason | None:
    """Why no kernel may look like `fused`: too many axes or contractions, or a contraction's
    result folded again (unless by the softmax of an attention)."""
    if len(fused.body.ops) > MAX_OPS:
        return TOO_LONG
    if len(extents_of(fused)) > MAX_AXES:
        return f"more than {MAX_AXES} axes"
    if any(len(list(divisions(e))) > MAX_DIVISIONS for e in expressions(fused.body.ops)):
        return f"an index of more than {MAX_DIVISIONS} divisions"
    scans = [op for op in folds(fused) if op.prefix]
    if len({op.axis for op in scans}) > 1:
        return "scans along two axes"
    if any(_spreads(scan, fused) for scan in scans):
        return "a scan would run again for each step of another axis"
    products = contractions(fused)
    if products and any(op.combine for op in fused.body.ops if isinstance(op, Store)):
        return "a contraction's result is added up where data say"
    if len(products) > MAX_CONTRACTIONS:
        return f"more than {MAX_CONTRACTIONS} contractions"
    made = made_by(fused)
    before = {op: [x for x in behind(op, made) if isinstance(x, Fold)] for op in folds(fused)}
    for op, inner in before.items():
        again = [c for c in inner if c.product and op.axis in axes_of(c.result.type)]
        if again and not _is_nested_sum(op, again, fused) and not _attends(op, again, before):
            return "a contraction's result is folded again"
    apart = not any(c.product for op in products for c in before[op])
    if len(products) == 2 and apart and not _siblings(*products):
        return "two contractions of different loops"
    return None


def _spreads(scan: Fold, fused: Func) -> bool:
    """Whether something that comes of a scan varies over an axis that the scan does not have."""
    known, own = {scan.result}, set(axes_of(scan.result.type))
    for op in fused.body.ops:
        if known.intersection(op.operands()):
            known.update(op.results)
            if set(op.nest) - own:
                return True
    return False


def _attends(fold: Fold, again: list[Fold], before: dict[Fold, list[Fold]]) -> bool:
    """Whether a contraction over this fold's axis weighs by the softmax of those in `again`:
    softmax(q k) v. A product that makes v would be computed again for each row of q."""
    last = [c for c in before if c.product and c.axis == fold.axis
            and (c is fold or fold in before[c])]
    return any(all(any(c in before[f] for f in _softmax(p, before)) for c in again) for p in last)


def _softmax(last: Fold, before: dict[Fold, list[Fold]]) -> list[Fold]:
    """The folds of a softmax by which a contraction over their axis weighs."""
    return [f for f in before[last] if f.axis == last.axis and not f.product and not f.prefix
            and f.rule.monoids[0] == PEAK]


def _is_nested_sum(fold: Fold, again: list[Fold], fused: Func) -> bool:
    """The further axes of one contraction over several: a sum of sums that nothing else reads."""
    return fold.plain and [c.carrier for c in again] == [fold.carrier] and [fold] == [
        op for op in fused.body.ops if again[0].result in op.operands()]


def _siblings(a: Fold, b: Fold) -> bool:
    return set(a.nest) == set(b.nest) and a.axis == b.axis


def _least(func: Func) -> int:
    """How many of its ops a kernel brings into any other: what both could have is left out."""
    return sum(not isinstance(op, Load | Store | Const) for op in func.body.ops)


def _reads(piece: Piece, values: set[Value]) -> int:
    """How many different loads of `values` there are in a kernel."""
    buffers = {p for v, p in piece.params.items() if v in values}
    return sum(isinstance(op, Load) and op.buf in buffers for op in piece.func.body.ops)


def work(func: Func) -> int:
    """Points of the contractions' nests, which fusion must not grow; a symbol counts as 512."""
    extents = extents_of(func)
    nests = [op.nest for op in contractions(func)]
    sizes = [prod((extents[a] for a in nest), start=Expr.of(1)) for nest in nests]
    return sum(known(n, {}) for n in sizes)


def fits_kept(fused: Func, kept: Iterable[Value]) -> Reason | None:
    """Whether the stores of the kept outputs lie in the same parallel loops as the others."""
    stores = [op for op in fused.body.ops if isinstance(op, Store)]
    folded = {op.axis for op in folds(fused)}
    for op in stores:
        for other in stores:
            if op.buf in kept and not set(other.nest) - folded <= set(op.nest):
                return "the kept value would be stored again by every parallel step"
    return None


# --- policy

@dataclass(frozen=True)
class Plan:
    """One step: `producer` goes into `consumers`, whose new kernels are `fused`."""

    mode: str  # into | keep | sink
    producer: int
    consumers: tuple[int, ...]
    olds: tuple[Piece, ...]  # the producer and the consumers that this was made for
    fused: tuple[Piece, ...]
    gain: float

    def __str__(self) -> str:
        return f"{self.olds[0].func.name} {self.mode} {self.olds[1].func.name}"


def rank_of(producer: Func, consumer: Func) -> int:
    """0: contraction into map, 1: map into map, 2: fold into map, 3: the rest, by gain."""
    if folds(consumer):
        return 3
    if contractions(producer):
        return 0
    return 2 if reductions(producer) else 1


class _Fusion(Graph):
    """The queue of steps over the graph of one program.

    Entries are (rank, -gain, node): those of rank 0 to 2 are tried in the program's order; the
    others are priced when nothing else is left (rank 3) and then done by gain (rank 4).
    """

    def __init__(self, program: Func, kernels: dict[str, Func], price: Price, settle: Settle,
                 like: Like, memo: Memo, settled: Settled, rows: bool):
        super().__init__(program.body.ops, kernels)
        self.rows, self.like, self.settled = rows, like, settled
        self.name, self.price, self.settle, self.memo = program.name, price, settle, memo
        self.serial = count()
        self.heap: list[tuple[int, float, int, int, Plan | None]] = []
        self.tried: dict[tuple[object, ...], Piece | None] = {}

    def run(self) -> list[Op | Piece]:
        for n in list(self.nodes):
            self.queue(n)
        while self.heap:
            rank, _, n, _, plan = heappop(self.heap)
            if plan is None:
                self.look(rank, n)
            elif not self.current(plan):
                continue
            elif plan.mode == "keep" and self.late(n, *plan.consumers):
                self.push(3, n)  # other steps have come between the two
            elif self.pays(plan):
                self.apply(plan)
        return self.ordered()

    def push(self, rank: int, n: int, plan: Plan | None = None) -> None:
        heappush(self.heap, (rank, -plan.gain if plan else 0.0, n, next(self.serial), plan))

    def queue(self, n: int) -> None:
        """Have `n` looked at, as a producer, at its rank."""
        producer = self.nodes[n]
        if not isinstance(producer, Piece):
            return
        users = self.users(n)
        consumer = self.nodes[users[0]] if users else None
        if len(users) == 1 and isinstance(consumer, Piece):
            rank = rank_of(producer.func, consumer.func)
            if rank < 3:
                self.push(rank, n)
        if any(isinstance(self.nodes[u], Piece) for u in users):
            self.push(3, n)

    def look(self, rank: int, n: int) -> None:
        """Do a step of rank 0 to 2 at once; price the steps of rank 3 and queue the best."""
        if n not in self.nodes:
            return
        users = self.users(n)
        inside = [u for u in users if isinstance(self.nodes[u], Piece)]
        if not inside or (rank < 3 and len(users) > 1):
            return
        found = self.steps(n, users, inside)
        plan = max(found, key=lambda p: p.gain, default=None)
        if plan is None or plan.gain <= 0:
            return
        if rank == 3:
            self.push(4, n, plan)
        elif self.pays(plan):
            self.apply(plan)

    def steps(self, n: int, users: list[int], inside: list[int]) -> list[Plan]:
        if len(users) == 1:
            return self.plan("into", n, inside)
        producer = self.piece(n)
        few = len(users) <= MAX_READERS and not contractions(producer.func)
        found = self.plan("sink", n, inside) if few and inside == users else []
        if not any(p.gain > 0 for p in found):
            for c in inside:
                found += self.plan("keep", n, [c])
        return found

    def current(self, plan: Plan) -> bool:
        """Whether everything that the plan was made from is still as it was."""
        return all(self.nodes.get(n) is p for n, p in zip(
            (plan.producer, *plan.consumers), plan.olds, strict=True))

    def plan(self, mode: str, n: int, consumers: list[int]) -> list[Plan]:
        """The step with its gain; nothing when it is not legal."""
        producer = self.piece(n)
        olds = [self.piece(c) for c in consumers]
        before, after = self.price(producer.func), 0.0
        fused: list[Piece] = []
        for c, consumer in zip(consumers, olds, strict=True):
            piece = self.fused(mode, n, c)
            if piece is None:
                return []
            fused.append(piece)
            before += self.price(consumer.func)
            after += self.price(piece.func)
        if trace.active():
            trace.emit("priced", "fuse", f"{producer.func.name} {mode} {olds[0].func.name}",
                       f"{before * 1e6:.2f} -> {after * 1e6:.2f} us")
        return [Plan(mode, n, tuple(consumers), (producer, *olds), tuple(fused), before - after)]

    def pays(self, plan: Plan) -> bool:
        """Whether a step around a fold still gains as its kernels will be mapped. Bounds know no
        schedule: under one, a fold may run again in each of its readers, or its input be read
        across the order of memory, and a contraction alone may be a library's. Asked once for
        all steps between kernels of the same ops and magnitudes."""
        if not any(folds(p.func) for p in plan.olds):
            return True
        key = (len(plan.olds), *(self.like(p.func) for p in (*plan.olds, *plan.fused)))
        if key not in self.settled:
            self.settled[key] = tuple(sum(inf if x is None else x for x in map(self.settle, (
                p.func for p in pieces))) for pieces in (plan.olds, plan.fused))
        before, after = self.settled[key]
        if after > before:
            trace.emit("declined", "fuse", str(plan), f"{before * 1e6:.2f} us apart, "
                       f"{after * 1e6:.2f} us together, as mapped",
                       values=plan.olds[0].results, program=self.name)
        return after <= before

    def fused(self, mode: str, n: int, c: int) -> Piece | None:
        """The fused piece, or None with the reason in the trace."""
        producer, consumer = self.piece(n), self.piece(c)
        others = (v for v in producer.results if self.readers.get(v, set()) - {c})
        kept = frozenset(others) if mode == "keep" else frozenset()
        key = (producer, consumer, kept)
        if key not in self.tried:
            epochs = self.epoch[n], self.epoch[c]
            found = self.memo(lambda: judged(producer, consumer, kept, epochs, self.rows),
                              producer, consumer, tuple(v in kept for v in producer.results),
                              epochs[0] == epochs[1])
            self.tried[key] = found if isinstance(found, Piece) else None
            if isinstance(found, str):
                trace.emit("declined", "fuse", f"{producer.func.name} {mode} {consumer.func.name}",
                           found, values=producer.results, program=self.name)
        if not kept or self.tried[key] is None:
            return self.tried[key]
        return None if self.late(n, c) else self.tried[key]

    def late(self, n: int, c: int) -> bool:
        """Whether `n`, kept by `c`, would come after a reader, or `c` before what guards it."""
        return c in self.between(n, c) or n in self.before_checks()

    def apply(self, plan: Plan) -> None:
        trace.emit("fired", "fuse", str(plan), f"gains {plan.gain * 1e6:.2f} us",
                   values=() if plan.mode == "keep" else plan.olds[0].results)
        if plan.mode == "keep":
            self.keep(plan.producer, *plan.consumers)
        self.drop(plan.producer)
        for c, old, piece in zip(plan.consumers, plan.olds[1:], plan.fused, strict=True):
            for result in old.results:
                origins.derive([result], old.behind(result).intersection(plan.olds[0].results))
            self.drop(c)
            self.put(c, piece)
        for n in sorted({m for c in plan.consumers for m in self.around(c)}):
            self.queue(n)


def judged(producer: Piece, consumer: Piece, kept: frozenset[Value], epochs: tuple[int, int],
           rows: bool = False) -> Piece | Reason:
    """The fused piece, or why there is none."""
    reason = can_fuse(producer, consumer, epochs)
    if reason is not None:
        return reason
    try:
        piece = splice(producer, consumer, kept, rows)
    except Declined as declined:
        return str(declined)
    stored = [b for v, b in piece.outs.items() if v in kept]
    return (can_be(piece.func) or fits_kept(piece.func, stored)
            or _grown(piece.func, producer.func, consumer.func)
            or _fewer(piece.func, consumer.func) or piece)


def _grown(fused: Func, producer: Func, consumer: Func) -> Reason | None:
    """A contraction whose nest has more points than before is computed again and again."""
    more = work(fused) > work(producer) + work(consumer)
    return "a contraction would be repeated" if more else None


def _fewer(fused: Func, consumer: Func) -> Reason | None:
    """An update adds as often as it did, though its subscripts may vary along fewer axes."""
    before, after = ([prod((extents_of(func)[a] for a in op.nest), start=ONE)
                      for op in func.body.ops if isinstance(op, Store) and op.combine]
                     for func in (consumer, fused))
    return None if before == after else "updates of one element would be one"


# --- the pass

def fuse(module: Module, price: Price, settle: Settle, rows: bool = False,
         like: Like = lambda func: func) -> Module:
    """The module with kernels fused wherever that lowers the sum of prices; with `rows` also those
    that read one element of each row that another folds, such as the logit of a target."""
    kernels = {k.name: k for k in module.kernels}
    price, like, memo = cache(price), cache(like), Memo()
    settled: Settled = {}
    return called(module.programs, [
        _Fusion(program, kernels, price, settle, like, memo, settled, rows).run()
        for program in module.programs])
