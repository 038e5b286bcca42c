"""Sibling fusion: kernels that read the same values as one kernel with several outputs.

    q = kernel mm(x, wq)      ->    q, k = kernel mm(x, wq, wk)
    k = kernel mm(x, wk)            # q[256*r+c] and k[c] in one loop over c; x is read once

Axes are one where both kernels read a value along them; what is left of the outputs' axes is
matched from the innermost on, the longer of two being split. Runs after `fuse`, which puts a norm
into each projection that reads it: the joined kernel computes it once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, reduce
from itertools import islice
from math import inf
from operator import or_

from rung.core import trace
from rung.core.expr import ONE, ZERO, Expr, sym
from rung.core.op import Func, Names, Op, Value
from rung.core.ops import Sub
from rung.core.rewrite import renamed
from rung.loop.emit import Copier, Declined, Emitter
from rung.loop.fuse import MAX_AXES, Like, Price, Reason, Settle, Settled
from rung.loop.graph import Graph, Memo, called, sort
from rung.loop.ir import Load, Store, contractions, extents_of, folds, reductions
from rung.loop.normalize import by_stride
from rung.loop.splice import Piece
from rung.program.ir import Check, Module

Digit = tuple[str, str, Expr]  # its axis in the one kernel and in the other ("": none), its extent
MAX_PARTNERS = 8  # readers of the same values that one kernel is tried with
MAX_CONTRACTIONS = 4
MAX_BUFFERS = 32  # about what a core fetches ahead of at once; pricing takes time with each more


# --- legality

def can_join(a: Piece, b: Piece) -> Reason | None:
    """Why `a` and `b`, neither of which needs the other, must not be one kernel; None if they may,
    as far as the two tell apart. What they look like together is judged by `can_be`."""
    if set(a.updates) & {*b.args, *b.updates} or set(b.updates) & set(a.args):
        return "one updates what the other reads"
    if bool(contractions(a.func)) != bool(contractions(b.func)):
        return "only one of them is a contraction"
    if len({*a.args, *b.args}) + len(a.func.outs) + len(b.func.outs) > MAX_BUFFERS:
        return f"more than {MAX_BUFFERS} buffers"
    return None


def can_be(joined: Func) -> Reason | None:
    """Why no kernel may look like `joined`: its parts would have few loops in common."""
    products = contractions(joined)
    if len(extents_of(joined)) > MAX_AXES:
        return f"more than {MAX_AXES} axes"
    if len(products) > MAX_CONTRACTIONS:
        return f"more than {MAX_CONTRACTIONS} contractions"
    if len({op.axis for op in products}) > 1:
        return "contractions over different axes"
    folded = {op.axis for op in folds(joined)}
    nests = [set(op.nest) for op in joined.body.ops if isinstance(op, Store)]
    if any(nests) and not set.intersection(*nests) - folded and not _one_nest(joined):
        return "the outputs have no loop in common"
    return None


def _one_nest(func: Func) -> bool:
    """Whether some store runs over all axes, so that folds over any of them can share its loops:
    sums of rows end within one step, those of columns wait in an array."""
    return any(set(op.nest) == set(extents_of(func)) for op in func.body.ops
               if isinstance(op, Store))


# --- mechanism

@dataclass(frozen=True)
class Aligned:
    """What the axes of two kernels become in the joined one, and the extents of its axes."""

    one: dict[str, Sub]
    two: dict[str, Sub]
    sizes: dict[str, Expr]


def align(a: Piece, b: Piece) -> Aligned:
    """The axes of both kernels under common names; Declined where what they read or write has none
    in common."""
    mine, other = extents_of(a.func), extents_of(b.func)
    same = _read_alike(a, b)
    if not same:
        raise Declined("nothing is read along a common axis")
    left = [(x, mine[x]) for x in _free(a.func) if x not in same]
    right = [(y, other[y]) for y in _free(b.func) if y not in same.values()]
    digits: list[Digit] = [(x, y, mine[x]) for x, y in same.items()]
    digits += _digits(left, right)
    digits += [(x, "", n) for x, n in mine.items() if all(x != d[0] for d in digits)]
    digits += [("", y, n) for y, n in other.items() if all(y != d[1] for d in digits)]
    names = Names()
    named = [(names(x or y), x, y, n) for x, y, n in digits]
    return Aligned(_numbers((x, name, n) for name, x, _, n in named),
                   _numbers((y, name, n) for name, _, y, n in named),
                   {name: n for name, _, _, n in named})


def _read_alike(a: Piece, b: Piece) -> dict[str, str]:
    """Axes of `a` to axes of `b` of the same extent, along which both read a value."""
    same: dict[str, str] = {}
    mine, other, params = extents_of(a.func), extents_of(b.func), b.params
    for value, buffer in a.params.items():
        for one in _loads(a.func, buffer):
            for two in _loads(b.func, params.get(value)):
                pairs = {str(x): str(y) for x, y in zip(one.subs, two.subs, strict=True)
                         if str(x) in mine and mine[str(x)] is other.get(str(y))}
                new = {**same, **pairs}
                if {**new, **same} == new and len(set(new.values())) == len(new):
                    same = new
    return same


def _loads(func: Func, buffer: Value | None) -> list[Load]:
    return [op for op in func.body.ops if isinstance(op, Load) and op.buf is buffer]


def _free(func: Func) -> list[str]:
    """Axes of the largest store that no fold runs over, outermost first."""
    folded = {op.axis for op in reductions(func)}
    stores = [op for op in func.body.ops if isinstance(op, Store)]
    store = max(stores, key=lambda op: len(op.nest))
    axes = [a for s in store.subs if isinstance(s, Expr) for a in by_stride(s)]
    return [a for a in dict.fromkeys((*axes, *store.nest)) if a not in folded]


def _digits(one: list[tuple[str, Expr]], two: list[tuple[str, Expr]]) -> Iterator[Digit]:
    """The common digits of two mixed-radix numbers, innermost first, and what one has beyond."""
    while one and two:
        (x, n), (y, m) = one.pop(), two.pop()
        common = n if (m % n) is ZERO else m
        if (n % common) is not ZERO:
            raise Declined(f"neither of the extents {n} and {m} divides the other")
        yield x, y, common
        one += [(x, n // common)] if n is not common else []
        two += [(y, m // common)] if m is not common else []
    yield from ((x, "", n) for x, n in reversed(one))
    yield from (("", y, m) for y, m in reversed(two))


def _numbers(digits: Iterator[tuple[str, str, Expr]]) -> dict[str, Sub]:
    """Each axis as the number that its digits (axis, name, extent), innermost first, stand for."""
    numbers: dict[str, Expr] = {}
    steps: dict[str, Expr] = {}
    for axis, name, extent in digits:
        step = steps.get(axis, ONE)
        numbers[axis] = sym(name) * step + numbers.get(axis, ZERO)
        steps[axis] = step * extent
    return dict(numbers)


def join(a: Piece, b: Piece) -> Piece:
    """Both kernels as one, of the outputs of both. Raises Declined with the reason."""
    axes = align(a, b)
    out = Emitter(axes.sizes)
    params: dict[Value, Value] = {}
    outs: dict[Value, Value] = {}
    for piece, table in ((a, axes.one), (b, axes.two)):
        values: dict[Value, Value] = {}
        for found, given in ((params, piece.params), (outs, piece.outs)):
            for value, buffer in given.items():
                if value not in found:
                    found[value] = renamed(buffer, out.names(buffer.name))
                values[buffer] = found[value]
        Copier(out, table, values).ops(piece.func.body.ops)
    func = out.kernel(a.func.name, params.values(), outs.values())
    states = (*a.results[:len(a.updates)], *b.results[:len(b.updates)])
    return Piece(func, tuple(params), (*states, *outs), (*a.updates, *b.updates))


# --- policy

class _Siblings(Graph):
    """Joins each kernel with the readers of what it reads, where the modelled time falls."""

    def __init__(self, ops: Iterable[Op], kernels: dict[str, Func], price: Price, settle: Settle,
                 like: Like, memo: Memo, settled: Settled):
        """Find what each node needs, as a set of bits, and what some check needs."""
        super().__init__(ops, kernels)
        self.price, self.settle, self.memo = price, settle, memo
        self.like, self.settled = like, settled
        waits = self.waits()
        self.before: dict[int, int] = {}
        for n in sort(waits):
            self.before[n] = reduce(or_, (self.before[m] for m in waits[n]), 1 << n)
        self.checked = reduce(or_, (self.before[n] for n, node in self.nodes.items()
                                    if isinstance(node, Check)), 0)

    def run(self) -> list[Op | Piece]:
        for n in sorted(self.nodes):
            while n in self.nodes and self.grow(n):
                pass
        return self.ordered()

    def grow(self, n: int) -> bool:
        """Join `n` with as many later kernels as pay; gives whether there were any."""
        group = [n]
        grown: list[tuple[list[int], Piece]] = []
        for c in islice(self.partners(n), MAX_PARTNERS):
            joined = self.joined(group, grown[-1][1] if grown else self.piece(n), c)
            if joined is not None:
                group = [*group, c]
                grown.append((group, joined))
        for nodes, piece in reversed(grown):
            if self.pays(nodes, piece):
                self.replace(nodes, piece)
                return True
        return False

    def replace(self, group: list[int], piece: Piece) -> None:
        """Put `piece` in place of a group: what needs one of them needs all that they need."""
        for c in group:
            self.drop(c)
        self.put(group[-1], piece)
        members = reduce(or_, (1 << n for n in group))
        needed = reduce(or_, (self.before[n] for n in group))
        for n in self.nodes:
            if self.before[n] & members:
                self.before[n] |= needed
        if self.checked & members:
            self.checked |= needed

    def partners(self, n: int) -> list[int]:
        """Later kernels that read what `n` reads."""
        node = self.nodes[n]
        found = {c for v in node.args for c in self.readers[v]} if isinstance(node, Piece) else ()
        return sorted(c for c in found if c > n and isinstance(self.nodes[c], Piece))

    def joined(self, group: list[int], a: Piece, c: int) -> Piece | None:
        """The kernel `a` of a group and `c` as one where that may be and bounds gain by it; None
        with the reason in the trace."""
        b = self.piece(c)
        found = self.apart(group, c) or can_join(a, b) or self.memo(
            lambda: self.judged(a, b), a, b)
        if isinstance(found, str):
            trace.emit("declined", "siblings", f"{a.func.name} beside {b.func.name}", found)
            return None
        return found

    def apart(self, group: list[int], c: int) -> Reason | None:
        """Why the program has `c` at another time than the group."""
        for n in group:
            if self.epoch[n] != self.epoch[c]:
                return "a parameter is written between the two"
            if self.before[n] >> c & 1 or self.before[c] >> n & 1:
                return "one needs the other"
            if self.checked >> n & 1 or self.checked >> c & 1:
                return "a check waits for one of them"
        return None

    def judged(self, a: Piece, b: Piece) -> Piece | Reason:
        try:
            piece = join(a, b)
        except Declined as declined:
            return str(declined)
        reason = can_be(piece.func)
        gain = self.price(a.func) + self.price(b.func) - self.price(piece.func)
        return reason or (piece if gain > 0 else "the modelled time would not fall")

    def pays(self, nodes: list[int], piece: Piece) -> bool:
        """Whether the kernel is cheaper than those of the nodes, all as they will be mapped."""
        parts = [self.piece(n).func for n in nodes]
        key = tuple(map(self.like, (piece.func, *parts)))
        if key not in self.settled:
            after, *apart = (self.settle(func) for func in (piece.func, *parts))
            self.settled[key] = (sum(x for x in apart if x is not None),
                                 inf if after is None else after)
        before, after = self.settled[key]
        pays = after < before
        trace.emit("fired" if pays else "declined", "siblings",
                   " beside ".join(func.name for func in parts),
                   f"{before * 1e6:.2f} us apart, {after * 1e6:.2f} us together")
        return pays


# --- the pass

def join_siblings(module: Module, price: Price, settle: Settle,
                  like: Like = lambda func: func) -> Module:
    """The module with kernels that read the same values joined where that lowers the price."""
    kernels = {k.name: k for k in module.kernels}
    price, like, memo = cache(price), cache(like), Memo()
    settled: Settled = {}
    return called(module.programs, [
        _Siblings(p.body.ops, kernels, price, settle, like, memo, settled).run()
        for p in module.programs])
