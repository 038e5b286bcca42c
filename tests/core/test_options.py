"""The options of torch.compile: defaults, checks, and what the table says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import pytest

from rung.core.options import MODES, Options

TARGETS = ("cpu", "toy")


def test_defaults_are_the_environments(settings: Callable[..., None]) -> None:
    assert Options.of({}, TARGETS) == Options()
    settings(target="toy", precision="eager")
    found = Options.of({"strict": True}, TARGETS)
    assert (found.target, found.precision, found.strict) == ("toy", "eager", True)


@pytest.mark.parametrize(("given", "error", "message"), [
    ({"speed": 9}, ValueError, "no option 'speed'; it has target, precision, mappings, determ"),
    ({"precision": "half"}, ValueError, "no precision 'half'; it has default, eager"),
    ({"target": "tpu"}, ValueError, "no target 'tpu'; it has cpu, toy"),
    ({"mode": "fast"}, ValueError, "no mode 'fast'; it has default, reduce-overhead, max-autot"),
    ({"strict": 1}, TypeError, "strict is a bool, not 1"),
    ({"verify": 2.0}, ValueError, "verify is a share from 0 to 1, not 2.0"),
    ({"verify": True}, TypeError, "verify is a float, not True"),
    ({"mappings": None}, TypeError, "mappings is a str, not None"),
])
def test_what_is_wrong_is_told_with_what_is_known(
        given: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Options.of(given, TARGETS)


def test_the_table_has_a_row_for_each_option() -> None:
    rows = Options.describe()
    assert [name for name, *_ in rows] == [f.name for f in fields(Options)]
    assert all(meaning for *_, meaning in rows)
    (mode,) = [meaning for name, *_, meaning in rows if name == "mode"]
    assert all(name in mode for name in MODES)
