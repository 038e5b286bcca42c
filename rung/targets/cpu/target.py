"""The CPU targets: the machines, their mappings, and kernels as C."""

from __future__ import annotations

from dataclasses import replace

import torch

from rung.core.config import Settings
from rung.targets.base import Target
from rung.targets.cpu.emit import emit
from rung.targets.cpu.libraries import LIBRARIES, keeps_call
from rung.targets.cpu.machine import ASLEEP, MACHINES, host
from rung.tile.candidates_cpu import candidates


def target(name: str) -> Target:
    """The target of a name in `TARGETS`; `cpu` is the widest that runs here.

    Prices count on as many cores as torch has threads now; kernels run with what it has then.
    Threads that wait asleep make a fork dear.
    """
    machine = host() if name == "cpu" else MACHINES[name]
    rates = machine.rates
    if Settings.from_environment().asleep:
        rates = replace(rates, fork=ASLEEP)
    return Target(replace(machine, cores=torch.get_num_threads(), rates=rates), candidates, emit,
                  LIBRARIES, keeps_call)
