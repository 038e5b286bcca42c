"""The NumPy oracle: accesses, sizes, and whole functions of each rung against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from dumps import COLSUM, PADDED, parse

from rung.core.expr import Expr, parse_expr, sym
from rung.core.interp import Interp, bind_sizes
from rung.core.scalar import round_bf16
from rung.kernel.ir import run_kernel_ir
from rung.loop.ir import run_kernel

RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def run(text: str, **arrays: object) -> np.ndarray:
    func = parse(text)
    (run_kernel if func.kind == "kernel" else run_kernel_ir)(func, arrays)
    return arrays["y"]


# --- accesses

def interp(**extents: int) -> Interp:
    made = Interp({}, tuple(extents))
    for axis, extent in extents.items():
        made.symbols[axis] = made.spread(axis, extent)
    return made


def exprs(*texts: str) -> list[Expr]:
    return [parse_expr(t) for t in texts]


def test_an_axis_varies_along_its_own_dimension() -> None:
    made = interp(i=2, j=3)
    np.testing.assert_array_equal(made.index(parse_expr("10*i+j")), [[0, 1, 2], [10, 11, 12]])
    assert made.index(sym("i")).shape == (2, 1)


def test_read_and_mask() -> None:
    x = np.arange(6).reshape(2, 3)
    made = interp(i=2, j=4)
    got = made.read(x, exprs("i", "j-1"), exprs("j-1"), -1)
    np.testing.assert_array_equal(got, [[-1, 0, 1, 2], [-1, 3, 4, 5]])
    assert got.dtype == x.dtype


@pytest.mark.parametrize("sub", ["j-1", "j", "5"])
def test_reads_outside_raise(sub: str) -> None:
    with pytest.raises(IndexError, match=r"subscript 1 is (-1|3|5) of 3"):
        interp(i=2, j=4).read(np.zeros((2, 3)), exprs("i", sub), (), 0)


def test_writes_outside_raise_and_masked_ones_do_nothing() -> None:
    x = np.zeros(3, np.float32)
    made = interp(j=4)
    with pytest.raises(IndexError, match="subscript 0 is 3 of 3"):
        made.write(x, exprs("j"), np.float32(1), ())
    made.write(x, exprs("j"), np.float32(1), exprs("1-j"))
    np.testing.assert_array_equal(x, [1, 1, 0])


def test_reads_of_rank_0_and_of_nothing() -> None:
    assert interp(i=2).read(np.array(5.0), (), (), 0) == 5
    empty = interp(i=2).read(np.zeros((0,)), exprs("i"), exprs("-1"), 7)
    np.testing.assert_array_equal(empty, [7, 7])
    with pytest.raises(IndexError):
        interp(i=2).read(np.zeros((0,)), exprs("i"), (), 7)


def test_sizes_come_from_shapes() -> None:
    assert bind_sizes([(exprs("s0", "4"), (3, 4)), (exprs("2*s0"), (6,))]) == {"s0": 3}


@pytest.mark.parametrize(("declared", "actual", "message"), [
    (["s0"], (3, 4), "rank 2 where 1"), (["s0", "s0"], (3, 4), "size 4 where s0"),
    (["4"], (3,), "size 3 where 4"), (["s0", "2*s0"], (3, 5), r"size 5 where 2\*s0"),
])
def test_shapes_that_disagree(declared: list[str], actual: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bind_sizes([(exprs(*declared), actual)])


# --- Loop IR

@pytest.mark.parametrize(("text", "want"), [
    ("y[i] = x[i,0]", lambda x: x[:, 0]),
    ("y[3-i] = x[i,0]", lambda x: x[::-1, 0]),
    ("y[i] = x[i%2*2,i//2]", lambda x: np.stack([x[0, 0], x[2, 0], x[0, 1], x[2, 1]])),
    ("s = fold add x[i,j] over j 4 : f32 over i acc f32\n  y[i] = s", lambda x: x.sum(1)),
    ("s = fold add x[j,i] over j 4 : f32 over i acc f32\n  y[i] = s", lambda x: x.sum(0)),
    ("s = fold max x[i,j] over j 4 : f32 over i acc f32\n  y[i] = s", lambda x: x.max(1)),
    ("s = fold mul x[k,k] over k 4 : f32 acc f32\n  y[i] = s", lambda x: x.diagonal().prod()),
    ("s = contract add mul x[i,j], x[j,i] over j 4 : f32 over i acc f32\n  y[i] = s",
     lambda x: np.einsum("ij,ji->i", x, x)),
    ("s = contract add mul x[i,k], x[k,j] over k 4 : f32 over i,j acc f32\n"
     "  t = fold add s over j 4 : f32 over i acc f32\n  y[i] = t", lambda x: (x @ x).sum(1)),
    ("s = contract max add x[i,j], x[j,i] over j 4 : f32 over i acc f32\n  y[i] = s",
     lambda x: (x + x.T).max(1)),
    ("s = contract add mul x[i,j], 2.0 over j 4 : f32 over i acc f32\n  y[i] = s",
     lambda x: 2 * x.sum(1)),
    ("y[i] = where(index(i) < 2, x[i,1], f32(i64(3)))",
     lambda x: np.where(np.arange(4) < 2, x[:, 1], 3)),
    ("y[i] = -1.0\n  y[i | i-2] = x[i,0]", lambda x: np.where(np.arange(4) >= 2, x[:, 0], -1)),
])
def test_loop_ir(text: str, want: object) -> None:
    x = floats(4, 4)
    y = run(f"kernel f(x: f32[4,4]) -> y: f32[4]\n  {text}", x=x, y=np.zeros(4, np.float32))
    np.testing.assert_allclose(y, want(x), rtol=1e-5, atol=1e-6)


def test_loads_see_the_state_on_entry() -> None:
    y = np.arange(4, dtype=np.float32)
    run("kernel f() -> y: f32[4]\n  y[i] = y[3-i]", y=y)
    np.testing.assert_array_equal(y, [3, 2, 1, 0])


def test_folds_over_nothing_give_the_identity() -> None:
    text = ("kernel f(x: f32[3,0]) -> y: f32[3]\n  s = fold {} x[i,j] over j 0 : f32 over i acc f32"
            "\n  y[i] = s")
    for fold, want in [("add", 0), ("mul", 1), ("max", -np.inf), ("min", np.inf)]:
        y = run(text.format(fold), x=floats(3, 0), y=np.full(3, 5, np.float32))
        np.testing.assert_array_equal(y, want)


def test_data_dependent_loads_masks_and_sizes() -> None:
    x, ids = round_bf16(floats(3, 7)), np.array([2, 0, 1])
    y, z = np.zeros((3, 9), np.float32), np.zeros((3, 9), bool)
    run(PADDED, x=x, ids=ids, s7=1, y=y, z=z)
    t = np.full((3, 9), -np.inf, np.float32)
    t[:, 1:8] = x[ids]
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(y, round_bf16(t * (t - (t - 1)) + 2))
    np.testing.assert_array_equal(z, (t < 0.5) & (np.arange(3)[:, None] + 1 == 3))


def test_an_index_out_of_range_raises() -> None:
    with pytest.raises(IndexError):
        run("kernel f(x: f32[4], n: i64[2]) -> y: f32[2]\n  y[i] = x[n[i]]",
            x=floats(4), n=np.array([0, 4]), y=np.zeros(2, np.float32))


# --- Kernel IR

@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 130])
def test_kernel_ir(size: int) -> None:
    x = floats(512, size)
    y = run(COLSUM, x=x, y=np.zeros(size, np.float32))
    np.testing.assert_allclose(y, x.sum(0), rtol=1e-4, atol=1e-4)


def test_lanes_combine() -> None:
    text = """\
