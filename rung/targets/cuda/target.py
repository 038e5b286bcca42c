"""CUDA as a target: Hopper; later GPUs run its code only after another build."""

from __future__ import annotations

from rung.targets.base import Target
from rung.targets.cuda.candidates import candidates
from rung.targets.cuda.emit import emit
from rung.targets.cuda.libraries import LIBRARIES
from rung.targets.cuda.machine import SM90


def target(name: str) -> Target:
    """The only CUDA machine."""
    return Target(SM90, candidates, emit, LIBRARIES)
