"""C to libraries: the cache on disk, refusals, threads."""

from __future__ import annotations

import ctypes
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from dumps import parse
from kernels import compiled
from programs import Prog

from rung.core import store
from rung.core.errors import LaunchError, TargetCompileError
from rung.targets.cpu import build, emit
from rung.targets.cpu.device import bound
from rung.targets.cpu.machine import BASE
from rung.targets.cpu.target import target
from rung.targets.device import device

SOURCE = "int answer(void) { return %d; }\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, settings: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(store, "_scratch", {})
    settings(cache_dir=tmp_path / "cache")
    return tmp_path / "cache" / "cpu"


def answer(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).answer())


def test_a_library_is_built_once(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    path = build.build([SOURCE % 42], BASE)
    assert answer(path) == 42 and path.parent == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.setattr(build, "_compile", None)
    assert build.build([SOURCE % 42], BASE) == path
    assert sorted(p.suffix for p in folder.iterdir()) == [".sha256", ".so"]


@pytest.mark.parametrize("damage", [lambda p: p.write_bytes(p.read_bytes()[:100]),
                                    lambda p: p.write_bytes(b"something else"),
                                    lambda p: p.unlink(),
                                    lambda p: p.with_suffix(".sha256").write_bytes(b"\xff\xfe"),
                                    lambda p: p.with_suffix(".sha256").unlink()])
def test_a_damaged_entry_is_built_anew(damage: Callable[[Path], Any]) -> None:
    path = build.build([SOURCE % 43], BASE)
    content = path.read_bytes()
    path.unlink()  # this process has the old file loaded
    path.write_bytes(content)
    damage(path)
    assert build.build([SOURCE % 43], BASE) == path
    assert build.find(path.name) == path and answer(path) == 43


def test_a_folder_that_cannot_be_made(tmp_path: Path, settings: Callable[..., None]) -> None:
    (tmp_path / "file").write_text("")
    settings(cache_dir=tmp_path / "file" / "cache")
    assert answer(build.build([SOURCE % 44], BASE)) == 44


def test_several_sources_are_one_library() -> None:
    parts = ["int half(void) { return 23; }",
             "int half();\nint answer(void) { return 2 * half(); }"]
    assert answer(build.build(parts, BASE)) == 46
    with pytest.raises(TargetCompileError) as caught:
        build.build([*parts, "int other(void) { return nonsense; }\n"], BASE)
    assert "nonsense" in Path(caught.value.source).read_text()


def test_long_sources_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Prog()
    x, y, z = p.param("x", 6, 8), p.param("y", 5, 7), p.param("z", 11)
    program = p.done(p.softmax(x), p.reduce("add", y, 0), p.map("exp", z))
    run = compiled(program, target("cpu"))
    monkeypatch.setattr(emit, "UNIT", 1)
    made, real = list[Sequence[str]](), build._compile
    monkeypatch.setattr(build, "_compile", lambda *a: made.append(a[0]) or real(*a))
    cut = compiled(program, target("cpu"))
    *units, calls = made[0]
    assert [unit.count("\nvoid run_") for unit in units] == [1, 1, 1]
    assert sorted(units, key=len, reverse=True) == units  # what takes longest starts first
    assert "long stretch_0(" in calls and not any("stretch_0" in unit for unit in units)
    given = [torch.randn(6, 8), torch.randn(5, 7), torch.randn(11)]
    assert all(torch.equal(a, b) for a, b in zip(run([*given]), cut([*given]), strict=True))


def test_refused_source_is_kept_and_named() -> None:
    with pytest.raises(TargetCompileError) as caught:
        build.build(["int answer(void) { return nonsense; }\n"], BASE)
    error = caught.value
    assert "nonsense" in Path(error.source).read_text() and "nonsense" in error.log
    assert error.source in error.command and error.source in str(error)
    assert "nonsense" in Path(error.source).with_suffix(".log").read_text()
    again = subprocess.run(error.command, shell=True, capture_output=True, text=True, check=False)
    assert "nonsense" in again.stderr


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, settings: Callable[..., None]) -> None:
    settings(cc="no-such-cc -x")
    with pytest.raises(TargetCompileError, match="'no-such-cc -x' is not on the PATH"):
        build.build([SOURCE % 1], BASE)
    settings(cc="")
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    monkeypatch.setattr(build, "find_spec", lambda _: None)
    build._compiler.cache_clear()
    with pytest.raises(TargetCompileError, match=r"apt-get install gcc[\s\S]*pip install ziglang"):
        build.build([SOURCE % 1], BASE)
    monkeypatch.setattr(build, "find_spec", lambda _: object())
    assert build.compiler() == (sys.executable, "-m", "ziglang", "cc")
    build._compiler.cache_clear()


def test_what_is_no_library(tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(b"no elf")
    with pytest.raises(LaunchError, match="cannot load"):
        bound(path, ())


THREADS = """
extern int omp_get_max_threads(void);
int answer(void) { return omp_get_max_threads(); }
int team(void) {
  int most = 0;
#pragma omp parallel
  { extern int omp_get_num_threads(void);
#pragma omp single
    most = omp_get_num_threads(); }
  return most;
}
"""


def test_threads_are_torchs() -> None:
    path = build.build([THREADS], target("cpu").machine)
    library, before = ctypes.CDLL(str(path)), torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert (library.answer(), library.team()) == (count, count)
    finally:
        torch.set_num_threads(before)
    maps = Path("/proc/self/maps").read_text().split()
    assert len({p for p in maps if "libgomp" in p or "libomp" in p}) == 1


def test_processes_at_once(folder: Path) -> None:
    code = ("import ctypes, sys, dataclasses, pathlib\n"
            "from rung.targets.cpu import build, machine\n"
            f"path = build.build([{SOURCE % 45!r}], machine.BASE)\n"
            "sys.exit(ctypes.CDLL(str(path)).answer() != 45)")
    runs = [subprocess.Popen([sys.executable, "-c", code],
                             env={"RUNG_CACHE_DIR": str(folder.parent), "PATH": "/usr/bin:/bin"})
            for _ in range(3)]
    assert [r.wait() for r in runs] == [0, 0, 0]
    assert not [p for p in folder.iterdir() if p.suffix not in (".so", ".sha256")]


SHARED = """
kernel-ir shared(x: f32[8192]) -> y: f32[8192]
  kept = alloc : l1 f32[8192]
  for i in 0..8192
    kept[i] = x[i]
  for b in 0..8 at core
    for i in 0..1024
      y[1024*b+i] = kept[1024*b+i]"""


def test_threads_share_what_was_computed_before_they_started() -> None:
    func, cpu, threads = parse(SHARED), target("cpu.base"), torch.get_num_threads()
    launch = device(cpu).load([func], cpu.emit([func]))["shared"]
    x, y = torch.rand(8192), torch.zeros(8192)
    torch.set_num_threads(2)
    try:
        launch(x.data_ptr(), y.data_ptr())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(x, y)
