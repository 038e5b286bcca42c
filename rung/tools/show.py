"""`rung show`: the text of a function's graphs on any rung, from the ATen graph to source.

The dumps are input to `rung opt`: what they add (an index of the kernels, the user's lines, which
graph of several) is comments. A graph that some rung cannot take is shown down to the rung before
it, and one of many kernels by its index, where no rung and no kernel is asked for.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rung import pipeline
from rung.compilation import Compilation, History, generated, read_mappings
from rung.core import origins
from rung.core.config import Settings
from rung.core.errors import RungError
from rung.core.lexer import TOKEN
from rung.core.op import Block, Func, Op, Value
from rung.core.origins import Origin
from rung.core.text import print_func
from rung.frontends.torch.externs import torch_on
from rung.frontends.torch.tensors import HOST
from rung.program.ir import Call, KernelCall, Module, Return
from rung.targets import base
from rung.targets.base import Target, is_library
from rung.tile.tree import Tree
from rung.tools.capture import Capture, Graph, capture
from rung.tools.flops import is_free
from rung.tools.given import EXPRESSION, Given, UsageError, UserError

RUNGS = ("torch", "program", "tensor", "loop", "tile", "kernel", "source")
OF_KERNELS = ("loop", "tile", "kernel", "source")
NEST = "nest"  # no rung: the loops of the mappings, which `rung opt` does not read
BEFORE = {"source": "kernel", NEST: "tile"}  # what is made of another rung's kernels
MANY = 8  # kernels of which all rungs at once are more than anybody reads
GRAPH = "# graph"  # starts the line before each of several graphs in a dump


@dataclass(frozen=True)
class Request:
    """What the options of `show` and `explain` say."""

    rung: str = "all"
    target: str = ""  # that of the graphs' device
    train: bool = False
    mapping: str = ""
    kernel: str = ""


def show(given: Given, request: Request) -> str:
    """The text for stdout. RungError if a rung that was asked for cannot be reached."""
    if request.kernel and request.rung not in ("all", NEST, *OF_KERNELS):
        raise UsageError(f"there are no kernels on the rung {request.rung}, but on "
                         f"{', '.join(OF_KERNELS)}")
    found = captured(given, request.train)
    if not found.graphs:
        raise UserError(f"{given.label}: {found.nothing}")
    target = target_of(found.graphs, request)
    if request.kernel:
        return _one(found, target, request)
    if request.rung == "all":
        return "\n".join(_everything(found, target, request))
    if request.rung == "torch":
        return _joined(found, [g.code for g in found.graphs])
    want = BEFORE.get(request.rung, request.rung)
    reached = [history_of(g, target, request).at(want) for g in found.graphs]
    if request.rung == "source":
        return target.emit(all_kernels(reached))
    if request.rung == NEST:
        return _joined(found, ["\n".join(nest_text(k, target) for k in m.kernels)
                               for m in reached])
    return _joined(found, ["".join(f"# {x}\n" for x in index(m)) + annotated(m) for m in reached])


def captured(given: Given, train: bool) -> Capture:
    """The graphs; UserError if there is nothing to tell. What Dynamo broke is told on stderr."""
    found = capture(given, train)
    if not (found.graphs or found.breaks):
        raise UserError(f"{given.label}: {found.nothing}")
    for x in found.breaks:
        print(f"rung: graph break at {x.line}: {x.reason.splitlines()[0]}", file=sys.stderr)
    return found


def _joined(found: Capture, texts: Sequence[str]) -> str:
    """The graphs' texts, with a comment line before each if there are several."""
    if len(texts) == 1:
        return texts[0].rstrip() + "\n"
    return "\n".join(f"{GRAPH} {n} of {len(texts)}: {g.kind}\n{text.rstrip()}\n"
                     for n, (g, text) in enumerate(zip(found.graphs, texts, strict=True), 1))


# --- going down

def history_of(graph: Graph, target: Target, request: Request) -> History:
    """The way of a graph down to the rung that was asked for; below `tensor` all of it, as a
    mapping that is lacking changes what is fused. RungError for a graph without a program; stderr
    tells of mappings that are for none of its kernels."""
    if graph.imported is None:
        raise RungError(untaken(graph))
    above = {"program": ("program",), "tensor": ("program", "tensor")}.get(request.rung)
    passes = [p for p in pipeline.PASSES if above is None or p.rung in above]
    compilation = compilation_of(graph, target, request)
    history = compilation.history(graph.imported.func, passes)
    if "kernel" in history.modules and (why := compilation.unmapped(history.at("kernel"))):
        print(f"rung: no mapping of {request.mapping} is used in the {graph.kind} graph: {why}",
              file=sys.stderr)
    return history


