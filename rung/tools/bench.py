"""`rung bench`: Rung against eager and Inductor, in one process, in alternating rounds.

Out: a table of medians and ratios, row by row, and with `--json` all figures together with what
they depend on. A row whose library is missing is skipped, one that fails does not stop the others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from rung.core import trace
from rung.core.config import Settings
from rung.entry import rung
from rung.targets import base
from rung.targets.base import Target
from rung.tools import first_call, gpu, models
from rung.tools.benchmarks import BENCHMARKS, FIRST_CALL, GPU, Benchmark, Built
from rung.tools.given import UsageError, from_file, inputs_of
from rung.tools.measure import (
    alternate,
    counted,
    fma_loop,
    machine_facts,
    median,
    peak,
    spread,
)

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
    rows: tuple[str, ...] = ()  # of a GPU's: those whose names have one of these words
    bars: bool = False  # whether a row below its bar is a failure


Row = dict[str, Any]


def bench(name: str | None, request: Request) -> bool:
    """Whether all was measured. Each row of the table goes to stdout when it is there, progress and
    what is printed meanwhile to stderr; what ends it early leaves the rows that are finished."""
    if unknown := [x for x in request.against if x not in KNOWN]:
        raise UsageError(f"cannot measure against {unknown[0]!r}; there are {', '.join(KNOWN)}")
    if request.threads:
        torch.set_num_threads(request.threads)
    on_gpu = name in GPU
    target, rows = base.target("cuda" if on_gpu else request.target), list[Row]()
    facts = machine_facts() | {"target": target.name, "seed": SEED}
    if on_gpu and torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    told, out = False, sys.stdout

    def add(row: Row) -> None:
        """Keep a row, in the file too: what ends this may not ask."""
        rows.append(row)
        made = gpu.lines(row) if "bars" in row else _lines(row, request.against)
        print("\n".join(made), file=out, flush=True)
        if request.json:
            Path(request.json).write_text(json.dumps(facts | {"results": rows}, indent=2) + "\n")
    print(", ".join(f"{key} {value}" for key, value in facts.items()), file=out, flush=True)
    for title, run in _asked(name, target, request):
        with redirect_stdout(sys.stderr):
            print(f"rung: measuring {title}", flush=True)
            row = _tried(title, run)
        if "seconds" in row and not told and not on_gpu:
            print(_head(request.against), file=out)
            told = True
        add(row)
    for row in list(gpu.means(rows)):
        add(row)
    if request.bars and any(map(gpu.is_below, rows)):
        return False
    return not any("error" in row for row in rows) and not all("skipped" in row for row in rows)


def _asked(name: str | None, target: Target, request: Request
           ) -> Iterator[tuple[str, Callable[[], Row]]]:
    """What is to be measured, by its title."""
    if name in GPU:
        yield from gpu.asked(name, request.against, request.rows, request.quick)
        return
    cases = [b for b in BENCHMARKS if name in (b.name, b.group or None)]
    if name and ":" in name:
        cases = [Benchmark(name, name, partial(_users, name))]
    for case in cases:
        yield case.name, partial(measured, case, target, request)
    if name in (None, FIRST_CALL):
        yield FIRST_CALL, partial(first_calls, request)
    if name in ("models", FIRST_CALL) and not request.quick:
        yield f"{FIRST_CALL} of bert", partial(first_calls, request, "bert")


def _users(name: str, quick: bool) -> Built:
    given = from_file(name)
    return partial(given.function, **given.kwargs) if given.kwargs else given.function, given.args


def _tried(title: str, run: Callable[[], Row]) -> Row:
    """A row, or why there is none."""
    try:
        return run()
    except models.MissingLibrary as error:
        return {"name": title, "skipped": str(error)}
    except Exception as error:
        if isinstance(error, UsageError) or Settings.from_environment().debug:
            raise
        said = f"{type(error).__name__}: {error}"
        print(f"rung: error: {title}: {said}", file=sys.stderr)
        return {"name": title, "error": said}


def measured(case: Benchmark, target: Target, request: Request) -> Row:
    """One benchmark: medians, compile times, the largest difference to eager."""
    torch.manual_seed(SEED)
    function, args = case.build(request.quick)
    torch._dynamo.reset()
    compiled = {name: _compiled(function, name, target) for name in ("rung", *request.against)}
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
        **counted(events)}
    if work := case.flops(request.quick):
        row |= _share(work, calls["rung"], target)
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


def _compiled(function: Callable[..., Any], name: str, target: Target) -> Callable[..., Any]:
    if name == "eager":
        return function
    if name == "rung":
        return torch.compile(function, backend=rung, options={"target": target.name})
    return torch.compile(function)


def _difference(want: Any, have: Any) -> float:
    """The largest difference, as a share of the largest value."""
    pairs = zip(inputs_of((want,)), inputs_of((have,)), strict=True)
    return max((float((a.double() - b.double()).abs().max() / a.double().abs().max().clamp(1e-30))
                for a, b in pairs if a.numel()), default=0.0)


def _share(work: int, call: Callable[[], Any], target: Target) -> dict[str, float]:
    """FLOP/s on one thread, and their share of the peak, measured in the same rounds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run, operations = fma_loop(target)
        with torch.no_grad():
            times = alternate({"call": call, "peak": run})
    finally:
        torch.set_num_threads(threads)
    rates = work / median(times["call"]), operations / median(times["peak"])
    return {"flops_one_thread": rates[0], "peak_one_thread": rates[1],
            "share_of_peak": rates[0] / rates[1]}


