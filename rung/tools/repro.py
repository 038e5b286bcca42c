"""`rung repro`: a graph, or one of its kernels, as a file that runs alone.

A graph becomes Python that needs torch and Rung only; where Rung and torch differ on it, it is cut
down first, to few operators that still differ. A kernel becomes a dump for `rung opt --run`, or C
with a `main`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import fx

from rung.compilation import Compilation
from rung.core.errors import RungError
from rung.core.op import Func
from rung.core.types import TensorType
from rung.frontends.torch.importer import import_graph
from rung.frontends.torch.tensors import HOST, cloned
from rung.program.ir import Module
from rung.targets.base import buffers_of, is_library, symbols_of
from rung.tools import bisect, judge
from rung.tools.capture import Graph, capture
from rung.tools.given import SEED, Given, UserError
from rung.tools.show import (
    Request,
    alone,
    compilation_of,
    history_of,
    target_of,
    wrapped,
)

Args = list[Any]
Results = Sequence[Any]
MOST = 64 << 20  # bytes of inputs that are saved beside the file
LITERAL = 16  # elements of a tensor that is written out

TEMPLATE = '''\
"""{title}

Runs by itself: rung's results beside those of the same operators in eager. Exit code 1 if one is
off by more than {bound} of its largest element, and by more than eager is from float64.
"""
from math import inf, nan
from pathlib import Path

import torch
from torch import device

from rung.tools import judge


class Graph(torch.nn.Module):
    {code}


def tensor(size, stride, dtype, low, high, device="cpu"):
    span = 1 + sum((n - 1) * s for n, s in zip(size, stride)) if all(s for s in size) else 0
    x = torch.randn(span) if dtype.is_floating_point else torch.randint(low, high + 1, (span,))
    return torch.as_strided(x.to(device, dtype), size, stride)


def inputs():
    torch.manual_seed({seed})
    return [{inputs}]


torch.set_grad_enabled(False)
graph = Graph()
torch._dynamo.reset()
run = torch.compile(graph, backend="rung", dynamic=False, options={options})
said, wrong = judge.report(run, torch.fx.symbolic_trace(graph), inputs(), {bound})
print(said)
raise SystemExit(wrong)
'''


def repro(given: Given, request: Request, kernel: str = "", out: str = "") -> str:
    """The file's text, which `out` is for: its ending says what a kernel becomes, .ir or .c.

    With `out` the inputs are saved beside it, so that they are the very ones.
    """
    found = capture(given, request.train, inputs=True)
    if kernel:
        return _kernel(found.graphs, request, kernel, out.endswith(".c"))
    usable = [g for g in found.graphs if g.imported is not None]
    if not usable:
        why = [g.refused for g in found.graphs] or [found.nothing]
        raise UserError(f"{given.label}: there is no graph that rung compiles: {why[0]}")
    for graph in usable:
        compilation = compilation_of(graph, target_of([graph], request), request)
        if differs(graph, compilation):
            graph = shrunk(graph, compilation)
            return text(graph, f"{given.label}: rung and eager differ", request.target, out)
    return text(usable[0], f"{given.label}: rung and eager agree", request.target, out)


# --- a graph as Python

def text(graph: Graph, title: str, target: str = "", out: str = "") -> str:
    """The Python file of one graph on its inputs; with `out`, their values go to a file beside."""
    assert graph.imported is not None
    module, inputs = closed(graph.module, graph.inputs)
    size = sum(x.nbytes for x in inputs if isinstance(x, torch.Tensor))
    if out and size <= MOST:
        torch.save(inputs, Path(out).with_suffix(".pt"))
        made = '*torch.load(Path(__file__).with_suffix(".pt"))'
    else:
        made = "".join(f"\n        {_input(x)}," for x in inputs)
    code = str(module.code).strip().replace("\n", "\n    ")
    return TEMPLATE.format(title=title, code=code, inputs=made, seed=SEED, bound=judge.tolerance(
        Module((graph.imported.func,))), options={"target": target, "strict": True})


def closed(module: fx.GraphModule, inputs: Results) -> tuple[fx.GraphModule, Args]:
    """The graph with its constants as inputs."""
    made, given = fx.Graph(), list(inputs)
    new: dict[fx.Node, fx.Node] = {}
    order = {"placeholder": 0, "get_attr": 1}
    for node in sorted(module.graph.nodes, key=lambda n: order.get(n.op, 2)):
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(module)
            if not isinstance(value, torch.Tensor):
                raise UserError(f"the graph has {node.target}, a graph of its own: it is not "
                                "written to a file yet")
            new[node] = made.placeholder(node.name)
            given.append(value)
        else:
            new[node] = made.node_copy(node, new.__getitem__)
    return fx.GraphModule(torch.nn.Module(), made), given


def _input(x: Any) -> str:
    """What makes an input of the same kind; integers within the range of what was given."""
    if not isinstance(x, torch.Tensor):
        return repr(x)
    where = "" if x.device == HOST else f', device="{x.device}"'
    if x.numel() <= LITERAL and not x.is_floating_point() and x.is_contiguous():
        return f"torch.tensor({x.tolist()}, dtype={x.dtype}{where})"
    whole = not x.is_floating_point() and not x.is_complex() and x.numel()
    low, high = (int(x.min()), int(x.max())) if whole else (0, 1)
    return f"tensor({tuple(x.shape)}, {x.stride()}, {x.dtype}, {low}, {high}{where})"


# --- cutting a graph down

def differs(graph: Graph, compilation: Compilation) -> bool:
    """Whether rung computes a graph otherwise than torch, or cannot compile it."""
    if graph.imported is None:
        return False
    try:
        module = compilation.history(graph.imported.func).reached()
        new = bisect.compiled(graph, compilation, module)
    except RungError:
        return True
    return bool(bisect.verdict_of(graph)(new))


def shrunk(graph: Graph, compilation: Compilation) -> Graph:
    """A part of `graph` that still differs: its operators up to the first wrong one, and of these
    the last ones that do not work without each other; what comes before is an input."""
    values = Recorder(graph.module).record(graph.inputs)
    nodes = [n for n in graph.module.graph.nodes if n.op == "call_function"]
    ends = [n for n in nodes if isinstance(values.get(n), torch.Tensor)]
    if not ends:
        return graph

    def part(last: fx.Node, first: int) -> Graph:
        return cut(graph, nodes[first:], last, values)
    last = _least(len(ends) - 1, lambda k: differs(part(ends[k], 0), compilation))
    end = ends[last]
    if not differs(part(end, 0), compilation):
        return graph
    behind = nodes.index(end)
    back = _least(behind, lambda k: differs(part(end, behind - k), compilation))
    return part(end, behind - back)


def _least(most: int, holds: Callable[[int], bool]) -> int:
    """The least number up to `most` for which `holds`, if it does for all numbers after one."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


