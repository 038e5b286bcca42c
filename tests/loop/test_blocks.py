"""Long sums in blocks: next to eager's error, whatever the length divides by."""

from __future__ import annotations

import pytest
import torch


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
