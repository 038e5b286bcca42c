"""Sections of `rung explain` about torch's side: what Dynamo and AOTAutograd made of a function."""

from __future__ import annotations

import dis
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import fx, nn

from rung.core.op import Func
from rung.frontends.torch import compat, observed
from rung.tools.capture import Capture
from rung.tools.flops import contractions
from rung.tools.given import inputs_of


def graphs(found: Capture) -> list[str]:
    """What Dynamo captured: torch's functions and methods, before autograd sees them."""
    return _each(found, "graph", lambda f: f.graph.print_readable(print_output=False))


def guards(found: Capture) -> list[str]:
    """What is checked at each call, before the compiled code may run."""
    return _each(found, "guards", lambda f: "\n".join(f.guards))


def bytecode(found: Capture) -> list[str]:
    """The Python code that runs in place of the user's: it calls the compiled graph."""
    return _each(found, "bytecode", lambda f: dis.Bytecode(f.new).dis() if f.new else "")


def functional(found: Capture) -> list[str]:
    """The graph without mutations, with its views and with copies in their place."""
    return _each(found, "functional form", _forms)


def _forms(frame: observed.Frame) -> str:
    try:
        return "\n".join(f"without {removed.replace('_', ' ')}\n{code}"
                         for removed, code in frame.functional())
    except Exception as error:  # torch's tracer refuses some graphs, such as those with branches
        return f"torch does not trace this graph: {type(error).__name__}: {error}"


def _each(found: Capture, title: str, text: Any) -> list[str]:
    lines = []
    for n, frame in enumerate(found.frames, 1):
        where = f"{frame.old.co_name}, {frame.old.co_filename}:{frame.old.co_firstlineno}" \
            if frame.old else ""
        lines.append(f"Dynamo's {title} {n} of {len(found.frames)}: {where}".rstrip(": "))
        lines += [f"  {line}" for line in text(frame).splitlines() if line.strip()]
    return lines


# --- AOTAutograd

def decompositions(gm: fx.GraphModule) -> Iterator[str]:
    """Operators that torch wrote out in terms of others, with what they became."""
    found = observed.decomposed(gm)
    yield "  decompositions that fired" if found else "  no decomposition fired"
    for name, parts in found.items():
        made = ", ".join(f"{x} x{n}" if n > 1 else x for x, n in Counter(parts).items())
        yield f"    {name} -> {made}"


def saved(gm: fx.GraphModule) -> Iterator[str]:
    """What a forward graph keeps for the backward one; inputs that get no gradient from that."""
    _, results = compat.described(gm)
    kept = [x for x, kind in results if type(kind).__name__ == "SavedForBackwardsAOTOutput"]
    grads = [x for x, kind in results if type(kind).__name__ == "GradAOTOutput"]
    if kept:
        values = [x.meta["val"] for x in kept]
        total = sum(v.nbytes for v in values if isinstance(v, torch.Tensor))
        yield f"  saved for backward: {len(kept)} values, {total:,} bytes"
        yield from (f"    {x.name}: {_type(v)}" for x, v in zip(kept, values, strict=True))
    if grads:
        none = [n for n, (x, _) in enumerate(results) if x is None]
        yield f"  gradients of {len(results) - len(none)} of {len(results)} inputs" + (
            f"; None for input {', '.join(map(str, none))}" if none else "")


def _type(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "a size"
    name = str(value.dtype).removeprefix("torch.")
    return f"{name}[{','.join(map(str, value.shape))}]"


# --- models

def model(module: nn.Module, args: tuple[Any, ...],
          programs: Sequence[tuple[Func, Mapping[str, int]]]) -> Iterator[str]:
    """Model FLOPs as counted and, where the count bears it out, by the usual estimate: 2 (forward)
    or 6 (a training step) times parameters times tokens (Kaplan et al., 2020, "Scaling Laws for
    Neural Language Models"). Weights of convolutions meet every place of an image, not tokens."""
    held = sum(p.numel() for p in module.parameters())
    if not held:
        return
    tables = {p for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    used = {p for m in module.modules() if not isinstance(m, nn.Embedding)
            for p in m.parameters(recurse=False)}
    looked_up = sum(p.numel() for p in tables - used)
    counted, tokens = [contractions(*p) for p in programs], _tokens(args)
    convolutions, weights, attention = (sum(getattr(c, x) for c in counted) for x in (
        "convolutions", "weights", "attention"))
    total, flops = convolutions + weights + attention, (held - looked_up) * tokens
    usual = 0 < 1.6 * flops <= weights <= 2 * flops
    lookups = f", {looked_up:,} of them only looked up" if looked_up else ""
    yield f"model: {held:,} parameters{lookups}" + (f"; {tokens:,} tokens a call" if usual else "")
    if usual:
        yield (f"  {2 * flops:,} FLOPs forward (2 x parameters x tokens), {6 * flops:,} in a "
               "training step (6 x parameters x tokens)")
    if total:
        shares = (("convolutions", convolutions), ("matmuls with parameters", weights),
                  ("attention", attention))
        told = ", ".join(f"{what} {n / total:.1%}" for what, n in shares if n)
        yield f"  counted forward: {total:,} FLOPs{_images(args) * bool(convolutions)}: {told}"
    if usual:
        yield from ASSUMES


def _images(args: tuple[Any, ...]) -> str:
    """` for 2 images of 3x224x224`, or "" where there are none."""
    found = next((x for x in inputs_of(args) if x.is_floating_point() and x.ndim == 4), None)
    if found is None:
        return ""
    count, *sizes = found.shape
    return f" for {count} image{'s' * (count != 1)} of {'x'.join(map(str, sizes))}"


ASSUMES = (
    "  assumes: a token is an element of the first integer argument, or a row of the first tensor;",
    "    every parameter but looked-up tables meets every token once; backward is two forwards;",
    "    attention is every contraction of two activations; norms, activations and the optimizer",
    "    cost nothing")


def _tokens(args: tuple[Any, ...]) -> int:
    tensors = list(inputs_of(args))
    ids = next((x for x in tensors if not x.is_floating_point() and x.ndim), None)
    if ids is not None:
        return ids.numel()
    return prod(tensors[0].shape[:-1]) if tensors and tensors[0].ndim else 1
