"""Kernels in a program of their own, under the compiler's sanitizers: a second oracle for memory.

Kernel IR is emitted as C and built together with `sanitize.c`, which places every buffer so that
an access beyond it ends the program. One build is `plain`: without flags for instruction sets each
masked access is a loop, which AddressSanitizer sees. The other is `native`: the instructions that
run in earnest, between guard pages. Both run under UndefinedBehaviorSanitizer.
"""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from kernels import Arrays, Made, draw, indexes_data, unlike

from rung.core.op import Func, Value
from rung.core.types import BF16, TensorType, shape_of
from rung.loop import ir as loop
from rung.targets.base import buffers_of, symbols_of
from rung.targets.cpu.build import COMMON
from rung.targets.cpu.emit import emit
from rung.targets.cpu.machine import FLAGS

MOST = 1 << 21
MAIN = Path(__file__).with_name("sanitize.c")
UNDEFINED = "-fsanitize=undefined,float-cast-overflow"
BUILDS = {"plain": ("-fsanitize=address", "-D__thread="),  # ASan guards globals, not TLS
          "native": ("-DGUARD",)}
CHECKS = ("-O1", "-g1", UNDEFINED, "-fno-sanitize-recover=all")


class SanitizerError(Exception):
    """A run that a sanitizer, or a signal, ended; the message is the report."""


@dataclass(frozen=True)
class Case:
    """A kernel of the list, arguments for it by buffer's name, and its sizes by symbol."""

    kernel: int
    arrays: Arrays
    sizes: Mapping[str, int]


def missing() -> str:
    """Why no program can be built under the sanitizers here, or nothing."""
    if not shutil.which("gcc"):
        return "no gcc"
    made = subprocess.run(["gcc", *BUILDS["plain"], UNDEFINED, "-x", "c", "-", "-o", "/dev/null"],
                          input="int main(void) { return 0; }", capture_output=True, text=True,
                          check=False)
    return made.stderr


def build(kernels: Sequence[Func], machine: str, how: str, folder: Path,
          text: str = "") -> Path:
    """The program of `kernels` as emitted for a CPU of this name, or of `text` in their place."""
    program, source, table = folder / how, folder / f"{how}.c", folder / f"{how}_calls.c"
    source.write_text(text or emit(kernels))
    table.write_text(_table(kernels))
    flags = [x for x in COMMON if x not in ("-O2", "-shared", "-fPIC")]
    isa = FLAGS[machine] if how == "native" else ()
    subprocess.run(["gcc", *flags, *CHECKS, *BUILDS[how], *isa, source, table, MAIN, "-lm", "-o",
                    program], check=True, capture_output=True, text=True)
    return program


def _table(kernels: Sequence[Func]) -> str:
    """C functions of one form that call each kernel, and `calls`, the table of them."""
    lines = []
    for n, k in enumerate(kernels):
        buffers, sizes = len(buffers_of(k)), len(symbols_of(k))
        types = ", ".join(["void *"] * buffers + ["long"] * sizes)
        args = ", ".join([f"b[{i}]" for i in range(buffers)] + [f"s[{i}]" for i in range(sizes)])
        lines += [f"void run_{k.name}({types});",
                  f"static void call{n}(void **b, const long *s) {{ run_{k.name}({args}); }}"]
    table = ", ".join(f"call{n}" for n in range(len(kernels)))
    return "\n".join([*lines, f"void (*const calls[])(void **, const long *) = {{{table}}};", ""])


def run(program: Path, kernels: Sequence[Func], cases: Sequence[Case]) -> list[Arrays]:
    """The buffers after each case; SanitizerError with the report and the case if one fails."""
    given = b"".join(_packed(kernels[c.kernel], c) for c in cases)
    made = subprocess.run([program], input=given, capture_output=True, check=False,
                          env={"ASAN_OPTIONS": "detect_leaks=0"})
    out, found = made.stdout, list[Arrays]()
    for case in cases:
        buffers = buffers_of(kernels[case.kernel])
        size = sum(len(_bytes(v, case)) for v in buffers)
        if len(out) < size:
            raise SanitizerError(f"{kernels[case.kernel].name} at {dict(case.sizes)}: ended with "
                                 f"{made.returncode}\n{made.stderr.decode()}")
        arrays: Arrays = {}
        for v in buffers:
            count = len(_bytes(v, case))
            arrays[v.name], out = _unpacked(v, case, out[:count]), out[count:]
        found.append(arrays)
    if made.returncode:
        raise SanitizerError(f"ended with {made.returncode}\n{made.stderr.decode()}")
    return found


