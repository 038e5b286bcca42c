"""Dropout and other draws through `torch.compile`: eager's numbers, drawn once and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rung.core.op import Effect
from rung.program.ir import Apply
from rung.program.outline import outline
from rung.tools.capture import Graph, capture
from rung.tools.given import Given

Function = Callable[[Tensor], Tensor]
EPS = torch.finfo(torch.float32).eps


def outcome(fn: Function, x: Tensor) -> list[Tensor]:
    """Result, gradient, and the generator's state after each of the passes."""
    x = x.detach().requires_grad_()
    torch.manual_seed(7)
    y = fn(x)
    drawn = torch.get_rng_state()
    grad, = torch.autograd.grad(y, x, torch.linspace(-1, 1, y.numel()).to(y.dtype).view_as(y))
    return [y.detach(), grad, drawn, torch.get_rng_state()]


def compiled(fn: Function, dynamic: bool = False, **options: Any) -> Function:
    torch._dynamo.reset()
    run: Function = torch.compile(fn, backend="rung", dynamic=dynamic, fullgraph=True,
                                  options={"strict": True, **options})
    return run


def graphs(fn: Function, x: Tensor) -> list[Graph]:
    return capture(Given("draws", fn, (x,)), train=True).graphs


def draws(graph: Graph) -> list[str]:
    """Targets of the random calls of a graph."""
    assert graph.imported is not None, graph.refused
    return [op.target for op in graph.imported.func.body.ops if getattr(op, "impure", "") == "rng"]


LAYOUTS: dict[str, Function] = {
    "contiguous": lambda x: x, "transposed": lambda x: x.transpose(1, 3),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "gaps": lambda x: x[:, ::2, :, ::2].transpose(0, 2),
    "expanded": lambda x: x[:, :1].expand_as(x), "no element": lambda x: x[:, :0],
    "one element": lambda x: x[:1, :1, :1, :1], "scalar": lambda x: x[0, 0, 0, 0]}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_dropout_has_eagers_bits(dtype: torch.dtype, dynamic: bool) -> None:
    """0.15 and f32: 1 / 0.85 in f32 is not the f32 that is nearest to it."""
    def fn(x: Tensor) -> Tensor:
        return F.dropout(F.dropout(F.dropout(x + 1, 0.15), 0.5), 0.0) * 2

    run = compiled(fn, dynamic, precision="eager")
    for layout in LAYOUTS.values():
        x = layout(torch.randn(4, 6, 3, 5).to(dtype))
        got, want = outcome(run, x), outcome(fn, x)
        assert all(map(torch.equal, got, want)) and got[0].stride() == want[0].stride()


