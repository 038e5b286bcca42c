"""Random programs through all middle passes, under random prices: every legal choice is right."""

from __future__ import annotations

import pytest

from rung.tools.fuzz import tensors


@pytest.mark.parametrize("seed", range(60))
def test_random_program(seed: int) -> None:
    assert not tensors.wrong(seed)
