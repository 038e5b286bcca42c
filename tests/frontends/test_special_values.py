"""Every elementwise overload at the edges of its types, against eager: all pairs of NaN,
infinities, zeros of both signs, subnormal numbers and limits.

Eager's own loops over vectors and over strided memory differ at some of them: one of the two
answers is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import pytest
import torch
from agreement import rung
from frontends.overloads import (
    BF16,
    BOOL,
    F64,
    FLOATS,
    I32,
    I64,
    INTEGERS,
    Case,
    caller,
    flat,
)

from rung.frontends.torch.activations import ACTIVATIONS
from rung.frontends.torch.aten import target_of
from rung.frontends.torch.calls import overload, schema_of
from rung.frontends.torch.functions import FUNCTIONS
from rung.frontends.torch.pointwise import POINTWISE

TARGETS = [t for schema in (*POINTWISE, *FUNCTIONS, *ACTIVATIONS) if schema_of(
    t := target_of(schema))]
NUMBERS = (2, -0.5, 1.7)  # for each argument that is a number
OPTIONAL = (None, 1e-6, 0.3, -0.5)  # for each argument that may be one
QUICK = {BF16, I64}
CANCELS = {"lerp", "logaddexp", "logaddexp2", "gelu_backward", "mish_backward"}
"""Their errors are of the size of what cancels, not of what is left."""
ULPS = 4
GROUP = 24  # calls compiled as one graph
ZEROS = {  # where the sign of a zero is not eager's
    "fmax": "torch's vectors of bf16 take the other of two equal zeros", "fmin": "the same",
    "logaddexp2": "what cancels is rounded otherwise",
    "log_sigmoid_backward": "torch adds 0 to a share that is -0.0, which exp(-|x|) never is"}


def specials(dtype: torch.dtype) -> torch.Tensor:
    if dtype is BOOL:
        return torch.tensor([False, True])
    if dtype in INTEGERS:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        near = {0, 1, 2, 3, 7, 31, 32, 63, 64, -1, -2, -7, low, low + 1, high, high - 1, high // 2}
        return torch.tensor(sorted(x for x in near if low <= x <= high), dtype=dtype)
    info = torch.finfo(dtype)
    least = info.smallest_normal
    sizes = [0.0, math.inf, 0.5, 0.7, 1.0, 1 + info.eps, 1 - info.eps / 2, 2.5, 3.0, 6.0, 20.5,
             100.0, 1e5, 3e9, info.max, math.sqrt(info.max) * 1.01, least, least / 2,
             least * info.eps, info.eps]
    return torch.tensor([math.nan, *sizes, *(-x for x in sizes)], dtype=F64).to(dtype)


def grid(dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """All combinations of special values, one operand a tensor, of a multiple of 64 elements: so
    many that eager's vectors have no rest."""
    values = [specials(d)[:12 if len(dtypes) > 2 else None] for d in dtypes]
    places = torch.meshgrid(*(torch.arange(len(v)) for v in values), indexing="ij")
    size = -(-places[0].numel() // 64) * 64
    return [v[at.reshape(-1).repeat(64)[:size]] for v, at in zip(values, places, strict=True)]


def calls(target: str, dtype: torch.dtype) -> Iterator[Case]:
    """Calls that eager takes: operands of `dtype`, conditions of bools, numbers as they come; a
    divisor or an exponent of integers is tame where all values are refused."""
    arguments = overload(target)._schema.arguments
    tensors = [a for a in arguments if str(a.type) == "Tensor"]
    free = [a for a in arguments if a not in tensors and not a.has_default_value()]
    made = grid([BOOL if a.name in ("condition", "mask") else dtype for a in tensors])
    optional = [a for a in arguments if str(a.type) in ("Optional[number]", "Optional[float]")]
    scalars = any(str(a.type) in ("number", "Scalar", "float") for a in free)
    for number, chosen in product(NUMBERS if scalars else (2,), OPTIONAL if optional else (2,)):
        for tame in (lambda x: x, lambda x: torch.where((x == 0) | (x == -1), 3, x).to(x.dtype),
                     lambda x: torch.where(x <= 0, 3, x).to(x.dtype)):
            given = {a.name: x if n == 0 else tame(x) for n, (a, x) in enumerate(
                zip(tensors, made, strict=True))}
            given |= {a.name: number if str(a.type) != "bool" else False for a in free}
            given |= {a.name: chosen for a in optional}
            c = Case(target, (), named=tuple(given.items()))
            try:
                overload(target)(**given)
                overload(target)(**{k: v.to("meta") if isinstance(v, torch.Tensor) else v
                                    for k, v in given.items()})
            except Exception:  # by eager, or by what torch.compile asks first
                continue
            yield c
            break


def bad(got: torch.Tensor, want: torch.Tensor, c: Case) -> torch.Tensor:
    """Where a result is not eager's, but for roundings of floats and flushed subnormals."""
    if not want.is_floating_point():
        return got != want
    x, y = got.double(), want.double()
    info, size = torch.finfo(want.dtype), y.abs()
    name = c.target.split(".")[1]
    if name in CANCELS:
        size = torch.stack([size, *(v.double().abs() for _, v in c.named if isinstance(
            v, torch.Tensor))]).nan_to_num(0, 0, 0).amax(0)
    near = (x - y).abs() <= ULPS * info.eps * size + 2 * info.smallest_normal
    signs = (x.signbit() == y.signbit()) | (name in ZEROS)
    same = (x == y) & (signs | (y != 0)) | x.isnan() & y.isnan()
    return ~(same | near & ~((x == 0) & (y == 0)))


def strided(x: torch.Tensor) -> torch.Tensor:
    return x[:, None].repeat(1, 2)[:, 0]


@pytest.mark.parametrize("dtype", [
    d if d in QUICK else pytest.param(d, marks=pytest.mark.slow)
    for d in (*FLOATS, I64, I32, *INTEGERS[2:], BOOL)], ids=str)
def test_special_values_are_eagers(dtype: torch.dtype) -> None:
    cases = [c for target in TARGETS for c in calls(target, dtype)]
    wrong: list[str] = []
    for n in range(0, len(cases), GROUP):
        wrong += differences(cases[n:n + GROUP])
    assert not wrong, "\n".join(wrong)


def differences(cases: Sequence[Case]) -> Iterator[str]:
    callers = [caller(c) for c in cases]

    def fn(groups: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        return [flat(one(*xs)) for (one, _), xs in zip(callers, groups, strict=True)]
    given = [xs for _, xs in callers]
    torch._dynamo.reset()
    got, want = rung(fn, dynamic=False)(given), fn(given)
    other = fn([list(map(strided, xs)) for xs in given])
    for c, xs, *results in zip(cases, given, got, want, other, strict=True):
        for n, (a, b, b2) in enumerate(zip(*results, strict=True)):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), c
            at = (bad(a, b, c) & bad(a, b2, c)).nonzero()
            if at.numel():
                k = int(at[0])
                yield (f"{c} result {n} at {[x[k].item() for x in xs]}: {a[k].item()} instead of "
                       f"{b[k].item()}, {len(at)} places")
