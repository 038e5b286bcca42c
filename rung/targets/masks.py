"""Masks of vectors at one point of their unrolled axes: which lanes take part, as far as known.

The last of four vectors over 28 elements has `27 - 24 - lane >= 0`: four lanes of eight take part;
with `27 - 16 - lane >= 0` all do, and nothing needs to be tested.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import TypeAlias

from rung.core.expr import Expr, to_source
from rung.core.text import LANE
from rung.core.types import I64
from rung.targets.c_family import Prelude

Ends = tuple[str, str]  # C texts of the first of some lanes and of the end; "" for none
Open: TypeAlias = tuple[list[Expr], list[Expr]]  # for all lanes at once, and for each lane


def settled(e: Expr, lanes: int) -> bool | None:
    """Whether e >= 0 in all lanes, or in none; None where that is not known, or differs."""
    if not e.symbols() <= {LANE}:
        return None
    ends = {int(e.evaluate({LANE: n})) >= 0 for n in range(lanes)}
    return ends.pop() if len(ends) == 1 else None


def still_open(mask: Iterable[Expr], lanes: int) -> Open | None:
    """The conditions e >= 0 that are not settled; None where no lane takes part."""
    known = {e: settled(e, lanes) for e in mask}
    if False in known.values():
        return None
    left = [e for e, holds in known.items() if holds is None]
    return ([e for e in left if LANE not in e.symbols()], [e for e in left if LANE in e.symbols()])


def ends(mask: Sequence[Expr], p: Prelude) -> Ends | None:
    """The lanes from the first to before the second are those of a mask; "" where it does not cut
    that side. None where others are left out too."""
    sides: dict[int, list[Expr]] = {1: [], -1: []}
    for e in mask:
        run = e.coefficient(LANE)
        if run is None or run.const_value not in sides:
            return None
        sides[run.const_value].append(e.without(LANE))
    return (_outermost(p, "max", [-e for e in sides[1]]),
            _outermost(p, "min", [e + 1 for e in sides[-1]]))


def _outermost(p: Prelude, fn: str, found: Sequence[Expr]) -> str:
    """C text of the `fn` of some numbers, "" of none."""
    texts = dict.fromkeys(to_source(e, str) for e in found)
    return reduce(lambda a, b: p.call(fn, I64, 1, [a, b]), texts) if texts else ""
