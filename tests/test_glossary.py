"""docs/glossary.md: every pass and class name is made of words that the docs explain or use.

A name may use any word of the text of the glossary and of ARCHITECTURE.md, code apart: these say
what the system is, and change with it, so no dictionary is needed. A name with another word fails
until the glossary, or the line of its file, says what that word means.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from rung.pipeline import PASSES

ROOT = Path(__file__).parent.parent
DOCS = ("docs/glossary.md", "ARCHITECTURE.md")
TERM = re.compile(r"- \*\*(.+?)\*\*: (.+)")
PATH = re.compile(r"`([\w/]+\.py)`")
Lines = list[tuple[str, str]]


def terms(heading: str) -> Lines:
    """(term, the rest of its line) below a heading of the glossary, in order."""
    text = (ROOT / "docs/glossary.md").read_text()
    return TERM.findall(text.split(f"## {heading}\n")[1].split("\n## ")[0])


def classes() -> dict[str, set[str]]:
    """The name of every class of rung/, with the files that have one."""
    found = defaultdict[str, set[str]](set)
    for path in sorted((ROOT / "rung").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].add(str(path.relative_to(ROOT / "rung")))
    return found


def words(name: str) -> list[str]:
    """`CudaPrelude`, `merge_axes` -> its words, in lower case."""
    return [w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def stem(word: str) -> str:
    """`splitting`, `splits`, `split` -> `split`: what the forms of a word share."""
    return re.sub(r"(.)\1$", r"\1", re.sub(r"(ing|ed|er|es|s|e)$", "", word))


def known() -> set[str]:
    """The words of the docs' text, by their stems."""
    text = "".join((ROOT / name).read_text() for name in DOCS)
    return set(map(stem, words(re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.S))))


def unexplained(names: set[str], vocabulary: set[str]) -> list[str]:
    return sorted(n for n in names if not vocabulary.issuperset(map(stem, words(n))))


def undistinguished(named: dict[str, set[str]], lines: Lines) -> list[str]:
    """Names of several public classes for which no line names the file of each."""
    told = {term: set(PATH.findall(text)) for term, text in lines}
    return sorted(name for name, files in named.items() if len(files) > 1 and name[0] != "_"
                  and not files <= told.get(name.lower(), set()))


def test_names_are_of_words_that_the_docs_explain() -> None:
    named = {*classes(), *(p.name for p in PASSES)}
    assert unexplained(named, known()) == []


def test_a_word_that_is_nowhere_explained_is_told() -> None:
    assert unexplained({"Frobnicator", "FusedKernel", "_Writes"}, known()) == ["Frobnicator"]


def test_passes_have_a_line() -> None:
    assert [term for term, _ in terms("Passes")] == sorted({p.name for p in PASSES})


def test_a_name_of_two_classes_is_a_term_with_both_files() -> None:
    assert undistinguished(classes(), terms("Terms")) == []


def test_a_name_taken_twice_is_told() -> None:
    named = {"Plan": {"a.py", "b.py"}, "Step": {"a.py", "b.py"}, "Axis": {"c.py"}}
    lines = [("plan", "of both. `a.py` `b.py`"), ("step", "of one. `a.py`")]
    assert undistinguished(named, lines) == ["Step"]


def test_terms_are_sorted_and_live_where_they_say() -> None:
    for heading in ("Terms", "Passes"):
        lines = terms(heading)
        names = [term for term, _ in lines]
        assert names == sorted(set(names), key=str.lower)
        for term, text in lines:
            files = PATH.findall(text)
            assert files, f"{term} lives nowhere"
            for path in files:
                content = (ROOT / "rung" / path).read_text().lower()
                assert stem(words(term)[0]) in content, f"{term} in {path}"
