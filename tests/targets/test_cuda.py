"""CUDA: Kernel IR on NumPy with threads in lockstep, and sources through nvcc where it is there."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from mapped import KERNELS, VOCABULARIES, Anyhow, Late, difference, kernel

from rung.core.errors import LaunchError, MappingError, TargetCompileError
from rung.core.op import Block, Func, Op, walk
from rung.core.parse import parse_module
from rung.kernel.ir import For, If, Prefix, Raster, Store
from rung.kernel.moves import Engine
from rung.targets.base import target
from rung.targets.cuda.build import build, nvcc
from rung.targets.cuda.candidates import candidates
from rung.targets.cuda.emit import emit, launch_shape
from rung.targets.cuda.machine import SM90
from rung.tile.legality import check
from rung.tile.mapping import parse_mapping
from rung.tile.to_kernel import to_kernel
from rung.tools.fuzz.mappings import launches

RAGGED = (1, 13, 500, 512, 1000)
GEMM = """map relu_mm on cuda.sm90
  i: grid *, thread 16, reg 2
  j: grid *, thread 16, reg 2
  k: pipe *, unroll 32
  place x, w in shared at k.pipe pad 1 ring 2 by cp.async
  use mm with ffma
"""
needs_nvcc = pytest.mark.skipif(nvcc() is None, reason="no nvcc")


def first(func: Func, count: int = 1) -> list[Func]:
    return [func.with_attr("mapping", m) for m in islice(candidates(func, SM90), count)]


def sizes(name: str, n: int, other: int = 21) -> dict[str, int | str]:
    if name in ("relu_mm", "norm_proj", "headed", "kept"):
        return {"M": other, "K": n, "N": 19}
    if name in ("softmax", "colsum", "inplace", "share"):
        return {"M": n, "N": other} if name == "colsum" else {"M": other, "N": n}
    if name in ("tally", "scatter"):
        return {"M": other, "N": n, "L": 4}
    if name == "apart":
        return {"M": other, "N": n, "K": 19}
    return {"H": 2, "G": 2, "D": 16, "L": max(n, 4)}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("n", RAGGED)
@pytest.mark.parametrize("name", KERNELS)
def test_ragged_sizes_on_numpy(name: str, n: int, dtype: str) -> None:
    if name in ("attend", "online", "relu_mm", "norm_proj", "kept") and n > 512:
        n = 129  # the interpreter takes seconds there; nvcc below sees the real sizes
    for func in first(kernel(name, dtype, **sizes(name, n))):
        assert difference(func, SM90) < (1e-3 if dtype == "f32" else 0.3)


def gemm(dtype: str = "f32", **shape: int | str) -> Func:
    func = kernel("relu_mm", dtype, **(shape or {"M": 512, "K": 512, "N": 512}))
    return to_kernel(func.with_attr("mapping", parse_mapping(GEMM)), SM90)


def test_the_source_has_the_parts_of_the_mapping() -> None:
    text = emit([gemm()])
    for part in ('extern "C" __global__ void __launch_bounds__(256) run_relu_mm(', "cp_async<4>(",
                 "cp_async_wait<0>();", "__syncthreads();", "arena[16896]"):
        assert part in text
    assert "#include" not in text


def under(name: str, text: str, dtype: str = "f32", **shape: int | str) -> Func:
    """A kernel under the axis lines of a mapping, which is legal."""
    func = kernel(name, dtype, **shape)
    mapping = parse_mapping(f"map {name} on cuda.sm90\n{text}")
    check(func, mapping, SM90)
    return func.with_attr("mapping", mapping)


def planted(func: Func, change: Callable[[Op], Op]) -> Func:
    """Kernel IR with some of its ops changed."""
    def one(op: Op) -> Op:
        op = op.map({}, lambda b: Block(b.args, tuple(map(one, b.ops)))) if op.blocks() else op
        return change(op)
    return func.with_ops(map(one, func.body.ops))


SCANS = ("i: grid *\nj: seq *, thread 8", "i: grid *\nj: seq *, thread 8, reg 3",
         "i: grid *, thread 2\nj: seq *, reg 3, thread 4", "i: grid *, reg 2\nj: thread 128, reg 8",
         "i: grid *\nj: thread 16, reg 4, thread 16", "j: seq *, thread 64\ni: grid *, thread 4")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("n", (1, 13, 500, 1000))
@pytest.mark.parametrize("text", SCANS)
def test_scans_over_threads_and_copies(text: str, n: int, dtype: str) -> None:
    func = under("share", text, dtype, M=5, N=n)
    assert difference(func, SM90) < (1e-3 if dtype == "f32" else 0.3)


@needs_nvcc
def test_scans_compile(tmp_path: Path) -> None:
    kernels = [replace(to_kernel(under("share", text, dtype, M=5, N=n), SM90),
                       name=f"s{number}_{dtype}_{n}") for number, text in enumerate(SCANS)
               for dtype in ("f32", "bf16") for n in (13, 1000)]
    assert build(emit(kernels), tmp_path).spills() == []


def test_a_scan_that_adds_a_threads_own_part_twice_is_caught() -> None:
    func = under("share", SCANS[1], M=5, N=100)
    wrong = planted(to_kernel(func, SM90), lambda op: replace(op, exclusive=False) if isinstance(
        op, Prefix) else op)
    assert difference(func, SM90) < 1e-3 < difference(func, SM90, lowered=wrong)


UPDATES = ("i: grid *\nj: grid *, thread 8", "i: seq *, thread 4\nj: grid *, reg 2, thread 4",
           "i: grid *, thread 4, reg 2\nj: seq *, thread 4", "j: seq *\ni: grid *, reg 3")


@pytest.mark.parametrize("n", (1, 13, 500))
@pytest.mark.parametrize("text", UPDATES)
def test_updates_that_meet_are_atomic(text: str, n: int) -> None:
    func = under("scatter", text, M=21, N=n, L=4)
    lowered = to_kernel(func, SM90)
    assert all(op.combine for op in walk(lowered.body) if isinstance(op, Store))
    assert str(parse_module(str(lowered), VOCABULARIES)[0]) == str(lowered)
    assert difference(func, SM90, lowered=lowered) < 1e-3


def test_updates_that_are_lost_are_caught() -> None:
    func = under("scatter", UPDATES[2], M=21, N=13, L=4)
    wrong = planted(to_kernel(func, SM90), lambda op: replace(op, combine="") if isinstance(
        op, Store) else op)
    assert difference(func, SM90, lowered=wrong) > 0.1


def test_sums_of_floats_go_in_order_where_each_run_is_to_give_the_same() -> None:
    func, ordered = kernel("scatter", M=21, N=300, L=4), SM90.deterministic()
    with pytest.raises(MappingError, match="y is updated along i, whose steps on grid may meet"):
        check(func, under("scatter", UPDATES[0], M=21, N=300, L=4).attr("mapping"), ordered)
    for machine, combined in ((SM90, {"y": "add"}), (ordered, {"y": ""})):
        mapped = func.with_attr("mapping", next(iter(candidates(func, machine))))
        lowered = to_kernel(mapped, machine)
        stores = {op.buf.name: op.combine for op in walk(lowered.body) if isinstance(op, Store)}
        assert difference(mapped, machine, lowered=lowered) < 1e-3
        assert stores.items() >= combined.items()


@needs_nvcc
def test_updates_compile(tmp_path: Path) -> None:
    kernels = [replace(to_kernel(under("scatter", text, M=21, N=500, L=4), SM90), name=f"u{n}")
               for n, text in enumerate(UPDATES)]
    assert build(emit(kernels), tmp_path).spills() == []


APART = ("i: grid *\nj: grid *, thread 8\nk: seq *, thread 4\nh: grid *",
         "i: grid *\nj: seq *, thread 8\nh: grid *, thread 4\nk: seq *",
         "h: grid *, reg 2\ni: seq *\nj: seq *\nk: thread 32")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("n", (1, 13, 100))
@pytest.mark.parametrize("text", APART)
def test_stores_over_unlike_axes(text: str, n: int, dtype: str) -> None:
    func = under("apart", text, dtype, M=7, N=n, K=19)
    assert difference(func, SM90) < (1e-3 if dtype == "f32" else 0.3)


def test_what_every_block_stores_again_is_caught() -> None:
    """Plain stores would give the same again, updates do not."""
    func = under("scatter", UPDATES[0], M=21, N=13, L=4)
    lowered = to_kernel(func, SM90)
    assert sum(isinstance(op, If) for op in walk(lowered.body)) == 1
    wrong = planted(lowered, lambda op: replace(op, cond=()) if isinstance(op, If) else op)
    assert difference(func, SM90, lowered=lowered) < 1e-3
    assert difference(func, SM90, lowered=wrong) >= 1


def test_blocks_skip_the_folds_of_what_only_the_first_stores() -> None:
    (branch,) = [op for op in walk(to_kernel(under("apart", APART[0], M=7, N=13, K=19), SM90).body)
                 if isinstance(op, If) and any(isinstance(x, For) for x in walk(op.then))]
    assert {op.buf.name for op in walk(branch.then) if isinstance(op, Store)} == {"w"}


FORMS = ([("share", text, {"M": 5, "N": n}) for text in SCANS for n in (1, 100, 500)]
         + [("scatter", text, {"M": 21, "N": n, "L": 4}) for text in UPDATES for n in (1, 100)]
         + [("apart", text, {"M": 7, "N": n, "K": 19}) for text in APART for n in (1, 100)])


def test_sources_of_the_forms_run_without_races() -> None:
    """On the emulator, which watches the memory of all threads."""
    emulated = target("cuda-emulated")
    made = [under(name, text, **shape) for name, text, shape in FORMS]
    lowered = [replace(to_kernel(func, SM90), name=f"k{n}") for n, func in enumerate(made)]
    for func, kernel_ir, run in zip(made, lowered, launches(lowered, emulated), strict=True):
        assert difference(func, SM90, lowered=kernel_ir, run=run) < 1e-3


@pytest.mark.parametrize(("name", "text", "old", "new", "fault"), [
    ("share", SCANS[5], "    place[tid] = x;\n    __syncthreads();", "    place[tid] = x;",
     "a race"),
    ("share", SCANS[3], "__shfl_up_sync(mask, x, STRIDE)", "x", ""),
    ("scatter", UPDATES[2], "atomicAdd(&y[", "sum(&y[", "a race"),
    ("scatter", UPDATES[2], "found = atomicCAS((W *)at, was, *(W *)&next);",
     "found = was, *(W *)at = *(W *)&next;", "a race"),
    ("scatter", UPDATES[0], "if (-jb >= 0", "if (jb >= 0", "")])
def test_faults_in_the_forms_are_caught(name: str, text: str, old: str, new: str, fault: str
                                        ) -> None:
    emulated, shape = target("cuda-emulated"), [s for n, _, s in FORMS if n == name][-1]
    func = under(name, text, **shape)
    lowered = to_kernel(func, SM90)
    source = emulated.emit([lowered])
    assert old in source
    source = source.replace(old, new)
    if new.startswith("sum("):
        source = "template <class T> static void sum(T *p, T x) { *p += x; }\n" + source
    (run,) = launches([lowered], emulated, source)
    if fault:
        with pytest.raises(LaunchError, match=fault):
            difference(func, SM90, lowered=lowered, run=run)
    else:
        assert not difference(func, SM90, lowered=lowered, run=run) < 1e-3


@pytest.mark.parametrize(("dtype", "parts"), [
    ("bf16", ["cvt.rn.bf16.f32 %0, %1;", "from_bf16_f32("]),
    ("f16", ["cvt.rn.f16.f32 %0, %1;", "cvt.f32.f16 %0, %1;"])])
def test_conversions_are_instructions(dtype: str, parts: list[str]) -> None:
    text = emit([to_kernel(first(kernel("softmax", dtype, M=8, N=64))[0], SM90)])
    assert all(part in text for part in parts)
    assert "asm" not in text[text.index("__global__"):]


ROLES = GEMM.replace("ring 2", "ring 3") + "  roles load x1 regs 40, math x2 regs 232\n"


def test_roles_share_a_block() -> None:
    func = kernel("relu_mm", M=100, K=70, N=90)
    lowered = to_kernel(func.with_attr("mapping", parse_mapping(ROLES)), SM90)
    text = emit([lowered]).partition("plain_relu_mm")[0]
    head, load, math = re.split(r"if \(threadIdx.x (?:>=|<) 256\)", text)
    assert "__launch_bounds__(384, 1)" in head and launch_shape(lowered).threads == 384
    assert "mbarrier_init(k_pipe, 3, 128, 256);" in head
    assert "cp_async<4>(" in load and "cp_async_arrive(k_pipe + k0%3);" in load
    assert "cp_async<" not in math and "mbarrier_arrive(k_pipe + k0%3+3);" in math
    assert "__syncthreads" not in load + math


def team(name: str, dtype: str, n: int) -> Func:
    """A kernel under roles, with a fold over threads and arrays of `math` alone."""
    mapping = {"relu_mm": ROLES, "softmax": """map softmax on cuda.sm90
  i: grid *, seq 2
  j: seq *, thread 128, reg 2
  place x in shared at i.seq by cp.async
  place e in shared at i.seq
  roles load x1, math x1
