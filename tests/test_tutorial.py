"""The tutorial runs, and `docs/tutorial.md` is what it prints; `--update` writes it."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import tutorial


@pytest.mark.usefixtures("fresh")
def test_the_tutorial_is_what_it_prints(golden: Callable[[Path, str], None]) -> None:
    torch.manual_seed(0)
    golden(tutorial.RENDERED, tutorial.rendered(tutorial.SOURCE.read_text(encoding="utf-8")))


def test_cells_are_text_or_code_with_what_it_prints() -> None:
    text = "# %% [markdown]\n# # A\n#\n# b\n\n# %%\nx = 1 + 1\nprint(x)\n\n# %%\nx += 1\n"
    code = "```python\nx = 1 + 1\nprint(x)\n```\n\n```\n2\n```\n\n```python\nx += 1\n```\n"
    assert tutorial.rendered(text) == f"# A\n\nb\n\n{code}"


def test_a_cell_that_fails_names_its_line() -> None:
    with pytest.raises(ZeroDivisionError) as failed:
        tutorial.rendered("# %%\nx = 1\n\n# %%\nx / 0\n")
    last = failed.traceback[-1]
    assert last.lineno + 1 == 5
    assert linecache.getline(tutorial.NAME, 5) == "x / 0\n"
