"""The verifier of every rung.

In: a function and its vocabulary. Out: nothing, or a VerifyError that draws the function:

    after fuse: the value varies over j, the subscripts do not
    kernel f(x: f32[4,4]) -> y: f32[4]
      y[i] = x[i,j]
      ^^^^^^^^^^^^^
    from aten.copy.default, node copy_3, model.py:12

Ops are immutable, so an op's own rules are checked once; what depends on its surroundings (names,
order, the end of a block) is one sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from weakref import WeakSet

from rung.core import origins
from rung.core.errors import VerifyError
from rung.core.op import RESERVED, Block, Func, Op, Value, Vocabulary
from rung.core.text import Printer

verified: WeakSet[Op] = WeakSet()
_LAST = ("yield", "return")  # ops that end a block: of an op, of a function


def verify(func: Func, vocabulary: Vocabulary, rules: Callable[[Func], None] | None = None,
           where: str = "") -> None:
    """Raise VerifyError unless `func` keeps all rules; `rules` are its rung's own.

    `where` names the pass that made the function.
    """
    try:
        if func.kind != vocabulary.kind:
            raise VerifyError(f"a {func.kind} where a {vocabulary.kind} is meant")
        _Sweep(vocabulary).func(func)
        if rules is not None:
            rules(func)
    except VerifyError as error:
        raise VerifyError(_report(func, error, where), error.op) from None


class _Sweep:
    """One walk over a function, in order."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.names: set[str] = set()
        self.scope: set[Value] = set()

    def func(self, func: Func) -> None:
        self.define((*func.params, *func.outs), None)
        self.block(func.body, None)

    def define(self, values: Iterable[Value], op: Op | None) -> None:
        for value in values:
            if value.name in self.names:
                raise VerifyError(f"two values are called {value.name}", op)
            if value.name in RESERVED:
                raise VerifyError(f"{value.name} is a reserved word", op)
            self.names.add(value.name)
            self.scope.add(value)

    def block(self, block: Block, owner: Op | None) -> None:
        self.define(block.args, owner)
        for op in block.ops:
            self.op(op)
            if op.keyword in _LAST and (op is not block.last or (op.keyword == "return") != (
                    owner is None)):
                raise VerifyError(f"{op.keyword} ends {_ENDS[op.keyword]}", op)
        self.scope.difference_update(block.args, *(op.results for op in block.ops))

    def op(self, op: Op) -> None:
        if type(op) not in self.vocabulary.ops:
            raise VerifyError(f"a {self.vocabulary.kind} has no {type(op).__name__}", op)
        for value in op.operands():
            if value not in self.scope:
                raise VerifyError(f"{value.name} is not defined here", op)
        if op not in verified:
            check_op(op)
            verified.add(op)
        for block in op.blocks():
            self.block(block, op)
        self.define(op.results, op)


_ENDS = {"yield": "a nested block", "return": "the function"}


def check_op(op: Op) -> None:
    """An op's own rules: the types of its results, and `check`."""
    try:
        inferred, types = op.infer(), tuple(r.type for r in op.results)
        if inferred != types:
            said, given = (", ".join(map(str, t)) or "nothing" for t in (types, inferred))
            raise VerifyError(f"the result is {given}, not {said}", op)
        op.check()
    except VerifyError as error:
        raise VerifyError(str(error), op) from None


# --- drawing --------------------------------------------------------------------------------------

def _report(func: Func, error: VerifyError, where: str) -> str:
    printer, bad = Printer(func), error.op
    lines = [f"after {where}: {error}" if where else str(error)]
    for text, op in printer.rows:
        lines.append(text)
        if isinstance(bad, Op) and op is not None and bad in ops_in_line(op, printer):
            part = printer.statement(op) if bad is op else printer.inline(bad)
            at = text.find(part, len(text) - len(text.lstrip()))
            at, size = (at, len(part)) if at >= 0 else (text.find(text.lstrip()), 1)
            lines.append(" " * at + "^" * size)
    return "\n".join([*lines, *(_origins(bad) if isinstance(bad, Op) else ())])


def ops_in_line(op: Op, printer: Printer) -> Iterator[Op]:
    """The ops that print in the line of `op`."""
    yield op
    for value in op.operands():
        if value in printer.inlined:
            yield from ops_in_line(printer.inlined[value], printer)


def _origins(op: Op) -> Iterator[str]:
    """The origins of the op's results; of its operands where it has none."""
    found = [o for v in op.results for o in origins.of(v)]
    for origin in dict.fromkeys(found or [o for v in op.operands() for o in origins.of(v)]):
        place = f", {origin.line}" if origin.line else ""
        code = f": {origin.code}" if origin.code else ""
        yield f"from {origin.target}, node {origin.node}{place}{code}"
