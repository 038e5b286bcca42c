"""The CPU targets: the machines, their mappings, and kernels as C."""

from __future__ import annotations

import sys
from dataclasses import replace

from rung.core.config import Settings
from rung.targets.base import Target
from rung.targets.cpu.emit import emit
from rung.targets.cpu.libraries import LIBRARIES, keeps_call
from rung.targets.cpu.machine import ASLEEP, MACHINES, host
from rung.tile.candidates_cpu import candidates


def threads() -> int:
    """How many threads kernels run with now: the OpenMP that they link is that of this process,
    which is torch's."""
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch else 1


def target(name: str) -> Target:
    """The target of a name in `TARGETS`; `cpu` is the widest that runs here.

    Prices count on as many cores as there are threads now; kernels run with what there are then.
    Threads that wait asleep make a fork dear.
    """
    machine = host() if name == "cpu" else MACHINES[name]
    rates = machine.rates
    if Settings.from_environment().asleep:
        rates = replace(rates, fork=ASLEEP)
    return Target(replace(machine, cores=threads(), rates=rates), candidates, emit,
                  LIBRARIES, keeps_call)
