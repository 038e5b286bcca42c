"""What is added where data say: the oracle and compiled kernels against eager, bit for bit."""

from __future__ import annotations

import pytest
import torch
from frontends.capture import declined
from frontends.overloads import (
    BF16,
    F32,
    F64,
    I64,
    Case,
    caller,
    case,
    check_overload,
    data,
    equal_bits,
    grouped,
    tame,
)

from rung.core import trace

AT = torch.tensor([3, 0, 3, 5, 0, 3])


def sums() -> list[Case]:
    out = []
    for d in (F32, F64, I64):
        x, rows, columns = data((6, 5), d), data((6, 5), d, 1), data((4, 6), d, 2)
        out += [case("index_add", x, 0, AT, rows), case("index_add", data((4, 6), d), -1, AT.int(),
                                                        columns),
                case("index_add", x, 0, AT, rows, alpha=3, close=8),
                case("index_put", x, [AT - 3], rows, True),
                case("index_put", data((4, 6), d), [None, AT], columns, True),
                case("index_put", x, [AT], data((), d), True)]
    out += [case("index_add", data((6,)), 0, AT, data((6,), F32, 1)),
            case("index_add", data((6, 5)), 0, AT[:0], data((0, 5))),
            case("index_add", data((6, 5), BF16), 0, AT, data((6, 5), BF16), lowers=False),
            case("index_put", data((6, 5), BF16), [AT], data((6, 5), BF16), True, lowers=False)]
    for padding in (-1, 3):
        out += [case("embedding_dense_backward", data((6, 5), d), AT, 7, padding, False)
                for d in (F32, F64)]
    return [*out, case("embedding_dense_backward", data((2, 3, 5)), AT.reshape(2, 3), 7, -1, False),
            case("embedding_dense_backward", data((6, 5)), AT, 7, -1, True, lowers=False)]


CASES = sums()


@pytest.mark.parametrize("cases", grouped(CASES))
def test_overload(cases: list[Case]) -> None:
    check_overload(cases)


COMPILED = {
    "rows": case("index_add", tame((9, 37)), 0, torch.arange(60) * 5 % 9, tame((60, 37))),
    "columns": case("index_add", tame((37, 9)), 1, torch.arange(60) * 5 % 9, tame((37, 60))),
    "numbers": case("index_add", tame((9,)), 0, torch.arange(60) * 5 % 9, tame((60,))),
    "put": case("index_put", tame((9, 70)), [torch.arange(60) % 7 - 9], tame((60, 70)), True),
    "embedding": case("embedding_dense_backward", tame((60, 33)), torch.arange(60) * 5 % 9, 9, 2,
                      False)}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_adds_in_the_order_of_eager(name: str) -> None:
    fn, tensors = caller(COMPILED[name])
    before = [x.clone() for x in tensors]
    with trace.listen() as events:
        found = torch.compile(fn, backend="rung", dynamic=False, options={"strict": True})(
            *tensors)
    assert declined(events) == []
    assert equal_bits(found, fn(*tensors))
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("shape", [(6,), (6, 5)], ids=str)
@pytest.mark.parametrize("at", [6, -1])
def test_an_index_outside_is_the_error_of_eager(at: int, shape: tuple[int, ...]) -> None:
    def add(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return torch.index_add(x, 0, n, x[:1])

    x, place = tame(shape), torch.tensor([at])
    with pytest.raises((IndexError, RuntimeError)) as eager:
        add(x, place)
    with pytest.raises(eager.type) as found:
        torch.compile(add, backend="rung", dynamic=False)(x, place)
    assert str(eager.value) in str(found.value)
