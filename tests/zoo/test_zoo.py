"""A fixed sample of the zoo does as in eager; how the rest is tried, and the page about it."""

from __future__ import annotations

import pytest
import torch
from zoo.__main__ import LATE, WAYS, by_name, page, units
from zoo.models import names
from zoo.trial import attempt, nudged

QUICK = ("phi3", "clip_text_model", "dinov2_with_registers", "chinese_clip_vision_model")


def check(name: str, train: bool) -> None:
    assert name in names()
    record = attempt(name, train)
    assert record["failed"] == [] and "skipped" not in record and record["breaks"] == 0


@pytest.mark.parametrize("name", QUICK)
def test_sampled_architectures_do_as_eager_does(name: str) -> None:
    check(name, train=False)


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", ["llama", "vit"])
def test_a_training_step_does_as_eager_does(name: str, train: bool) -> None:
    check(name, train)


def test_every_architecture_is_tried_both_ways() -> None:
    tried = units(["a", "b", "c", "d", "e"])
    assert sorted(tried) == [f"{name} {way}" for name in "abcde" for way in WAYS]
    early = tried[:tried.index(next(u for u in tried if u.endswith("training"))) + 1]
    assert early[-2].split()[0] == early[-1].split()[0]


def test_the_page_counts_what_was_tried() -> None:
    found = by_name({
        "a forward": [{"item": "a forward", "failed": [], "torchs": [], "first": 1.5,
                       "left": {"aten.sort.default": 2}}],
        "a training": [{"item": "a training", "failed": LATE}],
        "b forward": [{"item": "b forward", "failed": [], "skipped": "ValueError"}],
        "c forward": []})
    text = page(found, 60)
    assert "| a | 1.5 s | late |  | 1 |" in text and "| `aten.sort.default` | 1 |" in text
    assert text.count("| b |") == text.count("| c |") == 0
    assert "more than 60 s" in text and "2 trials, 1 passed" in text


def test_nudged_parameters_are_rounded_otherwise() -> None:
    model = torch.nn.Linear(40, 30)
    made, again, other = (nudged(model, seed) for seed in (1, 1, 2))
    assert torch.equal(made.weight, again.weight) and not torch.equal(made.weight, other.weight)
    off = (made.weight - model.weight).abs() / model.weight.abs()
    assert 0 < off.max() <= 2 * torch.finfo(torch.float32).eps
