"""What the calls of a program mean: what a front end hands to the rungs below it."""

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
    """The operators of one front end, and the library that runs those that stay calls.

    `lower(program, precision)` replaces calls by Tensor IR; under the precision "eager" those alone
    that keep the bits of the library's results. `run(call, operands, interp)` gives a call's
    results, run by the library, as arrays of NumPy. `callee(target)` is the library's function,
    and `gives_one(target)` whether it gives its one result as it is, and not in a list or tuple.
    `text(argument)` is a word among the arguments, such as a device, as Python for the host.
    `title(origins)` names a kernel that computes these calls, or gives "".

    `profiler` is where native code finds whether a profiler runs, `is_profiled()` the same for
    Python, and the code in `recorded(event)` is an event of the profiler.
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
