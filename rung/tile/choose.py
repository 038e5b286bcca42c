"""Chooses a mapping: the cheapest legal candidate under the model, or the one that was given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice

from rung.core import trace
from rung.core.errors import LoweringError, MappingError, RungError
from rung.core.machine import SEQ, UNROLL, VECTOR, Machine
from rung.core.op import Func
from rung.core.types import axes_of
from rung.loop import ir as loop
from rung.tile import legality
from rung.tile import mapping as tile
from rung.tile.complete import with_values
from rung.tile.match import Library, LibraryCall, call_of
from rung.tile.price import Price, price, rising
from rung.tile.to_kernel import to_kernel
from rung.tile.tree import Tree

Candidates = Callable[[Func, Machine, Mapping[str, int]], Iterable[tile.Mapping]]
MORE = 8  # how many are reordered and completed with places where none of those lowers
TRIED = 12  # how many of the cheapest candidates are lowered before giving up


@dataclass(frozen=True)
class Choice:
    """The kernel with its mapping, its Kernel IR and price."""

    kernel: Func
    lowered: Func | None  # None: the mapping hands the kernel to a library
    price: Price
    library: LibraryCall | None = None


def choose(kernel: Func, machine: Machine, candidates: Candidates,
           hints: Mapping[str, int] | None = None, libraries: Iterable[Library] = ()) -> Choice:
    """The cheapest candidate that lowers, or a library call that is cheaper still.

    Raises MappingError with the reasons if no candidate lowers.
    """
    sizes, reasons = hints or {}, list[str]()
    called = by_library(kernel, machine, libraries, sizes)
    for cost, m, tree in _legal(kernel, machine, candidates, sizes, reasons):
        if called and called.price.seconds < cost.seconds:
            return called
        mapped = kernel.with_attr("mapping", m)
        try:
            return Choice(mapped, to_kernel(mapped, machine, tree), cost)
        except (MappingError, LoweringError) as error:
            reasons.append(_refused(kernel, m, error))
    if called:
        return called
    detail = "; ".join(dict.fromkeys(reasons)) or "no candidates"
    raise MappingError(f"{kernel.name} has no mapping on {machine.name}: {detail}")


def cheapest(kernel: Func, machine: Machine, candidates: Candidates, hints: Mapping[str, int],
             libraries: Iterable[Library]) -> Price | None:
    """The price of what `choose` would choose, as far as is known without lowering it; None where
    no candidate is legal."""
    called = by_library(kernel, machine, libraries, hints)
    costs = [called.price] if called else []
    costs += [cost for cost, *_ in islice(_legal(kernel, machine, candidates, hints, []), 1)]
    return min(costs, key=lambda cost: cost.seconds, default=None)


def _legal(kernel: Func, machine: Machine, candidates: Candidates, sizes: Mapping[str, int],
           reasons: list[str]) -> Iterator[tuple[Price, tile.Mapping, Tree]]:
    """The legal ones of the cheapest candidates, cheapest first, then of those completed with
    places; why the others are not goes to `reasons`."""
    ranked = rising(kernel, candidates(kernel, machine, sizes), machine, sizes)
    tried: list[tile.Mapping] = []
    if trace.active():
        first = list(islice(ranked, 4))
        for cost, m in first:
            trace.emit("priced", "choose", kernel.name, f"{cost}\n{m}")
        ranked = chain(first, ranked)
    more = _completed(kernel, machine, chain(tried, (m for _, m in ranked)), sizes)
    for cost, m in chain(islice(ranked, TRIED), more):
        tried.append(m)
        try:
            tree = legality.check(kernel, m, machine)
        except (MappingError, LoweringError) as error:
            reasons.append(_refused(kernel, m, error))
            continue
        yield cost, m, tree


def _refused(kernel: Func, mapping: tile.Mapping, error: RungError) -> str:
    trace.emit("declined", "choose", kernel.name, f"{error}\n{mapping}")
    return str(error)


def _completed(kernel: Func, machine: Machine, mappings: Iterable[tile.Mapping],
               sizes: Mapping[str, int]) -> Iterator[tuple[Price, tile.Mapping]]:
    """Candidates with all that a later loop reads in an array of its own, the cheapest first."""
    bare = dict.fromkeys(replace(m, places=(), carries=()) for m in mappings)
    orders = [x for m in islice(bare, MORE) for x in (m, *_reordered(kernel, machine, m))]
    found = (with_values(kernel, m, machine, machine.spaces[0].name) for m in orders)
    priced = [(price(kernel, m, machine, sizes), m) for m in dict.fromkeys(found) if m]
    yield from sorted(priced, key=lambda x: x[0].seconds)


def _reordered(kernel: Func, machine: Machine, mapping: tile.Mapping) -> Iterator[tile.Mapping]:
    """For each fold the loops over its free axes outside of all others, on one core."""
    plain = next(x.name for x in reversed(machine.levels) if x.kind == SEQ)
    lines = [tile.AxisLine(x.axis, ((plain, None), *(
        s for s in x.splits if machine.levels[machine.rank(s[0])].kind in (UNROLL, VECTOR))))
        for x in mapping.axes]
    for op in loop.reductions(kernel):
        first = axes_of(op.results[0].type)
        yield replace(mapping, axes=tuple(sorted(lines, key=lambda x: x.axis not in first)))


def by_library(kernel: Func, machine: Machine, libraries: Iterable[Library],
               hints: Mapping[str, int]) -> Choice | None:
    """The cheapest library call that computes the kernel, if any does."""
    fitting = [(x, call) for x in libraries if (call := call_of(x.atom, kernel))]
    costs = [(x.seconds(call, kernel, machine, hints), x.atom.name, call) for x, call in fitting]
    if not costs:
        return None
    seconds, name, call = min(costs, key=lambda x: x[:2])
    for cost, called, _ in costs:
        trace.emit("priced", "choose", kernel.name, f"{cost * 1e6:.1f} us: {called}")
    uses = (tile.Use(call.contraction, name),)
    mapped = kernel.with_attr("mapping", tile.Mapping(kernel.name, machine.name, uses=uses))
    return Choice(mapped, None, Price(seconds, seconds, ()), call)


def given(kernel: Func, mapping: tile.Mapping, machine: Machine,
          hints: Mapping[str, int] | None = None) -> Choice:
    """A mapping that a person wrote, refused with the reason if the machine cannot run it."""
    legality.check(kernel, mapping, machine)
    mapped = kernel.with_attr("mapping", mapping)
    cost = price(kernel, mapping, machine, hints or {})
    return Choice(mapped, to_kernel(mapped, machine), cost)


