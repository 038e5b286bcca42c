"""Carriers: a row folded in any split and order of merges is the row folded whole."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from rung.core.interp import Interp
from rung.core.op import Block, Builder, Value
from rung.core.scalar import MONOIDS
from rung.core.types import BOOL, F32, F64, I64, DType, VecType
from rung.loop.carriers import CARRIERS, Carrier

INF = math.inf
ROWS = {
    "plain": [0.5, -1.25, 3.0, 2.5, 0.0, -0.75, 1.0],
    "far apart": [-300.0, 300.0, 0.0, 299.0],
    "rising": [float(n) for n in range(12)],
    "falling": [float(-n) for n in range(12)],
    "masked": [-INF, 1.0, -INF, 2.0, -INF],
    "all masked": [-INF, -INF, -INF],
    "nan": [1.0, math.nan, 2.0],
    "nan after mask": [-INF, math.nan, 1.0],
    "inf": [1.0, INF, 2.0],
    "equal": [2.0, 2.0, 2.0],
    "one": [4.0],
}
FLOATS = [name for name in CARRIERS if name not in ("and", "or")]
State = tuple[np.ndarray, ...]


def apply(carrier: Carrier, which: str, dtype: DType, left: State, right: State) -> State:
    """Run `step` or `merge` on scalars."""
    build = Builder()
    values = [Value(f"p{n}", VecType(dtype)) for n in range(len(left) + len(right))]
    out = getattr(carrier, which)(build.one, values[:len(left)], values[len(left):])
    interp = Interp()
    interp.values.update(zip(values, (*left, *right), strict=True))
    interp.block(Block((), tuple(build.ops)))
    return tuple(interp.values[v] for v in out)


def init(carrier: Carrier, dtype: DType) -> State:
    return tuple(np.asarray(x, dtype.numpy) for x in carrier.identities(dtype))


def inputs(carrier: Carrier, row: Sequence[float], dtype: DType) -> list[State]:
    xs = [np.asarray(row, dtype.numpy)]
    if carrier.inputs == 2:
        xs.append(np.cos(np.arange(len(row))).astype(dtype.numpy))
    return list(zip(*xs, strict=True))


def fold(carrier: Carrier, rows: Sequence[State], dtype: DType) -> State:
    state = init(carrier, dtype)
    for xs in rows:
        state = apply(carrier, "step", dtype, state, xs)
    return state


def whole(carrier: Carrier, rows: Sequence[State]) -> State:
    out = carrier.numpy([np.stack(column) for column in zip(*rows, strict=True)], 0)
    return tuple(np.squeeze(x, 0) for x in (out if isinstance(out, tuple) else (out,)))


def close(got: State, want: State, dtype: DType) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12 if dtype == F64 else 2e-6, atol=1e-6)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_steps_are_the_whole_row(name: str, row: str, dtype: DType) -> None:
    if "nan" in row and dtype == F64 and name not in ("softmax", "attend"):
        pytest.skip("the same as f32")
    carrier = CARRIERS[name]
    rows = inputs(carrier, ROWS[row], dtype)
    close(fold(carrier, rows, dtype), whole(carrier, rows), dtype)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", FLOATS)
def test_a_row_split_anywhere_merges_to_the_whole(name: str, row: str) -> None:
    carrier, dtype = CARRIERS[name], F64
    rows = inputs(carrier, ROWS[row], dtype)
    want = whole(carrier, rows)
    for at in range(len(rows) + 1):
        left, right = (fold(carrier, part, dtype) for part in (rows[:at], rows[at:]))
        close(apply(carrier, "merge", dtype, left, right), want, dtype)


@pytest.mark.parametrize("name", FLOATS)
def test_merges_in_any_tree(name: str) -> None:
    carrier, dtype = CARRIERS[name], F64
    rng = np.random.default_rng(0)
    rows = inputs(carrier, list(rng.standard_normal(16) * 50), dtype)
    for _ in range(10):
        states = [fold(carrier, [r], dtype) for r in rows]
        while len(states) > 1:
            at = int(rng.integers(len(states) - 1))
            states[at:at + 2] = [apply(carrier, "merge", dtype, states[at], states[at + 1])]
        close(states[0], whole(carrier, rows), dtype)


@pytest.mark.parametrize("name", CARRIERS)
def test_the_initial_state_is_neutral(name: str) -> None:
    carrier = CARRIERS[name]
    dtype = BOOL if name in ("and", "or") else F64
    row = [True, False] if dtype == BOOL else ROWS["plain"]
    state, empty = fold(carrier, inputs(carrier, row, dtype), dtype), init(carrier, dtype)
    close(apply(carrier, "merge", dtype, state, empty), state, dtype)
    close(apply(carrier, "merge", dtype, empty, state), state, dtype)
    close(apply(carrier, "merge", dtype, empty, empty), empty, dtype)


@pytest.mark.parametrize("name", ["add", "mul", "max", "min"])
def test_integers(name: str) -> None:
    carrier = CARRIERS[name]
    rows = inputs(carrier, [3, -5, 7, 2], I64)
    (got,) = fold(carrier, rows, I64)
    assert got == MONOIDS[name].reduce(np.array([3, -5, 7, 2]), (0,))


def test_softmax_of_a_row_that_is_masked_throughout() -> None:
    m, s = fold(CARRIERS["softmax"], inputs(CARRIERS["softmax"], [-INF] * 4, F32), F32)
    assert m == -INF and s == 0


def test_attend_is_attention() -> None:
    rng = np.random.default_rng(1)
    x, v = rng.standard_normal(50), rng.standard_normal(50)
    _, s, o = fold(CARRIERS["attend"], list(zip(x, v, strict=True)), F64)
    p = np.exp(x - x.max())
    np.testing.assert_allclose(o / s, (p * v).sum() / p.sum(), rtol=1e-12)


def test_no_exponent_is_positive() -> None:
    """Rows that overflow exp without the running maximum."""
    rows = inputs(CARRIERS["softmax"], [1e4, 2e4, -1e4], F32)
    m, s = fold(CARRIERS["softmax"], rows, F32)
    assert m == 2e4 and s == 1


@pytest.mark.parametrize("name", CARRIERS)
def test_reads_name_inputs(name: str) -> None:
    carrier = CARRIERS[name]
    dtype = BOOL if name in ("and", "or") else F32
    assert len(carrier.reads) == len(carrier.identities(dtype))
    assert all(0 <= n < carrier.inputs for reads in carrier.reads for n in reads)


@pytest.mark.parametrize("name", CARRIERS)
def test_an_absent_input_changes_nothing(name: str) -> None:
    carrier = CARRIERS[name]
    dtype = BOOL if name in ("and", "or") else F64
    row = [True, False] if dtype == BOOL else ROWS["plain"]
    state = fold(carrier, inputs(carrier, row, dtype), dtype)
    gone = tuple(np.asarray(x, dtype.numpy) for x in carrier.absent(dtype))
    close(apply(carrier, "step", dtype, state, gone), state, dtype)
