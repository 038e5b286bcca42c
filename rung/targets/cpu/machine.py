"""Machine tables of the CPU targets: what the instruction sets have, with the figures of a CPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from rung.core.machine import GRID, SEQ, UNROLL, VECTOR, Level, Machine
from rung.targets.cpu.atoms import EXTENSIONS, FMA, Extension, fma4
from rung.targets.cpu.figures import FIXED, Figures, fact

LEVELS = (Level("core", GRID), Level("l3", SEQ), Level("l2", SEQ), Level("l1", SEQ),
          Level("seq", SEQ), Level("reg", UNROLL), Level("simd", VECTOR))


def _machine(name: str, lanes: int, registers: int) -> Machine:
    figures = FIXED[name]
    atoms = (FMA, fma4(lanes)) if lanes > 4 else (FMA,)
    return Machine(name, LEVELS, figures.memories(), figures.rates(), lanes, registers,
                   ("mov", "pack"), atoms)


AVX512 = _machine("cpu.avx512", 16, 32)
AVX2 = _machine("cpu.avx2", 8, 16)
BASE = _machine("cpu.base", 4, 16)
MACHINES = {m.name: m for m in (AVX512, AVX2, BASE)}
FLAGS = {"cpu.avx512": ("-mavx512f", "-mavx512vl", "-mavx512dq", "-mavx512bw", "-mavx2", "-mfma",
                        "-mf16c", "-mprefer-vector-width=512"),
         "cpu.avx2": ("-mavx2", "-mfma", "-mf16c"),
         "cpu.base": ()}
NEEDS = {"cpu.avx512": {"avx512f", "avx512vl", "avx512dq", "avx512bw", "avx2", "fma", "f16c"},
         "cpu.avx2": {"avx2", "fma", "f16c"}, "cpu.base": set()}


@cache
def features() -> frozenset[str]:
    """Instruction sets that this CPU and kernel report; asked of the CPU, not of the compiler."""
    return frozenset(fact("flags").split())


def host() -> Machine:
    """The widest machine that this CPU can run."""
    return next(m for m in MACHINES.values() if NEEDS[m.name] <= features())


def extensions(machine: Machine) -> list[Extension]:
    """What this CPU has beside the atoms of a machine that it is."""
    wide = machine.name == AVX512.name
    return [x for x in EXTENSIONS if wide and x.feature in features()]


def extended(machine: Machine, more: Iterable[Extension]) -> Machine:
    """The machine with more atoms, which go before its own, and the rates of these."""
    atoms = (*reversed([x.atom for x in more]), *machine.atoms)
    return reaching(replace(machine, atoms=atoms), FIXED[machine.name])


def reaching(machine: Machine, figures: Figures) -> Machine:
    """The machine as a CPU that reaches these figures."""
    rates = figures.rates()
    narrow = {x.rate for x in machine.atoms} & figures.faster.keys()
    flops = {**rates.flops, **{n: figures.faster[n] * figures.f32 for n in sorted(narrow)}}
    return replace(machine, spaces=figures.memories(), rates=replace(rates, flops=flops))


def flags(machine: Machine) -> tuple[str, ...]:
    """The compiler's flags for a machine."""
    return (*FLAGS[machine.name], *(x.flag for x in EXTENSIONS if x.atom in machine.atoms))
