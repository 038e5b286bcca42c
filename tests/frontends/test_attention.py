"""Attention written out by torch (`SDPBackend.MATH`): forward and backward have no call left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from frontends.capture import declined
from frontends.overloads import F64, tame
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
    graphs = [e.data["stages"] for e in events if e.kind == "compiled"]
    calls = [op.target for g in graphs for op in g.modules["kernel"].main.body.ops
             if isinstance(op, Call)]
    assert len(graphs) == 2
    assert {c.split(".")[1] for c in calls} <= {"view", "permute", "transpose", "expand", "detach"}
    wanted = fn(*leaves)
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, leaves, grad), rtol=1e-11,
                               atol=1e-11)