def untaken(graph: Graph) -> str:
    """Why a graph has no program."""
    return f"the {graph.kind} graph stays with torch: {graph.refused}"


def target_of(graphs: Sequence[Graph], request: Request) -> Target:
    """The target that is asked for, else that of the device of the first graph that has one beside
    the host."""
    homes = [g.imported.home.type for g in graphs if g.imported]
    return base.target(request.target or next((x for x in homes if x != HOST.type), HOST.type))


def compilation_of(graph: Graph, target: Target, request: Request) -> Compilation:
    """How a graph of the command line is compiled."""
    home = graph.imported.home if graph.imported else HOST
    return Compilation(target, torch_on(home), Settings.from_environment().precision,
                       graph.hints, read_mappings(request.mapping))


def all_kernels(reached: Sequence[Module]) -> list[Func]:
    """The kernels of several modules, those of the same name and text once."""
    found: dict[str, Func] = {}
    for kernel in (k for m in reached for k in generated(m)):
        if str(found.setdefault(kernel.name, kernel)) != str(kernel):
            raise RungError(f"two graphs have different kernels called {kernel.name}; "
                            f"show them apart")
    return list(found.values())


# --- every rung at once

def _everything(found: Capture, target: Target, request: Request) -> Iterator[str]:
    total = len(found.graphs)
    for n, graph in enumerate(found.graphs, 1):
        where = f", graph {n} of {total} ({graph.kind})" if total > 1 else ""
        if graph.imported is None:
            yield _section("torch", where, graph.code)
            yield _section("stops", where, untaken(graph))
            continue
        history = history_of(graph, target, request)
        module = history.at("kernel")
        if rows := index(module):
            many = len(module.kernels) > MANY
            yield _section("index", where, "\n".join([*rows, *MORE * many]))
            if many:
                continue
        yield _section("torch", where, graph.code)
        for rung, lowered in history.modules.items():
            yield _section(rung, where, annotated(lowered))
        yield _section("source", f" for {target.name}{where}", target.emit(generated(module)))


MORE = ("", "--kernel NAME prints one of them on its rungs, --rung RUNG all of them on one",)


# --- one kernel of many

def index(module: Module) -> list[str]:
    """A line for each kernel and library call of several kernels: how often it is called, and where
    from."""
    calls: dict[str, list[Op]] = {}
    for op in module.main.body.ops:
        if isinstance(op, KernelCall) or (isinstance(op, Call) and not is_free(op)):
            name = op.callee if isinstance(op, KernelCall) else op.target
            calls.setdefault(name, []).append(op)
    if len(module.kernels) < 2:
        return []
    wide = max(map(len, calls))
    rows = []
    for name, ops in calls.items():
        found = origins.of_all(r for op in ops for r in op.results)
        lines = dict.fromkeys((o.line.rpartition("/")[2], o.code) for o in found)
        first = "  ".join(next(iter(lines), ()))
        more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
        row = f"{len(ops):4} x {name:<{wide}}  {first}"
        most = 96 - len(more)
        rows.append(row[:most] + "..." * (len(row) > most) + more)
    return rows


def _one(found: Capture, target: Target, request: Request) -> str:
    """The kernel that was asked for, on its rungs or one of them."""
    rungs = OF_KERNELS if request.rung == "all" else (request.rung,)
    known: dict[str, None] = {}
    for graph in (g for g in found.graphs if g.imported):
        history = history_of(graph, target, replace(request, rung="kernel"))
        known |= dict.fromkeys(k.name for k in history.at("kernel").kernels)
        if request.kernel in known:
            texts = {rung: _kernel_text(history, rung, request.kernel) for rung in rungs}
            return texts[rungs[0]] if len(rungs) == 1 else "\n".join(
                _section(rung, "", text) for rung, text in texts.items())
    raise UserError(f"no kernel is called {request.kernel!r}; there are {', '.join(known)}")


def _kernel_text(history: History, rung: str, name: str) -> str:
    module = history.at(BEFORE.get(rung, rung))
    kernel = module.kernel(name)
    if rung == NEST:
        return nest_text(kernel, history.target)
    if rung == "source":
        library = is_library(kernel)
        return f"// {name} is a library's\n" if library else history.target.emit([kernel])
    lines = describe(sites_of(module, kernel))
    return "".join(f"# {name}: {x}\n" for x in lines) + wrapped(f"{alone(kernel)}\n")


