"""Graphs in which torch runs a piece, and what is around it is compiled: higher-order operators,
custom ones that mutate, complex numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import agrees, calls_left, rung, same
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

pytestmark = pytest.mark.usefixtures("fresh")


@torch.library.custom_op("rung_tests::add_scaled", mutates_args={"x"})
def add_scaled(x: torch.Tensor, y: torch.Tensor, k: float) -> None:
    x.add_(y * k)


@torch.library.custom_op("rung_tests::double_and_next", mutates_args={"x"})
def double_and_next(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return y + 1


double_and_next.register_fake(lambda x, y: torch.empty_like(y))


def _mutates_inside(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x * 2
    add_scaled(z, y, 0.5)
    return z.sin() + 1


def _mutates_arguments(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    add_scaled(x, y.cos(), 0.5)
    return double_and_next(x, y) * 2 + x


def _mutates_a_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x.exp()
    add_scaled(z[1:], y[1:], 2.0)
    return z * 3


def _chosen(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos(), (x * 2,)) + 1


def _chosen_by_size(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.shape[0] > 4, lambda x: x.sin() * 2, lambda x: x.cos(), (x * 2,)) + 1


def _while(x: torch.Tensor) -> Any:
    n, y = while_loop(lambda n, x: n < 5, lambda n, x: (n + 1, x * 1.5),
                      (torch.tensor(0), x.sin()))
    return y.cos() + n


def _scan(x: torch.Tensor) -> Any:
    total, each = scan(lambda c, x: (c + x, c * x), torch.zeros(x.shape[1]), x.sin(), dim=0)
    return total + 1, each.cos()


@torch.compiler.nested_compile_region
def _region(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


ONE: dict[str, Callable[[torch.Tensor], Any]] = {
    "cond": _chosen,
    "cond of a size": _chosen_by_size,
    "scan": _scan,
    "associative scan": lambda x: associative_scan(
        lambda a, b: a * b, x.sin() + 1, 0, combine_mode="generic") * 2,
    "map": lambda x: mapped(lambda x: x.sin() * 2, x + 1).cos(),
    "region": lambda x: _region(_region(x) + 1),
    "complex factor": lambda x: torch.view_as_real(x * (1 + 2j)).sum(-1) + (x * 2).cos(),
}


@pytest.mark.parametrize("name", ONE)
@pytest.mark.parametrize("dynamic", [None, True])
def test_higher_order_operators(name: str, dynamic: bool | None) -> None:
    xs = [torch.randn(n, 5) for n in (3, 5)]
    calls_left(ONE[name], [(x,) for x in xs], dynamic=dynamic)
    agrees(ONE[name], [xs[1].requires_grad_()], dynamic=dynamic)


def test_loops_over_data() -> None:
    calls_left(_while, [(torch.randn(4, 5),)])


@pytest.mark.parametrize("fn", [_mutates_inside, _mutates_arguments, _mutates_a_view])
@pytest.mark.parametrize("dynamic", [None, True])
def test_custom_operators_that_mutate(fn: Callable[..., Any], dynamic: bool | None) -> None:
    for n in (4, 6):
        x, y = torch.randn(n, 5), torch.randn(n, 5)
        agrees(fn, [x, y], dynamic=dynamic)
        run, ours, theirs = rung(fn, dynamic=dynamic), x.clone(), x.clone()
        for _ in range(2):
            same(run(ours, y), fn(theirs, y))
            same(ours, theirs)


@pytest.mark.parametrize("masked", [False, True])
def test_flex_attention(masked: bool) -> None:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flex_attention(q.sin() * 2, k, v, block_mask=mask if masked else None,
                              score_mod=lambda s, b, h, i, j: s + (i - j)).cos() + 1
    calls_left(fn, [[torch.randn(1, 2, 128, 16) for _ in range(3)]])


def test_a_verified_call_runs_a_piece_twice() -> None:
    run = torch.compile(_mutates_arguments, backend="rung", options={"verify": 1.0})
    x, y = torch.randn(4, 5), torch.randn(4, 5)
    ours, theirs = x.clone(), x.clone()
    same(run(ours, y), _mutates_arguments(theirs, y))
    same(ours, theirs)
