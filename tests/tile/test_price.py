"""Prices: what loops bring again, what stays in a cache between steps, and packed operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from rung.compilation import Compilation
from rung.core.config import Settings
from rung.core.cost import bound
from rung.core.op import Func
from rung.core.parse import parse_module
from rung.frontends.torch.externs import TORCH
from rung.loop import ir as loop
from rung.pipeline import VOCABULARIES
from rung.targets.base import target
from rung.targets.cpu.figures import ASLEEP
from rung.targets.cpu.libraries import LIBRARIES
from rung.targets.cpu.machine import AVX512
from rung.targets.cuda.machine import SM90
from rung.tile.candidates_cpu import candidates
from rung.tile.choose import cheapest, choose
from rung.tile.mapping import parse_mapping
from rung.tile.match import call_of
from rung.tile.price import Price, price

MATMUL = """
kernel mm(x: f32[{m},{k}], w: f32[{k},{n}], c: f32[{m},{n}]) -> y: f32[{m},{n}]
  mm = contract add mul x[i,k], w[k,j] over k {k} : f32 over i,j acc f32
  y[i,j] = mm{more}
"""
TILES = "map mm on cpu.avx512\n  i: l1 *, reg 6\n  j: l1 *, reg 4, simd 16\n  k: seq *\n"


def kernel(text: str) -> Func:
    (found,) = parse_module(text, {"kernel": loop.VOCABULARY}, parse_mapping)
    return found


def traffic(func: Func) -> dict[str, float]:
    """Seconds that each memory needs under the kernel's own mapping."""
    return dict(price(func, func.attr("mapping"), AVX512).traffic)


def test_a_library_is_given_whole_tensors() -> None:
    text = MATMUL.format(m=64, n=32, k=48, more="")
    assert call_of(LIBRARIES[0].atom, kernel(text)) is not None
    for given, larger in (("x: f32[64,48]", "x: f32[64,96]"), ("x: f32[64,48]", "x: f32[65,48]"),
                          ("w: f32[48,32]", "w: f32[48,40]")):
        assert not any(call_of(x.atom, kernel(text.replace(given, larger))) for x in LIBRARIES)


def test_what_follows_a_contraction_is_not_brought_in_each_of_its_steps() -> None:
    m, n, k = 192, 768, 768
    plain, added = (traffic(kernel(MATMUL.format(m=m, n=n, k=k, more=x) + TILES))
                    for x in ("", " + c[i,j]"))
    once = 4 * m * n / next(s.rate for s in AVX512.spaces if s.name == "l2")
    assert plain["l2"] < added["l2"] <= plain["l2"] + 1.01 * once


def test_what_fits_a_cache_stays_there_between_steps_that_do_not_change_it() -> None:
    """Rows come and go beside a matrix of 256 KiB, which DRAM gives once for any number of them."""
    seconds = [traffic(kernel(MATMUL.format(m=m, n=256, k=256, more="") + TILES))["dram"]
               for m in (6000, 12000)]
    assert seconds[1] < 2 * seconds[0]


def test_costly_functions_are_materialised_before_a_matmul_and_cheap_ones_are_not() -> None:
    machine = replace(AVX512, cores=2)

    def gain(of_x: str, size: int) -> float:
        """Seconds that computing the operand inside of the matmul saves."""
        args = f"x: f32[{size},{size}], w: f32[{size},{size}]"
        mm = (f"kernel mm({args}) -> y: f32[{size},{size}]\n%s  mm = contract add mul %s, w[k,j] "
              f"over k {size} : f32 over i,j acc f32\n  y[i,j] = mm\n")
        made = f"  v = {of_x} : f32 over i,k\n"
        map_ = f"kernel map(x: f32[{size},{size}]) -> y: f32[{size},{size}]\n{made}  y[i,k] = v\n"
        apart = [map_, mm % ("", "x[i,k]")]
        found = (cheapest(kernel(text), machine, candidates, {}, LIBRARIES)
                 for text in (mm % (made, "v"), *apart))
        whole, *parts = (cost.seconds if cost else inf for cost in found)
        return sum(parts) - whole
    assert gain("x[i,k] + 1.0", 512) > 0
    assert gain("exp(x[i,k])", 512) < 0 < gain("exp(x[i,k])", 4)


