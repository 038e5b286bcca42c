"""What the passes did and why: a no-op without a listener.

`with listen() as events:` collects, in order, `Event`s: a pass ran, a rule fired, a candidate was
declined with a reason, alternatives were priced, a graph was compiled. `rung explain` and the
loggers read them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Timer
from typing import Any


@dataclass(frozen=True)
class Event:
    """`kind` is ran | fired | declined | priced | compiled; `subject` names what it is about;
    `module` emitted it."""

    kind: str
    place: str
    subject: str
    detail: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    module: str = ""


_listener: ContextVar[list[Event] | None] = ContextVar("rung_trace", default=None)


def active() -> bool:
    """Whether building a costly detail text is worth it."""
    return _listener.get() is not None


def heard() -> list[Event]:
    """The events of the innermost listener so far; none without one."""
    return _listener.get() or []


def emit(kind: str, place: str, subject: str, detail: str = "", **data: Any) -> None:
    """Record one event; costs a dictionary lookup without a listener."""
    events = _listener.get()
    if events is not None:
        module = sys._getframe(1).f_globals["__name__"]
        events.append(Event(kind, place, subject, detail, data, module))


@contextmanager
def listen() -> Iterator[list[Event]]:
    """Collect the events of the enclosed code in this thread; an outer listener gets them
    afterwards."""
    events: list[Event] = []
    around, token = _listener.get(), _listener.set(events)
    try:
        yield events
    finally:
        _listener.reset(token)
        if around is not None:
            around += events


@contextmanager
def notice(text: str, delay: float) -> Iterator[None]:
    """One line on stderr if the enclosed code runs for more than `delay` seconds, while it runs;
    at once if there is none left."""
    def tell() -> None:
        print(f"rung: {text}", file=sys.stderr, flush=True)

    timer = Timer(delay, tell)
    timer.daemon = True
    timer.start() if delay > 0 else tell()
    try:
        yield
    finally:
        timer.cancel()
