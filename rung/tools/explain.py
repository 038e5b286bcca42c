"""`rung explain`: what became of a function, and why.

Graphs and where Dynamo broke them; for each kernel the user's lines, FLOPs, bytes and the bound
that they set, the mapping and the alternatives that were priced; fusions that were declined; calls
that stay with ATen. All of it comes from `core/trace.py`, the origins and the cost model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rung.core import origins, trace
from rung.core.cost import Bound, bound
from rung.core.errors import RungError
from rung.core.op import Func
from rung.core.trace import Event
from rung.program.ir import Call, KernelCall, Module
from rung.targets.base import Target, target
from rung.tools.capture import Capture, Graph
from rung.tools.flops import bytes_after, bytes_before, flops
from rung.tools.given import Given
from rung.tools.show import Request, captured, describe, modules, sources_of

MOST = 12  # lines of one list
SIZES = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))


def explain(given: Given, request: Request) -> str:
    """The report."""
    found = captured(given, request.train)
    machine = target(request.target)
    parts = [[f"{given.label} on {machine.name}"], list(_graphs(found))]
    parts += [list(_graph(n, graph, len(found.graphs), machine, request))
              for n, graph in enumerate(found.graphs, 1)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def _graphs(found: Capture) -> Iterator[str]:
    kinds = ", ".join(f"{count} {kind}" for kind, count in
                      Counter(g.kind for g in found.graphs).items())
    yield f"graphs: {kinds}; graph breaks: {len(found.breaks)}"
    for x in found.breaks:
        reason = [line.strip() for line in x.reason.splitlines() if line.strip()]
        yield f"  {x.line}: {reason[0]}"
        yield from (f"    {line}" for line in reason[1:4])


@dataclass(frozen=True)
class Reached:
    """A graph's modules by rung, and what happened on the way."""

    modules: dict[str, Module]
    events: list[Event]
    hints: dict[str, int]


def _graph(n: int, graph: Graph, total: int, machine: Target, request: Request) -> Iterator[str]:
    title = f"graph {n} of {total}: {graph.kind}"
    if graph.imported is None:
        yield f"{title}, runs as it is: {graph.refused}"
        return
    reached, failed = Reached({}, [], graph.hints), ""
    with trace.listen() as events:
        try:
            reached.modules.update(modules(graph, machine, request))
        except RungError as error:
            failed = f"{type(error).__name__}: {error}"
    reached.events.extend(events)
    yield f"{title}, {len(graph.imported.func.body.ops) - 1} ATen calls"
    if "loop" in reached.modules:
        yield from _numbers(graph.imported.func, reached, machine)
        yield from _kernels(reached, machine)
    if failed:
        yield f"  the graph runs as it is: {failed}"
    yield from _section("fusions declined", _declined(reached.events))
    yield from _section("calls that stay with ATen", _calls(reached))


def _section(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield f"  {title}"
        yield from (f"    {x}" for x in lines[:MOST])
    if len(lines) > MOST:
        yield f"    and {len(lines) - MOST} more"


def _numbers(program: Func, reached: Reached, machine: Target) -> Iterator[str]:
    """FLOPs and bytes of the graph."""
    found = flops(reached.modules["tensor"], reached.hints)
    before = bytes_before(program, reached.hints)
    after = bytes_after(reached.modules["loop"], machine.machine, reached.hints)
    yield f"  {found.total:,} FLOPs in contractions" + (
        f", not counting {', '.join(found.uncounted)}" if found.uncounted else "")
    yield f"  {size(before)} moved as ATen calls, {size(after)} after fusion"
    if reached.hints:
        sizes = ", ".join(f"{name} = {value}" for name, value in reached.hints.items())
        yield f"  with {sizes}"


# --- kernels

def _kernels(reached: Reached, machine: Target) -> Iterator[str]:
    loop = reached.modules["loop"]
    tiles = reached.modules.get("tile", loop)
    counts = Counter(op.callee for op in loop.main.body.ops if isinstance(op, KernelCall))
    for kernel in loop.kernels:
        cost = bound(kernel, machine.machine, reached.hints)
        calls = f", called {counts[kernel.name]} times" if counts[kernel.name] > 1 else ""
        yield f"  kernel {kernel.name}{calls}"
        yield from (f"    from {x}" for x in describe(sources_of(loop, kernel)))
        yield f"    {roofline(cost)}"
        mapped = next((k for k in tiles.kernels if k.name == kernel.name), kernel)
        yield from _mapping(kernel.name, str(mapped.attr("mapping") or ""), reached.events)


def roofline(cost: Bound) -> str:
    """FLOPs, bytes, intensity and the bound of one launch."""
    moved = cost.memory + cost.cache
    done = cost.flops + cost.ops
    intensity = f", {done / moved:.2f} per byte" if moved else ""
    return (f"{cost.flops:,.0f} FLOPs and {cost.ops:,.0f} other operations, {size(moved)}"
            f"{intensity}; at least {cost.seconds * 1e6:.1f} us, bound by {cost.reason}")


def _mapping(kernel: str, chosen: str, events: Sequence[Event]) -> Iterator[str]:
    """The mapping with its price, the alternatives with theirs, and what the machine refused."""
    found = [(e.kind, *e.detail.partition("\n")[::2]) for e in events
             if (e.place, e.subject) == ("choose", kernel)]
    prices = {mapping: price for kind, price, mapping in found if kind == "priced"}
    head, *lines = chosen.splitlines() or ["no mapping"]
    yield f"    {head}" + (f"    # {prices[chosen]}" if chosen in prices else "")
    yield from (f"    {x}" for x in lines)
    for kind, text, mapping in found:
        if mapping != chosen or not mapping:
            rest = "; ".join(x.strip() for x in mapping.splitlines()[1:])
            verb = "refused" if kind == "declined" else "instead"
            yield f"      {verb}: {text}" + (f": {rest}" if rest else "")


def size(n: float) -> str:
    """A number of bytes as people say it."""
    unit, scale = next((u for u in SIZES if n >= u[1]), SIZES[-1])
    return f"{n / scale:.0f} {unit}" if n % scale == 0 else f"{n / scale:.1f} {unit}"


# --- what was not done

def _declined(events: Sequence[Event]) -> list[str]:
    """Fusions that are not legal, and those that would not pay."""
    found = dict.fromkeys(f"{e.subject}: {e.detail}" for e in events
                          if (e.kind, e.place) == ("declined", "fuse"))
    found |= dict.fromkeys(f"{e.subject}: would not pay, {e.detail}" for e in events
                           if (e.kind, e.place) == ("priced", "fuse") and not _pays(e.detail))
    return list(found)


def _pays(detail: str) -> bool:
    """Whether `12.30 -> 4.56 us` is a gain."""
    before, after = detail.removesuffix(" us").split(" -> ")
    return float(before) > float(after)


def _calls(reached: Reached) -> list[str]:
    """Library calls of the lowest module, with counts, reasons and lines."""
    if not reached.modules:
        return []
    module = list(reached.modules.values())[-1]
    reasons = {e.subject: e.detail for e in reached.events
               if (e.kind, e.place) == ("declined", "lower")}
    counts: Counter[str] = Counter()
    lines: dict[str, dict[str, None]] = {}
    for op in module.main.body.ops:
        if isinstance(op, Call):
            counts[op.target] += 1
            lines.setdefault(op.target, {}).update(
                dict.fromkeys(o.line for r in op.results for o in origins.of(r) if o.line))
    return [f"{name} x{count}: {reasons.get(name, 'keeps a layout')}"
            + (f"  {', '.join(list(lines[name])[:3])}" if lines[name] else "")
            for name, count in counts.most_common()]
