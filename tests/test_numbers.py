"""Numbers that are no constants: floats, sizes and truths that the host computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from agreement import Calls, calls_left, rung, same
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def dynamic() -> Iterator[None]:
    """Numbers and sizes that are data stay in the graph."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True,
                                    capture_dynamic_output_shape_ops=True):
        yield


def sizes(*dtypes: torch.dtype) -> Calls:
    return [((torch.randn(n, m) * 3).to(d),) for d in dtypes or (torch.float32,)
            for n, m in ((4, 5), (6, 5), (1, 7))]


def _attention(q: torch.Tensor) -> torch.Tensor:
    scale = 1 / q.size(-1) ** 0.5
    return torch.softmax(q @ q.mT * scale, -1) @ q * (q.shape[0] / (q.shape[1] + 1))


FLOATS: dict[str, Callable[[torch.Tensor], Any]] = {
    "factor": lambda x: x * (1 / x.shape[0]),
    "root": lambda x: x / math.sqrt(x.size(-1)),
    "power": lambda x: x / x.shape[1] ** 0.5,
    "attention": _attention,
    "mean": lambda x: (x.sum(0) / x.shape[0], x.sum() * (x.shape[1] / x.shape[0])),
    "functions": lambda x: x * (math.log(x.shape[0] + 1) + math.sin(x.shape[1] / 3)),
    "alpha": lambda x: (x.add(x, alpha=1 / x.shape[0]), x.sub(x, alpha=1 / x.shape[0])),
    "clamps": lambda x: x.clamp(-1 / x.shape[0], 2 / x.shape[1]),
    "fillings": lambda x: (
        x.masked_fill(x > 1, 1 / x.shape[0]), torch.where(x > 1, x, -1 / x.shape[0]),
        torch.full((3,), 1 / x.shape[0]), torch.full_like(x[0, 0], -0.5 / x.shape[0])),
    "activations": lambda x: (
        F.leaky_relu(x, 1 / x.shape[0]), F.elu(x, 1 / x.shape[0]), F.celu(x, 1 / x.shape[0]),
        F.softplus(x, 1 / x.shape[0]), F.hardtanh(x, -1 / x.shape[0], 1 / x.shape[0]),
        F.threshold(x, 1 / x.shape[0], 0.5 / x.shape[0]), F.hardshrink(x, 1 / x.shape[0])),
    "formulas": lambda x: (
        torch.addcmul(x, x, x, value=1 / x.shape[0]), torch.lerp(x, x + 1, 1 / x.shape[0])),
}


@pytest.mark.parametrize("name", FLOATS)
def test_floats_of_sizes(name: str) -> None:
    halves = () if name == "attention" else (torch.bfloat16,)
    calls = sizes(torch.float32, torch.float64, *halves)
    assert not calls_left(FLOATS[name], calls, dynamic=True)


def test_floats_beside_integers() -> None:
    def fn(x: torch.Tensor) -> Any:
        by = 1 / x.shape[0]
        return x * by, x + by, x > by, x / (2 * by), x.clamp(min=by), x.eq(by)
    assert not calls_left(fn, sizes(torch.int64, torch.int8, torch.bool), dynamic=True)


