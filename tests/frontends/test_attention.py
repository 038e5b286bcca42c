"""Attention as our kernels, forward and backward: written out by torch (`SDPBackend.MATH`), and
where nothing of ATen's is kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from frontends.capture import declined
from frontends.overloads import BF16, F32, F64, tame
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from rung.core import trace
from rung.program.ir import Call


@pytest.mark.parametrize("named", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
def test_math_attention_is_lowered_whole(named: dict[str, Any]) -> None:
    def fn(*qkv: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(*qkv, **named)

    leaves = [tame((2, 3, 16, 8), F64, n).requires_grad_() for n in range(3)]
    grad = tame((2, 3, 16, 8), F64, 3)
    with trace.listen() as events:
        y = torch.compile(fn, backend="rung", fullgraph=True, options={"strict": True})(*leaves)
        found = torch.autograd.grad(y, leaves, grad)
    assert declined(events) == []
    graphs = [e.data["history"] for e in events if e.kind == "compiled"]
    calls = [op.target for g in graphs for op in g.modules["kernel"].main.body.ops
             if isinstance(op, Call)]
    assert len(graphs) == 2
    assert {c.split(".")[1] for c in calls} <= {
        "view", "_unsafe_view", "permute", "transpose", "expand", "detach"}
    wanted = fn(*leaves)
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, leaves, grad), rtol=1e-11,
                               atol=1e-11)


def masked(dtype: torch.dtype) -> torch.Tensor:
    """A mask that hides a whole row of one head."""
    mask = tame((2, 1, 20, 24), dtype, 4)
    mask[0, 0, 3] = mask[1, 0, 5, 2:] = -math.inf
    return mask


ATTENTIONS: dict[str, tuple[int, int, Callable[[torch.dtype], dict[str, Any]]]] = {
    "plain": (4, 24, lambda d: {"scale": 0.2}), "causal": (4, 20, lambda d: {"is_causal": True}),
    "flat": (4, 24, lambda d: {"scale": 0.0}), "mask": (4, 24, lambda d: {"attn_mask": masked(d)}),
    "shared": (2, 24, lambda d: {"attn_mask": masked(d), "enable_gqa": True})}


@pytest.mark.parametrize(("name", "dtype"), [
    ("plain", F64), ("flat", F64), ("causal", F32), ("mask", F64), ("mask", BF16),
    ("shared", F32)], ids=str)
def test_opened_attention_and_its_gradients(name: str, dtype: torch.dtype,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors against float64 are no more than eager's, but for the order of sums."""
    torch._dynamo.reset()
    monkeypatch.setattr("rung.targets.cpu.target.keeps_call", lambda *_, **__: False)
    heads, keys, named = ATTENTIONS[name]
    shapes = (2, 4, 20, 16), (2, heads, keys, 16), (2, heads, keys, 16)
    given = [tame(shape, dtype, n) / 4 for n, shape in enumerate(shapes)]
    grad = tame(shapes[0], dtype, 3) / 4

    def of(fn: Any, kind: torch.dtype, way: SDPBackend = SDPBackend.FLASH_ATTENTION
           ) -> list[torch.Tensor]:
        leaves = [x.to(kind).requires_grad_() for x in given]
        with sdpa_kernel(way):
            y = fn(*leaves, **{k: v.to(kind) if isinstance(v, torch.Tensor) else v
                               for k, v in named(dtype).items()})
        return [y, *torch.autograd.grad(y, leaves, grad.to(kind))]

    attend = F.scaled_dot_product_attention
    with trace.listen() as events:
        found = of(torch.compile(attend, backend="rung", options={"strict": True}), dtype)
    graphs = [e.data["history"] for e in events if e.kind == "compiled"]
    calls = [op.target for g in graphs for op in g.modules["kernel"].main.body.ops
             if isinstance(op, Call)]
    assert declined(events) == []
    assert [c for c in calls if "attention" in c] == []
    exacts = of(attend, F64, SDPBackend.MATH)
    for mine, eager, exact in zip(found, of(attend, dtype), exacts, strict=True):
        assert (mine.dtype, mine.stride()) == (eager.dtype, eager.stride())
        wrong, theirs = ((x.double() - exact).abs().max() for x in (mine, eager))
        assert wrong <= 1.5 * theirs + 8 * torch.finfo(dtype).eps * exact.abs().max()
