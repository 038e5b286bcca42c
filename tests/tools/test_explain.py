"""What `rung explain` says, and the figures behind it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rung.pipeline import lower_module
from rung.program.ir import Module
from rung.targets.base import target
from rung.tools.capture import Capture, capture
from rung.tools.explain import explain, size
from rung.tools.flops import bytes_after, bytes_before, flops
from rung.tools.given import Given, from_expression
from rung.tools.show import Request

BASE = Request(target="cpu.base")


def captured(expression: str, train: bool = False) -> Capture:
    return capture(from_expression(expression), train)


def counted(expression: str) -> int:
    (graph,) = captured(expression).graphs
    assert graph.imported
    stages = lower_module(graph.imported.func, target("cpu.base"))
    return flops(stages.modules["tensor"], graph.hints).total


@pytest.mark.parametrize(("expression", "total"), [
    ("torch.randn(16, 8) @ torch.randn(8, 4)", 1024),
    ("nn.Linear(8, 4)(torch.randn(16, 8))", 1024),
    ("torch.randn(3, 16, 8) @ torch.randn(3, 8, 4)", 3 * 1024),
    ("torch.randn(16) + 1", 0),
    ("F.scaled_dot_product_attention(*(torch.randn(1, 2, 8, 4) for _ in range(3)))",
     2 * 2 * (8 * 8 * 4) * 2),
])
def test_flops(expression: str, total: int) -> None:
    assert counted(expression) == total


def test_calls_are_counted_by_torchs_formulas() -> None:
    found = captured("F.conv2d(torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3))")
    func = found.graphs[0].imported.func  # type: ignore[union-attr]
    assert flops(Module((func,)), {}).total == 2 * 4 * 6 * 6 * 3 * 3 * 3


def test_calls_without_a_formula_are_named() -> None:
    found = captured("torch.sort(torch.randn(8))[0]")
    func = found.graphs[0].imported.func  # type: ignore[union-attr]
    assert flops(Module((func,)), {}).uncounted == ("aten.sort.default",)


def test_bytes_before_and_after_fusion() -> None:
    (graph,) = captured("torch.floor(torch.randn(1024, 1024)) + 1").graphs
    assert graph.imported
    machine = target("cpu.base")
    stages = lower_module(graph.imported.func, machine)
    assert bytes_before(graph.imported.func, {}) == 16 << 20
    assert bytes_after(stages.modules["loop"], machine.machine, {}) == 8 << 20


def test_the_report_of_a_pointwise_chain() -> None:
    text = explain(from_expression("torch.floor(torch.randn(1024, 1024)) + 1"), BASE)
    assert "16 MiB moved as ATen calls, 8 MiB after fusion" in text
    assert "kernel floor_add" in text
    assert "aten.add.Tensor" in text and "aten.floor.default" in text
    assert "at least" in text and "bound by" in text
    assert "graph breaks: 0" in text


def test_the_report_of_a_matmul() -> None:
    text = explain(from_expression("torch.randn(16, 8) @ torch.randn(8, 4)"), BASE)
    assert "1,024 FLOPs" in text


def test_alternatives_are_priced() -> None:
    text = explain(from_expression("torch.randn(17, 9) @ torch.randn(9, 23)"), BASE)
    assert "instead: " in text and " us (compute" in text


def broken(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    print("here")
    return y * 2


def test_breaks_have_a_line_and_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    text = explain(Given("broken", broken, (torch.randn(4),)), BASE)
    assert "graphs: 2 inference; graph breaks: 1" in text
    line = broken.__code__.co_firstlineno + 2
    assert f"{__file__}:{line}: " in text
    assert f"graph break at {__file__}:{line}" in capsys.readouterr().err


def test_calls_that_stay_say_why() -> None:
    text = explain(from_expression("torch.sort(torch.randn(8))[0] + 1"), BASE)
    assert "calls that stay with ATen\n    aten.sort.default x1: no entry" in text


def test_lines_of_the_user() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(x)
        return y + x

    text = explain(Given("function", function, (torch.randn(8),)), BASE)
    first = function.__code__.co_firstlineno
    assert f"{__file__}:{first + 1} y = torch.exp(x)" in " ".join(text.split())
    assert f"{__file__}:{first + 2} return y + x" in " ".join(text.split())


def test_symbolic_sizes_are_told_with_their_hints() -> None:
    x = torch.randn(24, 8)
    torch._dynamo.mark_dynamic(x, 0)
    text = explain(Given("dynamic", lambda x: torch.exp(x) + 1, (x,)), BASE)
    assert "= 24" in text
    assert "1.5 KiB after fusion" in text


def test_training_of_a_module() -> None:
    found = capture(Given("linear", nn.Linear(8, 4), (torch.randn(2, 8),)), train=True)
    assert [g.kind for g in found.graphs] == ["forward", "backward"]


@pytest.mark.parametrize(("n", "text"), [(0, "0 B"), (512, "512 B"), (1536, "1.5 KiB"),
                                         (8 << 20, "8 MiB"), (3 << 30, "3 GiB")])
def test_sizes(n: int, text: str) -> None:
    assert size(n) == text
