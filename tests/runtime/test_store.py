"""Machines on which the cache or the compiler does not do what it should: the program goes on, with
at most one warning, and nothing is left behind."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from rung import entry
from rung.core import store
from rung.frontends.torch import compat
from rung.targets.cpu import build
from rung.targets.cpu.machine import BASE

MINUTES = 5 * 60


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, settings: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Path:
    settings(cache_dir=tmp_path / "cache", fresh=False, cc="")
    monkeypatch.setattr(compat, "is_traced", lambda: False)
    monkeypatch.setattr(store, "_scratch", {})
    store._told.clear()
    entry.rung.reset()
    torch._dynamo.reset()
    return tmp_path / "cache"


def double(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x) * 2


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.name == "rung"]


def run_two_graphs() -> None:
    compiled = torch.compile(double, backend="rung", dynamic=False)
    for size in (40, 41):
        x = torch.linspace(-1, 1, size)
        torch.testing.assert_close(compiled(x), double(x))


# --- compilers

@pytest.mark.parametrize(("script", "says"), [
    ("#!/bin/sh\nexit 1\n", "ended with code 1"),
    ("#!/bin/sh\nexit 0\n", "made no library"),
    ("#!/bin/sh\nprintf '\\377\\376 error: no licence'>&2; exit 3\n", "error: no licence"),
    ("#!/bin/sh\nwhile [ $# -gt 1 ]; do [ $1 = -o ] && echo text > $2; shift; done\n",
     "cannot be loaded: "),
    ("no program\n", "cannot be run: Exec format error"),
    (None, "not on the PATH"),
])
def test_one_warning_for_a_broken_compiler(script: str | None, says: str, tmp_path: Path,
                                           caplog: pytest.LogCaptureFixture,
                                           settings: Callable[..., None]) -> None:
    cc = tmp_path / "broken-cc"
    if script is not None:
        cc.write_text(script)
        cc.chmod(0o700)
    settings(cache_dir=tmp_path / "cache", fresh=False, cc=str(cc))
    with caplog.at_level(logging.WARNING, "rung"):
        run_two_graphs()
    (message,) = told(caplog)
    assert message.startswith("rung: a graph runs without rung: TargetCompileError: the C compiler")
    assert str(cc) in message and says in message and "RUNG_CC" in message


def test_what_a_broken_compiler_left_is_built_anew(cache: Path, settings: Callable[..., None]
                                                   ) -> None:
    source = ["int answer(void) { return 1; }\n"]
    settings(cache_dir=cache / "other", cc="")
    library = build.build(source, BASE)
    settings(cache_dir=cache, cc="")
    bad, _ = store.write("cpu", library.name, b"text")
    assert build.build(source, BASE) == bad and bad.read_bytes() == library.read_bytes()


def test_a_warm_cache_needs_no_compiler(cache: Path, caplog: pytest.LogCaptureFixture,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    run_two_graphs()
    torch._dynamo.reset()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(build, "find_spec", lambda _: None)
    build._compiler.cache_clear()
    with caplog.at_level(logging.WARNING, "rung"):
        run_two_graphs()
        assert not told(caplog)
        torch.compile(lambda x: double(x) - 1, backend="rung")(torch.ones(8))
    (message,) = told(caplog)
    assert "no C compiler was found" in message
    monkeypatch.undo()
    build._compiler.cache_clear()


# --- folders

def test_a_cache_that_is_read_only_is_read(cache: Path, monkeypatch: pytest.MonkeyPatch,
                                           caplog: pytest.LogCaptureFixture) -> None:
    run_two_graphs()
    before = sorted(cache.rglob("*"))
    torch._dynamo.reset()
    monkeypatch.setattr(store.os, "access", lambda *_: False)
    with caplog.at_level(logging.WARNING, "rung"), monkeypatch.context() as patch:
        patch.setattr(build, "_compile", None)
        run_two_graphs()
        assert not told(caplog)
    torch._dynamo.reset()
    with caplog.at_level(logging.WARNING, "rung"):
        torch.compile(lambda x: double(x) - 1, backend="rung")(torch.ones(8))
    (message,) = told(caplog)
    assert message.startswith("rung: the cache of compiled kernels cannot be added to: "
                              f"{cache}/") and "set RUNG_CACHE_DIR" in message
    assert sorted(cache.rglob("*")) == before


@pytest.mark.parametrize(("owner", "used"), [(0, True), (1 << 20, False)])
def test_a_cache_of_another_user(owner: int, used: bool, cache: Path,
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may have filled it for all; what another user could change is not loaded."""
    made = store.write("cpu", "x.so", b"content")
    monkeypatch.setattr(store.os, "getuid", lambda: 1 << 21)
    real = Path.stat

    def stat(path: Path, **rest: bool) -> os.stat_result:
        found = list(real(path, **rest))
        found[4] = owner
        return os.stat_result(found)
    monkeypatch.setattr(Path, "stat", stat)
    assert store.find("cpu", "x.so") == (made if used else None)


def test_a_cache_that_is_a_file(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.write_text("")
    with caplog.at_level(logging.WARNING, "rung"):
        run_two_graphs()
    (message,) = told(caplog)
    assert message.startswith("rung: the cache of") and str(cache) in message


def test_no_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch,
                                       caplog: pytest.LogCaptureFixture) -> None:
    run_two_graphs()

    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory")
    monkeypatch.setattr(store.tempfile, "gettempdir", none)
    torch._dynamo.reset()
    with caplog.at_level(logging.WARNING, "rung"):
        run_two_graphs()  # the cache has them
        assert not told(caplog)
        torch._dynamo.reset()
        for number in (1, 2):
            compiled = torch.compile(lambda x, n=number: double(x) - n, backend="rung")
            assert compiled(torch.zeros(8))[0] == 2 - number
    (message,) = told(caplog)
    assert "no folder to compile in: No usable temporary directory; set TMPDIR" in message


