"""What keeps a program from being captured as a CUDA graph, of graphs that nothing here can run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from rung.core.parse import parse_module
from rung.frontends.torch.graphs import obstacles
from rung.frontends.torch.importer import import_graph
from rung.pipeline import VOCABULARIES

attention = torch.ops.aten._scaled_dot_product_cudnn_attention.default


def against(fn: Callable[[Any], tuple[Any, ...]]) -> list[str]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = make_fx(fn)(torch.empty(1, 4, 16, 64, device="cuda", dtype=torch.bfloat16))
    return list(obstacles(import_graph(graph).func))


def test_numbers_of_a_call_that_nothing_reads_are_no_obstacle() -> None:
    assert against(lambda q: (attention(q, q, q, None, True, 0.0, True)[0] + 1,)) == []


@pytest.mark.parametrize("reads", ["aten.full.default([n], 1.0) : f32[n]",
                                   "aten.mul.Tensor(x, n) : f32[4]"])
def test_a_number_that_is_read_is_one(reads: str) -> None:
    text = (f"program main(x: f32[4] input)\n  n = call aten.size_of.default(x) : index\n"
            f"  y = call {reads}\n  return y\n")
    func, = parse_module(text, VOCABULARIES)
    assert list(obstacles(func)) == ["the host reads what aten.size_of.default gives"]


def test_a_tensor_of_the_host_is_one() -> None:
    assert "a tensor on cpu" in against(lambda q: (q.cpu() + 1,))
