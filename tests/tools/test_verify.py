"""`options={"verify": share}`: which calls are compared, and what happens at a difference."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agreement import sharing
from planted import other_checks, plant
from torch import Tensor, nn

from rung import entry
from rung.core.expr import parse_expr
from rung.core.options import Options
from rung.core.types import BF16, F16, F32
from rung.frontends.torch import generators
from rung.frontends.torch.tensors import cloned
from rung.tools import judge, verify
from rung.tools.capture import capture
from rung.tools.given import Given
from rung.tools.verify import Verified


def compiled(fn: Callable[..., Any], share: float = 1.0) -> Callable[..., Any]:
    torch._dynamo.reset()
    entry.rung.reset()
    return torch.compile(fn, backend=entry.rung, fullgraph=True, dynamic=False,
                         options={"verify": share, "strict": True, "target": "cpu.base"})


def two_kernels(x: Tensor, w: Tensor) -> Tensor:
    y = torch.floor(x) * 2
    z = y.cumsum(0).sort()[0]
    return z + w


def test_the_share_of_calls_that_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real = Verified.checked
    monkeypatch.setattr(Verified, "checked", lambda self, args: (
        seen.append(self.calls), real(self, args))[1])
    run = compiled(lambda x: torch.floor(x) + 1, 0.25)
    with torch.no_grad():
        for _ in range(9):
            run(torch.randn(5))
    assert seen == [1, 5, 9]


def test_right_graphs_stay_compiled(caplog: pytest.LogCaptureFixture,
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_warn", None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
    twin = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
    twin.load_state_dict(model.state_dict())
    run = compiled(model)
    for _ in range(2):
        x = torch.randn(6, 8)
        state = torch.get_rng_state()
        run(x).square().sum().backward()
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        twin(x).square().sum().backward()
        assert torch.equal(after, torch.get_rng_state())
    for a, b in zip((*model.parameters(), *model.buffers()),
                    (*twin.parameters(), *twin.buffers()), strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


def test_a_planted_bug(monkeypatch: pytest.MonkeyPatch, settings: Callable[..., None],
                       caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    plant(monkeypatch, "loop.simplify")
    settings(keep=tmp_path)
    run, x, w = compiled(two_kernels), torch.randn(6, 9), torch.randn(9)
    with caplog.at_level(logging.WARNING, logger="rung"), torch.no_grad():
        for _ in range(3):
            assert torch.equal(run(x, w), two_kernels(x, w))
    (message,) = [r.message for r in caplog.records if r.name == "rung"]
    assert message.startswith("rung: verify: it differs from eager in result 0 by ")
    line = two_kernels.__code__.co_firstlineno + 3
    assert re.search(rf"first in kernel \w+ \({re.escape(__file__)}:{line}\)", message)
    assert message.endswith("this graph runs in eager from now on")
    path = re.search(r"reproducer: (\S+\.py);", message)
    assert path and Path(path[1]).parent == tmp_path
    done = subprocess.run([sys.executable, path[1]], capture_output=True, text=True, check=False,
                          timeout=200)
    assert (done.returncode, done.stdout) == (
        0, "0 of 3 results and arguments are wrong\n"), done.stderr  # there the bug is not planted


def looked_up(table: Tensor, i: Tensor) -> Tensor:
    return table.index_select(0, i * 2) + 1


PLACES = {"inside": 1, "outside": 5}
ERRORS = {  # what happens to the check, where the index points, and what the warning says
    "only here": ({"hi": parse_expr("0")}, "inside", "IndexError(.*) instead of None"),
    "only in eager": ({"hi": parse_expr("99")}, "outside", "None instead of IndexError(.*)"),
    "of another class": ({"error": "RuntimeError"}, "outside",
                         "RuntimeError(.*) instead of IndexError(.*)"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error(name: str, monkeypatch: pytest.MonkeyPatch, settings: Callable[..., None],
                  caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    changes, place, told = ERRORS[name]
    plant(monkeypatch, "loop.simplify", other_checks(**changes))
    settings(keep=tmp_path)
    run, whole = compiled(looked_up), torch.randn(20, 3)
    table, i = whole[:10], torch.tensor([0, PLACES[place]])  # what is outside is memory still

    def call(fn: Callable[..., Any]) -> Any:
        with torch.no_grad():
            return verify.outcome(lambda args: fn(*args), [table, i])
    with caplog.at_level(logging.WARNING, logger="rung"):
        for _ in range(2):
            ours, eager = call(run), call(looked_up)
            assert type(ours.error) is type(eager.error)
            assert eager.error or torch.equal(ours.results, eager.results)
    (message,) = [r.message for r in caplog.records if r.name == "rung"]
    assert re.match(f"rung: verify: it differs from eager in what it raises: {told}; first in",
                    message)
    line = looked_up.__code__.co_firstlineno + 1
    assert f"{__file__}:{line}" in message and "index_select" in message
    path = re.search(r"reproducer: (\S+\.py);", message)
    assert path
    done = subprocess.run([sys.executable, path[1]], capture_output=True, text=True, check=False,
                          timeout=200)
    assert done.returncode == 0 and ("IndexError" in done.stdout) == (place == "outside")


def test_a_wrong_update_of_an_argument_is_mended(
        monkeypatch: pytest.MonkeyPatch, settings: Callable[..., None], tmp_path: Path) -> None:
    plant(monkeypatch, "loop.simplify")
    settings(keep=tmp_path)

    def update(cache: Tensor, x: Tensor) -> Tensor:
        cache.copy_(torch.floor(x) + cache)
        return cache * 2

    cache, x = torch.ones(7), torch.randn(7)
    right = cache.clone()
    with torch.no_grad():
        assert torch.equal(compiled(update)(cache, x), update(right, x))
    assert torch.equal(cache, right)


def test_after_a_difference_all_is_as_in_eager(
        monkeypatch: pytest.MonkeyPatch, settings: Callable[..., None], tmp_path: Path) -> None:
    """Random numbers, gradients, and arguments that share memory with others and with results."""
    plant(monkeypatch, "loop.simplify")
    settings(keep=tmp_path)

    def fn(x: Tensor, y: Tensor, w: Tensor) -> Any:
        x.copy_(torch.floor(x) + y)
        return torch.dropout(x * w, 0.5, True) + torch.rand(3), x, y

    def call(run: Callable[..., Any]) -> Any:
        torch.manual_seed(3)
        memory, w = torch.linspace(-2, 2, 9), torch.ones(3, requires_grad=True)
        memory[4] = float("nan")
        args = [memory[:3], memory[6:], w]
        outs = run(*args)
        outs[0].sum().backward()
        return [memory, *outs, w.grad, torch.rand(2)], sharing(outs, args)
    (ours, shared), (eager, wanted) = call(compiled(fn)), call(fn)
    assert shared == wanted
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_random_numbers_in_float64_are_those_of_the_graph() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.dropout(x, 0.5, True) * torch.rand(50)
    (graph,) = capture(Given("fn", fn, (torch.rand(50),)), inputs=True).graphs
    seed = generators.states()
    wanted = graph.module(*cloned(graph.inputs))
    exact = judge.widened(graph.module, graph.inputs, seed)
    assert exact and exact[0].dtype == torch.float64
    torch.testing.assert_close(exact[0].float(), wanted[0])


def test_an_argument_called_as_memory_that_nobody_wrote_is_read() -> None:
    module = torch.fx.symbolic_trace(lambda empty: (empty + 1,))
    found = judge.nudged(module, [torch.arange(3.0)], generators.states())
    assert found and torch.equal(found[0], torch.arange(3.0) + 1)


def test_an_overflow_of_eagers_excuses_nothing_else() -> None:
    exact, eager = np.array([1.0, 1e5, 3.0]), np.array([1.0, np.inf, 3.0])
    reference = judge.Reference(lambda: [exact], lambda: [[eager]])
    (found,) = judge.wrong([eager * [1, 1, 2]], [eager], 1e-2, reference)
    assert found.error == 3.0
    assert not list(judge.wrong([eager * 1.001], [eager], 1e-2, reference))


def test_integers_are_compared_exactly() -> None:
    far, near, off = np.array([10 ** 6, 0]), np.array([1.0]), np.array([1, 0])
    assert judge.difference([far, near], [far + off, near], 0.01)
    assert judge.difference([far, near], [far, near * 2], 0.01)
    assert not judge.difference([far, near], [far, near * 1.001], 0.01)


def test_what_is_left_of_numbers_that_cancel_may_be_off_by_a_rounding_of_theirs() -> None:
    far, none = np.array([4.0, -4.0]), np.array([0.0])
    for dtype, rounding in ((F16, 2.0 ** -11), (BF16, 2.0 ** -9), (F32, 2.0 ** -24)):
        bound = judge.TOLERANCE[dtype]
        assert not judge.difference([far, none], [far, none + 4 * rounding], bound)
        assert judge.difference([far, none], [far, none + bound], bound)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex32, torch.uint32])
def test_types_that_numpy_may_lack(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_warn", None)
    x = torch.arange(4.0).to(dtype)
    same, twice = compiled(lambda x: (x.clone(), x.to(torch.complex64) * 2))(x)
    assert same.dtype == dtype
    assert twice.tolist() == (x.to(torch.complex64) * 2).tolist()


@pytest.mark.parametrize("run, told", [
    (lambda args: (args[0].double() + 1,), "types or shapes"),
    (lambda args: (args[0] + 1, torch.rand(1))[:1], "the random numbers that it draws")])
def test_other_differences(run: verify.Run, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(verify, "_warn", lambda off, *rest: said.append(off))
    x = torch.rand(5)
    graph = _graph(x)
    checker = Verified(run, graph.module, graph.imported, Options(verify=1.0))
    for _ in range(2):
        state = torch.get_rng_state()
        (found,) = checker([x])
        assert torch.equal(found, x + 1) and torch.equal(torch.get_rng_state(), state)
    assert said == [told]


def test_what_is_nearer_to_float64_than_eager_is_no_bug() -> None:
    class Off(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return ((x + 1e4) - 1e4,)
    module = torch.fx.symbolic_trace(Off())
    x = torch.rand(100)
    checker = Verified(lambda args: (args[0],), module, _graph(x).imported, Options(verify=1.0))
    checker.bound = 1e-6
    assert torch.equal(checker.checked([x])[0], x) and checker.trusted


@pytest.mark.parametrize("found, trusted", [(1.0, True), (9.0, False)])
def test_what_jumps_within_a_rounding_is_no_bug(found: float, trusted: bool,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_warn", lambda *_: None)
    module = torch.fx.symbolic_trace(Jumps())
    x = torch.linspace(0.1, 3, 99)
    checker = Verified(lambda args: (torch.tensor(found), *args[1:]), module, _graph(x).imported,
                       Options(verify=1.0))
    checker.checked([x, x.sum()])
    assert checker.trusted is trusted


class Jumps(nn.Module):
    def forward(self, x: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
        return (x.sum() > limit).float(), limit


def test_whole_numbers_are_not_off_by_roundings() -> None:
    base = torch.tensor([1.0, 0.3, -2.0, 0.7, float("inf")])
    base_off, part = judge.off_by_roundings([base, base[1:3]])
    assert torch.equal(base_off == base, torch.tensor([True, False, True, False, True]))
    torch.testing.assert_close(base_off, base)
    assert torch.equal(part, base_off[1:3])


def test_numbers_as_they_are_read_and_memory_that_nobody_wrote(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_warn", None)
    x = torch.randn(4, dtype=torch.complex64).conj()
    assert torch.equal(compiled(lambda x: x * 2)(x), x * 2)
    assert torch.equal(compiled(lambda x: x * 2)(x.imag), x.imag * 2)  # a negated view
    run = compiled(lambda x: (x + 1, torch.empty_like(x), torch.empty(40, dtype=torch.int64)))
    for n in range(3):
        torch.full((40,), float(n + 1))  # what lies there next
        run(torch.zeros(40))


def test_only_what_a_graph_writes_to_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real = Verified.eager
    monkeypatch.setattr(Verified, "eager", lambda self, args: (
        seen.extend(x.data_ptr() for x in args), real(self, args))[1])

    def update(x: Tensor, count: Tensor) -> Tensor:
        return count.add_(1) * x
    x, count = torch.randn(5), torch.zeros(5)
    assert torch.equal(compiled(update)(x, count), x)
    assert x.data_ptr() in seen and count.data_ptr() not in seen
    assert count.eq(1).all()


def _graph(x: Tensor) -> Any:
    return capture(Given("f", lambda x: x + 1.0, (x,)), inputs=True).graphs[0]
