"""`rung fuzz`: random programs, mappings and texts until something is wrong, and a file of that.

Programs: a torch program goes down all rungs and is compared with eager; every few of them each
rung's module also runs on the oracles. Between them stand programs of Tensor IR under random
prices. A seed is one program, so a range of seeds can be run again, or by several processes.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import numpy as np
import torch

from rung.core.errors import RungError, Unsupported
from rung.frontends.torch.oracle import to_numpy
from rung.targets.base import target
from rung.tools import judge
from rung.tools.fuzz import batch, mappings, programs, tensors, texts
from rung.tools.fuzz.programs import Program

BATCH, DUMPED, TENSORS = 20, 5, 4  # programs in a library; every how many are seen on all rungs, or
ROUNDED = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Request:
    """What the options of `fuzz` say: `kind` is programs, mappings or text; `minutes` 0 is no
    limit; what is wrong is saved in the folder `out`. Mappings are of any machine unless there is
    a target, whose device then runs them."""

    seed: int = 0
    count: int = 100
    minutes: float = 0
    kind: str = "programs"
    target: str = "cpu"
    out: str = "."


@dataclass(frozen=True)
class Wrong:
    """What is wrong with a seed, and the file that shows it: its ending and its text."""

    seed: int
    what: str
    ending: str
    text: str


def fuzz(request: Request) -> tuple[str, bool]:
    """The report, and whether nothing is wrong."""
    until = monotonic() + 60 * request.minutes if request.minutes else float("inf")
    seeds, found = range(request.seed, request.seed + request.count), list[Wrong]()
    done = request.seed
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for first in range(0, request.count, BATCH):
            some = seeds[first:first + BATCH]
            print(f"seeds {some.start} to {some.stop - 1}", file=sys.stderr)
            found += KINDS[request.kind](some, request)
            done = some.stop
            if monotonic() > until:
                break
    lines = [f"{request.kind}: seeds {request.seed} to {done - 1}, {len(found)} wrong"]
    for x in found:
        path = Path(request.out, f"fuzz_{request.kind}_{x.seed}{x.ending}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(x.text)
        lines.append(f"  {x.seed}: {x.what.splitlines()[0]}; see {path}")
    return "\n".join(lines) + "\n", not found


# --- programs

def _programs(seeds: range, request: Request) -> Iterator[Wrong]:
    for seed, program, what in differing({s: programs.draw(s) for s in seeds}, request.target,
                                         DUMPED):
        least = programs.shrunk(program, lambda p: bool(list(differing({0: p}, request.target, 1))))
        yield Wrong(seed, what, ".py", programs.saved(least, what, bound_of(least)))
    for seed in seeds[::TENSORS]:
        try:
            what = tensors.wrong(seed)
        except (RungError, IndexError) as error:
            what = f"{type(error).__name__}: {error}"
        if what:
            yield Wrong(seed, what, ".ir", what.partition("\n")[2])


def differing(drawn: dict[int, Program], name: str, dumped: int
              ) -> Iterator[tuple[int, Program, str]]:
    """(seed, program, what is wrong) for each one that is not what eager makes of it; every
    `dumped`th is also compared on each rung."""
    machine, ready = target(name), dict[int, batch.Lowered]()
    for seed, program in drawn.items():
        try:
            ready[seed] = batch.lowered(program, machine, f"p{seed}_")
        except Unsupported:
            continue  # torch.compile leaves it to eager
        except Exception as error:
            yield seed, program, f"{type(error).__name__}: {error}"
    try:
        batch.build(list(ready.values()), machine)
    except RungError as error:  # of one of them, which is told when each is built alone
        for seed in ready:
            if len(ready) > 1:
                yield from differing({seed: drawn[seed]}, name, dumped)
            else:
                yield seed, drawn[seed], f"{type(error).__name__}: {error}"
        return
    for n, (seed, made) in enumerate(ready.items()):
        try:
            what = difference(made, n % dumped == 0)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
        if what:
            yield seed, made.program, what


def difference(made: batch.Lowered, rungs: bool) -> str:
    """How results, or arguments afterwards, differ from eager's; with `rungs`, on which one."""
    program = made.program
    args, again = program.arguments(), program.arguments()
    if rungs:
        made.watch()
    with torch.no_grad():
        want, got = [*program.function()(*args), *args], [*made.call(*again), *again]
    kinds = [[(x.dtype, x.shape) for x in xs] for xs in (want, got)]
    if kinds[0] != kinds[1]:
        return f"gives {kinds[1]}, not {kinds[0]}"
    bound = bound_of(program)
    if found := judge.difference(list(map(to_numpy, want)), list(map(to_numpy, got)), bound):
        return f"changes {found}"
    return next(filter(None, (p.wrong(bound) for p in made.parts)), "") if rungs else ""


def bound_of(program: Program) -> float:
    """How far a result may be off, by the widest rounding of any value."""
    seen = (*program.inputs.values(), *programs.traced(program).values())
    return 0.0 if program.exact else max((ROUNDED.get(x.dtype, 0.0) for x in seen), default=0.0)


# --- mappings and texts

def _mappings(seeds: range, request: Request) -> Iterator[Wrong]:
    for seed in seeds:
        for what, text in mappings.wrong(seed, "" if request.target == "cpu" else request.target):
            yield Wrong(seed, what, ".ir", text)


def _texts(seeds: range, request: Request) -> Iterator[Wrong]:
    """Each dump of one drawn program is damaged in as many ways as there are seeds."""
    parts = batch.lowered(programs.draw(seeds.start), target(request.target), "p").parts
    dumps = [p.history.text(rung) for p in parts for rung in p.history.modules]
    for seed in seeds:
        if dumps and (what := texts.wrong(dumps[seed % len(dumps)], seed)):
            yield Wrong(seed, what, ".ir", what.partition("\n")[2])


KINDS: dict[str, Callable[[range, Request], Iterator[Wrong]]] = {
    "programs": _programs, "mappings": _mappings, "text": _texts}
