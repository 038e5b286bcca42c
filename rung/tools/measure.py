"""Measuring: alternating rounds of several functions in one process, and the machine's FMA peak."""

from __future__ import annotations

import platform
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from rung.core.parse import parse_module
from rung.core.trace import Event
from rung.pipeline import VOCABULARIES, verify_module
from rung.program.ir import Call, KernelCall, Module
from rung.targets.base import Target
from rung.targets.device import device

Thunk = Callable[[], Any]
ROUNDS, SAMPLE = 15, 0.02  # rounds, and seconds of one function in one round


def alternate(functions: Mapping[str, Thunk], rounds: int = ROUNDS,
              sample: float = SAMPLE) -> dict[str, list[float]]:
    """Seconds of one call of each function, once for each round, the functions taking turns."""
    counts = {name: _calibrated(run, sample) for name, run in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, run in functions.items():
            times[name].append(_seconds(run, counts[name]) / counts[name])
    return times


def _calibrated(run: Thunk, sample: float) -> int:
    """How many calls take about `sample` seconds; warms up on the way."""
    run()
    count = 1
    while (spent := _seconds(run, count)) < sample / 2 and count < 1 << 20:
        count = max(2 * count, int(count * sample / max(spent, 1e-6) / 2))
    return max(1, int(count * sample / max(spent, 1e-9)))


def _seconds(run: Thunk, count: int) -> float:
    start = perf_counter()
    for _ in range(count):
        run()
    return perf_counter() - start


def peak(run: Thunk) -> int:
    """Bytes of this process that are resident at most during a call; 0 where the system does not
    tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        run()
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith("VmHWM"))


def launched(module: Module) -> tuple[Counter[str], Counter[str]]:
    """How often a graph launches each kernel, and calls each ATen overload."""
    ops = module.main.body.ops
    return (Counter(op.callee for op in ops if isinstance(op, KernelCall)),
            Counter(op.target for op in ops if isinstance(op, Call)))


def counted(events: Sequence[Event]) -> dict[str, int]:
    """Graphs, kernels, their launches, and calls that stayed with ATen, of all that compiled, and
    graphs that did not."""
    graphs = [launched(e.data["history"].at("kernel")) for e in events if e.kind == "compiled"]
    kernels = Counter(name for names, _ in graphs for name in names)
    return {"graphs": len(graphs), "kernels": len(kernels),
            "launches": sum(names.total() for names, _ in graphs),
            "aten_calls": sum(calls.total() for _, calls in graphs),
            "declined": sum((e.kind, e.place) == ("declined", "backend") for e in events)}


def median(times: list[float]) -> float:
    return statistics.median(times)


def spread(times: list[float]) -> float:
    """Half the distance between the quartiles, as a share of the median."""
    if len(times) < 4:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / 2 / middle


# --- the peak

STEPS, CHAINS = 1 << 14, 14  # 14 accumulators hide the latency of two units with room to spare
PEAK = """\
kernel-ir peak(x: f32[{rows},{lanes}]) -> y: f32[{chains},{lanes}]
  unroll r<{chains}
  a = x[0,0 : {lanes}] : f32x{lanes}
  b = x[1,0 : {lanes}] : f32x{lanes}
  c = x[r+2,0 : {lanes}] : f32x{lanes} over r<{chains}
  e = for k in 0..{steps} carry d = c : f32x{lanes} over r<{chains}
    yield fma(a, d, b)
  y[r,0 : {lanes}] = e
"""


def fma_loop(target: Target) -> tuple[Thunk, float]:
    """A generated loop of independent FMAs on one core, and the operations in it."""
    lanes = target.machine.lanes
    text = PEAK.format(lanes=lanes, rows=CHAINS + 2, chains=CHAINS, steps=STEPS)
    kernels = parse_module(text, VOCABULARIES)
    verify_module(Module((), kernels))
    launch = device(target).load(kernels, target.emit(kernels))["peak"]
    x, y = torch.rand(CHAINS + 2, lanes), torch.empty(CHAINS, lanes)  # equal chains would merge
    return lambda: launch(x.data_ptr(), y.data_ptr()), 2.0 * lanes * CHAINS * STEPS


# --- the machine

def machine_facts() -> dict[str, Any]:
    """What the figures depend on."""
    return {"processor": _processor(), "system": platform.platform(),
            "python": platform.python_version(), "torch": torch.__version__,
            "threads": torch.get_num_threads()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")),
                platform.processor())
