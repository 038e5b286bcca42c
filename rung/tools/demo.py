"""`make demo`: real models through `torch.compile(backend="rung")`, checked against eager.

A Llama of TinyLlama-1.1B's shapes (random weights) decodes greedily over a static cache:
in fp32 every token must be eager's; in bf16 a token may differ where its float64 logit is no
further below the best than eager's own error. With `precision="eager"` every token must be that of
the graph which Dynamo traced, run by torch: `transformers` masks a prompt otherwise when it is
traced, so eager itself rounds otherwise there. GPT-2 and ResNet-50 run through the same backend
once. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import nn

from rung.core import trace
from rung.core.trace import Event
from rung.program.ir import Module
from rung.tools import models
from rung.tools.measure import launched, machine_facts, median, peak
from rung.tools.models import Decoder, Sizes

PROMPT = 8
CLOSE = 1e-3  # of the largest value, for fp32 models that run once


@dataclass
class Run:
    """Tokens that a decoder chose, their logits, and seconds of every step."""

    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def per_token(self) -> float:
        """The median of the steps after the prompt."""
        return median(self.seconds[1:])


def generate(decoder: Decoder, vocabulary: int, count: int,
             follow: Sequence[int] | None = None) -> Run:
    """Decode greedily; with `follow` the next step gets that token, whatever was chosen."""
    run = Run()
    prompt = torch.arange(1, PROMPT + 1)[None] % vocabulary
    for n in range(count):
        start = perf_counter()
        last = torch.tensor([[(follow or run.tokens)[n - 1]]]) if n else prompt
        logits = decoder.step(last) if n else decoder.start(prompt)
        run.seconds.append(perf_counter() - start)
        run.logits.append(logits.clone())
        run.tokens.append(int(logits.argmax()))
    return run


@dataclass(frozen=True)
class Request:
    """The command line."""

    inductor: bool
    sizes: Sizes
    tokens: int
    others: bool


class Demo:
    """Runs the parts one after the other; `failed` collects what a check found."""

    def __init__(self, options: Request):
        self.options = options
        self.failed: list[str] = []

    def say(self, text: str) -> None:
        print(text, flush=True)

    def check(self, what: str, problems: Sequence[str]) -> None:
        self.failed += [f"{what}: {x}" for x in problems]
        self.say(f"  {what}: " + ("; ".join(problems) if problems else "ok"))

    def run(self) -> int:
        facts = machine_facts()
        self.say(", ".join(f"{key} {value}" for key, value in facts.items()))
        self.llama(torch.float32)
        self.llama(torch.bfloat16)
        if self.options.others:
            self.once("GPT-2", *self.gpt2())
            self.once("ResNet-50", *self.resnet())
        self.say("\nEvery step in between: rung show rung/tools/examples.py:llama, "
                 "and rung explain for the reasons.")
        for problem in self.failed:
            print(f"demo: failed: {problem}", file=sys.stderr)
        return int(bool(self.failed))

    # --- Llama
    def llama(self, dtype: torch.dtype) -> None:
        sizes = self.options.sizes
        model = models.llama(sizes, dtype)
        self.say(f"\nLlama, {sizes.layers} layers of width {sizes.hidden}, {_short(dtype)}, "
                 f"{_count(model) / 1e6:.0f}M parameters, {self.options.tokens} tokens after "
                 f"{PROMPT}")
        eager = self.decode(model, "eager")
        rung = self.decode(model, "rung", eager.tokens)
        if dtype == torch.float32:
            self.check("the same tokens as eager", differing(eager, rung))
        else:
            self.check("tokens as good as eager's", self.worse(model, eager, rung))
            traced = self.decode(model, "traced", eager.tokens)
            exact = self.decode(model, "rung", eager.tokens, precision="eager")
            self.check('the same tokens with precision="eager"', differing(traced, exact))
        if self.options.inductor and dtype == torch.bfloat16:  # once: it compiles for minutes
            self.decode(model, "inductor", eager.tokens)

    def decode(self, model: nn.Module, backend: str, follow: Sequence[int] | None = None,
               **options: str) -> Run:
        """Compile and generate, then generate again; tell times and, for Rung, the kernels."""
        torch._dynamo.reset()
        forward = _compiled(model, backend, options)
        decoder = Decoder(model, self.options.sizes, forward)
        args = (decoder, self.options.sizes.vocabulary, self.options.tokens, follow)
        with trace.listen() as events:
            first = generate(*args)
        again = generate(*args)
        name = backend + "".join(f", {k}={v}" for k, v in options.items())
        compiling = sum(first.seconds) - sum(again.seconds)
        memory = peak(lambda: decoder.step(torch.tensor([[1]])))
        self.say(f"  {name}: {again.per_token * 1e3:.1f} ms a token in {memory / 2**20:,.0f} MiB"
                 + f", compiled in {compiling:.1f} s" * (backend != "eager"))
        for line in _report(events):
            self.say(f"    {line}")
        return again

    def worse(self, model: nn.Module, eager: Run, rung: Run) -> list[str]:
        """The tokens that differ from eager's by more than eager's own error explains."""
        different = [n for n, (a, b) in enumerate(zip(eager.tokens, rung.tokens, strict=True))
                     if a != b]
        if not different:
            return []
        exact = generate(Decoder(models.llama(self.options.sizes, torch.bfloat16).double(),
                                 self.options.sizes), self.options.sizes.vocabulary,
                         self.options.tokens, eager.tokens).logits
        self.say(f"    {len(different)} of {len(rung.tokens)} tokens differ from eager's")
        return [x for n in different for x in _gap(n, exact[n], eager, rung)]

    # --- others, once
    def gpt2(self) -> tuple[nn.Module, torch.Tensor]:
        tiny = self.options.sizes.hidden == models.TINY.hidden
        sizes = models.TINY if tiny else models.GPT2
        return models.gpt2(sizes), torch.arange(16)[None]

    def resnet(self) -> tuple[nn.Module, torch.Tensor]:
        if self.options.sizes.hidden == models.TINY.hidden:
            return models.resnet((1, 1), 8, 10), torch.randn(1, 3, 32, 32)
        return models.resnet(), torch.randn(1, 3, 224, 224)

    def once(self, name: str, model: nn.Module, x: torch.Tensor) -> None:
        """One model, once: close to eager?"""
        self.say(f"\n{name}, {_count(model) / 1e6:.0f}M parameters, fp32")
        torch._dynamo.reset()
        compiled = _compiled(model, "rung", {})
        with torch.no_grad(), trace.listen() as events:
            want = _tensor(model(x))
            start = perf_counter()
            have = _tensor(compiled(x))
            first = perf_counter() - start
            start = perf_counter()
            compiled(x)
            second = perf_counter() - start
        self.say(f"  rung: {second * 1e3:.1f} ms, compiled in {first - second:.1f} s")
        for line in _report(events):
            self.say(f"    {line}")
        error = float((want - have).abs().max() / want.abs().max())
        self.check(f"close to eager (largest difference {error:.1e} of the largest value)",
                   [] if error < CLOSE else [f"more than {CLOSE}"])


def _compiled(model: nn.Module, backend: str, options: dict[str, str]) -> Callable[..., Any]:
    if backend == "eager":
        return model
    if backend == "traced":
        return torch.compile(model, backend="eager")
    if backend == "inductor":
        return torch.compile(model)  # type: ignore[no-any-return, unused-ignore]
    return torch.compile(model, backend=backend, options=dict(options))


def differing(eager: Run, rung: Run) -> list[str]:
    return [f"token {n} is {b}, eager's is {a}" for n, (a, b) in
            enumerate(zip(eager.tokens, rung.tokens, strict=True)) if a != b]


def _gap(n: int, exact: torch.Tensor, eager: Run, rung: Run) -> Iterator[str]:
    """Why token `n` is worse than eager's error allows; nothing if it is not."""
    gap = float(exact.max() - exact[rung.tokens[n]])
    error = float((eager.logits[n].double() - exact).abs().max())
    if gap > error:
        yield (f"token {n} lies {gap:.3g} below the best logit, eager's error is {error:.3g}")