def test_several_rows_at_once_find_a_state_that_waits_in_an_array() -> None:
    """Columns are summed row by row, as they lie in memory; a step brings its sums and stores
    them, which pays for more than one row."""
    func = kernel("kernel colsum(x: f32[4096,4096]) -> y: f32[4096]\n"
                  "  c = fold add x[i,j] over i 4096 : f32 over j acc f32\n  y[j] = c\n")
    machine = replace(AVX512, cores=2)
    found = choose(func, machine, candidates).kernel.attr("mapping")
    assert found.axes[0].axis == "i" and dict(found.axis("i").splits)["reg"] > 1
    alone = parse_mapping("map colsum on cpu.avx512\n  i: l1 *\n"
                          "  j: core 2, seq *, reg 2, simd 16\n")
    assert price(func, found, machine).compute < 0.8 * price(func, alone, machine).compute


def test_what_each_core_reads_shares_the_cache_of_all() -> None:
    """Two cores with 20 MiB each do not keep it in the 32 MiB that they share."""
    text = MATMUL.format(m=128, n=768, k=40000, more="")
    apart = "map mm on cpu.avx512\n  j: core *, reg 3, simd 16\n  i: l1 *, reg 8\n  k: seq *\n"
    func = kernel(text + apart)
    seconds = [dict(price(func, func.attr("mapping"), replace(AVX512, cores=n)).traffic)["dram"]
               for n in (1, 2)]
    assert 1.8 * seconds[1] > 1.2 * seconds[0]  # they have 1.8 times the bandwidth of one


def test_a_transpose_stores_in_order_and_uses_whole_lines_of_what_it_loads() -> None:
    func = kernel("kernel copy(x: f32[2048,1024]) -> y: f32[1024,2048]\n  y[i,j] = x[j,i]\n")
    found = choose(func, AVX512, candidates).kernel.attr("mapping")
    assert found.axis("j").splits[-1] == ("simd", 16) and found.axis("i").splits[-1] == ("reg", 16)
    plain = parse_mapping("map copy on cpu.avx512\n  i: l1 *\n  j: l1 *, simd 16\n")
    assert price(func, plain, AVX512).seconds > 4 * price(func, found, AVX512).seconds


LINEAR = """
kernel linear(x: f32[32,{n}], w: f32[{n},{n}]) -> y: f32[32,{n}]
  mm = contract add mul x[i,k], w[j,k] over k {n} : f32 over i,j acc f32
  y[i,j] = relu(mm)
"""


@pytest.mark.parametrize("fork", [AVX512.rates.fork, ASLEEP])
def test_small_matrices_stay_on_one_core_and_out_of_libraries(fork: float) -> None:
    """What a call of a library costs the host, and what it costs to wake threads."""
    machine = replace(AVX512, cores=2, rates=replace(AVX512.rates, fork=fork))
    small, large = (choose(kernel(LINEAR.format(n=n)), machine, candidates, {}, LIBRARIES)
                    for n in (64, 2048))
    assert small.price.cores == 1 and small.lowered is not None
    assert large.library is not None
    middle = choose(kernel(LINEAR.format(n=160)), machine, candidates).price
    assert (middle.cores > 1) is (fork < ASLEEP)


def test_threads_that_sleep_are_dear_to_wake(settings: Callable[..., None]) -> None:
    assert Settings.read({"OMP_WAIT_POLICY": "passive"}).asleep
    assert not Settings.read({"OMP_WAIT_POLICY": "ACTIVE"}).asleep
    settings(asleep=False)
    awake = target("cpu.avx512").machine.rates.fork
    settings(asleep=True)
    assert target("cpu.avx512").machine.rates.fork == ASLEEP > awake


DATA = sorted((Path(__file__).resolve().parents[1] / "data").glob("*.ir"))


