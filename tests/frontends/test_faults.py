"""Graphs whose meaning AOTAutograd does not keep do what eager does, and nearly such ones compile.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from agreement import agrees, copied, rung, same
from torch import Tensor, nn
from torch.nn import functional as F

from rung.frontends.torch.faults import meet

pytestmark = pytest.mark.usefixtures("fresh")
Fault = tuple[Callable[..., Any], Callable[[], Sequence[Any]]]


def numbers(*shape: int) -> Tensor:
    return torch.rand(shape)


def shifted(x: Tensor) -> Tensor:
    x[1:] = x[:-1]
    return x + 1


def shifted_columns(x: Tensor) -> Tensor:
    x[:, 1:] = x[:, :-1]  # eager refuses to see that these share elements, and copies in order
    return x + 1


def shifted_inside(x: Tensor) -> Tensor:
    y = x * 2
    y[1:] += y[:-1]
    return y


def indexed(x: Tensor, i: Tensor) -> Tensor:
    x[i] = x[:2]
    return x


def outside(x: Tensor) -> Any:
    x.as_strided((2, 3), (3, 1), 1).mul_(2)
    return x.sum(), x.as_strided((2,), (1,), 0)


def another_memory(x: Tensor) -> Any:
    y = torch.empty(0)
    y.set_(x)
    return y, y + 1


OVERWRITING: dict[str, Fault] = {
    "rows shifted": (shifted, lambda: [numbers(6, 3)]),
    "columns shifted": (shifted_columns, lambda: [numbers(6, 3)]),
    "rows of a value shifted": (shifted_inside, lambda: [numbers(6)]),
    "its transpose added": (lambda x: x.add_(x.t()), lambda: [numbers(5, 5)]),
    "out over a part": (lambda x: torch.add(x[:-1], 1, out=x[1:]), lambda: [numbers(6)]),
    "out over a factor": (lambda x, y: torch.mm(x, y, out=x), lambda: [numbers(3, 3)] * 2),
    "its own product added": (lambda x: x.addmm_(x, x), lambda: [numbers(3, 3)]),
    "its own rows added": (lambda x, i: x.index_add_(0, i, x[:2]), lambda: [
        numbers(4), torch.tensor([1, 2])]),
    "its own rows put": (indexed, lambda: [numbers(4), torch.tensor([1, 2])]),
    "its own elements scattered": (lambda x, i: x.scatter_(0, i, x), lambda: [
        numbers(3), torch.tensor([1, 2, 0])]),
    "arguments that share a part": (lambda x, y: (x.add_(y), y * 1), lambda: [
        (x := numbers(9))[:6], x[2:8]]),
    "an argument and its transpose": (lambda x, y: (x.add_(y), y * 1), lambda: [
        x := numbers(3, 3), x.t()]),
    "a storage of which an argument is a part": (outside, lambda: [numbers(2, 12)[1]]),
    "memory of another": (another_memory, lambda: [numbers(3)]),
}


@pytest.mark.parametrize("name", OVERWRITING)
def test_what_is_read_is_overwritten_as_in_eager(name: str) -> None:
    fn, make = OVERWRITING[name]
    args = make()
    try:
        fn(*copied(args))
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=str(error)[:40]):
            rung(fn, strict=False)(*args)
        return
    agrees(fn, args, strict=False)


def apart(x: Tensor) -> Any:
    x[:, 0] = x[:, 1]
    x[0] += x[1]
    x[:2] = x[2:4]
    x[0, 1:].mul_(x[1, 1:])
    x += x
    x.mul_(x).sub_(x.mean())
    x[1:] = x[:-1].clone()
    x[::2, ::2] = x[1::2, 1::2]
    torch.mul(x, x, out=x)
    x[x > 1] = 0
    x.copy_(x)
    x.clamp_(max=x[0, 0].clone())
    return F.relu(x, inplace=True) + 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_elements_that_are_apart_or_alone_are_compiled(dynamic: bool) -> None:
    agrees(apart, [numbers(4, 6)], dynamic=dynamic)


def test_whether_tensors_meet() -> None:
    """Against all their places; strides that are multiples of each other are always told apart."""
    draw, memory, found = random.Random(0), torch.zeros(5000), set[bool]()
    places = torch.arange(5000.0)
    for _ in range(2000):
        shapes = [[draw.randint(0, 4) for _ in range(draw.randint(0, 3))] for _ in range(2)]
        layouts = [(s, [draw.choice([1, 2, 4, 12, 24]) for _ in s], draw.randint(0, 40))
                   for s in shapes]
        share = bool({*places.as_strided(*layouts[0]).flatten().tolist()}
                     & {*places.as_strided(*layouts[1]).flatten().tolist()})
        assert meet(memory.as_strided(*layouts[0]), memory.as_strided(*layouts[1])) == share
        found.add(share)
    assert found == {False, True}


def both_change(x: Tensor, y: Tensor) -> Any:
    x.mul_(2)
    y.add_(1)
    return x * y, x.cumsum(0)


def windows(first: int, second: int) -> list[Tensor]:
    x = numbers(100)
    return [x[first:first + 20], x[second:second + 20]]


@pytest.mark.parametrize("dynamic", [None, True])
def test_arguments_that_share_elements_in_some_calls(dynamic: bool | None) -> None:
    apart, near, far, rows = [numbers(20), numbers(20)], windows(0, 7), windows(0, 50), numbers(40)
    later = [far, near, windows(3, 2), windows(1, 50), [rows[::2], rows[1::2]], [rows[:20]] * 2]
    agrees(both_change, apart, more=later, strict=False, dynamic=dynamic)
    torch._dynamo.reset()
    agrees(both_change, near, more=[far, windows(1, 9), apart], strict=False, dynamic=dynamic)


def test_arguments_beside_each_other_and_buffers_in_one_memory_are_compiled() -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.zeros(4, 3))
            self.register_buffer("last", self.rows[3])

        def forward(self, x: Tensor) -> Tensor:
            self.last.add_(x)
            return self.rows * 2

    x = numbers(6, 4)
    agrees(both_change, [x[:, :2], x[:, 2:]], more=[[x[:3], x[3:]]])
    for n in range(2):
        torch.manual_seed(n)
        modules, x = [Cache(), Cache()], numbers(3)
        same(rung(modules[0])(x), modules[1](x))


def test_an_error_of_tracing_leaves_no_transform_open() -> None:
    def fn(x: Tensor) -> Tensor:
        def one(row: Tensor) -> Tensor:
            y = row.exp()
            return y.add_(1)  # which the gradient of exp would read
        return torch.func.vmap(one)(x).sum()

    for n in (2, 3):
        agrees(lambda x: fn(x).detach(), [numbers(n, 3).requires_grad_()], strict=False)
        assert torch._C._functorch.get_interpreter_stack() is None


class Tagged(torch.Tensor):
    """A subclass that operators below autograd take for a tensor."""


@pytest.mark.parametrize("grad", [False, True])
def test_plain_subclasses_of_tensors(grad: bool) -> None:
    def fn(x: Tensor) -> Any:
        return x * 2 + 1, x.sort()[0], x[1:], x.t()

    for n in (2, 3):  # torch looks into the operators of a first call
        x = numbers(n, 3).requires_grad_(grad)
        for got, want in zip(rung(fn)(x.as_subclass(Tagged)), fn(x.as_subclass(Tagged)),
                             strict=True):
            same(got, want)
