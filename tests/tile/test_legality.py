"""One wrong mapping for each rule, with the reason that a person reads."""

from __future__ import annotations

import pytest
from mapped import kernel

from rung.core.errors import MappingError
from rung.core.machine import Machine
from rung.core.op import Func
from rung.core.parse import parse_module
from rung.loop.ir import VOCABULARY
from rung.targets.cpu.machine import AVX512
from rung.targets.cuda.machine import SM90
from rung.targets.toy.device import ToyEngine
from rung.targets.toy.machine import TOY
from rung.tile.legality import check
from rung.tile.mapping import parse_mapping
from rung.tools.fuzz.mappings import difference

GEMM = """
i: grid *, thread 16, reg 2
j: grid *, thread 16, reg 2
k: pipe *, unroll 32
place x, w in shared at k.pipe pad 1 ring 2 by cp.async
use mm with ffma
"""
ROLES = GEMM + "roles load x1 regs 40, math x2 regs 232\n"
TILE = """
i: seq *, atom 16
j: seq *, lane 16
k: pipe *, atom 16
place x, bias, w in scratchpad at k.pipe ring 2 by dma
place y in scratchpad at j.seq by dma
use mm with mac16
"""
MM = {"M": 40, "K": 64, "N": 48}
CASES: list[tuple[Machine, str, dict[str, int | str], str, str]] = [
    (SM90, "relu_mm", MM, GEMM.replace("i: grid", "q: grid"), "no axis q"),
    (SM90, "relu_mm", MM, GEMM.replace("pipe *", "warp *"), "no level warp"),
    (SM90, "relu_mm", MM, GEMM.replace("grid *, thread 16, reg 2", "reg 2, grid *"), "nest outer"),
    (SM90, "relu_mm", MM, GEMM.replace("k: pipe *", "k: grid *"), "needs split_fold"),
    (SM90, "relu_mm", MM, GEMM.replace("thread 16", "thread 64"), "4096 steps of thread > 1024"),
    (SM90, "relu_mm", MM, GEMM.replace("thread 16", "thread 12"), "not a power of two"),
    (SM90, "relu_mm", {"M": 2048, "K": 2048, "N": 2048},
     GEMM.replace("unroll 32", "unroll 512").replace("ring 2", "ring 3"),
     r"64 KB x ring 3 \+ 66 KB x ring 3 = .* KB > 227 KB of shared"),
    (SM90, "relu_mm", MM, GEMM.replace("reg 2", "reg 16"), "accumulators a thread"),
    (SM90, "relu_mm", MM, GEMM.replace("by cp.async", ""), "a ring needs an asynchronous mover"),
    (SM90, "relu_mm", MM, GEMM.replace("cp.async", "tma"), "no mover tma"),
    (SM90, "relu_mm", MM, GEMM.replace("in shared", "in l1"), "no space l1"),
    (SM90, "relu_mm", MM, GEMM.replace("in shared", "in hbm"), "does not belong to a block"),
    (SM90, "relu_mm", MM, GEMM.replace("at k.pipe", "at k.seq"), "no loop k.seq"),
    (SM90, "relu_mm", MM, GEMM.replace("x, w", "x, v"), "no value or buffer v"),
    (SM90, "relu_mm", MM, GEMM.replace("x, w", "y"), "stored from registers"),
    (SM90, "relu_mm", MM, GEMM.replace("place x, w", "place a"), "no mover brings it"),
    (SM90, "relu_mm", MM, GEMM.replace("ffma", "wgmma"), "no atom wgmma"),
    (SM90, "relu_mm", MM, ROLES.replace("load x1", "pack x1"), "no role pack, only load, math"),
    (SM90, "relu_mm", MM, ROLES.replace("math x2", "load x2"), "two roles are called load"),
    (SM90, "relu_mm", MM, GEMM + "roles math x2", "there is no role load"),
    (SM90, "relu_mm", MM, ROLES.replace("math x2", "math x1"),
     "math x1 is 128 threads, the axes have 256"),
    (SM90, "relu_mm", MM, ROLES.replace("load x1", "load x7"), "1152 threads in all roles"),
    (SM90, "relu_mm", MM, ROLES.replace("regs 40", "regs 44"), "load regs 44: .* multiple of 8"),
    (SM90, "relu_mm", MM, ROLES.replace("regs 40", "regs 56"),
     "66560 registers in all roles > 168 of each of 384 threads"),
    (SM90, "relu_mm", MM, ROLES.replace("regs 232", "regs 48"), r"a thread \+ 48 > 48 registers"),
    (SM90, "relu_mm", MM, ROLES.replace("pad 1 ring 2 by cp.async", ""),
     "load has nothing to move: no place by cp.async"),
    (SM90, "relu_mm", MM, ROLES.replace("at k.pipe pad 1 ring 2", "at j.grid"),
     "x is placed at j.grid: roles start inside of that loop"),
    (SM90, "relu_mm", {"M": 64, "K": 64, "N": 5824}, ROLES.replace("unroll 32", "unroll 4").replace(
        "ring 2", "ring 427"), r"16 B x ring 427 = .* > 227 KB of shared"),
    (TOY, "relu_mm", MM, TILE + "roles load x2, math x1", "load is one queue"),
    (TOY, "relu_mm", MM, TILE + "roles load x1 regs 8, math x1", "load is one queue"),
    (TOY, "relu_mm", {"M": 40, "K": 72, "N": 48}, TILE.replace("k: pipe *", "k: seq *, pipe 4")
     + "roles load x1, math x1", "k.pipe has not the same number each time"),
    (TOY, "rotate", {"H": 2, "D": 24, "L": 9}, "h: seq *\nd: atom 2, lane 16\n"
     "place k, cosine, sine, pos in scratchpad at h.seq by dma\n"
     "place cache in scratchpad at h.seq by dma\nroles load x1, math x1, store x1",
     "cache follows data, which store does not know"),
    (TOY, "rotate", {"H": 2, "D": 24, "L": 9}, "h: seq *\nd: atom 2, lane 16\n"
     "place k, cosine, sine, pos, cache in scratchpad at h.seq by dma\n"
     "place load5 in scratchpad at h.seq", "follows load5, which is computed inside of h.seq"),
    (TOY, "inplace", {"M": 4, "N": 32}, "i: seq *\nj: seq *, lane 16\n"
     "place x in scratchpad at j.seq by dma\nroles load x1, math x1",
     "x is read and written: nothing orders load and math"),
    (AVX512, "relu_mm", MM, "roles load x1, math x1", "cpu.avx512 has no roles"),
    (SM90, "relu_mm", MM, GEMM + "overlap a with mm distance 1", "a is computed: only what"),
    (SM90, "relu_mm", MM, GEMM + "overlap bias with mm distance 1", "bias has no ring"),
    (SM90, "relu_mm", MM, GEMM + "overlap x with mm distance 2", "from 1 to 1 fits a ring of 2"),
    (SM90, "relu_mm", MM, GEMM.replace("ring 2", "ring 4") + "overlap x with mm distance 1\n"
     "overlap w with mm distance 2", "one distance from 1 to 3"),
    (SM90, "relu_mm", MM, GEMM + "overlap x with a distance 1", "a does not read x in k.pipe"),
    (SM90, "relu_mm", MM, ROLES + "overlap x with mm distance 1", "runs ahead as far as slots are"),
    (SM90, "relu_mm", MM, GEMM + "order lpt", "blocks of a kernel are equally long"),
    (SM90, "relu_mm", MM, GEMM + "order flat raster 8", "only blocks that stay"),
    (SM90, "relu_mm", MM, GEMM + "order flat\norder persistent", "`order flat` and `order pers"),
    (SM90, "relu_mm", MM, ROLES + "order persistent", "slots of roles would count on"),
    (SM90, "relu_mm", MM, GEMM.replace("j: grid", "j: seq")
     + "order persistent raster 8", "the grid has no rows and columns"),
    (TOY, "relu_mm", MM, TILE + "order persistent", "toy has no blocks that could stay"),
    (SM90, "relu_mm", MM, GEMM + "combine mm by thread", "no parallel level"),
    (SM90, "softmax", {"M": 4, "N": "s0"},
     "i: grid *\nj: seq *, thread 32\nplace e in shared at i.grid", "extent s0 is symbolic"),
    (TOY, "relu_mm", MM, TILE.replace("bias, ", ""), "bias is not placed in the scratchpad"),
    (TOY, "relu_mm", MM, TILE.replace("ring 2 by dma", ""), "only dma brings x"),
    (TOY, "relu_mm", MM, TILE.replace("k: pipe *, atom 16", "k: pipe *, atom 8"), "unrolled by a"),
    (TOY, "relu_mm", MM, TILE.replace("i: seq *, atom 16", "i: seq *, atom 8"), "16 rows"),
    (TOY, "relu_mm", MM, TILE.replace("lane 16", "lane 8"), "needs 16 lanes"),
    (TOY, "relu_mm", MM, TILE.replace("lane 16", "lane 32"), "powers of two up to 16"),
    (TOY, "relu_mm", MM, TILE.replace("at j.seq", "at k.pipe"), "no loop around its use"),
    (TOY, "relu_mm", {"M": 512, "K": 512, "N": 512},
     TILE.replace("k: pipe *, atom 16", "k: pipe *, atom 512"), "> 64 KB of scratchpad"),
    (TOY, "relu_mm", {"M": 512, "K": 512, "N": 512},
     TILE.replace("i: seq *", "i: pipe *").replace("at j.seq", "at i.pipe").replace(
         "k: pipe *", "k: seq *").replace("k.pipe", "i.pipe").replace("ring 2 by", "by").replace(
             "lane 16", "atom 4, lane 16"), "KB of acc"),
    (TOY, "rotate", {"H": 2, "D": 24, "L": 9}, "h: seq *\nd: atom 2, lane 16\n"
     "place k, cosine, sine, pos in scratchpad at h.seq by dma\n"
     "place cache in scratchpad at h.seq ring 2 by dma", "follows data"),
    (AVX512, "softmax", {"M": 4, "N": 64}, "i: seq *, simd 4\nj: seq *, simd 16", "two vectorised"),
    (AVX512, "softmax", {"M": 4, "N": 64}, "j: l1 *\ni: seq *, simd 4\nplace e in l1 at i.seq",
     "place|placed"),
    (AVX512, "online", {"H": 2, "G": 2, "D": 8, "L": 9}, "h: seq *\ng: seq *\nt: seq *\ne: seq *\n"
     "d: seq *", "does not vary over e"),
    (AVX512, "share", {"M": 4, "N": 64}, "i: l1 *\nj: seq *, simd 16",
     "c scans j, whose steps on simd have no order"),
    (AVX512, "tally", {"M": 4, "N": 64, "L": 4}, "j: l1 *\ni: seq *, reg 2",
     "y is updated along i, whose steps on reg may meet"),
    (AVX512, "tally", {"M": 4, "N": 64, "L": 4}, "i: core *\nj: seq *", "steps on core may meet"),
    (AVX512, "tally", {"M": 4, "N": 64, "L": 4}, "i: seq *\nj: l1 *, simd 16\n"
     "place y in l1 at i.seq", "no tile of it is known"),
    (SM90, "online", {"H": 3, "G": 1, "D": 16, "L": 32}, "h: seq *\ne: grid *, pipe 1, thread 8\n"
     "t: unroll *\nplace l in shared at e.pipe", "l is read outside of e.pipe"),
    (TOY, "tally", {"M": 4, "N": 64, "L": 4}, "i: seq *\nj: seq *, lane 16",
     "not placed in the scratchpad, and accessed in blocks"),
    (TOY, "tally", {"M": 4, "N": 64, "L": 4}, "i: seq *\nj: seq *\n"
     "place y in scratchpad at i.seq by dma", "no tile of it is known"),
    (AVX512, "share", {"M": 4, "N": 64}, "j: l1 *\ni: seq *",
     "c scans j, and has a loop over i inside of its own"),
    (SM90, "share", {"M": 4, "N": 64}, "i: grid *\nj: thread 8, seq *",
     "c scans j: its threads must be inside of the loop j.seq"),
    (SM90, "tally", {"M": 4, "N": 64, "L": 4}, "i: grid *\nj: seq *",
     "z is updated along i, whose steps on grid may meet"),
    (SM90, "relu_mm", MM, "i: grid *, thread 32, reg 8\nj: grid *, thread 32, reg 8\nk: seq *",
     r"64 accumulators a thread \+ 48 > 64 registers"),
    (AVX512, "relu_mm", MM, "i: seq 4, reg 4\nj: seq *, simd 16\nk: seq *", "the sizes cover 16"),
]


