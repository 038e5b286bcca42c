"""`rung doctor`: what it says on this machine, and on machines that lack something."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rung.targets.cpu import build
from rung.tools import doctor

HALF = r"/reduce_add_i/,/^}/ s/add_i[0-9]*((v)\[0\], (v)\[1\])/((v)[0])/"
"""Half of a sum of integers is lost, as by the vectorisers of gcc 12.2 with AVX-512."""


def faulty(folder: Path, fault: str) -> Path:
    """A compiler that does to each C file what a script of sed says before it compiles it."""
    wrong, right = folder / "cc", " ".join(build.compiler())
    script = folder / "fault.sed"
    script.write_text(fault)
    wrong.write_text(f'#!/bin/sh\nfor x; do case $x in *.c) sed -i -f {script} "$x"; esac; done\n'
                     f'exec {right} "$@"\n')
    wrong.chmod(0o755)
    return wrong


def test_all_is_well_here() -> None:
    text, well, _ = doctor.doctor()
    assert well
    lines = text.splitlines()
    assert all(line.startswith("ok ") for line in lines[:-1])
    assert len(lines) == len(doctor.CHECKS) + 1 and lines[-1] == "all is well"


def test_no_compiler(settings: Callable[..., None]) -> None:
    settings(cc="no-such-compiler")
    text, well, _ = doctor.doctor()
    assert not well
    assert "no  compiler" in text and "no  kernel" in text
    assert "'no-such-compiler' is not on the PATH" in text


@pytest.mark.parametrize("fault, kinds, right", [
    ("s/ != / > /g", {"counts"}, {"sums", "functions"}),
    (HALF, {"counts", "conversions"}, {"functions", "extremes"}),
    (r"/reduce_add_f/,/^}/ s/((v)\[0\] + (v)\[1\])/((v)[0])/", {"sums", "products"},
     {"counts", "functions"}),
], ids=["not-equal", "half-of-a-count", "half-of-a-sum"])
def test_a_compiler_that_compiles_wrongly(fault: str, kinds: set[str], right: set[str],
                                          settings: Callable[..., None], tmp_path: Path) -> None:
    settings(cc=str(faulty(tmp_path, fault)))
    finding = doctor._numbers()
    named = {line.partition(": ")[0] for line in finding.remedy.splitlines() if ": " in line}
    assert kinds <= named and not right & named
    assert f"{len(named & doctor.NUMBERS.keys())} of 7 kinds of kernels are wrong" in finding.found
    assert "may compile them wrongly" in finding.remedy


def test_what_does_not_fit_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SUPPORTED", ((1, 0), (1, 9)))
    monkeypatch.setattr(doctor, "PYTHONS", ((2, 6), (2, 7)))
    text, well, _ = doctor.doctor()
    assert not well
    assert "install torch 1.0 to 1.9" in text
    assert text.endswith(f"2 of {len(doctor.CHECKS)} need attention\n")


def test_a_cache_that_others_can_write(settings: Callable[..., None], tmp_path: Path) -> None:
    folder = tmp_path / "mine" / "cpu"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    settings(cache_dir=tmp_path / "mine")
    finding = doctor._cache()
    assert "others can write to" in finding.found and f"chmod go-w {folder}" in finding.found
    assert "RUNG_CACHE_DIR" in finding.remedy


def test_a_cache_that_is_read_only_or_noexec(settings: Callable[..., None], tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    settings(cache_dir=tmp_path)
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "read-only" in doctor._cache().found and not doctor._cache().remedy
    noexec = os.statvfs_result((*real[:8], real.f_flag | os.ST_NOEXEC, real.f_namemax))
    monkeypatch.setattr(os, "statvfs", lambda _: noexec)
    assert "mounted noexec" in doctor._cache().found and "TMPDIR" in doctor._cache().remedy


def test_a_cache_that_cannot_be_made(settings: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings(cache_dir=tmp_path / "file")
    assert "RUNG_CACHE_DIR" in doctor._cache().remedy
