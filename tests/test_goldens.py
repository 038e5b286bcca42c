"""The dumps of the four functions on every rung; `pytest --update` writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import models
import pytest

from rung import pipeline
from rung.core.op import Func
from rung.targets.base import target

FOLDER = Path(__file__).parent / "goldens"
FUNCTIONS = {"relu_mm": lambda: models.relu_mm(504, 512, 512),
             "softmax": lambda: models.softmax(512, 2048),
             "column_sum": lambda: models.colsum(512, 1024)}
KEPT = ("tensor", "loop", "tile", "kernel")


@pytest.mark.skipif("not FOLDER.exists() and not config.getoption('--update')",
                    reason="no goldens are written yet")
@pytest.mark.parametrize("rung_name", KEPT)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_dump(name: str, rung_name: str, golden: Callable[[Path, str], None]) -> None:
    program: Func = FUNCTIONS[name]()
    stages = pipeline.lower_module(program, target("cpu.avx512"))
    golden(FOLDER / f"{name}.{rung_name}.ir", stages.text(rung_name))