kernel-ir f(x: f32[64]) -> y: f32[2]
  unroll q<2
  z = fill 0.0 : f32x16 over q<2
  a = for i in 0..2 carry b = z : f32x16 over q<2
    yield b + x[32*q+16*i : 16]
  c = combine add a by lane : f32 over q<2
  y[q] = c"""
    x = floats(64)
    y = run(text, x=x, y=np.zeros(2, np.float32))
    np.testing.assert_allclose(y, x.reshape(2, 32).sum(1), rtol=1e-5)


def test_threads_run_in_lockstep() -> None:
    text = ("kernel-ir f(x: f32[8]) -> y: f32[8]\n  buf = alloc : shared f32[8]\n"
            "  for t in 0..8 at thread\n    buf[t] = x[t]\n    barrier shared\n    y[t] = buf[7-t]")
    x = floats(8)
    np.testing.assert_array_equal(run(text, x=x, y=np.zeros(8, np.float32)), x[::-1])


def test_arrays_are_undefined_until_written() -> None:
    text = "kernel-ir f() -> y: f32[1]\n  buf = alloc : l1 f32[1]\n  y[0] = buf[0]"
    assert np.isnan(run(text, y=np.zeros(1, np.float32))[0])


def test_a_branch_gives_values() -> None:
    text = ("kernel-ir f(s0: index) -> y: f32[1]\n  a = if nonneg [s0-3] : f32\n    yield 1.0\n"
            "  else\n    yield 2.0\n  y[0] = a")
    assert [run(text, s0=n, y=np.zeros(1, np.float32))[0] for n in (2, 3)] == [2, 1]
