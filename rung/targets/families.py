"""Families in C: a value over unrolled axes is one variable for each of their points."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from rung.core.op import Value
from rung.core.types import VecType

Point = tuple[tuple[str, int], ...]  # one step of each unrolled axis


def points(value: Value) -> Iterator[dict[str, int]]:
    """Every step of a value's unrolled axes."""
    t = value.type
    assert isinstance(t, VecType)
    return spread(t.unroll)


def spread(unroll: Sequence[tuple[str, int]] | dict[tuple[str, int], None]
           ) -> Iterator[dict[str, int]]:
    axes = list(unroll)
    for steps in itertools.product(*(range(count) for _, count in axes)):
        yield dict(zip((name for name, _ in axes), steps, strict=True))


def label(value: Value, point: Point, taken: Mapping[str, bool]) -> str:
    """The variable of one member of a family: `s` at 2 is `s_2`. It is none of the names `taken`
    by other values, nor by the language, as these say."""
    joint = "__" if value.name.rpartition("_")[2].isdigit() else "_"  # `s_2` at 0, `s` at 2 and 0
    name = joint.join([value.name, *(str(n) for _, n in point)])
    while name in taken if point else taken.get(name):
        name += "_"
    return name
