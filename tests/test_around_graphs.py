"""Modules and Python around the graphs: state, structures, modes, threads, and what is released.

Marks are explained in `tests/test_behaviours.py`.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from agreement import leaves, outcome, rung, same
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("fresh")


class Counter(nn.Module):
    """Buffers that change and scale the result; the class is read, and written to, as well."""

    factor = 2.0
    seen: ClassVar[list[torch.Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("average", torch.ones(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        self.average.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        Counter.seen.append(x)
        return self.norm(x) * self.calls * self.factor + len(Counter.seen), x / self.average


@pytest.mark.report(149, 157, 161)
def test_state_changes_as_in_eager() -> None:
    theirs = Counter().double()
    ours, results = copy.deepcopy(theirs), []
    for model, run in ((theirs, theirs), (ours, rung(ours))):
        Counter.seen, found = [], []
        torch.manual_seed(0)
        for n, factor in ((3, 2.0), (3, 5.0), (6, 0.5)):
            Counter.factor = factor
            x = torch.randn(n, 4, dtype=torch.float64, requires_grad=True)
            outs = run(x)
            sum(y.square().sum() for y in outs).backward()
            found += [*outs, x.grad]
            model.train(n == 3)
        results.append([*found, *model.state_dict().values(), *Counter.seen,
                        *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        same(b, a)


@pytest.mark.report(151)
def test_a_hook_on_gradients_that_comes_later() -> None:
    def grads(model: nn.Module, run: Callable[..., Any]) -> list[torch.Tensor]:
        found = []
        for _ in range(2):
            found += outcome(run, [torch.ones(3, requires_grad=True)])[1]
            model.register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
        return found
    theirs = nn.Linear(3, 3)
    ours = copy.deepcopy(theirs)
    want = grads(theirs, theirs)
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):  # else Dynamo never looks
        for a, b in zip(grads(ours, rung(ours)), want, strict=True):
            same(a, b)


@pytest.mark.report(153, 155)
def test_grad_modes_as_in_eager() -> None:
    model = nn.Linear(3, 4)
    def fn(x: torch.Tensor) -> Any:
        with torch.no_grad():
            y = x.abs().max() + 1
        z = x / y
        with torch.inference_mode(False), torch.set_grad_enabled(False):
            w = x * 2
        return y, z, z.detach() * x, w, model(x), torch.is_grad_enabled()
    run = rung(fn)
    for enabled in (False, True, False, True):
        found = []
        for f in (fn, run):
            with torch.set_grad_enabled(enabled):
                outs, grads, _ = outcome(f, [torch.tensor([1.0, -4.0, 2.0], requires_grad=True)])
            found.append([*outs, *(getattr(x, "requires_grad", x) for x in outs), *grads])
        for a, b in zip(*found, strict=True):
            same(b, a)


def test_gradients_of_what_autocast_leaves_out_are_in_single() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return (x @ w).sin()
    found = []
    for run in (fn, rung(fn)):
        args = [torch.linspace(-1, 1, n).view(-1, 8).requires_grad_() for n in (32, 64)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = run(*args)
        out.square().sum().backward()
        found.append([out, *(x.grad for x in args)])
    for a, b in zip(*found, strict=True):
        same(b, a)


Pair = namedtuple("Pair", "sum parts")


class Sum(namedtuple("Sum", "left right")):
    __slots__ = ()

    def __add__(self, other: Any) -> Any:
        return Sum(self.left + other.left, self.right * other.right)


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None
    info: dict[str, Any] = field(default_factory=dict)


@pytest.mark.report(165)
def test_structures_with_operators_of_their_own() -> None:
    def fn(x: torch.Tensor) -> Any:
        both = Sum(x.sin(), x.cos()) + Sum(x.relu(), x.tanh())
        return both, both.left * 0.5 - both.right.exp()
    x = torch.randn(3)
    got, want = rung(fn)(x), fn(x)
    assert type(got[0]) is Sum
    for a, b in zip(leaves(got), leaves(want), strict=True):
        same(a, b)


@pytest.mark.report(163)
def test_structures_come_back_as_they_are() -> None:
    def fn(x: torch.Tensor, trained: bool) -> Any:
        ordered = OrderedDict(b=x + 1, a=[x * 2, None, (x.sum(),)])
        lists = defaultdict(list)
        lists["k"].append(x - 1)
        out = Output(x * 3, x.mean() if trained else None, {"n": x.shape[0], "name": "y"})
        return out, {"pair": Pair(x.sum(), [x, (x * 2, None, 3)]), "size": x.shape, 1: "text"}, (
            ordered, lists, (), [], None, len(x), x.dtype)
    run, x = rung(fn), torch.randn(2, 3)
    for trained in (True, False):
        (mine, got, others), (theirs, want, rest) = run(x, trained), fn(x, trained)
        assert type(mine) is Output and mine.info == theirs.info
        assert type(got["pair"]) is Pair and list(got) == list(want)
        assert type(got["size"]) is torch.Size and got["size"] == want["size"]
        assert [type(y) for y in others] == [type(y) for y in rest]
        assert list(others[0]) == ["b", "a"]
        for a, b in zip(leaves((mine.logits, mine.loss, got, others)),
                        leaves((theirs.logits, theirs.loss, want, rest)), strict=True):
            same(a, b)


@pytest.mark.report(137)
def test_random_numbers_are_eagers() -> None:
    def fn(x: torch.Tensor) -> Any:
        y = F.dropout(x, 0.3)
        z = torch.conv2d(torch.randn(2, 3, 4, 4), torch.randn(4, 3, 3, 3), padding=1)
        return (y + torch.rand_like(x), torch.randn(3), torch.randperm(5), z,
                torch.randint(0, 10, (4,)), torch.bernoulli(torch.full((5,), 0.3)))
    results = []
    for f in (fn, rung(fn)):
        torch.manual_seed(5)
        results.append([*f(torch.ones(40)), torch.rand(2)])
    for a, b in zip(*results, strict=True):
        same(b, a)


class Recurrent(nn.Module):
    """Recurrent layers of torch, and a cell that is applied step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(3, 4, num_layers=2, batch_first=True, bidirectional=True)
        self.cell = nn.GRUCell(8, 5)

    def forward(self, x: torch.Tensor) -> Any:
        y, (h, _) = self.layers(x)
        state = torch.zeros(len(x), 5)
        for n in range(x.shape[1]):
            state = self.cell(y[:, n], state)
        return y, h, state


