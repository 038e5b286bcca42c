"""Settings: defaults, each variable, and what a bad value says."""

from __future__ import annotations

from pathlib import Path

import pytest

from rung.core.config import VARIABLES, Settings


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/anne")
    settings = Settings.read({})
    assert settings == Settings(Path("/home/anne/.cache/rung"), 0, False, "", "", "default", None)


@pytest.mark.parametrize(("variables", "name", "value"), [
    ({"XDG_CACHE_HOME": "/data"}, "cache_dir", Path("/data/rung")),
    ({"XDG_CACHE_HOME": "/data", "RUNG_CACHE_DIR": "/mine"}, "cache_dir", Path("/mine")),
    ({"RUNG_DEBUG": "1"}, "debug", True),
    ({"RUNG_DEBUG": " "}, "debug", False),
    ({"RUNG_CHECK": "1"}, "check", True),
    ({"RUNG_CHECK": "no"}, "check", False),
    ({"CC": "gcc"}, "cc", "gcc"),
    ({"CC": "gcc", "RUNG_CC": "ccache clang"}, "cc", "ccache clang"),
    ({"RUNG_TARGET": "cuda"}, "target", "cuda"),
    ({"RUNG_PRECISION": "eager"}, "precision", "eager"),
    ({"RUNG_KEEP": "/data/src"}, "keep", Path("/data/src")),
])
def test_variables(variables: dict[str, str], name: str, value: object) -> None:
    assert getattr(Settings.read(variables), name) == value


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/anne")
    assert Settings.read({"XDG_CACHE_HOME": "x"}).cache_dir == Path("/home/anne/.cache/rung")


@pytest.mark.parametrize(("name", "value", "wanted"), [
    ("RUNG_DEBUG", "6", "0 or 1"),
    ("RUNG_CHECK", "maybe", "0 or 1"),
    ("RUNG_PRECISION", "fast", "default or eager"),
    ("RUNG_KEEP", "here", "an absolute path"),
    ("RUNG_CACHE_DIR", "here", "an absolute path"),
])
def test_bad_values(name: str, value: str, wanted: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}='{value}': expected {wanted}$"):
        Settings.read({name: value})


def test_the_process_is_read_once() -> None:
    assert Settings.from_environment() is Settings.from_environment()


def test_description_has_a_row_for_each_variable() -> None:
    rows = Settings.describe()
    assert [r[0] for r in rows] == [v.name for v in VARIABLES] and len(rows) <= 12
    assert all(all(row) for row in rows)
    assert {v.setting for v in VARIABLES} == set(Settings.__dataclass_fields__)
