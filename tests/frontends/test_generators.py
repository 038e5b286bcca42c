"""The states of generators: kept, put back, and drawn from without notice."""

from __future__ import annotations

import pytest
import torch

from rung.frontends.torch import generators

PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize("place", PLACES)
def test_states_are_put_back(place: str) -> None:
    torch.zeros(1, device=place)
    before = generators.states()
    first = torch.rand(5, device=place)
    assert not generators.alike(before, generators.states())
    generators.restore(before)
    assert generators.alike(before, generators.states())
    assert torch.equal(torch.rand(5, device=place), first)


@pytest.mark.parametrize("place", PLACES)
def test_a_seed_gives_what_manual_seed_does(place: str) -> None:
    torch.manual_seed(7)
    want = torch.rand(5, device=place)
    torch.manual_seed(0)
    before = generators.states()
    with generators.drawing(generators.seeded(7)):
        assert torch.equal(torch.rand(5, device=place), want)
    assert generators.alike(before, generators.states())
    with generators.drawing(None):
        torch.rand(5, device=place)
    assert not generators.alike(before, generators.states())
