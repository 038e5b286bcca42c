"""`rung bench gpu_kernels` and `gpu_models`: rows, bars, and the processes that measure them.

A process measures one row after the other, until one fails in it: what an illegal access or a hang
leaves behind does not reach the rows after.
"""

from __future__ import annotations

import gc
import json
import os
import random
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import geometric_mean

import torch

from rung.core.errors import RungError
from rung.tools.gpu_cases import CASES, NAMED, Case
from rung.tools.gpu_ways import OURS, WAYS, Row, copy_rate

LIMIT = 240  # seconds of one row
WIDTH = 32  # of names


class RowError(RungError):
    """The process of a row failed."""


# --- rows, bars and their text

def measured(case: Case, against: Sequence[str], quick: bool, rate: float = 0.0) -> Row:
    """A row: the figures, their ratios to Rung's, and how they stand to the bars."""
    random.seed(0)
    torch.manual_seed(0)
    torch._dynamo.reset()
    row = {"name": case.name, **WAYS[case.how](case, against, quick)}
    found = row["seconds"]
    ours = min(found[name] for name in OURS if name in found)
    row["ratio"] = {name: t / ours for name, t in found.items() if name not in OURS}
    if rate and "bytes" in row:
        row["share_of_copy"] = row["bytes"] / ours / rate
    return row | {"bars": list(bars(case, row))}


def bars(case: Case, row: Row) -> Iterator[Row]:
    """Each bar of a case: against what, what is, and the least that it should be."""
    known = row["ratio"] | {"copy": row.get("share_of_copy")}
    known["best"] = min((known[p] for p in ("inductor", "reduce-overhead") if p in known),
                        default=None)
    for peer, least in case.bars.items():
        if known.get(peer) is not None:
            yield {"bar": peer, "is": known[peer], "least": least}


def means(rows: Sequence[Row]) -> Iterator[Row]:
    """A row for the geometric mean of each group of which there are rows."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        if (case := NAMED.get(row["name"])) and case.group and "inductor" in row.get("ratio", ()):
            groups.setdefault(case.group, []).append(row["ratio"]["inductor"])
    for group, found in groups.items():
        yield {"name": f"mean of {group}", "bars": [
            {"bar": "inductor", "is": geometric_mean(found), "least": 1.0}]}


def is_below(row: Row) -> bool:
    """Whether a row has no figures, or wrong results, or one below its bar."""
    return ("error" in row or "rung" in row.get("wrong", ())
            or any(bar["is"] < bar["least"] for bar in row.get("bars", ())))


def lines(row: Row) -> Iterator[str]:
    """The text of a row."""
    ratio = {name: f" ({x:.2f})" for name, x in row.get("ratio", {}).items()}
    figures = [f"{name} {t * 1e6:.1f} us{ratio.get(name, '')}"
               for name, t in row.get("seconds", {}).items()]
    if "share_of_copy" in row:
        figures.append(f"{row['share_of_copy']:.2f} of the copy rate")
    yield f"{row['name']:<{WIDTH}}" + ", ".join([*figures, *(
        f"{'ok' if b['is'] >= b['least'] else 'BELOW'}: {b['is']:.2f} of {b['least']:.2f} "
        f"({b['bar']})" for b in row["bars"])])
    for name, said in row.get("wrong", {}).items():
        yield f"{'':<{WIDTH}}WRONG: {name}: {said}"
    if "kernels" in row:
        yield (f"{'':<{WIDTH}}{row['launches']} launches of {row['kernels']} kernels in "
               f"{row['graphs']} graphs, {row['aten_calls']} calls of ATen, {row['declined']} "
               "declined; first call " + ", ".join(
                   f"{name} {t:.1f} s" for name, t in row["first_call_seconds"].items())
               + "".join(f"; {n} {b / 2**20:,.0f} MiB" for n, b in row.get(
                   "peak_bytes", {}).items())
               + "".join(f"; {n} {k} tokens equal" for n, k in row.get(
                   "tokens_equal", {}).items()))


# --- processes

class Worker:
    """A process that measures the rows it is asked for, one after the other."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        self.process = subprocess.Popen(
            ["env", f"PYTHONPATH={path}", sys.executable, "-m", "rung.tools.gpu"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **request: object) -> Row:
        """A row; RowError, and the end of the process, where there is none."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        ready = select.select([self.process.stdout], [], [], LIMIT)[0]
        answer = self.process.stdout.readline() if ready else ""
        row: Row = json.loads(answer) if answer else {"error": (
            f"its process ended with {self.process.wait()}" if ready
            else f"it took more than {LIMIT} s")}
        if "error" in row:
            self.end()
            raise RowError(row["error"])
        return row

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def asked(part: str, against: Sequence[str], only: Sequence[str], quick: bool
          ) -> Iterator[tuple[str, Callable[[], Row]]]:
    """The rows of a part by name, those whose names have one of the words `only`."""
    if not quick and not torch.cuda.is_available():
        raise RowError("there is no GPU here; --quick runs tiny sizes on the CPU")
    workers, rate = list[Worker](), dict[str, float]()

    def ask(name: str) -> Row:
        if not workers:
            workers.append(Worker())
        try:
            row = workers[0].ask(name=name, against=list(against), quick=quick, rate=rate)
        except RowError:
            workers.clear()
            raise
        rate["copy"] = row.pop("copy_rate")
        return row
    try:
        for case in CASES:
            if case.part == part and (not only or any(word in case.name for word in only)):
                yield case.name, partial(ask, case.name)
    finally:
        for worker in workers:
            worker.end()


def _serve() -> None:
    """Answer requests; what is printed meanwhile goes to stderr."""
    import rung.entry  # noqa: F401  it registers the backend where Rung is not installed

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for request in sys.stdin:
        asked_for = json.loads(request)
        try:
            rate = asked_for["rate"].get("copy") or copy_rate()
            row = measured(NAMED[asked_for["name"]], asked_for["against"], asked_for["quick"], rate)
            row["copy_rate"] = rate
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {str(error)[:1000]}"}
        answers.write(json.dumps(row) + "\n")
        answers.flush()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    _serve()
