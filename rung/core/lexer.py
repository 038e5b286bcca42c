"""Tokens of the dumps, and a cursor that reads what needs no scope: names, numbers, sizes.

Lines become tokens as in Python: `NEWLINE` ends a line, `INDENT` and `DEDENT` enclose a block.
A comment runs from `#` to the end of its line; a line that ends in a comma or a `+` goes on in the
next.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, NoReturn, TypeVar

from rung.core.errors import ParseError
from rung.core.expr import Expr, ExprParser

NAME = r"[A-Za-z_]\w*(?:\.\w+)*"
TOKEN = re.compile(rf"""(?P<indent>^[ ]*(?=[^\s\#])|\Z)|(?P<space>\n|[^\S\n]+|\#.*)
  |(?P<num>\d+(?:\.\d+)?(?:e[+-]?\d+)?|(?:inf|nan|true|false)\b)
  |(?P<str>"(?:[^"\\\0-\x1f]|\\["\\/bfnrt]|\\u[0-9a-f]{{4}})*")|(?P<name>kernel-ir|{NAME})
  |(?P<op>->|<-|\.\.|//|[=!<>]=|[-+*/%<>=()\[\],:|&])|(?P<bad>.)""", re.X | re.A | re.M)
NEWLINE, INDENT, DEDENT, END = "end of line", "indentation", "end of block", "end of text"
CONSTANTS: dict[str, float | bool] = {"inf": float("inf"), "nan": float("nan"),
                                      "true": True, "false": False}
_STOPS = (")", "]", ":", "|", NEWLINE)  # where a list may end before its first item
T = TypeVar("T")


class Token(NamedTuple):
    """`at` is the offset into the text; `kind` is num, str, name, op or layout."""

    at: int
    text: str
    kind: str = "layout"


def lex(text: str) -> Iterator[Token]:
    """The tokens of `text`, the last one END; ParseError where there is none."""
    depths, last, goes_on = [0], 0, False
    for found in TOKEN.finditer(text):
        kind, at, depth = str(found.lastgroup), found.end(), len(found[0])
        if kind == "indent" and goes_on and at < len(text):
            continue
        if kind == "indent":
            if last:
                yield Token(last, NEWLINE)
            if depth > depths[-1]:
                depths.append(depth)
                yield Token(at, INDENT)
            while depth < depths[-1]:
                depths.pop()
                yield Token(at, DEDENT)
        elif kind != "space":
            yield Token(found.start(), found[0], kind)
            last, goes_on = at, found[0] in (",", "+")
        if kind == "bad" or (kind == "indent" and depth != depths[-1]):
            raise error_at(text, found.start(), f"unexpected {found[0]!r}")
    yield Token(len(text), END)


def error_at(text: str, at: int, message: str) -> ParseError:
    """A ParseError with line and column of offset `at`."""
    return ParseError(message, text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at))


class Cursor(ExprParser):
    """A position in the tokens of a text."""

    def __init__(self, text: str):
        super().__init__(tuple(lex(text)))
        self.text = text

    @property
    def kind(self) -> str:
        """The kind of the current token."""
        return str(self.tokens[self.at][2])

    def fail(self, message: str, back: int = 0) -> NoReturn:
        raise error_at(self.text, self.tokens[self.at - back][0], message)

    def take(self, want: str = "", kind: str = "") -> str:
        """The current token, which must be `want` or of that kind where these are given."""
        text = self.peek()
        if text != (want or text) or self.kind != (kind or self.kind):
            self.fail(f"expected {want or 'a ' + kind}, not {text}")
        self.at += text != END
        return text

    def accept(self, want: str) -> bool:
        """Take the current token if it is `want`."""
        found = self.peek() == want
        self.at += found
        return found

    def listed(self, item: Callable[[], T]) -> tuple[T, ...]:
        """`item, item, ...`, or nothing."""
        items = [] if self.peek() in _STOPS else [item()]
        while items and self.accept(","):
            items.append(item())
        return tuple(items)

    def enclosed(self, brackets: str, inner: Callable[[], T]) -> T:
        """`inner` between `brackets`."""
        self.take(brackets[0])
        found = inner()
        self.take(brackets[1])
        return found

    def name(self) -> str:
        return self.take(kind="name")

    def word(self) -> str:
        """A name, or any text in quotes."""
        return str(json.loads(self.take())) if self.kind == "str" else self.name()

    def number(self) -> float | int | bool:
        """A literal: 3, -1.5, inf, -inf, nan, true, false."""
        sign = -1 if self.accept("-") else 1
        word = self.take(kind="num")
        value = CONSTANTS[word] if word in CONSTANTS else (int if word.isdigit() else float)(word)
        return value if sign > 0 else -value

    def integer(self) -> int:
        value = self.number()
        if type(value) is not int:
            self.fail(f"expected an integer, not {value}", back=1)
        return value

    def known(self, table: Mapping[str, T], what: str) -> T:
        """What the next name stands for."""
        name = self.name()
        if name not in table:
            self.fail(f"no {what} is called {name}", back=1)
        return table[name]

    def sizes(self) -> tuple[Expr, ...]:
        return self.enclosed("[]", lambda: self.listed(self.expr))
