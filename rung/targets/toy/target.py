"""The toy as a target: the one machine, its mappings and its assembly."""

from __future__ import annotations

from rung.targets.base import Target
from rung.targets.toy.emit import emit
from rung.targets.toy.machine import TOY
from rung.tile.candidates_explicit import candidates


def target(name: str) -> Target:
    """The toy, under the only name that it has."""
    return Target(TOY, candidates, emit)
