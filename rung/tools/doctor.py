"""`rung doctor`: does this machine have what Rung needs, and if not, what to do.

Each line of the report is one thing: found or not, and where it fails, the way to mend it.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from time import perf_counter, time_ns
from typing import Any

import torch

from rung.core import store
from rung.core.config import Settings
from rung.core.errors import RungError
from rung.entry import rung
from rung.frontends.torch.compat import SUPPORTED
from rung.targets.cpu import build, calibrate
from rung.targets.cpu import target as cpu
from rung.targets.cpu.figures import fact
from rung.targets.cpu.machine import MACHINES, features, host
from rung.targets.cpu.machine import NEEDS as FEATURES
from rung.targets.cuda import build as cuda_build
from rung.targets.cuda import driver
from rung.targets.cuda.device import NEEDS
from rung.tools.fuzz.programs import Line, Program
from rung.tools.fuzz.run import differing

PYTHONS = (3, 11), (3, 13)


@dataclass(frozen=True)
class Finding:
    """What was looked at and what was found; `remedy` is what to do where that will not do."""

    name: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        mark = "no" if self.remedy else "ok"
        line = f"{mark:<3} {self.name:<12} {self.found}"
        return line + "".join(f"\n    {'':<12} {x}" for x in self.remedy.splitlines())


def doctor() -> tuple[str, bool, dict[str, Any]]:
    """The report, whether all is well, and the report as the data that docs/json.md describes."""
    findings = [_safely(check) for check in CHECKS]
    failed = sum(bool(f.remedy) for f in findings)
    end = f"{failed} of {len(findings)} need attention" if failed else "all is well"
    return "\n".join([*map(str, findings), end]) + "\n", not failed, {
        "well": not failed, "findings": [asdict(f) for f in findings]}


def calibrated() -> tuple[str, bool, dict[str, object]]:
    """What this CPU reaches, measured now and kept for all that is compiled from here on."""
    threads, started = torch.get_num_threads(), perf_counter()
    found = calibrate.again(cpu.here(), threads)
    spent = perf_counter() - started
    title = f"{fact('model name')}, {threads} threads, torch {torch.__version__}"
    rows = [("f32", f"{found.f32 / 1e9:.0f} GFLOP/s a core, {found.scale:.2f} of it while all "
             "compute")]
    rows += [(name, f"{x:.1f} times as many") for name, x in sorted(found.faster.items())]
    rows += [(x.name, f"{x.rate / 1e9:.0f} GB/s a core, {x.rate * x.together(threads) / 1e9:.0f} "
              "all") for x in found.memories()]
    rows += [(name, f"{x.peak:.2f} of the f32 peak, rows at {x.stream:.2f} of DRAM, "
              f"{x.dispatch * 1e6:.1f} us a call") for name, x in found.reach.items()]
    rows += [("fork", f"{found.fork * 1e6:.1f} us"), ("measured in", f"{spent:.2f} s")]
    lines = [f"{name:<18} {text}" for name, text in rows]
    return "\n".join([title, *lines]) + "\n", True, {
        "cpu": title, "seconds": spent, **found.data()}


def _safely(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # the report must come out whatever is broken
        name = check.__name__.strip("_").replace("_", " ")
        first, *rest = str(error).splitlines() or [type(error).__name__]
        return Finding(name, f"{type(error).__name__}: {first}", "\n".join(rest) or REPORT)


REPORT = "please report this, with the output of `rung doctor`"


def _python() -> Finding:
    here, version = sys.version_info[:2], sys.version.split()[0]
    if PYTHONS[0] <= here <= PYTHONS[1]:
        return Finding("python", version)
    return Finding("python", version, "Rung is for Python 3.11 to 3.13")


def _torch() -> Finding:
    here = tuple(int(x) for x in torch.__version__.split(".")[:2])
    first, last = (".".join(map(str, x)) for x in SUPPORTED)
    if SUPPORTED[0] <= here <= SUPPORTED[1]:
        return Finding("torch", torch.__version__)
    return Finding("torch", torch.__version__, f"install torch {first} to {last}: Rung takes "
                   "private parts of torch, which change")


def _backend() -> Finding:
    found = [e for e in entry_points(group="torch_dynamo_backends") if e.name == "rung"]
    if found:
        return Finding("backend", f"torch.compile(backend=\"rung\") is {found[0].value}")
    return Finding("backend", "torch does not know of rung", "pip install rung (or pip install -e "
                   "in its source); a folder on PYTHONPATH is not enough")


def _compiler() -> Finding:
    command, version = build.compiler(), build.version()
    title = version.splitlines()[0] if version else ""
    if not title:
        return Finding("compiler", f"{' '.join(command)} says nothing of its version",
                       build.NO_COMPILER)
    return Finding("compiler", f"{' '.join(command)}: {title}")


def _openmp() -> Finding:
    found = build.openmp()
    return Finding("openmp", f"kernels share {found[-1]} with torch, {torch.get_num_threads()} "
                   "threads") if found else Finding(
        "openmp", "kernels run on one thread", "use GCC (RUNG_CC=gcc) and a torch with libgomp: "
        "Clang's OpenMP is another library than GCC's")


def _cpu() -> Finding:
    chosen = host()
    wider = [m.name for m in MACHINES.values() if not FEATURES[m.name] <= features()]
    lacks = "".join(f"; no {', '.join(sorted(FEATURES[name] - features()))} for {name}"
                    for name in wider)
    return Finding("cpu", f"target {chosen.name}{lacks}")


def _target() -> Finding:
    settings = Settings.from_environment()
    asked = settings.target or "that of the tensors' device"
    missing = FEATURES.get(asked, set()) - features()
    if missing:
        return Finding("target", asked, f"this CPU has no {', '.join(sorted(missing))}: choose "
                       "another RUNG_TARGET")
    return Finding("target", f"{asked}, precision {settings.precision}")


def _cache() -> Finding:
    try:
        path = store.trusted(build.KIND)
    except OSError as error:
        return Finding("cache", f"it is not used: {error}", "set RUNG_CACHE_DIR to a folder of "
                       "your own; until then kernels are built anew in each process")
    entries = [e for e in os.scandir(path) if e.name.endswith(".so")]
    size = sum(e.stat().st_size for e in entries)
    disk, mode = os.statvfs(path), stat.S_IMODE(path.stat().st_mode)
    free = disk.f_bavail * disk.f_frsize
    if disk.f_flag & os.ST_NOEXEC:
        return Finding("cache", f"{path} is mounted noexec", "set RUNG_CACHE_DIR to a folder that "
                       "is not; until then each process copies its kernels to TMPDIR")
    title = f"{path}, mode {mode:04o}: {len(entries)} libraries, {size >> 10} KiB"
    if not os.access(path, os.W_OK):
        return Finding("cache", f"{title}, read-only: kernels that it lacks are built in each "
                       "process")
    if free < 64 << 20:
        return Finding("cache", f"{free >> 20} MiB are left for {path}", "make room, or set "
                       "RUNG_CACHE_DIR to a folder on another disk")
    return Finding("cache", title)


def _gpu() -> Finding:
    """The GPU, if there is one, and what compiles for it."""
    if not torch.cuda.is_available():
        return Finding("gpu", "none that torch can use")
    name, here = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    said = f"{name}, compute capability {here[0]}.{here[1]}, {driver.version()}"
    if here[0] != NEEDS[0]:
        return Finding("gpu", f"{said}: graphs on it stay with torch, since kernels are made for "
                       f"compute capability {NEEDS[0]}.x")
    if not (compiler := (cuda_build.version().strip().splitlines() or [""])[-1]):
        return Finding("gpu", said, cuda_build.NO_COMPILER)
    return Finding("gpu", f"{said}, {compiler}")


def _kernel() -> Finding:
    return _run_on("cpu")


def _gpu_kernel() -> Finding:
    usable = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == NEEDS[0]
    return _run_on("cuda") if usable else Finding("gpu kernel", "there is nothing to run it")


def _run_on(place: str) -> Finding:
    """Build a kernel and run it."""
    title = "kernel" if place == "cpu" else "gpu kernel"
    x = torch.linspace(-2, 2, 1001, device=place)
    number = time_ns() % 1_000_003  # in no cache

    def example(x: torch.Tensor) -> torch.Tensor:
        return torch.floor(x) + number
    torch._dynamo.reset()
    compiled = torch.compile(example, backend=rung, dynamic=False, options={"strict": True})
    try:
        wrong = not torch.equal(compiled(x), example(x))
    except RungError as error:
        return Finding(title, f"{type(error).__name__}: {error}", REPORT)
    if wrong:
        return Finding(title, "floor(x) + n gives another result than eager", REPORT)
    return Finding(title, "floor(x) + n compiled, ran and agreed with eager")


NUMBERS = {
    "counts": "(a.reshape(-1) != 0).sum(0); a.count_nonzero(); (i == 0).sum(1); (b & ~b[0]).sum()",
    "conversions": "a.to(torch.int64).sum(); (a * 9).to(torch.int8).sum(0); h.double().sum(1)",
    "converted": "i.to(torch.int16); a.half(); h.bfloat16(); i.double(); b.float(); i.bool()",
    "sums": "a.sum((0, 2)); a.mean(); a.double().sum(); i.sum(); h.sum(0); torch.cumsum(a, 2)",
    "extremes": "a.amax(1); a.argmax(2); h.amin(); i.argmin(1); b.any(1); torch.minimum(a, a[0])",
    "functions": "torch.exp(a); torch.tanh(h); torch.floor(a * 3); torch.where(b, i, -i) * 3 >> 1",
    "products": "a @ a.mT; i // 3; i % 5; torch.softmax(a, 2); a / (a * a).mean(2, True).sqrt()",
}
"""What kernels are made of, of floats a[3,18,37], halves h, integers i and truths b[18,37]: sums of
all widths and of ragged ends, and what C compilers got wrong."""


def _numbers() -> Finding:
    """Run kernels of all kinds, and compare them with NumPy on each rung."""
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(3, 18, 37, generator=generator) * (torch.arange(37) % 3 != 0)
    inputs = {"a": a, "h": a[0].half(), "i": (a[1] * 20).long(), "b": a[2] > 0}
    names, drawn = list(NUMBERS), dict[int, Program]()
    for n, text in enumerate(NUMBERS.values()):
        lines = [Line(f"r{k}", x, tuple(inputs)) for k, x in enumerate(text.split("; "))]
        drawn[n] = Program(inputs, tuple(lines), tuple(x.name for x in lines))
    wrong = [f"{names[n]}: {what.splitlines()[0]}" for n, _, what in differing(drawn, "cpu", 1)]
    if not wrong:
        return Finding("numbers", f"{', '.join(names)}: kernels agree with NumPy")
    title = (build.version().splitlines() or ["the compiler"])[0]
    return Finding("numbers", f"{len(wrong)} of {len(names)} kinds of kernels are wrong",
                   "\n".join([*wrong, f"{title} may compile them wrongly: use another one "
                              "(RUNG_CC=clang, or pip install ziglang)"]))


CHECKS = (_python, _torch, _backend, _compiler, _openmp, _cpu, _target, _cache, _kernel, _numbers,
          _gpu, _gpu_kernel)
