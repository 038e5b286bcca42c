"""Tests that run on a GPU; without one, all are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import rung.entry  # noqa: F401  it registers the backend where Rung is not installed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "tests/device/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing that Dynamo knows from the test before."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
