"""Kernels that differ in numbers only: which ones, so that a source can have one function for them.

A network whose layers widen has hundreds of kernels of a few structures; to compile each of them
takes the C compiler longer than everything else. Kernels in which a register holds what a size
would be are left alone: `able` says which are not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence

from rung.core.op import Func, walk
from rung.kernel.ir import Like

SEVERAL = 4  # kernels for which one function is worth the arguments


def alike(kernels: Sequence[Func], able: Callable[[Func], bool]) -> tuple[Func, ...]:
    """The kernels, those that are alike with the name of the first of them."""
    groups = _grouped(_grouped([list(filter(able, kernels))], _kinds), _text)
    first = {k: group[0].name for group in groups for k in group}
    return tuple(k.with_attr("like", Like(first[k])) if k in first else k for k in kernels)


def _grouped(groups: list[list[Func]], key: Callable[[Func], Hashable]) -> list[list[Func]]:
    """The groups, each apart by a key, without small ones."""
    found: list[list[Func]] = []
    for group in groups:
        parts: dict[Hashable, list[Func]] = {}
        for kernel in group:
            parts.setdefault(key(kernel), []).append(kernel)
        found += [part for part in parts.values() if len(part) >= SEVERAL]
    return found


def _kinds(kernel: Func) -> Hashable:
    return tuple(type(op) for op in walk(kernel.body))


def _text(kernel: Func) -> Hashable:
    return re.sub(r"\d+", "", str(kernel).partition("(")[2])