def nest_text(kernel: Func, target: Target) -> str:
    """The loop nest of a kernel under its mapping."""
    if is_library(kernel):
        return f"# {kernel.name} is a library's\n"
    return f"{Tree(kernel, kernel.attr('mapping'), target.machine)}\n"


def alone(kernel: Func) -> Module:
    """A module of one kernel and a program that calls it once."""
    params = tuple(replace(p, role=p.role or "input") for p in kernel.params)
    outs = tuple(Value(o.name, o.type) for o in kernel.outs)
    updates = tuple(p for p in params if p.role == "mutated")
    states = tuple(Value(f"{p.name}_after", p.type) for p in updates)
    call = KernelCall(kernel.name, params, updates, tuple(v.type for v in (*states, *outs)),
                      results=(*states, *outs))
    body = Block((), (call, Return(outs)))
    return Module((Func("program", "main", params, (), body),), (kernel,))


def _section(rung: str, where: str, text: str) -> str:
    title = f"{rung}{where} "
    return f"{title:-<100}\n{text.rstrip()}\n"


# --- the user's lines as comments

def annotated(module: Module) -> str:
    """The text of a module with the origins of its ops and kernels as comments."""
    parts = [print_func(p, note) for p in module.programs]
    for kernel in module.kernels:
        sites = sites_of(module, kernel)
        lines = ([f"called at {len(sites)} sites"] if len(sites) > 1 else []) + describe(sites)
        parts.append("".join(f"# {kernel.name}: {x}\n" for x in lines) + str(kernel))
    return wrapped("\n\n".join(parts) + "\n")


def wrapped(text: str) -> str:
    """A dump whose lines, but for comments, end after a comma or a `+` before the terminal does."""
    try:
        width = os.get_terminal_size(sys.__stdout__.fileno()).columns  # type: ignore[union-attr]
    except (AttributeError, OSError, ValueError):
        width = 100
    return "".join(f"{row}\n" for line in text.splitlines() for row in _rows(line, width))


def _rows(line: str, width: int) -> list[str]:
    tokens = [m for m in TOKEN.finditer(line) if len(line) > width]
    end = next((m.start() for m in tokens if m[0].startswith("#")), len(line))
    edges = [0, *(m.end() for m in tokens if line[m.start():m.end() + 1] in (", ", "+ ")), end]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    rows = [""]
    for piece in (line[a:b] for a, b in pairwise(edges)):
        if rows[-1].strip() and len(rows[-1] + piece.rstrip()) > width:
            rows[-1] = rows[-1].rstrip()
            rows.append(indent + piece.lstrip())
        else:
            rows[-1] += piece
    return [*rows[:-1], rows[-1] + line[end:]]


def note(op: Op) -> str:
    """The user's lines that an op of a program comes from; those of an expression say nothing."""
    lines = {o.line for r in op.results for o in origins.of(r)}
    return ", ".join(sorted(short(x) for x in lines if x and not x.startswith(EXPRESSION)))


def short(line: str) -> str:
    """`file:line` without the folder in which libraries are installed."""
    return re.sub(r"^/.*/(site|dist)-packages/", "", line)


def sites_of(module: Module, kernel: Func) -> list[tuple[Origin, ...]]:
    """What each call of a kernel computes."""
    return [origins.of_all(op.results) for p in module.programs for op in p.body.ops
            if isinstance(op, KernelCall) and op.callee == kernel.name]


def describe(sites: Sequence[Sequence[Origin]], most: int = 8, paths: int = 4) -> list[str]:
    """`file:line  code  (operators)  in modules` for each line that calls of a kernel come from, of
    `most` lines and `paths` modules."""
    lines: dict[tuple[str, str], list[Origin]] = {}
    for origin in (o for site in sites for o in site):
        lines.setdefault((short(origin.line), origin.code), []).append(origin)
    rows = [f"{line or '(no line)'}  {code}  ({', '.join(dict.fromkeys(o.target for o in found))})"
            .replace("    ", " ") + _modules(
                dict.fromkeys(o.module for o in found if o.module), paths)
            for (line, code), found in lines.items()]
    return rows if len(rows) <= most else [*rows[:most], f"and {len(rows) - most} lines more"]


def _modules(paths: Mapping[str, None], most: int) -> str:
    """`  in stages.0.act, stages.1.act` of the modules that ran."""
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return f"  in {', '.join(list(paths)[:most])}{more}" if paths else ""
