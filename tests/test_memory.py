"""How much memory a warm call holds at most, and that nothing is held after it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from test_end_to_end import rung
from torch import nn

from rung.frontends.torch import observed
from rung.targets.cpu import pool
from rung.tools.models import MODELS, Inputs, loss, output

Function = Callable[..., Any]
SHARE = 1.05  # of eager's peak

pytestmark = pytest.mark.usefixtures("fresh")


# --- the peak

def most(run: Callable[[], object], model: nn.Module) -> int:
    """Bytes of tensors at the worst point of a warm call, parameters included, gradients anew."""
    def before() -> None:
        model.zero_grad(set_to_none=True)
        pool.clear()
    before()
    run()
    before()
    own = (*model.parameters(), *model.buffers())
    return observed.peak_bytes(lambda: (before(), run()), before) + sum(
        s.nbytes() for s in {x.data_ptr(): x.untyped_storage() for x in own}.values())


def forward(model: nn.Module, inputs: Inputs) -> None:
    with torch.no_grad():
        output(model, inputs)


def training(model: nn.Module, inputs: Inputs) -> None:
    given = next(iter(inputs.values()))
    rows = given.numel() if given.dtype == torch.int64 else len(given)
    loss(model, inputs, torch.arange(rows) % 10).backward()


@pytest.mark.parametrize("call", [forward, training])
@pytest.mark.parametrize("name", ["gpt2", "resnet", "lstm"])
def test_the_peak_of_a_model_is_near_eagers(name: str, call: Function) -> None:
    pytest.importorskip("transformers")
    model = MODELS[name].build(True).train(call is training)
    inputs = MODELS[name].inputs(True, 4, 32)
    eager, ours = (most(lambda fn=fn: fn(model, inputs), model) for fn in (call, rung(call)))
    assert ours <= SHARE * eager


def test_a_table_that_is_read_twice_has_one_gradient() -> None:
    table = nn.Embedding(4096, 16)
    first, second = torch.randint(0, 4096, (2, 8))

    def score() -> torch.Tensor:
        hidden = torch.tanh(table(first) + table(second))
        return (hidden @ table.weight.t()).square().sum()
    eager, ours = (most(lambda fn=fn: fn().backward(), table) for fn in (score, rung(score)))
    assert ours <= eager - table.weight.nbytes


@pytest.mark.report(199)
def test_the_peak_of_a_chain_is_not_above_eagers() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        z = torch.cos(y) + x
        del y
        w = z * z - 1
        del z
        return (w.relu() + 1).mean(1)
    x, none = torch.linspace(-3, 3, 1 << 16).view(64, 1024), nn.Module()
    eager, ours = (most(lambda fn=fn: fn(x), none) for fn in (chain, rung(chain)))
    assert ours <= eager


def test_an_argument_that_is_changed_and_returned_needs_no_other_memory() -> None:
    def changed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.mul_(0.5).add_(1), x[:2].sum()
    x, none = torch.ones(64, 1024), nn.Module()
    ours = rung(changed)
    before = x.clone()
    same, total = ours(x)
    assert same is x
    torch.testing.assert_close((x, total), (before * 0.5 + 1, x[:2].sum()))
    assert most(lambda: ours(x), none) < x.nbytes


# --- after it

class Released:
    """Weak references to tensors; `gone` once nobody else holds them."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self.known = [weakref.ref(x) for x in tensors]

    @property
    def gone(self) -> bool:
        gc.collect()
        return all(x() is None for x in self.known)


def smooth(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.softmax(x @ y, -1), (x + y).sin()


def broken(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = smooth(x, y)
    torch._dynamo.graph_break()
    return a.cos(), b.exp() + x


@pytest.mark.report(201)
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("fn", [smooth, broken])
def test_inputs_and_results_are_released(fn: Function, dynamic: bool, grad: bool) -> None:
    run = rung(fn, dynamic=dynamic)
    for n in (5, 6, 7) if dynamic else (5, 5):
        given = [torch.randn(n, n, requires_grad=grad) for _ in range(2)]
        results = run(*given)
        if grad:
            sum(r.sum() for r in results).backward()
        held = Released((*given, *results))
        assert not held.gone  # they are still ours
        del given, results
        assert held.gone


@pytest.mark.parametrize("fn", [smooth, broken])
def test_results_that_autograd_holds_are_released_without_a_backward_pass(fn: Function) -> None:
    run = rung(fn)
    given = [torch.randn(6, 6, requires_grad=True) for _ in range(2)]
    results = run(*given)
    held = Released((*given, *results))
    del given, results
    assert held.gone


@pytest.mark.parametrize("verify", [0.0, 1.0])
def test_inputs_are_released_after_an_error(verify: float) -> None:
    """At once, as in eager: no traceback is part of a cycle."""
    def fn(table: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return (table.exp() @ table.t())[at] + 1
    run = torch.compile(fn, backend="rung", options={"strict": True, "verify": verify})
    for bad in (0, 40, 40):
        given = [torch.randn(9, 9), torch.tensor([bad])]
        held = Released(given)
        gc.disable()
        try:
            run(*given)
            assert not bad
        except IndexError:
            assert bad
        del given
        assert all(x() is None for x in held.known) or not bad
        gc.enable()
        assert held.gone