@pytest.mark.report(141)
def test_recurrent_layers_and_hooks() -> None:
    model, found = Recurrent(), []
    seen: list[int] = []
    model.register_forward_hook(lambda *_: seen.append(1))
    for run in (model, rung(model)):
        x = torch.linspace(-1, 1, 24).view(2, 4, 3).requires_grad_()
        outs = leaves(run(x))
        sum(y.square().sum() for y in outs).backward()
        found.append([*outs, x.grad, *(p.grad for p in model.parameters())])
        model.zero_grad()
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a)
    assert len(seen) == 2


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("grad", [False, True])
def test_recurrent_layers_in_graphs(kind: type[nn.RNNBase], grad: bool) -> None:
    model, found = kind(3, 4, num_layers=2), []
    with torch._dynamo.config.patch(allow_rnn=True), torch.set_grad_enabled(grad):
        for run in (model, rung(model, strict=not (grad and kind is nn.LSTM))):  # see faults.py
            outs, grads, _ = outcome(run, [torch.linspace(-1, 1, 24).view(4, 2, 3).requires_grad_(
                grad)])
            found.append([*outs, *grads])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a)


COUNT = 0


@pytest.mark.report(159)
def test_what_python_does_besides_is_done_in_each_call() -> None:
    class Seen:
        calls, last, shapes = 0, None, list[torch.Size]()

    def fn(x: torch.Tensor, seen: Any, counted: dict[str, int]) -> torch.Tensor:
        global COUNT
        COUNT += 1
        seen.calls += 1
        seen.shapes.append(x.shape)
        seen.last = x * 2
        counted["calls"] += 2
        return x + seen.calls + counted["calls"] + COUNT
    results = []
    for run in (fn, rung(fn, dynamic=False)):
        seen, counted = Seen(), {"calls": 0}
        seen.shapes = []
        globals()["COUNT"] = 0
        outs = [run(torch.ones(n), seen, counted) for n in (2, 2, 3)]
        results.append([*outs, seen.last, seen.calls, seen.shapes, counted, COUNT])
    for got, want in zip(results[1], results[0], strict=True):
        same(got, want)


@pytest.mark.report(177)
def test_rows_that_a_mask_picks_are_normed_and_put_back() -> None:
    def fn(h: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        out = h.clone()
        out[m] = F.batch_norm(h[m], None, None, training=True)
        return out.sin()
    run = rung(fn)
    for n in (9, 7):
        found = []
        for f in (fn, run):
            h = torch.arange(4.0 * n).view(n, 4).cos().requires_grad_()
            y = f(h, torch.arange(n) % 3 != 0)
            y.sum().backward()
            found.append((y.detach(), h.grad))
        for a, b in zip(found[1], found[0], strict=True):
            same(a, b)


@pytest.mark.report(127)
def test_a_result_is_an_argument_of_the_next_call() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x.cumsum(0)) + x.flip(0)
    run, ours, kept = rung(fn), torch.randn(8, 3), []
    theirs = ours.clone()
    for _ in range(4):
        ours, theirs = run(ours), fn(theirs)
        kept.append((ours, ours.clone()))
    torch.testing.assert_close(ours, theirs)
    assert all(torch.equal(a, b) for a, b in kept)  # no later call writes into a result


