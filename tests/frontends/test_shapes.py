"""Index arithmetic of views against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.core.errors import Unsupported
from rung.core.expr import Expr, sym
from rung.frontends.torch.shapes import broadcast, reshape, slice_start
from rung.tensor.ir import axis_names

E = Expr.of
S = sym("s0")


def factored(n: int) -> st.SearchStrategy[list[int]]:
    """Shapes of `n` elements, ones among the sizes."""
    if n == 1:
        return st.lists(st.just(1), max_size=2)
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    return st.sampled_from(divisors).flatmap(
        lambda d: st.tuples(st.just(d), factored(n // d) if d > 1 else st.just([n]))
    ).map(lambda pair: [pair[0], *pair[1]])


@given(st.sampled_from([1, 2, 6, 12, 24, 60]).flatmap(
    lambda n: st.tuples(factored(n), factored(n))))
def test_reshape_is_that_of_numpy(pair: tuple[list[int], list[int]]) -> None:
    source, shape = pair
    x = np.arange(math.prod(source)).reshape(source)
    names = axis_names(len(shape))
    subs = reshape([E(s) for s in source], names, [E(s) for s in shape])
    env = dict(zip(names, np.indices(shape), strict=True))
    at = tuple(np.broadcast_to(np.asarray(s.evaluate(env)), shape) for s in subs)
    np.testing.assert_array_equal(x[at] if at else x.reshape(shape), x.reshape(shape))


@pytest.mark.parametrize(("source", "shape", "subs"), [
    ([S, 8], [S * 8], "i//8 i%8"), ([S * 8], [S, 8], "8*i+j"), ([S, 8], [S, 2, 4], "i 4*j+k"),
    ([S, 2, 4], [S, 8], "i j//4 j%4"), ([S], [1, S, 1], "j"), ([6, S], [2, 3, S], "3*i+j k"),
    ([2, S, 3], [S * 2, 3], "i//s0 i%s0 j"), ([0, 4], [2, 0], "0 0"),
    ([4, 6], [6, 4], "(4*i+j)//6 (4*i+j)%6")])
def test_reshape_keeps_divisions_within_a_group(source: list[Expr | int], shape: list[Expr | int],
                                                subs: str) -> None:
    found = reshape(list(map(E, source)), axis_names(len(shape)), list(map(E, shape)))
    assert " ".join(map(str, found)) == subs


def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(Unsupported, match="reshape"):
        reshape([S], axis_names(2), [E(2), S // 2])
    with pytest.raises(Unsupported, match="broadcast"):
        broadcast([S], axis_names(1), [E(4)])
    with pytest.raises(Unsupported, match="slice"):
        slice_start(E(1), E(3), 2, S, E(3))


@pytest.mark.parametrize(("start", "end", "size", "length", "begin"), [
    (0, S, S, S, "0"), (1, S, S, S - 1, "1"), (-1, S, S, 1, "s0-1"), (-9, 4, 4, 4, "0"),
    (9, 9, 4, 0, "0"), (2, 5, S, 3, "2"), (S, S + 1, 9, 1, "s0")])
def test_slices(start: Expr | int, end: Expr | int, size: Expr | int, length: Expr | int,
                begin: str) -> None:
    assert str(slice_start(E(start), E(end), 1, E(size), E(length))) == begin
