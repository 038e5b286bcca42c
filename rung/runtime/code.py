"""The host's code of a program as data: its text, and what the names in it stand for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from rung.runtime import tensors
from rung.runtime.tensors import Site
from rung.targets.device import Signature

HELPERS = {"empty": tensors.empty, "fit": tensors.fit, "leaves": tensors.leaves,
           "check": tensors.check, "bump": tensors.bump, "address": tensors.address, "torch": torch}
RESERVED = frozenset((*HELPERS, "take", "give"))
"""Names in the text that stand for the host's own functions and the device's."""


@dataclass(frozen=True)
class Bound:
    """A stretch as the host calls it, with what its checks raise."""

    signature: Signature
    sites: tuple[Site, ...]


@dataclass
class Code:
    """Python text, and what its names stand for besides those `RESERVED`: (`call`, an overload),
    (`library`, a kernel) or (`constant`, a number). `whole` is the stretch that is all of `run`.
    `steps` has, by lines of `run`, what the steps of the stretch there are: a kernel, or "check",
    and the op of the imported program that it computes last, or -1."""

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

    def bind(self, hint: str, kind: str, what: Any) -> str:
        """A name for an object."""
        name, n = hint, 1
        while name in RESERVED or self.names.get(name, (kind, what)) != (kind, what):
            name, n = f"{hint}_{n}", n + 1
        self.names[name] = kind, what
        return name