@pytest.mark.report(187)
def test_functions_that_differ_in_a_constant() -> None:
    def make(k: float, kept: torch.Tensor, dtype: torch.dtype) -> Callable[..., Any]:
        return lambda x: x * k + torch.tensor([k, 2.0], dtype=dtype) - kept.sum()
    made = [make(k, kept, dtype) for k, kept, dtype in (
        (1.5, torch.ones(2), torch.float32), (2.5, torch.ones(2), torch.float32),
        (-0.0, torch.ones(2), torch.float32), (1.5, torch.zeros(2), torch.float32),
        (1.5, torch.ones(2), torch.float64))]
    compiled = [rung(fn) for fn in made]
    for n in (1, 2):
        for run, fn in zip(compiled, made, strict=True):
            same(run(torch.full((2,), n)), fn(torch.full((2,), n)))


@pytest.mark.report(189)
def _sorted(x: torch.Tensor) -> Any:
    return x.sort().values.reshape(12, 4).clone(), x * 2


def _columns(x: torch.Tensor) -> Any:
    y = torch.exp(x.transpose(1, 2) * 3)
    return y, (y * y).sum(1)


@pytest.mark.parametrize("fn", [_sorted, _columns])
def test_results_can_be_written_to(fn: Callable[..., Any]) -> None:
    """Autograd forbids writes to one of several views that a call gives, and later ones to a view
    made without gradients."""
    x, scale = torch.randn(2, 3, 8, requires_grad=True), torch.ones((), requires_grad=True)
    for run in (rung(fn), fn):
        with torch.no_grad():
            for out in run(x):
                assert not out._is_view()
                out.mul_(scale)
        first, second = run(x)
        assert not first._is_view() and not second._is_view()
        first.mul_(scale)
        if fn is _columns:  # the backward pass needs what was there before
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                second.sum().backward()


def test_calls_from_several_threads() -> None:
    run, wrong = rung(lambda x: torch.softmax(x @ x.t(), -1).sum(0)), []
    def work(seed: int) -> None:
        for n in range(1, 5):
            x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
            if not torch.allclose(run(x), torch.softmax(x @ x.t(), -1).sum(0), atol=1e-5):
                wrong.append((seed, n))
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


FIRST = """
import threading, torch
start, right = threading.Barrier(8), []
def work(n):
    start.wait()
    x = torch.full((n + 2,), float(n))
    right.append(torch.equal(torch.compile(lambda x: x * 2 + 1, backend="rung")(x), x * 2 + 1))
threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert right == [True] * 8, right
"""


@pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo itself dies of it")
def test_the_first_calls_of_a_process_may_be_in_several_threads() -> None:
    """Each looks the backend up in torch's registry, which takes a name once."""
    subprocess.run([sys.executable, "-c", FIRST], check=True, timeout=120)


def test_tangents_of_forward_mode_pass() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * x
    x, tangent, run = torch.randn(5), torch.randn(5), rung(fn, strict=False)
    run(x)
    ahead = torch.autograd.forward_ad
    with ahead.dual_level():
        got, want = (ahead.unpack_dual(f(ahead.make_dual(x, tangent))) for f in (run, fn))
        same(got.primal, want.primal)
        assert got.tangent is not None
        same(got.tangent, want.tangent)


def test_compiled_autograd() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(3, 4)
    want = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    compiled = torch._dynamo.compiled_autograd._enable(torch.compile(backend="rung"))
    with compiled:
        rung(model)(x).sum().backward()
    for p, grad in zip(model.parameters(), want, strict=True):
        same(p.grad, grad)


def test_learning_rates_in_tensors() -> None:
    weights = [torch.ones(3, requires_grad=True) for _ in range(2)]
    rate = torch.tensor(0.5)
    def step(w: torch.Tensor, g: torch.Tensor, rate: torch.Tensor) -> None:
        with torch.no_grad():
            w.sub_(g * rate)
    run = rung(step)
    for n in range(3):
        for w, f in zip(weights, (step, run), strict=True):
            f(w, torch.full((3,), n + 1.0), rate)
        rate.mul_(0.5)
        same(weights[1].detach(), weights[0].detach())
