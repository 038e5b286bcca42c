"""The closed form on kernels whose numbers one can count."""

from __future__ import annotations

from programs import CPU

from rung.core.cost import HINT, TILE, bound
from rung.core.op import Func
from rung.core.parse import parse_module
from rung.loop import ir as loop
from rung.targets.cuda.machine import SM90


def parse(text: str) -> Func:
    (func,) = parse_module(text, {"kernel": loop.VOCABULARY})
    return func


def test_a_pointwise_kernel_is_its_bytes() -> None:
    b = bound(parse("kernel f(x: f32[1048576,64]) -> y: f32[1048576,64]\n"
                    "  y[i,j] = x[i,j] + 1.0"), CPU)
    assert (b.memory, b.cache, b.flops, b.reason) == (2 * 4 * 2**26, 0, 0, "memory")
    assert abs(b.seconds - 2 * 4 * 2**26 / (1.8 * 37e9) - 1e-6) < 1e-9  # two cores


def test_small_buffers_count_at_the_cache_and_once() -> None:
    b = bound(parse("kernel f(x: f32[64]) -> y: f32[64]\n  y[i] = x[i] + x[63-i]"), CPU)
    assert (b.memory, b.cache, b.reason) == (0, 2 * 64 * 4, "launch")


def test_a_contraction_is_its_flops_at_the_rate_of_its_type() -> None:
    text = ("kernel f(x: f32[512,512], w: f32[512,512]) -> y: f32[512,512]\n"
            "  m = contract add mul x[i,k], w[k,j] over k 512 : f32 over i,j acc f32\n"
            "  y[i,j] = m")
    wide = bound(parse(text), CPU)
    assert wide.flops == 2 * 512**3 and wide.reason == "compute"
    narrow = bound(parse(text.replace("x: f32", "x: bf16").replace("w: f32", "w: bf16").replace(
        "x[i,k], w[k,j]", "f32(x[i,k]), f32(w[k,j])")), CPU)
    assert narrow.seconds < wide.seconds


def test_a_prologue_is_paid_for_every_tile_of_columns() -> None:
    b = bound(parse("kernel f(x: f32[64,64], w: f32[64,4096]) -> y: f32[64,4096]\n"
                    "  e = exp(x[i,k]) : f32 over i,k\n"
                    "  m = contract add mul e, w[k,j] over k 64 : f32 over i,j acc f32\n"
                    "  y[i,j] = m"), CPU)
    assert b.recompute == 4096 / TILE and b.ops == 13 * 64 * 64 * 4096 / TILE


def test_folds_that_no_loop_order_serves_are_repeated() -> None:
    b = bound(parse("kernel f(x: f32[64,32]) -> y: f32[64,32]\n"
                    "  r = fold add x[i,k] over k 32 : f32 over i acc f32\n"
                    "  c = fold add x[l,j] over l 64 : f32 over j acc f32\n"
                    "  y[i,j] = x[i,j] / (r * c)"), CPU)
    assert b.recompute >= 32


def test_symbols_take_their_hints() -> None:
    func = parse("kernel f(x: f32[s0]) -> y: f32[s0]\n  y[i] = x[i] + 1.0")
    assert bound(func, CPU).cache == 2 * 4 * HINT
    assert bound(func, CPU, {"s0": 7}).cache == 2 * 4 * 7


def test_a_serial_kernel_leaves_cores_idle() -> None:
    row = "kernel f(x: f32[{n},4000]) -> y: f32[{n},4000]\n" \
          "  s = fold add x[i,j] over j 4000 : f32 over i acc f32\n  y[i,j] = exp(x[i,j]) / s"
    one, two = (bound(parse(row.format(n=n)), CPU) for n in (1, 2))
    assert (one.parallel, two.parallel) == (1, 2)
    assert one.ops * 2 == two.ops and one.seconds > 0.9 * two.seconds


def test_where_all_threads_start_together_only_folds_that_a_store_waits_for_are_serial() -> None:
    """Sums of columns beside rows are split: the rows are independent all the same."""
    func = parse("kernel f(x: f32[4096,64]) -> y: f32[4096,64], z: f32[64]\n"
                 "  s = fold add x[i,j] over j 64 : f32 over i acc f32\n"
                 "  c = fold add x[i,j] over i 4096 : f32 over j acc f32\n"
                 "  y[i,j] = x[i,j] - s\n  z[j] = c")
    assert SM90.threaded and not CPU.threaded
    assert (bound(func, CPU).parallel, bound(func, SM90).parallel) == (1, 4096)
    late = parse(str(func).replace("x[i,j] - s", "x[i,j] - s * c"))
    assert bound(late, SM90).parallel == 64  # z's columns
