"""torch.compile on the toy machine: kernels, transfers and all, run on NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rung.tools import benchmarks, models

OPTIONS = {"strict": True, "target": "toy"}
SMALL = models.Sizes(32, 4, 2, 48, 64, 2, context=16)


def test_cache_step_runs_on_the_toy_machine() -> None:
    fn, args = benchmarks.cache_step(quick=True)
    copies = [t.clone() for t in args]
    with torch.no_grad():
        got = torch.compile(fn, backend="rung", options=OPTIONS)(*args)
        want = fn(*copies)
    torch.testing.assert_close(got, want)
    for mine, eagers in zip(args, copies, strict=True):
        torch.testing.assert_close(mine, eagers)


@pytest.mark.parametrize("build", [models.llama, models.gpt2])
def test_a_step_of_training_runs_whole(build: Callable[..., Any], fresh: None) -> None:
    pytest.importorskip("transformers")
    model = build(SMALL)
    ids = torch.randint(0, SMALL.vocabulary, (1, 6))

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(ids, labels=ids, use_cache=False).loss
        return loss

    want = torch.autograd.grad(step(ids), list(model.parameters()))
    loss = torch.compile(step, backend="rung", options=OPTIONS)(ids)
    torch.testing.assert_close(loss, step(ids))
    for mine, eagers in zip(torch.autograd.grad(loss, list(model.parameters())), want, strict=True):
        torch.testing.assert_close(mine, eagers, rtol=1e-4, atol=1e-5)


def test_a_step_of_decoding_runs_whole(fresh: None) -> None:
    pytest.importorskip("transformers")
    one, args = models.llama_step(SMALL)
    with torch.no_grad():
        want = one(*args)
        got = torch.compile(one, backend="rung", options=OPTIONS)(*args)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
