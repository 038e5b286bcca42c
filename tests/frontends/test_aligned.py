"""Products of 16-bit matrices whose rows begin at odd addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import fx
from torch.nn import functional as F

from rung.core import trace
from rung.frontends.torch import aligned

aten = torch.ops.aten
ODD = 129


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, of which there is none here."""
    monkeypatch.setitem(aligned.ROWS, "cpu", 16)
    torch.manual_seed(0)


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def traced(fn: Callable[..., torch.Tensor], *args: torch.Tensor) -> fx.GraphModule:
    """The graph after the pass, run once with what it was traced with."""
    from torch.fx.experimental.proxy_tensor import make_fx

    gm: fx.GraphModule = make_fx(fn, tracing_mode="fake")(*args)
    assert aligned.align(gm.graph)
    gm.graph.lint()
    gm.recompile()
    found, want = gm(*args), fn(*args)
    assert found.shape == want.shape and found.stride() == want.stride()
    torch.testing.assert_close(found, want)
    return gm


def sizes(gm: fx.GraphModule) -> list[tuple[int, ...]]:
    """Rows, terms and columns of each product."""
    return [(*n.args[-2].meta["val"].shape, n.args[-1].meta["val"].shape[1])  # type: ignore
            for n in gm.graph.nodes if n.target in aligned.PRODUCTS]


def copies(gm: fx.GraphModule) -> int:
    return sum(n.target is aten.constant_pad_nd.default for n in gm.graph.nodes)


A, W = half(256, 512), half(512, ODD)


@pytest.mark.parametrize("fn, args, want", [
    (torch.mm, (A, W), (256, 512, 136)),
    (lambda a, w: a @ w.t(), (A, half(ODD, 512)), (256, 512, 136)),
    (lambda b, a, w: torch.addmm(b, a, w), (half(ODD), A, W), (256, 512, 136)),
    (torch.mm, (half(256, ODD), half(ODD, 512)), (256, 136, 512)),
    (lambda a, w: a.t() @ w, (half(512, ODD), half(512, 256)), (136, 512, 256)),
    (lambda a, w: a @ w.t(), (half(256, ODD), half(512, ODD)), (256, 136, 512)),
    (lambda a, w: (a @ w)[3:200].relu(), (A, W), (256, 512, 136)),
    (lambda a, w: (a @ w).view(4, 64, ODD) + 1, (A, W), (256, 512, 136)),
    (lambda a, w: (a @ w).view(-1), (A, W), (256, 512, 136)),
    (lambda a, w: (a @ w).as_strided((8, 8), (2, 3)), (A, W), (256, 512, 136)),
])
def test_a_product_gets_room(fn: Callable[..., torch.Tensor], args: Sequence[torch.Tensor],
                             want: tuple[int, ...]) -> None:
    assert sizes(traced(fn, *args)) == [want]


@pytest.mark.parametrize("a, b", [
    (A.float(), W.float()), (A, half(512, 136)), (A[:100], W), (half(256, 2 * 512)[:, ::2], W)])
def test_others_stay(a: torch.Tensor, b: torch.Tensor) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(torch.mm, tracing_mode="fake")(a, b)
    before = str(gm.graph)
    assert not aligned.align(gm.graph) and str(gm.graph) == before


def test_a_matrix_that_two_products_read_is_copied_once() -> None:
    def both(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (g @ w).sum() + (g.t() @ x).sum() + (x @ w.t()).float().sum()

    gm = traced(both, half(256, ODD), A, half(ODD, 512))
    assert copies(gm) == 2 and sizes(gm) == [(256, 136, 512), (136, 256, 512), (256, 512, 136)]


def test_training() -> None:
    """Its own gradients, of float parameters under autocast; the logits are kept as they are."""
    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = torch.nn.Linear(256, 512), torch.nn.Linear(512, ODD, False)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                logits = self.outer(self.inner(x).relu())
            return F.cross_entropy(logits.float().view(-1, ODD), y.view(-1))

    model, x = Head(), torch.randn(2, 128, 256)
    y = torch.randint(ODD, (2, 128))
    want = torch.autograd.grad(model(x, y), list(model.parameters()))
    with trace.listen() as events:
        run = torch.compile(model, backend="rung", options={"strict": True})
        found = torch.autograd.grad(run(x, y), list(model.parameters()))
    assert sum(e.place == "aligned" for e in events) == 3
    for g, h in zip(found, want, strict=True):
        torch.testing.assert_close(g, h, rtol=0.05, atol=1e-4)
