"""Index arithmetic of views: which element of the source each element of the result is.

All functions give the source's subscripts as expressions over the axes of the result.
"""

from __future__ import annotations

from collections.abc import Sequence

from rung.core.errors import Unsupported
from rung.core.expr import ONE, ZERO, Expr, sym
from rung.core.ranges import prove_nonneg

Shape = Sequence[Expr]


def bounds_of(axes: Sequence[str], shape: Shape) -> dict[str, tuple[int | Expr, int | Expr | None]]:
    """0 <= axis <= size - 1 for each axis."""
    return {a: (0, s - 1) for a, s in zip(axes, shape, strict=True)}


def product(sizes: Shape) -> Expr:
    out = ONE
    for size in sizes:
        out = out * size
    return out


def reshape(source: Shape, axes: Sequence[str], shape: Shape) -> tuple[Expr, ...]:
    """Subscripts of a row-major reshape of `source` to `shape`.

    Dimensions are matched in groups of equal products ([6,s0] and [2,3,s0] fall into 6 | 2,3 and
    s0 | s0), so that divisions stay within a group.
    """
    if any(s.is_const(0) for s in (*source, *shape)):
        return (ZERO,) * len(source)
    if product(source) is not product(shape):
        raise Unsupported(f"reshape of {list(source)} to {list(shape)}")
    subs = [ZERO] * len(source)
    bounds = bounds_of(axes, shape)
    for old, new in _groups(source, shape):
        at = ZERO
        for n in new:
            at = at * shape[n] + sym(axes[n])
        for position, n in enumerate(old):
            inner = product([source[m] for m in old[position + 1:]])
            part = at // inner if position == 0 else at // inner % source[n]
            subs[n] = part.simplify(bounds)
    return tuple(subs)


def _groups(a: Shape, b: Shape) -> list[tuple[list[int], list[int]]]:
    """The finest split of both shapes into runs of dimensions with equal products, without 1s."""
    after = _prefix_products(a)
    others = _prefix_products(b)
    groups: list[tuple[list[int], list[int]]] = []
    old: list[int] = []
    at = 0
    positions = list(others)
    for total, n in after.items():
        old.append(n)
        if total in others:
            end = positions.index(total) + 1
            groups.append((old, [others[t] for t in positions[at:end]]))
            old, at = [], end
    return groups


def _prefix_products(shape: Shape) -> dict[Expr, int]:
    """Product of the sizes up to and with each dimension that is not 1 -> that dimension."""
    table, total = {}, ONE
    for n, size in enumerate(shape):
        if size is not ONE:
            total = total * size
            table[total] = n
    return table


def broadcast(source: Shape, axes: Sequence[str], shape: Shape) -> tuple[Expr, ...]:
    """Subscripts that expand `source` to `shape`, aligned at the last dimension."""
    lead = len(shape) - len(source)
    subs = []
    for size, axis, wanted in zip(source, axes[lead:], shape[lead:], strict=True):
        if size is not wanted and size is not ONE:
            raise Unsupported(f"broadcast of size {size} to {wanted}")
        subs.append(sym(axis) if size is wanted else ZERO)
    return tuple(subs)


def slice_start(start: Expr, end: Expr, step: int, size: Expr, length: Expr) -> Expr:
    """Where a slice starts; Unsupported unless its `length` elements provably exist.

    `length` is what torch found under its guards, so that for a step of 1 it shows by itself that
    neither end was clamped.
    """
    begin = start + size if start.const_value is not None and start.const_value < 0 else start
    if begin.const_value is not None and size.const_value is not None:
        begin = Expr.of(min(max(begin.const_value, 0), size.const_value))
    if length.is_const(0):
        return ZERO
    if step == 1 and length in (size - begin, end - begin):
        return begin
    last = begin + (length - 1) * step
    if prove_nonneg(begin, {}) and prove_nonneg(size - 1 - last, {}):
        return begin
    raise Unsupported(f"slice from {start} by {step} of size {size} to {length}")
