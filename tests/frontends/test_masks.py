"""Masks of attention that follow from sizes alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.nn import functional as F

from rung.core import trace

Q = torch.randn(2, 3, 6, 8)
Mask = Callable[[torch.Tensor], torch.Tensor]


def not_before_0(x: torch.Tensor) -> torch.Tensor:
    """As libraries of models make it: the last stride is 0."""
    at = torch.arange(x.shape[2], device=x.device) + 0
    return (at[None, None, :, None] >= 0).expand(x.shape[0], -1, x.shape[2], x.shape[2])


def not_later(x: torch.Tensor) -> torch.Tensor:
    at = torch.arange(x.shape[2])
    return at[None, :] <= at[:, None]


def near(x: torch.Tensor) -> torch.Tensor:
    return not_later(x) & (torch.arange(x.shape[2])[None, :] >= 2)


def of_data(x: torch.Tensor) -> torch.Tensor:
    return x[0, 0, :, :1] < 100


def written_to(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool)
    mask[:, 1] = False
    return mask


def added(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape[2], x.shape[2])


def calls(made: Mask, dynamic: bool = False) -> tuple[list[str], bool]:
    """What was told of masks, and whether the compiled function gives eager's result, also for
    another size."""
    def attend(x: torch.Tensor, positional: bool) -> torch.Tensor:
        mask = made(x)
        return F.scaled_dot_product_attention(x, x, x, mask) if positional else (
            F.scaled_dot_product_attention(x, x, x, attn_mask=mask))

    torch._dynamo.reset()
    told, right = list[str](), True
    run = torch.compile(attend, backend="rung", dynamic=dynamic, options={"strict": True})
    for x in (Q, Q[:, :, :4].contiguous()):
        for positional in (False, True):
            with trace.listen() as events:
                got = run(x, positional)
            told += [e.detail.split()[-1] for e in events if e.place == "masks"]
            right &= torch.allclose(got, attend(x, positional), atol=1e-5)
    return told, right


@pytest.mark.parametrize("made, said", [(not_before_0, "empty"), (not_later, "causal")])
def test_a_mask_that_follows_from_sizes_is_left_out(made: Mask, said: str) -> None:
    assert calls(made) == ([said] * 4, True)


@pytest.mark.parametrize("made", [near, of_data, written_to, added])
def test_any_other_mask_stays(made: Mask) -> None:
    assert calls(made) == ([], True)


def test_a_mask_of_unknown_sizes_stays() -> None:
    told, right = calls(not_before_0, dynamic=True)
    assert right and "empty" not in told


def test_what_is_read_elsewhere_is_kept() -> None:
    def attend(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = not_before_0(x)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask), mask.sum()

    torch._dynamo.reset()
    got = torch.compile(attend, backend="rung", options={"strict": True})(Q)
    assert int(got[1]) == 2 * 6 * 6 and torch.allclose(got[0], attend(Q)[0], atol=1e-5)


def test_the_mask_goes_from_the_graph() -> None:
    from rung.frontends.torch.masks import without_known_masks

    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: object) -> Callable[..., object]:
        without_known_masks(gm)
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(lambda x: F.scaled_dot_product_attention(
        x, x, x, attn_mask=not_before_0(x)), backend=backend)(Q)
    names = [n.op for n in graphs[0].graph.nodes]
    assert names == ["placeholder", "call_function", "output"]
