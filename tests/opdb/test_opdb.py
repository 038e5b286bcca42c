"""A fixed sample of the operator database, and what finds differences in it."""

from __future__ import annotations

import pytest
import torch
from opdb import report
from opdb.compare import Outcome, difference
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


def test_the_page_counts_what_was_tried() -> None:
    records = [{"item": "op float32 forward", "passed": 3, "torchs": ["a"], "failed": ["why"],
                "lowered": {"aten.add.Tensor": 2}, "left": {"aten.sort.default": 1}}]
    text = report.page({"op": records}, report.tried("forward", "float32,bool", 3))
    assert "the first 3 samples of every entry; forward; float32, bool." in text
    assert "| op | partly | 3 | 1 | 1 |" in text
    assert "| `aten.sort.default` | 1 |" in text
    assert report.failures({"op": records}) == ["op float32 forward: why"]