def mapped(name: str, sizes: dict[str, int | str], machine: Machine, text: str) -> Func:
    mapping = parse_mapping(f"map {name} on {machine.name}\n{text}")
    return kernel(name, **sizes).with_attr("mapping", mapping)


@pytest.mark.parametrize(("machine", "name", "sizes", "text", "reason"), CASES,
                         ids=[c[4][:24] for c in CASES])
def test_refused_with_the_reason(machine: Machine, name: str, sizes: dict[str, int | str],
                                 text: str, reason: str) -> None:
    func = mapped(name, sizes, machine, text)
    with pytest.raises(MappingError, match=reason):
        check(func, func.attr("mapping"), machine)


@pytest.mark.parametrize(("to", "reason"), [
    ("8] at 2*i", "there are places in its box that it does not store to"),
    ("4,4] at i,i", "y is stored along a diagonal, which is no box")])
def test_a_tile_is_all_stored(to: str, reason: str) -> None:
    """What else is in it would be sent off too."""
    shape, subs = to.split("] at ")
    (func,) = parse_module(f"kernel f(x: f32[4]) -> y: f32[{shape}]\n  y[{subs}] = x[i]",
                           {"kernel": VOCABULARY})
    mapping = parse_mapping("map f on toy\ni: seq 2, lane 2\n"
                            "place x, y in scratchpad at i.seq by dma")
    with pytest.raises(MappingError, match=reason):
        check(func, mapping, TOY)


