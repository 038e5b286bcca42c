"""CUDA sources on fibers of the host: right results, and each planted fault named."""

from __future__ import annotations

import ctypes
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from mapped import KERNELS, SIZES, VOCABULARIES, difference, kernel, launches, legal
from targets.test_cuda import GEMM, RAGGED, first, sizes, team
from torch.nn import functional as F

from rung.core import trace
from rung.core.errors import LaunchError, TargetCompileError
from rung.core.op import Func
from rung.core.parse import parse_module
from rung.core.types import dtype_of
from rung.targets.base import target
from rung.targets.cpu.build import build_cpp
from rung.targets.cuda_emulated.device import FLAGS, LEAST, LIBRARIES, EmulatedLaunch
from rung.targets.cuda_emulated.emit import emit_library
from rung.targets.device import device
from rung.tile.mapping import parse_mapping
from rung.tile.to_kernel import to_kernel
from rung.tools.fuzz import mappings

EMULATED = target("cuda-emulated")
OPTIONS = {"target": EMULATED.name}


def agree(funcs: list[Func], known: dict[str, int] | None = None) -> None:
    """One library has them all, and each gives what its Loop IR does."""
    lowered = [replace(to_kernel(f, EMULATED.machine), name=f"{f.name}_{n}")
               for n, f in enumerate(funcs)]
    for func, made, run in zip(funcs, lowered, launches(lowered, EMULATED), strict=True):
        half = any(dtype_of(v.type).name == "bf16" for v in func.params)
        assert difference(func, EMULATED.machine, known, lowered=made, run=run) < (
            0.3 if half else 1e-3), made.name


@pytest.mark.parametrize("name", KERNELS)
def test_ragged_sizes(name: str) -> None:
    agree([func for dtype in ("f32", "bf16") for n in RAGGED
           for func in first(kernel(name, dtype, **sizes(name, n)))])


def test_teams() -> None:
    agree([team(name, dtype, n) for name in ("relu_mm", "softmax", "norm_proj")
           for dtype in ("f32", "bf16") for n in (1, 129)])


def mapped(name: str, mapping: str, **shape: int | str) -> Func:
    return kernel(name, **shape).with_attr("mapping", parse_mapping(mapping))


def test_blocks_that_stay_take_several_tiles() -> None:
    stay = GEMM + "  order persistent raster 2\n"
    agree([mapped("relu_mm", stay, M=230, K=70, N=90)])


def test_sizes_of_a_launch() -> None:
    agree([mapped("relu_mm", GEMM, M="s0", K="s1", N="s2")], {"s0": 33, "s1": 70, "s2": 65})


# ---- planted faults
def plain() -> Func:
    return mapped("relu_mm", GEMM, M=100, K=70, N=90)


def rows() -> Func:
    return mapped("softmax", """map softmax on cuda-emulated
  i: grid *
  j: seq *, thread 256
""", M=5, N=500)


def roles() -> Func:
    return team("relu_mm", "f32", 129)


def folded() -> Func:
    return team("softmax", "f32", 129)


