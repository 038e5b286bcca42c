"""Dumps with tokens lost, swapped, doubled or exchanged: each is refused in words, or is a dump.

`wrong(text, seed)` damages a dump of any rung and reads it: ParseError and VerifyError are what a
reader of bad text owes, any other exception and a long wait are bugs. What is read must print as
text that reads as the same again.
"""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from rung.core.errors import ParseError, VerifyError
from rung.tools import opt

TOKEN = re.compile(r"\w+|\s+|[^\w\s]")
SECONDS = 10
ODD = ("0", "-1", "99999999999999999999", "1e999", "inf", "nan", '"', "(", "]", ":", "->", "\n",
       "\n    ", "lane", "index", "f32", "bf16[0]", "i", "s0", "x0", "\x00", "é")


def damaged(text: str, rng: random.Random) -> str:
    """`text` with up to four of its tokens changed."""
    tokens = TOKEN.findall(text)
    for _ in range(rng.randint(1, 4)):
        a, b = rng.randrange(len(tokens)), rng.randrange(len(tokens))
        match rng.randrange(5):
            case 0:
                tokens[a] = ""
            case 1:
                tokens[a], tokens[b] = tokens[b], tokens[a]
            case 2:
                tokens[a] += tokens[a]
            case 3:
                tokens[a] = tokens[b]
            case _:
                tokens[a] = rng.choice(ODD)
    return "".join(tokens)


def wrong(text: str, seed: int) -> str:
    """What is wrong about reading a damaged `text`, and that text; "" if nothing is."""
    bad = damaged(text, random.Random(seed))
    try:
        with alarm(SECONDS):
            module = opt.parsed(bad, "fuzz")
            again = opt.parsed(str(module), "fuzz")
    except (ParseError, VerifyError):
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{bad}"
    return "" if str(again) == str(module) else f"reads as another text\n{bad}"


@contextmanager
def alarm(seconds: int) -> Iterator[None]:
    """TimeoutError after so many seconds."""
    def late(*_: object) -> NoReturn:
        raise TimeoutError(f"no answer after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
