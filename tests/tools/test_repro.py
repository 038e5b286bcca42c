"""`rung repro`: files that run alone, and graphs cut down to what differs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from planted import plant
from torch import Tensor

from rung.targets.base import target
from rung.tools import opt
from rung.tools.capture import Graph, capture
from rung.tools.given import Given, UserError, from_expression
from rung.tools.repro import closed, differs, repro, shrunk, text
from rung.tools.show import Request, compilation_of

BASE = Request(target="cpu.base")
MANY = "torch.relu(torch.floor(torch.randn(6, 9)).exp() + torch.randn(9)).sort()[0].cumsum(0) * 2"


def run(path: Path, source: str) -> subprocess.CompletedProcess[str]:
    path.write_text(source)
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False,
                          timeout=200)


@pytest.mark.parametrize("saved", [False, True])
def test_a_graph_as_a_file(saved: bool, tmp_path: Path) -> None:
    path = tmp_path / "graph.py"
    source = repro(from_expression(MANY + " + torch.arange(9)"), BASE,
                   out=str(path) if saved else "")
    assert "rung and eager agree" in source and "torch.ops.aten.exp.default" in source
    assert path.with_suffix(".pt").exists() == saved
    assert ("torch.load" in source) == saved
    done = run(path, source)
    assert (done.returncode, done.stdout) == (0, "0 of 4 results and arguments are wrong\n"), \
        done.stderr


def test_a_file_fails_where_the_results_differ(tmp_path: Path) -> None:
    source = repro(from_expression("torch.randn(5).floor() + 1"), BASE)
    done = run(tmp_path / "graph.py", source.replace(
        "torch.compile(graph", "(lambda g, **_: lambda x: (x,))(graph"))
    assert done.returncode == 1
    assert "<- wrong" in done.stdout and "1 of 2 results and arguments are wrong" in done.stdout


def graph_of(expression: str) -> Graph:
    return capture(from_expression(expression), inputs=True).graphs[0]


def test_a_graph_is_cut_down_to_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(MANY)
    compilation = compilation_of(graph, target("cpu.base"), BASE)
    assert not differs(graph, compilation)
    plant(monkeypatch, "tensor.lower")
    small = shrunk(graph, compilation)
    assert differs(small, compilation)
    assert [str(n.target) for n in small.module.graph.nodes if n.op == "call_function"] == [
        "aten.add.Tensor"]
    assert "torch.ops.aten.add.Tensor" in text(small, "")


def test_constants_become_inputs() -> None:
    table = torch.randn(4)

    def function(x: Tensor) -> Tensor:
        return x + torch.tensor([1.0, 2.0, 3.0, 4.0]) * table
    (graph,) = capture(Given("function", function, (torch.randn(4),)), inputs=True).graphs
    module, inputs = closed(graph.module, graph.inputs)
    assert not any(n.op == "get_attr" for n in module.graph.nodes)
    want = graph.module(*graph.inputs)
    assert all(torch.equal(a, b) for a, b in zip(module(*inputs), want, strict=True))


def test_a_kernel_as_a_dump(tmp_path: Path) -> None:
    path = tmp_path / "kernel.ir"
    path.write_text(repro(from_expression("torch.randn(5).floor() + 1"), BASE, "floor_add"))
    out = opt.opt(str(path), opt.Request(to="kernel", target="cpu.base", run=True))
    assert "kernel-ir floor_add" in out and "the same bits" in out


@pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc")
def test_a_kernel_as_c(tmp_path: Path) -> None:
    source = repro(from_expression("torch.randn(50, 3).floor() + 1"), BASE, "floor_add", "k.c")
    path = tmp_path / "k.c"
    path.write_text(source)
    subprocess.run(["gcc", "-O1", str(path), "-o", str(tmp_path / "k"), "-lm"], check=True)
    done = subprocess.run([str(tmp_path / "k")], capture_output=True, text=True, check=True)
    x = (torch.arange(150) * 37 % 101 - 50) / 50
    assert done.stdout == f"y: sum {(torch.floor(x) + 1).sum().item():.9g}\n"


def test_an_unknown_kernel() -> None:
    with pytest.raises(UserError, match="no kernel is called 'relu'; there are floor_add"):
        repro(from_expression("torch.randn(5).floor() + 1"), BASE, "relu")