def test_what_is_dropped_is_multiplied_by_zero() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, -1.0, 1.0]).repeat(9)
    for fn in (lambda x: F.dropout(x, 0.5), lambda x: F.dropout(x, 1.0)):
        for got, want in zip(outcome(compiled(fn), x), outcome(fn, x), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(got[~want.isnan()].signbit(), want[~want.isnan()].signbit())


def block(x: Tensor) -> Tensor:
    return F.dropout(torch.relu(F.dropout(x, 0.3) * 2), 0.1) + x


torch.manual_seed(0)
HEADS = nn.MultiheadAttention(8, 2, dropout=0.3)
MODELS: dict[str, tuple[Function, int]] = {
    "several": (lambda x: block(block(x)) + torch.rand_like(x), 5),
    "in place": (lambda x: F.dropout(x.t() * 2, 0.3, inplace=True) + x.t(), 1),
    "checkpoint": (lambda x: checkpoint(block, block(x), use_reentrant=False), 4),
    "checkpoint of other draws": (lambda x: checkpoint(
        lambda x: F.rrelu(x, training=True) * torch.rand_like(x), x, use_reentrant=False), 2),
    "attention": (lambda x: F.scaled_dot_product_attention(
        *[x.view(1, 2, 8, 8)] * 3, dropout_p=0.2), 1),
    "heads": (lambda x: HEADS(*[x.view(4, 4, 8)] * 3)[0], 1),
    "heads without weights": (lambda x: HEADS(*[x.view(4, 4, 8)] * 3, need_weights=False)[0], 1),
    "features": (lambda x: F.dropout2d(x.view(2, 8, 4, 2), 0.4), 1),
    "alpha": (lambda x: F.alpha_dropout(x, 0.4, True), 1),
    "alpha of features": (lambda x: F.feature_alpha_dropout(x.view(2, 8, 8), 0.4, True), 1)}
"""Functions of [16, 8], and how often each draws."""


@pytest.mark.parametrize("name", MODELS)
def test_draws_are_eagers_and_happen_once(name: str) -> None:
    fn, count = MODELS[name]
    x = torch.randn(16, 8)
    for dynamic in (False, True):
        got, want = outcome(compiled(fn, dynamic), x), outcome(fn, x)
        for a, b in zip(got[:2], want[:2], strict=True):
            torch.testing.assert_close(a, b, rtol=32 * EPS, atol=32 * EPS)
        assert all(map(torch.equal, got[2:], want[2:]))
    forward, backward = graphs(fn, x)
    assert len(draws(forward)) == count and not draws(backward)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + F.dropout(self.down(F.dropout(F.silu(self.up(self.norm(x))), 0.2)), 0.1)
        return y


def test_layers_that_draw_are_outlined() -> None:
    layers = nn.Sequential(*(Layer() for _ in range(5)))
    x = torch.randn(16, 8)
    got, want = outcome(compiled(layers), x), outcome(layers, x)
    torch.testing.assert_close(got[:2], want[:2], rtol=64 * EPS, atol=64 * EPS)
    assert all(map(torch.equal, got[2:], want[2:]))
    forward, _ = graphs(layers, x)
    assert forward.imported is not None
    main, layer = outline(forward.imported.func).programs
    applied = [op for op in main.body.ops if isinstance(op, Apply)]
    assert len(applied) >= 3 and {op.callee for op in applied} == {layer.name}
    assert all(op.effect is Effect.RNG for op in applied)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_drop_as_eager_does(kind: type[nn.RNNBase], traced: bool) -> None:
    """Dynamo leaves them to eager, unless told otherwise: then AOTAutograd loses the dropout."""
    layers = kind(8, 8, num_layers=3, dropout=0.4)

    def fn(x: Tensor) -> Tensor:
        return torch.relu(layers(x.view(4, 4, 8))[0])
    x = torch.randn(16, 8)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=traced):
        got = outcome(torch.compile(fn, backend="rung"), x)
    assert all(map(torch.equal, got, outcome(fn, x)))


def test_what_is_kept_of_a_dropout_is_one_byte_an_element() -> None:
    forward, _ = graphs(lambda x: F.dropout(x, 0.3) + x, torch.randn(16, 8))
    assert forward.imported is not None
    _, *kept = forward.imported.func.body.last.operands()
    assert [str(v.type) for v in kept] == ["bool[16,8]"]


@pytest.mark.parametrize("fn", [
    lambda x: torch.native_dropout(x, 0.3, None)[0], lambda x: F.dropout(x, 0.3, training=False),
    lambda x: torch.native_dropout(x, 0.3, False)[0], lambda x: torch.native_dropout(x, 1, True)[0],
    lambda x: torch.vmap(lambda row: F.dropout(row, 0.3), randomness="different")(x)])
def test_other_ways_to_it_are_eagers(fn: Function) -> None:
    x = torch.randn(16, 8)
    for got, want in zip(outcome(compiled(fn), x), outcome(fn, x), strict=True):
        torch.testing.assert_close(got, want)


def _unread(x: Tensor) -> Tensor:
    torch.rand(5)
    F.dropout(x * 2, 0.5)
    torch.empty(4).normal_()
    torch.randperm(3)
    return F.dropout(x, 0.3) + torch.randn(4)


def test_numbers_that_nobody_reads_are_drawn() -> None:
    x = torch.randn(3, 4)
    for got, want in zip(outcome(compiled(_unread), x), outcome(_unread, x), strict=True):
        torch.testing.assert_close(got, want)
    torch.manual_seed(1)
    want = _unread(x), torch.get_rng_state()
    torch.manual_seed(1)
    torch.testing.assert_close((compiled(_unread)(x), torch.get_rng_state()), want)
    forward, backward = graphs(_unread, x)
    assert len(draws(forward)) == 6 and not draws(backward)
