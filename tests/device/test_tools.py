"""The command line's tools on tensors of a GPU: they follow the device of a graph."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import plant

from rung import entry
from rung.cli import main
from rung.tools import doctor

MM = ('torch.relu((torch.randn(20, 12, device="cuda") + torch.randn(12, device="cuda")) '
      '@ torch.randn(12, 16, device="cuda"))')


def said(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(args) == 0
    return capsys.readouterr().out


def test_show_and_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert "__global__" in said(capsys, "show", "-c", MM, "--rung", "source")
    assert "__global__" not in said(capsys, "show", "-c", MM, "--rung", "source", "--target",
                                    "cpu.base")
    assert " on cuda.sm90" in said(capsys, "explain", "-c", MM)


def test_bisect(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no pass changes the result" in said(capsys, "bisect", "-c", MM)


@pytest.mark.parametrize("saved", [True, False])
def test_repro(capsys: pytest.CaptureFixture[str], tmp_path: Path, saved: bool) -> None:
    path = tmp_path / "graph.py"
    if saved:
        said(capsys, "repro", "-c", MM, "-o", str(path))
        assert "rung and eager agree" in path.read_text() and path.with_suffix(".pt").exists()
    else:
        path.write_text(said(capsys, "repro", "-c", MM))
        assert 'device="cuda:0"' in path.read_text()
    text = path.read_text()
    path.write_text(text.replace("import torch\n", "import torch\nimport rung.entry\n", 1))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True,
                          check=False, timeout=200, env=env)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (
        0, ["0 of 4 results and arguments are wrong"]), done.stderr


def test_doctor() -> None:
    for finding in (doctor._gpu(), doctor._gpu_kernel()):
        assert not finding.remedy, str(finding)
    assert "compute capability" in doctor._gpu().found
    assert "agreed with eager" in doctor._gpu_kernel().found


def verified(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, backend=entry.rung, fullgraph=True, dynamic=False,
                         options={"verify": 1.0, "strict": True})


def test_verify_draws_what_eager_draws(caplog: pytest.LogCaptureFixture) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(x * 2, 0.5, True).exp() + torch.rand(1000, device="cuda")
    run, x = verified(fn), torch.randn(1000, device="cuda")
    with caplog.at_level(logging.WARNING, logger="rung"), torch.no_grad():
        for _ in range(2):
            torch.manual_seed(5)
            want, after = fn(x), torch.rand(3, device="cuda")
            torch.manual_seed(5)
            torch.testing.assert_close(run(x), want)
            assert torch.equal(torch.rand(3, device="cuda"), after)
    assert not caplog.records


def two_kernels(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.floor(x) * 2
    z = y.cumsum(0).sort()[0]
    return z + w


def test_verify_finds_a_planted_bug(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                    settings: Callable[..., None],
                                    caplog: pytest.LogCaptureFixture) -> None:
    plant(monkeypatch, "loop.simplify")
    settings(keep=tmp_path)
    x, w = torch.randn(6, 9, device="cuda"), torch.randn(9, device="cuda")
    run = verified(two_kernels)
    with caplog.at_level(logging.WARNING, logger="rung"), torch.no_grad():
        for _ in range(2):
            assert torch.equal(run(x, w), two_kernels(x, w))
    (message,) = [r.message for r in caplog.records if r.name == "rung"]
    assert message.startswith("rung: verify: it differs from eager in result 0 by ")
    assert re.search(r"first in kernel \w+ \(", message)
    assert "reproducer: /" in message
