"""Kernels on any number of threads, also of those that the user starts: right, and no more of them
than torch has."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from rung.core import trace
from rung.targets.base import target
from rung.targets.cpu import build, calibrate
from rung.targets.cpu.figures import ZEN5

COUNTS = (1, 2, 4, 16, 32)
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch, fresh: None) -> Iterator[None]:
    """Forks that cost nothing, so that small kernels are shared too; torch's threads as before."""
    before = torch.get_num_threads()
    monkeypatch.setattr(calibrate, "figures", lambda *_: replace(ZEN5, fork=1e-12))
    yield
    torch.set_num_threads(before)


def residual(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x + torch.relu((x * 2) @ w.T)


def several(x: torch.Tensor) -> Any:
    """Folds over rows and columns, scans, and what is read the other way round."""
    return (torch.softmax(x, -1), x.sum(0), x.sum(1), x.sum(), x.cumsum(0), x.cumsum(1),
            x.argmax(1), F.layer_norm(x, x.shape[-1:]), x.T.contiguous() * 2, x.amax(0))


CASES: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "few rows": (several, (torch.randn(3, 1111),)),
    "few columns": (several, (torch.randn(1300, 5),)),
    "one long row": (lambda x: torch.cumsum(x, 1) + x, (torch.randn(1, 9001) / 10,)),
    "odd": (several, (torch.randn(67, 131),)),
    "one row": (residual, (torch.randn(1, 96), torch.randn(96, 96) / 10)),
    "rows and columns": (residual, (torch.randn(37, 160), torch.randn(160, 160) / 10)),
    "loss": (lambda x, y: F.cross_entropy(x, y), (torch.randn(9, 517), torch.arange(9) * 50)),
}


def shared(events: list[trace.Event]) -> int:
    """How many kernels have a loop that cores share."""
    (done,) = (e.data["history"] for e in events if e.kind == "compiled")
    return sum("core" in str(k.attr("mapping")) for k in done.at("tile").kernels)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_the_number_of_threads(name: str, count: int) -> None:
    """On as many as it was compiled for, which may be more than there are rows, and on others."""
    function, args = CASES[name]
    want = function(*args)
    torch.set_num_threads(count)
    compiled = torch.compile(function, backend="rung", options={"strict": True})
    with trace.listen() as events:
        torch.testing.assert_close(compiled(*args), want, rtol=2e-5, atol=2e-4)
    assert (shared(events) > 0) is (count > 1)
    for other in (count, 3, 1, 2 * count, count):
        torch.set_num_threads(other)
        torch.testing.assert_close(compiled(*args), want, rtol=2e-5, atol=2e-4)


ASKED = """\
extern int omp_get_max_threads(void);
int answer(void) { return omp_get_max_threads(); }
"""


@pytest.mark.parametrize("count", [1, 5])
def test_a_thread_of_the_user_shares_work_among_as_many_as_torch_has(count: int) -> None:
    torch.set_num_threads(count)
    library, found = ctypes.CDLL(str(build.build([ASKED], target("cpu").machine))), list[int]()
    compiled = torch.compile(lambda x: torch.softmax(x * 2, -1), backend="rung",
                             options={"strict": True})
    x = torch.randn(37, 160)
    compiled(x)

    def run() -> None:
        compiled(x)
        found.append(library.answer())
    one = Thread(target=run)
    one.start()
    one.join()
    assert found == [count]


def test_calls_of_several_threads_at_once() -> None:
    torch.set_num_threads(4)
    compiled = torch.compile(several, backend="rung", options={"strict": True})
    inputs = [torch.randn(23, 301) for _ in range(24)]
    compiled(inputs[0])
    with ThreadPoolExecutor(6) as pool:
        for x, out in zip(inputs, pool.map(compiled, inputs), strict=True):
            torch.testing.assert_close(out, several(x), rtol=2e-5, atol=2e-4)


class Rows(Dataset[Any]):
    """Items that a compiled function makes, with the number of threads it had."""

    def __init__(self, function: Function):
        self.function = function
        self.library = ctypes.CDLL(str(build.build([ASKED], target("cpu").machine)))

    def __len__(self) -> int:
        return 6

    def __getitem__(self, n: int) -> tuple[torch.Tensor, int]:
        return self.function(torch.full((8, 400), n / 4)), self.library.answer()


def test_workers_of_a_loader_run_on_one_thread_each() -> None:
    """Forked after threads were started here, which are not there."""
    def item(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x.cumsum(1) / 50, -1)
    torch.set_num_threads(4)
    compiled = torch.compile(item, backend="rung", options={"strict": True})
    with trace.listen() as events:
        compiled(torch.zeros(8, 400))
    assert shared(events)
    loader = DataLoader(Rows(compiled), batch_size=None, num_workers=2, timeout=60)
    made = list(loader)
    assert [int(count) for _, count in made] == [1] * 6
    for n, (out, _) in enumerate(made):
        torch.testing.assert_close(out, item(torch.full((8, 400), n / 4)))
