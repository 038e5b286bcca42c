"""The fuzzer: what it draws comes out right, and what is planted it finds, cuts down and saves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from planted import plant, with_a_bug

from rung.core.op import Func
from rung.program import reinplace
from rung.targets.base import target
from rung.tools import opt
from rung.tools.fuzz import batch, mappings, programs, tensors, texts
from rung.tools.fuzz.run import ROUNDED, Request, differing, fuzz

GOLDENS = [p for p in sorted((Path(__file__).parents[1] / "goldens").glob("*.ir"))
           if ".source" not in p.name]


@pytest.mark.parametrize("first", [0, 20])
def test_random_programs_do_what_eager_does(first: int) -> None:
    drawn = {seed: programs.draw(seed) for seed in range(first, first + 20)}
    assert not [(seed, what, p.source) for seed, p, what in differing(drawn, "cpu", 4)]


def test_only_what_comes_of_inputs_is_updated() -> None:
    """Tracing by symbols writes to constants at once, before what comes earlier in the program."""
    for seed in (*range(200), 961376):
        program = programs.draw(seed)
        given = set(program.inputs)
        for line in program.lines:
            assert not programs.mutates(line.text) or line.reads[0] in given, (seed, line)
            given |= {line.name} if given.intersection(line.reads) else set()


def test_a_seed_is_a_program_and_programs_are_of_many_kinds() -> None:
    drawn = [programs.draw(seed) for seed in range(80)]
    assert [p.source for p in drawn] == [programs.draw(seed).source for seed in range(80)]
    assert {p.exact for p in drawn} == {True, False}
    assert any(map(programs.mutates, (line.text for p in drawn for line in p.lines)))
    kinds = {x.dtype for p in drawn for x in programs.traced(p).values()}
    assert kinds >= {*programs.FLOATS, *programs.INTEGERS}


def test_a_planted_bug_is_found_cut_down_and_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path
                                                   ) -> None:
    out = tmp_path / "not there yet"
    with monkeypatch.context() as patch:
        plant(patch, "loop.fuse")
        report, fine = fuzz(Request(seed=3, count=4, out=str(out)))
    assert not fine
    saved = sorted(out.glob("fuzz_programs_*.py"))
    assert saved and all(str(x) in report for x in saved)
    text = saved[0].read_text()
    body = text.split("def program(")[1].split("return")[0]
    assert len(body.splitlines()) <= 4
    alone = subprocess.run([sys.executable, saved[0]], capture_output=True, text=True, check=False,
                           env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert alone.returncode == 0, alone.stderr  # nothing is planted there


def test_an_argument_is_updated_twice_and_read_in_another_order_between(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """What was a wrong answer: `tangled` missed reads of an argument under an earlier update's
    name."""
    tangled = reinplace._Work.tangled
    monkeypatch.setattr(reinplace._Work, "tangled", lambda work, call, new, old: (
        tangled(work, call, new, old) if old.role else None))
    drawn = {seed: programs.draw(seed) for seed in range(60, 80)}
    assert [seed for seed, *_ in differing(drawn, "cpu", len(drawn))]


def test_oracles_give_calls_the_layouts_that_they_expect() -> None:
    """`view` refuses what `gelu` makes of an argument in another layout than was declared."""
    a, c = torch.randn(4, dtype=torch.float16), torch.tensor(2.0, dtype=torch.float16)
    lines = (("v1", "a.expand(3, 4)", ("a",)), ("v2", "F.gelu(v1, approximate='tanh')", ("v1",)),
             ("v3", "(c * v2).reshape((4, 3))", ("c", "v2")))
    program = programs.Program({"a": a, "c": c}, tuple(programs.Line(*x) for x in lines), ("v3",),
                               False, (("precision", "eager"),))
    assert not list(differing({0: program}, "cpu", 1))


def test_what_is_left_of_terms_that_cancel_is_judged_by_the_roundings_of_the_oracle() -> None:
    """The sum of a normalized row is 0, in bf16 but for the roundings of its terms."""
    b = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    lines = (("v1", "F.layer_norm(b, (8,))", ("b",)), ("v2", "v1.sum(-1)", ("v1",)))
    program = programs.Program({"b": b}, tuple(programs.Line(*x) for x in lines), ("v2",),
                               False, (("precision", "default"),))
    made = batch.lowered(program, target("cpu"), "p")
    batch.build([made], target("cpu"))
    made.watch()
    (found,) = made.call(b)
    (part,) = made.parts
    assert not part.wrong(ROUNDED[torch.bfloat16])
    part.seen[1][0] = found + 0.25
    assert part.wrong(ROUNDED[torch.bfloat16])


@pytest.mark.parametrize("seed", range(8))
def test_random_mappings_of_random_sizes(seed: int) -> None:
    assert not list(mappings.wrong(seed))


def test_a_mapping_that_is_wrong_is_cut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def gap(mapped: Func, *_: object) -> float:
        return float(bool(mapped.attr("mapping").places))

    monkeypatch.setattr(mappings, "difference", gap)
    found = [x for seed in range(8) for x in mappings.wrong(seed)]
    assert all(what.endswith("is off by 1") for what, _ in found)
    places = [text.count("\n  place ") for _, text in found]
    assert min(places) == 1  # where the machine needs no more to be legal


@pytest.mark.parametrize("part", range(6))
def test_damaged_dumps_are_refused_in_words(part: int) -> None:
    found = [texts.wrong(GOLDENS[seed % len(GOLDENS)].read_text(), seed)
             for seed in range(120 * part, 120 * part + 120)]
    assert not any(found), next(filter(None, found))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, 21))
def test_many_damaged_dumps_are_refused_in_words(part: int) -> None:
    found = [texts.wrong(GOLDENS[seed % len(GOLDENS)].read_text(), seed)
             for seed in range(1000 * part, 1000 * part + 1000)]
    assert not any(found), next(filter(None, found))


@pytest.mark.parametrize(("seed", "says"), [(1, "KeyError"), (2, "TimeoutError")])
def test_other_exceptions_and_long_waits_are_told(
        monkeypatch: pytest.MonkeyPatch, seed: int, says: str) -> None:
    def parsed(text: str, path: str) -> None:
        if says == "KeyError":
            raise KeyError(path)
        while True:
            np.zeros(3)

    monkeypatch.setattr(opt, "parsed", parsed)
    monkeypatch.setattr(texts, "SECONDS", 1)
    assert texts.wrong("kernel a() -> y: f32[2]", seed).startswith(says)


@pytest.mark.parametrize("kind", ["mappings", "text", "programs"])
def test_the_report_names_the_seeds(kind: str, tmp_path: Path) -> None:
    report, fine = fuzz(Request(seed=40, count=4, kind=kind, out=str(tmp_path)))
    assert fine and report == f"{kind}: seeds 40 to 43, 0 wrong\n"
    assert not list(tmp_path.iterdir())


def test_a_wrong_middle_pass_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "join_siblings", lambda module, *_: with_a_bug(module))
    assert any(tensors.wrong(seed).startswith("siblings changes") for seed in range(4))
