"""What is written where data say: the oracle and compiled kernels against eager, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from agreement import rung
from frontends.capture import declined
from frontends.overloads import (
    BF16,
    BOOL,
    F32,
    F64,
    I8,
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
from torch._dynamo.exc import TorchRuntimeError

from rung.core import trace
from rung.program.ir import Check, KernelCall

AT = torch.tensor([3, 0, 3, 5, 0, 3])
EACH = torch.tensor([[3, 0, 3, 5, 0], [1, 1, 2, 3, 3], [5, 5, 5, 0, 1]])  # each element its own


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
            case("index_add", data((6, 5)), 0, AT[:0], data((0, 5)), lowers=False),
            case("index_add", data((6, 5), BF16), 0, AT, data((6, 5), BF16), lowers=False),
            case("index_put", data((6, 5), BF16), [AT], data((6, 5), BF16), True, lowers=False)]
    for padding in (-1, 3):
        out += [case("embedding_dense_backward", data((6, 5), d), AT, 7, padding, False)
                for d in (F32, F64)]
    return [*out, case("embedding_dense_backward", data((2, 3, 5)), AT.reshape(2, 3), 7, -1, False),
            case("embedding_dense_backward", data((6, 5)), AT, 7, -1, True, lowers=False)]


def scatters() -> list[Case]:
    """Indices of fewer rows and columns than what is written to and what is written."""
    out = []
    for d in (F32, F64, BF16, I64, I8, BOOL):
        x, source, adds = data((6, 5), d), data((4, 7), d, 1), d not in (BF16, BOOL)
        out += [case("scatter.src", x, 0, EACH, source), case("scatter.value", x, 0, EACH, 1),
                case("scatter.src", x.t(), -1, EACH.t(), source.t()),
                case("scatter.value", x, 1, EACH[:2, :3] % 5, 1),
                case("scatter.src", x, 0, EACH[:0], source, lowers=False),
                case("scatter.src", x[0], 0, EACH[0].int() % 5, source[0]),
                case("index_fill.int_Scalar", x, 0, AT - 3, 1),
                case("index_fill.int_Tensor", x, -1, AT[:0], data((), d), lowers=False),
                case("index_fill.int_Tensor", x, 1, AT - 1, data((), d)),
                case("scatter_add", x, 0, EACH, source, lowers=adds)]
        out += [case("scatter.reduce", x, 0, EACH, source, reduce=how, lowers=adds)
                for how in ("add", "multiply")]
        out += [case("scatter_reduce.two", x, 0, EACH, source, how, include_self=included,
                     lowers=adds, close=1 if how[0] == "a" else 0)  # zeros may have either sign
                for how in ("sum", "prod", "amax", "amin") for included in (True, False)]
    scalar = torch.tensor(0)
    return [*out, case("scatter_reduce.two", data((6, 5)), 0, EACH, data((4, 7)), "mean",
                       lowers=False),
            case("scatter.value", data((), F32), 0, scalar, 2, lowers=False),
            case("index_fill.int_Scalar", data((6,), I64), 0, AT[:1], 2.5, lowers=False),
            case("index_fill.int_Scalar", data((6,)), 0, scalar, 2, lowers=False)]


def puts() -> list[Case]:
    """Several indices, indices of any rank, and masks."""
    at, pairs = torch.tensor([1, -1, 2]), torch.tensor([[1, 0, 2]])
    out = []
    for d in (F32, BF16, I64, BOOL):
        x, flags = data((4, 3, 5, 6), d), data((3, 5), BOOL)
        for adds in (False, True):
            lowers = not adds or d not in (BF16, BOOL)
            again = at.abs() if adds else at  # equal indices, in what has an order
            out += [case("index_put", x, indices, data(shape, d), adds, lowers=lowers)
                    for indices, shape in (
                        ([at, again], (3, 5, 6)), ([None, at, again], (4, 3, 6)),
                        ([at, None, again], (3, 3, 6)), ([at, again[0].int()], (1, 6)),
                        ([None, at[:2], None, at.reshape(3, 1)], (3, 2, 4, 5)),
                        ([None, pairs % (3 - adds)], (5, 6)), ([at, again, at, at], ()))]
            out += [case("index_put", x, [at[:0]] * 2, data((0, 5, 6), d), adds, lowers=False)]
            if d is not BOOL:
                out += [case("index_put", x, [x > 0], data((), d), adds),
                        case("index_put", x, [None, flags], data((1,), d), adds)]
    hits = torch.tensor([True, False, True, False])
    return [*out, case("index_put", x, [hits], data((2, 3, 5, 6), d), lowers=False),
            case("index_put", data((4, 3), BOOL), [data((4, 3), BOOL)], torch.tensor(True))]


CASES = [*sums(), *scatters(), *puts()]


@pytest.mark.parametrize("cases", grouped(CASES))
def test_overload(cases: list[Case]) -> None:
    check_overload(cases)


MANY = torch.arange(60 * 37).reshape(60, 37) * 7919 % 1009
COMPILED = {
    "rows": case("index_add", tame((9, 37)), 0, torch.arange(60) * 5 % 9, tame((60, 37))),
    "columns": case("index_add", tame((37, 9)), 1, torch.arange(60) * 5 % 9, tame((37, 60))),
    "numbers": case("index_add", tame((9,)), 0, torch.arange(60) * 5 % 9, tame((60,))),
    "put": case("index_put", tame((9, 70)), [torch.arange(60) % 7 - 9], tame((60, 70)), True),
    **{f"{name} {dim}": case(name, tame(shape), dim, MANY % shape[dim], tame((60, 37)), *how,
                             **named)
       for name, how, named in (("scatter.src", (), {}), ("scatter_add", (), {}),
                                ("scatter_reduce.two", ("prod",), {"include_self": False}))
       for dim, shape in enumerate(((9, 70), (64, 9)))},
    "one number": case("index_put", tame((9, 70)), [None, torch.arange(60)], tame(())),
    "flags": case("scatter.src", tame((64, 9), BOOL), 1, MANY % 9, tame((60, 37), BOOL)),
    "halves": case("scatter.src", tame((9, 70), BF16), 0, MANY % 9, tame((60, 37), BF16)),
    "one-hot": case("scatter.value", torch.zeros(60, 12, dtype=I64), 1, MANY[:, :4] % 12, 1),
    "steps": case("slice_scatter", tame((9, 71)), tame((9, 35), F32, 1), 1, 1, 71, 2),
    "steps of rows": case("slice_scatter", tame((70, 9)), tame((23, 9), F32, 1), 0, 1, 70, 3),
    "pairs": case("index_put", tame((9, 70)), [torch.arange(60) % 9, torch.arange(60)],
                  tame((60,))),
    "blocks": case("index_put", tame((9, 70)), [None, torch.arange(60).reshape(4, 15) % 7],
                   tame((9, 4, 15)), True),
    "mask": case("index_put", tame((9, 70)), [tame((9, 70)) > 0], tame(()), True),
    "vector": case("scatter.src", tame((9,)), 0, torch.arange(60) * 5 % 9, tame((60,))),
    "fill": case("index_fill.int_Scalar", tame((9, 70)), 1, torch.arange(60) % 7 - 9, 0.5),
    "embedding": case("embedding_dense_backward", tame((60, 33)), torch.arange(60) * 5 % 9, 9, 2,
                      False),
    "one place": case("index_add", tame((9, 37)), 0, torch.tensor([5]).expand(60), tame((60, 37))),
    "places of one row": case("scatter_add", tame((9, 37)), 0, MANY[:1] % 9, tame((60, 37))),
    "one row of places": case(  # of whole numbers: eager adds them in an order of its own
        "index_put", tame((9, 37)).round(), [(torch.arange(15) % 9).expand(4, 15)],
        tame((4, 15, 37)).round(), True),
    "one row, again and again": case("scatter_add", tame((9, 37)), 0, (MANY[:1] % 9).expand(60, 37),
                                     tame((1, 37)).expand(60, 37))}


@pytest.fixture
def fresh() -> Iterator[None]:
    """Dynamo compiles anew what it compiled for another case: cases are calls of one function."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_writes_in_the_order_of_eager(name: str) -> None:
    fn, tensors = caller(COMPILED[name])
    before = [x.clone() for x in tensors]
    with trace.listen() as events:
        found = torch.compile(fn, backend="rung", dynamic=False, options={"strict": True})(
            *tensors)
    assert declined(events) == []
    assert equal_bits(found, fn(*tensors))
    assert all(map(torch.equal, tensors, before))


