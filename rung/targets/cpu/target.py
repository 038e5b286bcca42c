"""The CPU targets: the machines, their mappings, and kernels as C."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, partial

from rung.core.errors import TargetCompileError
from rung.core.machine import Machine
from rung.core.op import Func
from rung.core.types import I32, dtype_of
from rung.targets.base import Target
from rung.targets.cpu import calibrate
from rung.targets.cpu.atoms import Extension
from rung.targets.cpu.build import build
from rung.targets.cpu.emit import emit
from rung.targets.cpu.figures import table
from rung.targets.cpu.groups import CpuPrelude
from rung.targets.cpu.libraries import LIBRARIES, keeps_call
from rung.targets.cpu.machine import AVX512, MACHINES, extended, extensions, host, reaching
from rung.targets.cpu.packed import packed
from rung.tile import candidates_cpu
from rung.tile.mapping import Mapping as TileMapping
from rung.tile.match import meaning_of


def threads() -> int:
    """How many threads kernels run with now: the OpenMP that they link is that of this process,
    which is torch's."""
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch else 1


def target(name: str) -> Target:
    """The target of a name in `TARGETS`; `cpu` is the widest that runs here, with all its
    atoms, and reaches what this CPU does.

    Prices count on as many cores as there are threads now; kernels run with what there are then.
    """
    machine = here() if name == "cpu" else MACHINES[name]
    found = calibrate.figures(machine, threads()) if name == "cpu" else table(name)
    machine = replace(reaching(machine, found), cores=threads())
    return Target(machine, candidates, emit, LIBRARIES, partial(keeps_call, machine=machine),
                  shares=True)


def here() -> Machine:
    """The widest machine that runs here, with all of its atoms that the compiler knows."""
    return extended(host(), filter(knows, extensions(host())))


def candidates(kernel: Func, machine: Machine, hints: Mapping[str, int]) -> Iterable[TileMapping]:
    """Mappings worth pricing."""
    return packed(kernel, machine, candidates_cpu.candidates(kernel, machine, hints))


@cache
def knows(extension: Extension) -> bool:
    """Whether the compiler and its assembler are new enough for an instruction."""
    prelude, acc = CpuPrelude(), dtype_of(meaning_of(extension.atom).outs[0].type)
    call = prelude.call(extension.atom.name, acc, 16, ["c", "a", "b"])
    state, word = prelude.type(acc, 16), prelude.type(I32, 16)
    probe = f"{state} probe({state} c, {word} a, {word} b) {{ return {call}; }}\n"
    try:
        build([prelude.text() + probe], extended(AVX512, [extension]))
        return True
    except TargetCompileError:
        return False
