"""Mappings of kernels that memory limits: the one that comes first, and its meaning on NumPy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from mapped import VOCABULARIES, difference

from rung.core.op import Func
from rung.core.parse import parse_module
from rung.kernel.ir import run_kernel_ir
from rung.loop import ir as loop
from rung.loop.split import split_fold
from rung.targets.base import target
from rung.targets.cuda.candidates import candidates
from rung.targets.cuda.machine import SM90
from rung.targets.cuda.streaming import Stream, contiguous, power
from rung.tile.legality import check
from rung.tile.mapping import parse_mapping
from rung.tile.to_kernel import to_kernel
from rung.tools.fuzz.mappings import launches


def softmax(m: int | str, n: int | str, dtype: str = "bf16") -> Func:
    return parsed(f"""kernel softmax(x: {dtype}[{m},{n}]) -> y: {dtype}[{m},{n}]
  v = f32(x[i,j]) : f32 over i,j
  max = fold max v over j {n} : f32 over i acc f32
  exp = exp(v - max) : f32 over i,j
  sum = fold add exp over j {n} : f32 over i acc f32
  y[i,j] = {dtype}(exp / sum)
""")


def online(m: int, n: int, dtype: str = "bf16") -> Func:
    return parsed(f"""kernel online(x: {dtype}[{m},{n}]) -> y: {dtype}[{m},{n}]
  v = f32(x[i,j]) : f32 over i,j
  m, s = fold softmax v over j {n} : f32 over i, f32 over i acc f32
  y[i,j] = {dtype}(exp(v - m) / s)
""")


def product(m: int, n: int, k: int) -> Func:
    types = f"x: bf16[{m},{k}], w: bf16[{n},{k}], b: bf16[{n}]"
    return parsed(f"""kernel product({types}) -> y: f32[{m},{n}]
  mm = contract add mul f32(x[i,k]), f32(w[j,k]) over k {k} : f32 over i,j acc f32
  y[i,j] = relu(mm + f32(b[j]))
""")


def cumsum(m: int, n: int) -> Func:
    return parsed(f"""kernel cumsum(x: f32[{m},{n}]) -> y: f32[{m},{n}]
  v = f64(x[i,j]) : f64 over i,j
  sum = scan add v over j {n} : f64 over i,j acc f64
  y[i,j] = f32(sum)
""")


def colsum(m: int, n: int, dtype: str = "f32") -> Func:
    read = "x[i,j]" if dtype == "f32" else "f32(x[i,j])"
    return parsed(f"""kernel colsum(x: {dtype}[{m},{n}]) -> y: f32[{n}]
  v = abs({read}) : f32 over i,j
  sum = fold add v over i {m} : f32 over j acc f32
  y[j] = sum
""")


def backward(m: int, n: int, parts: int, dtype: str = "bf16", bias: bool = False) -> Func:
    """A part of a norm's backward pass: what each row gives back, and sums of columns."""
    args = ", ".join(f"{name}: {dtype}[{m},{n}]" for name in ("dy", "x"))
    sums = "".join(f"  s{v} = fold add {v} over i {m} : f32 over j acc f32\n  {w}[j] = s{v}\n"
                   for v, w in (("vh", "w"), ("v", "b"))[:2 if bias else 1])
    outs = f"dx: {dtype}[{m},{n}], w: f32[{n}]" + (f", b: f32[{n}]" if bias else "")
    whole = parsed(f"""kernel back({args}, r: f32[{m}]) -> {outs}
  v = f32(dy[i,j]) : f32 over i,j
  h = f32(x[i,j]) * r[i] : f32 over i,j
  vh = v * h : f32 over i,j
  s = fold add vh over j {n} : f32 over i acc f32
  dx[i,j] = {dtype}((v - h * s / {float(n)}) * r[i])
{sums}""")
    return split_fold(whole, "i", parts)[0]


def pointwise(*shape: int | str, dtype: str = "f32") -> Func:
    sizes, axes = ",".join(map(str, shape)), ",".join("ijk"[:len(shape)])
    return parsed(f"kernel neg(x: {dtype}[{sizes}]) -> y: {dtype}[{sizes}]\n"
                  f"  y[{axes}] = neg(x[{axes}])\n")


def transposed(m: int, n: int) -> Func:
    return parsed(f"kernel turn(x: f32[{m},{n}], b: f32[{m}]) -> y: f32[{n},{m}]\n"
                  "  y[i,j] = x[j,i] + b[j]\n")


