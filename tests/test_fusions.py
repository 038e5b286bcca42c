"""Fusions by name: no intermediate of any reaches memory, as counted from the memory plan.

A plan lists every storage of a program: what is no argument and no result is an intermediate. Our
own kernels are looked at with the libraries left out, as prices may hand a matmul to one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from functions import rms_norm, rotate
from kernels import lower
from torch.nn import functional as F

from rung import pipeline
from rung.program.memory import Plan, plan
from rung.targets.base import Target, target
from rung.targets.cpu.figures import FIXED, ZEN5
from rung.tools.capture import Graph, capture
from rung.tools.given import Given

Tensors = Sequence[torch.Tensor]
WIDTH, FEED, HEADS, GROUPS, SIZE, LENGTH = 256, 384, 8, 2, 32, 64


def plans(fn: Callable[..., Any], args: Tensors, train: bool = False, libraries: bool = False
          ) -> list[Plan]:
    """The memory plan of each graph."""
    with torch.set_grad_enabled(train):
        graphs = capture(Given("fusion", fn, tuple(args)), train).graphs
    where = target("cpu.avx512")
    where = where if libraries else replace(where, libraries=())
    return [plan(_lowered(g, where)) for g in graphs]


def _lowered(graph: Graph, where: Target) -> pipeline.Func:
    assert graph.imported is not None, graph.refused
    stages = lower(graph.imported.func, where, hints=graph.hints)
    return stages.modules["kernel"].main


def between(found: Plan) -> list[int]:
    """Bytes of each storage that is neither an argument nor a result."""
    return sorted(s.bytes.const_value or 0 for s in found.storages if s.role in ("temp", "call"))


def linear(rows: int, out: int = FEED) -> list[torch.Tensor]:
    return [torch.randn(rows, WIDTH), torch.randn(out, WIDTH), torch.randn(out)]


def residual_norm(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> Any:
    h = x + y
    return h, rms_norm(h, w)


def projections(x: torch.Tensor, norm: torch.Tensor, *weights: torch.Tensor) -> Any:
    h = rms_norm(x, norm)
    return tuple(F.linear(h, w) for w in weights)


def gated(x: torch.Tensor, norm: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Any:
    h = rms_norm(x, norm)
    return F.silu(F.linear(h, gate)) * F.linear(h, up)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, late: torch.Tensor) -> Any:
    """One token's heads, several of which share a key and value head."""
    return F.scaled_dot_product_attention(q, k, v, late, enable_gqa=True)


def _attended() -> list[torch.Tensor]:
    cache = [torch.randn(1, GROUPS, LENGTH, SIZE) for _ in range(2)]
    return [torch.randn(1, HEADS, 1, SIZE), *cache, torch.arange(LENGTH)[None] < 9]


def _rows(*widths: int) -> list[torch.Tensor]:
    return [torch.randn(1, 1, WIDTH), torch.randn(WIDTH),
            *(torch.randn(n, WIDTH) for n in widths)]


FUSIONS: dict[str, tuple[Callable[..., Any], Callable[[], list[torch.Tensor]]]] = {
    "matmul+bias": (F.linear, lambda: linear(64)),
    "matmul+relu": (lambda *x: torch.relu(F.linear(*x)), lambda: linear(64)),
    "matmul+gelu": (lambda *x: F.gelu(F.linear(*x)), lambda: linear(64)),
    "matmul+silu": (lambda *x: F.silu(F.linear(*x)), lambda: linear(64)),
    "residual+norm": (residual_norm, lambda: [*(torch.randn(4, 7, WIDTH) for _ in range(2)),
                                              torch.randn(WIDTH)]),
    "qkv": (projections, lambda: _rows(HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE)),
    "gate+up": (projections, lambda: _rows(FEED, FEED)),
    "swiglu": (gated, lambda: _rows(FEED, FEED)),
    "rope": (rotate, lambda: [torch.randn(1, HEADS, 7, SIZE),
                              *(torch.randn(7, SIZE) for _ in range(2))]),
    "attention": (attend, _attended)}
LARGE = {name for name in FUSIONS if name.startswith("matmul")}  # a library's, at that many rows


