"""Generated C under the sanitizers, at odd sizes: a sample here, all of it in `make sanitize`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from core.test_scalar import accepted, values
from dumps import parse
from functions import CASES, GRAPHS
from kernels import Arrays, Made, kernels_of
from mapped import KERNELS, SIZES, SYMBOLIC, kernel, legal
from sanitized import BUILDS, Case, SanitizerError, build, check, differences, missing, run

from rung.core.expr import sym
from rung.core.machine import Machine
from rung.core.op import Func, Op, Value
from rung.core.ops import Cast, Map
from rung.core.scalar import SCALARS
from rung.core.types import BOOL, DTYPES, DType, TensorType, dtype_of
from rung.loop.emit import Emitter
from rung.loop.ir import Load, Store
from rung.targets.cpu.machine import MACHINES, NEEDS, features
from rung.targets.cpu.target import target
from rung.tile.choose import choose
from rung.tile.to_kernel import to_kernel

ODD = (0, 1, 2, 13, 31, 65)
MINE = [m for m in MACHINES.values() if NEEDS[m.name] <= features()]
everything = pytest.mark.sanitize
machines = pytest.mark.parametrize("machine", MINE, ids=lambda m: m.name)
builds = pytest.mark.parametrize("how", BUILDS)


@pytest.fixture(scope="session", autouse=True)
def _compiler() -> None:
    if reason := missing():
        pytest.skip(reason)


def mapped(name: str, sizes: dict[str, int | str], machine: Machine, count: int,
           dtype: str = "f32") -> Iterator[Made]:
    """A kernel under some random mappings that are legal."""
    func = kernel(name, dtype, **sizes)
    seed = f"sanitized {name} {machine.name} {sorted(sizes.items(), key=str)}"
    for mapping in legal(random.Random(seed), func, machine, count):
        one = func.with_attr("mapping", mapping)
        yield Made(func, one, to_kernel(one, machine), target(machine.name))


def elementwise(name: str, types: Sequence[DType], result: DType,
                make: Callable[[list[Value]], Op]) -> Func:
    """A kernel of one op on vectors of a symbolic length."""
    size, at = sym("s0"), (sym("i"),)
    buffers = [Value(f"x{n}", TensorType(t, (size,))) for n, t in enumerate(types)]
    y = Value("y", TensorType(result, (size,)))
    out = Emitter({"i": size}, [v.name for v in (*buffers, y)])
    loads = [out.one(Load(b, at)) for b in buffers]
    out.add(Store(y, at, out.one(make(loads))))
    return out.kernel(name, buffers, [y])


def scalar_functions() -> Iterator[Func]:
    for name, fn in SCALARS.items():
        for dtype in accepted(name):
            types = [BOOL, dtype, dtype] if name == "where" else [dtype] * fn.arity
            yield elementwise(f"{name}_{dtype}", types, fn.result(tuple(types)),
                              lambda xs, name=name: Map(name, tuple(xs)))


def conversions() -> Iterator[Func]:
    for src, dst in itertools.permutations(DTYPES.values(), 2):
        yield elementwise(f"{src}_to_{dst}", [src], dst, lambda xs, dst=dst: Cast(xs[0], dst))


def extremes(func: Func) -> Arrays:
    """Values at the ends of each type's range, and pairs of them."""
    drawn = {v.name: values(dtype_of(v.type), n) for n, v in enumerate(func.params)}
    count = min(map(len, drawn.values()))
    out = np.zeros(count, dtype_of(func.outs[0].type).numpy)
    return {n: x[:count] for n, x in drawn.items()} | {"y": out}


def chosen(func: Func, machine: Machine) -> Made:
    cpu = target(machine.name)
    choice = choose(func, cpu.machine, cpu.candidates)
    assert choice.lowered is not None
    return Made(func, choice.kernel, choice.lowered, cpu)


COPY = """
kernel-ir copy(x: f32[s0]) -> y: f32[s0]
  for b in 0..(s0+15)//16
    y[16*b : 16 | s0-16*b-lane-1] = x[16*b : 16 | s0-16*b-lane-1]"""


@pytest.mark.parametrize(("how", "report"), [("plain", "heap-buffer-overflow.*run_copy"),
                                             ("native", "ended with -11")])
def test_a_store_beyond_a_buffer_is_found(how: str, report: str, tmp_path: Path) -> None:
    x = np.arange(13, dtype=np.float32)
    case = Case(0, {"x": x, "y": np.zeros_like(x)}, {"s0": 13})
    for mask, wrong in (("lane-1]", False), ("lane]", True)):
        kernels = [parse(COPY.replace("y[16*b : 16 | s0-16*b-lane-1]",
                                      f"y[16*b : 16 | s0-16*b-{mask}"))]
        program = build(kernels, MINE[0].name, how, tmp_path)
        if wrong:
            with pytest.raises(SanitizerError, match=f"(?s){report}"):
                run(program, kernels, [case])
        else:
            (got,) = run(program, kernels, [case])
            assert (got["y"] == x).all()


def test_undefined_arithmetic_is_found(tmp_path: Path) -> None:
    source = "void run_f(const int *x, int *y) { *y = *x + *x; }"
    func = parse("kernel-ir f(x: i32[1]) -> y: i32[1]\n  y[0] = x[0] + x[0]")
    case = Case(0, {"x": np.array([2**31 - 1], np.int32), "y": np.zeros(1, np.int32)}, {})
    (got,) = run(build([func], MINE[0].name, "plain", tmp_path), [func], [case])
    assert got["y"] == -2
    with pytest.raises(SanitizerError, match="signed integer overflow"):
        run(build([func], MINE[0].name, "plain", tmp_path, source), [func], [case])


@builds
def test_a_sample(how: str, tmp_path: Path) -> None:
    made = list(mapped("softmax", SYMBOLIC["softmax"], MINE[0], 1))
    assert not check(made, ODD, tmp_path, how)


@everything
@builds
@machines
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", KERNELS)
def test_random_mappings(name: str, dtype: str, machine: Machine, how: str,
                         tmp_path: Path) -> None:
    tables = [t[name] for t in (SIZES, SYMBOLIC) if name in t]
    made = [m for sizes in tables for m in mapped(name, sizes, machine, 3, dtype)]
    assert not check(made, ODD, tmp_path, how)


@everything
@builds
@machines
@pytest.mark.parametrize("make", [scalar_functions, conversions])
def test_extreme_values(make: Callable[[], Iterator[Func]], machine: Machine, how: str,
                        tmp_path: Path) -> None:
    made = [chosen(func, machine) for func in make()]
    cases = []
    for n, one in enumerate(made):
        arrays = extremes(one.kernel)
        cases.append(Case(n, arrays, {"s0": len(arrays["y"])}))
    kernels = [one.lowered for one in made]
    found = run(build(kernels, machine.name, how, tmp_path), kernels, cases)
    assert not [text for case, got in zip(cases, found, strict=True)
                if (text := differences(made[case.kernel], case, got))]


@everything
@builds
@machines
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", [*CASES, *GRAPHS])
def test_graphs(name: str, dynamic: bool, machine: Machine, how: str, tmp_path: Path) -> None:
    made: list[Made] = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        if name in CASES:
            fn, args = CASES[name].fn, CASES[name].args(13, dtype)
        else:
            fn, make = GRAPHS[name]
            args = [x.to(dtype).requires_grad_() if x.is_floating_point() else x for x in make()]
        made += kernels_of(fn, args, dynamic, target=machine.name)
    assert made
    assert not check(made, ODD, tmp_path, how)
