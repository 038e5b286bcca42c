"""The runner of long suites: deaths and delays are results, and a stopped suite is resumed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import shards

ITEMS: dict[str, Callable[[], shards.Record]] = {
    "good": lambda: {"failed": []},
    "dies": lambda: os._exit(3),
    "raises": lambda: {"failed": [1 // 0]},
    "waits": lambda: time.sleep(60) or {},
    "last": lambda: {"failed": []},
}


def work(unit: str, have: frozenset[str]) -> Iterator[tuple[str, Callable[[], shards.Record]]]:
    return ((name, do) for name, do in ITEMS.items() if name not in have)


def test_every_item_has_one_result(tmp_path: Path) -> None:
    found = shards.run(["a", "b"], work, tmp_path, 2, limit=1)
    for records in found.values():
        assert [r["item"] for r in records] == list(ITEMS)
        failed = {r["item"]: r["failed"] for r in records}
        assert failed["good"] == failed["last"] == []
        assert failed["dies"] == ["process died: 3"]
        assert failed["waits"] == ["timed out"]
        assert "ZeroDivisionError" in failed["raises"][0]


def test_a_stopped_suite_is_resumed(tmp_path: Path) -> None:
    first = shards.run(["a"], work, tmp_path, 1, limit=1)
    lines = (tmp_path / "a").read_text().splitlines()
    (tmp_path / "a").write_text("\n".join([*lines[:-3], '{"item": "la']) + "\n")
    again = shards.run(["a"], work, tmp_path, 1, limit=1)
    assert [r["item"] for r in again["a"]] == list(ITEMS)
    assert again["a"][:-1] == first["a"][:-1]


def test_results_of_other_sources_are_thrown_away(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("1")
    places = []
    for text in ("1", "1", "2"):
        source.write_text(text)
        places.append(shards.folder("suite", [source], root=tmp_path))
    assert places[0] == places[1] != places[2]
    assert not places[0].exists() and places[2].exists()
