"""A compiled program as a callable of one list of arguments."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import torch

from rung.program.ir import Module
from rung.program.memory import Plan
from rung.runtime.host import host_code
from rung.targets.base import Launch

_number = count()


class Executable:
    """Runs the main program of a module; `launches` take addresses, `calls` take tensors.

    `run` takes the arguments (without the constants) as a list, which it empties, and gives a
    tuple of tensors. `text` is its code.
    """

    def __init__(self, plan: Plan, module: Module, launches: Mapping[str, Launch],
                 calls: Mapping[str, Launch], constants: Sequence[torch.Tensor] = ()):
        self.plan, self.module = plan, module
        code = host_code(plan, module, launches, calls, constants)
        self.text = code.text
        path = f"<rung {module.main.name} {next(_number)}>"
        linecache.cache[path] = (len(self.text), None, self.text.splitlines(True), path)
        names = dict(code.names)
        exec(compile(self.text, path, "exec"), names)
        self.run: Callable[[list[Any]], tuple[torch.Tensor, ...]] = names["run"]

    def __call__(self, args: list[Any]) -> tuple[torch.Tensor, ...]:
        return self.run(args)
