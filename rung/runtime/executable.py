"""A compiled program as a callable of one list of arguments."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from rung.core.origins import Origin
from rung.program.externs import Externs
from rung.runtime.checks import check, refusal
from rung.runtime.code import Code
from rung.targets.device import Device, Launch, Refuse

_number = count()


class Executable:
    """Runs the main program of a module; `launches` are of its stretches, `libraries` of kernels.

    `run` takes the arguments (without the constants) as a list, which it empties, and gives a
    tuple of tensors. `text` is its code. `lines` are the user's, by the names of calls, and `nodes`
    where the ops of the imported program come from; `library` is the file of the stretches.
    """

    def __init__(self, code: Code, device: Device, externs: Externs,
                 launches: Mapping[str, Launch],
                 libraries: Mapping[str, Launch],
                 constants: Sequence[object] = (), lines: Mapping[str, str] | None = None,
                 nodes: Sequence[Origin | None] = ()):
        self.code, self.externs, self.text = code, externs, code.text
        known = lines or {}
        start = len(code.functions) + 1  # lines before the first of `run`
        self.events = {start + n: [_event(kernel, nodes[at] if 0 <= at < len(nodes) else None)
                                   for kernel, at in steps] for n, steps in code.steps}
        tensors, native = externs.tensors, externs.tensors.native()
        take, give = device.workspaces(tensors.memory)
        self.names: dict[str, Any] = {**tensors.functions, "check": check, "lines": known,
                                      "take": take, "give": give}
        find: dict[str, Callable[[Any], Any]] = {
            "call": externs.callee, "library": libraries.__getitem__,
            "constant": constants.__getitem__}
        for name, (kind, what) in code.names.items():
            self.names[name] = find[kind](what)
        refuse = {name: device.refusing(refusal(bound.sites, known), launches[name],
                                        len(bound.sites))
                  for name, bound in code.stretches.items() if name != "run"}
        for name, raising in refuse.items():
            self.names[f"launch_{name}"] = self._raising(launches[name], raising)
        path = f"<rung {next(_number)}>"
        linecache.cache[path] = (len(self.text), None, self.text.splitlines(True), path)
        exec(compile(self.text, path, "exec"), self.names)
        self.code_of_run = self.names["run"].__code__
        for name, bound in code.stretches.items():
            stretch = code.whole if name == "run" else name
            boxed = constants if bound.signature.boxed else ()
            self.names[name] = device.bind(
                bound.signature, launches[stretch], self.names[name], refuse[stretch],
                native=native, profiler=externs.profiler.flag, constants=boxed)
        self.library: str = next((x.file for x in launches.values() if hasattr(x, "file")), "")
        self.run: Callable[[list[Any]], tuple[Any, ...]] = self.names["run"]

    def __call__(self, args: list[Any]) -> tuple[Any, ...]:
        return self.run(args)

    def _raising(self, launch: Launch, refuse: Refuse) -> Launch:
        """A launch of a stretch that raises what its error word says. While a profiler runs, each
        step is an event."""
        def run(addresses: Sequence[int], sizes: Sequence[int]) -> None:
            profiler = self.externs.profiler
            events = self._here() if profiler.is_on() and hasattr(launch, "step") else ()
            for n, event in enumerate(events):
                with profiler.recorded(event):
                    refuse(*launch.step(n, addresses, sizes))  # type: ignore[attr-defined]
            if not events:
                refuse(*launch(addresses, sizes))
        return run

    def _here(self) -> Sequence[str]:
        """The events of the stretch at the line where `run` is: equal stretches are one."""
        frame = sys._getframe()
        while frame.f_back and frame.f_code is not self.code_of_run:
            frame = frame.f_back
        return self.events.get(frame.f_lineno, ())


def _event(kernel: str, node: Origin | None) -> str:
    """What a profiler calls a kernel: its name, the user's line and the module."""
    if node is None:
        return kernel
    line = f" {Path(node.line).name}" if node.line else ""
    return f"{kernel}{line}" + (f" ({node.module})" if node.module else "")
