"""Long suites in shards: a process for each unit, a progress bar, and results that survive.

A unit's results are lines of JSON in a file of its own. A process that dies, or takes too long, is
a result of the item at which it did, and the unit goes on after it. A suite that was stopped is
taken up where it was, unless the package or the suite has changed since.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
LATE = "timed out"
Record = dict[str, Any]
Work = Callable[[str, frozenset[str]], Iterator[tuple[str, Callable[[], Record]]]]
"""Of a unit, and the items of it that have results: the other items, and what tries each."""


def folder(suite: str, sources: Iterable[Path], given: str = "", root: Path = ROOT) -> Path:
    """Where results of a suite lie; those of other sources, or other options, are thrown away."""
    digest = hashlib.sha256(given.encode())
    for path in sorted(sources):
        digest.update(path.read_bytes())
    place = root / "build" / suite / digest.hexdigest()[:16]
    for old in place.parent.glob("*"):
        if old != place:
            shutil.rmtree(old, ignore_errors=True)
    place.mkdir(parents=True, exist_ok=True)
    return place


def run(units: Sequence[str], work: Work, place: Path, workers: int, limit: float = 300.0,
        minutes: float | None = None) -> dict[str, list[Record]]:
    """The results of all units; `limit` is the seconds that an item may take, and after `minutes`
    no unit is begun."""
    end = float("inf") if minutes is None else time.time() + 60 * minutes
    waiting = [u for u in units if not _done(place / u)][::-1]
    running: dict[int, str] = {}
    with tqdm(total=len(units), initial=len(units) - len(waiting), smoothing=0) as bar:
        while waiting or running:
            if time.time() > end:
                waiting.clear()
            while waiting and len(running) < workers:
                unit = waiting.pop()
                running[_start(unit, work, place / unit)] = unit
            time.sleep(0.02)
            for pid, unit in list(running.items()):
                if _ended(pid, place / unit, limit):
                    del running[pid]
                    if _done(place / unit):
                        bar.update()
                    else:
                        waiting.append(unit)
    return {u: results(place / u) for u in units}


def results(path: Path) -> list[Record]:
    """The records of a unit that are results."""
    return [r for r in _lines(path) if "seconds" in r]


def _lines(path: Path) -> list[Record]:
    if not path.exists():
        return []
    return [json.loads(x) for x in path.read_text().splitlines() if x.endswith("}")]


def _done(path: Path) -> bool:
    return any("done" in r for r in _lines(path))


def _start(unit: str, work: Work, path: Path) -> int:
    """The id of a process that does what is left of a unit."""
    have = frozenset(r["item"] for r in results(path))
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        with path.open("a", buffering=1) as file:
            for item, attempt in work(unit, have):
                _do(item, attempt, file)
            file.write(json.dumps({"done": True}) + "\n")
        status = 0
    finally:
        os._exit(status)


def _do(item: str, attempt: Callable[[], Record], file: Any) -> None:
    started = time.time()
    file.write(json.dumps({"item": item, "started": started}) + "\n")
    try:
        record = json.loads(json.dumps(attempt()))
    except Exception:  # a bug of the suite is a result too
        record = {"failed": [f"the suite: {traceback.format_exc()[-600:]}"]}
    seconds = round(time.time() - started, 3)
    file.write(json.dumps({"item": item, **record, "seconds": seconds}) + "\n")


def _ended(pid: int, path: Path, limit: float) -> bool:
    """Whether a process has ended, killed if its item takes too long; what it died of is noted."""
    got, status = os.waitpid(pid, os.WNOHANG)
    at = [r for r in _lines(path) if "started" in r or "seconds" in r][-1:]
    pending = at[0] if at and "seconds" not in at[0] else None
    late = pending is not None and time.time() - pending["started"] > limit
    if late and not got:
        os.killpg(pid, signal.SIGKILL)
        got, status = os.waitpid(pid, 0)
    if got and status:
        why = LATE if late else f"process died: {os.waitstatus_to_exitcode(status)}"
        _note(path, pending, why)
    return bool(got)


def _note(path: Path, pending: Record | None, why: str) -> None:
    """Write down that a unit's process died; outside an item, the unit is over."""
    with path.open("a") as file:
        item = pending["item"] if pending else path.name
        file.write("\n" + json.dumps({"item": item, "failed": [why], "seconds": 0.0}) + "\n")
        if pending is None:
            file.write(json.dumps({"done": True}) + "\n")
