"""`rung bench`: Rung against eager and Inductor, in one process, in alternating rounds.

Out: a table of medians and ratios, and with `--json` all figures together with what they depend on.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from rung.core import trace
from rung.core.trace import Event
from rung.targets.base import Target, target
from rung.tools import first_call
from rung.tools.benchmarks import BENCHMARKS, FIRST_CALL, MODELS_GROUP, Benchmark
from rung.tools.given import UsageError, inputs_of
from rung.tools.measure import alternate, fma_loop, launched, machine_facts, median, peak, spread

KNOWN = ("eager", "inductor")
SEED = 0
WARM_UPS = 10


@dataclass(frozen=True)
class Request:
    """What the options of `bench` say."""

    against: tuple[str, ...] = KNOWN
    json: str = ""
    quick: bool = False
    target: str = "cpu"
    threads: int = 0  # 0: as many as torch has


def bench(name: str | None, request: Request) -> str:
    """The table for stdout; progress goes to stderr."""
    if unknown := [x for x in request.against if x not in KNOWN]:
        raise UsageError(f"cannot measure against {unknown[0]!r}; there are {', '.join(KNOWN)}")
    if request.threads:
        torch.set_num_threads(request.threads)
    machine = target(request.target)
    rows = [measured(b, machine, request) for b in BENCHMARKS if name in (b.name, b.group or None)]
    if name in (None, FIRST_CALL):
        rows.append(first_calls(request))
    if name in (MODELS_GROUP, FIRST_CALL) and not request.quick:
        rows.append(first_calls(request, "bert"))
    facts = machine_facts() | {"target": machine.name, "seed": SEED}
    if request.json:
        Path(request.json).write_text(json.dumps(facts | {"results": rows}, indent=2) + "\n")
    head = ", ".join(f"{key} {value}" for key, value in facts.items())
    return "\n".join([head, *_table(rows, request.against)]) + "\n"


def measured(case: Benchmark, machine: Target, request: Request) -> dict[str, Any]:
    """One benchmark: medians, compile times, the largest difference to eager."""
    print(f"rung: measuring {case.name}", file=sys.stderr)
    torch.manual_seed(SEED)
    function, args = case.build(request.quick)
    torch._dynamo.reset()
    compiled = {name: _compiled(function, name, machine) for name in ("rung", *request.against)}
    calls = {name: _step(run, args) if case.train else partial(run, *args)
             for name, run in compiled.items()}
    with torch.set_grad_enabled(case.train), trace.listen() as events:
        first = {name: _timed(run) for name, run in calls.items()}
        difference = _difference(*(_seeded(run, args) for run in (function, compiled["rung"])))
        for run in calls.values():
            for _ in range(1 if request.quick else WARM_UPS):
                run()
        memory = {name: peak(run) for name, run in calls.items()}
        times = alternate(calls, *((3, 0.002) if request.quick else ()))
    row: dict[str, Any] = {
        "name": case.name, "what": case.what, "difference": difference,
        "seconds": {name: median(t) for name, t in times.items()},
        "spread": {name: spread(t) for name, t in times.items()},
        "first_call_seconds": first, "peak_bytes": memory,
        "ratio": {name: median(times[name]) / median(times["rung"]) for name in request.against},
        **_counted(events)}
    if work := case.flops(request.quick):
        row |= _share(work, calls["rung"], machine)
    return row


def _timed(run: Callable[[], Any]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def _seeded(run: Callable[..., Any], args: Sequence[Any]) -> Any:
    """A result for which numbers are drawn from the same seed."""
    torch.manual_seed(SEED)
    return run(*args)


def _step(loss: Callable[..., Any], args: Sequence[Any]) -> Callable[[], Any]:
    """A training step: the loss, its gradients, and AdamW."""
    optimizer = torch.optim.AdamW(args[0].parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss(*args).backward()
        optimizer.step()
    return step


def _counted(events: Sequence[Event]) -> dict[str, int]:
    """Graphs, kernels, their launches, and calls that stayed with ATen, of all that compiled."""
    graphs = [launched(e.data["stages"]) for e in events if e.kind == "compiled"]
    kernels = Counter(name for names, _ in graphs for name in names)
    return {"graphs": len(graphs), "kernels": len(kernels),
            "launches": sum(names.total() for names, _ in graphs),
            "aten_calls": sum(calls.total() for _, calls in graphs)}


def _compiled(function: Callable[..., Any], name: str, machine: Target) -> Callable[..., Any]:
    if name == "eager":
        return function
    if name == "rung":
        return torch.compile(function, backend="rung", options={"target": machine.name})
    return torch.compile(function)


def _difference(want: Any, have: Any) -> float:
    """The largest difference, as a share of the largest value."""
    pairs = zip(inputs_of((want,)), inputs_of((have,)), strict=True)
    return max((float((a.double() - b.double()).abs().max() / a.double().abs().max().clamp(1e-30))
                for a, b in pairs), default=0.0)


def _share(work: int, call: Callable[[], Any], machine: Target) -> dict[str, float]:
    """FLOP/s on one thread, and their share of the peak, measured in the same rounds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run, operations = fma_loop(machine)
        with torch.no_grad():
            times = alternate({"call": call, "peak": run})
    finally:
        torch.set_num_threads(threads)
    rates = work / median(times["call"]), operations / median(times["peak"])
    return {"flops_one_thread": rates[0], "peak_one_thread": rates[1],
            "share_of_peak": rates[0] / rates[1]}


def first_calls(request: Request, model: str = "") -> dict[str, Any]:
    """The first call of floor(x) + 1, or of a model, in a new process, for each backend."""
    found = {}
    for name in ("rung", *request.against):
        print(f"rung: measuring the first call under {name}", file=sys.stderr)
        found[name] = first_call.measure(name, model)
    what = model or "floor(x) + 1"
    return {"name": f"{FIRST_CALL} of {what}", "what": f"{what} in a new process, from the call on",
            "first_call": found}


# --- the table

def _table(rows: Sequence[dict[str, Any]], against: Sequence[str]) -> Iterator[str]:
    timed = [r for r in rows if "seconds" in r]
    if timed:
        names = "".join(f"{name:>12}" for name in ("rung", *against))
        yield f"{'':<12}{names}  " + "  ".join(f"{name}/rung" for name in against)
    for row in timed:
        figures = "".join(f"{_time(t):>12}" for t in row["seconds"].values())
        ratios = "  ".join(f"{row['ratio'][name]:{len(name) + 5}.2f}" for name in against)
        yield f"{row['name']:<12}{figures}  {ratios}"
        yield (f"{'':<12}{row['launches']} launches of {row['kernels']} kernels in "
               f"{row['graphs']} graphs, {row['aten_calls']} calls of ATen; first call "
               + ", ".join(f"{name} {t:.1f} s" for name, t in row["first_call_seconds"].items())
               + "; peak " + ", ".join(f"{name} {b / 2**20:,.0f} MiB"
                                       for name, b in row["peak_bytes"].items()))
        if "share_of_peak" in row:
            yield (f"{'':<12}{row['flops_one_thread'] / 1e9:.1f} GFLOP/s on one thread, "
                   f"{row['share_of_peak']:.2f} of the FMA peak of "
                   f"{row['peak_one_thread'] / 1e9:.1f}")
    for row in rows:
        for name, t in row.get("first_call", {}).items():
            yield (f"{row['name']} {name}: {t['wall']:.2f} s, {t['cpu']:.2f} s of CPU "
                   f"(import apart: {t['import']:.2f} s); warm {t['warm_wall']:.2f} s, "
                   f"{t['warm_cpu']:.2f} s of CPU")


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
