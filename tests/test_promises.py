"""Promises about results: kept, the answer is eager's; broken, an error, and never other memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from promised import PROGRAMS, broken, capturing, compiled, copies
from sanitized import missing
from torch.utils._pytree import tree_leaves

from rung.frontends.torch import importer
from rung.targets.cpu import glue

SOME = ("checked rows", "rows of an argument", "equal rows", "fewer", "gradient")


def check(name: str, dynamic: bool | None = None) -> None:
    program = PROGRAMS[name]
    with capturing():
        made = compiled(program, dynamic)
        got, want = (tree_leaves(f(*copies(program.kept, program.train)))
                     for f in (made, program.fn))
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=0)
        with pytest.raises(RuntimeError, match=f"(?s){program.error}"):
            broken(program, made)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_promise(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", SOME)
def test_with_dynamic_sizes(name: str) -> None:
    check(name, dynamic=True)


@pytest.mark.parametrize("name", SOME)
def test_without_native_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glue, "glue", lambda: None)
    check(name)


def test_nothing_is_written_after_a_broken_promise() -> None:
    program = PROGRAMS["overwritten"]
    with capturing():
        made, args = compiled(program), [x.clone() for x in program.broken]
        with pytest.raises(RuntimeError):
            made(*args)
    assert torch.equal(args[1], program.broken[1])


def test_sizes_that_nobody_promised_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importer, "promise", lambda *_: pytest.fail("nothing is promised"))
    with capturing():
        torch._dynamo.reset()
        f = torch.compile(lambda x: x.nonzero() + 1, backend="rung", options={"strict": True})
        for count in (1, 3):
            assert f(torch.ones(count)).shape == (count, 1)


@pytest.mark.sanitize
def test_broken_promises_read_no_other_memory(tmp_path: Path) -> None:
    """All programs in one process under AddressSanitizer, with kernels of plain C."""
    if reason := missing():
        pytest.skip(reason)
    libraries = [subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True,
                                text=True, check=True).stdout.strip()
                 for name in ("libasan.so", "libstdc++.so.6")]
    settings = {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0",
                "PYTHONMALLOC": "malloc", "RUNG_CC": "gcc -fsanitize=address -O1 -g1",
                "RUNG_TARGET": "cpu.base", "RUNG_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("promised.py")
    run = subprocess.run([sys.executable, script], env=os.environ | settings, capture_output=True,
                         text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    said = dict(line.split(": ", 1) for line in run.stdout.splitlines() if ": " in line)
    assert said.keys() >= PROGRAMS.keys()
    assert "no error" not in said.values()
