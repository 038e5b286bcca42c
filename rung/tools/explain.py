"""`rung explain`: what became of a function, and why.

Graphs and where Dynamo broke them; for each kernel the user's lines, FLOPs, bytes and the bound
that they set, the mapping and the alternatives that were priced; what was not done and what that
costs. `SECTIONS` lists what can be asked for beside the default, which is a page. All of it comes
from `core/trace.py`, the origins and the cost model.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from torch import nn

from rung.compilation import History
from rung.core import trace
from rung.core.cost import Bound, bound
from rung.core.op import Func, walk
from rung.core.trace import Event
from rung.frontends.torch import observed
from rung.frontends.torch.graphs import obstacles
from rung.kernel.ir import Alloc, For
from rung.program import memory
from rung.program.ir import KernelCall, Module
from rung.runtime.stretches import native
from rung.targets.base import Target
from rung.tools import costs, torch_side
from rung.tools.capture import Capture, Graph
from rung.tools.costs import Cost
from rung.tools.flops import bytes_after, bytes_before, flops, peak
from rung.tools.given import Given, UsageError
from rung.tools.show import (
    Request,
    captured,
    describe,
    history_of,
    short,
    sites_of,
    target_of,
)

MOST = 12  # lines of one list in the default report
FULL = 3  # kernels of which it tells everything
SIZES = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
WIDTH = 100
DEFAULT = ("kernels", "splits", "costs", "model")


Data = dict[str, Any]


@dataclass(frozen=True)
class Reached:
    """A graph, its way down as far as it goes, and `failed`, why it goes no further. `whole` says
    that lists are not cut."""

    graph: Graph
    target: Target
    history: History | None = None
    failed: str = ""
    whole: bool = False

    @property
    def modules(self) -> dict[str, Module]:
        return self.history.modules if self.history else {}

    @cached_property
    def events(self) -> list[Event]:
        steps = self.history.steps if self.history else ()
        return [event for step in steps for event in step.events]

    @property
    def hints(self) -> dict[str, int]:
        return self.graph.hints


def explain(given: Given, request: Request, only: Sequence[str] = ()) -> str:
    """The report: a page, or the sections `only`. UsageError names the sections that exist."""
    return report(given, request, only)[0]


def report(given: Given, request: Request, only: Sequence[str] = ()) -> tuple[str, Data]:
    """The report as text, and as the data that docs/json.md describes."""
    if unknown := [x for x in only if x not in SECTIONS]:
        raise UsageError(f"no section is called {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    found = captured(given, request.train)
    target = target_of(found.graphs, request)
    wanted = [x for x in SECTIONS if x in (only or DEFAULT)]
    parts = [[f"{given.label} on {target.name}"], list(_graphs(found))]
    reached = [reached_by(graph, target, request, bool(only)) for graph in found.graphs]
    parts += [FRAMES[x](found) for x in wanted if x in FRAMES]
    parts += [list(_graph(n, len(reached), r, wanted)) for n, r in enumerate(reached, 1)]
    parts += [WHOLE[x](given, found, reached) for x in wanted if x in WHOLE]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n", {
        "label": given.label, "target": target.name,
        "breaks": [{"line": x.line, "reason": x.reason.strip()} for x in found.breaks],
        "recompiles": list(dict.fromkeys(found.recompiles)),
        "graphs": [_data(r) for r in reached],
        "not_done": [asdict(x) for x in not_done(found, reached)]}


def _data(reached: Reached) -> Data:
    imported, loop = reached.graph.imported, reached.modules.get("loop")
    made = {"kind": reached.graph.kind, "failed": reached.failed, "sizes": reached.hints,
            "aten_calls": len(imported.func.body.ops) - 1 if imported else None}
    if imported is None or loop is None:
        return made | {"kernels": []}
    counts = launches(loop)
    kernels = [{"name": k.name, "calls": counts[k.name], "flops": cost.flops,
                "operations": cost.ops, "bytes": cost.memory + cost.cache, "seconds": cost.seconds,
                "bound": cost.reason, "mapping": mapping_of(k, reached),
                "from": describe(sites_of(loop, k), most=1 << 20)} for k in loop.kernels
               for cost in [bound(k, reached.target.machine, reached.hints)]]
    return made | numbers_of(imported.func, loop, reached) | {"kernels": kernels}


def _graphs(found: Capture) -> Iterator[str]:
    kinds = ", ".join(f"{count} {kind}" for kind, count in
                      Counter(g.kind for g in found.graphs).items())
    yield f"graphs: {kinds or 'none'}; graph breaks: {len(found.breaks)}" + (
        f"; recompiles: {observed.recompiled(found.frames)}" if found.recompiles else "")
    for x in found.breaks:
        reason = [line.strip() for line in x.reason.splitlines() if line.strip()]
        yield f"  {short(x.line)}: {reason[0]}"
        yield from (f"    {line}" for line in reason[1:4])
    yield from (f"  recompiled because {x}" for x in dict.fromkeys(found.recompiles))


def reached_by(graph: Graph, target: Target, request: Request, whole: bool) -> Reached:
    if graph.imported is None:
        return Reached(graph, target, failed=graph.refused, whole=whole)
    with trace.listen():
        history = history_of(graph, target, request)
    error = history.error
    failed = f"{type(error).__name__}: {error}" if error else ""
    return Reached(graph, target, history, failed, whole)


def _graph(n: int, total: int, reached: Reached, wanted: Sequence[str]) -> Iterator[str]:
    imported = reached.graph.imported
    title = f"graph {n} of {total}: {reached.graph.kind}"
    yield title + (f", {len(imported.func.body.ops) - 1} ATen calls" if imported else "")
    if reached.failed:
        yield f"  the graph runs as it is: {reached.failed}"
    if imported and "loop" in reached.modules:
        yield from _told(numbers_of(imported.func, reached.modules["loop"], reached), reached)
    for name in wanted:
        if name in GRAPHS:
            yield from GRAPHS[name](reached)


def numbers_of(program: Func, loop: Module, reached: Reached) -> Data:
    """FLOPs, bytes and roofline of the graph."""
    found = flops(reached.modules["tensor"], reached.hints)
    least = [bound(loop.kernel(op.callee), reached.target.machine, reached.hints).seconds
             for op in loop.main.body.ops if isinstance(op, KernelCall)]
    return {"flops": found.total, "uncounted": list(found.uncounted),
            "bytes_before": bytes_before(program, reached.hints),
            "bytes_after": bytes_after(loop, reached.target.machine, reached.hints),
            "kernel_calls": len(least), "seconds": sum(least),
            "peak_bytes": peak(reached.modules["kernel"], reached.hints)
            if "kernel" in reached.modules else None}


def _told(numbers: Data, reached: Reached) -> Iterator[str]:
    yield f"  {numbers['flops']:,} FLOPs in contractions" + (
        f", not counting {', '.join(numbers['uncounted'])}" if numbers["uncounted"] else "")
    yield (f"  {size(numbers['bytes_before'])} moved as ATen calls, "
           f"{size(numbers['bytes_after'])} after fusion")
    yield (f"  at least {numbers['seconds'] * 1e6:.1f} us in "
           f"{counted(numbers['kernel_calls'], 'kernel call')}")
    if numbers["peak_bytes"] is not None:
        yield f"  holds at most {size(numbers['peak_bytes'])} beside its arguments"
    yield from (f"  {x}" for x in replays(reached))
    if reached.hints:
        sizes = ", ".join(f"{name} = {value}" for name, value in reached.hints.items())
        yield f"  with {sizes}"


def replays(reached: Reached) -> Iterator[str]:
    """On a GPU, whether `mode="reduce-overhead"` can replay the graph, or what is against it; sizes
    and addresses are known in calls alone."""
    imported = reached.graph.imported
    if imported is None or not reached.target.machine.threaded:
        return
    found = list(dict.fromkeys(obstacles(imported.func)))
    more = f" (and {len(found) - 1} more)" if found[1:] else ""
    yield "CUDA graphs: " + (f"declined, {found[0]}{more}" if found else
                             'from the third call on, with mode="reduce-overhead"')


# --- kernels

def _kernels(reached: Reached) -> Iterator[str]:
    """Kernels in their order; in the default report the dearest ones in full, the rest by name."""
    for line in _each_kernel(reached):
        indent = " " * (len(line) - len(line.lstrip()))
        yield from textwrap.wrap(line, WIDTH, subsequent_indent=f"{indent}  ",
                                 break_long_words=False, break_on_hyphens=False)


def _each_kernel(reached: Reached) -> Iterator[str]:
    loop = reached.modules.get("loop")
    if loop is None:
        return
    counts = launches(loop)
    least = {k.name: bound(k, reached.target.machine, reached.hints) for k in loop.kernels}
    dearest = sorted(least, key=lambda name: -least[name].seconds * counts[name])
    full = set(dearest if reached.whole else dearest[:FULL])
    for kernel in loop.kernels:
        calls = f", called {counts[kernel.name]} times" if counts[kernel.name] > 1 else ""
        cost = least[kernel.name]
        if kernel.name in full:
            yield f"  kernel {kernel.name}{calls}"
            most = () if reached.whole else (2, 1)  # lines, and modules of each
            rows = describe(sites_of(loop, kernel), *most)
            yield from (f"    from {x}".replace("from and ", "and ") for x in rows)
            yield from _levels(kernel, reached)
            yield f"    {roofline(cost)}"
            yield from _mapping(kernel.name, mapping_of(kernel, reached), reached)
    rest = [f"{k} x{counts[k]} ({least[k].seconds * 1e6:.1f} us)" for k in dearest if k not in full]
    yield from _list("  and the kernels", rest)


def launches(loop: Module) -> Counter[str]:
    return Counter(op.callee for op in loop.main.body.ops if isinstance(op, KernelCall))


def mapping_of(kernel: Func, reached: Reached) -> str:
    """The mapping that a kernel got, as text; "" where it got none."""
    tiles = reached.modules["tile"].kernels if "tile" in reached.modules else ()
    mapped = next((k for k in tiles if k.name == kernel.name), kernel)
    return str(mapped.attr("mapping") or "")


def _levels(kernel: Func, reached: Reached) -> Iterator[str]:
    """What fusion did, on both its levels: the ATen calls that are grouped into one kernel, by the
    first call of it, and inside it the loops that are left of theirs and the values that wait in
    memory between them."""
    grouped = next(iter(sites_of(reached.modules["loop"], kernel)), ())
    names = sorted(Counter(o.target for o in grouped).items())
    yield from _list(f"    graph level: {counted(len(grouped), 'ATen call')} in one kernel:",
                     [name + (f" x{n}" if n > 1 else "") for name, n in names])
    lowered = reached.modules["kernel"].kernels if "kernel" in reached.modules else ()
    own = [k for k in lowered if k.name == kernel.name and k.kind == "kernel-ir"]
    for ops in (list(walk(k.body)) for k in own):
        inner = [op for op in ops if isinstance(op, For)
                 and not any(isinstance(x, For) for x in walk(op.body))]
        kept = [f"{op.result.name} in {op.result.type}" for op in ops if isinstance(op, Alloc)]
        yield (f"    kernel level: {counted(len(inner), 'innermost loop')}, "
               f"{counted(len(kept), 'value')} in memory between"
               + (f": {', '.join(kept)}" if kept else ""))


def counted(n: int, what: str) -> str:
    """`1 loop`, `2 loops`."""
    return f"{n} {what}{'s' * (n != 1)}"


def _list(title: str, items: Sequence[str]) -> Iterator[str]:
    if items:
        more = f", and {len(items) - MOST} more" if len(items) > MOST else ""
        yield f"{title} {', '.join(items[:MOST])}{more}"


def roofline(cost: Bound) -> str:
    """FLOPs, bytes, intensity and the bound of one launch."""
    moved = cost.memory + cost.cache
    done = cost.flops + cost.ops
    intensity = f", {done / moved:.2f} per byte" if moved else ""
    return (f"{cost.flops:,.0f} FLOPs and {cost.ops:,.0f} other operations, {size(moved)}"
            f"{intensity}; at least {cost.seconds * 1e6:.1f} us, bound by {cost.reason}")


def _mapping(kernel: str, chosen: str, reached: Reached) -> Iterator[str]:
    """The mapping with its price, the alternatives with theirs, and what the machine refused."""
    found = [(e.kind, *e.detail.partition("\n")[::2]) for e in after_loop(reached.events)
             if (e.place, e.subject) == ("choose", kernel)]
    prices = {m: price for e in reached.events if (e.kind, e.place) == ("priced", "choose")
              for price, _, m in [e.detail.partition("\n")]}
    head, *lines = chosen.splitlines() or ["no mapping"]
    yield f"    {head}" + (f"    # {prices[chosen]}" if chosen in prices else "")
    yield from (f"    {x}" for x in lines)
    others = [x for x in found if x[2] != chosen or not x[2]]
    dearer = [x for x in others if x[1] != prices.get(chosen)] or others
    for kind, text, mapping in others if reached.whole else dearer[:1]:
        rest = "; ".join(x.strip() for x in mapping.splitlines()[1:])
        verb = "refused" if kind == "declined" else "instead"
        yield f"      {verb}: {text}" + (f": {rest}" if rest else "")


def after_loop(events: Sequence[Event]) -> Sequence[Event]:
    """What happened once kernels had their names."""
    ends = [n for n, e in enumerate(events, 1)
            if (e.kind, e.place, e.subject) == ("ran", "loop", "canonical")]
    return events[max(ends, default=0):]


def size(n: float) -> str:
    """A number of bytes as people say it."""
    unit, scale = next((u for u in SIZES if n >= u[1]), SIZES[-1])
    return f"{n / scale:.0f} {unit}" if n % scale == 0 else f"{n / scale:.1f} {unit}"


# --- what was not done

def _fusions(reached: Reached) -> Iterator[str]:
    """Fusions that are not legal, and those that would not pay."""
    found = dict.fromkeys(f"{e.subject}: {e.detail}" for e in reached.events
                          if (e.kind, e.place) == ("declined", "fuse"))
    found |= dict.fromkeys(f"{e.subject}: would not pay, {e.detail}" for e in reached.events
                           if (e.kind, e.place) == ("priced", "fuse") and not _pays(e.detail))
    yield "  fusions declined" if found else "  every fusion that was looked at was done"
    yield from (f"    {x}" for x in found)


def _splits(reached: Reached) -> Iterator[str]:
    """Folds split across launches, the alternatives, and why others were not split."""
    words = {"fired": "done", "priced": "priced", "declined": "refused"}
    found = dict.fromkeys(f"{e.subject}: {words[e.kind]}, {e.detail}" for e in reached.events
                          if e.place == "split" and e.kind in words)
    if found:
        yield "  folds over idle cores"
        yield from (f"    {x}" for x in found)


def _pays(detail: str) -> bool:
    """Whether `12.30 -> 4.56 us` is a gain."""
    before, after = detail.removesuffix(" us").split(" -> ")
    return float(before) > float(after)


def _costs(given: Given, found: Capture, reached: Sequence[Reached]) -> list[str]:
    """The rows of `costs`, dearest first."""
    rows = not_done(found, reached)
    if not rows:
        return []
    lines = [f"what was not done, dearest first ({costs.ASSUMES})"]
    shown = rows if any(r.whole for r in reached) else rows[:MOST]
    for x in shown:
        first, more = short(x.lines[0] if x.lines else ""), len(x.lines) - 1
        where = f"  {first}" + (f" and {more} more" if more > 0 else "")
        lines.append(f"  {x.seconds * 1e6:8.1f} us {size(x.bytes):>10}  {x.what}: {x.why}{where}")
    return lines + ([f"  and {len(rows) - MOST} more"] if len(shown) < len(rows) else [])


def not_done(found: Capture, reached: Sequence[Reached]) -> list[Cost]:
    return sorted(_all_costs(found, reached), key=lambda c: -c.seconds)


def _all_costs(found: Capture, reached: Sequence[Reached]) -> Iterator[Cost]:
    known = len(found.first) == len(found.breaks) + 1  # then graph n ends at break n
    for n, x in enumerate(found.breaks if reached else ()):
        r = reached[n if known else 0]
        before = r.graph.imported.func if known and r.graph.imported else None
        yield costs.of_break(before, x.reason.splitlines()[0], x.line, r.target.machine, r.hints)
    for r in reached:
        if r.failed and r.graph.imported:
            yield costs.of_graph(r.graph.imported.func, r.failed, r.target.machine, r.hints)
        elif r.modules:
            module = list(r.modules.values())[-1]
            yield from costs.of_calls(module, r.events, r.target.machine, r.hints)
            yield from costs.of_fusions(r.modules["program"], r.events, r.target.machine, r.hints)


# --- what is there for the asking

def _passes(reached: Reached) -> Iterator[str]:
    """Each pass, the rules that fired in it by number, and its time."""
    for step in reached.history.steps if reached.history else ():
        fired = Counter(e.place for e in step.events if e.kind == "fired")
        rules = ", ".join(f"{name} {n}" for name, n in fired.items())
        yield (f"  {step.ran.full_name:<24} {step.seconds * 1e3:8.2f} ms"
               + (f"  fired: {rules}" if rules else ""))


def _plan(reached: Reached) -> Iterator[str]:
    """What the host does and where every value lies."""
    if "kernel" in reached.modules:
        yield "  host plan"
        module = reached.modules["kernel"]
        plan = memory.plan(module.main, native(module))
        yield from (f"    {line}" for line in str(plan).splitlines())


def _aten(reached: Reached) -> Iterator[str]:
    yield from (f"  {line}" for line in reached.graph.code.splitlines())


def _decompositions(reached: Reached) -> Iterator[str]:
    yield from torch_side.decompositions(reached.graph.module)


def _saved(reached: Reached) -> Iterator[str]:
    yield from torch_side.saved(reached.graph.module)


def _model(given: Given, found: Capture, reached: Sequence[Reached]) -> list[str]:
    programs = [(g.imported.func, g.hints) for g in found.first
                if g.kind != "backward" and g.imported]
    if not isinstance(given.function, nn.Module):
        return []
    return list(torch_side.model(given.function, (*given.args, given.kwargs), programs))


FRAMES: dict[str, Callable[[Capture], list[str]]] = {
    "dynamo": torch_side.graphs, "guards": torch_side.guards, "bytecode": torch_side.bytecode,
    "functional": torch_side.functional}
"""Sections about what Dynamo made, before the graphs."""

GRAPHS: dict[str, Callable[[Reached], Iterator[str]]] = {
    "aten": _aten, "decompositions": _decompositions, "saved": _saved, "passes": _passes,
    "fusions": _fusions, "kernels": _kernels, "splits": _splits, "plan": _plan}
"""Sections of each graph."""

WHOLE: dict[str, Callable[[Given, Capture, Sequence[Reached]], list[str]]] = {
    "costs": _costs, "model": _model}
"""Sections about all graphs, at the end."""

SECTIONS = (*FRAMES, *GRAPHS, *WHOLE)
