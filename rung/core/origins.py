"""Where ops come from: a side table from values to the Torch nodes that they compute.

    mean = reduce add x ...      a part of layer_norm     # computed in a kernel of its own: named
    y = (x - mean) * ...         layer_norm               # computed here with `mean`: named once

Equal intermediates or further results of two nodes may be merged. A kernel that computes one on the
way to a node's result names that node only, so a part keeps all nodes that share it.

No pass decides by this table: kernels depend on structure only, and a user's line that moves still
hits the cache.

Values inside of kernels have origins under `followed()` alone: that takes time, and each call then
has a kernel of its own until equal ones are merged under their final names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from rung.core.op import Value


@dataclass(frozen=True)
class Origin:
    """A node of the Torch graph and the user's line that made it (`file:line`, may be empty).

    `module` is the path of the module whose `forward` ran then, `function` what the user called
    (`linear`, of which the graph has `addmm`), `backward` says that the node computes a gradient
    of that; `place` orders the nodes of a graph.
    """

    node: str
    target: str
    line: str = ""
    code: str = ""
    module: str = ""
    function: str = ""
    backward: bool = False
    place: int = 0


Part = tuple[Origin, ...]  # nodes of each of which a value is an intermediate
Entry = Origin | Part

_table: WeakKeyDictionary[Value, tuple[Entry, ...]] = WeakKeyDictionary()
_absorbed: WeakKeyDictionary[Value, Part] = WeakKeyDictionary()
_copies: WeakKeyDictionary[Value, Mapping[Origin, Origin]] = WeakKeyDictionary()


_following: ContextVar[bool] = ContextVar("rung_origins_followed", default=False)


@contextmanager
def followed() -> Iterator[None]:
    """What the enclosed code compiles has origins inside of kernels too."""
    token = _following.set(True)
    try:
        yield
    finally:
        _following.reset(token)


def following() -> bool:
    """Whether origins are kept inside of kernels."""
    return _following.get()


def of(value: Value) -> tuple[Origin, ...]:
    """Origins of a value, in the order of the graph."""
    return of_all([value])


def with_absorbed(value: Value) -> tuple[Origin, ...]:
    """Origins of a value, and of those that it is in place of."""
    return tuple(dict.fromkeys((*of(value), *_absorbed.get(value, ()))))


def of_all(values: Iterable[Value]) -> tuple[Origin, ...]:
    """Origins of several values, in the order of the graph."""
    found = dict.fromkeys(o for v in values for e in _table.get(v, ())
                          for o in ((e,) if isinstance(e, Origin) else e))
    return tuple(sorted(found, key=lambda o: o.place))


def record(value: Value, entries: Iterable[Entry]) -> None:
    """Add origins to a value; a part is skipped if one of its nodes is present."""
    found = dict.fromkeys((*_table.get(value, ()), *entries))
    whole = {e for e in found if isinstance(e, Origin)}
    alone = whole | {e[0] for e in found if isinstance(e, tuple) and len(e) == 1}
    kept = tuple(e for e in found if isinstance(e, Origin)
                 or (alone if len(e) > 1 else whole).isdisjoint(e))
    if kept:
        _table[value] = kept


def derive(new: Iterable[Value], old: Iterable[Value]) -> None:
    """`new` values inherit the origins of `old` ones beside their own."""
    old = [*old]
    found = dict.fromkeys(e for v in old for e in _table.get(v, ()))
    if found:
        for value in new:
            record(value, found)
            if following():
                absorb(value, *old)


def absorb(kept: Value, *gone: Value) -> None:
    """`kept` is in place of values that are not computed: `x` of `x * 1`."""
    if following():
        known = _absorbed.get(kept, ())
        _absorbed[kept] = tuple(dict.fromkeys((*known, *(
            o for v in gone for o in (*of(v), *_absorbed.get(v, ()))))))


def follow(new: Iterable[Value], old: Iterable[Value]) -> None:
    """Inside of a kernel: `new` values inherit the origins of `old` ones."""
    if following():
        derive(new, old)


def follow_rest(new: Iterable[Value], old: Iterable[Value]) -> None:
    """Inside of a kernel: those of the `new` values that have no origins inherit those of `old`
    ones, on the way to which they were made."""
    if following():
        derive((v for v in new if v not in _table), old)


def derive_parts(new: Iterable[Value], old: Iterable[Value]) -> None:
    """`new` values are intermediates of the nodes that `old` ones come from."""
    found = [(o,) for v in old for o in of(v)]
    for value in new if found else ():
        record(value, found)


def unite(kept: Value, gone: Value) -> None:
    """`kept` stands for the equal value `gone` too."""
    found = (*_table.get(kept, ()), *_table.get(gone, ()))
    whole = tuple(dict.fromkeys(e for e in found if isinstance(e, Origin)))
    parts = tuple(dict.fromkeys(o for e in found if isinstance(e, tuple) for o in e))
    if whole or parts:
        _table[kept] = whole or (parts,)


def note_copy(results: Iterable[Value], nodes: Mapping[Origin, Origin]) -> None:
    """The nodes of a layer's copy, which gives `results`, for those of the layer."""
    for value in results:
        _copies[value] = nodes


def copies(values: Iterable[Value]) -> Mapping[Origin, Origin]:
    """The nodes that results of a layer's copy compute, by those of the layer."""
    return next((_copies[v] for v in values if v in _copies), {})


def derive_copy(new: Iterable[Value], old: Iterable[Value], results: Iterable[Value]) -> None:
    """`new` values are those of a layer, `old`, in the copy that gives `results`."""
    nodes = copies(results)

    def translated(e: Entry) -> Entry:
        return nodes.get(e, e) if isinstance(e, Origin) else tuple(nodes.get(o, o) for o in e)
    for value, source in zip(new, old, strict=True):
        record(value, map(translated, _table.get(source, ())))
        if source in _absorbed:
            _absorbed[value] = tuple(nodes.get(o, o) for o in _absorbed[source])
