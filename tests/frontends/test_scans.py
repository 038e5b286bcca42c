"""Running sums and products: the oracle and compiled kernels against eager, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from frontends.overloads import (
    BF16,
    BOOL,
    F32,
    F64,
    I8,
    I32,
    I64,
    Case,
    case,
    check_overload,
    data,
    equal_bits,
    grouped,
    tame,
)

from rung.core import trace


def scans() -> list[Case]:
    out = []
    for name in ("cumsum", "cumprod"):
        out += [case(name, data((6, 7), d), dim) for d in (F32, F64, BF16, I64, I32, I8, BOOL)
                for dim in (0, -1)]
        out += [case(name, data((3, 1, 5)), dim) for dim in (0, 1, 2)]
        out += [case(name, data((4, 6)), 1, dtype=d) for d in (F64, BF16, I32)]
        out += [case(name, data(()), 0), case(name, data((0, 3)), 0), case(name, data((3, 0)), 1)]
    for name in ("cummax", "cummin"):  # zeros may have either sign
        out += [case(name, data((6, 7), d), dim, close=1)
                for d in (F32, F64, BF16, I64, I32, I8) for dim in (0, -1)]
        out += [case(name, data((3, 1, 5)), 1, close=1), case(name, data((3, 0)), 1),
                case(name, data(()), 0, lowers=False), case(name, data((6,), BOOL), 0,
                                                            lowers=False)]
    return out


CASES = scans()


@pytest.mark.parametrize("cases", grouped(CASES))
def test_overload(cases: list[Case]) -> None:
    check_overload(cases)


Fn = Callable[[torch.Tensor], torch.Tensor]
FUNCTIONS: dict[str, Fn] = {
    "rows": lambda x: torch.cumsum(x, 1),
    "columns": lambda x: torch.cumsum(x, 0),
    "products": lambda x: torch.cumprod(x, -1),
    "middle": lambda x: torch.cumsum(x.view(4, -1, x.shape[1]), 1),
    "between": lambda x: torch.cumsum(x * 2 - 1, 1).relu() + x,
    "both": lambda x: torch.cumsum(torch.cumsum(x, 0), 1),
    "triangle": lambda x: torch.tril(torch.cumsum(x, 1)),
    "part": lambda x: torch.cumsum(x, 1)[:, 3:] * 2,
    "repeated": lambda x: torch.cumsum(x.expand(3, *x.shape), -2).diagonal(),
    "backwards": lambda x: torch.cumsum(x.flip(1), 1).flip(1),
    "highest": lambda x: torch.cummax((x * 4).round(), 1)[0],
    "where lowest": lambda x: torch.cummin((x * 4).round(), 0)[1],
    "places": lambda x: torch.cumsum(x > 0, 0) - 1,
}


@pytest.mark.parametrize("dtype", [F32, F64, I64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_is_equal_to_eager(name: str, dtype: torch.dtype) -> None:
    fn, x = FUNCTIONS[name], tame((20, 37), dtype)
    with trace.listen() as events:
        found = torch.compile(fn, backend="rung", fullgraph=True, options={"strict": True})(x)
    assert [e.subject for e in events if (e.kind, e.place) == ("declined", "lower")] == []
    assert found.dtype == fn(x).dtype
    assert equal_bits(found, fn(x))


def test_gradients() -> None:
    x = tame((5, 9), F64).requires_grad_()
    fn = torch.compile(lambda x: (torch.cumsum(x, 1) * x).sum(), backend="rung",
                       options={"strict": True})
    (found,) = torch.autograd.grad(fn(x), x)
    (wanted,) = torch.autograd.grad((torch.cumsum(x, 1) * x).sum(), x)
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)
