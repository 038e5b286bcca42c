"""Small models with random weights: as near to float64 as eager is, and training as eager does.

The quick ones run always; `make test-all` runs all, dynamic and in bf16 too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rung.tools.models import MODELS, Inputs, loss, output

pytestmark = pytest.mark.usefixtures("fresh")
pytest.importorskip("transformers")
QUICK = ("gpt2", "resnet", "lstm", "whisper")
NAMES = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
SETTINGS = pytest.mark.parametrize("dynamic, dtype", [
    (False, torch.float32), pytest.param(False, torch.bfloat16, marks=pytest.mark.slow),
    pytest.param(True, torch.float32, marks=pytest.mark.slow)], ids=str)


def made(name: str) -> tuple[nn.Module, Callable[[int, int], Inputs]]:
    """A tiny model, and what gives it random arguments of a batch size and a length."""
    return MODELS[name].build(True), partial(MODELS[name].inputs, True)


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {k: x.to(dtype) if x.is_floating_point() else x for k, x in inputs.items()}


def compiled(fn: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
    return torch.compile(fn, backend="rung", dynamic=True if dynamic else None,
                         options={"strict": True})


def near(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """`got` is as far from float64 as eager is, up to a small factor."""
    assert (got.dtype, got.shape, got.stride()) == (eager.dtype, eager.shape, eager.stride())
    slack = 8 * torch.finfo(eager.dtype).eps * float(exact.abs().max())
    far = [float((x.double() - exact).abs().max()) for x in (got, eager)]
    assert far[0] <= 4 * far[1] + slack


@SETTINGS
@pytest.mark.parametrize("name", NAMES)
def test_inference(name: str, dynamic: bool, dtype: torch.dtype) -> None:
    model, inputs = made(name)
    model = model.to(dtype).eval()
    exact, fn = copy.deepcopy(model).double(), compiled(lambda x: output(model, x), dynamic)
    for batch, length in ((2, 7), (1, 7), (3, 64), (7, 2)) if dynamic else ((2, 7),):
        given = cast(inputs(batch, length), dtype)
        with torch.no_grad():
            eager = output(model, given)
            try:
                judge = output(exact, cast(given, torch.float64))
            except RuntimeError:  # the grouped products of experts have no float64
                judge = eager.double()
            near(fn(given), eager, judge)


def trained(model: nn.Module, batches: list[Inputs], through: Callable[..., Any],
            rate: float = 1e-3) -> list[float]:
    """The losses of a step of AdamW on each batch; random numbers are drawn from one seed."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    step, losses = through(partial(loss, model)), []
    for inputs in batches:
        optimizer.zero_grad()
        first = next(iter(inputs.values()))
        found = step(inputs, torch.arange(first.shape[0], device=first.device))
        found.backward()
        optimizer.step()
        losses.append(float(found.detach()))
    return losses


@SETTINGS
@pytest.mark.parametrize("name", NAMES)
def test_training(name: str, dynamic: bool, dtype: torch.dtype) -> None:
    model, inputs = made(name)
    model = model.to(dtype).train()
    sizes = ((2, 7), (3, 9), (4, 33)) if dynamic else ((2, 7),) * 3
    batches = [cast(inputs(*size), dtype) for size in sizes]
    theirs, ours = copy.deepcopy(model), model
    want = trained(theirs, batches, lambda fn: fn)
    got = trained(ours, batches, lambda fn: compiled(fn, dynamic))
    tolerance = 2e-5 if dtype is torch.float32 else 3e-2
    assert got == pytest.approx(want, rel=tolerance, abs=tolerance)
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("bert", marks=pytest.mark.slow)])
def test_training_with_dropout(name: str) -> None:
    """In embeddings, attention and after each part of a layer: the same draws, step by step."""
    model, inputs = made(name)
    batches, still = [inputs(2, 7)] * 4, copy.deepcopy(model).train()
    for part in model.train().modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.1
    want = trained(copy.deepcopy(model), batches, lambda fn: fn)
    got = trained(model, batches, lambda fn: compiled(fn, False))
    assert got == pytest.approx(want, rel=2e-5)
    assert want[0] != pytest.approx(trained(still, batches, lambda fn: fn)[0], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "resnet", "vit"])
def test_twenty_steps_at_full_size(name: str) -> None:
    """On two batches in turn, so that losses fall; dropout draws eager's numbers. Rung is about as
    far from eager as eager is from itself on another number of threads, which sums in another
    order: batch norm over two images makes much of that."""
    kind, threads = MODELS[name], torch.get_num_threads()
    batches = [kind.inputs(False, 2, 32) for _ in range(2)] * 10
    model = kind.build(False).train()

    def losses(through: Callable[..., Any]) -> np.ndarray:
        return np.array(trained(copy.deepcopy(model), batches, through, 1e-4))

    want, got = losses(lambda fn: fn), losses(lambda fn: compiled(fn, False))
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        again = losses(lambda fn: fn)
    finally:
        torch.set_num_threads(threads)
    assert abs(got - want).max() <= 4 * abs(again - want).max() + 1e-4
    assert want[-1] < want[0]
