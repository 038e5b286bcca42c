"""CUDA's wide accesses and widths of indices: which there are, what they assume, and their text."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from mapped import difference, kernel

from rung.core.expr import Expr
from rung.core.op import Func, walk
from rung.kernel.ir import Load, Store
from rung.targets.cuda import access
from rung.targets.cuda.build import build, nvcc
from rung.targets.cuda.emit import emit
from rung.targets.cuda.machine import SM90
from rung.tile.legality import check
from rung.tile.mapping import parse_mapping
from rung.tile.to_kernel import to_kernel

needs_nvcc = pytest.mark.skipif(nvcc() is None, reason="no nvcc")
ROW = "map softmax on cuda.sm90\n  i: grid *\n  j: reg 2, thread 64, reg 8\n"
LONG = "map softmax on cuda.sm90\n  i: grid *\n  j: seq *, thread 64, reg 8\n"
SHARED = """map softmax on cuda.sm90
  i: grid *, reg 2
  j: seq *, thread 64, reg 4
  place e in shared at i.grid
"""


def mapped(name: str, dtype: str, mapping: str, **sizes: Any) -> Func:
    """A kernel with its mapping, which is legal and right on NumPy."""
    func = kernel(name, dtype, **sizes)
    func = func.with_attr("mapping", parse_mapping(mapping))
    check(func, func.attr("mapping"), SM90)
    return func


def lowered(name: str, dtype: str, mapping: str, **sizes: Any) -> Func:
    return to_kernel(mapped(name, dtype, mapping, **sizes), SM90)


def counts(func: Func) -> set[int]:
    """Elements of each access; 1 where it is of single ones."""
    wide = access.plan(func).wide
    return {wide[op].count if op in wide else 1
            for op in walk(func.body) if isinstance(op, Load | Store)}


@pytest.mark.parametrize(("dtype", "n", "count"), [
    ("bf16", 1024, 8), ("f32", 1024, 4), ("bf16", 1000, 8), ("bf16", 1004, 4), ("bf16", 1002, 2),
    ("bf16", 1001, 1), ("f32", 1002, 2), ("f32", 999, 1)])
def test_an_access_is_as_wide_as_rows_are_aligned(dtype: str, n: int, count: int) -> None:
    func = lowered("softmax", dtype, ROW, M=4, N=n)
    assert counts(func) == {count}
    condition = access.wide_condition(func)
    assert condition == access.Needs(("x", "y") if count > 1 else ())
    text = emit([func])
    assert ("run_softmax(" in text, "plain_softmax(" in text) == (True, count > 1)


def test_rows_of_unknown_size_ask_for_multiples() -> None:
    func = lowered("softmax", "bf16", LONG, M="s0", N="s1")
    condition = access.wide_condition(func)
    assert counts(func) == {8}
    assert [(str(e), n) for e, n in condition.divisible] == [("s1", 8)]
    places = {"x": 0x7000, "y": 0x9010}
    assert condition.holds(places, {"s0": 3, "s1": 1000})
    assert not condition.holds(places | {"x": 0x7002}, {"s0": 3, "s1": 1000})
    assert not condition.holds(places, {"s0": 3, "s1": 1004})
    assert not condition.holds(places, {"s0": 1 << 20, "s1": 1 << 12})
    assert condition.text().startswith("(((unsigned long)x | (unsigned long)y) & 15) == 0 && "
                                       "(s1) % 8 == 0 && ")


def test_plain_versions_have_long_sizes_and_single_elements() -> None:
    text = emit([lowered("softmax", "bf16", LONG, M="s0", N="s1")])
    fast, plain = text[text.index("run_softmax("):].split("plain_softmax(")
    assert "int s0, int s1)" in fast and "const int i = blockIdx.x;" in fast
    assert "long s0, long s1)" in plain and "const long i = blockIdx.x;" in plain
    assert "Wide<" in fast and "Wide<" not in plain


def test_large_tensors_have_long_indices() -> None:
    func = lowered("softmax", "f32", LONG, M=1 << 16, N=1 << 16)
    assert not access.plan(func).ints
    assert access.plan(lowered("softmax", "f32", LONG, M=1 << 15, N=(1 << 16) - 512)).ints
    assert "const long i = blockIdx.x;" in emit([func])


@pytest.mark.parametrize("name", ["softmax", "colsum", "relu_mm"])
def test_no_index_exceeds_what_is_said_to_be_small(name: str) -> None:
    """The largest offset of each access, by all extreme points of its loops."""
    mapping = {"softmax": LONG, "colsum": """map colsum on cuda.sm90
  j: grid *, thread 32, reg 4
  i: seq *, thread 8
""", "relu_mm": """map relu_mm on cuda.sm90
  i: grid *, thread 16, reg 2
  j: grid *, thread 16, reg 2
  k: seq *
"""}[name]
    symbols = {"s0": 37, "s1": 53, "s2": 41}
    sizes = dict(zip("MNK" if name == "relu_mm" else "MN", symbols, strict=False))
    func = lowered(name, "f32", mapping, **sizes)
    small = [int(e.evaluate(symbols)) for e in access.wide_condition(func).small]
    loops = {op.var: op.hi for op in walk(func.body) if hasattr(op, "var")}
    copies = {axis: n for op in walk(func.body) for axis, n in getattr(op, "unroll", ())}
    tops = {**{v: int(Expr.of(e).evaluate(symbols)) - 1 for v, e in loops.items()},
            **{axis: n - 1 for axis, n in copies.items()}}
    for op in (x for x in walk(func.body) if isinstance(x, Load | Store)):
        at = access.offset(op.buf, op.subs)[0]
        used = sorted(at.symbols() & tops.keys())
        for point in itertools.product(*((0, tops[v]) for v in used)):
            assert at.evaluate({**symbols, **dict(zip(used, point, strict=True))}) <= max(small)


@pytest.mark.parametrize(("pad", "wide"), [("", True), (" pad 4", True), (" pad 1", False)])
def test_rows_of_shared_memory_are_wide_where_their_pitch_allows(pad: str, wide: bool) -> None:
    text = emit([lowered("softmax", "f32", SHARED.replace("i.grid\n", f"i.grid{pad}\n"),
                          M=8, N=1024)])
    assert ("Wide<float, 4> *)&e" in text) == wide


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("mapping", [ROW, LONG, SHARED])
def test_mappings_with_copies_are_right_on_numpy(mapping: str, dtype: str) -> None:
    for n in (1, 13, 1000, 1024):
        func = mapped("softmax", dtype, mapping, M=3, N=n)
        assert difference(func, SM90) < (1e-3 if dtype == "f32" else 0.3)


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_wide_sources_compile(arch: str, tmp_path: Path) -> None:
    for n, dtype in enumerate(("f32", "bf16", "f16")):
        kernels = [lowered("softmax", dtype, ROW, M=4, N=1000)]
        assert build(emit(kernels), tmp_path, f"k{n}", arch).spills() == []
    kernels = [lowered("softmax", "bf16", LONG, M="s0", N="s1")]
    assert build(emit(kernels), tmp_path, "symbolic", arch).spills() == []
