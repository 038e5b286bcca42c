"""`options={"verify": share}`: which calls are compared, and what happens at a difference."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import plant
from torch import Tensor, nn

from rung.core.options import Options
from rung.frontends.torch import backend
from rung.tools import verify
from rung.tools.verify import Verified


def compiled(fn: Callable[..., Any], share: float = 1.0) -> Callable[..., Any]:
    torch._dynamo.reset()
    backend.reset()
    return torch.compile(fn, backend=backend.rung, fullgraph=True, dynamic=False,
                         options={"verify": share, "strict": True, "target": "cpu.base"})


def two_kernels(x: Tensor, w: Tensor) -> Tensor:
    y = torch.floor(x) * 2
    z = y.cumsum(0).sort()[0]
    return z + w


def test_the_share_of_calls_that_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real = Verified.checked
    monkeypatch.setattr(Verified, "checked", lambda self, args: (
        seen.append(self.calls), real(self, args))[1])
    run = compiled(lambda x: torch.floor(x) + 1, 0.25)
    with torch.no_grad():
        for _ in range(9):
            run(torch.randn(5))
    assert seen == [1, 5, 9]


def test_right_graphs_stay_compiled(caplog: pytest.LogCaptureFixture,
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_warn", None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
    twin = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
    twin.load_state_dict(model.state_dict())
    run = compiled(model)
    for _ in range(2):
        x = torch.randn(6, 8)
        state = torch.get_rng_state()
        run(x).square().sum().backward()
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        twin(x).square().sum().backward()
        assert torch.equal(after, torch.get_rng_state())
    for a, b in zip((*model.parameters(), *model.buffers()),
                    (*twin.parameters(), *twin.buffers()), strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


def test_a_planted_bug(monkeypatch: pytest.MonkeyPatch, settings: Callable[..., None],
                       caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    plant(monkeypatch, "loop.simplify")
    settings(keep=tmp_path)
    run, x, w = compiled(two_kernels), torch.randn(6, 9), torch.randn(9)
    with caplog.at_level(logging.WARNING, logger="rung"), torch.no_grad():
        for _ in range(3):
            assert torch.equal(run(x, w), two_kernels(x, w))
    (message,) = [r.message for r in caplog.records if r.name == "rung"]
    assert message.startswith("verify: rung differs from eager in result 0 by ")
    line = two_kernels.__code__.co_firstlineno + 3
    assert re.search(rf"first in kernel \w+ \({re.escape(__file__)}:{line}\)", message)
    assert message.endswith("this graph runs in eager from now on")
    path = re.search(r"reproducer: (\S+\.py);", message)
    assert path and Path(path[1]).parent == tmp_path
    done = subprocess.run([sys.executable, path[1]], capture_output=True, text=True, check=False,
                          timeout=200)
    assert (done.returncode, done.stdout) == (
        0, "0 of 3 results and arguments are wrong\n"), done.stderr  # there the bug is not planted


def test_a_wrong_update_of_an_argument_is_mended(
        monkeypatch: pytest.MonkeyPatch, settings: Callable[..., None], tmp_path: Path) -> None:
    plant(monkeypatch, "loop.simplify")
    settings(keep=tmp_path)

    def update(cache: Tensor, x: Tensor) -> Tensor:
        cache.copy_(torch.floor(x) + cache)
        return cache * 2

    cache, x = torch.ones(7), torch.randn(7)
    right = cache.clone()
    with torch.no_grad():
        assert torch.equal(compiled(update)(cache, x), update(right, x))
    assert torch.equal(cache, right)


def test_what_is_nearer_to_float64_than_eager_is_no_bug() -> None:
    class Off(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return ((x + 1e4) - 1e4,)
    module = torch.fx.symbolic_trace(Off())
    x = torch.rand(100)
    checker = Verified(lambda args: (args[0],), module, _imported(x), Options(verify=1.0))
    checker.bound = 1e-6
    assert torch.equal(checker.checked([x])[0], x) and checker.trusted


def _imported(x: Tensor) -> Any:
    from rung.tools.capture import capture
    from rung.tools.given import Given

    return capture(Given("f", lambda x: x + 1.0, (x,))).graphs[0].imported