""", "norm_proj": """map norm_proj on cuda.sm90
  i: grid *, thread 8
  j: grid *, thread 16
  k: pipe *, unroll 8
  place w in shared at k.pipe ring 2 by cp.async
  place x in shared at k.pipe ring 2 by cp.async
  roles load x1, math x1
"""}[name]
    func = kernel(name, dtype, **sizes(name, n, 22))
    return func.with_attr("mapping", parse_mapping(mapping))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("n", (1, 13, 129))
@pytest.mark.parametrize("name", ["relu_mm", "softmax", "norm_proj"])
def test_teams_on_numpy(name: str, n: int, dtype: str) -> None:
    func = team(name, dtype, n)
    check(func, func.attr("mapping"), SM90)
    for turns in (Engine, Late, Anyhow):
        assert difference(func, SM90, engine=turns) < (1e-3 if dtype == "f32" else 0.3)


@needs_nvcc
def test_teams_compile_with_the_registers_they_ask_for(tmp_path: Path) -> None:
    kernels = [replace(to_kernel(team(name, dtype, 129), SM90), name=f"{name}_{dtype}")
               for name in ("relu_mm", "softmax", "norm_proj") for dtype in ("f32", "bf16")]
    made = build(emit(kernels), tmp_path)
    assert made.spills() == []  # notices too: ptxas tells if it ignores the registers
    assert made.log.count("Used 168 registers") == 2


@pytest.mark.parametrize(("rows", "columns"), [(7, 3), (8, 5), (1, 4), (3, 1)])
def test_a_raster_visits_every_tile_once_in_bands(rows: int, columns: int) -> None:
    func = kernel("relu_mm", M=32 * rows, K=8, N=32 * columns)
    mapping = parse_mapping(GEMM + "  order persistent raster 4\n")
    check(func, mapping, SM90)
    lowered = to_kernel(func.with_attr("mapping", mapping), SM90)
    assert launch_shape(lowered).stay
    assert str(parse_module(str(lowered), VOCABULARIES)[0]) == str(lowered)
    text = emit([lowered])
    digits = text[text.index("for (int block"):text.index("x_tile = ")]
    lines = re.findall(r"const int (\w+ = .*);", digits)
    code = compile("\n".join(lines).replace("/", "//").replace("(int)", ""), "raster", "exec")
    seen = []
    for block in range(rows * columns):
        at = {"block": block}
        exec(code, at)
        seen.append((at["ib"], at["jb"]))
    want = [(i, j) for top in range(0, rows, 4) for j in range(columns)
            for i in range(top, min(top + 4, rows))]
    assert seen == want


@needs_nvcc
def test_blocks_that_stay_compile(tmp_path: Path) -> None:
    made = [gemm(), gemm(M="s0", K=64, N=100)]
    kernels = [replace(k, name=f"k{n}").with_attr("persistent", Raster(8))
               for n, k in enumerate(made)]
    assert build(emit(kernels), tmp_path).spills() == []


def test_wide_copies_where_rows_are_aligned() -> None:
    func = kernel("relu_mm", "bf16", M=64, K=64, N=64)
    text = emit([to_kernel(func.with_attr("mapping", parse_mapping(GEMM.replace(" pad 1", ""))),
                           SM90)])
    assert "cp_async<16>(" in text


def test_a_launch_covers_all_blocks() -> None:
    shape = launch_shape(gemm(M="s0", K=64, N=100))
    assert (str(shape.blocks), shape.threads, shape.dynamic) == ("4*((s0+31)//32)", 256, 0)


@needs_nvcc
def test_the_small_gemm_spills_nothing(tmp_path: Path) -> None:
    assert build(emit([gemm()]), tmp_path).spills() == []


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_names_of_device_functions_are_free_for_kernels(arch: str, tmp_path: Path) -> None:
    """CUDA has `max` for integers and for reals, so no kernel with C linkage may be called that."""
    kernels = [replace(to_kernel(first(kernel("softmax", dtype, M=8, N=64))[0], SM90), name=name)
               for name, dtype in (("max", "bf16"), ("exp", "f16"), ("combine", "f32"),
                                   ("max_f32", "bf16"), ("cp_async", "f16"))]
    assert build(emit(kernels), tmp_path, arch=arch).spills() == []


@needs_nvcc
def test_a_refusal_keeps_source_log_and_command(tmp_path: Path) -> None:
    with pytest.raises(TargetCompileError) as caught:
        build("int f( {", tmp_path)
    assert "error" in caught.value.log and "sm_90a" in caught.value.command
    assert Path(caught.value.source).exists()


@needs_nvcc
@pytest.mark.parametrize("name", KERNELS)
def test_sources_compile(name: str, tmp_path: Path) -> None:
    kernels = []
    for dtype in ("f32", "bf16"):
        for n in RAGGED:
            for func in first(kernel(name, dtype, **sizes(name, n, 500 if n == 512 else n))):
                kernels.append(replace(to_kernel(func, SM90), name=f"{name}_{len(kernels)}"))
    assert len(kernels) == 10
    assert build(emit(kernels), tmp_path).spills() == []
