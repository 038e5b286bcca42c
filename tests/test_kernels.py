"""Compiled kernels against their Loop IR, for graphs of real code; see `kernels.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functions import CASES
from kernels import fuzz, kernels_of
from torch.nn import functional as F

DTYPES = (torch.float32, torch.bfloat16)


def _block(x: torch.Tensor, g: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
    h = F.layer_norm(x, (x.shape[-1],), g)
    q, k = h @ w, x @ v
    scores = torch.softmax((q @ k.transpose(-1, -2)).masked_fill(q.sum(-1, True) > 2, -1e4), -1)
    return x + F.gelu(scores @ h), scores.amax(-1)


def _pooled(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = torch.relu(x + x.flip(-1))
    return y.mean((2, 3)) @ w, F.pad(y, (1, 2)).sum(0), torch.cat([x, y], 1)[:, ::2]


def _gathered(w: torch.Tensor, i: torch.Tensor) -> Any:
    e = F.embedding(i, w)
    return e * torch.rsqrt(e.pow(2).mean(-1, keepdim=True) + 1e-5), e.sum(1), (i > 0).any(1)


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[], list[torch.Tensor]]]] = {
    "block": (_block, lambda: [torch.randn(5, 24), torch.randn(24), torch.randn(24, 24),
                               torch.randn(24, 24)]),
    "pooled": (_pooled, lambda: [torch.randn(3, 5, 4, 4), torch.randn(5, 6)]),
    "gathered": (_gathered, lambda: [torch.randn(7, 12), torch.randint(0, 7, (3, 5))]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_do_what_their_loop_ir_says(name: str, dynamic: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    fn, make = FUNCTIONS[name]
    args = [x.to(dtype).requires_grad_() if x.is_floating_point() else x for x in make()]
    made = kernels_of(fn, args, dynamic)
    assert made
    for one in made:
        assert not fuzz(one), one.mapped


@pytest.mark.parametrize("name", CASES)
def test_kernels_of_the_followed_functions(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    for one in kernels_of(case.fn, case.args(13, torch.float32), True):
        assert not fuzz(one), one.mapped
