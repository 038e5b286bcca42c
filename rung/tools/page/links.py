"""What each value of a compilation computes: the nodes of the Torch graphs that it comes from.

Two lines of any rungs are counterparts if they have a node in common. The nodes are the origins
that values carry; a value without any is on the way to what reads it, else made of what it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rung.core import origins
from rung.core.op import Func, Op, Value, walk
from rung.core.ops import Const, IndexValue, StoreBase
from rung.core.origins import Origin
from rung.core.types import ArrayType
from rung.program.ir import Apply, KernelCall, Module

Nodes = frozenset[int]
NONE: Nodes = frozenset()


@dataclass
class Links:
    """The nodes of all graphs as numbers; `values` is what is known of the values of functions."""

    graph: int = 0  # that of the values which are asked for
    values: dict[Value, Nodes] = field(default_factory=dict)
    numbers: dict[tuple[int, str], int] = field(default_factory=dict)
    lines: dict[str, set[int]] = field(default_factory=dict)  # `file:line` of the user's

    def number(self, node: str, line: str = "") -> int:
        """The number of a node of this graph."""
        found = self.numbers.setdefault((self.graph, node), len(self.numbers))
        if line:
            self.lines.setdefault(line, set()).add(found)
        return found

    def numbered(self, found: Iterable[Origin]) -> Nodes:
        return frozenset(self.number(o.node, o.line) for o in found)

    def note(self, module: Module) -> None:
        """Learn the values of a module, those of a layer in each place where it is applied."""
        copies: dict[str, list[Mapping[Origin, Origin]]] = {}
        for program in module.programs:
            for op in program.body.ops:
                if isinstance(op, Apply):
                    copies.setdefault(op.callee, []).append(origins.copies(op.results))
        for program in module.programs:
            self.note_func(program, copies.get(program.name, ()))
        calls = [op for p in module.programs for op in p.body.ops if isinstance(op, KernelCall)]
        for kernel in module.kernels:
            self.note_func(kernel, rest=NONE.union(*(
                self.of_op(op) for op in calls if op.callee == kernel.name)))

    def note_func(self, func: Func, copies: Iterable[Mapping[Origin, Origin]] = (),
                  rest: Nodes = NONE) -> None:
        """Learn the values of a function; `rest` is for those of which nothing is known."""
        ops = list(walk(func.body))
        for op in ops:
            for r in op.results:
                own = origins.with_absorbed(r)
                if isinstance(op, Apply):
                    own = tuple(origins.copies([r]).values()) or own
                self.values[r] = self.numbered(
                    x for o in own for x in (o, *(c.get(o, o) for c in copies)))
        for _ in range(2):  # arrays are read after what is kept in them is known
            for op in reversed(ops):
                self._pass_on(op.operands(), self.of_op(op))
        for op in ops:
            self._pass_on(op.results, self._union(op.operands()) or rest)

    def _pass_on(self, values: Iterable[Value], nodes: Nodes) -> None:
        """Give nodes to the values that have none of their own; arrays take those of all."""
        for v in values:
            if not self.values.get(v, NONE) or isinstance(v.type, ArrayType):
                self.values[v] = self.values.get(v, NONE) | nodes

    def _union(self, values: Iterable[Value]) -> Nodes:
        return NONE.union(*(self.values.get(v, NONE) for v in values))

    def of_op(self, op: Op) -> Nodes:
        """The nodes that one op computes."""
        if op.results:
            return self._union(op.results)
        return self._union([op.value] if isinstance(op, StoreBase) else op.operands())

    def of_ops(self, ops: Iterable[Op]) -> Nodes:
        """Those of ops that stand in one line; numbers count where there is nothing else."""
        ops = list(ops)
        main = [op for op in ops if not isinstance(op, Const | IndexValue)]
        return NONE.union(*map(self.of_op, main or ops))

    def of_values(self, values: Iterable[Value]) -> Nodes:
        """Those of the values that a line of source computes."""
        return self._union(values)
