"""The list of passes, what is verified and compared when, and what happens on errors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from functions import CASES, copies
from kernels import compiled, lower
from programs import Prog
from test_end_to_end import rung

from rung import compilation, pipeline
from rung.compilation import Compilation, read_mappings
from rung.core import trace
from rung.core.errors import LaunchError, MappingError, VerifyError
from rung.core.op import Block, Func
from rung.core.parse import parse_module
from rung.frontends.torch.externs import TORCH
from rung.frontends.torch.types import hints_of
from rung.program.ir import VOCABULARY, Module
from rung.targets.base import UnknownTarget, target
from rung.targets.cpu.emit import emit
from rung.tile.choose import cheapest
from rung.tile.mapping import parse_mapping
from rung.tile.to_kernel import to_kernel
from rung.tools import check

CPU = target("cpu")


def test_passes_are_in_the_order_of_the_rungs() -> None:
    order = [pipeline.RUNGS.index(p.rung) for p in pipeline.PASSES]
    assert order == sorted(order)
    assert len({(p.rung, p.name) for p in pipeline.PASSES}) == len(pipeline.PASSES)
    for step in pipeline.PASSES:
        assert step.kind in ("exact", "reassociates", "changes-values") and step.why
    assert {p.rung for p in pipeline.PASSES if p.name in pipeline.BORDERS} == set(pipeline.RUNGS)


@pytest.mark.parametrize("name", CASES)
def test_every_pass_keeps_the_meaning(name: str, settings: Callable[..., None]) -> None:
    settings(check=True)
    case = CASES[name]
    with torch.no_grad(), trace.listen() as events:
        rung(case.fn)(*case.args(6, torch.float32))
    assert not [e for e in events if e.place == "check"]


def test_every_pass_keeps_the_meaning_in_bf16(settings: Callable[..., None]) -> None:
    settings(check=True)
    case = CASES["cache_step"]
    with torch.no_grad():
        rung(case.fn)(*case.args(6, torch.bfloat16))


@pytest.mark.parametrize("rung_name", pipeline.RUNGS)
def test_the_text_of_a_rung_parses_to_itself(rung_name: str) -> None:
    for program in (models.relu_mm(6, 5, 7), models.softmax("s0", 8), models.floor_add()):
        text = lower(program, CPU).text(rung_name)
        funcs = parse_module(text, pipeline.VOCABULARIES, parse_mapping)
        again = Module(tuple(f for f in funcs if f.kind == "program"),
                       tuple(f for f in funcs if f.kind != "program"))
        assert f"{again}\n" == text
        pipeline.verify_module(again)


def test_a_broken_pass_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(module: Module, _: Any) -> Module:
        return replace(module, programs=(replace(module.main, body=Block((), ())),))
    last = next(p for p in pipeline.PASSES if p.name == "drop_empty")
    passes = tuple(replace(p, run=breaks) if p is last else p for p in pipeline.PASSES)
    monkeypatch.setattr(pipeline, "PASSES", passes)
    with pytest.raises(VerifyError, match="after drop_empty: a program ends in `return`"):
        lower(models.floor_add(), CPU)


def test_a_wrong_pass_is_named(settings: Callable[..., None]) -> None:
    settings(check=True)
    wrong = replace(pipeline.PASSES[0], run=lambda m, _: Module((models.floor_add(10),)))
    p = Prog("floor_add")
    program = p.done(p.map("add", p.map("floor", p.param("x", 10)), 2.0))
    with pytest.raises(check.WrongResult, match="outline changes result 0 by 1 "):
        pipeline.run_pass(wrong, Module((program,)), pipeline.Context(CPU, TORCH))


def test_time_of_every_pass_is_traced() -> None:
    with trace.listen() as events:
        lower(models.softmax(), CPU)
    ran = [(e.place, e.subject) for e in events if e.kind == "ran"]
    assert ran == [*((p.rung, p.name) for p in pipeline.PASSES), ("source", "emit")]


def statistics(layers: int) -> Func:
    """A program of layers, no two of them equal, each of which updates a parameter."""
    params, ops, writes, results = ["x0: f32[8,16] input"], [], [], []
    for n in range(layers):
        params.append(f"s{n}: f32[16] mutated")
        ops += [f"a{n} = call aten.mul.Tensor(x{n}, {n + 0.5}) : f32[8,16]",
                f"m{n} = call aten.mean.dim(a{n}, [0]) : f32[16]",
                f"x{n + 1} = call aten.sub.Tensor(a{n}, m{n}) : f32[8,16]",
                f"n{n} = call aten.add.Tensor(s{n}, m{n}) : f32[16]"]
        writes.append(f"write s{n} <- n{n}")
        results.append(f"m{n}")
    lines = [*ops, *writes, f"return x{layers}, {', '.join(results)}"]
    text = "\n  ".join([f"program main({', '.join(params)})", *lines])
    (program,) = parse_module(text, {"program": VOCABULARY})
    return program


def calls(program: Func, last: str) -> int:
    """How many calls of Python the passes up to one make."""
    context = pipeline.Context(target("cpu.avx512"), TORCH)
    module, count = Module((program,)), 0

    def note(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        for step in pipeline.PASSES:
            module = pipeline.run_pass(step, module, context)
            if step.name == last:
                break
    finally:
        sys.setprofile(None)
    return count


def test_the_work_grows_with_the_layers_and_not_with_their_square() -> None:
    few, many = (calls(statistics(n), "to_loop") for n in (20, 160))
    assert many < 9 * few


def test_a_kernel_is_mapped_once_for_each_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Compilation(CPU, TORCH)
    one.lower(models.softmax(11, 24))
    monkeypatch.setattr(pipeline.choose, "choose", None)
    one.lower(models.softmax(11, 24))


def test_a_mapping_is_for_the_cores_of_its_target() -> None:
    """Machines of one name, in one process."""
    found = target("cpu.avx512")
    for order in ((1, 2), (2, 1)):
        sources = {cores: lower(models.softmax(512, 2048), replace(
            found, machine=replace(found.machine, cores=cores))).source for cores in order}
        assert "omp parallel" in sources[2] and "omp parallel" not in sources[1]


def test_fusion_is_careful_where_a_kernel_has_no_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pipeline._choice

    def picky(kernel: Func, context: pipeline.Context) -> Any:
        if str(kernel).count("fold") > 1:
            raise MappingError("two folds")
        return real(kernel, context)
    whole = lower(models.softmax(9, 16), CPU)
    monkeypatch.setattr(pipeline, "_choice", picky)
    parts = lower(models.softmax(9, 16), CPU)
    assert len(whole.modules["loop"].kernels) < len(parts.modules["loop"].kernels)


def test_mappings_of_the_user(tmp_path: Path) -> None:
    chosen = lower(models.floor_add(64), CPU).modules["tile"].kernels[0]
    text = f"map {chosen.name} on {CPU.machine.name}\n  i: seq *, simd 4\n"
    path = tmp_path / "mine.map"
    path.write_text("# mine\n" + text + "\nmap other on toy\n  i: seq *\n")
    found = read_mappings(str(path))
    assert set(found) == {chosen.name, "other"}
    made = lower(models.floor_add(64), CPU, mappings=found)
    assert str(made.modules["tile"].kernels[0].attr("mapping")) == text.strip()
    assert "f32x4" in made.source


def test_mappings_for_no_kernel_of_a_graph_are_told(tmp_path: Path) -> None:
    path = tmp_path / "mine.map"
    path.write_text("map other on toy\n  i: seq *\n")
    one = Compilation(CPU, TORCH, mappings=read_mappings(str(path)))
    assert one.unmapped(one.lower(models.floor_add(64)).reached()) == (
        "the mappings are for other, and the graph has floor_add")
    assert Compilation(CPU, TORCH).unmapped(Module(())) == ""


def test_lanes_of_an_index_are_computed_once() -> None:
    """An element's address reads one lane; the text of the vector is not repeated in each."""
    text = """
kernel pick(x: f32[70], at: i64[64]) -> y: f32[64]
  to = at[i] + 1 : i64 over i
  y[i] = x[to]
map pick on cpu.avx512
  i: seq *, simd 16
"""
    (made,) = parse_module(text, pipeline.VOCABULARIES, parse_mapping)
    source = emit([to_kernel(made, target("cpu.avx512").machine)])
    assert source.count("add_i64x16(") == 2 and source.count("(to)[15]") == 1


