"""Tensors without memory, on other devices, and under modes of torch: what eager gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from rung.frontends.torch import compat
from rung.frontends.torch.compat import has_no_memory
from rung.targets.cpu import glue

Fn = Callable[..., Any]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def compiled(fn: Fn, **how: Any) -> Fn:
    made: Fn = torch.compile(fn, backend="rung", **how)
    return made


def wave(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) + 1


def told(x: torch.Tensor) -> tuple[object, ...]:
    return type(x), x.device, x.dtype, x.shape


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_fake_arguments(warm: bool) -> None:
    f = compiled(wave)
    if warm:
        f(torch.ones(3))
    with FakeTensorMode():
        x = torch.ones(3)
        assert told(f(x)) == told(x)
    assert told(f(x)) == told(x)
    assert torch.equal(f(torch.zeros(3)), torch.ones(3))


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("fn", [lambda n: torch.zeros(n) + 1, lambda n: torch.rand(n) + 1,
                                lambda n: torch.tensor([1.0, 2.0]) * n])
def test_fake_results_without_arguments(fn: Fn, warm: bool) -> None:
    f = compiled(fn)
    if warm:
        f(2)
    with FakeTensorMode():
        assert isinstance(f(2), FakeTensor)
    assert type(f(2)) is torch.Tensor


def test_fake_parameters_and_gradients() -> None:
    with FakeTensorMode():
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
        x = torch.randn(2, 3)
        compiled(net)(x).sum().backward()
    grads = [p.grad for p in net.parameters()]
    assert [told(g) for g in grads if g is not None] == [
        (FakeTensor, p.device, p.dtype, p.shape) for p in net.parameters()]
    assert isinstance(compiled(net)(x), FakeTensor)


def test_a_backward_pass_under_a_mode() -> None:
    w = torch.ones(3, requires_grad=True)
    y = compiled(lambda x, w: torch.sin(x * w).sum())(torch.zeros(3), w)
    with FakeTensorMode(allow_non_fake_inputs=True):
        y.backward()
    assert isinstance(w.grad, FakeTensor)


def test_real_arguments_are_refused_by_the_mode() -> None:
    f, x = compiled(wave), torch.ones(3)
    f(x)
    with FakeTensorMode(), pytest.raises(AssertionError, match="convert all Tensors to FakeTen"):
        f(x)


def test_wrappers_of_fake_tensors() -> None:
    f = compiled(lambda x: x * 2 + 1)
    y = f(TwoTensor(torch.zeros(3), torch.ones(3)))
    assert (y.a.tolist(), y.b.tolist()) == ([1.0] * 3, [3.0] * 3)
    with FakeTensorMode():
        x = TwoTensor(torch.zeros(3), torch.ones(3))
    y = f(x)
    assert isinstance(y, TwoTensor) and isinstance(y.a, FakeTensor)


def test_fake_tensors_that_stand_for_others() -> None:
    """Dynamo's splitter for data-parallel training compiles with fake arguments."""
    mode = FakeTensorMode()
    with mode:
        x = torch.ones(3)
    context = TracingContext(mode)
    with tracing(context):
        assert has_no_memory(x)
        context.fakify_first_call = True
        assert not has_no_memory(x) and has_no_memory(torch._efficientzerotensor(3))


def test_functional_tensors() -> None:
    y = compiled(wave)(torch._to_functional_tensor(torch.zeros(3)))
    assert torch._is_functional_tensor(y)
    assert torch.equal(torch._from_functional_tensor(y), torch.ones(3))


class Operators(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_see_operators() -> None:
    f, product = compiled(wave), compiled(lambda x: (x @ x + 1).sum())
    x, y = torch.eye(2, requires_grad=True), torch.zeros(2)
    f(y), product(x).backward()
    with Operators() as mode:
        f(y)
    aten = torch.ops.aten
    assert mode.seen == [aten.sin.default, aten.add.Tensor]
    with FlopCounterMode(display=False) as counter:
        product(x).backward()
    assert counter.get_total_flops() == 3 * 2 * 2 * 2 * 2


@pytest.mark.parametrize("fn", [
    lambda: torch.zeros(3, device="meta"), lambda: torch.full((2,), 1.5, device="meta").exp(),
    lambda: torch.empty(4, 4, device="meta").normal_() * 0.02,
    lambda: torch.arange(5, device="meta") * 2])
def test_graphs_of_another_device(fn: Fn) -> None:
    assert told(compiled(fn)()) == told(fn())


def test_graphs_of_two_devices() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + 1, x.to("meta") * 2, torch.zeros(3, device="meta") + 1

    x = torch.ones(3)
    assert list(map(told, compiled(fn)(x))) == list(map(told, fn(x)))


def test_a_default_device() -> None:
    f = compiled(lambda: torch.zeros(3) + 1)
    assert f().device.type == "cpu"
    with torch.device("meta"):
        assert f().device.type == "meta"


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize("first", [0, 1])
def test_freed_memory(first: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(glue, "glue", lambda: None)
    x = torch.zeros(8)
    part = x[first:]
    f = compiled(wave)
    assert torch.equal(f(part), torch.ones(8 - first))
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="no memory"):
        f(part)
    x.untyped_storage().resize_(32)
    x.zero_()
    assert torch.equal(f(part), torch.ones(8 - first))


def test_an_assertion_about_data() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x > 0).all())
        return x + 1

    f = compiled(fn)
    assert torch.equal(f(torch.ones(3)), torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value"):
        f(torch.zeros(3))


def test_the_first_call_of_a_wrapped_graph_runs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTAutograd makes it under a mode of its own, which sees custom operators alone."""
    seen, real = list[bool](), compat.is_watched

    def noted() -> bool:
        seen.append(real())
        return seen[-1]
    monkeypatch.setattr(compat, "is_watched", noted)
    compiled(lambda x: x.exp() * 2)(torch.ones(3, requires_grad=True))
    assert seen == [False]
