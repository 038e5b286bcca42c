"""A compiled program as a callable of one list of arguments."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import torch

from rung.frontends.torch.calls import callee
from rung.runtime.host import HELPERS, Code
from rung.runtime.tensors import empty, refusal
from rung.targets.base import Launch, Target

_number = count()


class Executable:
    """Runs the main program of a module; `launches` are of its stretches, `libraries` of kernels.

    `run` takes the arguments (without the constants) as a list, which it empties, and gives a
    tuple of tensors. `text` is its code. `lines` are the user's, by the names of calls; `library`
    is the file of the stretches.
    """

    def __init__(self, code: Code, target: Target, launches: Mapping[str, Launch],
                 libraries: Mapping[str, Callable[..., torch.Tensor]],
                 constants: Sequence[object] = (), lines: Mapping[str, str] | None = None):
        self.code, self.text = code, code.text
        known = lines or {}
        self.names: dict[str, Any] = {**HELPERS, "lines": known}
        find: dict[str, Callable[[Any], Any]] = {
            "call": callee, "library": libraries.__getitem__, "constant": constants.__getitem__}
        for name, (kind, what) in code.names.items():
            self.names[name] = find[kind](what)
        for name, bound in code.stretches.items():
            self.names[f"launch_{name}"] = _raising(launches.get(name), refusal(bound.sites, known))
        path = f"<rung {next(_number)}>"
        linecache.cache[path] = (len(self.text), None, self.text.splitlines(True), path)
        exec(compile(self.text, path, "exec"), self.names)
        for name, bound in code.stretches.items():
            launch = launches[code.whole if name == "run" else name]
            boxed = constants if bound.signature.boxed else ()
            self.names[name] = target.bind(
                bound.signature, launch, self.names[name], refuse=refusal(bound.sites, known),
                empty=empty, constants=boxed)
        self.library: str = next((x.file for x in launches.values() if hasattr(x, "file")), "")
        self.run: Callable[[list[Any]], tuple[torch.Tensor, ...]] = self.names["run"]

    def __call__(self, args: list[Any]) -> tuple[torch.Tensor, ...]:
        return self.run(args)


def _raising(launch: Launch | None, refuse: Callable[[int, int, int], None]) -> Launch:
    """A launch of a stretch that raises what its error word says."""
    def run(addresses: Sequence[int], sizes: Sequence[int]) -> None:
        assert launch is not None
        refuse(*launch(addresses, sizes))
    return run
