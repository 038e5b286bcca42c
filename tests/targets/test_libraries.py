"""Which ATen calls the CPU keeps as they are."""

from __future__ import annotations

import pytest

from rung.core.expr import Expr, sym
from rung.core.types import BF16, F32, DType, TensorType
from rung.targets.base import target
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
