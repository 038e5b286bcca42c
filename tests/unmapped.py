"""Which kernels of the models have no mapping on a machine, and why?

    PYTHONPATH=tests python -m unmapped [--only REGEX] [--machine cuda.sm90] [--before PASS]

The tiny models of `rung.tools.models`, forward and training, fp32 and bf16, go down to the kernels
that the passes before `split` leave, or, before `fuse`, those of single ops; each of them is mapped
by itself, so that one without a mapping does not hide the others. What is captured is kept as text
in `build/unmapped`. Exit code 1 if any kernel has no mapping.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import shards

from rung import pipeline
from rung.compilation import Compilation
from rung.core.errors import RungError
from rung.core.key import structural_key
from rung.core.op import Func
from rung.core.parse import parse_module
from rung.targets.base import sizes_of, target
from rung.tile import choose

PLACE = shards.ROOT / "build" / "unmapped"


def units() -> list[tuple[str, bool, str]]:
    """(model, whether it is trained, element type) of all, forward before training."""
    from rung.tools.models import MODELS, TIMM
    return [(name, train, dtype) for train in (False, True) for dtype in ("float32", "bfloat16")
            for name in (*MODELS, *TIMM)]


def programs(name: str, train: bool, dtype: str) -> list[tuple[Func, dict[str, int]]]:
    """The programs of a model with their hints, captured or read back."""
    place = PLACE / f"{name}-{'training' if train else 'forward'}-{dtype}.json"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(captured(name, train, dtype)))
    found = []
    for text, hints in json.loads(place.read_text()):
        (func,) = parse_module(text, pipeline.VOCABULARIES)
        found.append((func, hints))
    return found


def captured(name: str, train: bool, dtype: str) -> list[tuple[str, dict[str, int]]]:
    import torch

    from rung.tools.capture import capture
    from rung.tools.given import Given
    from rung.tools.models import MODELS, TIMM

    model = (MODELS | TIMM)[name]
    kind = getattr(torch, dtype)
    made = model.build(True).to(kind).train(train)
    inputs = {k: x.to(kind) if x.is_floating_point() else x
              for k, x in model.inputs(True, 2, 7).items()}
    with torch.set_grad_enabled(train):
        def function(**kwargs: Any) -> Any:
            out = made(**kwargs)
            return out if isinstance(out, torch.Tensor) else out[0]
        graphs = capture(Given(name, function, (), kwargs=inputs), train).graphs
    return [(str(g.imported.func), g.hints) for g in graphs if g.imported]


def unmapped(program: Func, hints: dict[str, int], machine: str, before: str, seen: set[str]
             ) -> Iterator[tuple[Func, str]]:
    """Kernels that were not seen before, and why each has no mapping: "" if it has one."""
    from rung.frontends.torch.externs import TORCH

    compilation = Compilation(target(machine), externs=TORCH, hints=hints)
    passes = list(itertools.takewhile(lambda p: p.name != before, pipeline.PASSES))
    module = compilation.history(program, passes).reached()
    context = compilation.context
    for kernel in module.kernels:
        key = structural_key(kernel, "", *[str(e) for e in sizes_of(kernel)])
        if key in seen:
            continue
        seen.add(key)
        why = ""
        try:
            choose.choose(kernel, context.machine, context.target.candidates, hints,
                          context.libraries)
        except RungError as error:
            why = f"{type(error).__name__}: {error}"
        yield kernel, why


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the units to map, as a regular expression")
    parser.add_argument("--machine", default="cuda.sm90")
    parser.add_argument("--before", default="split", help="the pass whose input is mapped")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    seen, total, bad = set[str](), 0, 0
    for name, train, dtype in units():
        unit = f"{name} {'training' if train else 'forward'} {dtype}"
        if not re.search(asked.only, unit):
            continue
        before = total, bad
        try:
            for program, hints in programs(name, train, dtype):
                for kernel, why in unmapped(program, hints, asked.machine, asked.before, seen):
                    total += 1
                    if why:
                        bad += 1
                        print(f"--- {unit}: {why[:600]}\n{kernel}\n", flush=True)
        except Exception as error:
            print(f"=== {unit}: {type(error).__name__}: {str(error)[:500]}", flush=True)
        print(f"=== {unit}: {total - before[0]} new kernels, {bad - before[1]} without a mapping",
              flush=True)
    print(f"{total} kernels, {bad} without a mapping on {asked.machine}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
