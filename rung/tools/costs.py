"""What was not done and what it costs, dearest first: graph breaks, calls left to ATen, fusions
refused, graphs that run as they are. All of it is modelled from sizes and the machine's table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rung.core import origins
from rung.core.machine import Machine
from rung.core.op import Func, Value
from rung.core.trace import Event
from rung.program.ir import Apply, Call, Module
from rung.tools.flops import bytes_before, bytes_of_op, flops_of_call, is_free, size_of

DYNAMO = 8e-6  # seconds of a call through Dynamo: guards, frame and wrapper
ASSUMES = "modelled: the time of calls, the traffic of the rest"


@dataclass(frozen=True)
class Cost:
    """Seconds and bytes of something that was not done, why not, and where the user wrote it."""

    seconds: float
    bytes: int
    what: str
    why: str
    lines: tuple[str, ...] = ()


def of_break(before: Func | None, reason: str, line: str, machine: Machine,
             hints: Mapping[str, int]) -> Cost:
    """A break after the graph `before`, whose results go to memory and come back."""
    results = before.body.last.operands() if before else ()
    moved = 2 * sum(size_of(v, hints) for v in dict.fromkeys(results))
    return Cost(moved / machine.rates.memory + DYNAMO, moved, "graph break", reason, (line,))


def of_graph(program: Func, reason: str, machine: Machine, hints: Mapping[str, int]) -> Cost:
    """A graph that runs as it is."""
    moved = bytes_before(program, hints)
    return Cost(moved / machine.rates.memory, moved, "a graph without kernels", reason)


def of_calls(module: Module, events: Sequence[Event], machine: Machine,
             hints: Mapping[str, int]) -> Iterator[Cost]:
    """Calls that are left, by operator; not those that only check something."""
    reasons = {e.subject: e.detail for e in events if (e.kind, e.place) == ("declined", "lower")}
    found: dict[str, list[Call]] = {}
    for op in module.main.body.ops:
        if isinstance(op, Call) and op.results and not is_free(op):
            found.setdefault(op.target, []).append(op)
    for name, calls in found.items():
        moved = sum(bytes_of_op(op, hints) for op in calls)
        seconds = sum(_time(op, machine, hints) for op in calls)
        why = reasons.get(name, "keeps a layout")
        yield Cost(seconds, moved, f"call {name} x{len(calls)}", why,
                   _lines(r for op in calls for r in op.results))


def _time(op: Call, machine: Machine, hints: Mapping[str, int]) -> float:
    """The least time of a library call on all cores: a launch, and its bytes or FLOPs."""
    computed = (flops_of_call(op, hints) or 0) / (machine.rates.flops["f32"] * machine.cores)
    return machine.rates.launch + max(bytes_of_op(op, hints) / machine.rates.memory, computed)


def of_fusions(module: Module, events: Sequence[Event], machine: Machine,
               hints: Mapping[str, int]) -> Iterator[Cost]:
    """Fusions that are not legal, of values that in the end do go through memory: the reasons of
    all that read the same value are one row. Those of an outlined layer count as often as it is
    applied by `module`, which has been outlined and not yet put together again."""
    times = Counter(op.callee for op in module.main.body.ops if isinstance(op, Apply))
    fuse = [e for e in events if e.place == "fuse" and "values" in e.data]
    gone = {v for e in fuse if e.kind == "fired" for v in e.data["values"]}
    refused: dict[tuple[str, tuple[Value, ...]], dict[str, None]] = {}
    for e in fuse:
        if e.kind == "declined" and not gone.intersection(e.data["values"]):
            key = e.data["program"], e.data["values"]
            refused.setdefault(key, {})[f"{e.subject}: {e.detail}"] = None
    for (program, values), reasons in refused.items():
        count = times.get(program, 1)
        moved = 2 * count * sum(size_of(v, hints) for v in values)
        first, *rest = reasons
        subject, _, reason = first.partition(": ")
        more = f" (and {len(rest)} like it)" if rest else ""
        yield Cost(moved / machine.rates.memory, moved, f"refused fusion {subject} x{count}",
                   reason + more, _lines(values))


def _lines(values: Iterator[Value] | Sequence[Value]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(o.line for v in values for o in origins.of(v) if o.line))
