"""CUDA as a target: it emits and compiles; launching is not built yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rung.core.errors import LaunchError
from rung.core.machine import Machine
from rung.core.op import Func
from rung.targets.base import Launch, Stretch, Target
from rung.targets.cuda.emit import emit
from rung.targets.cuda.machine import SM90
from rung.tile.candidates_gpu import candidates
from rung.tile.mapping import Mapping as TileMapping


@dataclass(frozen=True)
class Cuda(Target):
    """Hopper; later GPUs run its code only after another build."""

    name: str = SM90.name
    machine: Machine = SM90

    def candidates(self, kernel: Func, machine: Machine, hints: Mapping[str, int]
                   ) -> Iterable[TileMapping]:
        return candidates(kernel, machine, hints)

    def emit(self, kernels: Sequence[Func]) -> str:
        return emit(kernels)

    def load(self, kernels: Sequence[Func], source: str, stretches: Sequence[Stretch] = ()
             ) -> Mapping[str, Launch]:
        raise LaunchError("kernels for CUDA are emitted and compiled, but not launched yet")


def target(name: str) -> Cuda:
    """The only CUDA machine."""
    return Cuda()
