"""Sizes: as many compilations as with AOTAutograd alone, and programs, tensors and indices that are
large."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from agreement import agrees, leaves, rung, same
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from rung import entry
from rung.core import trace
from rung.frontends.torch import compat

Calls = Sequence[Sequence[Any]]

pytestmark = pytest.mark.usefixtures("fresh")


def compiled_for(run: Callable[..., Any], calls: Calls) -> tuple[int, list[Any]]:
    """How many graphs Dynamo makes for the calls, and all their results."""
    torch._dynamo.reset()
    counters.clear()
    results = [x for args in calls for x in leaves(run(*args))]
    return counters["stats"]["unique_graphs"], results


def _attention(x: torch.Tensor) -> Any:
    q, k, v = x.split(8, -1)
    scores = torch.softmax(q @ k.mT / 8 ** 0.5, -1)
    return F.layer_norm(scores @ v, (8,)), scores.sum(-2).relu(), x.flatten(0, 1).cumsum(0)


def _joined(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = torch.cat([x, y]).relu()
    return z[: len(x)] * x, z.sum(0), F.pad(z, (1, 2)), z.t().reshape(-1)[::2]


SERIES: dict[str, tuple[Callable[..., Any], Calls]] = {
    "batch": (_attention, [(torch.randn(n, 5, 24),) for n in (4, 3, 1, 0, 64, 2)]),
    "sequence": (_attention, [(torch.randn(2, n, 24),) for n in (7, 12, 1, 0, 100, 3)]),
    "batch and sequence": (_attention, [
        (torch.randn(n, m, 24),) for n, m in ((3, 4), (4, 6), (1, 5), (5, 1), (0, 3), (3, 0))]),
    "two tensors": (_joined, [
        (torch.randn(n, 3), torch.randn(m, 3)) for n, m in (
            (2, 5), (6, 5), (7, 3), (1, 4), (4, 0))]),
    "types": (lambda x: x * 2 + 1, [(torch.ones(3, dtype=d),) for d in (
        torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.float32)]),
    "strides": (lambda x: x.sin() + x, [(x,) for x in (
        torch.randn(4, 6), torch.randn(6, 4).t(), torch.randn(4, 1).expand(4, 6),
        torch.randn(8, 12)[::2, ::2], torch.randn(4, 6))]),
    "numbers": (lambda x, k: x * k, [(torch.ones(3), k) for k in (2, 3, 4, 0.5, 1.5, 2.5, True)]),
    "ranks": (lambda x: x.softmax(-1), [(torch.randn((2,) * n),) for n in (1, 2, 3, 1)]),
    "places in memory": (lambda x: x * 2, [(torch.randn(9)[n:n + 4],) for n in range(5)]),
    "gradients": (lambda x: x.exp(), [
        (torch.ones(3, requires_grad=g),) for g in (False, True, False)]),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", SERIES)
def test_no_compilation_that_others_do_without(name: str, dynamic: bool | None) -> None:
    fn, calls = SERIES[name]
    ours, found = compiled_for(rung(fn, dynamic=dynamic), calls)
    least, _ = compiled_for(torch.compile(fn, backend="aot_eager", dynamic=dynamic), calls)
    assert 0 < ours <= least
    want = [x for args in calls for x in leaves(fn(*args))]
    for a, b in zip(found, want, strict=True):
        same(a, b)


NUMBERS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "factors": lambda x, k: (
        x * k, x + 2 * k - 1, x / k, x.add(x, alpha=k), x == k, x.clamp(max=k)),
    "exponents": lambda x, k: x.float().abs().pow(k),
    "quotients": lambda x, k: (x * (k // 2), x + k % 3, x - (k * 4 + 3) // 4),
    "moves": lambda x, k: (x.roll(k, 0), x.roll((k, 1 - k), (0, 1)) * k),
    "fillings": lambda x, k: (
        torch.full((3,), k), torch.where(x > k, x, k), x.masked_fill(x > 1, k)),
    "of a loop": lambda x, k: ((x.double().sin() * k).sin() * k).sin() * k,
    "given back": lambda x, k: (x + k, k * k - k, k // 2, k % 5),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_whole_numbers_of_any_sign(name: str) -> None:
    fn = NUMBERS[name]
    run = rung(fn, dynamic=True)
    for k in (2, -3, 7, -8, 5):
        for x in (torch.rand(4, 5).double(), torch.arange(20).view(4, 5), torch.ones(2, 3).char()):
            for got, want in zip(leaves(run(x, k)), leaves(fn(x, k)), strict=True):
                same(got, want)


def test_equal_kernels_keep_the_names_of_their_own_sizes() -> None:
    x, y = torch.randn(3, 4), torch.randn(4, 3)
    agrees(lambda x: x.sum(1), [x], dynamic=True)
    agrees(lambda x, y: (x.sin(), y.sum(1)), [x, y], dynamic=True)


FLOATS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "softshrink": F.softshrink, "hardshrink": F.hardshrink, "leaky_relu": F.leaky_relu,
    "threshold": lambda x, k: F.threshold(x, k, 0.5), "elu": F.elu, "celu": F.celu,
    "softplus": F.softplus, "softplus above": lambda x, k: F.softplus(x, 1.0, k)}


@pytest.mark.parametrize("name", FLOATS)
def test_one_graph_for_all_floats(name: str) -> None:
    """After the first float, which torch takes for a constant; the values are the kernel's."""
    fn, special = FLOATS[name], [float("nan"), float("inf"), -float("inf"), 0.0, -0.0]
    x = torch.tensor([*special, *torch.linspace(-4, 4, 9).tolist(), 0.3, -0.3])
    run, results = rung(fn), list[Sequence[torch.Tensor]]()
    counters.clear()
    for k in (2.0, 0.3, 3.0, 0.25):
        xs = [x.clone().requires_grad_(name != "celu") for _ in range(2)]  # whose gradient asks
        ys = run(xs[0], k), fn(xs[1], k)
        results.append(ys)
        if ys[1].requires_grad:
            grads = [torch.autograd.grad(y.sum(), x)[0] for x, y in zip(xs, ys, strict=True)]
            # at NaN, eager's vectors for elu are NaN on some CPUs, where its loop is not
            results.append([g[1:] for g in grads] if name == "elu" else grads)
    assert counters["stats"]["unique_graphs"] == 2
    exact = name in ("softshrink", "hardshrink", "leaky_relu", "threshold")
    for got, want in results:
        same(got, want, exact)
        assert not exact or torch.equal(got.signbit() | got.isnan(), want.signbit() | want.isnan())


