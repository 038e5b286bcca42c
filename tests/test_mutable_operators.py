"""Custom operators that mutate their arguments: in place where nobody can tell, else on a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from agreement import agrees, rung

from rung.compilation import History
from rung.core import trace
from rung.program.ir import Call

pytestmark = pytest.mark.usefixtures("fresh")
LIBRARY = torch.library.Library("rung_mutable", "FRAGMENT")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    LIBRARY.define(schema)
    name = schema.partition("(")[0]
    LIBRARY.impl(name, run, "CPU")
    LIBRARY.impl(name, fake, "Meta")
    return getattr(torch.ops.rung_mutable, name)


def _put(row: torch.Tensor, at: torch.Tensor, cache: torch.Tensor) -> None:
    cache.index_copy_(0, at, row)


def _put_old(cache: torch.Tensor, row: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    old = cache[at]
    _put(row, at, cache)
    return old


def _fill(x: torch.Tensor, into: torch.Tensor) -> None:
    into.copy_(x)


def _swap(a: torch.Tensor, b: torch.Tensor) -> None:
    old = a.clone()
    a.copy_(b.clone())
    b.copy_(old)


def _add_each(parts: Sequence[torch.Tensor], x: torch.Tensor | None) -> torch.Tensor:
    for part in parts:
        part.add_(1 if x is None else x)
    return parts[0].sum()


def _shift(x: torch.Tensor, into: torch.Tensor) -> None:
    for n in range(len(into)):
        into[n] += x[n - 1]


put = define("put(Tensor row, Tensor at, Tensor(a!) cache) -> ()", _put, lambda *_: None)
put_old = define("put_old(Tensor(a!) cache, Tensor row, Tensor at) -> Tensor", _put_old,
                 lambda cache, row, at: torch.empty_like(row))
swap = define("swap(Tensor(a!) x, Tensor(b!) y) -> ()", _swap, lambda *_: None)
add_each = define("add_each(Tensor(a!)[] parts, Tensor? x) -> Tensor", _add_each,
                  lambda parts, x: parts[0].new_empty(()))
fill = define("fill(Tensor x, Tensor(a!) into) -> ()", _fill, lambda *_: None)
shift = define("shift(Tensor x, Tensor(a!) into) -> ()", _shift, lambda *_: None)

Row, Cache = torch.Tensor, torch.Tensor
Function = Callable[[Row, torch.Tensor, Cache], Any]


def whole(row: Row, at: torch.Tensor, cache: Cache) -> Any:
    put(row.tanh(), at, cache)
    return row.sum()


def a_view(row: Row, at: torch.Tensor, cache: Cache) -> Any:
    put(row.tanh(), at, cache.view(2, -1, 4)[1])
    return row.sum()


def a_slice(row: Row, at: torch.Tensor, cache: Cache) -> Any:
    put(row.tanh(), at, cache[4:])
    return row.sum()


def a_result(row: Row, at: torch.Tensor, cache: Cache) -> Any:
    return put_old(cache, row.tanh(), at) * 2


def read_later(row: Row, at: torch.Tensor, cache: Cache) -> Any:
    put(row.tanh(), at, cache)
    return cache[:3].sum(0) + row.sum()


def twice(row: Row, at: torch.Tensor, cache: Cache) -> Any:
    put(row.tanh(), at, cache)
    middle = put_old(cache[2:], row.sin(), at + 1)
    return cache.sum(0), middle + 1


def made_here(row: Row, at: torch.Tensor, cache: Cache) -> Any:
    made = torch.zeros(8, 4)
    put(row.tanh(), at, made)
    return made.sum(0)


def made_of_another(row: Row, at: torch.Tensor, cache: Cache) -> Any:
    made = cache.exp()
    put(row, at, made[1:])
    return made * 2


def made_twice(row: Row, at: torch.Tensor, cache: Cache) -> Any:
    first, second = torch.zeros(8, 4), torch.zeros(8, 4)
    put(row, at, first)
    put(row + 1, at, second)
    return first + 2 * second


def made_unwritten(row: Row, at: torch.Tensor, cache: Cache) -> Any:
    first, second = torch.empty_like(cache), cache.new_empty(8, 4)
    fill(cache, first)
    fill(row, second)
    return first + second


def several(row: Row, at: torch.Tensor, cache: Cache) -> Any:
    made = row.exp().expand(3, 4).contiguous()
    swap(cache[:3], made)
    return made + 1


def a_list(row: Row, at: torch.Tensor, cache: Cache) -> Any:
    return add_each([cache[:2], cache[5:]], row) + add_each([cache], None)


def through_a_buffer(row: Row, at: torch.Tensor, cache: Cache) -> Any:
    first = cache.cos()
    put(row, at, first)
    put(row + 1, at, cache)
    return first.sum(0) + cache.sum(0)


def parts_that_overlap(row: Row, at: torch.Tensor, cache: Cache) -> Any:
    swap(cache[:4], cache[2:6])
    return cache * 2


def read_before(row: Row, at: torch.Tensor, cache: Cache) -> Any:
    before = cache.sum(0)
    put(row.tanh(), at, cache)
    return before, cache.sum(0)


def old_value_kept(row: Row, at: torch.Tensor, cache: Cache) -> Any:
    made = row + torch.zeros(8, 4)
    kept = made * 1.5
    put(row, at, made)
    return made - kept, kept


def returned(row: Row, at: torch.Tensor, cache: Cache) -> Any:
    put(row.tanh(), at, cache)
    return cache, cache[1:]


def returned_here(row: Row, at: torch.Tensor, cache: Cache) -> Any:
    made = row + torch.zeros(8, 4)
    put(row, at, made)
    return made


def given_twice(row: Row, at: torch.Tensor, cache: Cache) -> Any:
    swap(cache, cache)
    return cache + 1


def both_states(row: Row, at: torch.Tensor, cache: Cache) -> Any:
    made = row + torch.zeros(8, 4)
    put(row, at, made)
    first = made.clone()
    put(row + 1, at + 1, made)
    return first, made


def read_by_the_operator(row: Row, at: torch.Tensor, cache: Cache) -> Any:
    made = row + torch.zeros(8, 4)
    shift(made.clone(), made)
    return made


IN_PLACE: list[Function] = [
    whole, a_view, a_slice, a_result, read_later, twice, made_here, made_of_another, made_twice,
    made_unwritten, several, a_list, through_a_buffer, parts_that_overlap, returned, returned_here,
    given_twice, read_before, old_value_kept]
COPIED: list[Function] = [both_states, read_by_the_operator]


def arguments() -> list[torch.Tensor]:
    return [torch.randn(1, 4), torch.tensor([2]), torch.randn(8, 4)]


def copies(fn: Function, given: Sequence[torch.Tensor], **how: Any) -> int:
    """How many buffers are copied in the compiled graphs of `fn`."""
    torch._dynamo.reset()
    with trace.listen() as events:
        rung(fn, **how)(*given)
    stages: list[History] = [e.data["history"] for e in events if e.kind == "compiled"]
    ops = [op for s in stages for op in s.modules["kernel"].main.body.ops]
    assert any(isinstance(op, Call) and op.updates for op in ops)
    return sum(isinstance(op, Call) and op.memory == "copy" for op in ops)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("fn", [*IN_PLACE, *COPIED], ids=lambda f: f.__name__)
def test_operators_do_what_they_do_in_eager(fn: Function, dynamic: bool | None) -> None:
    agrees(fn, arguments(), dynamic=dynamic, more=[arguments()])


@pytest.mark.parametrize("fn", IN_PLACE, ids=lambda f: f.__name__)
def test_no_buffer_is_copied(fn: Function) -> None:
    assert copies(fn, arguments()) == 0


@pytest.mark.parametrize("fn", [whole, a_view, a_slice, a_list, twice], ids=lambda f: f.__name__)
@pytest.mark.parametrize("first", [0, 8])
def test_buffers_that_start_elsewhere_in_later_calls(fn: Function, first: int) -> None:
    """torch counts the elements of a view from the start of the storage in the trace."""
    calls = [[*arguments()[:2], torch.randn(24, 4)[n:n + 8]] for n in (first, 8 - first)]
    agrees(fn, calls[0], more=calls[1:])


@pytest.mark.parametrize("fn", [whole, a_slice, read_later], ids=lambda f: f.__name__)
def test_buffers_in_another_layout(fn: Function) -> None:
    dense = [*arguments()[:2], torch.randn(4, 8).T]
    agrees(fn, dense, more=[dense])
    agrees(fn, [*arguments()[:2], torch.randn(8, 6)[:, :4]])
    assert copies(fn, dense) == 0


def complex_and_integers(row: Row, at: torch.Tensor, cache: Cache) -> Any:
    put(row.to(torch.complex64), at, cache)
    made = torch.zeros(5, 4, dtype=torch.int8)
    put((row * 10).to(torch.int8), at, made)
    return made


def test_types_that_no_kernel_has() -> None:
    given = [*arguments()[:2], torch.randn(8, 4, dtype=torch.complex64)]
    agrees(complex_and_integers, given)
    assert copies(complex_and_integers, given) == 0


class Caching(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(8, 4))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))

    def forward(self, row: Row) -> torch.Tensor:
        x = self.linear(row)
        put(x.detach().mean(0, keepdim=True), self.calls, self.cache)
        self.calls.add_(1)
        return x * self.cache.sum()


def test_a_buffer_that_training_updates() -> None:
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net, found = Caching(), list[torch.Tensor]()
        run = rung(net) if compiled else net
        for _ in range(3):
            y = run(torch.randn(3, 4))
            y.square().sum().backward()
            found += [y, net.cache.clone(), net.calls.clone(), net.linear.weight.grad.clone()]
        results.append(found)
    torch.testing.assert_close(results[1], results[0])


def test_the_forward_graph_of_training_copies_nothing() -> None:
    def trained(row: Row, at: torch.Tensor, cache: Cache) -> Any:
        put(row.detach().tanh(), at, cache)
        return (row.exp() * 2).sum()

    given = [arguments()[0].requires_grad_(), *arguments()[1:]]
    agrees(trained, given)
    assert copies(trained, given) == 0


def test_what_raises_leaves_what_eager_leaves() -> None:
    given, theirs = arguments(), arguments()
    given[1].fill_(9)
    for call in (rung(whole), whole):
        with pytest.raises(IndexError):
            call(*given)
    assert theirs[2].shape == given[2].shape
