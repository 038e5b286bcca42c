"""ARCHITECTURE.md names every source file, and no file that is gone."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def listed() -> set[str]:
    """Paths below rung/ that ARCHITECTURE.md has a line for."""
    found, folder = set(), ""
    for line in (ROOT / "ARCHITECTURE.md").read_text().splitlines():
        if line.startswith("## "):
            match = re.match(r"## `rung/(\w+)/`", line)
            folder = f"{match[1]}/" if match else ""
        elif match := re.match(r"- `([\w/]+\.py)`", line):
            found.add(folder + match[1])
    return found


def test_architecture_names_every_file() -> None:
    rung = ROOT / "rung"
    present = {str(p.relative_to(rung)) for p in rung.rglob("*.py") if p.name != "__init__.py"}
    assert listed() == present


def test_architecture_is_short() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 195  # a line for each module
