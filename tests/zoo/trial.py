"""A model of the zoo in eager, through Rung and, where they differ, through AOTAutograd alone."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import transformers
from opdb.compare import Outcome, difference
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves
from zoo import models

from rung.core import trace

Record = dict[str, Any]
NUDGES = 4  # runs of eager that tell how far rounding alone leads


def attempt(name: str, train: bool) -> Record:
    """What became of a model: forward, or a training step with the gradients of all parameters.

    `skipped` says why eager does not run it; `torchs` what differs with AOTAutograd alone too.
    """
    torch._dynamo.reset()
    try:
        model = models.build(name).train(train)
        given, want, eager = tried(model, train)
    except Exception as error:  # not in the zoo
        return {"skipped": f"{type(error).__name__}: {error}"[:200], "failed": []}
    if train and not want.grads:
        return {"skipped": "nothing to train", "failed": []}
    counters.clear()
    with trace.listen() as events:
        got, first = timed(model, given, train, "rung")
    left = Counter(e.subject for e in events if (e.kind, e.place) == ("declined", "lower"))
    declined = [e.detail for e in events if (e.kind, e.place) == ("declined", "backend")]
    record: Record = {
        "failed": [], "torchs": [], "eager": eager, "first": first, "left": left,
        "declined": declined, "breaks": sum(counters["graph_break"].values())}
    how = difference(got, want, lambda: timed(model, given, train, None, exact=True)[0],
                     lambda: [timed(nudged(model, n), given, train, None)[0]
                              for n in range(NUDGES)])
    if how:
        other, _ = timed(model, given, train, "aot_eager")
        alike = difference(other, want, Outcome).partition(":")[0] == how.partition(":")[0]
        record["torchs" if alike else "failed"] = [how]
    return record


def nudged(model: nn.Module, seed: int) -> nn.Module:
    """A copy whose parameters are rounded otherwise: what it gives is as near to the exact values
    as what the model itself does."""
    made = copy.deepcopy(model)
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in filter(torch.is_floating_point, made.parameters()):
            p *= 1 + torch.finfo(p.dtype).eps * (2 * torch.rand(p.shape, generator=drawn) - 1)
    return made


def tried(model: nn.Module, train: bool) -> tuple[dict[str, torch.Tensor], Outcome, float]:
    """The first inputs that eager takes, their outcome and its seconds."""
    *first, last = models.inputs(model)
    for given in first:
        try:
            return given, *timed(model, given, train, None)
        except Exception:  # no examples of what the model asks for
            continue
    return last, *timed(model, last, train, None)


def timed(model: nn.Module, given: dict[str, torch.Tensor], train: bool, backend: str | None,
          exact: bool = False) -> tuple[Outcome, float]:
    """The outcome of a copy of the model, and the seconds that it took."""
    made = copy.deepcopy(model)
    values = {k: v.clone() for k, v in given.items()}
    if exact:
        made = made.double()
        values = {k: v.double() if v.is_floating_point() else v for k, v in values.items()}
    run: Callable[..., Any] = torch.compile(made, backend=backend) if backend else made
    transformers.set_seed(1)
    started = time.perf_counter()
    try:
        with torch.set_grad_enabled(train):
            outcome = step(made, run, values, train)
    except Exception as error:
        if backend is None:
            raise
        outcome = Outcome(error=error)
    return outcome, round(time.perf_counter() - started, 3)


def step(model: nn.Module, run: Callable[..., Any], values: dict[str, torch.Tensor],
         train: bool) -> Outcome:
    """One call, with `train` the gradients of means of sines: means of squares of what a norm gives
    hardly depend on what comes before it."""
    found = run(**values, **({"use_cache": False} if hasattr(model.config, "use_cache") else {}))
    outs = [x for x in tree_leaves(dict(found)) if isinstance(x, torch.Tensor)]
    roots = [x.float().sin().mean() for x in outs if x.requires_grad]
    if train and roots:
        torch.stack(roots).sum().backward()
    state = [b.detach() for b in model.buffers()]
    return Outcome([x.detach() for x in outs], [p.grad for p in model.parameters()] if train
                   and roots else [], set(), state)