def beside(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return at.view(-1, *[1] * (x.dim() - 1))


WRITES = {
    "index_add": lambda x, at: torch.index_add(x, 0, at, x[:1]),
    "index_fill": lambda x, at: torch.index_fill(x, 0, at * 6, 1),
    "scatter": lambda x, at: torch.scatter(x, 0, beside(x, at), x),
    "scatter_add": lambda x, at: torch.scatter_add(x, 0, beside(x, at), x)}


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("shape", [(6,), (6, 5)], ids=str)
@pytest.mark.parametrize("at", [6, -2])
def test_an_index_outside_is_the_error_of_eager(at: int, shape: tuple[int, ...], name: str
                                                ) -> None:
    x, place = tame(shape), torch.tensor([at])
    with pytest.raises((IndexError, RuntimeError)) as eager:
        WRITES[name](x, place)
    with pytest.raises(eager.type) as found:
        rung(WRITES[name], dynamic=False)(x, place)
    assert str(eager.value) in str(found.value)


EMPTY = {
    **WRITES, "index_copy": lambda x, at: torch.index_copy(x, 0, at, x[:1]),
    "index_add of a multiple": lambda x, at: torch.index_add(x, 0, at, x[:1], alpha=2),
    "index_put": lambda x, at: torch.index_put(x, (at,), x[:1]),
    "index_put of a sum": lambda x, at: torch.index_put(x, (at,), x[:1], True),
    "index": lambda x, at: x[at], "index_select": lambda x, at: x.index_select(0, at),
    "gather": lambda x, at: x.gather(0, beside(x, at)[:, :x.shape[1]]),
    "take": torch.take, "embedding": lambda x, at: torch.embedding(x, at)}


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("name", EMPTY)
def test_indices_into_nothing_are_as_in_eager(name: str) -> None:
    """Which eager checks, otherwise, or not at all."""
    for shape in ((0, 3), (3, 0), (3, 2)):
        for at in ([], [0], [5]):
            x, place = tame(shape), torch.tensor(at, dtype=torch.int64)
            found = list[torch.Tensor | type]()
            for fn in (EMPTY[name], rung(EMPTY[name], strict=False, dynamic=False)):
                try:
                    found.append(fn(x, place))
                except (IndexError, RuntimeError) as error:
                    found.append(type(error))
            same = found[0] is found[1] or TorchRuntimeError in found
            assert same or torch.equal(*found), (shape, at, found)


@pytest.mark.usefixtures("fresh")
def test_a_check_comes_before_the_write_that_it_guards() -> None:
    """Indices that are computed are not computed in the kernel that writes by them."""
    compiled = rung(WRITES["index_fill"], dynamic=False)
    with trace.listen() as events:
        compiled(tame((6,)), torch.tensor([0]))
    (stages,) = (e.data["history"] for e in events if e.kind == "compiled")
    ops = stages.modules["kernel"].main.body.ops
    (check,) = (n for n, op in enumerate(ops) if isinstance(op, Check))
    (write,) = (n for n, op in enumerate(ops) if isinstance(op, KernelCall) and op.updates)
    assert check < write


def test_scatters_of_any_size_and_their_gradients() -> None:
    def fn(x: torch.Tensor, at: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        added = torch.scatter_add(x, 0, at, y)
        return (torch.scatter(added, 1, at % x.shape[1], y.sin()) * added).exp()

    compiled = torch.compile(fn, backend="rung", dynamic=True, options={"strict": True})
    for rows, columns in ((9, 37), (12, 33)):
        at = MANY[:rows, :columns] % rows
        leaves = [tame(shape, F64).requires_grad_() for shape in ((rows, 40), (rows, columns))]
        found, wanted = (f(leaves[0], at, leaves[1]) for f in (compiled, fn))
        torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)
        slopes = (torch.autograd.grad(y.sum(), leaves) for y in (found, wanted))
        torch.testing.assert_close(*slopes, rtol=1e-13, atol=1e-13)
