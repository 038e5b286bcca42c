"""Splitting folds: dumps before and after in `tests/data/split`, both sides run; and the policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from programs import check, draw

from rung.core.op import Func, Value
from rung.core.parse import parse_module
from rung.core.verify import verify
from rung.loop import ir as loop
from rung.loop.canonical import canonical
from rung.loop.merge_folds import merge
from rung.loop.split import GAIN, MORE, RATES, can_split, plan, split, split_fold
from rung.program import ir as program
from rung.program.ir import KernelCall, Module

DATA = Path(__file__).resolve().parents[1] / "data" / "split"
KINDS = {v.kind: v for v in (program.VOCABULARY, loop.VOCABULARY)}
CORES = 4


def module_of(text: str) -> Module:
    main, *kernels = parse_module(text, KINDS)
    return Module((main,), tuple(kernels))


def halves_cost(share: float) -> Callable[[Func], tuple[float, float]]:
    """Prices under which a whole kernel takes a second on one core, and two halves `share` of it.
    """
    return lambda k: (share / 2, CORES) if "_part" in k.name or "_merge" in k.name else (1.0, 1)


@pytest.mark.parametrize("path", sorted(DATA.glob("*.ir")), ids=lambda p: p.stem)
def test_golden(path: Path, golden: Callable[[Path, str], None]) -> None:
    before, _, _ = path.read_text(encoding="utf-8").partition("--- expect\n")
    module = module_of(before)
    made = split(module, halves_cost(0.1), CORES, scans=True)
    golden(path, f"{before}--- expect\n{made}\n")
    again = module_of(str(made))
    verify(again.main, program.VOCABULARY, program.verify_program)
    for kernel in again.kernels:
        verify(kernel, loop.VOCABULARY, loop.verify_kernel)
    for size in (1, 3, 50):
        check(module, again, draw(module.main, {"s0": size}), exact=False)


def test_every_data_file_is_split() -> None:
    for path in DATA.glob("*.ir"):
        module = module_of(path.read_text(encoding="utf-8").partition("--- expect\n")[0])
        made = split(module, halves_cost(0.1), CORES, scans=True)
        calls = [op for op in made.main.body.ops if isinstance(op, KernelCall)]
        assert len(calls) == 2 and len(made.kernels) == 2, path


def total() -> Func:
    return module_of((DATA / "total.ir").read_text().partition("--- expect\n")[0]).kernels[0]


def test_the_policy_wants_idle_cores_and_a_clear_gain() -> None:
    found = plan(total(), halves_cost(0.1), CORES)
    assert found is not None and found.parts in [CORES * n for n in MORE]
    assert plan(total(), halves_cost(0.1), 1) is None
    assert plan(total(), halves_cost(GAIN + 0.01), CORES) is None
    assert plan(total(), lambda k: (1.0, CORES), CORES) is None


def test_short_folds_stay_whole() -> None:
    (kernel,) = module_of("program f(x: f32[9] input)\n  y = kernel k(x) : f32[]\n  return y\n\n"
                          "kernel k(x: f32[9]) -> y: f32[]\n"
                          "  s = fold add x[i] over i 9 : f32 acc f32\n  y[] = s").kernels
    assert RATES.part > 9 and plan(kernel, halves_cost(0.1), CORES) is None
    assert plan(kernel, halves_cost(0.1), CORES, replace(RATES, part=2))


@pytest.mark.parametrize("size, parts", [(16384, 128), (16383, 129), (16381, 132)])
def test_parts_are_equally_long_where_that_can_be(size: int, parts: int) -> None:
    (kernel,) = module_of(f"program f(x: f32[{size}] input)\n  y = kernel k(x) : f32[]\n"
                          f"  return y\n\nkernel k(x: f32[{size}]) -> y: f32[]\n"
                          f"  s = fold add x[i] over i {size} : f32 acc f32\n  y[] = s").kernels
    found = plan(kernel, lambda k: (0.1 if "_" in k.name else 1.0, 1), 132, replace(RATES, part=2))
    assert found is not None and found.parts == parts


def test_stores_that_wait_for_a_split_fold_come_after_it() -> None:
    (kernel,) = softmax_module().kernels
    _, second, _ = split_fold(merge(kernel), "j", 2)
    assert {v.name for v in second.outs} == {v.name for v in kernel.outs}


def test_folds_that_read_each_other_are_not_split_as_they_are() -> None:
    (kernel,) = canonical(softmax_module()).kernels
    assert can_split(kernel, "j") == "one fold over j reads another's result"
    assert can_split(kernel, "i") == "nothing folds over i"


def test_a_fold_of_a_scan_is_not_split() -> None:
    (kernel,) = parse_module("""
kernel top(x: f32[4,8192]) -> y: f32[4]
  s = scan add x[i,j] over j 8192 : f32 over i,j acc f32
  m = fold max s over j 8192 : f32 over i acc f32
  y[i] = m
""", KINDS)
    assert can_split(kernel, "j") == "a scan runs along j"


def softmax_module() -> Module:
    return module_of((DATA / "softmax.ir").read_text().partition("--- expect\n")[0])


SCAN = """
program f(x: {t}[2,{n}] input)
  y = kernel k(x) : {t}[2,{n}]
  return y

kernel k(x: {t}[2,{n}]) -> y: {t}[2,{n}]
  s = scan {monoid} x[i,j] over j {n} : {t} over i,j acc {t}
  y[i,j] = s
"""


@pytest.mark.parametrize("monoid, kind", [("add", "i64"), ("max", "f32"), ("min", "i32"),
                                          ("mul", "f64")])
@pytest.mark.parametrize("size, parts", [(12, 4), (9, 4), (7, 3), (5, 5)])
def test_parts_of_a_scan_go_on_where_those_before_end(monoid: str, kind: str, size: int, parts: int
                                                      ) -> None:
    """Also where the last part is short or has nothing at all."""
    module = module_of(SCAN.format(t=kind, n=size, monoid=monoid))
    (kernel,) = module.kernels
    first, second, spaces = split_fold(kernel, "j", parts)
    call = module.main.body.ops[0]
    assert isinstance(call, KernelCall)
    states = tuple(Value(f"w{n}", t) for n, t in enumerate(spaces))
    halves = [KernelCall(first.name, call.args, (), spaces, results=states),
              replace(call, callee=second.name, args=(*call.args, *states))]
    made = Module((module.main.with_ops([*halves, *module.main.body.ops[1:]]),), (first, second))
    check(module, made, draw(module.main, {}), exact=kind != "f64")


def test_scans_are_split_only_where_the_machine_is_for_it() -> None:
    module = module_of(SCAN.format(t="f32", n=8192, monoid="add"))
    assert split(module, halves_cost(0.1), CORES) == module
    assert len(split(module, halves_cost(0.1), CORES, scans=True).kernels) == 2
