"""Where ops come from: a side table from values to the Torch nodes that they compute.

Kept by the rewriter and the importer alone; no pass reads it to decide anything, so that kernels
depend on structure only and moving a user's line misses no cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from rung.core.op import Value


@dataclass(frozen=True)
class Origin:
    """A node of the Torch graph and the user's line that made it (`file:line`, may be empty)."""

    node: str
    target: str
    line: str = ""
    code: str = ""


_table: WeakKeyDictionary[Value, tuple[Origin, ...]] = WeakKeyDictionary()


def of(value: Value) -> tuple[Origin, ...]:
    """Origins of a value, oldest first."""
    return _table.get(value, ())


def record(value: Value, origins: Iterable[Origin]) -> None:
    """Add origins to a value."""
    merged = dict.fromkeys((*_table.get(value, ()), *origins))
    if merged:
        _table[value] = tuple(merged)


def derive(new: Iterable[Value], old: Iterable[Value]) -> None:
    """`new` values take over the origins of `old` ones; they keep their own."""
    found = dict.fromkeys(o for v in old for o in of(v))
    if found:
        for value in new:
            record(value, found)
