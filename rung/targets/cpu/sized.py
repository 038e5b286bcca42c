"""Kernels that are alike as one C function, which takes the numbers in which they differ.

    void run_a(float *x) { .. x[64*i] .. }      ->    void run_a_sized(float *x, long c0)
    void run_b(float *x) { .. x[96*i] .. }            { .. x[c0*i] .. }  and a call of it in each

Numbers by which something is divided stay as they are: compilers divide by constants without a
division.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rung.core.op import Func
from rung.targets.base import buffers_of, symbols_of

MARK = "`"  # around numbers that may become arguments


def marked(number: str) -> str:
    return f"{MARK}{number}{MARK}"


def skeleton(text: str) -> tuple[str, ...]:
    """The text of a function without its name and its marked numbers."""
    return tuple(text.partition("(")[2].split(MARK)[::2])


def sized(members: Sequence[tuple[Func, str]], taken: Collection[str]) -> str:
    """The functions of kernels whose texts have one skeleton; `taken` are the names of all."""
    kernel, first = members[0]
    if len(members) == 1:
        return first.replace(MARK, "")
    name = f"{kernel.name}_sized"
    while name in taken:
        name += "_"
    columns = list(zip(*(text.split(MARK)[1::2] for _, text in members), strict=True))
    given = {c: f"c{n}_" for n, c in enumerate(dict.fromkeys(
        c for c in columns if len(set(c)) > 1))}
    words = first.split(MARK)
    words[1::2] = [given.get(c, c[0]) for c in columns]
    head, _, body = "".join(words).partition(") {")
    head = head.replace(f"run_{kernel.name}(", f"run_{name}(", 1)
    params = head.partition("(")[2]
    more = "".join(f", const long {c}" for c in given.values())
    calls = [f"extern void run_{k.name}({params}) {{ run_{name}({', '.join(args)}); }}"
             for n, (k, _) in enumerate(members)
             for args in [[*(v.name for v in buffers_of(k)), *symbols_of(k),
                           *(c[n] for c in given)]]]
    return "\n".join([f"{head}{more}) {{{body}", *calls])
