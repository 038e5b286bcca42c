"""`rung bisect`: a bug planted in each pass is found there, and so is one below the passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from planted import plant
from torch import Tensor, nn
from torch.nn import functional as F

from rung import entry, pipeline
from rung.compilation import Compilation
from rung.program.ir import Module
from rung.tools.bisect import bisect
from rung.tools.check import WrongResult
from rung.tools.given import Given, from_expression
from rung.tools.show import Request

BASE = Request(target="cpu.base")
NAMES = [f"{p.rung}.{p.name}" for p in pipeline.PASSES]


def function(x: Tensor, y: Tensor) -> Tensor:
    return torch.floor(x) + y


def given() -> Given:
    torch.manual_seed(0)
    return Given("function", function, (torch.randn(6, 9), torch.randn(9)))


def test_no_pass_is_wrong() -> None:
    text, fine = bisect(given(), BASE)
    assert fine
    assert text.endswith("no pass changes the result\n")
    assert [line.split()[0] for line in text.splitlines()[1:-1]] == [
        "program.import", *NAMES, "source"]


@pytest.mark.parametrize("name", NAMES)
def test_a_bug_in_a_pass_is_found_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, name)
    text, fine = bisect(given(), BASE)
    assert not fine
    assert text.splitlines()[-1].startswith(f"{name} is the first wrong pass, in graph 1 of 1")


@pytest.mark.parametrize("name", NAMES)
def test_checking_every_pass_finds_it_too(name: str, monkeypatch: pytest.MonkeyPatch,
                                          settings: Callable[..., None]) -> None:
    plant(monkeypatch, name)
    settings(check=True)
    compiled = torch.compile(function, backend=entry.rung, fullgraph=True,
                             options={"strict": True, "target": "cpu.base"})
    with torch.no_grad(), pytest.raises(Exception, match=f"{name} changes result 0") as caught:
        compiled(*given().args)
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), WrongResult)


class Healthy(nn.Module):
    """A layer norm over channels between two views, whose sums go in another order when fused."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(16), nn.Conv2d(16, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return F.gelu(self.conv(y))


def test_rounding_is_no_fault() -> None:
    torch.manual_seed(0)
    text, fine = bisect(Given("healthy", Healthy().eval(), (torch.randn(1, 16, 8, 8),)), BASE)
    assert fine, text


def test_nor_is_it_where_every_pass_is_checked(settings: Callable[..., None]) -> None:
    settings(check=True)
    torch.manual_seed(0)
    net, x = Healthy().eval(), torch.randn(1, 16, 8, 8)
    compiled = torch.compile(net, backend=entry.rung, fullgraph=True,
                             options={"strict": True, "target": "cpu.base"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["loop.fuse", "loop.canonical"])
def test_a_bug_in_a_network_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = Healthy().eval()
    plant(monkeypatch, name)
    text, fine = bisect(Given("net", lambda x: net(x + x.flip(-1)), (torch.randn(1, 16, 8, 8),)),
                        BASE)
    assert not fine and text.splitlines()[-1].startswith(f"{name} is the first wrong pass")


def test_a_bug_below_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = Compilation.executable

    def executable(self: Compilation, module: Module, constants: Any) -> Any:
        run = real(self, module, constants)
        return lambda args: tuple(x + 1 for x in run(args))
    monkeypatch.setattr(Compilation, "executable", executable)
    text, fine = bisect(given(), BASE)
    assert not fine
    assert "source is the first wrong pass" in text


def test_training_and_random_numbers() -> None:
    text, fine = bisect(from_expression("F.dropout(torch.randn(5, 8), 0.5) * torch.randn(8)"),
                        Request(target="cpu.base", train=True))
    assert fine, text
    assert "graph 2 of 2: backward" in text


def test_gradients_that_cancel() -> None:
    text, fine = bisect(from_expression("F.softmax(torch.randn(20, 12), -1).sum()"),
                        Request(target="cpu.base", train=True))
    assert fine, text
