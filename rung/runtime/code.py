"""The host's code of a program as data: its text, and what the names in it stand for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from rung.runtime.checks import Site
from rung.targets.device import Signature


@dataclass(frozen=True)
class Bound:
    """A stretch as the host calls it, with what its checks raise."""

    signature: Signature
    sites: tuple[Site, ...]


@dataclass
class Code:
    """Python text, and what its names stand for besides the host's and the front end's functions:
    (`call`, its target), (`library`, a kernel) or (`constant`, a number). `whole` is the stretch
    that is all of `run`. `steps` has, by lines of `run`, what the steps of the stretch there are: a
    kernel, or "check", and the op of the imported program that it computes last, or -1."""

    functions: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    names: dict[str, tuple[str, Any]] = field(default_factory=dict)
    stretches: dict[str, Bound] = field(default_factory=dict)
    whole: str = ""
    steps: list[tuple[int, list[tuple[str, int]]]] = field(default_factory=list)

    @property
    def text(self) -> str:
        run = ["def run(args):", *(f"    {line}" for line in self.lines), ""]
        return "\n".join([*self.functions, *run])

    def bind(self, hint: str, kind: str, what: Any, reserved: Collection[str]) -> str:
        """A name for an object, none of those `reserved`."""
        name, n = hint, 1
        while name in reserved or self.names.get(name, (kind, what)) != (kind, what):
            name, n = f"{hint}_{n}", n + 1
        self.names[name] = kind, what
        return name
