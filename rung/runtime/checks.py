"""What a check of a program raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from rung.program.ir import ERRORS


@dataclass(frozen=True)
class Site:
    """What a check raises: the name of a class and eager's message, in which {} is the first
    element at fault and {size} the check's upper limit. `node` is the call that is checked."""

    error: str
    message: str
    node: str = ""

    def fail(self, found: int, size: int, line: str) -> NoReturn:
        text = self.message.replace("{}", str(found)).replace("{size}", str(size))
        raise _noted(ERRORS[self.error](text), line)  # no name: the traceback has this frame


def _noted(error: Exception, line: str) -> Exception:
    if line:
        error.add_note(line)
    return error


def refusal(sites: Sequence[Site], lines: Mapping[str, str]) -> Callable[[int, int, int], None]:
    """What raises the error of an error word: the number of a check, from 1, the element at fault
    and the limit."""
    def refuse(number: int, found: int, size: int) -> None:
        if number:
            site = sites[number - 1]
            site.fail(found, size, lines.get(site.node, ""))
    return refuse


def check(value: Any, low: int, high: int, error: str, message: str, line: str) -> None:
    """Raise `error` unless low <= v < high for all elements."""
    bad = value[(value < low) | (value >= high)]
    if len(bad):
        Site(error, message).fail(int(bad[0]), high, line)