PROGRAM = """
import torch
from rung.targets.cpu import build
{first}
f = torch.compile(lambda x: torch.exp(x) * 2, backend="rung", dynamic=False)
for size in 40, 41:
    x = torch.linspace(-1, 1, size)
    torch.testing.assert_close(f(x), torch.exp(x) * 2)
"""


def mounted(script: str, cache: Path, first: str = "") -> subprocess.CompletedProcess[str]:
    """The two graphs in a process that sees its own mounts: `script` makes them."""
    (cache / "tmp").mkdir(parents=True, exist_ok=True)
    (cache / "tmp").chmod(0o700)
    whole = f'set -e; {script}; TMPDIR="$1/tmp" RUNG_FRESH=0 RUNG_CACHE_DIR="$1" exec "$2" -c "$3"'
    return subprocess.run(
        ["unshare", "-rm", "sh", "-c", whole, "sh", str(cache), sys.executable,
         PROGRAM.format(first=first)], capture_output=True, text=True, timeout=MINUTES, check=False)


def can_mount() -> bool:
    return shutil.which("unshare") is not None and not subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/tmp"], check=False,
        capture_output=True).returncode


TMPFS = 'mkdir -p "$1/{0}"; mount -t tmpfs -o {1},mode=700 none "$1/{0}"'


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="mounting is not allowed here")
@pytest.mark.parametrize(("mounts", "says"), [
    (TMPFS.format("cpu", "noexec"), "the cache of compiled kernels cannot be loaded from: "),
    (TMPFS.format("cpu", "size=4k"), "cannot be added to"),
    (f'{TMPFS.format("cpu", "noexec")}; {TMPFS.format("tmp", "noexec")}', "is mounted noexec"),
    (TMPFS.format("tmp", "noexec"), ""),
    (TMPFS.format("tmp", "size=4k"), "no room to compile in"),
])
def test_mounts(mounts: str, says: str, cache: Path) -> None:
    run = mounted(mounts, cache)
    assert not run.returncode, run.stderr
    assert len(run.stderr.splitlines()) == bool(says), run.stderr
    assert run.stderr.startswith("rung: " if says else "") and says in run.stderr
    assert not list((cache / "tmp").iterdir())


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="mounting is not allowed here")
def test_a_cache_that_is_mounted_read_only(cache: Path) -> None:
    assert mounted(":", cache).stderr == ""
    once = 'mount --bind "$1" "$1"; mount -o remount,ro,bind "$1"; ' + TMPFS.format("tmp", "size=0")
    run = mounted(once, cache, "build._compile = None")
    assert (run.returncode, run.stderr) == (0, "")


# --- processes that are killed

@contextmanager
def process(code: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that has made a folder in `folder` and waits; it is killed at the end."""
    with subprocess.Popen([sys.executable, "-c", f"from rung.core import store\n{code}"], text=True,
                          env=os.environ | {"TMPDIR": str(folder)}, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, start_new_session=True) as run:
        assert run.stdout
        try:
            yield run, Path(run.stdout.readline().strip())
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)


SCRATCH = "print(store.scratch(), flush=True); input()"
FORKED = "import os; p = store.scratch(); os.fork() and print(p, flush=True); input()"


def test_folders_of_dead_processes_alone_are_removed(tmp_path: Path) -> None:
    others = [tmp_path / name for name in ("rung-data", f"{store.OWN}data")]  # no lock is there
    for path in others:
        path.mkdir()
    with process(SCRATCH, tmp_path) as (one, dead), process(SCRATCH, tmp_path) as (_, alive), \
            process(FORKED, tmp_path) as (parent, kept):
        one.kill()
        parent.kill()  # its child lives, and may use the folder
        one.wait()
        parent.wait()
        assert all(path.parent == tmp_path and path.is_dir() for path in (dead, alive, kept))
        with process(SCRATCH, tmp_path) as (_, new):
            assert sorted(tmp_path.iterdir()) == sorted((alive, kept, new, *others))


def test_a_process_that_ends_leaves_nothing(tmp_path: Path) -> None:
    code = "import os; path = store.scratch(); child = os.fork()\n" \
           "if child: os.waitpid(child, 0); print(path.is_dir(), flush=True); input()"
    with process(code, tmp_path) as (run, told):
        assert str(told) == "True"  # the fork that ended first did not remove it
        run.communicate("\n")
        assert not list(tmp_path.iterdir())


def test_several_start_where_one_was_killed(tmp_path: Path) -> None:
    with process(SCRATCH, tmp_path) as (run, dead):
        run.kill()
        run.wait()
        assert dead.is_dir()
    code = "import tempfile, pathlib; store.sweep(pathlib.Path(tempfile.gettempdir()))\n" + \
           "for _ in range(50):\n  with store.workplace() as p: (p / 'x').write_text('')"
    runs = [subprocess.Popen([sys.executable, "-c", f"from rung.core import store\n{code}"],
                             env=os.environ | {"TMPDIR": str(tmp_path)}) for _ in range(4)]
    assert [run.wait(MINUTES) for run in runs] == [0] * 4
    assert not list(tmp_path.iterdir())
