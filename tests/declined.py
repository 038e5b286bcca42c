"""`PYTHONPATH=tests python -m declined FOLDER...`: graphs that run without Rung, by reason.

Counts those of the programs in folders; the sweeps of the operator database and the zoo count their
own. Each count is a column of a table in `docs/coverage.md`, and the others stay as they are. A
program is a script, or a file with `make() -> (function, arguments)`.
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coverage.md"
COLUMNS = ("op_db", "zoo", "programs")
HEAD = "## Graphs that run without Rung"
WHY = {
    "overwrites what it reads|writes to elements that share memory|depends on who else has memory|"
    "takes memory of another|writes values of another type":
        "AOTAutograd computes something else than eager does, or does not raise as it does",
    "would not drop|would save nothing": "torch writes out this recurrent network wrongly",
    "AOTAutograd refuses it": "torch's own tracing fails; where eager raises, this is the same",
    "tensors on ": "the target computes on another device",
    "a value of |an argument of layout ":
        "a subclass, a quantized or a sparse tensor, whose memory kernels cannot read",
    "without memory|tangents of forward-mode": "tensors that stand for others of another meaning",
    "tokens cannot be run twice": "`verify` runs each graph twice",
    "_unique": "torch 2.11 states a wrong size"}
"""Patterns of reasons, and what is behind each; a reason without one is a gap of Rung's."""


def reason(text: str) -> str:
    """The reason as far as it is one for several graphs: without places, names and numbers."""
    first = text.removeprefix("declined: ").partition("\n")[0].partition(" at /")[0]
    if "AOTAutograd refuses it" in first:  # with as many words as torch has errors
        return "AOTAutograd refuses it"
    first = re.sub(r"^(Unsupported: )?(?:<[^>]*>|[\w.]+) (?=overwrites|writes|depends|takes|would)",
                   "a call ", first)
    return re.sub(r"\b[su]?\d+\b", "N", first).replace("|", "/").removeprefix("Unsupported: ")[:100]


def counts(page: str) -> dict[str, Counter[str]]:
    """The columns of the table in a page that were counted, by name."""
    rows = re.findall(r"^\| (?:`(.*)`|all) \|(.*)\|(.*)\|(.*)\|.*\|$", page.partition(HEAD)[2],
                      re.M)
    return {name: Counter({row[0]: int(row[n]) for row in rows if row[0] and row[n].strip()})
            for n, name in enumerate(COLUMNS, 1) if any(row[n].strip() for row in rows)}


def table(columns: Mapping[str, Counter[str]]) -> str:
    """The section of the page; cells of columns that nobody counted are empty."""
    total = sum(columns.values(), Counter[str]())
    rows = [f"| `{text}` | {' | '.join(str(columns.get(c, {}).get(text, '')) for c in COLUMNS)} | "
            f"{next((why for key, why in WHY.items() if re.search(key, text)), '')} |"
            for text, _ in sorted(total.items(), key=lambda row: (-row[1], row[0]))]
    sums = " | ".join(str(columns[c].total()) if c in columns else "" for c in COLUMNS)
    return "\n".join([HEAD, "", f"| reason | {' | '.join(COLUMNS)} | what is behind it |",
                      "|---|---|---|---|---|", *rows, f"| all | {sums} |  |", ""])


def update(page: str, column: str, reasons: Iterable[str]) -> str:
    """A page with another column, from the reasons of all graphs that were declined."""
    columns = counts(page) | {column: Counter(map(reason, reasons))}
    return f"{page.partition(HEAD)[0].rstrip()}\n\n{table(columns)}"


def write(column: str, reasons: Iterable[str]) -> None:
    PAGE.write_text(update(PAGE.read_text(encoding="utf-8"), column, reasons), encoding="utf-8")


def attempt(path: str) -> list[str]:
    """The reasons of the graphs that a program has declined, in this process."""
    import torch

    from rung.core import trace
    with trace.listen() as events:
        try:
            given: dict[str, Any] = runpy.run_path(path, run_name="__main__")
            if "make" in given:
                function, args = given["make"]()
                torch.compile(function, backend="rung", dynamic=given.get("DYNAMIC") or None)(*args)
        except BaseException as error:  # cases that must raise, scripts that exit
            print(f"{path}: {type(error).__name__}", file=sys.stderr)
    return [e.detail for e in events if (e.kind, e.place) == ("declined", "backend")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one program")
    parser.add_argument("--one", action="store_true", help="print those of one file as JSON")
    given = parser.parse_args()
    if given.one:
        found = attempt(str(given.folders[0]))
        print("\n" + json.dumps(found))
        return 0
    reasons = []
    for path in sorted(p for folder in given.folders for p in folder.glob("*.py")):
        command = [sys.executable, "-m", "declined", "--one", str(path)]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, timeout=given.limit, check=False)
            reasons += json.loads(done.stdout.splitlines()[-1])
        except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
            print(f"{path}: {type(error).__name__}", file=sys.stderr)
    write("programs", reasons)
    print(table({"programs": Counter(map(reason, reasons))}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
