"""What the outside hears of a compilation: lines in the loggers `rung.*`, artifacts in TORCH_TRACE.

Every event of `core.trace` goes to the logger of the module that it comes from, so that
`TORCH_LOGS="+rung.loop.fuse"` shows fusion alone; each graph is one line at level INFO.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rung.core import trace
from rung.core.trace import Event
from rung.frontends.torch import compat
from rung.program.ir import Call, KernelCall

log = logging.getLogger("rung")


@contextmanager
def told() -> Iterator[None]:
    """Log what happens inside, and hand the rungs to TORCH_TRACE; free where nobody listens."""
    structured = compat.is_traced()
    if not structured and not _is_heard():
        yield
        return
    with trace.listen() as events:
        try:
            yield
        finally:
            _log(events)
            for event in events:
                if structured and event.kind == "compiled":
                    _artifacts(event.data["history"])


def _is_heard() -> bool:
    """Whether any logger of the tree wants more than warnings."""
    own = (x for name, x in logging.root.manager.loggerDict.items() if name.startswith("rung."))
    levels = [x.level for x in own if isinstance(x, logging.Logger) and x.level]
    return min([log.getEffectiveLevel(), *levels]) <= logging.INFO


def _log(events: Sequence[Event]) -> None:
    for event in events:
        to = logging.getLogger(event.module)
        if event.kind == "compiled":
            to.info("%s", _line(event))
        elif to.isEnabledFor(logging.DEBUG):
            seconds = event.data.get("seconds")
            detail = f"{seconds * 1e3:.2f} ms" if seconds is not None else event.detail
            to.debug("%s %s %s%s", event.place, event.kind, event.subject,
                     f": {detail}" if detail else "")


def _line(event: Event) -> str:
    """`graph main: 12 ops of ATen, 2 launches of 1 kernels, 1 calls of ATen left`."""
    modules = event.data["history"].modules
    first, last = modules["program"], modules["kernel"]
    count = sum(isinstance(op, Call) for f in first.programs for op in f.body.ops)
    launches = sum(isinstance(op, KernelCall) for op in last.main.body.ops)
    calls = sum(isinstance(op, Call) for op in last.main.body.ops)
    return (f"graph {event.subject}: {count} ops of ATen, {launches} launches of "
            f"{len(last.kernels)} kernels, {calls} calls of ATen left")


def _artifacts(history: Any) -> None:
    """One artifact for each rung and the source: tlparse lists them under the graph's compile."""
    for rung in (*history.modules, "source"):
        compat.trace_artifact(f"rung_{rung}", history.text(rung))
