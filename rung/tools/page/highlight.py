"""Highlighted lines as HTML, by Pygments where it is installed (the extra `page`).

Only what helps to read has a class, so that the page stays small: keywords, names of types and
builtins, numbers, strings, comments.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from markupsafe import Markup, escape

from rung.core.op import RESERVED
from rung.core.types import DTYPES

CLASSES = {"Token.Keyword.Type": "t", "Token.Name.Builtin": "t", "Token.Keyword": "k",
           "Token.Operator.Word": "k", "Token.Literal.Number": "n", "Token.Literal.String": "s",
           "Token.Comment": "c"}
WORDS = ("kernel", "kernel-ir", "program", "map", "over", "acc", "on", "step", "storage")


def highlighted(lines: Sequence[str], language: str) -> list[Markup]:
    """Each line as HTML."""
    lexer = _lexer(language)
    if lexer is None:
        return [escape(line) for line in lines]
    rows = [Markup("")]
    for kind, text in lexer.get_tokens("\n".join(lines)):
        found = next((c for name, c in CLASSES.items() if str(kind).startswith(name)), "")
        for n, part in enumerate(text.split("\n")):
            if n:
                rows.append(Markup(""))
            if part:
                rows[-1] += Markup(f'<i class="{found}">{escape(part)}</i>') if (
                    found) else escape(part)
    return (rows + [Markup("")] * len(lines))[:len(lines)]


@cache
def _lexer(language: str) -> Any:
    """The lexer of a language; None without the library."""
    try:
        from pygments import token
        from pygments.lexer import RegexLexer, words
        from pygments.lexers import get_lexer_by_name
    except ImportError:
        return None
    if language != "ir":
        return get_lexer_by_name(language, stripnl=False, ensurenl=False)
    kept = sorted({*RESERVED, *WORDS} - {*DTYPES, "lane", "inf", "nan"}, key=len, reverse=True)
    rules = [  # what the dumps of the rungs are made of
        (r"#.*", token.Comment),
        (r'"(?:[^"\\]|\\.)*"', token.String),
        (words(sorted(DTYPES, key=len, reverse=True), prefix=r"\b", suffix=r"(x\d+)?\b"),
         token.Keyword.Type),
        (words(kept, prefix=r"(?<![\w.])", suffix=r"(?![\w.(-])"), token.Keyword),
        (r"(?<![\w.])\d[\d.]*(?:e[+-]?\d+)?", token.Number),
        (r"[\w.-]+", token.Text),
        (r"\s+|.", token.Text)]
    return type("Dumps", (RegexLexer,), {"name": "dumps of Rung", "tokens": {"root": rules}})(
        stripnl=False, ensurenl=False)
