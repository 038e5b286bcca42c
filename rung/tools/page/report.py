"""`rung explain --html`: the page of a function, put together.

In: what a user gives on the command line. Out: one HTML document that loads nothing. It reads the
`History` of each graph, whose values are followed into kernels, and what `explain` tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rung.core import origins
from rung.core.cost import known
from rung.program import memory
from rung.program.memory import Plan, Storage
from rung.runtime.stretches import native
from rung.tools import costs, explain, torch_side
from rung.tools.capture import Capture
from rung.tools.explain import Reached, reached_by, size
from rung.tools.given import Given
from rung.tools.page import charts, kernels, passes, rungs
from rung.tools.page.highlight import highlighted
from rung.tools.page.links import Links, Nodes
from rung.tools.page.rungs import Rung, Text
from rung.tools.show import Request, captured, short, target_of

FILES = Path(__file__).parent
Data = dict[str, object]


@dataclass(frozen=True)
class OneGraph:
    """One graph of the page: its name, how far it got, and its rungs."""

    name: str
    reached: Reached
    ladder: list[Rung]


def page(given: Given, request: Request) -> str:
    """The document. UserError if there is nothing to tell."""
    found = captured(given, request.train)
    target = target_of(found.graphs, request)
    links, parts = Links(), list[OneGraph]()
    with origins.followed():
        for n, graph in enumerate(found.graphs):
            reached = reached_by(graph, target, request, whole=True)
            links.graph = n
            name = f"{graph.kind} {n + 1}" if len(found.graphs) > 1 else graph.kind
            parts.append(OneGraph(name, reached, list(rungs.rungs(graph, reached.history, links))))
    told = explain.not_done(found, [p.reached for p in parts])
    environment = Environment(loader=FileSystemLoader(FILES), autoescape=True,
                              undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"size": size, "us": microseconds, "count": counted}
    environment.globals["raw"] = lambda name: Markup((FILES / name).read_text(encoding="utf-8"))
    sets = _Sets()
    return environment.get_template("page.html").render(
        label=given.label, target=target.name, versions={
            "rung": _version("rung"), "torch": torch.__version__},
        ladder=list(_merged(rungs.python(links), parts, sets)),
        graphs=[_graph(n, p) for n, p in enumerate(parts)], costs=[asdict(c) for c in told],
        assumes=costs.ASSUMES, capture=_capture(found), short=short, sets=sets.rows)


def _version(package: str) -> str:
    try:
        return version(package)
    except Exception:  # a checkout that is not installed
        return ""


def microseconds(seconds: float) -> str:
    """`12.3 us`, `4.56 ms`."""
    found = seconds * 1e6
    return f"{found / 1e3:,.2f} ms" if found >= 1e4 else f"{found:,.{1 if found >= 10 else 2}f} us"


def counted(number: float) -> str:
    """`12,345`, `1.23 M`, `4.56 G`."""
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return f"{number:,.0f}"


# --- the ladder

class _Sets:
    """Sets of nodes by number, each once: lines name their set."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []
        self.known: dict[Nodes, int] = {}

    def number(self, nodes: Nodes) -> int:
        if nodes not in self.known:
            self.known[nodes] = len(self.rows)
            self.rows.append(sorted(nodes))
        return self.known[nodes]


def _merged(first: Rung, parts: Sequence[OneGraph], sets: _Sets) -> Iterator[Data]:
    """The rungs of all graphs, from Python down, with the blocks of every graph that got there."""
    names = dict.fromkeys(r.name for p in parts for r in p.ladder)
    several = len(parts) > 1
    yield _rung(first, [(b.title, b) for b in first.blocks], sets)
    for name in (n for n in rungs.TITLES if n in names):
        own = [(p.name, r) for p in parts for r in p.ladder if r.name == name]
        yield _rung(own[0][1], [(f"{where}: {b.title}".rstrip(": ") if several else b.title, b)
                                for where, r in own for b in r.blocks], sets)


def _rung(rung: Rung, blocks: Sequence[tuple[str, Text]], sets: _Sets) -> Data:
    return {"name": rung.name, "title": rung.title, "what": rung.what, "blocks": [
        {"title": title, "folded": block.folded, "numbered": any(x.number for x in block.lines),
         "lines": [(text, sets.number(x.nodes) if x.nodes else None, x.number)
                   for x, text in zip(block.lines, highlighted(
                       [x.text for x in block.lines], rung.language), strict=True)]}
        for title, block in blocks]}


# --- what is told of a graph

def _graph(number: int, part: OneGraph) -> Data:
    reached, imported = part.reached, part.reached.graph.imported
    anchor = f"kernel-{number}-"
    made: Data = {"name": part.name, "kind": reached.graph.kind, "failed": reached.failed,
                  "sizes": reached.hints, "anchor": anchor, "numbers": None,
                  "kernels": [], "roofline": "", "passes": passes.steps(reached),
                  "saved": list(torch_side.saved(reached.graph.module)),
                  "decompositions": list(torch_side.decompositions(reached.graph.module)),
                  "memory": None, "replays": list(explain.replays(reached)),
                  "calls": len(imported.func.body.ops) - 1 if imported else 0}
    if imported is None or "loop" not in reached.modules:
        return made
    roofs = kernels.roofs(reached.target.machine)
    return made | {
        "numbers": explain.numbers_of(imported.func, reached.modules["loop"], reached),
        "kernels": kernels.kernels(reached), "memory": _memory(reached),
        "roofline": Markup(charts.roofline(list(kernels.points(reached)), roofs, anchor))}


def _memory(reached: Reached) -> Data | None:
    """Storages over time."""
    if "kernel" not in reached.modules:
        return None
    module = reached.modules["kernel"]
    plan: Plan = memory.plan(module.main, native(module))
    last = len(plan.steps)

    def row(s: Storage) -> Data:
        return {"name": s.name, "role": s.role, "bytes": known(s.bytes, reached.hints),
                "first": s.first, "last": s.last, "offset": s.offset,
                "values": [v.name for v in s.values], "from": s.first / last,
                "long": (s.last - s.first + 1) / last}
    return {"workspace": plan.workspace, "peak": plan.peak, "steps": last,
            "storages": [row(s) for s in sorted(plan.storages, key=lambda s: (s.first, s.last))],
            "chart": Markup(charts.buffers(plan, reached.hints))}


def _capture(found: Capture) -> Data:
    return {"breaks": [{"line": short(b.line), "reason": b.reason.strip(), "times": times}
                       for b, times in Counter(found.breaks).items()],
            "recompiles": list(dict.fromkeys(found.recompiles)),
            "frames": [{"name": f.old.co_name if f.old else "", "guards": f.guards,
                        "where": short(f"{f.old.co_filename}:{f.old.co_firstlineno}")
                        if f.old else ""} for f in found.frames]}
