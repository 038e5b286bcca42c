"""The meaning of a program's library calls, as a front end supplies it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from rung.core.interp import Interp
from rung.core.op import Func, Value
from rung.core.origins import Origin
from rung.core.types import DType
from rung.program.ir import Call


@dataclass(frozen=True)
class Texts:
    """Python for what the host's code does with a tensor: templates of `str.format`, {0} is the
    tensor. `dtype(t)` is the Python of an element type."""

    dtype: Callable[[DType], str]
    strides: str  # in elements
    contiguous: str
    view: str  # in the shape {1}
    strided: str  # its memory under the shape {1} and the strides {2}
    copy: str  # a statement: it takes the elements of {1}
    address: str
    alone: str = "{0}"  # what nobody knows to be a view, for results
    writable: str = ""  # a statement before the first write to an argument


@dataclass(frozen=True)
class Native:
    """How native code reads tensors: DLPack's C exchange API in a capsule, the classes whose
    tensors it may read so, and the library's element types by the names of the IR's. `empty` gives
    it memory, and `place` is where its tensors lie, as DLPack's kind and number of a device."""

    exchange: object
    classes: tuple[type, ...]
    dtypes: Mapping[str, object]
    empty: Callable[..., object]
    place: tuple[int, int] = (1, 0)


@dataclass(frozen=True)
class Tensors:
    """The tensors of a front end as the host's code has them. They lie on the `device`, and have a
    `shape` and a `dtype`.

    `functions` are what the names in the texts stand for, and: `empty(shape, strides, dtype)` gives
    memory as it is; `fit(x, shape, strides, dtype)` gives `x` or a copy of it in that layout and
    type; `address(x, name, shape, strides, dtype)` is where it lies, or an error if it is otherwise
    than this; `leaves(out, count, target)` is the list of a call's results; `bump(x)` tells the
    library that a kernel changed a tensor. `memory(count)` gives so many bytes of undefined
    content: what keeps them, and their address. `stream()` is the stream to launch on, as the
    driver of the device has it.
    """

    texts: Texts
    functions: Mapping[str, Any]
    memory: Callable[[int], tuple[object, int]]
    native: Callable[[], Native | None] = lambda: None
    device: str = "cpu"
    stream: Callable[[], int] = lambda: 0


@dataclass(frozen=True)
class Profiler:
    """Where native code finds whether a profiler runs, an item of a dictionary that is True then;
    the same for Python; and what makes the code in `recorded(event)` an event of the profiler."""

    flag: tuple[dict[str, Any], str] = ({}, "")
    is_on: Callable[[], bool] = lambda: False
    recorded: Callable[[str], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Externs:
    """The operators of one front end, and the library that runs remaining calls.

    `lower(program, precision)` replaces calls by Tensor IR, under the precision "eager" only where
    results keep the library's bits. `run(call, operands, interp)` runs a call in the library and
    gives NumPy arrays. `callee(target)` is the library's function, and `gives_one(target)` whether
    it returns one bare result, not a list or tuple; `copy` and `empty` are two that every library
    has. `version()` is what results depend on besides the program.

    `text(argument)` is Python text for a named argument, such as a device. `title(origins)` names a
    kernel after the calls it computes, or gives "". `libraries` are those whose atoms take its
    tensors, by the first part of an atom's name.
    """

    lower: Callable[[Func, str], Func]
    run: Callable[[Call, Mapping[Value, Any], Interp], Any]
    callee: Callable[[str], Callable[..., Any]]
    tensors: Tensors
    version: Callable[[], str]
    gives_one: Callable[[str], bool] = lambda _: True
    text: Callable[[str], str] = repr
    title: Callable[[Iterable[Origin]], str] = lambda _: ""
    libraries: tuple[str, ...] = ()
    profiler: Profiler = Profiler()