def test_sizes_to_expect_come_from_the_inputs() -> None:
    program = models.softmax("s0", 8)
    assert hints_of(program, [torch.empty(7, 8)]) == {"s0": 7}


def test_unknown_target() -> None:
    with pytest.raises(UnknownTarget, match=r"no target is called 'tpu'; there are cpu, cpu\.avx"):
        target("tpu")


@pytest.mark.parametrize("name", ["relu_mm", "softmax", "floor_add", "column_sum"])
def test_the_toy_runs(name: str) -> None:
    program = {"relu_mm": models.relu_mm(6, 5, 7), "softmax": models.softmax(),
               "floor_add": models.floor_add(), "column_sum": models.colsum()}[name]
    inputs = [torch.from_numpy(x) for x in check.draw(program) or ()]
    results = [compiled(program, target(machine))(copies(inputs))
               for machine in ("toy", "cpu")]
    torch.testing.assert_close(*results)


def test_cuda_runs_on_no_tensors_of_the_host() -> None:
    cuda = target("cuda.sm90")
    stages = lower(models.softmax(64, 256), cuda)
    assert "__global__" in stages.text("source")
    with pytest.raises(LaunchError, match=r"sm90 run on tensors of cuda, and these are on cpu"):
        Compilation(cuda, TORCH).executable(stages.reached())


