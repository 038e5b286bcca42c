"""What a forward graph keeps for its backward graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from agreement import rung
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from rung.tools.capture import capture
from rung.tools.given import Given

Function = Callable[[Tensor, Tensor], Tensor]

pytestmark = pytest.mark.usefixtures("fresh")


def kept(fn: Function, *args: Tensor) -> list[Tensor]:
    """What the forward graph computes and gives besides its one result."""
    forward = capture(Given("kept", fn, args), train=True).graphs[0].module
    _, *rest = forward.graph.output_node().args[0]
    return [n.meta["val"] for n in rest if isinstance(n, fx.Node) and n.op != "placeholder"]


def halves(x: Tensor, w: Tensor) -> Tensor:
    a, b = (x @ w).chunk(2, -1)
    return a * torch.tanh(b)


def two(x: Tensor, w: Tensor) -> Tensor:
    y = torch.exp(x) @ w
    return (y.view(2, 8, 16) * y.t().reshape(2, 8, 16)).sum(0)


CASES: dict[str, tuple[Function, list[int]]] = {
    "views of inputs": (lambda x, w: x.t() * w.view(16, 16).unsqueeze(0), []),
    "a view of what is made of an input": (lambda x, w: x.exp().t() * w, []),
    "a view of what is kept anyway": (lambda x, w: (x @ w).t() * (x @ w).sigmoid(), [256, 256]),
    "steps of one value": (lambda x, w: (y := x @ w) * (y.pow(3) * 0.1 + y).tanh(), [256]),
    "of two values": (lambda x, w: torch.tanh(x @ w + w @ x).sin(), [256]),
    "two views of one value": (two, [256, 256]),
    "parts of one value": (halves, [128, 128]),
    "a part of one value": (lambda x, w: (x @ w)[:, 3:5] ** 3, [32]),
    "what grows": (lambda x, w: torch.exp(x[:, None] * w.tanh()).sum(0), []),
    "what grows, in steps": (lambda x, w: (x[:, None] + w).sin().mul(2).cos(), []),
    "parts of what grows": (lambda x, w: (x[:, None] * w).exp()[::2] ** 2, []),
    "what does not grow": (lambda x, w: torch.exp(x * w).sin(), [256]),
    "a checkpoint": (lambda x, w: checkpoint(
        lambda x: torch.sin(x.t() @ w).t(), x.sin(), use_reentrant=False).cos(), [256])}
"""Functions of two [16, 16], and how many numbers are kept."""


@pytest.mark.parametrize("name", CASES)
def test_kept(name: str) -> None:
    fn, sizes = CASES[name]
    x, w = (torch.randn(16, 16, requires_grad=True) for _ in range(2))
    found = kept(fn, x, w)
    assert [y.numel() for y in found] == sizes
    for y in found:
        reach = sum((n - 1) * s for n, s in zip(y.shape, y.stride(), strict=True))
        assert reach < y.numel()  # no memory between the elements


def norm(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def test_casts_are_made_again() -> None:
    x, w = (torch.randn(n, 64).bfloat16().requires_grad_() for n in (16, 1))
    assert [y.shape for y in kept(norm, x, w)] == [(16, 1)]


@pytest.mark.parametrize("fn, count", [
    (lambda x, w: torch.relu(x.sin() * 2) * w, 0),
    (lambda x, w: torch.relu(x.sin() * 2) @ w, 1),  # that a library reads
    (lambda x, w: (x @ w).sin() * w, 1)])
def test_what_is_kept_anyway_is_read_again(fn: Function, count: int) -> None:
    x, w = (torch.randn(16, 16).bfloat16().requires_grad_() for _ in range(2))
    assert len(kept(fn, x, w)) == count


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, dynamic: bool) -> None:
    fn, _ = CASES[name]
    args = [torch.rand(16, 16, requires_grad=True) for _ in range(2)]
    runs = [rung(fn, dynamic=dynamic)(*args), fn(*args)]
    ours, eagers = (torch.autograd.grad(y, args, torch.ones_like(y)) for y in runs)
    torch.testing.assert_close(ours, eagers, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fn", [
    lambda x: (x[x > 0] * 2).exp().sum(),
    lambda x: (x[x.nonzero()[:, 0]].sin().reshape(-1, 1).mT * 3).sum(1)])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_only_data_tell(fn: Callable[[Tensor], Tensor]) -> None:
    compiled = torch.compile(fn, backend="rung", fullgraph=True, options={"strict": True})
    for n in (9, 20):
        x = torch.randn(n, requires_grad=True)
        (want,), (found,) = (torch.autograd.grad(f(x).sum(), x) for f in (fn, compiled))
        torch.testing.assert_close(found, want)


F = torch.nn.functional
T = torch.arange(16) * 31
LOSSES: dict[str, tuple[Function, list[tuple[int, torch.dtype]]]] = {
    "f32": (lambda x, w: F.cross_entropy(x, T), [(16, torch.float32)] * 2 + [(1, torch.float32)]),
    "bf16": (lambda x, w: F.cross_entropy(x.bfloat16() @ w.bfloat16(), T), [
        (8192, torch.bfloat16), (8192, torch.bfloat16), (262144, torch.bfloat16),
        (1, torch.bfloat16)] + [(16, torch.float32)] * 2),
    "of what is rounded": (lambda x, w: F.cross_entropy(x.bfloat16(), T), [
        (8192, torch.bfloat16), (1, torch.bfloat16)]),
    "bf16, in f32": (lambda x, w: F.cross_entropy(x.bfloat16().float(), T),
                     [(8192, torch.bfloat16)] + [(16, torch.float32)] * 2 + [(1, torch.float32)]),
    "of a product": (lambda x, w: F.cross_entropy(x @ w, T),
                     [(8192, torch.float32)] + [(16, torch.float32)] * 2 + [(1, torch.float32)]),
    "ignored classes": (lambda x, w: F.cross_entropy(x, T, ignore_index=31), [
        (16, torch.float32)] * 2 + [(1, torch.float32)]),
    "each row": (lambda x, w: F.cross_entropy(x, T, reduction="none"), [
        (16, torch.float32)] * 2 + [(1, torch.float32)]),
    "summed": (lambda x, w: F.cross_entropy(x, T, reduction="sum"), [
        (16, torch.float32)] * 2 + [(1, torch.float32)]),
    "weighted": (lambda x, w: F.cross_entropy(x, T, w[0].detach()), [
        (16, torch.float32)] * 2 + [(1, torch.float32)]),
    "smoothed": (lambda x, w: F.cross_entropy(x, T, label_smoothing=0.1), [
        (16, torch.float32)] * 2 + [(1, torch.float32), (16, torch.bool), (1, torch.int64)]),
    "in two dimensions": (lambda x, w: F.cross_entropy(x.view(2, 512, 8), T.view(2, 8)), [
        (16, torch.float32)] * 2 + [(1, torch.float32)]),
    "a softmax": (lambda x, w: (x @ w).softmax(-1).pow(2).sum(), [
        (8192, torch.float32), (16, torch.float32), (16, torch.float32)]),
    "weights of a product": (lambda x, w: (x @ w).softmax(-1) @ w, [(8192, torch.float32)])}
"""Functions of [16, 512] and [512, 512], and what is kept: how many numbers of which type."""


@pytest.mark.parametrize("name", LOSSES)
def test_logits_are_kept_with_two_numbers_a_row(name: str) -> None:
    fn, want = LOSSES[name]
    x, w = (torch.randn(n, 512, requires_grad=True) for n in (16, 512))
    found = [(y.numel(), y.dtype) for y in kept(fn, x, w) if y.dtype is not torch.int64 or (
        y.numel() == 1)]
    assert sorted(found, key=str) == sorted(want, key=str)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_losses(name: str) -> None:
    fn, _ = LOSSES[name]
    args = [(torch.randn(n, 512) / 8).requires_grad_() for n in (16, 512)]
    runs = [rung(fn)(*args), fn(*args)]
    ours, eagers = (torch.autograd.grad(y, args, torch.ones_like(y), allow_unused=True)
                    for y in runs)
    near = {"rtol": 1e-2, "atol": 1e-3} if "bf16" in name or "rounded" in name else {
        "rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(runs[0], runs[1], **near)
    for a, b in zip(ours, eagers, strict=True):
        torch.testing.assert_close(a, b, **near)


def test_few_classes_are_kept_as_they_are() -> None:
    x = torch.randn(64, 10, requires_grad=True)
    labels = torch.arange(64) % 10
    found = kept(lambda x, _: F.cross_entropy(x, labels), x, x)
    assert 640 in [y.numel() for y in found]


def test_eagers_bits_need_eagers_softmax() -> None:
    x = torch.randn(16, 512, requires_grad=True)
    fn = torch.compile(lambda x: F.cross_entropy(x, T), backend="rung", options={
        "precision": "eager", "strict": True})
    for a, b in zip(*((y, *torch.autograd.grad(y, x)) for y in (fn(x), F.cross_entropy(x, T))),
                    strict=True):
        assert torch.equal(a, b)


def test_rows_of_infinities_and_ignored_ones() -> None:
    """NaN where eager has it, and nowhere else."""
    x = torch.randn(16, 512)
    x[1, 5], x[2, 7], x[3], x[4, 9] = -torch.inf, torch.nan, -torch.inf, torch.inf
    labels = T.clone()
    labels[5] = -100
    for rows in (x, x[[0, 1, 5, 6]]):
        here = labels[:len(rows)]
        x1, x2 = (rows.clone().requires_grad_() for _ in range(2))
        ours = rung(lambda x, t: F.cross_entropy(x, t, reduction="none"))(x1, here)
        eagers = F.cross_entropy(x2, here, reduction="none")
        torch.testing.assert_close(ours, eagers, equal_nan=True)
        for y in (ours, eagers):
            y.sum().backward()
        torch.testing.assert_close(x1.grad, x2.grad, equal_nan=True, rtol=1e-4, atol=1e-6)
