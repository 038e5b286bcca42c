"""How large the package may be: code lines by folder, lengths of functions and files, sizes of
classes, suppressions.

In: the files under `rung/` and the caps of `budget.toml`. Out: one message for each cap that is
passed; a table of all folders when a cap on code lines is. `python tests/test_budget.py` prints the
table and the longest functions.
"""

from __future__ import annotations

import ast
import io
import math
import tokenize
import tomllib
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rung"
CAPS = tomllib.loads((ROOT / "tests" / "budget.toml").read_text(encoding="utf-8"))

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
"""Tokens that make no line a code line."""

Functions = list[tuple[int, int, str]]
"""(lines of code and docstring, lines of any kind, `file:line name`) of each function."""


@dataclass(frozen=True)
class Source:
    """A source file, with the sets of its lines (numbered from 1) that hold code or docstrings."""

    path: Path
    folder: str
    text: str

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        return list(tokenize.generate_tokens(io.StringIO(self.text).readline))

    @cached_property
    def docstring_lines(self) -> set[int]:
        """Lines of string statements: docstrings, and the notes that stand below a constant."""
        return {
            line
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if isinstance(node.value.value, str)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }

    @cached_property
    def code_lines(self) -> set[int]:
        return {
            line
            for token in self.tokens
            if token.type not in LAYOUT
            if not (token.type == tokenize.STRING and token.start[0] in self.docstring_lines)
            for line in range(token.start[0], token.end[0] + 1)
        }

    @property
    def functions(self) -> Functions:
        counted = self.code_lines | self.docstring_lines
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                span = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                where = f"{self.path}:{node.lineno} {node.name}"
                found.append((len(counted & set(span)), len(span), where))
        return found

    @property
    def classes(self) -> dict[str, dict[str, int]]:
        """How many methods and attributes each class has, by `file:class`."""
        return {
            f"{self.path}:{node.name}": {
                "methods": sum(isinstance(n, ast.FunctionDef) for n in node.body),
                "attributes": len(attributes(node)),
            }
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ClassDef)
        }

    @property
    def suppressions(self) -> Counter[str]:
        """How often a check is silenced; an import of `Any` is not a use of it."""
        comments = [t.string for t in self.tokens if t.type == tokenize.COMMENT]
        uses = (
            ast.unparse(n) for n in ast.walk(self.tree) if isinstance(n, ast.Name | ast.Attribute)
        )
        return Counter(
            {
                "type: ignore": sum("type: ignore" in c or "mypy: " in c for c in comments),
                "noqa": sum("noqa" in c for c in comments),
                "Any": sum(use in ("Any", "typing.Any") for use in uses),
            }
        )


def attributes(node: ast.ClassDef) -> set[str]:
    """The fields of a class, and what its methods assign to `self`; not what all objects share."""
    fields = {
        n.target.id
        for n in node.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
        if "ClassVar" not in ast.unparse(n.annotation)
    }
    return fields | {
        n.attr
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
        if isinstance(n.value, ast.Name) and n.value.id == "self"
    }


def read_sources(package: Path) -> list[Source]:
    """The files below `package`; those beside its folders count as `top-level`."""
    found = []
    for path in sorted(package.rglob("*.py")):
        inner = path.relative_to(package)
        folder = inner.parts[0] if len(inner.parts) > 1 else "top-level"
        text = path.read_text(encoding="utf-8")
        found.append(Source(path.relative_to(package.parent), folder, text))
    return found


