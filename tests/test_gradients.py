"""Gradients under what torch puts around a compiled function: checkpoints, hooks, transforms of
`torch.func`, buffers that change, autograd functions of the user, derivatives of derivatives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from agreement import leaves, rung, same
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Step = Callable[[Callable[..., Any], nn.Module], list[Any]]


@pytest.fixture(autouse=True)
def doubles(fresh: None) -> Iterator[None]:
    torch.set_default_dtype(torch.float64)  # what is tried here is not rounding
    yield
    torch.set_default_dtype(torch.float32)


def alike(make: Callable[[], nn.Module], step: Step, strict: bool = True) -> None:
    """A step gives in eager and compiled the same, and leaves the same parameters, gradients and
    buffers, three times over."""
    theirs = make()
    ours = copy.deepcopy(theirs)
    compiled = rung(ours, strict)
    for n in range(3):
        found = []
        for run, model in ((theirs, theirs), (compiled, ours)):
            torch.manual_seed(n)
            found.append([*step(run, model), *model.state_dict().values(),
                          *(p.grad for p in model.parameters())])
        for want, got in zip(*found, strict=True):
            same(got, want)


class Block(nn.Module):
    """A layer whose norm has running statistics, and a buffer that counts and scales."""

    calls: torch.Tensor

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 6)
        self.norm, self.p = nn.BatchNorm1d(12), p
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = F.gelu(self.norm(self.first(x))) * self.calls
        return x + self.last(F.dropout(y, self.p))


class Stack(nn.Module):
    """Blocks that keep nothing for the backward pass but what comes into them."""

    def __init__(self, p: float, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.p = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), p
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + checkpoint(self.part, layer, x, use_reentrant=self.reentrant)
        return x

    def part(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.silu(layer(x)), self.p)


def trained(run: Callable[..., Any], model: nn.Module) -> list[Any]:
    x = torch.randn(5, 6, requires_grad=True)
    y = run(x)
    y.sin().sum().backward()
    return [y.detach(), x.grad]


def test_a_buffer_that_changes_in_training() -> None:
    """The gradient is of the buffer as it was read, whatever the call then made of it."""
    alike(Block, trained)


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(p: float, reentrant: bool) -> None:
    """What is computed again draws the random numbers that it drew before."""
    alike(lambda: Stack(p, reentrant), trained, strict=not reentrant)


def test_gradients_add_up() -> None:
    def step(run: Callable[..., Any], model: nn.Module) -> list[Any]:
        for p in model.parameters():
            p.grad = None
        for _ in range(2):
            run(torch.randn(4, 6)).square().mean().backward()
        return []
    alike(Block, step)


def test_a_graph_is_kept_for_a_second_pass() -> None:
    def step(run: Callable[..., Any], model: nn.Module) -> list[Any]:
        x = torch.randn(4, 6, requires_grad=True)
        loss = run(x).sin().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [x.grad]
    alike(Block, step)


def test_hooks_of_tensors_parameters_and_modules() -> None:
    seen: list[torch.Size] = []

    def step(run: Callable[..., Any], model: nn.Module) -> list[Any]:
        x = torch.randn(4, 6, requires_grad=True)
        x.register_hook(lambda g: g * 2)
        handles = [p.register_hook(lambda g: g.clamp(-0.1, 0.1)) for p in model.parameters()]
        handles += [p.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))
                    for p in model.parameters()]
        y = run(x)
        y.register_hook(lambda g: g + 1)
        y.sin().sum().backward()
        for handle in handles:
            handle.remove()
        return [x.grad]
    alike(Block, step)
    assert len(seen) == 6 * len(list(Block().parameters()))


def test_a_module_hook_inside_the_graph() -> None:
    def make() -> nn.Module:
        model = Block()
        model.first.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        model.norm.register_forward_hook(lambda *args: args[-1] + 1)
        model.last.register_full_backward_hook(lambda _, into, out: (into[0] * 3,))
        return model
    alike(make, trained, strict=False)


class Cubed(torch.autograd.Function):
    """A function with a gradient of its own, which is not the true one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x ** 3

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        x, = ctx.saved_tensors
        return grads[0] * x.abs() + 1


