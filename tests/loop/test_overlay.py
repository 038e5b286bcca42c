"""Axes that no op has together become one, under masks, and the kernel means the same."""

from __future__ import annotations

import numpy as np
import pytest
from mapped import arguments, kernel

from rung.core.expr import sym
from rung.core.op import Func
from rung.core.parse import parse_module
from rung.core.verify import verify
from rung.loop import ir as loop
from rung.loop.emit import rebuilt
from rung.loop.overlay import overlay

CAT = """\
kernel cat(x: f32[{M},8], z: f32[{N},8], t: i64[{N}]) -> y: f32[{S},8], w: f32[{N}]
  axes i {M}, j 8, k {N}, l {N}
  y[i,j] = exp(x[i,j])
  y[k+{M},j] = z[k,j] * f32(index(k))
  w[l] = z[t[l],0]
"""


def cat(m: int, n: int) -> Func:
    (func,) = parse_module(CAT.format(M=m, N=n, S=m + n), {"kernel": loop.VOCABULARY})
    return func


def same(one: Func, other: Func) -> bool:
    verify(other, loop.VOCABULARY, loop.verify_kernel)
    want, got = arguments(one, {}), arguments(one, {})
    loop.run_kernel(one, want)
    loop.run_kernel(other, got)
    return all(np.array_equal(want[v.name], got[v.name]) for v in one.outs)


@pytest.mark.parametrize(("m", "n", "masks"), [(3, 5, 2), (5, 4, 2), (4, 4, 1)])
def test_the_shorter_axis_is_a_part_of_the_longer(m: int, n: int, masks: int) -> None:
    found = overlay(cat(m, n))
    assert sorted(str(e) for e in loop.extents_of(found).values()) == sorted(
        {str(max(m, n)), str(max(n, 8))})
    assert same(cat(m, n), found)
    assert sum(bool(op.mask) for op in found.body.ops if isinstance(op, loop.Store)) == masks


def test_without_masks_it_would_read_and_write_beyond() -> None:
    func = cat(3, 5)
    wrong = rebuilt(func, {"i": sym("k")}, {a: e for a, e in loop.extents_of(func).items()
                                           if a != "i"})
    with pytest.raises(IndexError):
        same(func, wrong)


@pytest.mark.parametrize("name", ["softmax", "relu_mm", "attend", "tally", "scatter", "rotate"])
def test_axes_of_one_store_or_of_a_fold_stay(name: str) -> None:
    sizes = {"M": 4, "K": 6, "N": 5, "H": 2, "G": 3, "D": 16, "L": 8}
    func = kernel(name, **sizes)
    assert overlay(func) is func


def test_symbolic_sizes_are_overlaid_where_they_are_equal() -> None:
    text = ("kernel f(x: f32[s0], z: f32[{0}]) -> y: f32[s0], w: f32[{0}]\n"
            "  y[i] = x[i] * 2.0\n  w[j] = z[j]")
    for size, axes in (("s0", 1), ("s1", 2)):
        (func,) = parse_module(text.format(size), {"kernel": loop.VOCABULARY})
        assert len(loop.extents_of(overlay(func))) == axes
