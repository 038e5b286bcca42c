"""The meaning of a program's library calls, as a front end supplies it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from rung.core.interp import Interp
from rung.core.op import Func, Value
from rung.core.origins import Origin
from rung.program.ir import Call


@dataclass(frozen=True)
class Externs:
    """The operators of one front end, and the library that runs remaining calls.

    `lower(program, precision)` replaces calls by Tensor IR, under the precision "eager" only where
    results keep the library's bits. `run(call, operands, interp)` runs a call in the library and
    gives NumPy arrays. `callee(target)` is the library's function, and `gives_one(target)` whether
    it returns one bare result, not a list or tuple. `text(argument)` is Python text for a named
    argument, such as a device. `title(origins)` names a kernel after the calls it computes, or
    gives "".

    `profiler` tells native code whether a profiler runs, `is_profiled()` the same for Python, and
    the code in `recorded(event)` is an event of the profiler.
    """

    lower: Callable[[Func, str], Func]
    run: Callable[[Call, Mapping[Value, Any], Interp], Any]
    callee: Callable[[str], Callable[..., Any]]
    gives_one: Callable[[str], bool]
    text: Callable[[str], str]
    title: Callable[[Iterable[Origin]], str]
    profiler: object
    is_profiled: Callable[[], bool]
    recorded: Callable[[str], AbstractContextManager[Any]]
