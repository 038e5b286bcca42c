"""The rungs of a compilation as text in lines, each with the nodes that it computes.

From the user's Python to the source of the kernels: what a reader goes up and down. The texts are
those of `rung show`, without comments.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import getitem

from torch import fx

from rung.compilation import History, generated
from rung.core import trace
from rung.core.op import Func, Op, Value, walk
from rung.core.ops import Yield
from rung.core.rewrite import dead_code
from rung.core.text import Printer
from rung.core.types import TensorType
from rung.kernel.ir import Alloc, Await, Barrier, Commit, For, If, Ring, Role, Roles, Signal, Wait
from rung.program import memory
from rung.program.ir import Module, Return
from rung.runtime.stretches import native
from rung.tools.capture import Graph
from rung.tools.flops import is_free
from rung.tools.page.links import NONE, Links, Nodes
from rung.tools.show import short

FRAME = (Alloc, Await, Barrier, Commit, For, If, Return, Ring, Role, Roles, Signal, Wait, Yield)
"""Ops that compute nothing by themselves."""
ASSIGNED = re.compile(r'\s*(\w+)(?:: "[^"]*")? = ')
TITLES = {"python": "Python", "torch": "ATen", "program": "Program", "tensor": "Tensor IR",
          "loop": "Loop IR", "tile": "Tile IR", "kernel": "Kernel IR", "plan": "Host plan",
          "source": "Source"}
WHAT = {
    "python": "what you wrote, as far as some tensor operation came from it",
    "torch": "the graph that torch traced: one operator a line",
    "program": "calls, effects and where memory is shared; a repeated layer stands once",
    "tensor": "what is computed, on whole tensors: map, reduce, contract, index",
    "loop": "kernels over named axes, fused: each value's axes are its loop nest",
    "tile": "the kernels with their mappings: where and when each axis runs",
    "kernel": "what one core executes: loops, memory, vectors",
    "plan": "what the host does, step by step, and where every value lies",
    "source": "what the compiler of the machine gets"}


@dataclass(frozen=True)
class Row:
    """A line with its nodes; `computes` says that it must have some."""

    text: str
    nodes: Nodes = NONE
    computes: bool = False
    number: int = 0  # in a file
    ends: bool = False  # nothing below it: a library computes it


@dataclass(frozen=True)
class Text:
    """Lines that belong together: a function, a kernel, helpers, which are folded away."""

    title: str
    lines: list[Row]
    folded: bool = False


@dataclass(frozen=True)
class Rung:
    """One rung of one graph; `language` is that of its text."""

    name: str
    title: str
    what: str
    language: str
    blocks: list[Text]

    @property
    def lines(self) -> list[Row]:
        return [line for block in self.blocks for line in block.lines]


def rung(name: str, language: str, blocks: Iterable[Text]) -> Rung:
    return Rung(name, TITLES[name], WHAT[name], language, list(blocks))


# --- the user's Python

def python(links: Links) -> Rung:
    """The functions around the lines that nodes come from, file by file."""
    places = sorted((path, int(number)) for path, _, number in (
        line.rpartition(":") for line in links.lines))
    return rung("python", "python", [Text(short(path), list(_file(path, [n for _, n in rows],
                                                                   links)))
                                     for path, rows in groupby(places, lambda x: x[0])])


def _file(path: str, numbers: Sequence[int], links: Links) -> Iterator[Row]:
    source = linecache.getlines(path)
    last = 0
    for number in _around(source, numbers):
        if last and number > last + 1:
            yield Row("…")
        last = number
        text = source[number - 1].rstrip("\n") if number <= len(source) else "(not to be read)"
        nodes = frozenset(links.lines.get(f"{path}:{number}", ()))
        yield Row(text, nodes, bool(nodes), number)


def _around(source: Sequence[str], numbers: Sequence[int]) -> list[int]:
    """The lines of the innermost functions around some lines, or the lines alone."""
    try:
        tree = ast.parse("".join(source))
    except (SyntaxError, ValueError):
        return sorted(set(numbers))
    spans = [range(node.lineno, (node.end_lineno or node.lineno) + 1) for node in ast.walk(tree)
             if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
    kept = set(numbers)
    for number in numbers:
        inside = sorted((s for s in spans if number in s), key=len)
        kept.update(*inside[:1])
    return sorted(kept)


# --- torch's graph

def torch_graph(graph: Graph, links: Links) -> Rung:
    """The ATen graph; a line computes the node that it assigns."""
    calls = {n.name: n for n in graph.module.graph.nodes if n.op.startswith("call")}
    lines = []
    for text in filter(str.strip, graph.code.splitlines()):
        found = ASSIGNED.match(text)
        node = calls.get(found[1]) if found else None
        if node is not None and node.target is getitem:  # one of the results of another
            node = node.args[0]
        nodes = frozenset([links.number(node.name)]) if isinstance(node, fx.Node) else NONE
        lines.append(Row(text, nodes, bool(nodes)))
    return rung("torch", "python", [Text("", lines)])


# --- modules

def module(name: str, found: Module, links: Links) -> Rung:
    """A rung that is a module."""
    funcs = (*found.programs, *found.kernels)
    return rung(name, "ir", [Text(f.name, list(_func(f, links))) for f in funcs])


def _func(func: Func, links: Links) -> Iterator[Row]:
    printer, live = Printer(func), set(walk(dead_code(func).body))
    for text, op in printer.rows:
        if op is None or isinstance(op, FRAME):
            yield Row(text)
        else:
            computes = op in live and not _moves_nothing(op)
            yield Row(text, links.of_ops(_inside(op, printer)), computes)


def _moves_nothing(op: Op) -> bool:
    """Whether an op is a view."""
    return all(isinstance(v.type, TensorType) for v in op.operands()) and is_free(op)


def _inside(op: Op, printer: Printer) -> Iterator[Op]:
    """The ops that print in the line of `op`."""
    yield op
    for v in op.operands():
        if v in printer.inlined:
            yield from _inside(printer.inlined[v], printer)


# --- the host's plan

def plan(found: Module, links: Links) -> Rung:
    """Storages and steps."""
    made = memory.plan(found.main, native(found))
    params = {*found.main.params}
    kept = [Row(str(s), links.of_values(v for v in s.values if v not in params))
            for s in made.storages]
    inside = native(found)
    steps = [Row(f"step {n}: {s}", links.of_op(s.op), s.kind in ("launch", "call"),
                  ends=not inside(s.op)) for n, s in enumerate(made.steps)]
    last = str(made).splitlines()[-1]
    return rung("plan", "ir", [Text("steps", steps), Text("storages", [*kept, Row(last)])])


# --- source

def source(history: History, found: Module, links: Links) -> Rung:
    """The source of the kernels: helpers first, folded, then each kernel by its statements."""
    with trace.listen() as events:
        text = history.target.emit(generated(found))
    blocks, at = list[Text](), 0
    for event in (e for e in events if e.kind == "emitted"):
        rows: list[tuple[str, tuple[Value, ...]]] = event.data["rows"]
        body = "\n".join(row for row, _ in rows)
        start = text.find(body, at)
        if start < 0:
            continue
        blocks += _helpers(text[at:start])
        lines = [Row(row, links.of_values(values), bool(values)) for whole, values in rows
                 for row in whole.splitlines()]
        blocks.append(Text(event.subject, lines))
        at = start + len(body)
    return rung("source", "c", [*blocks, *_helpers(text[at:])])


def _helpers(text: str) -> list[Text]:
    lines = [Row(line) for line in text.strip().splitlines()]
    return [Text(f"{len(lines)} lines of helpers", lines, folded=True)] if lines else []


def rungs(graph: Graph, history: History | None, links: Links) -> Iterator[Rung]:
    """The rungs of a graph that it reached, below Python."""
    modules = history.modules if history else {}
    for found in modules.values():
        links.note(found)
    yield torch_graph(graph, links)
    for name, found in modules.items():
        yield module(name, found, links)
    if history and "kernel" in modules:
        lowered = modules["kernel"]
        yield plan(lowered, links)
        yield source(history, lowered, links)


# --- how well lines are linked

@dataclass(frozen=True)
class Linked:
    """Of the lines of a rung that compute something, how many have a counterpart above and below,
    and the first ones that have not."""

    rung: str
    lines: int
    linked: int
    missing: list[str]


def linked(first: Rung, ladders: Sequence[Sequence[Rung]]) -> Iterator[Linked]:
    """How well the rungs of each graph are linked with their neighbours, and the user's lines,
    which are above them all."""
    have = NONE.union(*(x.nodes for ladder in ladders for x in ladder[0].lines))
    lines = [x for x in first.lines if x.computes]
    alone = [x.text for x in lines if x.nodes.isdisjoint(have)]
    yield Linked(first.name, len(lines), len(lines) - len(alone), alone[:5])
    for ladder in ladders:
        yield from _linked([first, *ladder])


def _linked(ladder: Sequence[Rung]) -> Iterator[Linked]:
    have = [NONE.union(*(x.nodes for x in r.lines)) for r in ladder]
    for n, r in enumerate(ladder[1:], 1):
        lines = [x for x in r.lines if x.computes]
        alone = [x.text for x in lines
                 if x.nodes.isdisjoint(have[n - 1])
                 or (n + 1 < len(ladder) and not x.ends and x.nodes.isdisjoint(have[n + 1]))]
        yield Linked(r.name, len(lines), len(lines) - len(alone), alone[:5])
