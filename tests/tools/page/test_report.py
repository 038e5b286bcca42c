"""The page of `rung explain --html` as a document, without a browser."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from pages import CPU, LINELESS, RELU, given, hostile, relu

from rung import cli
from rung.core.errors import RungError
from rung.targets.base import target
from rung.tools import capture
from rung.tools.explain import reached_by
from rung.tools.given import Given, from_expression
from rung.tools.page import highlight, kernels, passes
from rung.tools.page.report import page
from rung.tools.show import Request, target_of


class Reader(HTMLParser):
    """The text of a page by element, and what it would load."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.text: dict[str, str] = {}
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids += [x for x in [found.get("id")] if x]
        self.loads += [f"{tag} {found[x]}" for x in ("src", "href", "xlink:href", "data")
                       if found.get(x) and not str(found[x]).startswith("#")]
        if tag not in ("meta", "input", "tr", "td", "th", "thead", "tbody"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        at = self.open[-1] if self.open else ""
        self.text[at] = self.text.get(at, "") + data


def test_it_loads_nothing_and_names_each_rung() -> None:
    text = relu()
    read = Reader(text)
    assert not read.loads and "url(" not in text and "@import" not in text
    assert {f"rung-{x}" for x in ("python", "torch", "program", "tensor", "loop", "tile", "kernel",
                                  "plan", "source")} <= set(read.ids)
    assert len(read.ids) == len(set(read.ids))
    assert len(text) < 5e6


@pytest.mark.parametrize("name", ["cuda.sm90", "toy"])
def test_the_page_of_other_machines(name: str) -> None:
    text = page(from_expression(RELU), Request(target=name))
    assert f"on <b>{name}</b>" in text and 'id="kernel-0-mm_relu"' in text
    words = {"cuda.sm90": "__global__", "toy": "dma.in"}
    assert words[name] in re.sub("<[^>]*>", "", text)


def test_roofs_are_those_of_the_machine() -> None:
    for name in ("cpu.avx512", "cuda.sm90", "toy"):
        machine = target(name).machine
        found = {r.name: r for r in kernels.roofs(machine)}
        assert found["cache"].bytes >= found["memory"].bytes >= machine.rates.memory
        assert max(r.operations for r in found.values()) == machine.cores * max(
            machine.rates.flops.values())


def test_each_set_of_nodes_is_there() -> None:
    text = relu()
    sets = json.loads(Reader(text).text["script"].partition('"use strict"')[0])
    used = {int(n) for n in re.findall(r'data-s="(\d+)"', text)}
    assert used == set(range(len(sets))) and all(sets)


def test_names_and_comments_are_text(tmp_path: Path) -> None:
    text = hostile(tmp_path)
    read = Reader(text)
    assert "document.title" not in read.text["script"]
    assert "<img" not in text and not read.loads
    assert "😀" in text and "🪜" in text and "<i>.py" not in text


def test_code_without_lines(tmp_path: Path) -> None:
    text = page(given(LINELESS, tmp_path), CPU)
    assert 'id="rung-source"' in text and "run_relu" in text


def test_a_graph_that_stays_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise RungError("<none> of that")
    monkeypatch.setattr(capture, "import_graph", refuses)
    text = page(from_expression(RELU), CPU)
    assert "runs as it is: RungError: &lt;none&gt; of that" in text
    assert "aten" in text and 'id="rung-loop"' not in text and "No graph got kernels" in text


def test_a_graph_that_a_rung_refuses(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.map"
    wrong.write_text("map mm_relu on cpu.avx512\n  i: reg 6\n")
    text = page(from_expression(RELU), Request(target="cpu.avx512", mapping=str(wrong)))
    assert "runs as it is: MappingError" in text
    assert 'id="rung-tensor"' in text and 'id="rung-kernel"' not in text


def broken(x: torch.Tensor) -> torch.Tensor:
    y = x.relu()
    torch._dynamo.graph_break()
    return y.sum() + 1


def test_breaks_are_told() -> None:
    text = page(Given("broken", broken, (torch.randn(8, 8),)), CPU)
    line = broken.__code__.co_firstlineno + 2
    assert f"break at {Path(__file__).name}" in text or f"{__file__}:{line}" in text
    assert "2 graphs, 1 graph break, 0 recompiles" in text


def test_without_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygments.lexer", None)
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    highlight._lexer.cache_clear()
    text = page(from_expression(RELU), CPU)
    highlight._lexer.cache_clear()
    assert "<svg" not in text and "rung[page]" in text and '<i class="' not in text
    assert "run_mm_relu" in text


def test_with_its_libraries() -> None:
    pytest.importorskip("vl_convert")
    pytest.importorskip("pygments")
    text = relu()
    assert '<svg role="img"' in text and '<i class="k">contract</i>' in text
    assert 'href="#kernel-0-mm_relu"' in text


def test_highlighting_changes_no_text() -> None:
    lines = ["x = \"a<b\"  # </i>", "", "  y[i,j] = relu(mm + x2[j]) : f32x16 over i", "\tif (a) {"]
    for language in ("python", "c", "ir"):
        plain = [re.sub("<[^>]*>", "", x) for x in highlight.highlighted(lines, language)]
        assert plain == [str(highlight.escape(x)) for x in lines]


def reached(expression: str) -> object:
    (graph,) = capture.capture(from_expression(expression)).graphs
    return reached_by(graph, target_of([graph], CPU), CPU, whole=True)


def test_kernels_tell_what_their_price_is_made_of() -> None:
    found = kernels.kernels(reached("torch.softmax(torch.randn(64, 64) @ torch.randn(64, 64), 0)"))
    assert [k.total for k in found] == sorted((k.total for k in found), reverse=True)
    assert abs(sum(k.share for k in found) - 1) < 1e-9
    for k in (k for k in found if not k.library):
        s = k.schedule
        assert s.terms[0].name == "compute" and max(t.share for t in s.terms) == 1
        assert k.seconds >= max(t.seconds for t in s.terms)
        assert s.mapping.startswith(f"map {k.name}") and f"nest {k.name}" in s.nest
        assert s.mapping not in [m for _, m in s.dearer]


def test_points_before_and_after_fusion() -> None:
    found = list(kernels.points(reached("torch.exp(torch.randn(512, 512)) * 2 + 1")))
    after = [p for p in found if p.fused]
    before = [p for p in found if not p.fused]
    assert len(before) == 3 and len(after) == 1
    assert after[0].intensity > max(p.intensity for p in before)


def test_passes_tell_what_they_did_and_what_not() -> None:
    found = {s.name: s for s in passes.steps(reached("torch.exp(torch.randn(512, 512)).sum() + 1"))}
    assert any("exp" in text for text, _ in found["tensor.lower"].done)
    assert found["loop.fuse"].done and found["loop.fuse"].difference
    assert all(line[0] in "+-@ " for s in found.values() for line in s.difference)
    assert not found["tensor.drop_empty"].difference
    assert max(s.share for s in found.values()) == 1


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.html"
    assert cli.main(["explain", "-c", "torch.randn(4) + 1", "--html", str(out)]) == 0
    told = capsys.readouterr()
    assert told.out == "" and f"wrote {out}" in told.err
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