@pytest.mark.parametrize("fn", [
    lambda x: Cubed.apply(x * 2) + x, lambda x: x.detach() * x,
    lambda x: (x * 2).sum(0).expand(4, 6),
    lambda x: torch.cat([x[:2].detach(), x[2:]]) * x, lambda x: x.clone().mul_(x).relu_(),
    lambda x: torch.where(x > 0, x, x.detach()), lambda x: x.view(6, 4).t().contiguous().exp()])
def test_gradients_of_functions(fn: Callable[..., Any]) -> None:
    found = []
    for run in (fn, rung(fn)):
        x = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()
        run(x).sin().sum().backward()
        found.append(x.grad)
    same(found[1], found[0])


TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "vmap": torch.vmap,
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x.cos(),)),
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](x),
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
    "hessian": lambda f: torch.func.hessian(lambda x: f(x).sum()),
    "gradients of samples": lambda f: torch.vmap(torch.func.grad(lambda x: f(x).sum())),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_inside_the_compiled_function(name: str) -> None:
    fn = TRANSFORMS[name](lambda x: torch.tanh(x) * x.softmax(-1))
    x = torch.randn(3, 4)
    for got, want in zip(leaves(rung(fn)(x)), leaves(fn(x)), strict=True):
        same(got, want)


def test_modules_called_with_other_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    def fn(params: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
        return torch.func.grad(
            lambda p: torch.func.functional_call(model, p, (x,)).square().mean())(params)
    params = {k: v.detach() * 2 for k, v in model.named_parameters()}
    x = torch.randn(7, 4)
    got, want = rung(fn)(params, x), fn(params, x)
    assert list(got) == list(want)
    for name in want:
        same(got[name], want[name])


@pytest.mark.parametrize("order", [1, 2, 3])
def test_derivatives_of_derivatives_outside(order: int) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * x.exp()
    found = []
    for run in (fn, rung(fn)):
        x = torch.linspace(-1, 1, 9, dtype=torch.float64).requires_grad_()
        y = run(x).sum()
        for _ in range(order):
            y, = torch.autograd.grad(y.sum(), x, create_graph=True)
        found.append(y.detach())
    same(found[1], found[0])


def test_frozen_and_shared_parameters() -> None:
    def make() -> nn.Module:
        model = Block()
        model.first.weight.requires_grad_(False)
        model.last.weight = nn.Parameter(model.first.weight.detach().t().contiguous())
        model.norm.weight = model.first.bias
        return model
    alike(make, trained)


def test_a_loop_of_training_changes_what_is_trained() -> None:
    def step(run: Callable[..., Any], model: nn.Module) -> list[Any]:
        for p in (model.first.weight, model.first.bias):  # type: ignore[union-attr]
            p.requires_grad_(not p.requires_grad)  # type: ignore[union-attr]
        return trained(run, model)
    alike(Block, step)


@pytest.mark.parametrize("dynamic", [None, True])
def test_zeros_that_have_no_memory(dynamic: bool | None) -> None:
    """What autograd gives for the gradient of `sgn`, into a backward graph and as an argument."""
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sin() + x[-1]
    grads = []
    for run in (fn, rung(fn, strict=False, dynamic=dynamic)):
        x = torch.ones(3, requires_grad=True)
        grad, = torch.autograd.grad(run(x).sgn().sum(), x)
        no_memory, = torch.autograd.grad(x.sgn().sum(), x)
        grads += [(grad, run(no_memory), run(x))]
    for want, got in zip(*grads, strict=True):
        same(got, want)


@pytest.mark.parametrize("name", ["gather", "embedding"])
def test_sparse_gradients(name: str) -> None:
    """Of which library calls make what library calls read; they add up as in eager."""
    def fn(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        if name == "embedding":
            return nn.functional.embedding(at, x, sparse=True).sin() + x[0]
        return torch.gather(x, 1, at, sparse_grad=True).sin() * torch.gather(
            x * 2, 1, at + 1, sparse_grad=True)
    found = []
    for run in (fn, rung(fn)):
        x = torch.arange(12.0).reshape(3, 4).requires_grad_()
        y = run(x, torch.tensor([[0, 2], [1, 1]]))
        y.square().sum().backward()
        assert x.grad is not None
        found.append((x.grad.layout, y, x.grad.to_dense()))
    assert found[0][0] is found[1][0]
    for want, got in zip(found[0][1:], found[1][1:], strict=True):
        same(got, want)
