"""What a compilation logs, and what it leaves in TORCH_TRACE."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rung import entry, pipeline
from rung.core import trace
from rung.frontends.torch import compat

PROGRAM = """\
import torch
with torch.no_grad():
    torch.compile(lambda x: torch.floor(x) + 1, backend="rung")(torch.randn(8))
"""


def compile_one() -> None:
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(lambda x: torch.floor(x) + 1, backend=entry.rung)(torch.randn(8))


def test_each_module_has_its_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="rung"):
        compile_one()
    found = {(r.name, r.levelname) for r in caplog.records}
    assert {("rung.loop.fuse", "DEBUG"), ("rung.tile.choose", "DEBUG"),
            ("rung.compilation", "INFO")} <= found
    assert "graph main: 2 ops of ATen, 1 launches of 1 kernels, 0 calls of ATen left" in caplog.text
    assert "fuse fired floor into add" in caplog.text


def test_one_logger_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="rung.loop.fuse"):
        compile_one()
    assert {r.name for r in caplog.records if r.name.startswith("rung")} == {"rung.loop.fuse"}


def test_nothing_is_traced_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "is_traced", lambda: False)  # pytest's handlers look like its own
    heard = []
    real = entry.rung.compiled
    monkeypatch.setattr(entry.rung, "compiled",
                        lambda *args: (heard.append(trace.active()), real(*args))[1])
    compile_one()
    assert heard == [False]


def test_who_listens_around_hears_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="rung"), trace.listen() as events:
        compile_one()
    assert [e.module for e in events if e.kind == "compiled"] == ["rung.compilation"]


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True,
                          env=os.environ | environment, check=True, timeout=120)


def test_torch_logs_and_torch_trace(tmp_path: Path) -> None:
    done = run(TORCH_LOGS="+rung", TORCH_TRACE=str(tmp_path))
    assert "fuse fired floor into add" in done.stderr
    (path,) = tmp_path.iterdir()
    lines = [line.partition("] ")[2].rpartition("] ")[2] for line in path.read_text().splitlines()
             if '"artifact"' in line and '"rung_' in line]
    found = [json.loads(line[line.index("{"):]) for line in lines]
    assert [x["artifact"]["name"] for x in found] == [
        f"rung_{name}" for name in (*pipeline.RUNGS, "source")]
    assert all(x["frame_id"] == 0 and x["has_payload"] for x in found)
    assert "kernel floor_add" in path.read_text()
