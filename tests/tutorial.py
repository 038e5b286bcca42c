"""`docs/tutorial.py` run and rendered as `docs/tutorial.md`.

Cells are in the percent format: `# %% [markdown]` starts text, `# %%` code, whose output follows.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
SOURCE, RENDERED = DOCS / "tutorial.py", DOCS / "tutorial.md"
NAME = "docs/tutorial.py"  # in the lines of what it compiles
CELL = re.compile(r"^# %%( \[markdown\])?\n", re.M)


def cells(text: str) -> Iterator[tuple[bool, str, int]]:
    """(whether it is text, the cell, the lines before it) for each cell."""
    marks = [*CELL.finditer(text)]
    for mark, end in zip(marks, [*(m.start() for m in marks[1:]), len(text)], strict=True):
        yield bool(mark[1]), text[mark.end():end].strip("\n"), text.count("\n", 0, mark.end())


def rendered(text: str) -> str:
    """The Markdown of a tutorial, with what its cells print."""
    out, scope = list[str](), dict[str, Any]({"__name__": "tutorial"})
    linecache.cache[NAME] = (len(text), None, text.splitlines(True), NAME)
    for prose, body, before in cells(text):
        if prose:
            out.append(re.sub(r"^# ?", "", body, flags=re.M))
            continue
        out.append(f"```python\n{body}\n```")
        if printed := ran("\n" * before + body, scope):
            out.append(f"```\n{printed}\n```")
    return "\n\n".join(out) + "\n"


def ran(code: str, scope: dict[str, Any]) -> str:
    """What a cell prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, NAME, "exec"), scope)
    return re.sub(r" +$", "", said.getvalue(), flags=re.M).strip("\n")