def test_a_tile_of_one_element_is_all_stored() -> None:
    (func,) = parse_module("kernel f(x: f32[4]) -> y: f32[4]\n  y[3-i] = x[i]",
                           {"kernel": VOCABULARY})
    mapping = parse_mapping("map f on toy\ni: seq 4, lane 1\n"
                            "place x, y in scratchpad at i.seq by dma")
    check(func, mapping, TOY)
    assert difference(func.with_attr("mapping", mapping), TOY, engine=ToyEngine) == 0


UPDATE = """
kernel f(x: f32[33,4] mutated, c: f32[4]) -> y0: f32[4], y1: f32[33,4]
  mul = x[i,j] * c[j] : f32 over i,j
  x[i,j] = mul
  a = atan(c[j]) : f32 over j
  y0[j] = a
  y1[i,j] = mul + a
map f on cpu.avx512
  j: l1 *
  i: l1 *, simd 16
"""


def test_what_a_store_overwrites_is_read_no_later() -> None:
    """With `a` in an array there are two loops over i, and the second would read new values."""
    (func,) = parse_module(UPDATE, {"kernel": VOCABULARY}, parse_mapping)
    apart, both = (parse_mapping(str(func.attr("mapping")) + f"\n  place {x} in l1 at j.l1")
                   for x in ("a", "a, mul"))
    with pytest.raises(MappingError, match="x is read in a later loop than the one that updates"):
        check(func, apart, AVX512)
    for mapping in (func.attr("mapping"), both):
        check(func, mapping, AVX512)
        assert difference(func.with_attr("mapping", mapping), AVX512) == 0


