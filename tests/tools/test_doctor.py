"""`rung doctor`: what it says on this machine, and on machines that lack something."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rung.targets.cpu import build
from rung.tools import doctor


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


def test_a_compiler_that_compiles_wrongly(settings: Callable[..., None], tmp_path: Path) -> None:
    """One that takes `!=` for `>`."""
    wrong, right = tmp_path / "cc", " ".join(build.compiler())
    wrong.write_text('#!/bin/sh\nfor x; do case $x in *.c) sed -i "s/ != / > /g" "$x"; esac; done\n'
                     f'exec {right} "$@"\n')
    wrong.chmod(0o755)
    settings(cc=str(wrong))
    finding = doctor._numbers()
    assert "counts: changes result" in finding.remedy and "sums: " not in finding.remedy
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
