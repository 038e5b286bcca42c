"""Sums of what is scattered: what becomes one tensor, what does not, and that it means the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from programs import Prog, check, draw

from rung.core.op import Func, Value
from rung.core.ops import Map
from rung.core.types import I64
from rung.program.ir import Module
from rung.tensor.accumulate import accumulate

Build = Callable[[Prog, Value, Callable[[float], Value]], Value]


def sums(build: Build) -> Func:
    """A program of a product [8,3] and of what scatters rows into a tensor of one number."""
    p = Prog("sums")
    u, x, w, at = p.param("u", 4, 3), p.param("x", 8, 5), p.param("w", 5, 3), p.param(
        "at", 4, dtype=I64)
    return p.done(build(p, p.einsum("ik,kj->ij", x, w),
                        lambda n: p.scatter(p.full(n, 8, 3), 0, at, u, "add")))


def additions(program: Func) -> int:
    return sum(isinstance(op, Map) and op.fn == "add" for op in program.body.ops)


@pytest.mark.parametrize("build", [
    lambda p, mm, rows: p.map("add", mm, rows(0.0)),
    lambda p, mm, rows: p.map("add", rows(0.0), mm),
    lambda p, mm, rows: p.map("add", p.map("add", mm, rows(0.0)), rows(0.0)),
    lambda p, mm, rows: p.map("add", rows(0.0), rows(0.0))],
    ids=["after", "before", "chain", "two"])
def test_a_sum_goes_on_in_one_tensor(build: Build) -> None:
    before = sums(build)
    after = accumulate(before)
    assert additions(before) > 0 == additions(after)
    check(Module((before,)), Module((after,)), draw(before, ints=8), exact=False)


def read_again(p: Prog, mm: Value, rows: Callable[[float], Value]) -> Value:
    added = rows(0.0)
    return p.map("mul", p.map("add", mm, added), added)


@pytest.mark.parametrize("build", [
    lambda p, mm, rows: p.map("add", mm, rows(-0.0)),
    lambda p, mm, rows: p.map("add", mm, rows(1.0)),
    lambda p, mm, rows: p.map("add", p.map("neg", mm), rows(0.0)),  # may be -0.0
    lambda p, mm, rows: p.map("sub", mm, rows(0.0)), read_again],
    ids=["minus_zero", "one", "negative", "difference", "read_again"])
def test_other_sums_stay(build: Build) -> None:
    before = sums(build)
    assert accumulate(before) is before or str(accumulate(before)) == str(before)