@pytest.mark.parametrize("level", ["grid *", "thread 8"])
def test_what_the_first_block_or_thread_overwrites_no_other_reads(level: str) -> None:
    text = ("kernel f(x: f32[4] mutated, c: f32[8]) -> y: f32[4,8], z: f32[4]\n"
            "  z[i] = x[i] * 3.0\n  y[i,j] = {} * 2.0\n  x[i] = x[i] + 1.0")
    mapping = parse_mapping(f"map f on cuda.sm90\ni: grid *\nj: {level}")
    alone, read = (parse_module(text.format(x), {"kernel": VOCABULARY})[0]
                   for x in ("c[j]", "(c[j] * x[i])"))
    check(alone, mapping, SM90)
    assert difference(alone.with_attr("mapping", mapping), SM90) == 0
    with pytest.raises(MappingError, match="x is stored by the first step of j and read by all"):
        check(read, mapping, SM90)


def test_updates_in_no_order_have_their_buffer_to_themselves() -> None:
    (func,) = parse_module("kernel f(x: f32[9], at: i64[9], y: f32[4] mutated) -> z: f32[9]\n"
                           "  z[i] = y[at[i]]\n  y[at[i]] add= x[i]", {"kernel": VOCABULARY})
    with pytest.raises(MappingError, match="y is accessed twice, and its updates along i are in"):
        check(func, parse_mapping("map f on cuda.sm90\ni: thread 16"), SM90)


@pytest.mark.parametrize(("machine", "text"), [
    (SM90, GEMM), (SM90, ROLES), (TOY, TILE), (TOY, TILE + "roles load x1, math x1, store x1")])
def test_the_originals_are_legal(machine: Machine, text: str) -> None:
    func = mapped("relu_mm", dict(MM), machine, text)
    check(func, func.attr("mapping"), machine)


def test_statements_are_printed_as_read() -> None:
    text = ("map f on cuda.sm90\n  i: grid *, thread 16, reg 2\n"
            "  place x, w in shared at k.pipe pad 1 ring 2 by cp.async\n  carry m in y\n"
            "  use mm with ffma\n  combine m by thread, reg\n"
            "  roles load x1 regs 40, math x2 regs 232\n  roles load x1, math x1, store x1\n"
            "  overlap a with b distance 1\n"
            "  order persistent raster 8")
    assert str(parse_mapping(text)) == text
