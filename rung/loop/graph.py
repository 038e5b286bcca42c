"""A program as a graph of pieces: the producer and readers of each value, and a schedule.

In: a program's ops. Kernel calls become `Piece`s, other ops stay; both are nodes, numbered in
program order. `ordered` keeps that order as far as new dependences allow.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from heapq import heappop, heappush
from itertools import chain, pairwise

from rung.core import origins
from rung.core.op import Block, Effect, Func, Op, Value, expressions, walk
from rung.core.types import INDEX, TensorType
from rung.loop.splice import Piece
from rung.program.ir import Check, KernelCall, Module, Write


class Graph:
    """`epoch` counts the writes to parameters before a node; `later` maps each effect to the next.

    `place` is a topological order: a node moved behind another gets that node's place extended.
    """

    def __init__(self, ops: Iterable[Op], kernels: dict[str, Func]):
        self.nodes: dict[int, Op | Piece] = {}
        self.epoch: dict[int, int] = {}
        self.place: dict[int, tuple[int, ...]] = {}
        self.moves = 0
        self.maker: dict[Value, int] = {}
        self.readers: dict[Value, set[int]] = {}
        ops = list(ops)
        self.sizes = {r.name: r for op in ops for r in op.results if r.type is INDEX}
        epoch = 0
        for n, op in enumerate(ops):
            epoch += isinstance(op, Write)
            self.epoch[n], self.place[n] = epoch, (n,)
            self.put(n, _piece(op, kernels) if isinstance(op, KernelCall) else op)
        self.checks = [n for n, node in self.nodes.items() if isinstance(node, Check)]
        self.later = dict(pairwise(n for n, node in self.nodes.items()
                                   if isinstance(node, Op) and node.effect is not Effect.PURE))

    def piece(self, n: int) -> Piece:
        node = self.nodes[n]
        assert isinstance(node, Piece)
        return node

    def put(self, n: int, node: Op | Piece) -> None:
        self.nodes[n] = node
        for v in self.inputs(node):
            self.readers.setdefault(v, set()).add(n)
        for v in node.results:
            self.maker[v] = n

    def drop(self, n: int) -> None:
        for v in self.inputs(self.nodes.pop(n)):
            self.readers[v].discard(n)

    def inputs(self, node: Op | Piece) -> tuple[Value, ...]:
        """The values that a node reads, nested blocks and sizes by name included."""
        if isinstance(node, Piece):
            if not self.sizes:
                return node.args
            ops, read = list(walk(node.func.body)), node.args
            types = [v.type for v in (*node.func.params, *node.func.outs)]
            shapes = [(*t.shape, *(t.strides or ())) for t in types if isinstance(t, TensorType)]
        else:
            ops, shapes = list(walk(Block((), (node,)))), []
            read = tuple(v for op in ops for v in op.operands())
        if not self.sizes:
            return read
        names = {s for e in chain(*shapes, *map(expressions, ops)) for s in e.symbols()}
        return (*read, *(v for s, v in self.sizes.items() if s in names))

    def users(self, n: int) -> list[int]:
        """The readers of `n`'s results, in order."""
        return sorted({r for v in self.nodes[n].results for r in self.readers.get(v, ())})

    def around(self, n: int) -> set[int]:
        """`n` and the producers of its operands."""
        return {n} | {m for v in self.inputs(self.nodes[n])
                      if (m := self.maker.get(v)) is not None and m in self.nodes}

    def between(self, n: int, c: int) -> set[int]:
        """The readers of `n` other than `c`, and the nodes that depend on these by value or effect,
        up to the place of `c`; `c` too if it depends on them."""
        stack, last = [r for r in self.users(n) if r != c], self.place[c]
        seen: set[int] = set()
        while stack:
            at = stack.pop()
            if at not in seen and self.place[at] <= last:
                seen.add(at)
                stack += [*self.users(at), self.later.get(at, at)]
        return seen

    def keep(self, n: int, c: int) -> None:
        """Move the readers of `n` behind `c`, which will compute `n`'s results."""
        self.moves -= 1  # before what moved there earlier, which may read it
        for m in self.between(n, c):
            self.place[m] = (*self.place[c], self.moves, *self.place[m])

    def before_checks(self) -> set[int]:
        """The nodes that some check depends on."""
        found, stack = set[int](), list(self.checks)
        while stack:
            before = self.around(stack.pop()) - found
            found |= before
            stack += before
        return found

    def ordered(self) -> list[Op | Piece]:
        """Every node after its dependences."""
        return [self.nodes[n] for n in sort(self.waits())]

    def waits(self) -> dict[int, set[int]]:
        """The dependences of each node: the producers of its operands; for an update, the old
        value's readers; effects and writes of parameters stay in program order."""
        waits: dict[int, set[int]] = {}
        write: dict[int, int] = {self.epoch[n]: n for n, node in self.nodes.items()
                                 if isinstance(node, Write)}
        since: dict[int, list[int]] = {}
        for n in self.nodes:
            since.setdefault(self.epoch[n], []).append(n)
        for n in sorted(self.nodes):
            node = self.nodes[n]
            waits[n] = {self.maker[v] for v in self.inputs(node) if v in self.maker}
            if isinstance(node, Piece):
                waits[n] |= {r for v in node.updates for r in self.readers[v]}
            epoch = self.epoch[n]  # an earlier write has waited for what is before it
            waits[n].update(since.get(epoch - 1, ()) if write.get(epoch) == n else
                            {write[epoch]} if epoch else ())
            waits[n].discard(n)
        for n, late in self.later.items():
            waits[late].add(n)
        return waits


