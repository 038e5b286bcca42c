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
from rung.loop import split as split_module
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


def test_as_many_parts_are_tried_as_no_core_has_one_more_than_others() -> None:
    """26.4 parts for each that one core computes: 27 keep all busy, 26 are one for each."""
    (kernel,) = module_of("program f(x: f32[s1] input)\n  y = kernel k(x) : f32[]\n  return y\n\n"
                          "kernel k(x: f32[s1]) -> y: f32[]\n"
                          "  s = fold add x[i] over i s1 : f32 acc f32\n  y[] = s").kernels
    names: list[str] = []

    def price(k: Func) -> tuple[float, float]:
        names.append(k.name)
        return (0.1, 1) if k.name.endswith("26") else (0.2 if "_" in k.name else 1.0, 5)
    found = plan(kernel, price, 132)
    tried = [int(x.partition("_part")[2]) for x in names if "_part" in x]
    assert tried == [27, 26, 54, 52, 108, 105] and found is not None and found.parts == 26


def test_splits_that_cannot_gain_are_not_priced() -> None:
    asked: list[str] = []

    def price(k: Func) -> tuple[float, float]:
        asked.append(k.name)
        return halves_cost(0.5)(k)
    whole, rates = [total().name], replace(RATES, part=1)
    assert plan(total(), price, CORES, rates, least=lambda _: GAIN / 2) is None and asked == whole
    asked.clear()
    low = {f"{total().name}_{half}{CORES}" for half in ("part", "merge")}
    found = plan(total(), price, CORES, rates,
                 least=lambda k: 0.1 if k.name in low else 0.3)
    assert found and found.parts == CORES and {*asked} == {*whole, *low}
    every = plan(total(), price, CORES, rates)
    assert every and (every.parts, every.seconds) == (found.parts, found.seconds)


MIXED = """
program f(x: f32[s0,s1] input, r: f32[s0] input)
  y, z, a, b = kernel k(x, r) : f32[s0,s1], f32[s0,s1], f32[s0], f32[s1]
  return y, z, a, b

kernel k(x: f32[s0,s1], r: f32[s0]) -> y: f32[s0,s1], z: f32[s0,s1], a: f32[s0], b: f32[s1]
  v = x[i,j] * r[i] : f32 over i,j
  s = fold add v over j s1 : f32 over i acc f32
  c = fold add v over i s0 : f32 over j acc f32
  y[i,j] = v - s
  z[i,j] = v - c
  a[i] = s
  b[j] = c
"""


def in_parts(module: Module, parts: int) -> Module:
    """The module with its kernel split into so many parts, the first that are tried."""
    made = split(module, lambda k: (0.1 if "_" in k.name else 1.0, 1), parts)
    assert any(k.name.endswith(f"_part{parts}") for k in made.kernels)
    return made


def test_each_output_is_stored_where_it_is_known_first() -> None:
    """What reads the sums over all rows waits for the merge; what reads a row's sum does not."""
    kernel = module_of(MIXED).kernels[0]
    first, second, spaces = split_fold(kernel, "i", 4)
    assert [v.name for v in first.outs[len(spaces):]] == ["y", "a"]
    assert [v.name for v in second.outs] == ["z", "b"]
    by_columns, rest, spaces = split_fold(kernel, "j", 4)
    assert [v.name for v in by_columns.outs[len(spaces):]] == ["z", "b"]
    assert [v.name for v in rest.outs] == ["y", "a"]


def mixed(axis: str) -> Module:
    """The folds in the order in which that of `axis` is split."""
    s, c = MIXED.splitlines(keepends=True)[7:9]
    assert s.startswith("  s = ") and c.startswith("  c = ")
    return module_of(MIXED if axis == "j" else MIXED.replace(s + c, c + s))


def test_outputs_that_all_parts_would_write_stay_in_the_merge_kernel() -> None:
    """One that does not run along the axis, and one of which several points are one element."""
    (kernel,) = parse_module("""
kernel k(x: f32[s0,6], w: f32[6], at: i64[s0]) -> y: f32[s0,6], q: f32[6], t: f32[9,6], b: f32[6]
  v = exp(x[i,j]) : f32 over i,j
  c = fold add v over i s0 : f32 over j acc f32
  y[i,j] = v
  q[j] = w[j] * 2.0
  t[at[i],j] add= v
  b[j] = c
""", KINDS)
    first, second, spaces = split_fold(kernel, "i", 4)
    assert [v.name for v in first.outs[len(spaces):]] == ["y"]
    assert [v.name for v in second.outs] == ["q", "t", "b"]


@pytest.mark.parametrize("axis", ["i", "j"])
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_outputs_of_both_halves_are_right(axis: str, parts: int) -> None:
    module = mixed(axis)
    made = in_parts(module, parts)
    assert module.kernels[0].outs[3 if axis == "i" else 2] in made.kernels[1].outs
    sizes = [(1, 1), (parts, 5), (parts + 1, 3), (4 * parts - 1, 2), (50, 9)]
    for seed, (m, n) in enumerate(sizes):
        check(module, made, draw(module.main, {"s0": m, "s1": n}, seed), exact=False)


def _all(kernel: Func, found: object, axis: str) -> list[Value]:
    """A wrong `_stored`: of outputs that wait for the fold too."""
    return [op.buf for op in kernel.body.ops if isinstance(op, loop.Store) and axis in op.nest]


@pytest.mark.parametrize("axis", ["i", "j"])
def test_an_output_that_does_not_wait_for_its_fold_is_seen(
        axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, sizes = mixed(axis), {"s0": 20, "s1": 30}
    check(module, in_parts(module, 3), draw(module.main, sizes), exact=False)
    monkeypatch.setattr(split_module, "_stored", _all)
    with pytest.raises(AssertionError):
        check(module, in_parts(module, 3), draw(module.main, sizes), exact=False)


@pytest.mark.parametrize("axis", ["i", "j"])
def test_elements_past_the_end_of_the_last_part_are_seen(
        axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_module._Chunk, "mask", property(lambda _: (), lambda *_: None))
    module = mixed(axis)
    made = in_parts(module, 3)
    check(module, made, draw(module.main, {"s0": 6, "s1": 6}), exact=False)  # no part is shorter
    with pytest.raises((AssertionError, IndexError)):
        check(module, made, draw(module.main, {"s0": 7, "s1": 7}), exact=False)


TABLE = """
program f(at: i64[s0] input, x: f32[s0,s1] input, t: f32[9,s1] mutated)
  new, y, b = kernel k(at, x, t) in place t : f32[9,s1], f32[s0,s1], f32[s1]
  return new, y, b

kernel k(at: i64[s0], x: f32[s0,s1], t: f32[9,s1] mutated) -> y: f32[s0,s1], b: f32[s1]
  v = exp(x[i,j]) : f32 over i,j
  c = fold add v over i s0 : f32 over j acc f32
  y[i,j] = v
  t[at[i],j] add= v
  b[j] = c
"""


def test_updates_of_equal_elements_stay_in_one_launch() -> None:
    """Two parts would add to one row of the table at once."""
    module = module_of(TABLE)
    made = in_parts(module, 3)
    first, second = made.kernels
    assert not any(op.combine for op in first.body.ops if isinstance(op, loop.Store))
    assert any(op.combine for op in second.body.ops if isinstance(op, loop.Store))
    assert "y" in [v.name for v in first.outs] and "t" in [v.name for v in second.params]
    for seed, m in enumerate((1, 4, 20)):
        check(module, made, draw(module.main, {"s0": m, "s1": 3}, seed), exact=False)


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
