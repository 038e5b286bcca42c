"""Trying programs: what eager does with them against what Rung does.

Programs are compiled side by side, a few in a graph, by the backend called as Dynamo calls it; one
that differs there is tried alone, and then through torch.compile. Where Rung still differs,
AOTAutograd alone is asked: what differs there in the same way is torch's fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from opdb.compare import DECLINED, Outcome, difference
from opdb.programs import Item, Program, graph, programs
from torch.testing._internal.common_utils import set_rng_seed

from rung import entry
from rung.core import trace

BATCH = 8  # programs in a graph
Compile = Callable[[Sequence[Program], Sequence[torch.Tensor]], Callable[..., Any]]


@dataclass
class Tally:
    """Of the programs of an item: how many passed, and what the others did.

    `lowered` and `left` count the ATen calls of their graphs by overload.
    """

    passed: int = 0
    torchs: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    unlowered: list[str] = field(default_factory=list)
    lowered: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)


def ours(strict: bool) -> Compile:
    """The backend, called as Dynamo calls it."""
    return lambda batch, tensors: entry.rung(graph(batch), tensors, options={"strict": strict})


def through(name: str) -> Compile:
    """torch.compile with a backend, of one program."""
    def compiled(batch: Sequence[Program], tensors: Sequence[torch.Tensor]) -> Callable[..., Any]:
        torch._dynamo.reset()
        made: Callable[..., Any] = torch.compile(batch[0].fn, backend=name, dynamic=False)
        return made
    return compiled


def attempt(way: str, batch: Sequence[Program], compile_: Compile,
            counts: Sequence[int]) -> list[Outcome]:
    """The outcomes of programs that are compiled as one, with so many tensors each; an error is
    that of all."""
    inputs = [p.inputs() for p in batch]
    flat = [x for xs in inputs for x in xs]
    set_rng_seed(0)
    try:
        outs = iter(tensors_of(compile_(batch, flat)(*flat)))
        parts = [[next(outs) for _ in range(n)] for n in counts]
        return observed(way, parts, inputs)
    except Exception as error:  # whatever it is, eager must give the same
        return [Outcome(error=error) for _ in batch]


def tensors_of(outs: Any) -> list[torch.Tensor]:
    return [x for x in outs if isinstance(x, torch.Tensor)]


def eagerly(way: str, batch: Sequence[Program]) -> list[Outcome]:
    """The outcomes of programs one after the other; an error is the last one's."""
    inputs = [p.inputs() for p in batch]
    set_rng_seed(0)
    try:
        parts = [tensors_of(p.fn(*xs)) for p, xs in zip(batch, inputs, strict=True)]
        return observed(way, parts, inputs)
    except Exception as error:  # the outcome
        return [Outcome(error=error) for _ in batch]


def observed(way: str, parts: Sequence[list[torch.Tensor]],
             inputs: Sequence[list[torch.Tensor]]) -> list[Outcome]:
    """Results and arguments as outcomes, with gradients if that is the way."""
    found = [Outcome(outs, [], sharing(outs, xs), xs)
             for outs, xs in zip(parts, inputs, strict=True)]
    if way in ("gradient", "second"):
        wanted = [[x for x in xs if x.requires_grad] for xs in inputs]
        grads = iter(gradients(parts, [x for xs in wanted for x in xs], way == "second"))
        for outcome, xs in zip(found, wanted, strict=True):
            outcome.grads = [next(grads) for _ in xs]
    return found


def gradients(parts: Sequence[list[torch.Tensor]], wanted: Sequence[torch.Tensor],
              second: bool) -> Sequence[torch.Tensor | None]:
    """Gradients of all results, weighted; or, `second`, the gradients of those."""
    roots = [(x, weight(n, x)) for outs in parts for n, x in enumerate(outs) if x.requires_grad]
    if not roots or not wanted:
        return [None] * len(wanted)
    first: Sequence[torch.Tensor | None] = torch.autograd.grad(
        [x for x, _ in roots], wanted, [w for _, w in roots], allow_unused=True,
        create_graph=second)
    if not second:
        return first
    again = [[x for x in first if x is not None]]
    return gradients(again, wanted, False)


def weight(n: int, x: torch.Tensor) -> torch.Tensor:
    """What result `n` counts, element by element."""
    generator = torch.Generator().manual_seed(n)
    return torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)


def sharing(outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> set[str]:
    """Which tensors among results and arguments are one, or lie in one storage."""
    named = {**{f"result {n}": x for n, x in enumerate(outs)},
             **{f"argument {n}": x for n, x in enumerate(inputs)}}
    places = {k: x.untyped_storage()._cdata for k, x in named.items()
              if x.layout is torch.strided and x.numel()}
    return {f"{a} {'is' if named[a] is named[b] else 'shares memory with'} {b}"
            for a in places for b in places if a < b and places[a] == places[b]}


# ---- an item
def run(item: Item, most: int = 0) -> Tally:
    """Try an item, or the first programs of it, `most` of them."""
    tally = Tally()
    for batch in batches(item.way, programs(item)[:most or None]):
        with trace.listen() as events:
            found = differences(item.way, batch, ours(strict=True))
        count(events, tally)
        if any(found):
            for p in batch:
                judge(tally, *single(item.way, p, tally))
        else:
            tally.passed += len(batch)
    return tally


def batches(way: str, given: Sequence[Program]) -> Iterator[list[Program]]:
    """Programs that are compiled together; those that raise in eager are alone."""
    good = list[Program]()
    for p in given:
        if eagerly(way, [p])[0].error:
            yield [p]
        else:
            good.append(p)
    for n in range(0, len(good), BATCH):
        yield good[n:n + BATCH]


def count(events: Sequence[trace.Event], tally: Tally) -> None:
    """Add the calls that were lowered, and those that were not, to the tally."""
    for e in events:
        if e.place == "lower":
            (tally.lowered if e.kind == "fired" else tally.left)[e.subject] += 1


def differences(way: str, batch: Sequence[Program], compile_: Compile) -> list[str]:
    """How each program differs from eager, or ""; an error that is Rung's own is `declined`."""
    wants = eagerly(way, batch)
    got = attempt(way, batch, compile_, [len(w.outs) for w in wants])
    return [difference(g, w, partial(precise, way, p))
            for p, g, w in zip(batch, got, wants, strict=True)]


def precise(way: str, p: Program) -> Outcome:
    """What eager gives in double precision."""
    wide = {torch.complex64: torch.complex128}
    tensors = [x.detach().to(wide.get(x.dtype, torch.float64)).requires_grad_(x.requires_grad)
               if x.is_floating_point() or x.is_complex() else x for x in p.tensors]
    return eagerly(way, [Program(p.fn, tensors)])[0]


def single(way: str, p: Program, tally: Tally) -> tuple[str, str]:
    """How a program differs compiled alone, and how it does without Rung."""
    found, = differences(way, [p], ours(strict=True))
    if found.startswith(DECLINED):
        tally.unlowered.append(found)
        found, = differences(way, [p], ours(strict=False))
    if found:
        found, = differences(way, [p], through("rung"))
    return found, found and differences(way, [p], through("aot_eager"))[0]


def judge(tally: Tally, found: str, without: str) -> None:
    """Add a program to the tally; differences are alike if they are in the same thing."""
    if not found:
        tally.passed += 1
    elif found.partition(":")[0] == without.partition(":")[0]:
        tally.torchs.append(found)
    else:
        tally.failed.append(found)
