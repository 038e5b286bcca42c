"""One cache under many hands: threads, processes, kills, full disks, workers, no compiler."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.data import DataLoader, Dataset

from rung import entry
from rung.core import store
from rung.core.config import Settings
from rung.frontends.torch import compat
from rung.targets.cpu import build, machine

SOURCE = "int answer(void) {{ return {}; }}\n"
PATIENCE = 120  # seconds


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, settings: Callable[..., None], monkeypatch: pytest.MonkeyPatch
          ) -> Iterator[Path]:
    settings(cache_dir=tmp_path / "cache", fresh=False, cc="")
    monkeypatch.setattr(compat, "is_traced", lambda: False)
    torch._dynamo.reset()
    store._told.clear()
    monkeypatch.setattr(store, "_scratch", {})
    entry.rung.reset()
    yield tmp_path / "cache"
    build._compiler.cache_clear()


def answer(number: int) -> int:
    return int(ctypes.CDLL(str(build.build([SOURCE.format(number)], machine.BASE))).answer())


def leftovers(cache: Path) -> list[Path]:
    return list(cache.rglob(f"{store.OWN}*"))


def double(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x) * 2


def test_threads_build_at_once(cache: Path) -> None:
    numbers = [1, 2, 3, 4] * 4
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(answer, numbers)) == numbers
    assert len(list((cache / "cpu").glob("*.so"))) == 4 and not leftovers(cache)


PROCESS = """
import torch
f = lambda x: torch.exp(x) * 2
x = torch.linspace(-1, 1, 64)
got = torch.compile(f, backend="rung", options={"strict": True})(x)
torch.testing.assert_close(got, f(x))
"""


@pytest.mark.slow
def test_processes_compile_at_once(cache: Path) -> None:
    env = {**os.environ, "RUNG_CACHE_DIR": str(cache), "RUNG_FRESH": "0"}
    runs = [subprocess.Popen([sys.executable, "-c", PROCESS], env=env) for _ in range(4)]
    assert [run.wait(PATIENCE) for run in runs] == [0] * 4
    assert len(list((cache / "programs").glob("*.json"))) == 1 and not leftovers(cache)


COMPILER = """#!/bin/sh
if [ -e {slow} ]; then touch {started}; sleep {patience}; fi
exec cc "$@"
"""


def test_a_killed_process_leaves_no_entry(cache: Path, tmp_path: Path,
                                          settings: Callable[..., None]) -> None:
    slow, started, cc = (tmp_path / n for n in ("slow", "started", "slow-cc"))
    cc.write_text(COMPILER.format(slow=slow, started=started, patience=PATIENCE))
    cc.chmod(0o700)
    settings(cache_dir=cache, cc=str(cc))
    build.version()  # before it is slow
    code = "from rung.targets.cpu import build, machine\n" \
           f"build._version = lambda c: {build.version()!r}\n" \
           f"build.build([{SOURCE.format(7)!r}], machine.BASE)"
    slow.touch()
    run = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, env={
        **os.environ, "RUNG_CACHE_DIR": str(cache), "RUNG_CC": str(cc)})
    end = monotonic() + PATIENCE
    while not started.exists() and monotonic() < end:
        sleep(0.05)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    slow.unlink()
    assert started.exists() and not list(cache.rglob("*.so"))
    assert answer(7) == 7 and not leftovers(cache)


def test_a_full_disk_under_the_cache(monkeypatch: pytest.MonkeyPatch, cache: Path,
                                     caplog: pytest.LogCaptureFixture) -> None:
    def full(path: Path, content: bytes, real: Callable[..., Path] = store._write) -> Path:
        if cache in path.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, content)

    monkeypatch.setattr(store, "_write", full)
    with caplog.at_level(logging.WARNING, "rung"):
        assert answer(8) == 8 and answer(9) == 9
    assert [r.message.count("No space left") for r in caplog.records] == [1]


def test_no_room_at_all_is_left_to_torch(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(50)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with caplog.at_level(logging.WARNING, "rung"):
            got = torch.compile(double, backend="rung")(x)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert torch.equal(got, double(x)) and "runs without rung" in caplog.text
    torch._dynamo.reset()
    compiled = torch.compile(double, backend="rung", options={"strict": True})
    torch.testing.assert_close(compiled(x), double(x))


@pytest.mark.parametrize("fault", ["read-only", "open to all", "in one open to all", "no home"])
def test_a_folder_that_may_not_be_used(fault: str, cache: Path, monkeypatch: pytest.MonkeyPatch,
                                       caplog: pytest.LogCaptureFixture,
                                       settings: Callable[..., None]) -> None:
    folder = cache / "cpu"
    folder.mkdir(parents=True)
    build.version()  # found while files may still be looked at
    if fault == "read-only":
        monkeypatch.setattr(store.os, "access", lambda *_: False)
    elif fault == "no home":
        monkeypatch.setattr(Path, "expanduser", homeless)
        settings(cache_dir=Settings.read({}).cache_dir)
    else:
        (folder if fault == "open to all" else cache).chmod(0o777)
    with caplog.at_level(logging.WARNING, "rung"):
        assert answer(10) == 10 and answer(11) == 11
    assert not list(folder.iterdir()) and len(caplog.records) == 1


def homeless(_: Path) -> Path:
    raise RuntimeError("Could not determine home directory.")


class Doubled(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, n: int) -> torch.Tensor:
        compiled = torch.compile(double, backend="rung", options={"strict": True})
        out: torch.Tensor = compiled(torch.full((32,), n / 4))
        return out


@pytest.mark.parametrize("warm", [True, False])
def test_workers_of_a_loader(warm: bool) -> None:
    data = Doubled()
    if warm:
        data[0]
    found = list(DataLoader(data, batch_size=None, num_workers=2, timeout=PATIENCE))
    for n, got in enumerate(found):
        torch.testing.assert_close(got, double(torch.full((32,), n / 4)))


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch,
                            caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(build, "find_spec", lambda _: None)
    build._compiler.cache_clear()
    x, y = torch.randn(5), torch.randn(6)
    with caplog.at_level(logging.WARNING, "rung"):
        compiled = torch.compile(double, backend="rung", dynamic=False)
        assert torch.equal(compiled(x), double(x)) and torch.equal(compiled(y), double(y))
    (record,) = caplog.records
    assert "pip install ziglang" in record.message and "RUNG_CC" in record.message
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="TargetCompileError: no C compiler"):
        torch.compile(double, backend="rung", options={"strict": True})(x)


def test_a_failure_in_generated_code(monkeypatch: pytest.MonkeyPatch,
                                     caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(build, "COMMON", (*build.COMMON, "-Drestrict=nonsense"))
    x = torch.randn(5)
    with caplog.at_level(logging.WARNING, "rung"):
        assert torch.equal(torch.compile(double, backend="rung")(x), double(x))
    (record,) = caplog.records
    assert all(word in record.message for word in ("source: ", "log: ", "command: "))
