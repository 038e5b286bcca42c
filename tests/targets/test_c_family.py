"""Compiled C text against the NumPy meanings, for each instruction set; one C file for each."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from core.test_scalar import accepted, values

from rung.core.scalar import MONOIDS, SCALARS, cast, round_bf16
from rung.core.types import BF16, BOOL, DTYPES, F16, F32, F64, I8, I16, I32, I64, U8, DType
from rung.targets.c_cuda import CudaPrelude
from rung.targets.c_family import Prelude

ISAS = {
    "avx512": "-march=znver3 -mavx512f -mavx512vl -mavx512dq -mavx512bw "
              "-mprefer-vector-width=512",
    "avx2": "-mavx2 -mfma",
    "sse2": "-msse2",
}
FLAGS = ("-std=gnu11 -O3 -fno-math-errno -fno-trapping-math -ffp-contract=off -Wall -Werror "
         "-Wno-unused-function -shared -fPIC")
# Largest error in units in the last place of the exact result; 0 is bit for bit.
ULPS = {"exp": 1.1, "exp2": 1.2, "log": 1.2, "sigmoid": 3.0, "silu": 3.5, "tanh": 2.0, "erf": 2.0,
        "rsqrt": 1.6, "fma": 1.01, "reciprocal": 0.51, "sin": 2.0, "cos": 2.0, "tan": 4.0,
        "expm1": 2.0, "log1p": 2.6, "exp_approx": 1.1, **dict.fromkeys((
            "log2", "log10", "erfc", "erfp1", "asin", "acos", "atan", "sinh", "cosh", "asinh",
            "acosh", "atanh", "atan2", "hypot", "pow"), 4.0)}
LANES: dict[DType, tuple[int, ...]] = {F32: (1, 4, 8, 16), F64: (1, 4, 16), I32: (1, 4, 16),
                                       I64: (1, 8, 16), I16: (1, 16), I8: (1, 8), U8: (1, 16),
                                       BOOL: (1, 4, 8, 16), BF16: (1, 8, 16), F16: (1, 16)}
# Keeps gcc from making vectors of the scalar loops, and so from compiling for long.
BARRIER = '__asm__ volatile("" ::: "memory");'
PART_TYPES = (F32, F64, I32, I64, I16, BF16, I8, BOOL)


def calls() -> Iterator[tuple[str, DType, int]]:
    for name in SCALARS:
        for dtype in accepted(name):
            for lanes in LANES[dtype]:
                yield name, dtype, lanes


def conversions() -> Iterator[tuple[DType, DType, int]]:
    common = (F32, BF16, F16, I32, BOOL)
    for src in DTYPES.values():
        for dst in DTYPES.values():
            for lanes in (1, 4, 8, 16):
                if src != dst and (lanes in (1, 16) or (src in common and dst in common)):
                    yield src, dst, lanes


def loop(p: Prelude, name: str, types: list[DType], result: DType, lanes: int,
         expression: str) -> str:
    """A function that applies `expression` of v0, v1, ... to arrays."""
    params = "".join(f", const {p.storage(t)} *p{i}" for i, t in enumerate(types))
    loads = " ".join(f"{p.type(t, lanes)} v{i} = {p.load(t, lanes, f'p{i} + i')};"
                     for i, t in enumerate(types))
    store = p.store(result, lanes, "out + i", expression)
    barrier = BARRIER if lanes == 1 else ""
    return (f"void {name}(long n, {p.storage(result)} *out{params}) {{\n"
            f"  for (long i = 0; i < n; i += {lanes}) {{ {loads} {store} {barrier} }}\n}}\n")


def write_source() -> str:
    p, out = Prelude(), []
    for name, dtype, lanes in calls():
        fn = SCALARS[name]
        types = [BOOL if name == "where" and i == 0 else dtype for i in range(fn.arity)]
        text = p.call(name, dtype, lanes, [f"v{i}" for i in range(fn.arity)])
        out.append(loop(p, f"{name}_{dtype}_{lanes}", types, fn.result(tuple(types)), lanes, text))
    for src, dst, lanes in conversions():
        out.append(loop(p, f"cast_{src}_{dst}_{lanes}", [src], dst, lanes,
                        p.cast(src, dst, lanes, "v0")))
    out += [part for dtype in PART_TYPES for lanes in (4, 8, 16)
            for part in parts(p, dtype, lanes)]
    out += reductions(p) + shapes(p)
    return p.text() + "\n" + "\n".join(out)


def parts(p: Prelude, dtype: DType, lanes: int) -> list[str]:
    """Loads and stores of the first lanes, and of those from another one on."""
    stored, out = p.storage(dtype), []
    for name, first in (("part", ""), ("span", "m")):
        load = p.store(dtype, lanes, "out", p.load_part(dtype, lanes, "in", first, "n"))
        store = p.store_part(dtype, lanes, "out", p.load(dtype, lanes, "in"), first, "n")
        out += [f"void {what}_{name}_of_{dtype}_{lanes}({stored} *out, const {stored} *in, long m, "
                f"long n) {{ {text} }}\n" for what, text in (("load", load), ("store", store))]
    return out


def reductions(p: Prelude) -> list[str]:
    out = []
    for name in MONOIDS:
        for dtype in (BOOL,) if name in ("and", "or") else (F32, F64, I32, I64):
            for lanes in (2, 4, 16):
                value = p.reduce(name, dtype, lanes, p.load(dtype, lanes, "in"))
                stored = p.storage(dtype)
                out.append(f"void fold_{name}_{dtype}_{lanes}({stored} *out, const {stored} *in) "
                           f"{{ {p.store(dtype, 1, 'out', value)} }}\n")
    return out


CONSTANTS = [(F32, v) for v in (0.1, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3e38)] + [
    (F64, 0.1), (F64, -np.inf), (F64, 5e-324), (I64, -2**63), (I64, 2**63 - 1), (I32, -2**31),
    (I32, -7), (I16, -2**15), (I8, -128), (U8, 255), (BOOL, True), (BF16, 1.003), (F16, 0.1)]


def shapes(p: Prelude) -> list[str]:
    """Constants, iota, gather and lane."""
    out = []
    for k, (dtype, value) in enumerate(CONSTANTS):
        for lanes in (1, 8):
            text = p.store(dtype, lanes, "out", p.constant(value, dtype, lanes))
            out.append(f"void constant_{k}_{lanes}({p.storage(dtype)} *out) {{ {text} }}\n")
    for dtype in (F32, I64, U8):
        out.append(f"void iota_{dtype}({p.storage(dtype)} *out) "
                   f"{{ {p.store(dtype, 8, 'out', p.iota(dtype, 8))} }}\n")
    for dtype in (F32, BOOL, I8):
        lanes = [p.lane("v", 3 - k, dtype) for k in range(4)]
        stored = p.storage(dtype)
        out.append(f"void reverse_{dtype}({stored} *out, const {stored} *in) {{ "
                   f"{p.type(dtype, 4)} v = {p.load(dtype, 4, 'in')}; "
                   f"{p.store(dtype, 4, 'out', p.gather(dtype, 4, lanes))} }}\n")
    text = p.call("max", F32, 8, ["2.5f", p.load(F32, 8, "in")], scalars=(0,))
    out.append(f"void bound(float *out, const float *in) {{ {p.store(F32, 8, 'out', text)} }}\n")
    return out


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    folder = tmp_path_factory.mktemp("c_family")
    (folder / "all.c").write_text(write_source())
    cpu = Path("/proc/cpuinfo").read_text()
    usable = [i for i in ISAS if i == "sse2" or (i if i == "avx2" else "avx512dq") in cpu]
    running = [subprocess.Popen(
        ["gcc", *FLAGS.split(), *ISAS[isa].split(), "all.c", "-o", f"{isa}.so", "-lm"],
        cwd=folder, stderr=subprocess.PIPE, text=True) for isa in usable]
    for process in running:
        _, log = process.communicate()
        assert process.returncode == 0, log[:4000]
    return {isa: ctypes.CDLL(str(folder / f"{isa}.so")) for isa in usable}


@pytest.fixture(params=ISAS)
def library(request: pytest.FixtureRequest, libraries: dict[str, ctypes.CDLL]) -> ctypes.CDLL:
    if request.param not in libraries:
        pytest.skip(f"this CPU has no {request.param}")
    return libraries[request.param]


def to_memory(x: np.ndarray, dtype: DType) -> np.ndarray:
    x = np.ascontiguousarray(x)
    return (x.view(np.uint32) >> 16).astype(np.uint16) if dtype == BF16 else x


def from_memory(x: np.ndarray, dtype: DType) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32) if dtype == BF16 else x


def memory_type(dtype: DType) -> np.dtype:
    return np.dtype(np.uint16) if dtype == BF16 else dtype.numpy


def address(x: np.ndarray, offset: int = 0) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.ctypes.data + offset)


def run(library: ctypes.CDLL, name: str, args: list[np.ndarray], types: list[DType],
        result: DType) -> np.ndarray:
    memory = [to_memory(a, t) for a, t in zip(args, types, strict=True)]
    out = np.empty(len(args[0]), memory_type(result))
    getattr(library, name)(ctypes.c_long(len(out)), address(out), *map(address, memory))
    return from_memory(out, result)


def inputs(name: str, dtype: DType) -> list[np.ndarray]:
    arity = SCALARS[name].arity
    args = [values(dtype, seed) for seed in range(arity)]
    if dtype.is_float and arity == 1:  # wide: all magnitudes; dense: where exp, tanh, erf vary
        rng = np.random.default_rng(5)
        wide = rng.integers(0, 2**32, 20000, dtype=np.uint64).astype(np.uint32).view(np.float32)
        wide = wide[~np.isnan(wide)]
        dense = np.concatenate([np.linspace(-110, 95, 60000), np.linspace(-4.5, 4.5, 60000), wide])
        args = [np.concatenate([args[0], dense]).astype(dtype.numpy)]
    if name == "where":
        args[0] = np.random.default_rng(6).integers(0, 2, len(args[1])).astype(bool)
    return [a[:len(a) // 16 * 16] for a in args]


def error_in_ulps(got: np.ndarray, name: str, args: list[np.ndarray]) -> float:
    """Against the meaning in float64; not finite results must be equal."""
    exact = SCALARS[name].numpy(*(a.astype(np.float64) for a in args))
    with np.errstate(all="ignore"):
        rounded = exact.astype(got.dtype)
        special = ~np.isfinite(rounded) | ~np.isfinite(got)
        np.testing.assert_array_equal(got[special], rounded[special])
        scale = np.abs(rounded)
        if name == "fma":  # one rounding with FMA, else two
            scale = np.abs(args[0] * args[1]) + np.abs(args[2])
        error = np.abs(got.astype(np.float64) - exact)
        if name in ("sigmoid", "silu"):  # 1 / (1 + inf) flushes tails, as torch does
            error = np.maximum(error - 4e-37, 0)
        return float(np.max((error / np.spacing(scale))[~special], initial=0))


@pytest.mark.parametrize("name", SCALARS)
def test_call(library: ctypes.CDLL, name: str) -> None:
    fn = SCALARS[name]
    for dtype in accepted(name):
        args = inputs(name, dtype)
        types = [BOOL if name == "where" and i == 0 else dtype for i in range(fn.arity)]
        result = fn.result(tuple(types))
        outs = [run(library, f"{name}_{dtype}_{lanes}", args, types, result)
                for lanes in LANES[dtype]]
        for out in outs[1:]:  # a vector has the bits of the scalar
            number = out == out
            np.testing.assert_array_equal(to_memory(out, result)[number],
                                          to_memory(outs[0], result)[number], f"{name} {dtype}")
            np.testing.assert_array_equal(out, outs[0])
        if name not in ULPS or not dtype.is_float:
            np.testing.assert_array_equal(outs[-1], fn.numpy(*args), f"{name} {dtype}")
        else:  # in f64 there is no more exact result to compare with
            bound = ULPS[name] if dtype == F32 else 4
            assert error_in_ulps(outs[-1], name, args) <= bound


def test_signed_zeros(library: ctypes.CDLL) -> None:
    x = np.array([0.0, -0.0] * 8, np.float32)
    for name in ("neg", "abs", "floor", "ceil", "trunc", "round", "tanh", "erf", "sqrt", "silu"):
        for lanes in LANES[F32]:
            out = run(library, f"{name}_f32_{lanes}", [x], [F32], F32)
            np.testing.assert_array_equal(np.signbit(out), np.signbit(SCALARS[name].numpy(x)), name)


def cast_inputs(src: DType, dst: DType) -> np.ndarray:
    if src in (BF16, F16):  # all of them
        bits = np.arange(65536, dtype=np.uint32)
        half = bits.astype(np.uint16).view(np.float16)
        x = (bits << 16).view(np.float32) if src == BF16 else half
    else:
        x = values(src, 0)
    if src in (F32, F64) and dst.is_float:
        bits = np.random.default_rng(1).integers(0, 2**32, 65536, dtype=np.uint64)
        halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
        with np.errstate(all="ignore"):
            near = [halves, np.nextafter(halves, np.float32(9)), (halves + np.roll(halves, 1)) / 2,
                    bits.astype(np.uint32).view(np.float32)]
            x = np.concatenate([x, *near]).astype(src.numpy)
    if src.is_float and dst.kind in "iu":
        bits = min(dst.bits, 62) if dst == I64 else 31
        with np.errstate(all="ignore"):
            x = x[np.abs(x.astype(np.float64)) < 2.0**bits]
    return x[:len(x) // 16 * 16]


@pytest.mark.parametrize("src", DTYPES.values(), ids=str)
def test_cast(library: ctypes.CDLL, src: DType) -> None:
    for _, dst, lanes in (c for c in conversions() if c[0] == src):
        x = cast_inputs(src, dst)
        got = run(library, f"cast_{src}_{dst}_{lanes}", [x], [src], dst)
        np.testing.assert_array_equal(got, cast(x, src, dst), f"{src} -> {dst} {lanes}")


def guarded() -> tuple[np.ndarray, mmap.mmap]:
    """A page of memory that ends where reading and writing is forbidden."""
    page = mmap.PAGESIZE
    area = mmap.mmap(-1, 2 * page)
    whole = np.frombuffer(area, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(address(whole, page), ctypes.c_size_t(page), 0) == 0
    return whole[:page], area


@pytest.mark.parametrize("dtype", PART_TYPES, ids=str)
def test_parts_stay_inside(library: ctypes.CDLL, dtype: DType) -> None:
    page, _area = guarded()
    size = memory_type(dtype).itemsize
    rng = np.random.default_rng(3)
    firsts = ("part", 0), *(("span", m) for m in (-2**40, 0, 1, 3, 2**40))
    for lanes, (name, first) in itertools.product((4, 8, 16), firsts):
        for count in (*range(-1, lanes + 2), -2**40, 2**40):
            end = min(max(count, 0), lanes)
            moved = slice(min(max(first, 0), end) * size, end * size)
            data = rng.integers(0, 2 if dtype == BOOL else 256, lanes * size, dtype=np.uint8)
            start, used, (m, n) = len(page) - end * size, end * size, map(
                ctypes.c_long, (first, count))
            page[:] = 7
            page[start:] = data[:used]
            out, want = np.full(lanes * size, 9, np.uint8), np.zeros(lanes * size, np.uint8)
            want[moved] = data[moved]
            getattr(library, f"load_{name}_of_{dtype}_{lanes}")(
                address(out), address(page, start), m, n)
            np.testing.assert_array_equal(out, want)
            page[:], want = 7, np.full(used, 7, np.uint8)
            want[moved] = data[moved]
            getattr(library, f"store_{name}_of_{dtype}_{lanes}")(
                address(page, start), address(data), m, n)
            np.testing.assert_array_equal(page[start:], want)
            assert (page[:start] == 7).all()


def test_reduce(library: ctypes.CDLL) -> None:
    for name, monoid in MONOIDS.items():
        for dtype in (BOOL,) if name in ("and", "or") else (F32, F64, I32, I64):
            for lanes in (2, 4, 16):
                for seed in range(4):
                    check_reduce(library, monoid.combine, dtype, lanes, seed)


def check_reduce(library: ctypes.CDLL, name: str, dtype: DType, lanes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 2, lanes) if dtype == BOOL else rng.normal(size=lanes) * 9
    x = x.astype(dtype.numpy)
    if seed == 0 and dtype.is_float:
        x[lanes // 2] = np.nan
    if seed == 1:
        x[:] = x[0]
    out = np.empty(1, dtype.numpy)
    getattr(library, f"fold_{name}_{dtype}_{lanes}")(address(out), address(x))
    tree = x
    while len(tree) > 1:
        tree = SCALARS[name].numpy(tree[:len(tree) // 2], tree[len(tree) // 2:])
    np.testing.assert_array_equal(out, tree)


def test_constants_and_lanes(library: ctypes.CDLL) -> None:
    for k, (dtype, value) in enumerate(CONSTANTS):
        expected = (round_bf16(np.float32(value)) if dtype == BF16
                    else np.asarray(value, dtype.numpy))
        for lanes in (1, 8):
            out = np.empty(lanes, memory_type(dtype))
            getattr(library, f"constant_{k}_{lanes}")(address(out))
            got = from_memory(out, dtype)
            np.testing.assert_array_equal(got, np.broadcast_to(expected, lanes))
            assert (np.signbit(got) == np.signbit(expected)).all() if dtype == F32 else True
    for dtype in (F32, I64, U8):
        out = np.empty(8, dtype.numpy)
        getattr(library, f"iota_{dtype}")(address(out))
        np.testing.assert_array_equal(out, np.arange(8))
    for dtype in (F32, BOOL, I8):
        x = np.array([1, 0, 0, 1] if dtype == BOOL else [1, 2, 3, 4], dtype.numpy)[[0, 1, 2, 3]]
        out = np.empty(4, dtype.numpy)
        getattr(library, f"reverse_{dtype}")(address(out), address(x))
        np.testing.assert_array_equal(out, x[::-1])
    x, out = np.arange(8, dtype=np.float32), np.empty(8, np.float32)
    library.bound(address(out), address(x))
    np.testing.assert_array_equal(out, np.maximum(x, 2.5))


def test_text_is_deterministic_and_minimal() -> None:
    p = Prelude()
    assert p.call("add", F32, 16, ["a", "b"]) == "(a + b)"
    assert "static" not in p.text()
    assert write_source() == write_source()


def test_fma_is_one_instruction(tmp_path: Path) -> None:
    for isa, lanes in (("avx512", 16), ("avx2", 8)):
        p = Prelude()
        text = loop(p, "f", [F32] * 3, F32, lanes, p.call("fma", F32, lanes, ["v0", "v1", "v2"]))
        (tmp_path / "f.c").write_text(p.text() + text)
        asm = subprocess.run(["gcc", *FLAGS.split()[:-2], *ISAS[isa].split(), "-S", "-o", "-",
                              "f.c"], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert asm.stdout.count("vfmadd") == 1
        assert "call" not in asm.stdout


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
def test_cuda_compiles(tmp_path: Path) -> None:
    p, out = CudaPrelude(), []
    for name, dtype in ((n, d) for n in SCALARS for d in accepted(n)):
        fn = SCALARS[name]
        types = [BOOL if name == "where" and i == 0 else dtype for i in range(fn.arity)]
        text = p.call(name, dtype, 1, [f"v{i}" for i in range(fn.arity)])
        out.append(loop(p, f"{name}_{dtype}", types, fn.result(tuple(types)), 1, text))
    out += [loop(p, f"cast_{s}_{d}", [s], d, 1, p.cast(s, d, 1, "v0"))
            for s, d, lanes in conversions() if lanes == 1]
    out += [f"void constant_{k}({p.storage(d)} *out) {{ *out = {p.constant(v, d)}; }}\n"
            for k, (d, v) in enumerate(CONSTANTS)]
    kernels = "\n".join('extern "C" __global__ ' + text for text in out)
    (tmp_path / "all.cu").write_text(p.text() + "\n" + kernels)
    done = subprocess.run(["nvcc", "-cubin", "-arch=sm_90a", "-o", "all.cubin", "all.cu"],
                          cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    with pytest.raises(ValueError, match="one lane"):
        p.call("add", F32, 4, ["a", "b"])


@pytest.mark.parametrize("fn", [torch.minimum, torch.maximum, torch.lt, torch.fmax])
def test_f32_meets_f64(fn: Callable[..., torch.Tensor]) -> None:
    """A comparison of what was converted to f64, on which gcc 12 gave an internal error."""
    x, y = torch.randn(67).double(), torch.randn(67)
    compiled = torch.compile(fn, backend="rung", options={"strict": True})
    assert torch.equal(compiled(x, y), fn(x, y))


@pytest.mark.parametrize("compiler", ["cc", "clang"])
def test_a_lane_that_is_not_chosen_spoils_nothing(compiler: str, tmp_path: Path) -> None:
    """What a vector's NaN or infinity converts to is defined to each compiler: it is folded here,
    and to clang a conversion out of range is poison, which a select by bits hands on."""
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    p, out = Prelude(), []
    names = [name for name in SCALARS if SCALARS[name].arity == 1 and F32 in accepted(name)
             and SCALARS[name].result((F32,)) == F32]
    for value in (np.nan, np.inf, -np.inf):
        constant = p.constant(value, F32, 8)
        for name in names:
            x = p.load(F32, 8, "in")
            chosen = p.call("where", F32, 8, [p.call("eq", F32, 8, [x, x]), x,
                                              p.call(name, F32, 8, [constant])])
            out.append(f"void {name}_{value}(float *out, const float *in) {{ "
                       f"{p.store(F32, 8, 'out', chosen)} }}\n".replace("-inf", "minus_inf"))
    source = tmp_path / "chosen.c"
    source.write_text(p.text() + "\n" + "\n".join(out))
    subprocess.run([compiler, *FLAGS.replace("-Wall -Werror", "-w").split(), "-mavx2", "-mfma",
                    "-o", tmp_path / "chosen.so", source, "-lm"], check=True)
    library = ctypes.CDLL(str(tmp_path / "chosen.so"))
    given, got = np.arange(1, 9, dtype=np.float32), np.empty(8, np.float32)
    for name, value in itertools.product(names, ("nan", "inf", "minus_inf")):
        got[:] = -1
        getattr(library, f"{name}_{value}")(address(got), address(given))
        assert np.array_equal(got, given), (name, value)
