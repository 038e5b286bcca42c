"""Rows of the tables' tests: a call of an overload, and how it compares with eager."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch
from frontends.capture import declined, run, traced

from rung.core import trace
from rung.frontends.torch.calls import overload

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
I64, I32, I16, I8, U8 = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8
BOOL = torch.bool
FLOATS, INTEGERS = (F32, F64, BF16, F16), (I64, I32, I16, I8, U8)
ODD = [math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-40, 1.0, -1.0, 0.5, 2.5, -2.5, 3.0]


def data(shape: tuple[int, ...], dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    """Random numbers, with the odd ones among them where there is room."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(shape, generator=generator, dtype=F64) * 3
    if dtype is BOOL:
        return x > 0
    if not dtype.is_floating_point:
        return x.round().to(dtype)
    flat = x.reshape(-1)
    if flat.numel() >= 2 * len(ODD):
        flat[seed:seed + len(ODD)] = torch.tensor(ODD, dtype=F64)
    return flat.reshape(shape).to(dtype)


def tame(shape: tuple[int, ...], dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.nan_to_num(data(shape, dtype, seed), 0.25, 0.75, -0.75)


@dataclass
class Case:
    """A call to compare with eager. `close`: a tolerance in units of the result's epsilon."""

    target: str
    args: tuple[Any, ...]
    close: float = 0
    named: tuple[tuple[str, Any], ...] = ()
    lowers: bool = True

    def __str__(self) -> str:
        shown = [f"{str(a.dtype)[6:]}{list(a.shape)}" if isinstance(a, torch.Tensor)
                 else str(a)[:40] for a in (*self.args, *(v for _, v in self.named))]
        return f"{self.target.removeprefix('aten.')}({', '.join(shown)})".replace("torch.", "")


def case(target: str, *args: Any, close: float = 0, lowers: bool = True, **named: Any) -> Case:
    name = target if target.count(".") == 2 else f"aten.{target}"
    return Case(name if name.count(".") == 2 else f"{name}.default", args, close,
                tuple(named.items()), lowers)


def flat(out: Any) -> list[torch.Tensor]:
    return [x for x in (out if isinstance(out, tuple | list) else [out]) if x is not None]


def caller(c: Case) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """A function of the case's tensors alone, and these."""
    leaves, spec = torch.utils._pytree.tree_flatten((c.args, dict(c.named)))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]

    def fn(*given: torch.Tensor) -> Any:
        rest = iter(given)
        args, named = torch.utils._pytree.tree_unflatten(
            [next(rest) if isinstance(x, torch.Tensor) else x for x in leaves], spec)
        return overload(c.target)(*args, **named)

    return fn, tensors


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all elements are the same, zeros by sign and NaNs as one."""
    signs = torch.equal(torch.signbit(a)[a == 0], torch.signbit(b)[b == 0]) if (
        a.dtype.is_floating_point) else True
    return signs and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def grouped(cases: Sequence[Case]) -> list[Any]:
    """The cases of each overload, those that lower apart, as parameters of a test."""
    groups: dict[tuple[str, bool], list[Case]] = {}
    for c in cases:
        groups.setdefault((c.target, c.lowers), []).append(c)
    return [pytest.param(group, id=f"{target}{'' if lowers else '-call'}")
            for (target, lowers), group in groups.items()]


def check_overload(cases: Sequence[Case]) -> None:
    """The oracle's results are eager's in dtype, shape, strides and elements; `cases` are of one
    overload, and are lowered as one graph."""
    callers = [caller(c) for c in cases]
    counts = [len(tensors) for _, tensors in callers]
    every = [x for _, tensors in callers for x in tensors]

    def fn(*given: torch.Tensor) -> list[torch.Tensor]:
        rest = iter(given)
        return [x for (one, _), n in zip(callers, counts, strict=True)
                for x in flat(one(*islice(rest, n)))]

    with trace.listen() as events:
        found, _ = run(traced(fn, every), every)
    names = [c for c in cases for _ in flat(caller(c)[0](*caller(c)[1]))]
    assert (cases[0].target not in declined(events)) == cases[0].lowers, events
    for c, a, b in zip(names, found, fn(*every), strict=True):
        check_result(c, a, b)


def check_result(c: Case, a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape), c
    assert a.numel() == 0 or a.stride() == b.stride(), c
    if c.close and b.is_floating_point():
        eps = torch.finfo(b.dtype).eps
        torch.testing.assert_close(a, b, rtol=c.close * eps, atol=c.close * eps / 4,
                                   equal_nan=True, msg=lambda text: f"{c}\n{text}")
    else:
        assert equal_bits(a, b), (str(c), a, b, a.double() - b.double())
