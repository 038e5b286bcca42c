"""Compiled kernels against their Loop IR, for graphs of real code; see `kernels.py`."""

from __future__ import annotations

import pytest
import torch
from functions import CASES, GRAPHS
from kernels import fuzz, kernels_of

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
