"""The unifier: what of a kernel is computed by what an atom means.

In: the meaning of an atom, a Loop IR fragment, and a value of a kernel. Out: for each load of the
meaning the value of the kernel that it stands for: what lies below a cast that the instruction
does itself, whatever makes it. Factors and terms may stand in either order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

from rung.core.machine import Atom, Machine
from rung.core.op import Func, Op, Value
from rung.core.ops import Cast, Const, Map
from rung.core.parse import parse_module
from rung.core.scalar import SCALARS
from rung.core.types import dtype_of
from rung.loop import ir as loop

Made = Mapping[Value, Op]
Bound = Mapping[Value, Value]  # values of the meaning to those of the kernel


@lru_cache(64)
def meaning_of(atom: Atom) -> Func:
    """The meaning of an atom, read."""
    (found,) = parse_module(atom.meaning, {"kernel": loop.VOCABULARY})
    return found


@lru_cache(64)
def tile_of(atom: Atom) -> tuple[int, int, int]:
    """Rows, columns and depth of one call."""
    extents = loop.extents_of(meaning_of(atom))
    rows, cols, depth = (int(extents[a].evaluate({})) for a in "ijk")
    return rows, cols, depth


def made_by(func: Func) -> Made:
    """The op that gives each value."""
    return {r: op for op in func.body.ops for r in op.results}


@dataclass(frozen=True)
class Match:
    """An atom that computes a fold, and what it takes for each of its parameters."""

    atom: Atom
    fold: str
    args: tuple[Value, ...]


def match(atom: Atom, fold: loop.Fold, made: Made) -> Match | None:
    """How `atom` computes the steps of a fold, if it does."""
    meaning = meaning_of(atom)
    (want,) = loop.folds(meaning)
    loads = [op for op in meaning.body.ops if isinstance(op, loop.Load)]
    for bound in unify(want.result, fold.result, (made_by(meaning), made), {}):
        by_buffer = {op.buf: bound[op.result] for op in loads}
        return Match(atom, fold.result.name, tuple(by_buffer[p] for p in meaning.params))
    return None


def deep(machine: Machine, fold: loop.Fold, made: Made) -> Match | None:
    """The first atom of a machine that computes several steps of a fold at once."""
    found = (match(x, fold, made) for x in machine.atoms if tile_of(x)[2] > 1)
    return next((m for m in found if m), None)


def unify(want: Value, have: Value, made: tuple[Made, Made], bound: Bound) -> Iterator[Bound]:
    """The ways in which `have` is what `want` means."""
    op, other = made[0][want], made[1].get(have)
    if isinstance(op, loop.Load):
        if dtype_of(want.type) == dtype_of(have.type):
            yield {**bound, want: have}
        return
    if other is None or _head(op) != _head(other):
        return
    orders = permutations(other.operands()) if _commutes(op) else (other.operands(),)
    for order in orders:
        found = [bound]
        for x, y in zip(op.operands(), order, strict=True):
            found = [more for one in found for more in unify(x, y, made, one)]
        yield from found


def _head(op: Op) -> object:
    """What two ops must share, besides operands, to compute the same."""
    match op:
        case Map():
            return op.fn
        case Cast():
            return op.dtype
        case Const():
            return op.value, op.dtype
        case loop.Fold():
            return op.carrier, op.product, op.acc, op.prefix
    return op


def _commutes(op: Op) -> bool:
    fn = op.fn if isinstance(op, Map) else op.product if isinstance(op, loop.Fold) else ""
    return fn in SCALARS and SCALARS[fn].commutative and SCALARS[fn].arity == 2
