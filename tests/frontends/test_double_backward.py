"""Gradients of gradients through compiled functions: as in eager, or refused with torch's error."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from agreement import rung
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64,
                        requires_grad=True)
            for shape in ((3, 4), (4, 3))]


def orders(fn: Callable[..., Any], xs: list[torch.Tensor], count: int = 3) -> list[Any]:
    """The gradients of `fn` of all orders up to `count`."""
    outs = [x for x in torch.utils._pytree.tree_leaves(fn(*xs)) if x.requires_grad]
    found = []
    for _ in range(count):
        outs = list(torch.autograd.grad([(x ** 2).sum() for x in outs], xs, create_graph=True))
        found += outs
    return found


def _updates(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.mul_(w.t())
    return y


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "a product": lambda x, w: torch.tanh(x @ w) + 1,
    "views of arguments": lambda x, w: (x.t(), x.view(-1)[1:] * 2, (x * w.t()).exp()),
    "views of a result": lambda x, w: (z := (x @ w).sin(), z.t(), z[0]),
    "a result that needs no gradient": lambda x, w: (x.detach() + 1, x * x * w.t(), x > 0),
    "an update": _updates,
    "padding that goes round": lambda x, w: F.pad(x[None], (1, 2), mode="circular").sin() * w.sum(),
    "a norm": lambda x, w: F.layer_norm(x, (4,)) @ F.softmax(w, 0),
    "nothing that is kept": lambda x, w: (x + w.t()) * 2,
    "an argument of which nothing is kept": lambda x, w: x.view(-1)[2:] + w.sin().view(-1)[2:],
    "numbers": lambda x, w: (x ** 4).sum() + torch.tanh(w).prod(),
    "the same argument twice": lambda x, w: x * x * x + w.t(),
}


@pytest.mark.report(145)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_all_orders_are_eagers(name: str, dynamic: bool) -> None:
    fn = FUNCTIONS[name]
    compiled = rung(fn, dynamic=dynamic)
    for got, want in zip(orders(compiled, inputs()), orders(fn, inputs()), strict=True):
        torch.testing.assert_close(got, want)


def test_a_penalty_on_the_gradient_trains_parameters() -> None:
    def step(model: nn.Module, run: Callable[..., Any]) -> list[Any]:
        x = inputs()[0]
        grad, = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        grad.norm().backward()
        return [p.grad for p in model.parameters()]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 1)).double()
    want = [None if g is None else g.clone() for g in step(model, model)]
    model.zero_grad()
    got = step(model, rung(model))
    torch.testing.assert_close(got, want)


class Normed(nn.Module):
    """Statistics that are updated, random numbers, and a buffer that scales the result."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.ones(()))
        self.double()

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.dropout(self.norm(x) * self.calls.clone(), 0.4) + F.instance_norm(
            w[None], torch.zeros(4).double(), torch.ones(4).double()).sum()
        self.calls += 1
        return F.rrelu(self.linear(y), 0.1, 0.3, training=True).sin()


def test_updated_statistics_and_random_numbers_are_eagers() -> None:
    def step(compile: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(0)
        model = Normed()
        run, found = compile(model), list[Any]()
        for _ in range(2):
            found += orders(run, inputs(), 2)
        return [*found, *model.buffers(), torch.rand(3)]
    torch.testing.assert_close(step(rung), step(lambda model: model))


def test_random_numbers_under_checkpointing_are_eagers() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> Any:
        return checkpoint(lambda x: F.dropout(x.sin() @ w, 0.5) ** 2, x, use_reentrant=False)
    found = []
    for run in (rung(fn), fn):
        torch.manual_seed(0)
        found.append([*orders(run, inputs(), 2), torch.rand(2)])
    torch.testing.assert_close(*found)


def test_an_input_changed_since_is_refused() -> None:
    x, w = inputs()
    y = x * 1
    out = rung(lambda y, w: (y * w.t()) ** 2)(y, w)
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), w, create_graph=True)


def test_inputs_are_released_after_the_last_backward_pass() -> None:
    x, _ = inputs()
    y = x * 1
    gone = weakref.ref(y)
    out = rung(lambda y: (y + 1) * 2)(y)
    del y
    out.sum().backward()
    assert gone() is None and x.grad is not None


def test_an_input_that_autograd_does_not_keep_is_released_at_once() -> None:
    x, w = inputs()
    y, z = x * 1, w * 1
    gone, kept = weakref.ref(y), weakref.ref(z)
    out = rung(lambda y, z: (y + 1) * 2 + z.sin().t())(y, z)
    del y, z
    assert gone() is None and kept() is not None
    out.sum().backward()
    assert kept() is None and x.grad is not None