def test_floats_of_gradients() -> None:
    def step(fn: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        fn(x).backward()
        assert x.grad is not None
        return x.grad

    def fn(x: torch.Tensor) -> torch.Tensor:
        return (F.leaky_relu(x.sin(), 1 / x.shape[0]) * (3 / x.shape[1])).sum()

    run = rung(fn, dynamic=True)
    for (x,) in sizes(torch.float32, torch.float64):
        same(step(run, x), step(fn, x))


def test_floats_are_given_back() -> None:
    assert not calls_left(lambda x: (x * 2, x.shape[0] / 2, x.shape[1] ** 0.5, x.shape[0] > 4),
                          sizes(), dynamic=True)


def test_a_divisor_that_becomes_zero_raises_as_in_eager() -> None:
    run = rung(lambda x, k: x * (1 / (k - 3)), dynamic=True)
    for k in (5, 4, -7):
        same(run(torch.ones(4), k), torch.ones(4) * (1 / (k - 3)))
    with pytest.raises(ZeroDivisionError):
        run(torch.ones(4), 3)


SIZES: dict[str, tuple[Callable[..., Any], Calls]] = {
    "lesser": (lambda x: x[:min(x.shape[0], 5)] * 2, sizes()),
    "greater": (lambda x: F.pad(x, (0, max(x.shape[0], 5) - 1)).sin(), sizes()),
    "lesser of numbers": (lambda x, k: x * min(k, 5) + max(k, x.shape[0]),
                          [(torch.randn(4, 5), k) for k in (3, 9, -2)]),
    "half": (lambda x: x.sum() * torch.ones(int(x.shape[0] * 0.5)) + x.shape[1] // 2.5,
             sizes()),
    "nearest": (lambda x: x.sum() + torch.ones(round(x.shape[0] / 2), math.ceil(x.shape[1] / 3)),
                sizes()),
    "from the end": (lambda x, k: x[:k] * 2, [(torch.randn(9, 3), k) for k in (-2, -3, 4, 5)]),
    "by a number": (lambda x, k: (x * (7 // k), x + 7 % k, x.shape[0] // k, k // 2 * x),
                    [(torch.randn(4, 5), k) for k in (3, -4, 7, -9)]),
    "size": (lambda x, k: (x + abs(k), abs(k) * 2), [(torch.randn(4), k) for k in (3, -4, 7)]),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_only_functions_give(name: str) -> None:
    fn, calls = SIZES[name]
    left = calls_left(fn, calls, dynamic=True)
    assert left <= {"aten.slice.Tensor", "aten.full.default"}  # a view, and what has no elements


def test_a_number_that_divides_raises_as_in_eager() -> None:
    run = rung(lambda x, k: x * (7 // k), dynamic=True)
    same(run(torch.ones(3), 2), torch.ones(3) * 3)
    with pytest.raises(ZeroDivisionError):
        run(torch.ones(3), 0)


def _checked(x: torch.Tensor, k: torch.Tensor) -> Any:
    n = k.item()
    torch._check(n >= 0)
    torch._check(n <= x.shape[0])
    return x[:n] * 2, n


def _routed(x: torch.Tensor, expert: torch.Tensor) -> list[torch.Tensor]:
    return [x[expert == n].exp() * n for n in range(9)]


@torch.library.custom_op("rungtest::padded", mutates_args=())
def padded(x: torch.Tensor, step: torch.Tensor) -> list[torch.Tensor]:
    rows = [torch.empty_strided(x.shape, (int(step), 1)).copy_(x) for _ in range(2)]
    return [*rows, x.new_zeros(int(step))]


@padded.register_fake
def _(x: torch.Tensor, step: torch.Tensor) -> list[torch.Tensor]:
    first, other = (torch.library.get_ctx().new_dynamic_size(min=8) for _ in range(2))
    strided = [torch.empty_strided(x.shape, (n, 1)) for n in (first, other)]
    return [*strided, x.new_empty(other)]


def _far_apart(x: torch.Tensor, step: torch.Tensor) -> Any:
    """Strides of which one is the size of a later result, and one is told by nothing else."""
    rows, again, zeros = padded(x.sin(), step)
    return rows * 2, again @ rows.t() + 1, zeros + rows.stride(0), x + again.stride(0)


DATA: dict[str, tuple[Callable[..., Any], Calls]] = {
    "number": (lambda x, k: (x * k.item() + 1, k.item() * 2), [
        (torch.randn(4, 5), torch.tensor(k)) for k in (3, -2, 5)]),
    "float": (lambda x, k: (x.clamp(max=k.item()), x.add(x, alpha=k.item() * 2)), [
        (torch.randn(4, 5), torch.tensor(k)) for k in (0.5, 0.25)]),
    "slice": (_checked, [(torch.randn(4, 5), torch.tensor(k)) for k in (3, 0, 4)]),
    "chosen": (lambda x: x[x > 0] * 2 + 1, sizes()),
    "places": (lambda x: (x > 0).nonzero().sum(0).float().sin(), sizes()),
    "count": (lambda x: x.sin() * (x > 0).nonzero().shape[0], sizes()),
    "counts": (lambda x, y: (x > 0).nonzero().shape[0] * y - (y > 0).nonzero().shape[0] * x.sin(), [
        (x, x.cos()) for (x,) in sizes()]),
    "nine experts": (_routed, [
        (torch.randn(12, 3), torch.randint(9, (12,))) for _ in range(2)]),
    "strides": (_far_apart, [(torch.randn(4, 6), torch.tensor(k)) for k in (8, 11)]),
    "unique": (lambda x: torch.unique(x.round()).sin(), sizes()),
    "repeated": (lambda x, k: x.repeat_interleave(k, 0).sin(), [
        (torch.randn(4, 5), torch.tensor(k)) for k in ([1, 2, 0, 1], [0, 0, 0, 0])]),
}


@pytest.mark.parametrize("name", DATA)
@pytest.mark.usefixtures("dynamic")
def test_numbers_that_are_data(name: str) -> None:
    fn, calls = DATA[name]
    calls_left(fn, calls)


@pytest.mark.usefixtures("dynamic")
def test_an_assertion_about_a_number_raises() -> None:
    run = rung(_checked)
    same(run(torch.ones(4, 2), torch.tensor(3))[0], torch.ones(3, 2) * 2)
    with pytest.raises(RuntimeError):
        run(torch.ones(4, 2), torch.tensor(5))


def test_slices_from_where_data_say(dynamic: None) -> None:
    """Torch asserts about the place where such a slice starts, which only the slice tells."""
    def fn(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        k = n[0].item()
        return x[k:k + 2] * 2

    run, x = rung(fn), torch.arange(10.0)
    for start in (3, 8, 9, 0, 10):
        same(run(x, torch.tensor([start])), fn(x, torch.tensor([start])))
