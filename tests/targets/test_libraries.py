"""Which ATen calls the CPU keeps as they are, and what the matmuls of libraries cost in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rung.core import trace
from rung.core.expr import Expr, sym
from rung.core.types import BF16, F32, DType, TensorType
from rung.frontends.torch import observed
from rung.targets.base import is_library, target
from rung.targets.cpu import pool
from rung.targets.cpu.libraries import (
    ATTENTION,
    ATTENTION_BACKWARD,
    ELEMENTS,
    GROUP_NORM,
    HALF_QUERIES,
    QUERIES,
)


@pytest.mark.parametrize(("rows", "hint", "kept"), [
    (Expr.of(1), 1, False), (Expr.of(QUERIES - 1), 1, False), (Expr.of(QUERIES), 1, True),
    (sym("s0"), QUERIES, True), (sym("s0"), 1, False)])
def test_attention_of_many_queries_stays_a_call(rows: Expr, hint: int, kept: bool) -> None:
    query = TensorType(F32, (Expr.of(1), Expr.of(4), rows, Expr.of(64)))
    cpu, hints = target("cpu.base"), {"s0": hint}
    assert cpu.keeps_call(ATTENTION, [query] * 3, hints) is kept
    assert not cpu.keeps_call("aten.mm.default", [query] * 3, hints)
    assert not target("toy").keeps_call(ATTENTION, [query] * 3, hints)


@pytest.mark.parametrize(("dtype", "rows", "kept"), [
    (F32, 1, True), (BF16, HALF_QUERIES - 1, False), (BF16, HALF_QUERIES, True)])
def test_backward_of_attention_stays_a_call_but_of_few_halves(dtype: DType, rows: int, kept: bool
                                                              ) -> None:
    grad = TensorType(dtype, tuple(map(Expr.of, (1, 4, rows, 64))))
    assert target("cpu.base").keeps_call(ATTENTION_BACKWARD, [grad] * 6, {}) is kept


@pytest.mark.parametrize(("batch", "kept"), [(1, True), (ELEMENTS, True), (0, False)])
def test_group_norm_of_many_elements_stays_a_call(batch: int, kept: bool) -> None:
    rows = sym("s0") if batch > 1 else Expr.of(batch)
    x = TensorType(F32, (rows, Expr.of(4), Expr.of(1 if batch > 1 else ELEMENTS // 4)))
    assert target("cpu.base").keeps_call(GROUP_NORM, [x], {"s0": batch}) is kept


@pytest.mark.parametrize("shape", [(512, 256), (1, 512, 256)])
def test_the_result_of_a_library_is_not_copied(shape: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 2048))
    x = torch.randn(shape)
    compiled = torch.compile(model, backend="rung", options={"strict": True})
    with torch.no_grad(), trace.listen() as events:
        torch.testing.assert_close(compiled(x), model(x))
        mine, eagers = (observed.peak_bytes(lambda run=run: run(x), pool.clear)
                        for run in (compiled, model))
    (stages,) = [e.data["history"] for e in events if e.kind == "compiled"]
    assert any(map(is_library, stages.modules["kernel"].kernels))
    assert mine < eagers + 512 * 1024 * 4 / 2  # half of the smaller result: oneDNN may want scratch


def test_a_library_updates_memory_in_place() -> None:
    torch._dynamo.reset()
    ours, x, w = torch.zeros(64, 128), torch.randn(64, 256), torch.randn(128, 256)
    theirs = ours.clone()

    def update(y: torch.Tensor) -> torch.Tensor:
        return y.copy_(F.linear(x, w))
    with torch.no_grad():
        again = torch.compile(update, backend="rung", options={"strict": True})(ours)
    torch.testing.assert_close(ours, update(theirs), rtol=1e-4, atol=1e-4)
    assert again.data_ptr() == ours.data_ptr()
