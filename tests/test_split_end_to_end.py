"""Long folds on two threads against float64: split where that pays, whole on one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functions import check_against_float64
from test_end_to_end import DTYPES, by_dtype, rung

from rung.core import trace
from rung.loop import split


def total(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


def largest(x: torch.Tensor) -> torch.Tensor:
    return x.amax()


def mean(x: torch.Tensor) -> torch.Tensor:
    return x.mean()


def columns(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.125, -1) @ v


def vector(n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(n).to(dtype)]


def running(x: torch.Tensor) -> torch.Tensor:
    return torch.cumsum(x, 0)


def narrow(n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randint(-8, 9, (n, 4)).to(dtype)]  # any order of float32 sums of these is exact


def cached(n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(1, 1, m, 16).to(dtype) for m in (1, n, n)]


Make = Callable[[int, torch.dtype], list[torch.Tensor]]
LONG: dict[str, tuple[Callable[..., Any], Make, tuple[int, int]]] = {
    "total": (total, vector, (1 << 20, (1 << 20) - 3)),
    "largest": (largest, vector, (1 << 20, (1 << 20) - 3)),
    "mean": (mean, vector, (1 << 20, (1 << 20) - 3)),
    "columns": (columns, narrow, (1 << 20, (1 << 20) - 3)),
    "attend": (attend, cached, (8192, 8191)),
    "running": (running, vector, (1 << 16, (1 << 16) - 3))}


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch._dynamo.reset()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", DTYPES, ids=by_dtype)
@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("name", LONG)
def test_split_folds_give_the_answer(name: str, dynamic: bool, dtype: torch.dtype,
                                     two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "GAIN", 10.0)  # also where the model does not promise much
    fn, make, sizes = LONG[name]
    compiled = rung(fn, dynamic)
    with torch.no_grad(), trace.listen() as events:
        for size in (*sizes, 5) if dynamic else sizes:
            args = make(size, dtype)
            check_against_float64(compiled(*args), fn, args)
    assert [e for e in events if (e.kind, e.place) == ("fired", "split")]


@pytest.mark.parametrize(("threads", "splits"), [(1, False), (2, True)])
def test_the_policy_splits_a_long_sum_on_two_threads_only(threads: int, splits: bool,
                                                          two_threads: None) -> None:
    torch.set_num_threads(threads)
    (x,) = vector(1 << 22, torch.float32)
    with trace.listen() as events:
        check_against_float64(rung(total)(x), total, [x])
    fired = [e.subject for e in events if (e.kind, e.place) == ("fired", "split")]
    assert bool(fired) == splits