def first_calls(request: Request, model: str = "") -> Row:
    """The first call of floor(x) + 1, or of a model, in a new process, for each backend."""
    found = {}
    for name in ("rung", *request.against):
        print(f"rung: measuring the first call under {name}")
        found[name] = first_call.measure(name, model)
    what = model or "floor(x) + 1"
    return {"name": f"{FIRST_CALL} of {what}", "what": f"{what} in a new process, from the call on",
            "first_call": found}


# --- the table

WIDTH = 20  # of names


def _head(against: Sequence[str]) -> str:
    names = "".join(f"{name:>12}" for name in ("rung", *against))
    return f"{'':<{WIDTH}}{names}  " + "  ".join(f"{name}/rung" for name in against)


def _lines(row: Row, against: Sequence[str]) -> Iterator[str]:
    for word in ("skipped", "error"):
        if word in row:
            yield f"{row['name']:<{WIDTH}} {word}: {row[word].splitlines()[0]}"
    if "seconds" in row:
        figures = "".join(f"{_time(t):>12}" for t in row["seconds"].values())
        ratios = "  ".join(f"{row['ratio'][name]:{len(name) + 5}.2f}" for name in against)
        yield f"{row['name']:<{WIDTH}}{figures}  {ratios}"
        yield (f"{'':<{WIDTH}}{row['launches']} launches of {row['kernels']} kernels in "
               f"{row['graphs']} graphs, {row['aten_calls']} calls of ATen; first call "
               + ", ".join(f"{name} {t:.1f} s" for name, t in row["first_call_seconds"].items())
               + "; peak " + ", ".join(f"{name} {b / 2**20:,.0f} MiB"
                                       for name, b in row["peak_bytes"].items()))
    if "share_of_peak" in row:
        yield (f"{'':<{WIDTH}}{row['flops_one_thread'] / 1e9:.1f} GFLOP/s on one thread, "
               f"{row['share_of_peak']:.2f} of the FMA peak of "
               f"{row['peak_one_thread'] / 1e9:.1f}")
    for name, t in row.get("first_call", {}).items():
        yield (f"{row['name']} {name}: {t['wall']:.2f} s, {t['cpu']:.2f} s of CPU "
               f"(import apart: {t['import']:.2f} s); warm {t['warm_wall']:.2f} s, "
               f"{t['warm_cpu']:.2f} s of CPU")


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
