"""Kernels, mappings drawn for them and their runs, as the fuzzer has them; roles in odd orders."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rung.kernel.moves import Engine
from rung.tools.fuzz.mappings import (
    KERNELS,
    SIZES,
    SYMBOLIC,
    VOCABULARIES,
    arguments,
    difference,
    kernel,
    launches,
    legal,
)


class Late(Engine):
    """What moves tiles beside `math` waits until it must."""

    def turn(self, ready: Sequence[str]) -> str:
        return ready[-1]


class Anyhow(Engine):
    """Roles take turns at random."""

    rng = random.Random("turns")

    def turn(self, ready: Sequence[str]) -> str:
        return self.rng.choice(ready)


__all__ = ["KERNELS", "SIZES", "SYMBOLIC", "VOCABULARIES", "Anyhow", "Late", "arguments",
           "difference", "kernel", "launches", "legal"]
