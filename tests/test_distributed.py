"""Training on two processes over gloo: data-parallel, sharded and tensor-parallel, as in eager."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

QUICK = ("several buckets", "tensor parallel")
SLOW = ("one bucket", "static graph", "unused parameters", "gradients in buckets", "accumulation",
        "evaluation", "declined graphs", "sharded", "sharded by block", "sharded in halves")


@pytest.mark.parametrize("name", [
    *QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
@pytest.mark.report(205, 231)
def test_processes_train_as_in_eager(name: str, tmp_path: Path) -> None:
    program = Path(__file__).with_name("distributed.py")
    ran = subprocess.run([sys.executable, str(program), str(tmp_path), name], timeout=500,
                         capture_output=True, text=True)
    found = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert found == ["", ""], ran.stderr[-2000:]
