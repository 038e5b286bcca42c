"""CUDA graphs of whole programs: `mode="reduce-overhead"`.

The third call with the same sizes and the same large tensors is captured; from then on a call
copies its small arguments to where the graph reads them, replays it, and copies the results out:
they are the caller's own, whatever is called later. What cannot be captured runs as it did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from re import findall
from threading import Lock
from typing import Any

import torch

from rung.core import trace
from rung.core.op import Func, reads
from rung.core.types import IndexType, TensorType, VecType
from rung.program.ir import Call

Args = list[Any]
Run = Callable[[Args], Sequence[Any]]
PLAIN = 2  # calls before a capture: libraries set themselves up, autograd's threads start
KEYS = 8  # graphs of one program
SMALL = 64 << 10  # bytes of an argument that is copied rather than told by its address
RESULTS = 4 << 20  # bytes of all results; where there are more, launches hide behind the work


def replayed(run: Run, func: Func, look: Callable[[], None]) -> Run:
    """`run`, the callable of a program, by CUDA graphs where that can be; the reason against it
    goes to the trace. `look` raises what the checks of earlier calls found."""
    if why := next(obstacles(func), ""):
        return _declined(func.name, why, run)
    return CapturedProgram(run, func, look)


def _declined(name: str, why: str, run: Run) -> Run:
    trace.emit("declined", "graphs", name, why)
    return run


def obstacles(func: Func) -> Iterator[str]:
    """What keeps a program from being captured. What a call gives that nothing reads is none."""
    read = {v for op in func.body.ops for v in reads(op)}
    named = Counter(name for op in func.body.ops for name in findall(r"\w+", str(op)))
    for op in func.body.ops:
        given = [r for r in op.results if r in read or named[r.name] > 1]  # in sizes, too
        if isinstance(op, Call):
            if op.impure not in ("", "rng"):
                yield f"{op.target} has effects"
            if any(isinstance(r.type, IndexType | VecType) for r in given):
                yield f"the host reads what {op.target} gives"
        away = [v.type.device for v in (*op.operands(), *given)
                if isinstance(v.type, TensorType) and v.type.device]
        if away:
            yield f"a tensor on {away[0]}"


@dataclass
class CapturedGraph:
    """A graph, the arguments that it reads copies of, by their place, and its results: tensors of
    the graph's memory, or the place of an argument."""

    graph: torch.cuda.CUDAGraph
    slots: dict[int, torch.Tensor]
    results: list[torch.Tensor | int]


class CapturedProgram:
    """The graphs of one program, by what they were captured for."""

    def __init__(self, run: Run, func: Func, look: Callable[[], None]):
        self.run, self.name, self.look = run, func.name, look
        self.still = [p.role in ("param", "const") for p in func.params]
        self.fixed = [p.role in ("param", "mutated", "const") for p in func.params]
        self.calls, self.captured = dict[Hashable, int](), dict[Hashable, CapturedGraph]()
        self.lock = Lock()
        self.stream: torch.cuda.Stream | None = None  # of the last replay
        self.why = ""  # no more is captured
        self.pool: Any = None  # of the memory that its graphs share, since one runs at a time

    def __call__(self, args: Args) -> Sequence[Any]:
        if self.why or torch.cuda.is_current_stream_capturing() or not self.lock.acquire(False):
            return self.run(args)
        try:
            key = self.key(args)
            if key not in self.captured:
                count = self.calls[key] = self.calls.get(key, 0) + 1
                if len(self.calls) > KEYS * (PLAIN + 1):
                    return self.decline("too many sizes or addresses", args)
                if count <= PLAIN:
                    return self.run(args)
                if len(self.captured) == KEYS or not self.capture(key, args):
                    return self.decline(self.why or "too many sizes or addresses", args)
            return self.replay(self.captured[key], args)
        finally:
            self.lock.release()

    def decline(self, why: str, args: Args) -> Sequence[Any]:
        self.why = why
        return _declined(self.name, why, self.run)(args)

    def key(self, args: Args) -> Hashable:
        """The sizes of tensors, the addresses of those that a graph reads where they are, and the
        numbers. A parameter keeps its sizes."""
        return tuple([
            x if not isinstance(x, torch.Tensor) else x.data_ptr() if still
            else (x.shape, x.stride(), x.data_ptr() if fixed or _bytes(x) > SMALL else 0)
            for x, fixed, still in zip(args, self.fixed, self.still, strict=False)])

    def capture(self, key: Hashable, args: Args) -> bool:
        """Capture a call with these arguments; whether that could be done."""
        slots = {n: x.clone() for n, (x, fixed) in enumerate(zip(args, self.fixed, strict=False))
                 if isinstance(x, torch.Tensor) and not fixed and _bytes(x) <= SMALL}
        given = [slots.get(n, x) for n, x in enumerate(args)]
        graph, self.pool = torch.cuda.CUDAGraph(), self.pool or torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, self.pool, capture_error_mode="thread_local"):
                found = list(self.run(list(given)))
        except RuntimeError as error:
            self.why = str(error).partition("\n")[0]
            return False
        results = [next((n for n, x in enumerate(given) if x is r), r) for r in found]
        made = [r for r in results if isinstance(r, torch.Tensor)]
        memory = {x.untyped_storage().data_ptr() for x in given if isinstance(x, torch.Tensor)}
        if any(r.untyped_storage().data_ptr() in memory for r in made):
            self.why = "a result that is a view of an argument"
        elif sum(map(_bytes, made)) > RESULTS:
            self.why = f"results of more than {RESULTS >> 20} MiB: launches hide behind the work"
        if not self.why:
            self.captured[key] = CapturedGraph(graph, slots, results)
            trace.emit("fired", "graphs", self.name)
        return not self.why

    def replay(self, captured: CapturedGraph, args: Args) -> Sequence[Any]:
        self.look()
        stream = torch.cuda.current_stream()
        if self.stream is not None and self.stream != stream:
            stream.wait_stream(self.stream)
        self.stream = stream
        for n, slot in captured.slots.items():
            slot.copy_(args[n])
        captured.graph.replay()
        made = [args[r] if isinstance(r, int) else r.clone() for r in captured.results]
        args.clear()
        return tuple(made)


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()
