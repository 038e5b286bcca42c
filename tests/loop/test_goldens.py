"""`tests/data/*.ir`: a program of Tensor IR, and the module that fusion makes of it.

`python tests/loop/test_goldens.py` (with `tests` on the path) writes the files anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import check, draw, price

from rung.core.parse import parse_module
from rung.loop import ir as loop
from rung.loop.canonical import canonical
from rung.loop.fuse import fuse
from rung.program import ir as program
from rung.program.ir import Module
from rung.tensor.to_loop import to_loop

DATA = Path(__file__).resolve().parents[1] / "data"
KINDS = {v.kind: v for v in (program.VOCABULARY, loop.VOCABULARY)}


def fused(text: str) -> tuple[Module, Module]:
    (func,) = parse_module(text, KINDS)
    made = canonical(fuse(to_loop(func), price, price))
    return Module((func,)), made


@pytest.mark.parametrize("path", sorted(DATA.glob("*.ir")), ids=lambda p: p.stem)
def test_golden(path: Path) -> None:
    before, _, after = path.read_text(encoding="utf-8").partition("--- expect\n")
    source, made = fused(before)
    assert str(made) == after.rstrip("\n")
    funcs = parse_module(after, KINDS)
    inputs = draw(source.main, {"s0": 3, "s1": 5}, ints=16)
    if sum(x.size for x in inputs) < 100_000:
        check(source, Module(funcs[:1], funcs[1:]), inputs, exact=False)


if __name__ == "__main__":
    for file in sorted(DATA.glob("*.ir")):
        old = file.read_text(encoding="utf-8").partition("--- expect\n")[0]
        file.write_text(f"{old}--- expect\n{fused(old)[1]}\n", encoding="utf-8")
