"""The NumPy oracle: runs any function of any rung by each op's `run`.

Tensor values are plain arrays. A value over named axes (loop axes, unrolled axes, lanes) is an
array with one dimension for each axis in `axes` order, of size 1 where it does not vary, so that
elementwise ops are NumPy broadcasting. bf16 is held in float32, rounded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rung.core.expr import Expr
from rung.core.op import Block, Op, Value
from rung.core.types import IndexType, shape_of


class Interp:
    """State of one run: values by `Value`, index symbols (sizes, axes, loop variables) by name."""

    def __init__(self, symbols: Mapping[str, int] | None = None, axes: Sequence[str] = ()):
        self.symbols: dict[str, Any] = dict(symbols or {})
        self.values: dict[Value, Any] = {}
        self.axes = tuple(axes)
        self.callees: dict[str, Any] = {}

    def index(self, expr: Expr) -> Any:
        """An index expression's value: an int, or an array over the axes in it."""
        return np.asarray(expr.evaluate(self.symbols))

    def spread(self, axis: str, extent: int) -> np.ndarray:
        """0..extent-1 along `axis`, shaped to broadcast against other values."""
        shape = [1] * len(self.axes)
        shape[self.axes.index(axis)] = extent
        return np.arange(extent).reshape(shape)

    def position(self, axis: str) -> int:
        return self.axes.index(axis)

    def block(self, block: Block, args: Iterable[Any] = ()) -> Any:
        """Run a block; the result is what its last op returns (a `yield` or `return`)."""
        self.values.update(zip(block.args, args, strict=True))
        last: Any = ()
        for op in block.ops:
            last = self.step(op)
        return last

    def step(self, op: Op) -> Any:
        out = op.run(self, *(self.values[v] for v in op.operands()))
        self.bind(op, out)
        return out

    def bind(self, op: Op, out: Any) -> None:
        """Keep what an op returned as its results."""
        if len(op.results) == 1:
            self.values[op.results[0]] = out
        elif op.results:
            self.values.update(zip(op.results, out, strict=True))

    def read(self, array: np.ndarray, subs: Sequence[Any], mask: Sequence[Expr],
             fill: float) -> np.ndarray:
        """`array[subs]` where every mask expression is >= 0, else `fill`.

        Raises IndexError when an unmasked subscript is out of range: generated code must not rely
        on clamping.
        """
        where = self.valid(mask)
        at = np.broadcast_arrays(*[self._sub(s) for s in subs], where) if subs else [where]
        *places, where = at
        for dim, place in enumerate(places):
            bad = where & ((place < 0) | (place >= array.shape[dim]))
            if bad.any():
                raise IndexError(f"subscript {dim} is {place[bad][0]} of {array.shape[dim]}")
        safe = tuple(np.where(where, p, 0) for p in places)
        if array.size == 0:
            return np.full(where.shape, fill, array.dtype)
        return np.where(where, array[safe], np.asarray(fill, array.dtype))

    def write(self, array: np.ndarray, subs: Sequence[Any], value: Any,
              mask: Sequence[Expr], combine: np.ufunc | None = None) -> None:
        """`array[subs] = value` where every mask expression is >= 0; or combined with the old
        value, point by point in sequence."""
        where = self.valid(mask)
        *places, where, value = np.broadcast_arrays(*[self._sub(s) for s in subs], where, value)
        for dim, place in enumerate(places):
            bad = where & ((place < 0) | (place >= array.shape[dim]))
            if bad.any():
                raise IndexError(f"subscript {dim} is {place[bad][0]} of {array.shape[dim]}")
        if combine is not None:
            with np.errstate(all="ignore"):
                combine.at(array, tuple(p[where] for p in places), value[where])
        elif places:
            array[tuple(p[where] for p in places)] = value[where]
        elif where.all():
            array[...] = value.reshape(())

    def valid(self, mask: Sequence[Expr]) -> np.ndarray:
        where = np.asarray(True)
        for expr in mask:
            where = where & (self.index(expr) >= 0)
        return where

    def _sub(self, sub: Any) -> Any:
        return self.index(sub) if isinstance(sub, Expr) else self.values[sub]


def bind_sizes(shapes: Collection[tuple[Sequence[Expr], Sequence[int]]]) -> dict[str, int]:
    """Size symbols from declared shapes and actual ones; ValueError where they disagree."""
    sizes: dict[str, int] = {}
    for declared, actual in shapes:
        if len(declared) != len(actual):
            raise ValueError(f"rank {len(actual)} where {len(declared)} is declared")
        for expr, size in zip(declared, actual, strict=True):
            names = expr.symbols()
            if len(names) == 1 and expr.is_symbol():
                (name,) = names
                sizes.setdefault(name, int(size))
    for declared, actual in shapes:
        for expr, size in zip(declared, actual, strict=True):
            if expr.symbols() <= sizes.keys() and int(expr.evaluate(sizes)) != size:
                raise ValueError(f"size {size} where {expr} is declared")
    return sizes


def bind_buffers(buffers: Iterable[tuple[Value, np.ndarray]]) -> dict[str, int]:
    """Size symbols from a kernel's arguments: the shapes of arrays, and sizes passed as such."""
    pairs = list(buffers)
    sizes = bind_sizes([(shape_of(v.type), a.shape) for v, a in pairs])
    return sizes | {v.name: int(a) for v, a in pairs if isinstance(v.type, IndexType)}
