"""What torch tells of its own work: graph breaks, guards, recompilations, decompositions, memory.

For the tools; private to torch, as what `compat` has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import accumulate
from types import CodeType
from typing import Any

import torch
from torch import fx

from rung.frontends.torch.compat import Function


def break_reasons() -> list[Any]:
    """Dynamo's list of why it ended graphs, which grows; `user_stack` has the lines."""
    output = import_module("torch._dynamo.output_graph")
    found: list[Any] = output.graph_break_reasons
    return found


@dataclass
class Frame:
    """A piece of Python that Dynamo rewrote around one graph: what it looked like, and became.

    `examples` are the graph's inputs as Dynamo traced them, without data where they are fake.
    """

    graph: fx.GraphModule
    examples: Sequence[Any]
    old: CodeType | None = None
    new: CodeType | None = None
    guards: list[str] = field(default_factory=list)

    def read_guards(self) -> None:
        """Note what is checked before the rewritten code runs, while Dynamo knows it."""
        entries = import_module("torch._C._dynamo.eval_frame")._debug_get_cache_entry_list
        found = [e for e in entries(self.old) if e.code is self.new] if self.old else []
        lines = [line for e in found for line in str(e.guard_manager).splitlines()]
        guards = (GUARD.match(line) for line in lines)
        self.guards = list(dict.fromkeys(
            g[1] for g in guards if g and not g[1].startswith("DIMENSION_DYNAMIC_MARKING")))

    def functional(self) -> Iterator[tuple[str, str]]:
        """(what is removed, code) of the graph without mutation, views kept and as copies."""
        trace = import_module("torch.fx.experimental.proxy_tensor").make_fx
        for removed in ("mutations", "mutations_and_views"):
            with torch.no_grad():
                made = trace(torch.func.functionalize(self.graph, remove=removed))(*self.examples)
            yield removed, made.print_readable(print_output=False)


GUARD = re.compile(r"[| ]*\+- ([A-Z_]+: .*?)(?:\s+# .*)?$")


def watched(function: Function, backend: Function, frames: list[Frame],
            recompiles: list[str]) -> tuple[Function, Any]:
    """`function` compiled by `backend`, which `frames` and the reasons of `recompiles` tell about;
    the second result has `remove`, which ends that."""
    def noted(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        frames.append(Frame(gm, examples))
        return backend(gm, examples)

    def rewritten(old: CodeType, new: CodeType) -> None:
        if frames and frames[-1].new is None:
            frames[-1].old, frames[-1].new = old, new
    hooks = import_module("torch._dynamo.convert_frame")
    optimize: Any = torch._dynamo.optimize
    compiled = optimize(
        noted, guard_fail_fn=lambda failed: recompiles.append(str(failed.reason)))(function)
    return compiled, hooks.register_bytecode_hook(rewritten)


def recompiled(frames: Sequence[Frame]) -> int:
    """How many of the frames were compiled again, as no earlier graph fitted the arguments."""
    return len(frames) - len({f.old for f in frames})


def decomposed(gm: fx.GraphModule) -> dict[str, list[str]]:
    """Operators that torch wrote out in terms of others, with the operators that stand for them."""
    found: dict[str, list[str]] = {}
    for node in gm.graph.nodes:
        before, after = str(node.meta.get("original_aten")), node.target
        if before not in ("None", str(after)) and isinstance(after, torch._ops.OpOverload):
            found.setdefault(before, []).append(str(after))
    return found


def peak_bytes(call: Callable[[], Any], before: Callable[[], None]) -> int:
    """The most memory that a call held of what torch allocated for it, after `before`."""
    call()
    before()
    profiler: Any = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with profiler:
        call()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(held, default=0)
