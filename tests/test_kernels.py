"""Compiled kernels against their Loop IR, for graphs of real code; see `kernels.py`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from functions import CASES, GRAPHS
from kernels import fuzz, kernels_of
from torch.nn import functional

from rung.targets.cpu.emit import emit

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", GRAPHS)
def test_kernels_do_what_their_loop_ir_says(name: str, dynamic: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    fn, make = GRAPHS[name]
    args = [x.to(dtype).requires_grad_() if x.is_floating_point() else x for x in make()]
    made = kernels_of(fn, args, dynamic)
    assert made
    for one in made:
        assert not fuzz(one), one.mapped


@pytest.mark.parametrize("name", CASES)
def test_kernels_of_the_followed_functions(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    for one in kernels_of(case.fn, case.args(13, torch.float32), True):
        assert not fuzz(one), one.mapped


RAGGED: dict[str, Callable[..., torch.Tensor]] = {
    "parts that are joined": lambda x, y, z: functional.layer_norm(
        torch.cat([x, y, z.relu()], -1), (x.shape[-1] + y.shape[-1] + z.shape[-1],)),
    "a frame around rows": lambda x, y, z: functional.pad(x, (3, 5), value=2.5) * 2,
    "parts of parts": lambda x, y, z: functional.pad(torch.cat([x, y], -1), (1, 2)).sum(-1),
}


@pytest.mark.parametrize("name", RAGGED)
def test_a_run_of_lanes_is_one_masked_load(name: str) -> None:
    """No lane has a condition of its own."""
    torch.manual_seed(0)
    for one in kernels_of(RAGGED[name], [torch.randn(5, n) for n in (70, 101, 43)]):
        assert not fuzz(one), one.mapped
        body = emit([one.lowered]).partition("void run_")[2]
        assert "load_span" in body and " >= 0 && " not in body and " >= 0 ? " not in body