def test_a_size_as_a_value() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * x.shape[0] + torch.arange(x.shape[0])
    x = torch.randn(7)
    torch._dynamo.mark_dynamic(x, 0)
    torch.testing.assert_close(rung(fn, dynamic=None)(x), fn(x))


@pytest.mark.parametrize("patience", [0.0, 3600.0])
def test_a_long_compilation_is_told_while_it_runs(
        patience: float, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
        settings: Callable[..., None]) -> None:
    settings(fresh=True)
    monkeypatch.setattr(compilation, "PATIENCE", patience)
    with torch.no_grad():
        rung(lambda x: torch.softmax(x, -1))(torch.randn(4, 8))
    told = "" if patience else "rung: compiling, 1 kernel\n"
    assert capfd.readouterr().err == told


def test_a_notice_comes_before_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    with trace.notice("waiting", 0.01):
        found = ""
        while not found:
            found = capfd.readouterr().err
    assert found == "rung: waiting\n"
    with trace.notice("waiting", 3600):
        pass
    assert not capfd.readouterr().err


COLUMNS = """
kernel k(x: f32[65536,512], y: f32[65536,512]) -> z: f32[512]
  c = fold add x[i,j] * y[i,j] over i 65536 : f32 over j acc f32
  z[j] = c
"""


@pytest.mark.parametrize("name, split", [("cuda.sm90", True), ("cpu.avx512", False)])
def test_fusion_knows_what_a_sum_of_columns_takes_in_parts(name: str, split: bool) -> None:
    """As the pass will split it: else it would seem dearer beside rows than it is."""
    (kernel,) = parse_module(COLUMNS, pipeline.VOCABULARIES)
    where = pipeline.Context(target(name), TORCH)
    whole = cheapest(kernel, where.machine, where.target.candidates, {}, ())
    seconds = where.settled(kernel)
    assert whole is not None and seconds is not None
    assert (seconds < 0.8 * whole.seconds) is split
    made = pipeline._split(Module((), (kernel,)), where)
    assert len(made.kernels) == (2 if split else 1)
    assert not split or seconds == pytest.approx(
        sum(pipeline._choice(k, where).price.seconds for k in made.kernels))
