"""Functions to look at: `rung show FILE:NAME`. Each gives (function, example arguments)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rung.tools import benchmarks

Built = tuple[Callable[..., Any], tuple[Any, ...]]


def relu_mm() -> Built:
    return benchmarks.relu_mm(quick=False)


def softmax() -> Built:
    return benchmarks.softmax(quick=False)


def colsum() -> Built:
    return benchmarks.colsum(quick=False)


def cache_step() -> Built:
    return benchmarks.cache_step(quick=False)


def llama() -> Built:
    return benchmarks.llama(benchmarks.Variant("llama"))(False)
