"""Chooses a mapping: the cheapest legal candidate under the model, or the one that was given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import inf, prod

from rung.core import trace
from rung.core.cost import bound
from rung.core.errors import LoweringError, MappingError
from rung.core.machine import SEQ, UNROLL, VECTOR, Machine
from rung.core.op import Func, Op, Value
from rung.core.ops import Cast, Map
from rung.core.scalar import SCALARS
from rung.core.types import F32, axes_of, dtype_of
from rung.loop import ir as loop
from rung.tile import legality
from rung.tile import mapping as tile
from rung.tile.complete import with_values
from rung.tile.match import Call, Library, call_of, deep
from rung.tile.price import Price, known, price
from rung.tile.to_kernel import to_kernel

Candidates = Callable[[Func, Machine, Mapping[str, int]], Iterable[tile.Mapping]]
COSTLY = 8.0  # operations that the moves of a packed element do not hide
ROWS = 8  # rows from which a contraction is bound by arithmetic
MORE = 8  # how many are reordered and completed with places where none of those lowers
TRIED = 12  # how many of the cheapest candidates are lowered before giving up


@dataclass(frozen=True)
class Choice:
    """The kernel with its mapping, its Kernel IR and price."""

    kernel: Func
    lowered: Func | None  # None: the mapping hands the kernel to a library
    price: Price
    library: Call | None = None


def choose(kernel: Func, machine: Machine, candidates: Candidates,
           hints: Mapping[str, int] | None = None, libraries: Iterable[Library] = ()) -> Choice:
    """The cheapest candidate that lowers, or a library call that is cheaper still.

    Raises MappingError with the reasons if no candidate lowers.
    """
    sizes = hints or {}
    called = by_library(kernel, machine, libraries, sizes)
    priced = sorted(((price(kernel, m, machine, sizes), n, m) for n, m in
                     enumerate(candidates(kernel, machine, sizes))), key=lambda x: x[0].seconds)
    if trace.active():
        for cost, _, m in priced[:4]:
            trace.emit("priced", "choose", kernel.name, f"{cost}\n{m}")
    reasons = []
    if called and (not priced or called.price.seconds < priced[0][0].seconds):
        return called
    tried = [(cost, m) for cost, _, m in priced[:TRIED]]
    for cost, m in chain(tried, _completed(kernel, machine, [m for _, _, m in priced], sizes)):
        mapped = kernel.with_attr("mapping", m)
        try:
            tree = legality.check(kernel, m, machine)
            return Choice(mapped, to_kernel(mapped, machine, tree), cost)
        except (MappingError, LoweringError) as error:
            reasons.append(str(error))
            trace.emit("declined", "choose", kernel.name, f"{error}\n{m}")
    if called:
        return called
    detail = "; ".join(dict.fromkeys(reasons)) or "no candidates"
    raise MappingError(f"{kernel.name} has no mapping on {machine.name}: {detail}")


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


def estimate(kernel: Func, machine: Machine, libraries: Iterable[Library],
             hints: Mapping[str, int]) -> float:
    """Seconds before any mapping is known: what fusion compares. A library call counts at its own
    price, so that fusing into a matmul must gain more than leaving the library loses."""
    own = bound(kernel, machine, hints).seconds
    if loop.contractions(kernel):
        own = max(own, _contracting(kernel, machine, hints))
        called = by_library(kernel, machine, libraries, hints)
        return min(own, called.price.seconds) if called else own
    return own


def _contracting(kernel: Func, machine: Machine, hints: Mapping[str, int]) -> float:
    """Seconds that our own register tiles need for the contractions of a kernel with many rows.

    Shares of the FMA peak as measured: with lanes along a free axis, or along the reduced one.
    What an operand costs is paid element by element, as its panels are packed.
    """
    sizes = {a: max(1, known(e, hints)) for a, e in loop.extents_of(kernel).items()}
    total = 0.0
    for op in loop.contractions(kernel):
        free = sorted((sizes[a] for a in op.nest if a != op.axis), reverse=True)
        if len(free) < 2 or free[1] < ROWS:
            continue  # bound by memory
        made = {r: x for x in kernel.body.ops for r in x.results}
        loads = [x for v in op.args for x in _loads(v, made)]
        along = any(loop.stride(x, a) == 1 for x in loads for a in x.nest if a != op.axis)
        share = (0.7 if along else 0.45) * (0.6 if any(
            dtype_of(x.buf.type) != F32 for x in loads) else 1.0)
        if found := deep(machine, op, made):
            share = 0.7 * machine.rates.flops[found.atom.rate] / machine.rates.flops["f32"]
        total += 2.0 * prod(sizes[a] for a in op.nest) / share
        for value, other in (op.args, op.args[::-1]):
            axes = axes_of(value.type)
            rows = prod(sizes[a] for a in axes if a not in axes_of(other.type))
            slots = _work(value, made, frozenset(axes))
            if slots >= COSTLY and rows >= ROWS:
                total += 2.0 * machine.lanes * slots * prod(sizes[a] for a in axes)
    return total / (machine.rates.flops["f32"] * machine.cores)


def _loads(value: Value, made: Mapping[Value, Op]) -> list[loop.Load]:
    op = made.get(value)
    if isinstance(op, loop.Load):
        return [op]
    return [x for v in op.operands() for x in _loads(v, made)] if isinstance(op, Map | Cast) else []


def _work(value: Value, made: Mapping[Value, Op], axes: frozenset[str]) -> float:
    """Operations for each element of an operand; none where another contraction makes it."""
    op = made.get(value)
    if isinstance(op, loop.Fold) and op.product:
        return -inf
    if not isinstance(op, Map | Cast) or frozenset(axes_of(value.type)) != axes:
        return 0.0
    own = max(1.0, SCALARS[op.fn].cost) if isinstance(op, Map) else 1.0
    return own + sum(_work(v, made, axes) for v in dict.fromkeys(op.operands()))


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


