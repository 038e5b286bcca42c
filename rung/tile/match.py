"""The unifier: what of a kernel is computed by what an atom means.

In: the meaning of an atom, a Loop IR fragment, and a value of a kernel. Out: for each value of the
meaning that of the kernel. A load stands for any value of its type: what lies below a cast that an
instruction does itself, whatever makes it; for a library call, which computes a kernel as a whole,
it is a whole tensor. Factors and terms may stand in either order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

from rung.core.expr import Expr
from rung.core.machine import Atom, Machine
from rung.core.op import Func, Op, Value, made_by
from rung.core.ops import Cast, Const, Map
from rung.core.parse import parse_module
from rung.core.scalar import SCALARS
from rung.core.types import TensorType, dtype_of, shape_of
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


def group_of(atom: Atom) -> int:
    """Elements along the reduced axis that a lane takes at once; 0 for a unit without lanes."""
    return next((n for x in atom.operands if x.layout for _, n in x.layout.blocks), 0)


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
    for bound in unify(want.result, fold.result, (made_by(meaning), made), {}):
        given = {op.buf: bound[op.result] for op in meaning.body.ops if isinstance(op, loop.Load)}
        return Match(atom, fold.result.name, tuple(given[p] for p in meaning.params))
    return None


def deep(machine: Machine, fold: loop.Fold, made: Made) -> Match | None:
    """The first atom of a machine that computes several steps of a fold at once."""
    deeper = (x for x in machine.atoms if tile_of(x)[2] > 1)
    return next((m for x in deeper if (m := match(x, fold, made))), None)


def unify(want: Value, have: Value, made: tuple[Made, Made], bound: Bound) -> Iterator[Bound]:
    """The ways in which `have` is what `want` means."""
    op, other = made[0][want], made[1].get(have)
    if want in bound:
        yield from [bound] if bound[want] is have else []
        return
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
        yield from ({**one, want: have} for one in found)


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


# ---- library calls
@dataclass(frozen=True)
class Tensor:
    """A buffer that a kernel accesses with each of its dimensions along one axis."""

    buffer: Value
    axes: tuple[str, ...]
    dims: tuple[int, ...]  # the dimensions that the axes run along; the others have size 1


@dataclass(frozen=True)
class LibraryCall:
    """A kernel that is a library call: its axes and tensors by their names in the meaning."""

    contraction: str
    axes: Mapping[str, str]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Library:
    """A library call: what it computes, and the seconds that it takes."""

    atom: Atom
    seconds: Callable[[LibraryCall, Func, Machine, Mapping[str, int]], float]


def call_of(atom: Atom, kernel: Func) -> LibraryCall | None:
    """How `atom` computes all of a kernel, on whole tensors, if it does."""
    meaning = meaning_of(atom)
    stores = [op for op in kernel.body.ops if isinstance(op, loop.Store)]
    last = meaning.body.ops[-1]
    if len(kernel.body.ops) != len(meaning.body.ops) or len(stores) != 1:
        return None
    assert isinstance(last, loop.Store)
    made = made_by(meaning), made_by(kernel)
    for bound in unify(last.value, stores[0].value, made, {}):
        if len(set(bound.values())) + 1 < len(kernel.body.ops):
            continue  # a value that stands for two
        pairs = [(op, made[1].get(bound[v])) for v, op in made[0].items()
                 if isinstance(op, loop.Load)]
        if found := _called(atom, kernel, [*pairs, (last, stores[0])]):
            return found
    return None


def _called(atom: Atom, kernel: Func, pairs: Sequence[tuple[Op, Op | None]]) -> LibraryCall | None:
    """The call, if each access of the kernel is to a whole tensor as the meaning's is."""
    extents, tensors, wanted = loop.extents_of(kernel), dict[str, Tensor](), dict[str, Tensor]()
    for want, have in pairs:
        found = _plain(have)
        if found is None or not all(extents[a] is shape_of(found.buffer.type)[n]
                                    for a, n in zip(found.axes, found.dims, strict=True)):
            return None
        like = _plain(want)
        assert like is not None
        wanted[like.buffer.name], tensors[like.buffer.name] = like, found
    where = {_readers(a, wanted): a for a in {x for t in wanted.values() for x in t.axes}}
    axes = {a: where.get(_readers(a, tensors), "") for t in tensors.values() for a in t.axes}
    if len(set(axes.values())) != len(axes):
        return None
    turns = {p.name for p, x in zip(meaning_of(atom).params, atom.operands, strict=True) if x.turns}
    for name, t in tensors.items():
        order, given = tuple(axes[a] for a in t.axes), wanted[name].axes
        turned = (*given[:-2], *given[:-3:-1]) if name in turns else given
        if order not in (given, turned):
            return None
    (fold,) = loop.folds(kernel)
    return LibraryCall(fold.result.name, {want: a for a, want in axes.items()}, tensors)


def _readers(axis: str, tensors: Mapping[str, Tensor]) -> frozenset[str]:
    return frozenset(name for name, t in tensors.items() if axis in t.axes)


def _plain(op: Op | None) -> Tensor | None:
    """An access as a tensor, if each subscript is one axis, once, in contiguous memory."""
    if not isinstance(op, loop.Load | loop.Store):
        return None
    t = op.buf.type
    assert isinstance(t, TensorType)
    dims = tuple(n for n, (sub, size) in enumerate(zip(op.subs, t.shape, strict=True)) if not (
        size.is_const(1) and isinstance(sub, Expr) and sub.is_const(0)))
    subs = [op.subs[n] for n in dims]
    names = tuple(str(s) for s in subs if isinstance(s, Expr) and s.is_symbol())
    plain = len(set(names)) == len(subs) and not op.mask and t.strides is None
    return Tensor(op.buf, names, dims) if plain else None