def parsed(text: str) -> Func:
    return parse_module(text, VOCABULARIES)[0]


def first(func: Func, hints: Mapping[str, int] | None = None) -> str:
    """The axis lines of the first candidate, which is legal."""
    mapping = next(iter(candidates(func, SM90, hints or {})))
    check(func, mapping, SM90)
    return " / ".join(map(str, mapping.axes))


CHOSEN = [
    (pointwise(1 << 24), "i: grid *, thread 256, reg 4"),
    (pointwise(1 << 12), "i: grid *, thread 32, reg 4"),
    (pointwise(1 << 20, dtype="i8"), "i: grid *, thread 256, reg 8"),
    (pointwise(1 << 12, 64), "i: grid *, thread 16 / j: grid *, thread 16, reg 4"),
    (pointwise(1 << 12, 999), "i: grid * / j: grid *, thread 256"),
    (transposed(4096, 2048), "i: grid *, reg 4, thread 16 / j: grid *, thread 16, reg 4"),
    (transposed(4096, 8), "i: grid * / j: grid *, thread 32, reg 4"),
    (softmax(16384, 4096), "i: grid * / j: reg 4, thread 128, reg 8"),
    (softmax(16384, 1024), "i: grid *, thread 4 / j: reg 4, thread 32, reg 8"),
    (softmax(16384, 256), "i: grid *, thread 4 / j: thread 32, reg 8"),
    (softmax(4, 4096), "i: grid * / j: thread 512, reg 8"),
    (softmax(4096, 32768), "i: grid * / j: reg 4, thread 1024, reg 8"),
    (online(4096, 131072), "i: grid * / j: seq *, reg 4, thread 1024, reg 8"),
    (cumsum(4096, 8192), "i: grid * / j: thread 1024, reg 8"),
    (cumsum(4096, 1000), "i: grid * / j: thread 128, reg 8"),
    (cumsum(4096, 30000), "i: grid * / j: reg 4, thread 1024, reg 8"),
    (softmax(4096, 1001), "i: grid *, thread 4 / j: reg 32, thread 32"),
    (colsum(8192, 1 << 16), "i: seq *, reg 4, thread 8 / j: grid *, thread 32, reg 4"),
    (colsum(8192, 4096), "i: seq *, reg 4, thread 32 / j: grid *, thread 8, reg 4"),
    (colsum(8192, 1 << 17, "bf16"), "i: seq *, reg 2, thread 8 / j: grid *, thread 32, reg 8"),
    (backward(16384, 4096, 256), "p: grid * / i: seq * / j: thread 512, reg 8"),
    (backward(16384, 1024, 1024), "p: grid * / i: seq * / j: thread 128, reg 8"),
    (backward(16384, 8192, 128, "f32", True), "p: grid * / i: seq * / j: reg 4, thread 512, reg 4"),
    (product(1, 18944, 3584),
     "j: grid *, thread 4, reg 2 / i: reg 1 / k: reg 14, thread 32, reg 8"),
    (product(4, 18944, 3584), "j: grid *, thread 4 / i: reg 4 / k: reg 14, thread 32, reg 8"),
    (product(1, 8192, 28672),
     "j: grid *, thread 4, reg 2 / i: reg 1 / k: seq *, reg 2, thread 32, reg 8"),
]


@pytest.mark.parametrize(("func", "axes"), CHOSEN, ids=[axes for _, axes in CHOSEN])
def test_the_first_mapping(func: Func, axes: str) -> None:
    assert first(func) == axes


def test_rows_of_unknown_length_are_read_in_each_pass() -> None:
    assert first(softmax("s0", "s1"), {"s0": 4096, "s1": 4096}) == (
        "i: grid * / j: seq *, thread 128, reg 8")


FUNCS = [
    pointwise(1000), pointwise(7, 24), pointwise(3, 33), softmax(3, 4096), softmax(5, 1004),
    softmax(9, 1001), softmax(600, 64), softmax(2, 20000), colsum(33, 100), colsum(70, 64, "bf16"),
    transposed(100, 200), transposed(77, 131), online(3, 300), online(2, 40000), cumsum(3, 100),
    product(1, 4229, 96), product(3, 4230, 264), product(1, 4224, 8208), colsum(600, 36),
    cumsum(2, 8192), cumsum(2, 9001), softmax(1, 32768)]
