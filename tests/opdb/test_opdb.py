"""A fixed sample of the operator database, and what finds differences in it."""

from __future__ import annotations

import declined
import pytest
import torch
from opdb import report
from opdb.compare import Outcome, aligned, difference
from opdb.programs import DTYPES, entries, items
from opdb.trial import run

SAMPLE = sorted(entries())[::29]


@pytest.mark.parametrize("name", SAMPLE)
def test_sampled_entries_do_as_eager_does(name: str) -> None:
    """Two programs of each way in f32, and forward in another type, which differs by entry."""
    other = str(DTYPES[1 + SAMPLE.index(name) % (len(DTYPES) - 1)]).removeprefix("torch.")
    known = list(items(name))
    wanted = [x for x in known if x.dtype in ("float32", "any") or (
        x.dtype == other and x.way == "forward")] or known[:2]
    found = {str(x): run(x, 2) for x in wanted}
    assert {k: t.failed for k, t in found.items() if t.failed} == {}
    assert any(t.passed or t.torchs for t in found.values())


X = torch.arange(6.0).reshape(2, 3)
WRONG = {
    "values": X + 0.001, "dtype": X.double(), "shape": X[:1], "strides": X.t().contiguous().t(),
    "requires_grad": X.clone().requires_grad_()}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("where", ["outs", "grads", "inputs"])
def test_a_difference_is_found(what: str, where: str) -> None:
    def outcome(x: torch.Tensor) -> Outcome:
        return Outcome(**{where: [x]})
    found = difference(outcome(WRONG[what]), outcome(X), lambda: outcome(X.double()))
    assert f" 0 {what}:" in found
    assert not difference(outcome(X.clone()), outcome(X), lambda: outcome(X.double()))


def test_other_differences_are_found() -> None:
    def nothing() -> Outcome:
        return Outcome()
    raised = Outcome(error=ValueError("no"))
    assert difference(raised, Outcome(), nothing) == "raises ValueError: no"
    assert difference(Outcome(), raised, nothing).endswith("eager raises ValueError")
    assert difference(Outcome(error=IndexError()), raised, nothing).startswith("raises IndexError")
    assert not difference(raised, Outcome(error=ValueError("another text")), nothing)
    shared = {"argument 0 is result 0"}
    assert difference(Outcome(), Outcome(shared=shared), nothing) == f"sharing: {sorted(shared)}"


def test_an_error_no_larger_than_eagers_is_none() -> None:
    exact = torch.full((4,), 1.0, dtype=torch.float64)
    eager = (exact + 1e-3).float()
    def outcome(x: torch.Tensor) -> Outcome:
        return Outcome([x])
    for error, found in ((-2e-3, False), (-8e-3, True)):
        ours = (exact + error).float()
        assert bool(difference(outcome(ours), outcome(eager), lambda: outcome(exact))) == found


def test_a_deep_models_gradients_are_judged_as_vectors() -> None:
    """An element past a kink is no difference; a few such errors at once, or a wrong one, are."""
    exact = [torch.ones(100, dtype=torch.float64)] * 3
    eager = [(e + 1e-3).float() for e in exact]

    def found(where: slice, by: float, deep: bool) -> str:
        ours = [y.clone() for y in eager]
        ours[1][where] += by
        return difference(Outcome(grads=list(ours)), Outcome(grads=list(eager)),
                          lambda: Outcome(grads=list(exact)), list if deep else None)
    for where, by, deep, wrong in (
            (slice(1), 2e-2, True, False), (slice(1), 2e-2, False, True),
            (slice(20), 2e-2, True, True), (slice(1), 1.0, True, True)):
        assert found(where, by, deep).startswith("gradient 1 values") == wrong


def test_a_gradient_is_held_against_eagers_median_error() -> None:
    exact = [torch.ones(100, dtype=torch.float64)] * 3
    eager: list[torch.Tensor | None] = [(e + by).float() for e, by in zip(
        exact, (1e-3, 1e-3, 0.0), strict=True)]
    for by, names in ((3e-3, {0, 1, 2}), (8e-3, {0, 1})):
        ours = [*eager[:2], (exact[2] + by).float()]
        assert aligned(ours, [eager], list(exact)) == {f"gradient {n}" for n in names}


def test_a_gradient_is_held_against_the_farthest_of_eagers_runs() -> None:
    exact = [torch.ones(100, dtype=torch.float64)] * 3
    runs: list[list[torch.Tensor | None]] = [
        [(e + by).float() for e, by in zip(exact, errors, strict=True)]
        for errors in ((1e-3, 1e-3, 1e-3), (1e-3, 9e-3, 1e-3))]
    ours = [(e + 2e-2).float() for e in exact]
    assert aligned(list(ours), runs[:1], list(exact)) == set()
    assert aligned(list(ours), runs, list(exact)) == {"gradient 1"}


def test_the_page_counts_what_was_tried() -> None:
    records = [{"item": "op float32 forward", "passed": 3, "torchs": ["a"], "failed": ["why"],
                "lowered": {"aten.add.Tensor": 2}, "left": {"aten.sort.default": 1}}]
    text = report.page({"op": records}, report.tried("forward", "float32,bool", 3))
    assert "the first 3 samples of every entry; forward; float32, bool." in text
    assert "| op | partly | 3 | 1 | 1 |" in text
    assert "| `aten.sort.default` | 1 |" in text
    assert report.failures({"op": records}) == ["op float32 forward: why"]


def test_declined_graphs_are_counted_by_reason() -> None:
    page = declined.update("# Page\n", "op_db", [
        "declined: Unsupported: aten.add_ overwrites what it reads at /home/me/x.py:3: x.add_(x)",
        "declined: Unsupported: iadd overwrites what it reads at /home/me/y.py:4: x += y"])
    page = declined.update(page, "zoo", ["LoweringError: internal error: KeyError: s7"])
    found = declined.counts(page)
    assert page.startswith("# Page\n") and page.count(declined.HEAD) == 1
    assert found == {"op_db": {"a call overwrites what it reads": 2},
                     "zoo": {"LoweringError: internal error: KeyError: N": 1}}
    assert "| all | 2 | 1 |  |  |" in page
    row, = (line for line in page.splitlines() if "overwrites" in line)
    assert "AOTAutograd" in row and declined.counts(declined.update(page, "zoo", ())) == {
        **found, "zoo": {}}
