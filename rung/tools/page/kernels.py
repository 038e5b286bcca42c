"""The kernels of a graph as a reader compares them: dearest first, each with its nest, where its
values lie, what its price is made of, and the mappings that were dearer or not legal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rung.core.cost import Bound, bound
from rung.core.machine import Machine
from rung.core.op import Func, walk
from rung.kernel.ir import Alloc
from rung.targets.base import is_library
from rung.tile.price import price
from rung.tools.explain import Reached, after_loop, launches, mapping_of
from rung.tools.show import describe, nest_text, sites_of


@dataclass(frozen=True)
class Share:
    """A part of a price: computing, or the traffic of one level; `share` of the largest part."""

    name: str
    seconds: float
    share: float


@dataclass(frozen=True)
class Schedule:
    """A kernel's mapping, and the others that were looked at."""

    mapping: str
    nest: str
    placed: list[str]  # arrays, with their memory
    terms: list[Share]
    dearer: list[tuple[str, str]]  # price and mapping
    refused: list[tuple[str, str]]  # reason and mapping


@dataclass(frozen=True)
class Kernel:
    """What is told of one kernel. `seconds` are those of a launch, as modelled under its mapping;
    `least` is what its bytes and operations take at best."""

    name: str
    calls: int
    seconds: float
    least: Bound
    share: float  # of the time of all kernels
    library: bool
    lines: list[str]
    schedule: Schedule

    @property
    def total(self) -> float:
        return self.seconds * self.calls

    @property
    def work(self) -> float:
        return self.least.flops + self.least.ops

    @property
    def bytes(self) -> float:
        return self.least.memory + self.least.cache


def kernels(reached: Reached) -> list[Kernel]:
    """The kernels of a graph, those that take the most time first."""
    tile = reached.modules.get("tile")
    if tile is None:
        return []
    machine, hints = reached.target.machine, reached.hints
    counts = launches(tile)
    times = {k.name: _seconds(k, reached) for k in tile.kernels}
    whole = sum(times[k.name] * counts[k.name] for k in tile.kernels) or 1.0
    loop = {k.name: k for k in reached.modules["loop"].kernels}
    lowered = {k.name: k for k in reached.modules["kernel"].kernels
               } if "kernel" in reached.modules else {}
    made = [Kernel(
        k.name, counts[k.name], times[k.name], bound(loop[k.name], machine, hints),
        times[k.name] * counts[k.name] / whole, is_library(k),
        describe(sites_of(tile, k), most=1 << 20), Schedule(
            mapping_of(k, reached), nest_text(k, reached.target), _placed(lowered.get(k.name)),
            _terms(k, reached), *_alternatives(k, reached))) for k in tile.kernels]
    return sorted(made, key=lambda k: -k.total)


def _seconds(kernel: Func, reached: Reached) -> float:
    """The modelled time of a launch."""
    if not is_library(kernel):
        return price(kernel, kernel.attr("mapping"), reached.target.machine, reached.hints).seconds
    called = [float(text.partition(" us")[0]) for text in _priced(kernel, reached)
              if text.partition(": ")[2].startswith(kernel.attr("mapping").uses[0].atom)]
    least = bound(kernel, reached.target.machine, reached.hints).seconds
    return min(called) / 1e6 if called else least


def _priced(kernel: Func, reached: Reached) -> list[str]:
    """What was told of the prices of a kernel's mappings."""
    return list(dict.fromkeys(
        e.detail for e in after_loop(reached.events)
        if (e.kind, e.place, e.subject) == ("priced", "choose", kernel.name)))


def _terms(kernel: Func, reached: Reached) -> list[Share]:
    if is_library(kernel):
        return []
    found = price(kernel, kernel.attr("mapping"), reached.target.machine, reached.hints)
    parts = [("compute", found.compute), *((f"traffic of {name}", s) for name, s in found.traffic)]
    most = max(s for _, s in parts) or 1.0
    return [Share(name, s, s / most) for name, s in parts]


def _placed(kernel: Func | None) -> list[str]:
    """Arrays, and in which memory each lies."""
    if kernel is None or kernel.kind != "kernel-ir":
        return []
    return [f"{op.result.name}: {op.result.type}" for op in walk(kernel.body)
            if isinstance(op, Alloc)]


def _alternatives(kernel: Func, reached: Reached) -> tuple[list[tuple[str, str]],
                                                           list[tuple[str, str]]]:
    """What was priced beside the mapping that was taken, and what the machine refused."""
    chosen = mapping_of(kernel, reached)
    priced = [text.partition("\n")[::2] for text in _priced(kernel, reached)]
    refused = dict.fromkeys(e.detail.partition("\n")[::2] for e in after_loop(reached.events)
                            if (e.kind, e.place, e.subject) == ("declined", "choose", kernel.name))
    return ([(cost, m) for cost, m in priced if m != chosen or not m],
            [(why, m) for why, m in refused])


# --- the roofline

@dataclass(frozen=True)
class Point:
    """A kernel in the roofline: operations a byte, and operations a second."""

    name: str
    fused: bool
    intensity: float
    rate: float
    seconds: float


def points(reached: Reached) -> Iterator[Point]:
    """All kernels, before fusion at their bound and after it as they are mapped."""
    machine, hints = reached.target.machine, reached.hints
    before = next((s.after for s in reached.history.steps if s.ran.name == "to_loop"), None
                  ) if reached.history else None
    for k in before.kernels if before else ():
        found = bound(k, machine, hints)
        yield from _point(k.name, False, found, found.seconds)
    for one in kernels(reached):
        yield from _point(one.name, True, one.least, one.seconds)


def _point(name: str, fused: bool, least: Bound, seconds: float) -> Iterator[Point]:
    work, moved = least.flops + least.ops, least.memory + least.cache
    if work and moved and seconds:
        yield Point(name, fused, work / moved, work / seconds, seconds)


@dataclass(frozen=True)
class Roof:
    """A limit of all cores: bytes a second below the ridge, operations a second beyond it."""

    name: str
    bytes: float
    operations: float


def roofs(machine: Machine) -> list[Roof]:
    """The machine's roofs: memory and cache under vector operations, and memory under the fastest
    instructions, where those are faster."""
    rates, shared = machine.rates, 1 + 0.8 * (machine.cores - 1)  # as the bound has it
    best = max(rates.flops, key=lambda kind: rates.flops[kind])
    found = [Roof("memory", rates.memory * shared, rates.flops["f32"] * machine.cores),
             Roof("cache", rates.cache * shared, rates.flops["f32"] * machine.cores)]
    if rates.flops[best] > rates.flops["f32"]:
        found.append(Roof(best, rates.memory * shared, rates.flops[best] * machine.cores))
    return found
