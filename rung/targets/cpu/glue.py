"""Stretches called from C: tensors are read through DLPack, so that a call is no Python at all.

`glue.c` is compiled once for a Python and a compiler and kept in the cache like kernels. Where
Python's headers, torch's exchange API or the GIL are missing, the host's Python code stays.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rung.core import trace
from rung.core.errors import TargetCompileError
from rung.targets.cpu.build import build_extension
from rung.targets.device import Launch, Signature

SOURCE = Path(__file__).with_name("glue.c")
CODES = {"f64": (2, 64, torch.float64), "f32": (2, 32, torch.float32),
         "bf16": (4, 16, torch.bfloat16), "f16": (2, 16, torch.float16),
         "i64": (0, 64, torch.int64), "i32": (0, 32, torch.int32), "i16": (0, 16, torch.int16),
         "i8": (0, 8, torch.int8), "u8": (1, 8, torch.uint8), "bool": (6, 8, torch.bool)}
"""DLPack's code and bits, and torch's type, of each element type."""

OTHERS = {"size": -1, "address": -2, "unused": -3}


def kind_of(kind: str) -> int:
    """A kind of `Signature` as the number that `glue.c` reads."""
    if kind in OTHERS:
        return OTHERS[kind]
    dtype, _, rank = kind.partition("/")
    code, bits, _ = CODES[dtype]
    return code | bits << 8 | int(rank) << 16


def bind(signature: Signature, entry: int, layout: int, owner: object, slow: Launch,
         refuse: Callable[[int, int, int], None], empty: Callable[..., torch.Tensor],
         profiler: tuple[dict[str, Any], str], constants: Sequence[object] = ()) -> Launch:
    """`slow`, done in C where that can be. `entry` and `layout` are addresses in a library that
    `owner` keeps loaded; `refuse` raises the error of a check; the item of a dictionary that is
    `profiler` is True while one runs."""
    module = glue()
    if module is None:
        return slow
    made = [kind.partition("/") for kind in signature.made]
    bound: Launch = module.Stretch(
        torch.Tensor.__dlpack_c_exchange_api__,
        entry, layout, tuple(map(kind_of, signature.kinds)), tuple(int(r) for _, _, r in made),
        tuple(CODES[dtype][2] for dtype, _, _ in made), signature.results, signature.boxed,
        tuple(constants), (torch.Tensor, torch.nn.Parameter), empty, slow, refuse, owner,
        *profiler)
    return bound


@cache
def glue() -> Any:
    """The compiled module; None where this Python or this torch does not allow it."""
    headers = Path(sysconfig.get_path("include"))
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        return _without("this torch has no DLPack exchange API")
    if not (headers / "Python.h").exists():
        return _without(f"no Python.h in {headers}")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return _without("this Python has no GIL")
    try:
        path = build_extension(SOURCE.read_text(), headers)
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