COPY = r"shared memory, to which thread \d+ still copies"
RACE = r"of shared memory, a race: thread \d+ of block 0"
FAULTS: dict[str, tuple[Callable[[], Func], str, str, str]] = {
    "no barrier before": (rows, r"__syncthreads\(\);\n  if \(STRIDE", "if (STRIDE", RACE),
    "no barrier after": (rows, r"x;\n  __syncthreads\(\);", "x;", RACE),
    "no barrier of a team": (folded, r"x;\n  team_sync<THREADS>\(\);", "x;", RACE),
    "no barrier of a loop": (plain, r"__syncthreads\(\);\n    if", "if", RACE),
    "no wait": (plain, r"cp_async_wait<0>\(\);", "", COPY),
    "too few waits": (plain, r"cp_async_wait<0>", "cp_async_wait<1>", COPY),
    "no commit": (plain, r"cp_async_commit\(\);", "", COPY),
    "parity of full": (roles, r"(mbarrier_wait.*), (.*)\);  // full", r"\1, 1 - (\2));", COPY),
    "parity of free": (roles, r"(mbarrier_wait.*), (.*)\);  // free", r"\1, 1 - (\2));",
                       r"deadlock: 256 wait for parity 0 of the mbarrier of line \d+, 128 else"),
    "no wait for full": (roles, r"mbarrier_wait.*// full", "", COPY),
    "no wait for free": (roles, r"mbarrier_wait.*// free", "", r"copies to byte \d+ of " + COPY),
    "not free": (roles, r"mbarrier_arrive.*// free", "", "deadlock"),
    "full too early": (roles, r"cp_async_arrive(.*// full)", r"mbarrier_arrive\1", COPY),
    "arrivals": (roles, r"3, 128, 256\)", "3, 128, 257)", "deadlock"),
    "mbarriers too late": (
        roles, r"(?s)(if \(threadIdx.x == 0\) \{.*?\n  \}\n)(  __syncthreads.*?\n)", r"\2\1",
        "uses an mbarrier before it is made"),
    "shared memory ends": (plain, r"arena \+ 8448", "arena + 17000",
                           r"copies to 4 B at byte \d+ of shared memory, out of range: it has"),
    "output ends": (rows, r"\by\[", "y[24+", r"block 4, .* writes 4 B at byte 10\d+ of y, out"),
    "input ends": (rows, r"\bx\[", "x[1+", r"block 4, .* reads 4 B at byte 10000 of x, out"),
    "far away": (rows, r"\bx\[", "x[1 << 30 |", "out of range of all buffers"),
    "not aligned": (plain, r"cp_async<4>\(&", "cp_async<4>(2 + (char *)&", "which is not aligned"),
    "two writers": (rows, r"\by\[[^]]*\]", "y[blockIdx.x]", "writes another value where thread"),
    "blocks race": (rows, r"\by\[[^]]*\]", "y[tid]", r"block 1, .* where thread \d+ of block 0"),
    "a lane is missing": (rows, r"STRIDE; o \*= 2\) x =", "STRIDE; o *= 2) if (tid != 5) x =",
                          r"deadlock: 31 wait for lanes of the shuffle of line \d+"),
    "not in the mask": (rows, r"sync\(mask", "sync(mask >> 1", r"but the mask is 7fffffff"),
    "divergent": (rows, r"__syncthreads\(\);\n  if \(STRIDE",
                  "if (tid < 32) __syncthreads(); else\n__syncthreads();\n  if (STRIDE",
                  r"divergent: comes to line \d+, while others wait at line \d+"),
    "one leaves": (rows, r"const \w+ tid = threadIdx.x;\n(?=.*blockIdx)",
                   r"\g<0>  if (tid == 7) return;\n", "deadlock: .* and 1 have ended"),
}


def edited(source: str, pattern: str, text: str) -> str:
    """The last place that fits the pattern changed, in the helpers or each version of a kernel."""
    parts, found = re.split(r'(?=extern "C" __global__)', source), 0
    for n, part in enumerate(parts):
        for last in list(re.finditer(pattern, part))[-1:]:
            parts[n] = part[:last.start()] + last.expand(text) + part[last.end():]
            found += 1
    assert found
    return "".join(parts)


def planted(func: Func, pattern: str, text: str) -> None:
    """Run a kernel whose source is edited."""
    lowered = to_kernel(func, EMULATED.machine)
    source = edited(EMULATED.emit([lowered]), pattern, text)
    (run,) = launches([lowered], EMULATED, source)
    difference(func, EMULATED.machine, lowered=lowered, run=run)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str) -> None:
    make, pattern, text, message = FAULTS[fault]
    with pytest.raises(LaunchError, match=r"^kernel \w+, block \d, thread \d+: ") as caught:
        planted(make(), pattern, text)
    assert re.search(message, str(caught.value)), caught.value


def test_a_launch_after_a_fault_is_a_new_one() -> None:
    func = first(kernel("softmax", M="s0", N=500))[0]
    lowered = to_kernel(func, EMULATED.machine)
    source = re.sub(r"\bx\[", "x[(gridDim.x == 5 ? 2500 : 0) + ", EMULATED.emit([lowered]))
    (run,) = launches([lowered], EMULATED, source)
    with pytest.raises(LaunchError):
        difference(func, EMULATED.machine, {"s0": 5}, lowered=lowered, run=run)
    assert difference(func, EMULATED.machine, {"s0": 6}, lowered=lowered, run=run) < 1e-6


def test_values_of_a_family_have_names_of_their_own() -> None:
    """`s` at 2 and a value called `s_2`, `s` at 2 and 0 and `s_2` at 0, as the fuzzer met them."""
    shape = {"H": 4, "G": 3, "D": 16, "L": 42}
    agree([mapped("online", """map online on cuda-emulated
  e: grid *
  t: pipe *, reg 3
  d: unroll *
  g: grid *, seq 4, unroll 2
  h: grid *, unroll 2
""", **shape), mapped("online", """map online on cuda-emulated
  d: pipe *, thread 16, unroll 2, reg 2
  g: grid *, unroll 8
  e: seq *
  h: seq *, reg 4
  t: grid *, pipe 8, unroll 2, reg 3
  place z in shared at t.grid
""", **shape)])


