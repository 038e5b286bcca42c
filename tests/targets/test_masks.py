"""Masks at one point of unrolled axes: what is settled is settled in every lane."""

from __future__ import annotations

import pytest

from rung.core.expr import parse_expr
from rung.core.text import LANE
from rung.targets.c_family import Prelude
from rung.targets.masks import ends, settled, still_open


@pytest.mark.parametrize("size", range(1, 40))
def test_a_tail_of_vectors(size: int) -> None:
    """Four vectors of eight lanes over any number of elements."""
    for start in range(0, 32, 8):
        e = parse_expr(f"{size - 1 - start}-{LANE}")
        inside = [start + n < size for n in range(8)]
        assert settled(e, 8) is (inside[0] if len(set(inside)) == 1 else None)
        found = still_open([e], 8)
        assert (found is None) == (not any(inside))
        if found is not None:
            assert found == ([], [] if all(inside) else [e])
            assert ends(found[1], Prelude()) == ("", "" if all(inside) else str(size - start))


def test_what_is_not_known_stays() -> None:
    known, row, lane = map(parse_expr, ("3", "6-i", f"i-{LANE}"))
    assert still_open([known, row, lane], 4) == ([row], [lane])
    assert still_open([parse_expr("-1"), row], 4) is None
    assert settled(row, 4) is None
    assert ends([parse_expr(f"7-2*{LANE}")], Prelude()) is None