class Memo:
    """Results for pairs of pieces, memoized by their kernels and the shape of their calls."""

    def __init__(self) -> None:
        self.known: dict[Hashable, str | tuple[Func, list[tuple[int, ...]]]] = {}

    def __call__(self, make: Callable[[], Piece | str], a: Piece, b: Piece, *rest: Hashable
                 ) -> Piece | str:
        """`make()`, a piece or the reason against one, which may depend on the kernels of `a` and
        `b`, the values they share, and `rest` only."""
        if origins.following():  # what a kernel computes is of one call
            return make()
        calls = (a.args, a.results, a.updates, b.args, b.results, b.updates)
        values = list(dict.fromkeys(chain(*calls)))
        number = {v: n for n, v in enumerate(values)}
        key = (a.func, b.func, rest, *(tuple(number[v] for v in part) for part in calls))
        if key not in self.known:
            made = make()
            self.known[key] = made if isinstance(made, str) else (made.func, [
                tuple(number[v] for v in part) for part in (made.args, made.results, made.updates)])
        found = self.known[key]
        if isinstance(found, str):
            return found
        args, results, updates = (tuple(values[n] for n in part) for part in found[1])
        return Piece(found[0], args, results, updates)


def sort(waits: dict[int, set[int]]) -> list[int]:
    """Topological order; independent keys in rising order."""
    users: dict[int, list[int]] = {}
    for n, before in waits.items():
        for b in before:
            users.setdefault(b, []).append(n)
    left = {n: len(before) for n, before in waits.items()}
    ready = sorted(n for n, number in left.items() if not number)
    order: list[int] = []
    while ready:
        n = heappop(ready)
        order.append(n)
        for user in users.get(n, ()):
            left[user] -= 1
            if not left[user]:
                heappush(ready, user)
    assert len(order) == len(waits), "a cycle"
    return order


def called(programs: Iterable[Func], nodes: Iterable[Iterable[Op | Piece]]) -> Module:
    """The programs over new nodes, whose pieces become calls of deduplicated kernels."""
    made: dict[Func, Func] = {}

    def call(node: Op | Piece) -> Op:
        if not isinstance(node, Piece):
            return node
        if node.func not in made:
            made[node.func] = replace(node.func, name=f"k{len(made)}")
        name, types = made[node.func].name, tuple(v.type for v in node.results)
        return KernelCall(name, node.args, node.updates, types, results=node.results)

    changed = [p.with_ops([call(node) for node in own])
               for p, own in zip(programs, nodes, strict=True)]
    return Module(tuple(changed), tuple(made.values()))


def _piece(op: KernelCall, kernels: dict[str, Func]) -> Piece:
    return Piece(kernels[op.callee], op.args, op.results, op.updates)