# ---- random mappings
@pytest.mark.parametrize("name", ["relu_mm", "softmax", "norm_proj"])
def test_random_roles(name: str) -> None:
    func = kernel(name, "f32", **SIZES[name])
    drawn = legal(random.Random(name), func, EMULATED.machine, 3, roles=True)
    assert drawn
    agree([func.with_attr("mapping", m) for m in drawn])


@pytest.mark.parametrize("seed", range(6))
def test_random_mappings(seed: int) -> None:
    assert not list(mappings.wrong(seed, EMULATED.name))


def test_a_mapped_kernel_prints_and_parses() -> None:
    text = str(mapped("relu_mm", GEMM.replace("cuda.sm90", EMULATED.name), **SIZES["relu_mm"]))
    (again,) = parse_module(text, VOCABULARIES, parse_mapping)
    assert str(again) == text


# ---- torch.compile
@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, fresh: None) -> Iterator[list[object]]:
    """What the emulator ran."""
    seen: list[object] = []
    call = EmulatedLaunch.__call__
    monkeypatch.setattr(EmulatedLaunch, "__call__", lambda self, *args: (
        seen.append(self), call(self, *args))[1])
    yield seen
    assert seen


def compiled(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(fn, backend="rung", options={"strict": True, "target": EMULATED.name})


FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "floor": lambda x: torch.floor(x) + 1, "softmax": lambda x: x.softmax(-1),
    "columns": lambda x: x.sum(0), "cumsum": lambda x: x.cumsum(1),
    "mm": lambda x: (x @ x.T).relu(),
    "norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[1:]),
    "turned": lambda x: (x.T + 1).contiguous(), "views": lambda x: x[1::2, 3:] * x[0, 3:]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_functions(dtype: torch.dtype, runs: list[object]) -> None:
    x = torch.randn(37, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    for fn in FUNCTIONS.values():
        torch.testing.assert_close(compiled(fn)(x), fn(x))


def test_rows_of_integers(runs: list[object]) -> None:
    """Whose masked loads have no infinity."""
    x = torch.randint(-9, -2, (5, 37), generator=torch.Generator().manual_seed(0))
    for fn in (lambda x: x.float().softmax(-1), lambda x: x.double().amax(-1)):
        torch.testing.assert_close(compiled(fn)(x), fn(x))


def test_a_step_of_training(runs: list[object]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(x), y)

    want = torch.autograd.grad(step(x, y), list(model.parameters()))
    got = torch.autograd.grad(compiled(step)(x, y), list(model.parameters()))
    torch.testing.assert_close(got, want)


def test_a_block_of_a_transformer(runs: list[object]) -> None:
    torch.manual_seed(0)
    block = torch.nn.TransformerEncoderLayer(32, 4, 64, 0.0, "gelu", batch_first=True)
    x = torch.randn(2, 10, 32)
    with torch.no_grad():
        torch.testing.assert_close(compiled(block.train())(x), block(x), rtol=1e-4, atol=1e-5)


def test_a_fault_reaches_the_caller(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    load = type(device(EMULATED)).load
    monkeypatch.setattr(type(device(EMULATED)), "load", lambda self, kernels, source, rest=(): load(
        self, kernels, re.sub(r"\by\[", "y[1+", source), rest))
    x = torch.randn(100)
    with pytest.raises(LaunchError, match="out of range"):
        compiled(lambda x: torch.floor(x) + 1)(x)


# ---- what no kernel of these has
HAND = """
extern "C" __global__ void run_N(float *x, int *n, long *total) {
  extern __shared__ __align__(16) unsigned char arena[];
  float *const s = (float *)arena;
  const int tid = threadIdx.x, lane = tid % 32;
  BODY
}
static void call_N(char *const *p, const long *) {
  run_N(Pointer{p[1]}, Pointer{p[2]}, Pointer{p[3]});
}
extern "C" void hand_N(void *x, void *n, void *total) {
  const Buffer given[] = {{"x", (char *)x, 512, 4, 1, 1}, {"n", (char *)n, 8, 4, 1, 1},
                          {"total", (char *)total, 8, 8, 1, 1}};
  launch("hand", call_N, 2, 64, 256, 4, given, 3, 0);
}
"""
FOUR = "typedef float four __attribute__((vector_size(16)));"
EACH = "x[blockIdx.x * 64 + tid] = "
LANES = np.arange(128) % 32.0
BODIES: dict[str, tuple[str, Callable[[], np.ndarray] | str]] = {
    "sums": ("atomicAdd(&x[tid % 2], 2.0f); atomicAdd(&total[0], 3l);",
             lambda: np.r_[128.0, 128.0, np.zeros(126)]),
    "extremes": ("atomicMax(&n[0], tid); atomicMin(&n[1], -tid);", lambda: np.zeros(128)),
    "in shared memory": ("if (!tid) s[0] = 0; __syncthreads(); atomicAdd(&s[0], 1.0f); "
                         "__syncthreads(); " + EACH + "s[0];", lambda: np.full(128, 64.0)),
    "an update and a write": ("if (tid) atomicAdd(&x[0], 1.0f); else x[0] = 1;",
                              "updates byte 0 of x"),
    "a prefix": ("float v = lane; for (int o = 1; o < 32; o *= 2) { const float u = "
                 "__shfl_up_sync(~0u, v, o); if (lane >= o) v += u; } " + EACH + "v;",
                 lambda: LANES * (LANES + 1) / 2),
    "down in eights": (EACH + "__shfl_down_sync(~0u, (float)lane, 1, 8);",
                       lambda: LANES + (LANES % 8 < 7)),
    "one for all": (EACH + "__shfl_sync(~0u, lane, 5);", lambda: np.full(128, 5.0)),
    "half a warp": ("if (lane < 16) " + EACH + "__shfl_xor_sync(0xffffu, lane, 1);",
                    lambda: np.where(LANES < 16, LANES + 1 - 2 * (LANES % 2), 0)),
    "a warp waits": ("s[tid] = lane; __syncwarp(); " + EACH + "s[tid ^ 1];",
                     lambda: LANES + 1 - 2 * (LANES % 2)),
    "a warp shuffles": ("s[tid] = lane; __shfl_sync(~0u, lane, 5); " + EACH + "s[tid ^ 1];",
                        r"reads byte \d+ of shared memory, a race: thread \d+"),
    "another warp": ("s[tid] = lane; __syncwarp(); " + EACH + "s[tid ^ 32];",
                     r"a race: thread \d+"),
    "a team waits": ("if (tid < 32) { s[tid] = lane; team_sync<32>(); " + EACH + "s[tid ^ 1]; }",
                     lambda: np.where(np.arange(128) % 64 < 32, LANES + 1 - 2 * (LANES % 2), 0)),
    "too small a team": ("if (tid < 32) { team_sync<32>(); } else { team_sync<64>(); }",
                         "deadlock: 32 wait at the barrier"),
    "wide": ("if (tid < 16) ((four *)x)[blockIdx.x * 16 + tid] = (four){1, 2, 3, 4};",
             lambda: np.arange(128) % 4 + 1.0),
    "wide, not aligned": ("*(four *)(x + 2) = (four){1, 2, 3, 4};",
                          "writes 16 B at byte 8 of x, which"),
    "wide, out of range": ("((four *)x)[32] = (four){1, 2, 3, 4};",
                           "writes 16 B at byte 512 of x, out"),
    "unwritten": (EACH + "s[tid];", lambda: np.full(128, np.nan)),
    "what another block wrote": ("if (blockIdx.x) x[0] = x[63]; else x[tid] = 0;",
                                 "reads byte 252 of x, a race: thread 63 of block 0 wrote it"),
}


@pytest.fixture(scope="module")
def hand() -> Path:
    """The library of all these kernels."""
    texts = [HAND.replace("N(", f"{n}(").replace("call_N", f"call_{n}").replace("BODY", body)
             for n, (body, _) in enumerate(BODIES.values())]
    return build_cpp(emit_library([], "\n".join([FOUR, *texts]), []), FLAGS, LIBRARIES, LEAST)


@pytest.mark.parametrize("case", BODIES)
def test_what_cuda_means(case: str, hand: Path) -> None:
    want = BODIES[case][1]
    run = EmulatedLaunch(ctypes.CDLL(str(hand))[f"hand_{list(BODIES).index(case)}"], hand)
    x, n, total = np.zeros(128, np.float32), np.zeros(2, np.int32), np.zeros(1, np.int64)
    args = [ctypes.c_void_p(a.ctypes.data) for a in (x, n, total)]
    if isinstance(want, str):
        with pytest.raises(LaunchError, match=want):
            run(*args)
        return
    run(*args)
    np.testing.assert_array_equal(x, want())
    assert list(n) == [63, -63] if case == "extremes" else total[0] == 384 * (case == "sums")


@pytest.mark.parametrize("how", ["", "option", "torch"])
def test_sums_at_data_are_atomic_unless_each_run_is_to_give_the_same(
        how: str, runs: list[object]) -> None:
    x, at = torch.randn(40, 8), torch.randint(0, 4, (40,))
    options = OPTIONS | ({"deterministic": True} if how == "option" else {})

    def fn(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(4, 8).index_add(0, at, x)

    torch.use_deterministic_algorithms(how == "torch")
    try:
        with trace.listen() as events:
            got = torch.compile(fn, backend="rung", options={"strict": True, **options})(x, at)
        (source,) = [e.data["history"].source for e in events if e.kind == "compiled"]
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(got, fn(x, at))
    assert ("atomicAdd(" in source) == (how == "")


# ---- compilers
def test_a_source_that_is_refused_tells_why() -> None:
    lowered = to_kernel(rows(), EMULATED.machine)
    with pytest.raises(TargetCompileError, match=r"kernels.cu:.*error") as caught:
        launches([lowered], EMULATED, EMULATED.emit([lowered]).replace("const int tid", "int int"))
    assert "-x c++" in caught.value.command


def test_a_compiler_without_cpp_is_told(settings: Callable[..., None], tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_text('#!/bin/sh\ncase "$*" in *c++*) echo "fatal error: no cc1plus" >&2; exit 1;; '
                      'esac\nexec cc "$@"\n')
    broken.chmod(0o755)
    settings(cc=str(broken))
    with pytest.raises(TargetCompileError, match=r"the C compiler .* fails .*no cc1plus"):
        agree([rows()])


@pytest.mark.parametrize("size", [40, 300])
def test_truths_are_folded_over_threads(size: int) -> None:
    """A truth takes four bytes where warps exchange it, though one in memory."""
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.all(0), x.all(1), x.any(0)
    torch._dynamo.reset()
    run = torch.compile(fn, backend="rung", options={"target": "cuda-emulated", "strict": True})
    x = torch.rand(size, 62, 2) > 0.01
    assert [y.tolist() for y in run(x)] == [y.tolist() for y in fn(x)]


def test_truths_exchanged_between_warps_have_room() -> None:
    torch._dynamo.reset()
    run = torch.compile(lambda x: x.all(-2), backend="rung", options={
        "target": "cuda-emulated", "strict": True, "precision": "eager"})
    x = (torch.arange(2 * 8 * 17) % 7).float().reshape(2, 8, 17)
    assert torch.equal(run(x), x.all(-2))


def test_values_may_be_called_as_words_of_cpp_are() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both, other = (x > 0) & (y > 0), (x < 1) ^ (y < 1)
        return both | other, both.sum(), ~other
    torch._dynamo.reset()
    run = torch.compile(fn, backend="rung", options={"target": "cuda-emulated", "strict": True})
    x, y = torch.linspace(-2, 2, 20), torch.linspace(3, -3, 20)
    assert [z.tolist() for z in run(x, y)] == [z.tolist() for z in fn(x, y)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [F.rms_norm, F.layer_norm])
def test_a_norm_sums_columns_beside_its_rows(
        norm: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    """One kernel gives back each row and sums of columns, a second one adds those up."""
    torch._dynamo.reset()
    args = [torch.randn(shape, generator=torch.Generator().manual_seed(n)).to(dtype)
            for n, shape in enumerate([(1100, 72), (72,), (1100, 72)])]

    def results(run: Callable[..., torch.Tensor], kind: torch.dtype) -> list[torch.Tensor]:
        x, w, dy = (a.to(kind) for a in args)
        y = run(x.requires_grad_(), (72,), w.requires_grad_())
        return [y.detach().double(), *(g.double() for g in torch.autograd.grad(y, (x, w), dy))]
    run = torch.compile(norm, backend="rung", options={"target": "cuda-emulated", "strict": True})
    with trace.listen() as events:
        found = results(run, dtype)
    assert [e.detail.partition(",")[2] for e in events if e.place == "split" and e.kind == "fired"]
    assert sum(e.place == "siblings" and e.kind == "fired" for e in events)
    for x, y, eager in zip(found, results(norm, torch.float64), results(norm, dtype), strict=True):
        assert (x - y).abs().max() <= 2 * (eager - y).abs().max() + 1e-6
