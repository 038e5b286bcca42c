"""A fixed sample of the zoo: forward and a training step do as in eager."""

from __future__ import annotations

import pytest
from zoo.models import names
from zoo.trial import attempt

SAMPLE = ("llama", "vit")


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", SAMPLE)
def test_sampled_architectures_do_as_eager_does(name: str, train: bool) -> None:
    assert name in names()
    record = attempt(name, train)
    assert record["failed"] == [] and "skipped" not in record and record["breaks"] == 0