def _report(events: Sequence[Event]) -> Iterator[str]:
    """Kernels and remaining calls of each graph that Rung compiled, and graphs that it declined."""
    for e in events:
        if e.kind == "compiled":
            yield from _graph(e.data["history"].at("kernel"), events)
        elif (e.kind, e.place) == ("declined", "backend"):
            yield f"a graph runs without rung: {e.detail}"


def _graph(module: Module, events: Sequence[Event]) -> Iterator[str]:
    reasons = {e.subject: e.detail for e in events if (e.kind, e.place) == ("declined", "lower")}
    kernels, calls = launched(module)
    yield (f"graph: {kernels.total()} launches of {len(kernels)} kernels, "
           f"{calls.total()} calls of ATen")
    yield "  kernels: " + ", ".join(_times(kernels))
    if calls:
        yield "  ATen: " + ", ".join(f"{x} ({reasons.get(x.split(' ')[0], 'layout')})"
                                     for x in _times(calls))


def _times(counts: Counter[str]) -> list[str]:
    return [name + (f" x{n}" if n > 1 else "") for name, n in counts.most_common()]


def _tensor(out: Any) -> torch.Tensor:
    found: torch.Tensor = getattr(out, "logits", out)
    return found


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


def options(argv: Sequence[str] | None) -> Request:
    made = argparse.ArgumentParser(prog="python -m rung.tools.demo", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--no-inductor", dest="inductor", action="store_false",
                      help="do not measure Inductor, which takes a minute to compile")
    made.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all?")
    made.add_argument("--tokens", type=int, default=32, help="tokens to generate (default: 32)")
    made.add_argument("--layers", type=int, help="layers of the Llama (default: 22)")
    made.add_argument("--llama-only", dest="others", action="store_false",
                      help="without GPT-2 and ResNet-50")
    args = made.parse_args(argv)
    sizes = models.TINY if args.quick else models.LLAMA
    sizes = replace(sizes, layers=args.layers or sizes.layers)
    return Request(args.inductor, sizes, max(2, args.tokens), args.others)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; gives the exit code."""
    return Demo(options(argv)).run()


if __name__ == "__main__":
    sys.exit(main())