class Recorder(fx.Interpreter):
    """Runs a graph and remembers the value of every node."""

    def record(self, inputs: Results) -> dict[fx.Node, Any]:
        self.values: dict[fx.Node, Any] = {}
        torch.manual_seed(SEED)
        with torch.no_grad():
            self.run(*cloned(inputs))
        return self.values

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.values[n] = value.clone() if isinstance(value, torch.Tensor) else value
        return self.values[n] if n.op != "placeholder" else value


def cut(graph: Graph, inside: Sequence[fx.Node], end: fx.Node, values: Mapping[fx.Node, Any]
        ) -> Graph:
    """The graph of the nodes `inside` that `end` needs; what they need from outside is given."""
    allowed, needed = set(inside), {end}
    for node in reversed(inside):
        if node in needed:
            needed.update(n for n in node.all_input_nodes if _source(n) in allowed)
    made, given, new = fx.Graph(), [], dict[fx.Node, fx.Node]()
    order = [n for n in graph.module.graph.nodes if n in needed and _source(n) in allowed]
    for node in order:
        for n in node.all_input_nodes:
            if n not in new and n not in needed:
                new[n] = made.placeholder(n.name)
                new[n].meta = dict(n.meta)
                given.append(values[n])
    for node in order:
        new[node] = made.node_copy(node, new.__getitem__)
    made.output((new[end],))
    module = fx.GraphModule(graph.module, made)
    try:
        imported, refused = import_graph(module, graph.kind), ""
    except RungError as error:
        imported, refused = None, str(error)
    return Graph(graph.kind, module, imported, refused, graph.hints, given)


def _source(node: fx.Node) -> fx.Node:
    """The operator of which a node is one result."""
    first = node.args[0] if node.args else None
    return first if node.target is operator.getitem and isinstance(first, fx.Node) else node


# --- a kernel

def _kernel(graphs: Sequence[Graph], request: Request, name: str, as_c: bool) -> str:
    target, known = target_of(graphs, request), dict[str, Func]()
    for graph in graphs:
        if graph.imported is None:
            continue
        rung = "kernel" if as_c else "tile"
        history = history_of(graph, target, replace(request, rung=rung))
        known |= {k.name: k for k in history.at(rung).kernels}
        if name in known and as_c and not target.name.startswith("cpu"):
            raise UserError(f"{name} is no C for {target.name}: without .c it becomes a dump")
        if name in known and as_c and not is_library(known[name]):
            return target.emit([known[name]]) + c_main(known[name], graph.hints)
        if name in known:
            return "# rung opt THIS.ir --to kernel --run\n" + wrapped(str(alone(known[name])))
    raise UserError(f"no kernel is called {name!r}; there are {', '.join(known)}")


def c_main(kernel: Func, hints: Mapping[str, int]) -> str:
    """A `main` in C that runs a kernel on numbers of its own and prints the sums of its results."""
    lines = ["", "int printf(const char *, ...);", "void *aligned_alloc(unsigned long, "
             "unsigned long);", "", "int main(void)", "{"]
    counts: dict[str, int] = {}
    for v in buffers_of(kernel):
        assert isinstance(v.type, TensorType)
        count = counts[v.name] = prod(int(n.evaluate(hints)) for n in v.type.shape)
        size = -(-max(count * v.type.dtype.bytes, 1) // 64) * 64
        lines.append(f"    {C_TYPES.get(v.type.dtype.name, 'unsigned char')} *{v.name} = "
                     f"aligned_alloc(64, {size});")
        step = "(i * 37 % 101 - 50) / 50.0" if v.type.dtype.is_float else "i % 2"
        lines.append(f"    for (long i = 0; i < {count}; i++) {v.name}[i] = {step};")
    names = [v.name for v in buffers_of(kernel)] + [str(hints[s]) for s in symbols_of(kernel)]
    lines.append(f"    run_{kernel.name}({', '.join(names)});")
    for v in kernel.outs:
        lines += ["    {", "        double sum = 0;",
                  f"        for (long i = 0; i < {counts[v.name]}; i++) sum += {v.name}[i];",
                  f'        printf("{v.name}: sum %.9g\\n", sum);', "    }"]
    return "\n".join([*lines, "    return 0;", "}", ""])


C_TYPES = {"f32": "float", "f64": "double", "i64": "long", "i32": "int", "i16": "short",
           "i8": "signed char", "u8": "unsigned char", "bool": "unsigned char"}