def _packed(kernel: Func, case: Case) -> bytes:
    parts = [_bytes(v, case) for v in buffers_of(kernel)]
    symbols = [case.sizes[s] for s in symbols_of(kernel)]
    head = np.array([case.kernel, len(parts), len(symbols), *symbols], np.int64).tobytes()
    return head + b"".join(np.int64(len(p)).tobytes() + p for p in parts)


def _bytes(value: Value, case: Case) -> bytes:
    """A buffer as it lies in memory, from its first element to its last."""
    flat = _flat(value, case)
    flat[_places(value, case)] = _stored(value, case.arrays[value.name])
    return flat.tobytes()


def _stored(value: Value, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    assert isinstance(value.type, TensorType)
    if value.type.dtype is not BF16:
        return array
    return np.asarray(array.astype("f4").view("u4") >> 16, np.uint16).reshape(array.shape)


def _flat(value: Value, case: Case) -> np.ndarray[Any, Any]:
    assert isinstance(value.type, TensorType)
    places = _places(value, case)
    dtype = np.uint16 if value.type.dtype is BF16 else value.type.dtype.numpy
    return np.zeros(int(places.max(initial=-1)) + 1, dtype)


def _places(value: Value, case: Case) -> np.ndarray[Any, Any]:
    """Where each element of a buffer lies, in elements."""
    assert isinstance(value.type, TensorType)
    shape = case.arrays[value.name].shape
    if value.type.strides is None:
        return np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    strides = [int(e.evaluate(case.sizes)) for e in value.type.strides]
    steps = [np.arange(n) * s for n, s in zip(shape, strides, strict=True)]
    return np.asarray(sum(np.ix_(*steps), np.zeros(shape, int)))


def _unpacked(value: Value, case: Case, data: bytes) -> np.ndarray[Any, Any]:
    assert isinstance(value.type, TensorType)
    flat = np.frombuffer(data, _flat(value, case).dtype)[_places(value, case)]
    if value.type.dtype is BF16:
        return np.asarray((flat.astype("u4") << 16).view("f4"))
    return flat


def check(made: Sequence[Made], sizes: Sequence[int], folder: Path, how: str) -> list[str]:
    """Each kernel at each size of all its symbols, under the sanitizers: where it differs from its
    Loop IR; sizes that make a buffer of more than MOST elements are left out. SanitizerError for
    what they report."""
    made = [replace(m, lowered=replace(m.lowered, name=f"{m.lowered.name}_{n}"))
            for n, m in enumerate(made)]
    kernels = [m.lowered for m in made]
    program = build(kernels, made[0].target.name, how, folder)
    cases = [_case(n, m, size) for n, m in enumerate(made)
             for size in (sizes if m.symbols else sizes[:1])
             if _largest(m, size) <= MOST
             and (size > 1 or not m.symbols or not indexes_data(m.kernel))]
    return [text for case, got in zip(cases, run(program, kernels, cases), strict=True)
            for text in differences(made[case.kernel], case, got)]


def differences(made: Made, case: Case, got: Arrays) -> list[str]:
    """Where a kernel's buffers are not what its Loop IR makes of a case."""
    want = {name: x.copy() for name, x in case.arrays.items()}
    with np.errstate(all="ignore"):
        loop.run_kernel(made.kernel, want, case.sizes)
    found = {v.name: unlike(v, want[v.name], got[v.name]) for v in buffers_of(made.lowered)}
    return [f"{made.lowered.name} at {dict(case.sizes)}: {text}"
            for text in found.values() if text]


def _largest(made: Made, size: int) -> int:
    """Elements of the largest buffer, which the oracle computes whole."""
    known = dict.fromkeys(made.symbols, size)
    return max(math.prod(int(e.evaluate(known)) for e in shape_of(v.type))
               for v in buffers_of(made.lowered))


def _case(n: int, made: Made, size: int) -> Case:
    known = dict.fromkeys(made.symbols, size)
    return Case(n, draw(made.lowered, known, seed=size, special=n % 2 == 1), known)
