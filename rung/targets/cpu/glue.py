"""Stretches called from C: tensors are read through DLPack, so that a call is no Python at all.

`glue.c` is compiled once for a Python and a compiler and kept in the cache like kernels. Where
Python's headers, the tensors' exchange API or the GIL are missing, the host's Python code stays.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rung.core import trace
from rung.core.errors import TargetCompileError
from rung.targets.cpu.build import build_plain
from rung.targets.device import Launch, Refuse, Signature

SOURCE = Path(__file__).with_name("glue.c")
CODES = {"f64": (2, 64), "f32": (2, 32), "bf16": (4, 16), "f16": (2, 16), "i64": (0, 64),
         "i32": (0, 32), "i16": (0, 16), "i8": (0, 8), "u8": (1, 8), "bool": (6, 8)}
"""DLPack's code and bits of each element type."""

OTHERS = {"size": -1, "address": -2, "unused": -3}


def kind_of(kind: str) -> int:
    """A kind of `Signature` as the number that `glue.c` reads."""
    if kind in OTHERS:
        return OTHERS[kind]
    dtype, _, rank = kind.partition("/")
    code, bits = CODES[dtype]
    return code | bits << 8 | int(rank) << 16


def bind(signature: Signature, entry: int, layout: int, owner: object, slow: Launch,
         refuse: Refuse, native: Any, profiler: tuple[dict[str, Any], str],
         constants: Sequence[object] = (), base: int = 0, here: int = 0) -> Launch:
    """`slow`, done in C where that can be. `entry` and `layout` are addresses in a library that
    `owner` keeps loaded; `refuse` raises the error of a check; `native` is how C reads tensors;
    the item of a dictionary that is `profiler` is True while one runs. `here` is the address of a
    function that says whether this thread may launch, if there is one, and `base` is given to the
    entry."""
    module = glue() if native else None
    if module is None:
        return slow
    made = [kind.partition("/") for kind in signature.made]
    bound: Launch = module.Stretch(
        native.exchange, entry, layout, tuple(map(kind_of, signature.kinds)),
        tuple(int(r) for _, _, r in made), tuple(native.dtypes[dtype] for dtype, _, _ in made),
        signature.results, signature.boxed, tuple(constants), native.classes, native.empty, slow,
        refuse, owner, *profiler, *native.place, here, base)
    return bound


@cache
def glue() -> Any:
    """The compiled module; None where this Python does not allow it."""
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        return _without(f"no Python.h in {headers}")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return _without("this Python has no GIL")
    try:
        path = build_plain(SOURCE.read_text(), f"-I{headers}")
        loader = importlib.machinery.ExtensionFileLoader("rung_glue", str(path))
        spec = importlib.util.spec_from_file_location("rung_glue", path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (TargetCompileError, ImportError) as error:
        return _without(str(error))
    return module


def _without(reason: str) -> None:
    trace.emit("declined", "glue", "native calls", reason)
