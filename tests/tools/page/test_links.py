"""Lines of the rungs and their counterparts: from a line of Python to one of source, and back."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from pages import GPT2, given

from rung.core import origins, trace
from rung.tools.capture import capture
from rung.tools.given import Given, from_expression
from rung.tools.page import rungs
from rung.tools.page.links import NONE, Links
from rung.tools.page.rungs import Rung, linked
from rung.tools.show import Request, history_of, target_of

BAR = 0.99
EXPRESSIONS = {
    "relu": "torch.relu(torch.randn(64, 128) @ torch.randn(128, 64) + torch.randn(64))",
    "norm": "F.layer_norm(F.gelu(nn.Linear(64, 64)(torch.randn(32, 64))), (64,))",
    "softmax": "torch.softmax(torch.randn(64, 300), -1).cumsum(0)",
    "sort": "torch.sort(torch.randn(8))[0] + 1",
    "split": "torch.randn(4096, 3).sum(0) * 2",
    "lookup": "F.embedding(torch.arange(5), torch.randn(10, 16)).cumsum(0)",
    "attention": "F.scaled_dot_product_attention(*(torch.randn(1, 2, 64, 16) for _ in range(3)))",
}


def climbed(what: Given, request: Request, follow: bool = True) -> tuple[Rung, list[list[Rung]]]:
    """The user's lines, and the rungs of each graph."""
    found, links, ladders = capture(what, request.train), Links(), []
    target = target_of(found.graphs, request)
    for n, graph in enumerate(found.graphs):
        links.graph = n
        with trace.listen(), origins.followed() if follow else nullcontext():
            ladders.append(list(rungs.rungs(graph, history_of(graph, target, request), links)))
    return rungs.python(links), ladders


def assert_linked(first: Rung, ladders: list[list[Rung]]) -> None:
    found = list(linked(first, ladders))
    assert {x.rung for x in found} >= {"python", "torch", "tensor", "loop", "kernel", "source"}
    few = [x for x in found if x.linked < BAR * x.lines]
    assert not few, few


@pytest.mark.parametrize("target", ["cpu.avx512", "cuda.sm90", "toy"])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_lines_are_linked_both_ways(name: str, target: str) -> None:
    if target == "toy" and name in ("sort", "lookup", "attention", "split"):
        pytest.skip("the toy has no such kernels")
    assert_linked(*climbed(from_expression(EXPRESSIONS[name]), Request(target=target)))


@pytest.mark.parametrize("target", [
    "cpu.avx512", pytest.param("cuda.sm90", marks=pytest.mark.slow)])
def test_lines_of_a_training_step_are_linked_both_ways(target: str, tmp_path: Path) -> None:
    first, ladders = climbed(given(GPT2, tmp_path), Request(target=target, train=True))
    assert_linked(first, ladders)
    assert sum(len(r.lines) for ladder in ladders for r in ladder) > 1000


def test_a_value_without_origins_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count can fail: contractions whose values nobody knows have no counterparts."""
    note = Links.note_func

    def forgetful(links: Links, func: object, *args: object, **named: object) -> None:
        note(links, func, *args, **named)  # type: ignore[arg-type]
        links.values |= {v: NONE for v in links.values if v.name.startswith("mm")}
    monkeypatch.setattr(Links, "note_func", forgetful)
    found = list(linked(*climbed(from_expression(EXPRESSIONS["relu"]), Request(target="toy"))))
    assert any(x.linked < BAR * x.lines and x.missing for x in found)


@pytest.mark.parametrize(("target", "bias"), [
    ("cpu.avx512", "&x2["), ("cuda.sm90", "x2["), ("toy", "v.add")])
def test_the_line_of_source_that_adds_the_bias_is_not_that_of_the_product(
        target: str, bias: str) -> None:
    _, [ladder] = climbed(from_expression(EXPRESSIONS["relu"]), Request(target=target))
    by_name = {r.name: r for r in ladder}
    (add,) = (x.nodes for x in by_name["torch"].lines if "aten.add" in x.text)
    (mm,) = (x.nodes for x in by_name["torch"].lines if "aten.mm" in x.text)
    (loop,) = (x for x in by_name["loop"].lines if "relu(mm + x2[j])" in x.text)
    assert add <= loop.nodes and mm.isdisjoint(loop.nodes)
    loads = [x for x in by_name["source"].lines if bias in x.text and x.computes]
    assert loads and all(x.nodes & add for x in loads)
    assert not any(x.nodes & mm for x in loads if "relu" not in x.text)


def test_equal_layers_share_kernels_and_keep_their_lines(tmp_path: Path) -> None:
    _, ladders = climbed(given(GPT2, tmp_path), Request(target="cpu.avx512"))
    ladder = max(ladders, key=lambda x: len(x[0].lines))
    source = ladder[-1]
    calls = [x for x in ladder[0].lines if "aten.addmm" in x.text and x.computes]
    assert len(calls) == 8 and all(any(x.nodes & y.nodes for y in source.lines) for x in calls)
    most = max(len(x.nodes) for x in source.lines)
    assert most < len({n for x in source.lines for n in x.nodes}) / 4


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_following_changes_no_kernel(name: str) -> None:
    texts = []
    for follow in (False, True):
        _, [ladder] = climbed(from_expression(EXPRESSIONS[name]), Request(target="cpu.avx512"),
                              follow)
        texts.append([x.text for r in ladder if r.name != "plan" for x in r.lines])
    assert texts[0] == texts[1]


def test_following_changes_no_kernel_of_a_training_step(tmp_path: Path) -> None:
    texts = []
    for follow in (False, True):
        _, ladders = climbed(given(GPT2, tmp_path), Request(target="cpu.avx512", train=True),
                             follow)
        texts.append([x.text for ladder in ladders for r in ladder for x in r.lines])
    assert texts[0] == texts[1]


def test_values_of_kernels_have_no_origins_where_nobody_asks() -> None:
    graph = capture(from_expression(EXPRESSIONS["relu"])).graphs[0]
    target = target_of([graph], Request())
    kernel = history_of(graph, target, Request()).at("loop").kernels[0]
    assert not any(origins.of_all(op.results) for op in kernel.body.ops)