@pytest.mark.parametrize("name", FUSIONS)
def test_one_kernel_without_an_intermediate(name: str) -> None:
    fn, make = FUSIONS[name]
    (found,) = plans(fn, make())
    assert (found.launches, between(found)) == (1, []), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(FUSIONS.keys() - LARGE))
def test_the_same_where_libraries_may_be_called(name: str, dtype: torch.dtype) -> None:
    fn, make = FUSIONS[name]
    args = [x.to(dtype) if x.is_floating_point() else x for x in make()]
    (found,) = plans(fn, args, libraries=True)
    assert (found.launches, between(found)) == (1, []), found


def test_a_gated_unit_keeps_one_row_between_its_products() -> None:
    """Gate, up and their product are one kernel, the projection down with the residual another."""
    def unit(x: torch.Tensor, norm: torch.Tensor, gate: torch.Tensor, up: torch.Tensor,
             down: torch.Tensor) -> torch.Tensor:
        return x + F.linear(gated(x, norm, gate, up), down)

    (found,) = plans(unit, [*_rows(FEED, FEED), torch.randn(WIDTH, FEED)])
    assert (found.launches, between(found)) == (2, [4 * FEED]), found


def test_many_rows_share_one_norm_and_leave_the_products_to_a_library() -> None:
    """The norm is stored once instead of being computed for each product."""
    x, *rest = _rows(*(2 * [8 * WIDTH]))
    x = x.expand(1, 512, WIDTH).contiguous()
    (found,) = plans(projections, [x, *rest], libraries=True)
    assert (found.launches, between(found)) == (3, [4 * x.numel()]), found


def test_a_linear_is_the_same_call_for_rows_in_a_batch() -> None:
    """What a library computes is known only when the reshapes around it are gone."""
    args = [torch.randn(392, 384), torch.randn(1536, 384), torch.randn(1536)]
    batched = [torch.randn(2, 196, 384), *args[1:]]
    flat, deep = (plans(lambda *x: F.gelu(F.linear(*x)), x, libraries=True)[0]
                  for x in (args, batched))
    assert (flat.launches, between(flat)) == (deep.launches, between(deep)) == (2, [4 * 392 * 1536])


@pytest.mark.parametrize("share, launches", [(0.7, 1), (1.0, 2)])
def test_heads_are_put_in_order_for_a_library_that_is_worth_it(
        share: float, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A projection reads the heads of an attention across memory, which no library does: a copy
    and its product are cheaper than a product of ours only if the library reaches the peak."""
    reach = {n: replace(x, peak=share) for n, x in ZEN5.reach.items()}
    monkeypatch.setitem(FIXED, "cpu.avx512", replace(ZEN5, reach=reach))

    def project(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(x.transpose(1, 2).flatten(2), w)

    (found,) = plans(project, [torch.randn(1, 12, 128, 64), torch.randn(768, 768)], libraries=True)
    assert (found.launches, between(found)) == (launches, [4 * 128 * 768] * (launches - 1))


def test_relu_is_computed_in_the_product_and_is_its_own_mask() -> None:
    """Forward, nothing of the result's size but the result is stored; backward, what passes the
    mask goes into each product and sum, or is stored once for all of them."""
    def fn(*args: torch.Tensor) -> torch.Tensor:
        return torch.relu(F.linear(*args))

    args = [x.requires_grad_() for x in linear(64)]
    forward, backward = plans(fn, args, train=True)
    assert (forward.launches, between(forward)) == (1, []), forward
    assert backward.launches <= 4 and between(backward) in ([], [4 * 64 * FEED]), backward
    torch._dynamo.reset()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        y = torch.compile(fn, backend="rung", options={"strict": True})(*args)
    of_its_size = [x for x in saved if x.shape == y.shape]
    assert [x.data_ptr() for x in of_its_size] == [y.data_ptr()]


def test_reshapes_after_each_other_are_no_endless_index() -> None:
    """Each one divides the index of the one before: 40 in one kernel took minutes to simplify."""
    def turned(x: torch.Tensor) -> torch.Tensor:
        for n in range(40):
            x = x.reshape(-1, (2, 3, 4)[n % 3]).t().contiguous() + 1
        return x
    x = torch.arange(720.0)
    start = time.process_time()
    torch.testing.assert_close(torch.compile(turned, backend="rung")(x), turned(x))
    assert time.process_time() - start < 40
