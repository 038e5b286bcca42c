"""Tests that run on a GPU; without one, all are skipped."""

from __future__ import annotations

import os
import sys
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
    """Nothing that Dynamo knows from the test before. A fault of the device stays with its process:
    where xdist can start another, this one ends, and the test is told as the one that did it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"the device is lost: {error}", file=sys.stderr, flush=True)
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        raise
