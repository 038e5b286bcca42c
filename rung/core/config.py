"""The one reader of the environment: a user's variables, as a frozen `Settings`.

`Settings.from_environment()` reads it once; `describe()` gives the rows of `--help`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

PRECISIONS = ("default", "eager")
_WORDS = {"0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}


def _switch(text: str) -> bool:
    if text.lower() not in _WORDS:
        raise ValueError("0 or 1")
    return _WORDS[text.lower()]


def _precision(text: str) -> str:
    if text not in PRECISIONS:
        raise ValueError(" or ".join(PRECISIONS))
    return text


def _folder(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise ValueError("an absolute path")
    return path


@dataclass(frozen=True)
class Settings:
    """What the environment says; see `VARIABLES` for the meanings."""

    cache_dir: Path
    debug: bool = False
    check: bool = False
    cc: str = ""
    target: str = ""
    precision: str = "default"
    keep: Path | None = None
    fresh: bool = False
    asleep: bool = False
    calibrate: bool | None = None  # None: what is only looked at does without

    @staticmethod
    def from_environment() -> Settings:
        """The settings of this process, read once. Raises ValueError for a bad value."""
        return _from_environment()

    @staticmethod
    def read(environment: Mapping[str, str]) -> Settings:
        """The settings that `environment` gives; an empty variable counts as not set."""
        found: dict[str, Any] = {"cache_dir": _default_cache(environment)}
        for variable in VARIABLES:
            text = environment.get(variable.name, "").strip()
            try:
                found |= {variable.setting: variable.read(text)} if text else {}
            except ValueError as error:
                raise ValueError(f"{variable.name}={text!r}: expected {error}") from None
        return Settings(**found)

    @staticmethod
    def describe() -> list[tuple[str, str, str]]:
        """(variable, meaning, default) of each variable."""
        return [(v.name, v.meaning, v.default) for v in VARIABLES]


@dataclass(frozen=True)
class Variable:
    """An environment variable, the field of `Settings` that it sets, and what reads it."""

    name: str
    setting: str
    meaning: str
    default: str
    read: Callable[[str], Any] = str


VARIABLES = (  # a later one of the same setting wins
    Variable("RUNG_CACHE_DIR", "cache_dir", "where compiled programs are kept",
             "~/.cache/rung", _folder),
    Variable("RUNG_DEBUG", "debug", "1 shows where an error comes from", "0", _switch),
    Variable("RUNG_CHECK", "check", "1 compares both sides of every pass", "0", _switch),
    Variable("CC", "cc", "the C compiler's command", "cc, gcc or clang"),
    Variable("RUNG_CC", "cc", "the C compiler's command, before CC", "CC"),
    Variable("RUNG_TARGET", "target", "the target to compile for", "this machine"),
    Variable("RUNG_PRECISION", "precision", "eager keeps eager's bits", "default", _precision),
    Variable("RUNG_FRESH", "fresh", "1 lowers every graph anew, whatever the cache has", "0",
             _switch),
    Variable("RUNG_KEEP", "keep", "a folder for generated sources and reproducers",
             "sources are not kept", _folder),
    Variable("RUNG_CALIBRATE", "calibrate", "0 takes a table of this CPU's family instead of "
             "measuring it once", "1; 0 for `rung show`", _switch),
    Variable("OMP_WAIT_POLICY", "asleep", "passive: threads sleep while they wait, so that only "
             "long kernels are shared among them", "they spin", lambda x: x.lower() == "passive"),
)


def _default_cache(environment: Mapping[str, str]) -> Path:
    """`rung` in the user's cache folder; a relative XDG_CACHE_HOME is invalid by its standard."""
    base = Path(environment.get("XDG_CACHE_HOME", ""))
    try:
        return (base if base.is_absolute() else Path("~/.cache").expanduser()) / "rung"
    except RuntimeError:  # a user without a home, as in a container: no folder can be made there
        return Path("/dev/null/no home directory")


@cache
def _from_environment() -> Settings:
    return replace(Settings.read(os.environ), **_given)


_given: dict[str, Any] = {}


def by_table() -> None:
    """From here on this process measures no CPU unless the user asks for it: what it prints is the
    same each time."""
    if Settings.from_environment().calibrate is None:
        _given["calibrate"] = False
        _from_environment.cache_clear()
