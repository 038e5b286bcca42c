"""The target `cuda-emulated`: the table, mappings and kernels of `cuda.sm90` under another name."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from rung.targets.base import Target
from rung.targets.cuda.candidates import candidates
from rung.targets.cuda.emit import emit
from rung.targets.cuda.machine import SM90

EMULATED = replace(SM90, name="cuda-emulated")


def target(name: str) -> Target:
    """The same machine without libraries, so that kernels do all; sources leave what is inline PTX
    to the emulator."""
    return Target(EMULATED, candidates, partial(emit, ptx=False))
