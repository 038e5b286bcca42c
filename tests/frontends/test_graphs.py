"""What keeps a program from being captured as a CUDA graph, of graphs that nothing here can run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from rung.frontends.torch.graphs import obstacles
from rung.frontends.torch.importer import import_graph

attention = torch.ops.aten._scaled_dot_product_cudnn_attention.default


def against(fn: Callable[[Any], tuple[Any, ...]]) -> list[str]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = make_fx(fn)(torch.empty(1, 4, 16, 64, device="cuda", dtype=torch.bfloat16))
    return list(obstacles(import_graph(graph).func))


def test_numbers_of_a_call_that_nothing_reads_are_no_obstacle() -> None:
    assert against(lambda q: (attention(q, q, q, None, True, 0.0, True)[0] + 1,)) == []


def test_a_number_that_is_read_is_one() -> None:
    def sizes(q: torch.Tensor) -> tuple[object, ...]:
        rows = q.nonzero().shape[0]
        return q.new_ones(rows), rows
    assert against(sizes) == ["the host reads what aten.nonzero.default gives"]


def test_a_tensor_of_the_host_is_one() -> None:
    assert "a tensor on cpu" in against(lambda q: (q.cpu() + 1,))
