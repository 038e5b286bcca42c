"""Which ATen calls the CPU keeps as they are."""

from __future__ import annotations

import pytest

from rung.core.expr import Expr, sym
from rung.core.types import F32, TensorType
from rung.targets.base import target
from rung.targets.cpu.libraries import ATTENTION, QUERIES


@pytest.mark.parametrize(("rows", "hint", "kept"), [
    (Expr.of(1), 1, False), (Expr.of(QUERIES - 1), 1, False), (Expr.of(QUERIES), 1, True),
    (sym("s0"), QUERIES, True), (sym("s0"), 1, False)])
def test_attention_of_many_queries_stays_a_call(rows: Expr, hint: int, kept: bool) -> None:
    query = TensorType(F32, (Expr.of(1), Expr.of(4), rows, Expr.of(64)))
    cpu, hints = target("cpu.base"), {"s0": hint}
    assert cpu.keeps_call(ATTENTION, [query] * 3, hints) is kept
    assert not cpu.keeps_call("aten.mm.default", [query] * 3, hints)
    assert not target("toy").keeps_call(ATTENTION, [query] * 3, hints)