def folder_sizes(sources: list[Source]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for source in sources:
        sizes[source.folder] += len(source.code_lines)
    return sizes


def table(sources: list[Source], caps: dict[str, Any]) -> str:
    """folder: lines / cap, one folder a line, those over their cap marked."""
    sizes, limits = folder_sizes(sources), caps["folders"]
    rows = [(name, sizes[name], limits.get(name, 0)) for name in {**limits, **sizes}]
    rows.append(("total", sizes.total(), caps["total"]))
    return "\n".join(
        f"{name + ':':<12}{lines:>6} / {cap}{'   <- over' if lines > cap else ''}"
        for name, lines, cap in rows
    )


def percentile(values: list[int], share: float) -> int:
    """Nearest rank: the least value that at least `share` of `values` do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else 0


# The caps: sources -> messages.


def check_sizes(sources: list[Source], caps: dict[str, Any]) -> list[str]:
    sizes = folder_sizes(sources)
    over = [name for name, lines in sizes.items() if lines > caps["folders"].get(name, -1)]
    if sizes.total() > caps["total"]:
        over.append("total")
    return [f"over the cap: {', '.join(over)}\n{table(sources, caps)}"] if over else []


def check_functions(sources: list[Source], caps: dict[str, Any]) -> list[str]:
    functions = sorted((f for source in sources for f in source.functions), reverse=True)
    p90, cap = percentile([f[0] for f in functions], 0.9), caps["functions"]
    long = [
        f"{where}: {n} lines, cap {cap['longest']}"
        for _, n, where in functions
        if n > cap["longest"]
    ]
    if p90 > cap["p90"]:
        worst = "\n".join(f"  {n:>4} {where}" for n, _, where in functions[:15])
        long.append(f"p90 of function lengths is {p90}, cap {cap['p90']}; the longest:\n{worst}")
    return long


def check_classes(sources: list[Source], caps: dict[str, Any]) -> list[str]:
    """An exception is exact: whoever makes its class smaller lowers it, or drops it at the cap."""
    caps = caps["classes"]
    counts = {name: count for source in sources for name, count in source.classes.items()}
    problems = [f"{name}: gone, drop its exception" for name in caps["above"].keys() - counts]
    for name, count in counts.items():
        for what, n in count.items():
            above = caps["above"].get(name, {}).get(what)
            if above is None and n > caps[what]:
                problems.append(f"{name}: {n} {what}, cap {caps[what]}")
            elif above is not None and (n != above or n <= caps[what]):
                problems.append(f"{name}: {n} {what}, its exception says {above}")
    return problems


def check_files(sources: list[Source], caps: dict[str, Any]) -> list[str]:
    cap = caps["files"]
    return [
        f"{s.path}: {len(s.lines)} lines, cap {cap['lines']}"
        for s in sources
        if len(s.lines) > cap["lines"]
    ] + [
        f"{s.path}:{number}: {len(line)} columns, cap {cap['columns']}"
        for s in sources
        for number, line in enumerate(s.lines, 1)
        if len(line) > cap["columns"]
    ]


def check_suppressions(sources: list[Source], caps: dict[str, Any]) -> list[str]:
    problems = []
    for name, cap in caps["suppressions"].items():
        counts = {str(s.path): n for s in sources if (n := s.suppressions[name])}
        if sum(counts.values()) > cap:
            problems.append(f"{name}: {sum(counts.values())}, cap {cap}: {counts}")
    return problems


CHECKS = [check_sizes, check_functions, check_classes, check_files, check_suppressions]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_package_is_within(check: Any) -> None:
    problems = check(read_sources(PACKAGE), CAPS)
    assert not problems, "\n" + "\n".join(problems)


# The counting itself.

SMALL_CAPS = {
    "total": 5,
    "folders": {"core": 4},
    "functions": {"p90": 3, "longest": 5},
    "classes": {"methods": 1, "attributes": 2, "above": {"rung/core/b.py:B": {"methods": 2}}},
    "files": {"lines": 6, "columns": 40},
    "suppressions": {"type: ignore": 0, "noqa": 0, "Any": 0},
}


def write(root: Path, name: str, text: str) -> list[Source]:
    path = root / "rung" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return read_sources(root / "rung")


def test_comments_docstrings_and_blank_lines_are_no_code(tmp_path: Path) -> None:
    text = '"""Module.\n\nMore.\n"""\n\n# note\nX = """a\nb"""  # two lines\n"""On X."""\n\n\n'
    text += 'def f(a):\n    """Doc."""\n    # why\n    return (\n        a\n    )\n'
    (source,) = write(tmp_path, "core/a.py", text)
    assert sorted(source.code_lines) == [7, 8, 12, 15, 16, 17]
    assert source.functions == [(5, 6, "rung/core/a.py:12 f")]


def test_percentile_is_the_nearest_rank() -> None:
    assert percentile(list(range(1, 11)), 0.9) == 9
    assert percentile([7], 0.9) == 7
    assert percentile([], 0.9) == 0


BODY = "    x = 1\n"
METHOD = "  def f(self): self.y, self.z = 1, 2\n"
OTHER = "class B:\n" + METHOD * 2 + "class A:\n  n: ClassVar[int] = 1\n{}"


@pytest.mark.parametrize(
    ("check", "name", "text", "message"),
    [
        (check_sizes, "core/a.py", "x = 1\n" * 5, "core:            5 / 4   <- over"),
        (check_sizes, "a.py", "x = 1\n", "over the cap: top-level"),
        (check_sizes, "core/a.py", "x = 1\n" * 6, "over the cap: core, total"),
        (check_functions, "core/a.py", "def f():\n" + BODY * 3, "p90 of function lengths is 4"),
        (check_functions, "core/a.py", "def f():\n" + "\n" * 4 + BODY, "a.py:1 f: 6 lines, cap 5"),
        (check_classes, "core/b.py", "class B:\n" + METHOD * 3, "3 methods, its exception says 2"),
        (check_classes, "core/b.py", "class B:\n" + METHOD, "1 methods, its exception says 2"),
        (check_classes, "core/b.py", "x = 1\n", "rung/core/b.py:B: gone, drop its exception"),
        (check_classes, "core/b.py", OTHER.format(METHOD * 2), "b.py:A: 2 methods, cap 1"),
        (check_classes, "core/b.py", OTHER.format("  x: int\n" + METHOD), "A: 3 attributes, cap 2"),
        (check_files, "core/a.py", "\n" * 7, "a.py: 7 lines, cap 6"),
        (check_files, "core/a.py", "#" * 41, "a.py:1: 41 columns, cap 40"),
        (check_suppressions, "core/a.py", "x = 1  # type: ignore", "type: ignore: 1, cap 0"),
        (check_suppressions, "core/a.py", "x = 1  # noqa: F401", "noqa: 1, cap 0"),
        (check_suppressions, "core/a.py", "x: list[Any] = []", "Any: 1, cap 0"),
        (check_suppressions, "core/a.py", "x: typing.Any = 1", "Any: 1, cap 0"),
    ],
)
def test_cap_catches(check: Any, name: str, text: str, message: str, tmp_path: Path) -> None:
    (problem,) = check(write(tmp_path, name, text), SMALL_CAPS)
    assert message in problem


def main() -> None:
    sources = read_sources(PACKAGE)
    functions = sorted((f for source in sources for f in source.functions), reverse=True)
    print(table(sources, CAPS))
    print(f"\nfunctions: {len(functions)}, p90 {percentile([f[0] for f in functions], 0.9)} lines")
    print("\n".join(f"{lines:>5} {where}" for lines, _, where in functions[:10]))


if __name__ == "__main__":
    main()