PARTS = [backward(21, 100, 4), backward(24, 1032, 3, "bf16", True), backward(9, 33, 2),
         backward(10, 264, 3, "f32", True)]


def lowered() -> list[tuple[Func, Func]]:
    """Each function under each of its mappings, parts under their first one, and its Kernel IR with
    a name of its own."""
    mapped = [f.with_attr("mapping", m) for f in FUNCS for m in candidates(f, SM90, {})]
    mapped += [f.with_attr("mapping", next(candidates(f, SM90, {}))) for f in PARTS]
    return [(x, replace(to_kernel(x, SM90), name=f"k{n}")) for n, x in enumerate(mapped)]


def gaps(source: str) -> list[float]:
    """How far what the emulator gets from a source is from the meaning, by kernel."""
    made = lowered()
    runs = launches([kernel for _, kernel in made], target("cuda-emulated"), source)
    return [difference(x, SM90, lowered=kernel, run=run)
            for (x, kernel), run in zip(made, runs, strict=True)]


def test_all_mappings_are_right_on_numpy() -> None:
    assert all(difference(x, SM90, lowered=kernel) < 0.05 for x, kernel in lowered())


def test_sources_are_right_on_the_emulator() -> None:
    source = target("cuda-emulated").emit([kernel for _, kernel in lowered()])
    assert "Wide<" in source and max(gaps(source)) < 1e-3
    twice = set(re.findall(r"plain_(k\d+)\(", source))
    other = {"run": "plain", "plain": "run"}
    swapped = re.sub(r"\b(run|plain)_(k\d+)\b", lambda m: f"{other[m[1]]}_{m[2]}" if m[2] in twice
                     else m[0], source)
    assert len(twice) > 5 and max(gaps(swapped)) < 1e-3  # the plain versions


@pytest.mark.parametrize(("right", "wrong"), [
    ("a | (unsigned)b << 16", "b | (unsigned)a << 16"), (".at[3]", ".at[2]")])
def test_the_emulator_sees_elements_in_the_wrong_places(right: str, wrong: str) -> None:
    source = target("cuda-emulated").emit([kernel for _, kernel in lowered()])
    assert right in source and max(gaps(source.replace(right, wrong))) > 1e-3


def test_a_block_of_an_online_softmax_has_one_scale_and_keeps_infinities() -> None:
    func = parsed("""kernel online(x: f32[6,40]) -> m1: f32[6], s1: f32[6]
  m, s = fold softmax x[i,j] over j 40 : f32 over i, f32 over i acc f32
  m1[i] = m
  s1[i] = s
""")
    mapping = parse_mapping("map online on cuda.sm90\n  i: grid *\n  j: seq *, thread 4, reg 4\n")
    made = to_kernel(func.with_attr("mapping", mapping), SM90)
    text = str(made)
    assert text.count("exp_approx(") == 2  # of the elements, and of the state
    assert text.count("exp(") == 1  # where threads meet
    x = np.random.default_rng(0).standard_normal((6, 40)).astype("f4")
    x[0], x[1, :16], x[2, 3], x[3, 9], x[4, 39] = -np.inf, -np.inf, np.nan, np.inf, -np.inf
    got, want = ({"x": x, "m1": np.zeros(6, "f4"), "s1": np.zeros(6, "f4")} for _ in range(2))
    with np.errstate(invalid="ignore"):
        loop.run_kernel(func, want)
        run_kernel_ir(made, got)
    for name in ("m1", "s1"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6)
    assert got["s1"][0] == 0 and np.isnan(got["s1"][2:4]).all() and np.isfinite(got["s1"][4])


def test_the_axis_along_memory_is_found_through_strides() -> None:
    func = parsed("""kernel add(x: f32[8,16] strides [1,8]) -> y: f32[8,16]
  y[i,j] = x[i,j] + 1.0
""")
    stream = Stream(func, {}, SM90)
    load, store = func.body.ops[0], func.body.ops[-1]
    assert (contiguous(load), contiguous(store)) == ("i", "j")  # type: ignore[arg-type]
    assert stream.vector("i") == stream.vector("j") == 4


def test_powers_of_two() -> None:
    assert [power(n) for n in (0, 1, 2, 3, 8, 9)] == [1, 1, 2, 4, 8, 16]