@pytest.mark.parametrize("where", ["cpu.avx512", "cpu.avx2", "cpu.base", "toy", "cuda.sm90"])
def test_no_price_is_below_the_bound_of_its_kernel(where: str) -> None:
    for path in DATA:
        (program,) = parse_module(path.read_text().partition("--- expect\n")[0], VOCABULARIES)
        compilation = Compilation(target(where), TORCH)
        compilation.history(program).reached()
        choices = compilation.context.choices.values()
        assert choices
        for choice in choices:
            least = bound(choice.kernel, compilation.target.machine)
            assert choice.price.seconds >= 0.999 * least.seconds, (choice.kernel, least)


def test_a_ring_costs_less_where_it_hides_a_transfer() -> None:
    mapping = ("map mm on toy\n  i: seq *, atom 16\n  j: seq *, lane 16\n  k: pipe *, atom 32\n"
               "  place x, w in scratchpad at k.pipe{} by dma\n"
               "  place y in scratchpad at j.seq by dma\n  use mm with mac16\n")
    text = MATMUL.format(m=64, n=64, k=512, more="").replace(", c: f32[64,64]", "")
    toy = target("toy")
    waits, hides = (price(func, func.attr("mapping"), toy.machine) for func in (
        kernel(text + mapping.format(ring)) for ring in ("", " ring 2")))
    assert waits.seconds - hides.seconds > 0.9 * hides.compute > 0
    made = choose(kernel(MATMUL.format(m=17, n=33, k=1000, more="").replace(
        ", c: f32[17,33]", "")), toy.machine, toy.candidates)
    assert made.kernel.attr("mapping").placed("x").ring > 1


def on_sm90(text: str, axes: str, **flow: int) -> Price:
    """The price of a kernel named k under a mapping of the H200."""
    func = kernel(f"{text}map k on cuda.sm90\n{axes}")
    rates = replace(SM90.rates, flow=replace(SM90.rates.flow, **flow))
    machine = replace(SM90, rates=rates)
    return price(func, func.attr("mapping"), machine)


COLUMNS = ("kernel k(x: f32[65536,4096]) -> y: f32[4096]\n"
           "  c = fold add x[i,j] over i 65536 : f32 over j acc f32\n  y[j] = c\n")


def test_memory_has_its_rate_where_enough_bytes_are_under_way() -> None:
    """One load a step of 256 threads is 1 KiB: four of them bring the same bytes sooner, and a
    machine of which nothing is known waits for neither."""
    axes = "  i: seq *, reg {}, thread 8\n  j: grid *, thread 32\n"
    one, four = (on_sm90(COLUMNS, axes.format(n)) for n in (1, 4))
    brought = [dict(x.traffic)["hbm"] for x in (one, four)]
    assert brought[0] == pytest.approx(4 * brought[1])
    free = [dict(on_sm90(COLUMNS, axes.format(n), flight=0).traffic)["hbm"] for n in (1, 4)]
    assert free[0] == free[1] <= brought[1]


def test_short_runs_of_memory_bring_whole_sectors() -> None:
    text = "kernel k(x: f32[65536,4096]) -> y: f32[65536,4096]\n  y[i,j] = x[i,j] + 1.0\n"
    axes = "  i: grid *, thread {}\n  j: grid *, thread {}\n"
    short, whole, long = (dict(on_sm90(text, axes.format(256 // n, n)).traffic)["hbm"]
                          for n in (4, 8, 64))
    assert short == pytest.approx(2 * whole) and whole == long
    rows = text.replace("65536", "67108864").replace("4096", "4")  # which follow each other
    assert dict(on_sm90(rows, axes.format(64, 4)).traffic)["hbm"] == pytest.approx(whole)


def test_what_one_leaf_computes_for_several_stores_counts_once() -> None:
    text = ("kernel k(x: f32[1048576]) -> y: f32[1048576], z: f32[1048576]\n"
            "  v = {} : f32 over i\n  y[i] = v\n  z[i] = v\n")
    axes = "  i: grid *, thread 256, reg 4\n"
    cheap, dear = (on_sm90(text.format(v), axes).compute for v in ("x[i] + 1.0", "exp(x[i])"))
    alone = [on_sm90(text.format(v).replace("  z[i] = v\n", "").replace(
        ", z: f32[1048576]", ""), axes).compute for v in ("x[i] + 1.0", "exp(x[i])")]
    assert dear - cheap == pytest.approx(alone[1] - alone[0])
