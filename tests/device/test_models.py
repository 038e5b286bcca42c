"""Tiny models on a GPU: as near to float64 as eager is, training and decoding as eager does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from test_models import cast, compiled, near, trained

from rung.tools.models import MODELS, TIMM, TINY, Decoder, Inputs, llama, output

PLACE = "cuda"
KNOWN = MODELS | TIMM


def moved(inputs: Inputs) -> Inputs:
    return {name: x.to(PLACE) for name, x in inputs.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KNOWN)
def test_inference(name: str, dtype: torch.dtype) -> None:
    if name in TIMM:
        pytest.importorskip("timm")
    model = KNOWN[name].build(True).to(PLACE, dtype).eval()
    given = cast(moved(KNOWN[name].inputs(True, 2, 7)), dtype)
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        eager = output(model, given)
        try:
            judge = output(exact, cast(given, torch.float64))
        except RuntimeError:  # the grouped products of experts have no float64
            judge = eager.double()
        near(compiled(lambda x: output(model, x), False)(given), eager, judge)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", ["gpt2", "resnet", "vit"])
def test_training(name: str, half: bool) -> None:
    """Six steps on two batches in turn, the second time through Rung: the same losses."""
    batches = [moved(KNOWN[name].inputs(True, 4, 9)) for _ in range(2)] * 3
    model = KNOWN[name].build(True).to(PLACE).train()

    def cast_in(fn: Callable[..., Any]) -> Callable[..., Any]:
        """One step: autocast keeps what it made of weights until its context ends."""
        def step(*args: Any) -> Any:
            with torch.autocast(PLACE, torch.bfloat16, enabled=half):
                return fn(*args)
        return step
    want = trained(copy.deepcopy(model), batches, cast_in)
    got = trained(model, batches, lambda fn: cast_in(compiled(fn, False)))
    assert got == pytest.approx(want, rel=3e-2 if half else 3e-4)
    assert len(set(want)) == len(want)


def test_greedy_tokens_over_a_static_cache() -> None:
    model = llama(TINY).to(PLACE)
    found = []
    for run in (model, compiled(model, False)):
        decoder: Any = Decoder(model, TINY, run)
        last, tokens = decoder.start(torch.arange(8, device=PLACE)[None]), []
        for _ in range(24):
            tokens.append(int(last.argmax()))
            last = decoder.step(torch.tensor([tokens[-1:]], device=PLACE))
        found.append((tokens, last))
    assert found[1][0] == found[0][0] and len(set(found[0][0])) > 1
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-3, atol=1e-4)
