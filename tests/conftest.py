"""Options and fixtures of all tests.

Kernels that tests compile go to a folder of the session, not to the user's cache. `--update`
writes goldens anew instead of comparing with them.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

if "RUNG_CACHE_DIR" not in os.environ:  # before anything reads it; workers of xdist inherit it
    os.environ["RUNG_CACHE_DIR"] = tempfile.mkdtemp(prefix="rung-tests-")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.pop("OMP_WAIT_POLICY", None)  # prices, and so mappings, follow it
os.environ.setdefault("RUNG_CALIBRATE", "0")  # the same prices everywhere
os.environ.setdefault("RUNG_FRESH", "1")  # tests look at the passes

from rung.core import config


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="write goldens anew")


@pytest.fixture(autouse=True)
def _users_modules() -> Iterator[None]:
    """A test that imports files of its own leaves neither them nor their folders behind."""
    modules, path = set(sys.modules), sys.path.copy()
    yield
    sys.path[:] = path
    for name in sys.modules.keys() - modules:
        if "pytest-of-" in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


Golden = Callable[[Path, str], None]


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """`golden(path, text)`: the file at `path` holds `text`; `--update` writes it."""
    def same(path: Path, text: str) -> None:
        if request.config.getoption("--update"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing; pytest --update writes it"
        assert text == path.read_text(encoding="utf-8"), f"{path} differs; see pytest --update"
    return same


@pytest.fixture
def fresh() -> Iterator[None]:
    """A Dynamo that has compiled nothing, before and after, and random numbers from one seed."""
    import torch  # most tests do without

    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`settings(check=True)`: changes what the environment says, for one test."""
    def change(**values: object) -> None:
        now = replace(config.Settings.from_environment(), **values)  # type: ignore[arg-type]
        monkeypatch.setattr(config, "_from_environment", lambda: now)
    yield change
