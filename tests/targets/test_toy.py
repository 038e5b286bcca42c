"""The toy end to end: ragged sizes, both types, its dump, and what its engine catches."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from mapped import KERNELS, arguments, difference, kernel

from rung.core.errors import LaunchError
from rung.core.op import Func, Op, walk
from rung.core.types import dtype_of
from rung.kernel.ir import For, Wait, run_kernel_ir
from rung.loop import ir as loop
from rung.targets.base import target
from rung.targets.device import device
from rung.targets.toy.device import Region, ToyEngine, copy
from rung.targets.toy.emit import emit
from rung.targets.toy.machine import TOY
from rung.tile.candidates_explicit import candidates
from rung.tile.legality import check
from rung.tile.mapping import parse_mapping
from rung.tile.to_kernel import to_kernel

RAGGED = (1, 13, 500, 512, 1000)
TILE = """map relu_mm on toy
  i: seq *, atom 32
  j: seq *, atom 2, lane 16
  k: pipe *, atom 32
  place x, bias, w in scratchpad at k.pipe ring 2 by dma
  place y in scratchpad at j.seq by dma
  use mm with mac16
"""


def first(func: Func, count: int = 1) -> list[Func]:
    return [func.with_attr("mapping", m) for m in islice(candidates(func, TOY), count)]


def near(func: Func) -> float:
    return 1e-3 if "bf16" not in str(func.params[0].type) else 0.07


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("n", RAGGED)
@pytest.mark.parametrize("name", ["relu_mm", "softmax", "colsum", "norm_proj"])
def test_ragged_sizes(name: str, n: int, dtype: str) -> None:
    other = 37
    sizes = {"M": other, "K": n, "N": 21} if "mm" in name or "proj" in name else {
        "M": other, "N": n} if name == "softmax" else {"M": n, "N": other}
    for func in first(kernel(name, dtype, **sizes)):
        assert difference(func, TOY, engine=ToyEngine) < near(func)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", ["rotate", "attend", "online"])
@pytest.mark.parametrize("length", [1, 13, 500])
def test_a_step_of_the_cache(name: str, length: int, dtype: str) -> None:
    func = kernel(name, dtype, H=2, G=3, D=32, L=max(length, 4) if name == "rotate" else length)
    for mapped in first(func):
        assert difference(mapped, TOY, engine=ToyEngine) < near(mapped)


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "tally"])
def test_every_candidate_gives_the_answer(name: str) -> None:
    func = kernel(name, M=5, N=40, K=33, H=2, G=3, D=16, L=21)
    found = first(func, 8)
    assert found
    for mapped in found:
        assert difference(mapped, TOY, engine=ToyEngine) < 1e-3, mapped.attr("mapping")


def gemm() -> Func:
    func = kernel("relu_mm", M=40, K=100, N=50)
    return to_kernel(func.with_attr("mapping", parse_mapping(TILE)), TOY)


def test_double_buffering_shows_in_the_dump() -> None:
    text = str(gemm())
    assert "x_tile = alloc : scratchpad f32[2,32,32]" in text
    assert text.index("transfer x_tile at [0,0,0]") < text.index("for kb in 0..4")
    step = text[text.index("for kb in 0..4"):]
    assert step.index("wait k_pipe pending 0") < step.index("transfer x_tile at [(kb+1)%2,0,0]")
    assert step.index("transfer x_tile") < step.index("apply mac16")
    assert "x_tile[kb%2,iu32,ku32]" in step


def without(func: Func, drop: type[Op]) -> Func:
    """The kernel with all ops of a class taken out."""
    def block(b):  # type: ignore[no-untyped-def]
        return replace(b, ops=tuple(op.map({}, block) for op in b.ops if not isinstance(op, drop)))
    return replace(func, body=block(func.body))


def test_a_missing_wait_poisons_the_result() -> None:
    func = kernel("relu_mm", M=40, K=100, N=50).with_attr("mapping", parse_mapping(TILE))
    assert not difference(func, TOY, lowered=without(gemm(), Wait)) < 1e30


def test_a_ring_with_a_slot_too_few_is_found() -> None:
    func = kernel("relu_mm", M=40, K=100, N=50).with_attr("mapping", parse_mapping(TILE))
    late = gemm()

    def block(b):  # type: ignore[no-untyped-def]
        ops = [replace(op, pending=1) if isinstance(op, Wait) and op.group == "k_pipe" else op
               for op in b.ops]
        return replace(b, ops=tuple(op.map({}, block) for op in ops))
    assert not difference(func, TOY, lowered=replace(late, body=block(late.body))) < 1e30


@pytest.mark.parametrize("distance", [1, 2, 3])
def test_a_transfer_starts_so_many_steps_ahead(distance: int) -> None:
    func = kernel("relu_mm", M=40, K=200, N=50)
    text = TILE.replace("k.pipe ring 2", "k.pipe ring 4")
    mapping = parse_mapping(f"{text}  overlap x with mm distance {distance}\n")
    check(func, mapping, TOY)
    lowered = to_kernel(func.with_attr("mapping", mapping), TOY)
    step = str(lowered).split("for kb in 0..7")[1]
    assert f"wait k_pipe pending {distance - 1}" in step
    assert f"transfer x_tile at [(kb+{distance})%4,0,0]" in step
    assert difference(func, TOY, engine=ToyEngine, lowered=lowered) < 1e-3


def test_roles_are_queues_of_the_assembly() -> None:
    func = kernel("relu_mm", M=40, K=100, N=50)
    roles = TILE + "  roles load x1, math x1, store x1\n"
    lowered = to_kernel(func.with_attr("mapping", parse_mapping(roles)), TOY)
    text = emit([lowered])
    queues = text.split("queue ")[1:]
    assert [q.split()[0] for q in queues] == ["load", "math", "store"]
    assert ["dma.in" in q for q in queues] == [True, False, False]
    assert ["mac16" in q for q in queues] == [False, True, False]
    assert ["dma.out" in q for q in queues] == [False, False, True]
    assert difference(func, TOY, engine=ToyEngine, lowered=lowered) < 1e-3


def test_the_scratchpad_has_an_end() -> None:
    func = gemm()
    big = [replace(r, type=replace(r.type, shape=(2, 512, 512)))  # type: ignore[call-arg]
           for op in walk(func.body) for r in op.results if r.name == "x_tile"]
    (op,) = [op for op in walk(func.body) if op.results and op.results[0].name == "x_tile"]

    def block(b):  # type: ignore[no-untyped-def]
        swapped = replace(op, types=(big[0].type,))
        return replace(b, ops=tuple(swapped if x is op else x.map({}, block) for x in b.ops))
    with pytest.raises(LaunchError, match="live in scratchpad"):
        run_kernel_ir(replace(func, body=block(func.body)),
                      arguments(kernel("relu_mm", M=40, K=100, N=50), {}), ToyEngine)


def test_assembly_names_its_instructions() -> None:
    text = emit([gemm()])
    for word in ("dma.in   x_tile", "wait     k_pipe, 0", "mac16", "dma.out  y[", "v.relu"):
        assert word in text
    assert text.count("loop ") == sum(isinstance(op, For) for op in walk(gemm().body))


def test_a_launch_takes_addresses() -> None:
    func = first(kernel("softmax", "bf16", M=5, N=40))[0]
    lowered = to_kernel(func, TOY)
    held = arguments(func, {})
    want = {k: v.copy() for k, v in held.items()}
    loop.run_kernel(func, want)
    raw = {k: (v.view("u4") >> 16).astype("u2") for k, v in held.items()}
    regions = {k: Region(v.nbytes) for k, v in raw.items()}
    for k, v in raw.items():
        copy(regions[k].address, v.ctypes.data, v.nbytes)
    launch = device(target("toy")).load([lowered], "")[lowered.name]
    launch(*(regions[v.name].address for v in (*func.params, *func.outs)))
    copy(raw["y"].ctypes.data, regions["y"].address, raw["y"].nbytes)
    got = (raw["y"].astype("u4") << 16).view("f4")
    assert dtype_of(func.outs[0].type).name == "bf16"
    assert abs(got - want["y"]).max() < 1e-2


def test_a_launch_takes_no_memory_of_the_host() -> None:
    lowered = to_kernel(first(kernel("softmax", "f32", M=5, N=40))[0], TOY)
    held = arguments(lowered, {})
    launch = device(target("toy")).load([lowered], "")[lowered.name]
    with pytest.raises(LaunchError, match="the toy has no 800 B at 0x"):
        launch(*(held[v.name].ctypes.data for v in (*lowered.params, *lowered.outs)))


def test_memory_ends_with_its_region_and_goes_with_it() -> None:
    region, host = Region(8), np.arange(8, dtype=np.uint8)
    address = region.address
    copy(address, host.ctypes.data, 8)
    copy(host.ctypes.data, address + 4, 4)
    assert host.tolist() == [4, 5, 6, 7, 4, 5, 6, 7]
    with pytest.raises(LaunchError, match="the toy has no 8 B"):
        copy(host.ctypes.data, address + 4, 8)
    del region
    with pytest.raises(LaunchError, match="the toy has no 1 B"):
        copy(host.ctypes.data, address, 1)