def _into(view: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def fn(x: torch.Tensor, y: torch.Tensor, *sizes: int) -> Any:
        v = view(x, *sizes)
        v[:, 0] = 1.0
        v[-1].mul_(3)
        return v * 2, x + y
    return fn


SPLIT: dict[str, tuple[Callable[..., torch.Tensor], Calls]] = {
    "two": (lambda x, b, h: x.view(b, h, 2), [(12, 2, 3), (40, 4, 5)]),
    "three": (lambda x, a, b, c: x.view(a, b, c), [(24, 2, 3, 4), (60, 5, 3, 4)]),
    "four": (lambda x, a, b, c: x.view(a, b, c, 2)[..., 1], [(48, 2, 3, 4), (120, 5, 3, 4)]),
    "the rest": (lambda x, b, c: x.view(b, -1, c), [(24, 2, 3), (60, 5, 3)]),
    "transposed": (lambda x, b, c: x.view(b, c).t(), [(24, 4, 6), (35, 5, 7)]),
    "checked": (lambda x, b, c: [torch._check(b * c == x.shape[0]), x.view(b, c)][1],
                [(24, 4, 6), (35, 5, 7)]),
}


@pytest.mark.parametrize("name", SPLIT)
def test_writes_through_views_by_integers(name: str) -> None:
    """Whose number of elements, b*(n//b), is the argument's n, by torch's guards."""
    view, series = SPLIT[name]
    first, *more = ([torch.randn(n), torch.randn(n), *sizes] for n, *sizes in series)
    agrees(_into(view), first, more=more, dynamic=True)


def test_a_mark_on_a_size_is_enough() -> None:
    xs = [torch.randn(n, 5, 24) for n in (3, 1, 0, 70)]
    for x in xs:
        torch._dynamo.maybe_mark_dynamic(x, 0)
    ours, _ = compiled_for(rung(_attention), [(x,) for x in xs])
    least, _ = compiled_for(torch.compile(_attention, backend="aot_eager"), [(x,) for x in xs])
    assert ours <= least


def test_a_thousand_ops_and_their_gradient() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        for n in range(500):
            x = torch.sin(x) if n % 3 else x * 1.01 + 0.1
        return x
    agrees(fn, [torch.randn(33, dtype=torch.float64, requires_grad=True)])


def test_hundreds_of_layers_share_kernels() -> None:
    model = nn.Sequential(*(m for _ in range(150) for m in (nn.Linear(8, 8), nn.Tanh())))
    x = torch.randn(3, 8)
    same(rung(model)(x), model(x))


def test_hundreds_of_arguments_and_results() -> None:
    def fn(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        total = torch.stack([x.sum() for x in xs]).sum()
        return [x * n + total for n, x in enumerate(xs)]
    xs = [torch.randn(n % 5, 3) for n in range(300)]
    for a, b in zip(rung(fn)(xs), fn(xs), strict=True):
        same(a, b)


def test_hundreds_of_results_of_one_value() -> None:
    agrees(lambda x: [x * n for n in range(300)], [torch.randn(7, requires_grad=True)])


@pytest.mark.parametrize("fn", [
    lambda x: x.view(torch.int8)[-3:] + 1, lambda x: (x == 1).sum(), lambda x: x.argmax(),
    lambda x: x.view(-1, 2).t()[1].sum(dtype=torch.int64),
    lambda x: x[torch.tensor([2 ** 31 + 5])]])
@pytest.mark.slow
def test_more_elements_than_32_bits_count(fn: Callable[..., Any]) -> None:
    x = torch.zeros(2 ** 31 + 8, dtype=torch.int8)
    x[2 ** 31 + 5] = 1
    same(rung(fn)(x), fn(x))


@pytest.mark.slow
def test_rows_that_lie_further_apart_than_32_bits_count() -> None:
    x = torch.zeros(2 ** 31 + 8, dtype=torch.int8)
    rows = x.as_strided((2, 8), (2 ** 31, 1)).copy_(torch.arange(16).view(2, 8))
    agreed = rung(lambda x, i: (x * 2, x.sum(0), x[i], x.float().softmax(0)))
    at = torch.tensor([1, 0, 1])
    for a, b in zip(agreed(rows, at), (rows * 2, rows.sum(0), rows[at], rows.float().softmax(0)),
                    strict=True):
        same(a, b)


def test_nested_tensors() -> None:
    """The size of a jagged dimension is a number without bounds."""
    rows = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
    with trace.listen() as events:
        found = rung(lambda t: (t * 2).sin())(rows)
    for a, b in zip(found.unbind(), rows.unbind(), strict=True):
        torch.testing.assert_close(a, (b * 2).sin())
    assert "compiled" in {e.kind for e in events}


# ---- strides, those of dimensions of size 1 too
LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "channels last": (lambda a: a + 1, torch.randn(1, 4, 3, 5).to(
        memory_format=torch.channels_last)),
    "one channel": (lambda a: a.relu(), torch.randn(2, 1, 3, 5).to(
        memory_format=torch.channels_last)),
    "one row": (lambda a: a.exp(), torch.randn(2, 4, 1, 5).to(memory_format=torch.channels_last)),
    "three dimensions": (lambda a: a - 1, torch.randn(1, 2, 3, 4, 5).to(
        memory_format=torch.channels_last_3d)),
    "transposed": (lambda a: a * 2, torch.randn(1, 5, 3).transpose(1, 2)),
    "a row": (lambda a: a * 3, torch.randn(5, 1).t()),
    "a column": (lambda a: a * 3, torch.randn(1, 5).t()),
    "a batch that became 1": (lambda a: a + 2, torch.randn(3, 1, 5).transpose(0, 1)),
    "a part": (lambda a: a[:, :1] * 2, torch.randn(4, 6).t()),
    "a part of rows": (lambda a: a[1:2, :, ::2] + 1, torch.randn(3, 4, 6)),
    "joined": (lambda a: torch.cat([a, a], 1), torch.randn(1, 4, 3, 5).to(
        memory_format=torch.channels_last)),
    "stacked": (lambda a: torch.stack([a, a], 1) + 1, torch.randn(1, 3, 4).transpose(1, 2)),
    "heads": (lambda a: a.view(1, 8, 2, 4).transpose(1, 2) * 0.5, torch.randn(1, 8, 8)),
    "one head": (lambda a: a.view(2, 8, 1, 4).transpose(1, 2).sin(), torch.randn(2, 8, 4)),
    "heads as they are": (lambda a: (a * 2).view(1, 8, 2, 4).transpose(1, 2),
                          torch.randn(1, 8, 8)),
    "scores": (lambda a: (a @ a.transpose(1, 2)).softmax(-1).transpose(0, 1),
               torch.randn(1, 4, 3)),
    "kept sums": (lambda a: a.sum(1, keepdim=True), torch.randn(4, 5, 6).permute(2, 0, 1)),
    "maxima": (lambda a: a.amax((2, 3), keepdim=True), torch.randn(2, 4, 3, 5).to(
        memory_format=torch.channels_last)),
    "permuted": (lambda a: (a + 1).permute(2, 0, 1), torch.randn(1, 5, 3)),
    "spread": (lambda a: a[:, None] * a[None], torch.randn(5, 1).t()),
    "a convolution": (lambda a: torch.conv2d(a, torch.ones(2, 4, 1, 1)).relu(),
                      torch.randn(1, 4, 3, 5).to(memory_format=torch.channels_last)),
    "a norm": (lambda a: torch.layer_norm(a, a.shape[-1:]), torch.randn(3, 1, 5).transpose(0, 1)),
    "a number": (lambda a: a.sum().reshape(1, 1).t(), torch.randn(2, 2)),
    "nothing": (lambda a: a.unsqueeze(1) * 1.5, torch.randn(3, 1, 4).transpose(0, 2)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_strides_are_eagers_in_all_dimensions(monkeypatch: pytest.MonkeyPatch, dynamic: bool,
                                              grad: bool) -> None:
    """As torch states them while it traces, or as AOTAutograd alone leaves them where these differ;
    gradients are laid out as their parameters."""
    def all_of(*xs: torch.Tensor) -> list[torch.Tensor]:
        return [f(x) for (f, _), x in zip(LAYOUTS.values(), xs, strict=True)]

    def strides(run: Callable[..., Any]) -> list[tuple[int, ...]]:
        torch._dynamo.reset()
        xs = [x.detach().requires_grad_(grad) for _, x in LAYOUTS.values()]
        outs = run(*xs)
        grads = torch.autograd.grad([y.sum() for y in outs], xs) if grad else ()
        return [y.stride() for y in (*outs, *grads)]

    def noted(gm: torch.fx.GraphModule, *args: Any, **named: Any) -> Any:
        results = [n.meta["val"] for n in gm.graph.output_node().args[0] if n is not None]
        of = [[compat.expected(n) for n in x.stride()] if isinstance(x, torch.Tensor) else []
              for x in results]
        told.extend(map(tuple, of[:len(LAYOUTS)]))
        return compile_graph(gm, *args, **named)
    told, compile_graph = list[tuple[int, ...]](), entry.rung.compile_graph
    monkeypatch.setattr(entry.rung, "compile_graph", noted)
    ours = strides(rung(all_of, dynamic=dynamic))
    theirs = strides(torch.compile(all_of, backend="aot_eager", dynamic=dynamic))
    names = [*LAYOUTS, *(f"gradient of {name}" for name in LAYOUTS)]
    wrong = {name: found for name, *found in zip(names, ours, told, theirs, strict=False)
             if found[0] not in found[1:]}
    assert wrong == {} and len(ours) == len(told)


def test_results_are_guarded_as_eagers() -> None:
    """A second function is not compiled again for what a first one gives in place of eager."""
    first, x = LAYOUTS["heads"]
    given = [first(x), rung(first)(x)]
    counters.clear()
    run = torch.compile(lambda h: h * 2, backend="eager")
    for h in given:
        run(h)
    assert counters["stats"]["unique_graphs"] == 1
