"""The functions that are followed from `torch.compile` to running code, with their arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

Tensors = list[torch.Tensor]


def relu_mm(x: torch.Tensor, bias: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu((x + bias) @ w)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def column_sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0)


def floor_add(x: torch.Tensor) -> torch.Tensor:
    return torch.floor(x) + 1


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = x.double() if x.dtype == torch.float64 else x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def cache_step(x: torch.Tensor, norm: torch.Tensor, wq: torch.Tensor, wk: torch.Tensor,
               cos: torch.Tensor, sin: torch.Tensor, cache: torch.Tensor, pos: torch.Tensor
               ) -> torch.Tensor:
    """One token: its key goes into the cache [1,h,t,d] at `pos`, which it then attends to."""
    heads, length, d = cache.shape[1:]
    h = rms_norm(x, norm)
    q, k = ((h @ w).view(1, 1, heads, d).transpose(1, 2) for w in (wq, wk))
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    cache.index_copy_(2, pos, k)
    scores = (q @ cache.transpose(-1, -2)) * d ** -0.5
    late = torch.arange(length) > pos
    scores = scores.masked_fill(late, float("-inf"))
    return torch.softmax(scores, -1) @ cache


@dataclass(frozen=True)
class Case:
    """A function, arguments for a size, and which dimension of which argument that size is."""

    fn: Callable[..., torch.Tensor]
    args: Callable[[int, torch.dtype], Tensors]
    dynamic: tuple[int, int]


def _draw(dtype: torch.dtype, *shapes: tuple[int, ...]) -> Tensors:
    return [torch.randn(*shape).to(dtype) for shape in shapes]


def _step_args(length: int, dtype: torch.dtype) -> Tensors:
    d, heads = 32, 2
    x, norm, cache = _draw(dtype, (1, 1, 64), (64,), (1, heads, length, d))
    ws = [w / 8 for w in _draw(dtype, (64, heads * d), (64, heads * d))]
    angle = torch.rand(d)
    pos = torch.tensor([min(3, length - 1)])
    return [x, norm, *ws, angle.cos().to(dtype), angle.sin().to(dtype), cache, pos]


CASES: dict[str, Case] = {
    "relu_mm": Case(relu_mm, lambda n, t: _draw(t, (n, 96), (96,), (96, 80)), (0, 0)),
    "relu_mm_columns": Case(relu_mm, lambda n, t: _draw(t, (17, 96), (96,), (96, n)), (2, 1)),
    "softmax": Case(softmax, lambda n, t: _draw(t, (24, n)), (0, 1)),
    "column_sum": Case(column_sum, lambda n, t: _draw(t, (n, 72)), (0, 0)),
    "floor_add": Case(floor_add, lambda n, t: _draw(t, (12, n)), (0, 1)),
    "cache_step": Case(cache_step, _step_args, (6, 2)),
}


# ---- graphs of several kernels: functions, and what makes their arguments
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


GRAPHS: dict[str, tuple[Callable[..., Any], Callable[[], list[torch.Tensor]]]] = {
    "block": (_block, lambda: [torch.randn(5, 24), torch.randn(24), torch.randn(24, 24),
                               torch.randn(24, 24)]),
    "pooled": (_pooled, lambda: [torch.randn(3, 5, 4, 4), torch.randn(5, 6)]),
    "gathered": (_gathered, lambda: [torch.randn(7, 12), torch.randint(0, 7, (3, 5))]),
}


def copies(args: Tensors, dtype: torch.dtype | None = None) -> Tensors:
    """Clones, the floating ones in `dtype`."""
    return [a.clone().to(dtype) if dtype and a.is_floating_point() else a.clone() for a in args]


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference."""
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def check_against_float64(got: Any, fn: Callable[..., Any], args: Tensors) -> None:
    """`got` is as near to the result in float64 as eager's is, up to a small factor."""
    exact = fn(*copies(args, torch.float64))
    eager = fn(*copies(args))
    assert (got.dtype, got.shape, got.stride()) == (eager.dtype, eager.shape, eager.stride())
    slack = 4 * torch.finfo(eager.dtype).eps * float(exact.abs().max()) if exact.numel() else 0.0
    assert worst(got, exact) <= 4 * worst(eager, exact) + slack
