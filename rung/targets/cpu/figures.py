"""What a CPU reaches, as data: measured by `calibrate`, or else a table of its family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from rung.core.config import Settings
from rung.core.machine import Issue, Rates, Reach, Space


@dataclass(frozen=True)
class Figures:
    """Rates are a second's, and of one core. Each memory, nearest first, has its bytes, the rate at
    which one core reads it, and that of all together (0: not known)."""

    f32: float  # operations of fused multiply-adds
    scale: float  # of these a core keeps while all compute
    faster: Mapping[str, float] = field(hash=False)  # operations of each type in the time of one
    latency: float  # vector operations that could start while one is awaited
    load: float  # vector operations that a broadcast from the nearest cache takes
    spaces: tuple[tuple[int, float, float], ...]
    fork: float  # seconds to start and join all threads
    reach: Mapping[str, Reach] = field(hash=False)

    def rates(self) -> Rates:
        """What prices read. Other types have the shares of f32 that vectors of them have."""
        flops = {"f32": self.f32, "f64": self.f32 / 2, "i64": self.f32 / 8, "i32": self.f32 / 2}
        return Rates(self.spaces[-1][1], self.spaces[1][1], flops, 2e-6, self.fork,
                     issue=Issue(self.latency, self.load, self.scale), reach=dict(self.reach))

    def memories(self) -> tuple[Space, ...]:
        """The caches and DRAM; the nearest two belong to a core."""
        owned = ("core", "core", "", "")
        return tuple(Space(name, count, rate, owner, most=most) for name, owner, (
            count, rate, most) in zip(("l1", "l2", "l3", "dram"), owned, self.spaces, strict=True))

    def data(self) -> dict[str, object]:
        """As JSON has it; `read` is its inverse."""
        return asdict(self)


def read(found: Mapping[str, Any]) -> Figures:
    """Figures from their data. KeyError, TypeError or ValueError for what is none."""
    spaces = tuple((int(b), float(r), float(a)) for b, r, a in found["spaces"])
    reach = {str(name): Reach(**x) for name, x in found["reach"].items()}
    made = Figures(**{**found, "spaces": spaces, "reach": reach})
    if len(spaces) != 4 or not all(x > 0 for x in (made.f32, made.scale, made.fork, spaces[-1][1])):
        raise ValueError("these are no figures of a CPU")
    return made


# --- tables

DRAM = 1 << 40  # bytes: as many as one likes
SLOW_BF16, SLOW_I8 = 0.08, 0.4  # shares of f32's peak without instructions for them


def _reach(mkl: float, bf16: float, i8: float, onednn: float, stream: float) -> dict[str, Reach]:
    """Of each library: `stream` is the share of DRAM's rate at which bf16 rows are read."""
    return {"aten.matmul f32": Reach(mkl, 0.9, 5e-6), "aten.matmul bf16": Reach(bf16, stream, 5e-6),
            "aten.int_mm i8": Reach(i8, 0.9, 5e-6), "onednn.linear f32": Reach(onednn, 0.9, 18e-6)}


ZEN5 = Figures(272e9, 1.0, {"bf16": 1.83, "i8": 4.0}, 8.0, 0.5,
               ((48 << 10, 400e9, 0), (1 << 20, 164e9, 0), (32 << 20, 117e9, 0), (DRAM, 37e9, 0)),
               5e-6, _reach(0.40, 1.83 * 0.92, 4.0 * 0.87, 0.78, 0.35))
"""A server of two cores; without AVX-512 the rates go with the width of vectors."""

AVX2, BASE = (replace(ZEN5, f32=ZEN5.f32 * x, reach=_reach(0.40, SLOW_BF16, SLOW_I8, 0.78, 0.35))
              for x in (0.5, 0.15))
FIXED = {"cpu.avx512": ZEN5, "cpu.avx2": AVX2, "cpu.base": BASE}
"""The tables of machines that are no CPU in particular; what they give is the same everywhere."""

ASLEEP = 40e-6  # seconds of a fork whose threads wait asleep and must be woken


def table(name: str) -> Figures:
    """The table of a machine, with forks as dear as the environment makes them."""
    asleep = Settings.from_environment().asleep
    return replace(FIXED[name], fork=ASLEEP) if asleep else FIXED[name]


@dataclass(frozen=True)
class Family:
    """CPUs that one table fits: who makes them, numbers of the family, and what they report."""

    vendor: str
    numbers: tuple[int, ...]
    has: str
    figures: Figures


ZEN4 = Figures(120e9, 0.95, {"bf16": 2.0, "i8": 4.0}, 4.0, 0.2,
               ((32 << 10, 220e9, 0), (1 << 20, 115e9, 0), (32 << 20, 95e9, 0),
                (DRAM, 23e9, 140e9)), 5e-6, _reach(0.77, 1.7, 3.2, 0.85, 0.5))
FAMILIES = (Family("AuthenticAMD", (26,), "avx512f", ZEN5),
            Family("AuthenticAMD", (25,), "avx512f", ZEN4))


def of_family(name: str, has: frozenset[str]) -> Figures:
    """The table of this CPU's family, for the machine `name` that it is and what it reports."""
    vendor, number = fact("vendor_id"), fact("cpu family")
    found, plain = table(name), {"aten.matmul bf16": SLOW_BF16, "aten.int_mm i8": SLOW_I8}
    for one in FAMILIES:
        if name == "cpu.avx512" and vendor == one.vendor and one.has in has and number in map(
                str, one.numbers):
            found = replace(one.figures, fork=found.fork)
    lacks = [x for x, flag in zip(plain, ("avx512_bf16", "avx512_vnni"), strict=True)
             if flag not in has]
    return replace(found, reach={**found.reach, **{
        x: replace(found.reach[x], peak=plain[x]) for x in lacks}})


@cache
def fact(name: str) -> str:
    """What the kernel says of this CPU under a name; "" where it says nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    found = (x.partition(":") for x in lines)
    return next((value.strip() for key, _, value in found if key.strip() == name), "")


@cache
def cache_bytes(level: int, otherwise: int) -> int:
    """The size of this CPU's cache of a level for data."""
    for path in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            here, kind = (path / "level").read_text(), (path / "type").read_text()
            if int(here) == level and kind.strip() != "Instruction":
                return int((path / "size").read_text().strip().removesuffix("K")) << 10
        except (OSError, ValueError):
            continue
    return otherwise
