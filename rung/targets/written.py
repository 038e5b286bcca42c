"""The lines of a function's source, each with the values that it computes.

    written.enter([y])                    # a statement
    written.enter([t])                    # what it reads, written inside of it: joins it
    written.leave(joins=True)
    written.add("y[0] = x[0] + 1.0f;")    # computes y and t
    written.leave()
"""

from __future__ import annotations

from collections.abc import Iterable

from rung.core import trace
from rung.core.op import Op, Value


class Written:
    """Lines as they are written, and the values of what is being written now, innermost last."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, tuple[Value, ...]]] = []
        self._open: list[list[Value]] = [[]]

    def add(self, text: str, values: Iterable[Value] | None = None) -> None:
        """One line, of these values or of what is being written."""
        self.rows.append((text, tuple(self._open[-1] if values is None else values)))

    def enter(self, values: Iterable[Value]) -> None:
        self._open.append([*values])

    def leave(self, joins: bool = False) -> list[Value]:
        """The values since `enter`; with `joins` what is around them computes them too."""
        values = self._open.pop()
        if joins:
            self._open[-1] += values
        return values

    def function(self, name: str, head: str, end: str = "}") -> str:
        """The text of the whole function; whoever listens hears of each line."""
        rows = [(head, ()), *self.rows, (end, ())]
        trace.emit("emitted", "source", name, rows=rows)
        return "\n".join(text for text, _ in rows)


def computed(op: Op) -> tuple[Value, ...]:
    """What a statement computes: its results, or what it reads where it has none."""
    return op.results or op.operands()
