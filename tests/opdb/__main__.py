"""`PYTHONPATH=tests python -m opdb`: the operator database in shards, and `docs/coverage.md`.

With the names of entries (`add`, `sum`) only those are tried, and nothing is written.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RUNG_CALIBRATE", "0")  # the same prices in all processes

import declined
import shards
from opdb import programs, report, trial


def work(unit: str, have: frozenset[str], ways: str,
         dtypes: str, most: int) -> Iterator[tuple[str, Callable[[], shards.Record]]]:
    """The items of an entry that are wanted and have no result."""
    for item in programs.items(unit):
        wanted = item.way in ways.split(",") and item.dtype in (*dtypes.split(","), "any")
        if wanted and str(item) not in have:
            yield str(item), partial(attempt, item, most)


def attempt(item: programs.Item, most: int) -> shards.Record:
    return vars(trial.run(item, most))


def main() -> int:
    names = ",".join(str(d).removeprefix("torch.") for d in programs.DTYPES)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("entries", nargs="*", help="names in the database; all by default")
    parser.add_argument("--ways", default=",".join(programs.WAYS))
    parser.add_argument("--dtypes", default=names)
    parser.add_argument("--samples", type=int, default=0, help="of an item, at most; 0 is all")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    sources = [*(shards.ROOT / "rung").rglob("*.py"), *(shards.ROOT / "tests/opdb").glob("*.py")]
    options = given.ways, given.dtypes, given.samples
    place = shards.folder("opdb", sources, str(options))
    trial.run(programs.Item("add", "float32", "forward"), 1)  # load once what all processes need
    units = given.entries or list(programs.entries())
    found = shards.run(units, partial(work, ways=given.ways, dtypes=given.dtypes,
                                      most=given.samples), place, given.workers)
    text = report.page(found, report.tried(*options))
    if not given.entries:
        path = shards.ROOT / "docs" / "coverage.md"
        path.parent.mkdir(exist_ok=True)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        columns = before[before.index(declined.HEAD):] if declined.HEAD in before else ""
        reasons = [why for rs in found.values() for r in rs for why in r.get("unlowered", ())]
        path.write_text(declined.update(f"{text}\n{columns}", "op_db", reasons), encoding="utf-8")
    failures = report.failures(found)
    print("\n".join([*failures, report.summary(found)]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
