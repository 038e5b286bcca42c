"""`rung opt`: a dump of any rung read back, passes run on it, and the text printed again.

The rung of a text follows from what it holds: Kernel IR, mappings, kernels, Tensor IR, or calls of
ATen alone. `--to` runs all passes between that rung and another one below it, `--passes` those that
are named, in that order. A dump of several graphs is treated graph by graph.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rung.compilation import Compilation
from rung.core.config import Settings
from rung.core.errors import ParseError, RungError
from rung.core.op import walk
from rung.core.parse import parse_module
from rung.frontends.torch.externs import TORCH
from rung.pipeline import PASSES, RUNGS, VOCABULARIES, Pass, verify_module
from rung.program.ir import Composite, Module
from rung.targets import base
from rung.targets.base import Target
from rung.tensor import ir as tensor
from rung.tile.mapping import parse_mapping
from rung.tools import check
from rung.tools.given import UsageError
from rung.tools.show import GRAPH, all_kernels, wrapped

PASS_NAMES = tuple(p.full_name for p in PASSES)


@dataclass(frozen=True)
class Request:
    """What the options of `opt` say."""

    passes: tuple[str, ...] = ()
    to: str = ""
    target: str = "cpu"
    run: bool = False


def opt(path: str, request: Request) -> str:
    """The text for stdout. ParseError and VerifyError if the file is no dump."""
    text = sys.stdin.read() if path == "-" else _text(path)
    target = base.target(request.target)
    parts = _graphs(text)
    before = [parsed(body, path) for _, body in parts]
    after = [_changed(m, target, request) for m in before]
    notes = [_compared(a, b) if request.run else [] for a, b in zip(before, after, strict=True)]
    if request.to == "source":
        lines = [f"// {x}" for note in notes for x in note]
        return target.emit(all_kernels(after)) + "".join(f"{x}\n" for x in lines)
    return "\n".join(head + wrapped(f"{module}\n") + "".join(f"# {x}\n" for x in note)
                     for (head, _), module, note in zip(parts, after, notes, strict=True))


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None


def _graphs(text: str) -> list[tuple[str, str]]:
    """(comment line, text) of each graph; the texts keep their line numbers."""
    parts = re.split(rf"^({GRAPH} .*\n)", text, flags=re.M)
    heads, bodies = ["", *parts[1::2]], parts[::2]
    found, line = [], 0
    for head, body in zip(heads, bodies, strict=True):
        line += head.count("\n")
        if head or body.strip():
            found.append((head, "\n" * line + body))
        line += body.count("\n")
    return found or [("", text)]


def parsed(text: str, path: str) -> Module:
    """The verified module of one graph's dump."""
    try:
        funcs = parse_module(text, VOCABULARIES, parse_mapping)
    except ParseError as error:
        raise ParseError(f"{path}:{error}") from None
    if not funcs:
        raise ParseError(f"{path}: no program and no kernel")
    programs = tuple(f for f in funcs if f.kind == "program")
    module = Module(programs, tuple(f for f in funcs if f.kind != "program"))
    verify_module(module, f"{path}, as it was read")
    return module


def rung_of(module: Module) -> str:
    """The rung that a module is on."""
    if any(k.kind == "kernel-ir" for k in module.kernels):
        return "kernel"
    if module.kernels:
        return "tile" if all(k.attr("mapping") for k in module.kernels) else "loop"
    lowered = any(isinstance(op, (Composite, *tensor.OPS))
                  for p in module.programs for op in walk(p.body))
    return "tensor" if lowered else "program"


# --- passes

def _changed(module: Module, target: Target, request: Request) -> Module:
    compilation = Compilation(target, TORCH, Settings.from_environment().precision)
    if steps := [_pass(name) for name in request.passes]:
        module = compilation.history(module, steps).reached()
        verify_module(module, steps[-1].name)
    steps = list(_between(rung_of(module), request.to)) if request.to else []
    return compilation.history(module, steps).reached()


def _pass(name: str) -> Pass:
    """The pass of a name, with or without its rung: `loop.simplify`, `fuse`."""
    found = [p for p in PASSES if name in (p.name, p.full_name)]
    if len(found) == 1:
        return found[0]
    if found:
        both = " or ".join(p.full_name for p in found)
        raise UsageError(f"there are several passes {name!r}: say {both}")
    raise UsageError(f"no pass is called {name!r}; there are {', '.join(PASS_NAMES)}")


def _between(here: str, to: str) -> Iterator[Pass]:
    """The passes that lead from one rung to another."""
    first, last = RUNGS.index(here), RUNGS.index("kernel" if to == "source" else to)
    if last < first:
        raise UsageError(f"the text is on the rung {here}, and passes only lead down: "
                         f"{to} lies above it")
    yield from (p for p in PASSES if first < RUNGS.index(p.rung) <= last)


# --- running

def _compared(before: Module, after: Module) -> list[str]:
    """What both modules give on random arguments, and how far they differ."""
    if not before.programs:
        raise RungError("a text of kernels alone has no program to run")
    inputs = check.draw(before.main)
    if inputs is None:
        raise RungError("the arguments are too large for the oracle")
    with np.errstate(all="ignore"):
        old, new = check.results(before, inputs), check.results(after, inputs)
    count = len(before.main.body.last.operands())
    names = [v.name for v in before.main.body.last.operands()]
    names += [p.name for p in before.main.params if p.role == "mutated"]
    kept = [*range(count), *(count + n for n, p in enumerate(before.main.params)
                             if p.role == "mutated")]
    check.compare(before, after, inputs, False, "running the passes")
    return [line for name, n in zip(names, kept, strict=True)
            for line in _row(name, old[n], new[n])]


def _row(name: str, old: np.ndarray, new: np.ndarray) -> Sequence[str]:
    same = np.array_equal(old, new, equal_nan=True)
    wide = np.abs(np.asarray(old, float) - np.asarray(new, float))
    how = "the same bits" if same else f"at most {np.nanmax(wide, initial=0):.3g} apart"
    shape = ",".join(map(str, np.shape(old)))
    return [f"{name} [{shape}]: mean {np.asarray(new, float).mean():.6g}, "
            f"checksum {_checksum(old)} before, {_checksum(new)} after, {how}"]


def _checksum(x: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:12]
