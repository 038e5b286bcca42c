"""The passes of a graph: what each changed, how long it took, what was done and what was declined,
with the reason, as the trace tells it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import unified_diff

from rung.compilation import PassRun
from rung.core.trace import Event
from rung.tools.explain import Reached

LONGEST = 400  # lines of a difference that anybody reads
Told = list[tuple[str, int]]  # a text and how often it was told


@dataclass(frozen=True)
class Passed:
    """One pass; `difference` is cut where it is long, and `left_out` lines are not in it."""

    name: str
    kind: str
    why: str
    milliseconds: float
    share: float  # of the longest pass
    difference: list[str]
    left_out: int
    done: Told
    declined: Told
    priced: int


def steps(reached: Reached) -> list[Passed]:
    """The passes of a graph, in order."""
    ran = reached.history.steps if reached.history else ()
    most = max((s.seconds for s in ran), default=0.0) or 1.0
    return [_step(s, most) for s in ran]


def _step(run: PassRun, most: float) -> Passed:
    difference = list(_difference(run)) if run.before is not run.after else []
    return Passed(run.ran.full_name, run.ran.kind, run.ran.why, run.seconds * 1e3,
                run.seconds / most, difference[:LONGEST], max(0, len(difference) - LONGEST),
                _told(run.events, "fired"), _told(run.events, "declined"),
                sum(e.kind == "priced" for e in run.events))


def _difference(run: PassRun) -> Iterator[str]:
    before, after = str(run.before).splitlines(), str(run.after).splitlines()
    found = unified_diff(before, after, lineterm="", n=2)
    return (line for line in found if not line.startswith(("---", "+++")))


def _told(events: Sequence[Event], kind: str) -> Told:
    """What a pass did, or did not, and where."""
    counted = Counter(": ".join(filter(None, (f"{e.place} {e.subject}".strip(),
                                              e.detail.partition("\n")[0])))
                      for e in events if e.kind == kind)
    return counted.most_common()
