"""Chooses a mapping: the cheapest legal candidate under the model, or the one that was given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rung.core import trace
from rung.core.errors import LoweringError, MappingError
from rung.core.machine import Machine
from rung.core.op import Func
from rung.tile import mapping as tile
from rung.tile.atoms import Library, Matmul, match_matmul
from rung.tile.price import Price, price
from rung.tile.to_kernel import to_kernel

Candidates = Callable[[Func, Machine, Mapping[str, int]], Iterable[tile.Mapping]]
TRIED = 12  # how many of the cheapest candidates are lowered before giving up


@dataclass(frozen=True)
class Choice:
    """The kernel with its mapping, its Kernel IR and price."""

    kernel: Func
    lowered: Func | None  # None: the mapping hands the kernel to a library
    price: Price
    library: Matmul | None = None


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
    for cost, _, m in priced[:TRIED]:
        mapped = kernel.with_attr("mapping", m)
        try:
            return Choice(mapped, to_kernel(mapped, machine), cost)
        except (MappingError, LoweringError) as error:
            reasons.append(str(error))
            trace.emit("declined", "choose", kernel.name, f"{error}\n{m}")
    if called:
        return called
    detail = "; ".join(dict.fromkeys(reasons)) or "no candidates"
    raise MappingError(f"{kernel.name} has no mapping on {machine.name}: {detail}")


def by_library(kernel: Func, machine: Machine, libraries: Iterable[Library],
               hints: Mapping[str, int]) -> Choice | None:
    """The cheapest library call that computes the kernel, if any does."""
    mm = match_matmul(kernel)
    fitting = [x for x in libraries if mm and x.fits(mm)]
    if mm is None or not fitting:
        return None
    costs = [(x.seconds(mm, kernel, machine, hints), x.name) for x in fitting]
    seconds, name = min(costs)
    for cost, called in costs:
        trace.emit("priced", "choose", kernel.name, f"{cost * 1e6:.1f} us: {called}")
    uses = (tile.Use(mm.contraction, name),)
    mapped = kernel.with_attr("mapping", tile.Mapping(kernel.name, machine.name, uses=uses))
    return Choice(mapped, None, Price(seconds, seconds, ()), mm)


def given(kernel: Func, mapping: tile.Mapping, machine: Machine,
          hints: Mapping[str, int] | None = None) -> Choice:
    """A mapping that a person wrote, refused with the reason if the machine cannot run it."""
    mapped = kernel.with_attr("mapping", mapping)
    cost = price(kernel, mapping, machine, hints or {})
    return Choice(mapped, to_kernel(mapped, machine), cost)


