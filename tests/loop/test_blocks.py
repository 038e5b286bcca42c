"""Long sums in blocks: next to eager's error, whatever the length divides by."""

from __future__ import annotations

import pytest
import torch

from rung.core.parse import parse_module
from rung.loop import ir as loop
from rung.loop.blocks import in_blocks


@pytest.mark.parametrize("rows", [4096, 2000, 4099, 1021])
def test_columns_err_at_most_4_times_as_much_as_eager(rows: int) -> None:
    torch.manual_seed(0)
    x = torch.rand(rows, 48)
    for fn in (lambda x: x.sum(0), lambda x: (x * x).mean(0), lambda x: x.t().sum(1)):
        exact = fn(x.double())
        torch._dynamo.reset()
        found = torch.compile(fn, backend="rung", dynamic=False)(x)
        ours, eagers = ((y.double() - exact).norm() for y in (found, fn(x)))
        assert ours <= 4 * eagers


def test_counts_are_summed_in_32_bits_where_they_fit() -> None:
    text = ("kernel f(x: {kind}[{n}]) -> y: i64[]\n  v = i64(x[i]) : i64 over i\n"
            "  s = fold add v over i {n} : i64 acc i64\n  y[] = s")
    for kind, n, acc in (("bool", "4000", "i32"), ("u8", 1 << 23, "i32"), ("u8", 1 << 24, "i64"),
                         ("i16", 1 << 15, "i32"), ("i16", 1 << 16, "i64"), ("i8", "s0", "i64")):
        (func,) = parse_module(text.format(kind=kind, n=n), {"kernel": loop.VOCABULARY})
        assert f" acc {acc}\n" in str(in_blocks(func))
