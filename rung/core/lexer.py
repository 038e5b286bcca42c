"""Tokens of the dumps, and a cursor that reads what needs no scope: names, numbers, sizes.

Lines become tokens as in Python: `NEWLINE` ends a line, `INDENT` and `DEDENT` enclose a block.
A comment runs from `#` to the end of its line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from rung.core.errors import ParseError
from rung.core.expr import Expr, ExprParser
from rung.core.types import DTYPES, DType, Type, read_type

NAME = r"[A-Za-z_]\w*(?:\.\w+)*"
TOKEN = re.compile(rf"""(?P<space>\s+|\#.*)|(?P<num>\d+(?:\.\d+)?(?:e[+-]?\d+)?)
  |(?P<str>"(?:[^"\\\0-\x1f]|\\["\\/bfnrt]|\\u[0-9a-f]{{4}})*")|(?P<name>kernel-ir|{NAME})
  |(?P<op>->|<-|\.\.|//|[=!<>]=|[-+*/%<>=()\[\],:|&])""", re.X | re.A)
NEWLINE, INDENT, DEDENT, END = "end of line", "indentation", "end of block", "end of text"
CONSTANTS: dict[str, float | bool] = {"inf": float("inf"), "nan": float("nan"),
                                      "true": True, "false": False}
_STOPS = (")", "]", ":", "|", NEWLINE)  # where a list may end before its first item
T = TypeVar("T")
Infix = Mapping[str, tuple[int, Callable[[T, T], T]]]  # symbol: (precedence, what it builds)


class Token(NamedTuple):
    """`at` is the offset into the text; `kind` is num, str, name, op or layout."""

    at: int
    text: str
    kind: str = "layout"


def lex(text: str) -> Iterator[Token]:
    """The tokens of `text`, the last one END; ParseError where there is none."""
    at, depths = 0, [0]
    for line in text.split("\n"):
        found = list(_line(text, at, at + len(line)))
        if found:
            start, last = found[0].at, found[-1]
            if start - at > depths[-1]:
                depths.append(start - at)
                yield Token(start, INDENT)
            while start - at < depths[-1]:
                depths.pop()
                yield Token(start, DEDENT)
            if start - at != depths[-1]:
                raise error_at(text, start, "indented unlike any line before")
            yield from (*found, Token(last.at + len(last.text), NEWLINE))
        at += len(line) + 1
    yield from (Token(len(text), t) for t in (*[DEDENT] * (len(depths) - 1), END))


def _line(text: str, at: int, end: int) -> Iterator[Token]:
    while at < end:
        found = TOKEN.match(text, at, end)
        if not found:
            raise error_at(text, at, f"unexpected {text[at]!r}")
        if found.lastgroup != "space":
            yield Token(at, found[0], str(found.lastgroup))
        at = found.end()


def error_at(text: str, at: int, message: str) -> ParseError:
    """A ParseError with line and column of offset `at`."""
    return ParseError(message, text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at))


class Cursor:
    """A position in the tokens of a text."""

    def __init__(self, text: str):
        self.text, self.tokens, self.pos = text, list(lex(text)), 0

    @property
    def token(self) -> Token:
        return self.tokens[self.pos]

    def peek(self, ahead: int = 0) -> str:
        """The text of a token that is not taken yet."""
        return self.tokens[min(self.pos + ahead, len(self.tokens) - 1)].text

    def fail(self, message: str, back: int = 0) -> ParseError:
        """An error at the current token, or at one taken before it."""
        return error_at(self.text, self.tokens[self.pos - back].at, message)

    def take(self, want: str = "", kind: str = "") -> str:
        """The current token, which must be `want` or of that kind where these are given."""
        token = self.token
        if token.text != (want or token.text) or token.kind != (kind or token.kind):
            raise self.fail(f"expected {want or 'a ' + kind}, not {token.text}")
        self.pos += token.text != END
        return token.text

    def accept(self, want: str) -> bool:
        """Take the current token if it is `want`."""
        found = self.peek() == want
        self.pos += found
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

    def climb(self, unit: Callable[[], T], infix: Infix[T], level: int = 0) -> T:
        """An infix expression whose operators bind with strength `level` or more."""
        left = unit()
        while (found := infix.get(self.peek())) and found[0] >= level:
            self.take()
            left = found[1](left, self.climb(unit, infix, found[0] + 1))
        return left

    def name(self) -> str:
        return self.take(kind="name")

    def word(self) -> str:
        """A name, or any text in quotes."""
        return str(json.loads(self.take())) if self.token.kind == "str" else self.name()

    def at_number(self) -> bool:
        return self.peek() == "-" or self.token.kind == "num" or self.peek() in CONSTANTS

    def number(self) -> float | int | bool:
        """A literal: 3, -1.5, inf, -inf, nan, true, false."""
        sign = -1 if self.accept("-") else 1
        if self.peek() in CONSTANTS:
            value = CONSTANTS[self.take()]
            return sign * value if isinstance(value, float) else value
        word = self.take(kind="num")
        return sign * (int(word) if word.isdigit() else float(word))

    def integer(self) -> int:
        value = self.number()
        if type(value) is not int:
            raise self.fail(f"expected an integer, not {value}", back=1)
        return value

    def dtype(self) -> DType:
        name = self.name()
        if name not in DTYPES:
            raise self.fail(f"no dtype is called {name}", back=1)
        return DTYPES[name]

    def index(self) -> Expr:
        """An index expression over axes, loop variables and sizes."""
        parser = ExprParser(self.tokens, self.pos)
        try:
            expr = parser.expr(0)
        except ParseError as error:
            raise error_at(self.text, error.column, error.message) from None
        self.pos = parser.at
        return expr

    def sizes(self) -> tuple[Expr, ...]:
        return self.enclosed("[]", lambda: self.listed(self.index))

    def type(self) -> Type:
        return read_type(self)
