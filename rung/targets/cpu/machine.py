"""Machine tables of the CPU targets.

Rates were measured on one core of a Zen 5 server (AVX-512): FMA 272 GFLOP/s in fp32, DRAM 37 GB/s,
L2 164 GB/s; the others scale by vector width. They rank candidates, so ratios are what matters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

from rung.core.machine import GRID, SEQ, UNROLL, VECTOR, Level, Machine, Rates, Space
from rung.targets.cpu.atoms import EXTENSIONS, FMA, Extension, fma4

LEVELS = (Level("core", GRID), Level("l3", SEQ), Level("l2", SEQ), Level("l1", SEQ),
          Level("seq", SEQ), Level("reg", UNROLL), Level("simd", VECTOR))
SPACES = (Space("l1", 48 << 10, 400e9, "core"), Space("l2", 1 << 20, 164e9, "core"),
          Space("l3", 32 << 20, 117e9), Space("dram", 1 << 40, 37e9))


def _machine(name: str, lanes: int, registers: int, scale: float) -> Machine:
    flops = {"f32": 272e9 * scale, "f64": 136e9 * scale, "i64": 34e9 * scale,
             "i32": 136e9 * scale}
    rates = Rates(37e9, 164e9, flops, 2e-6, 5e-6)
    atoms = (FMA, fma4(lanes)) if lanes > 4 else (FMA,)
    return Machine(name, LEVELS, SPACES, rates, lanes, registers, ("mov", "pack"), atoms)


AVX512 = _machine("cpu.avx512", 16, 32, 1.0)
AVX2 = _machine("cpu.avx2", 8, 16, 0.5)
BASE = _machine("cpu.base", 4, 16, 0.15)
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
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((x for x in lines if x.startswith("flags")), "")
    return frozenset(found.partition(":")[2].split())


ASLEEP = 40e-6  # seconds of a fork whose threads wait asleep and must be woken


def host() -> Machine:
    """The widest machine that this CPU can run."""
    return next(m for m in MACHINES.values() if NEEDS[m.name] <= features())


def extensions(machine: Machine) -> list[Extension]:
    """What this CPU has beside the atoms of a machine that it is."""
    wide = machine.name == AVX512.name
    return [x for x in EXTENSIONS if wide and x.feature in features()]


def extended(machine: Machine, more: Iterable[Extension]) -> Machine:
    """The machine with more atoms, which go before its own, and the rates of these."""
    for x in more:
        flops = machine.rates.flops
        rates = replace(machine.rates, flops={**flops, x.atom.rate: x.speed * flops["f32"]})
        machine = replace(machine, atoms=(x.atom, *machine.atoms), rates=rates)
    return machine


def flags(machine: Machine) -> tuple[str, ...]:
    """The compiler's flags for a machine."""
    return (*FLAGS[machine.name], *(x.flag for x in EXTENSIONS if x.atom in machine.atoms))
