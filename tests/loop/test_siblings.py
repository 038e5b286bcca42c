"""Which kernels that read the same values become one, and that the joined kernel means both."""

from __future__ import annotations

from itertools import pairwise

import models
import pytest
from programs import Prog, check, draw, price, size

from rung.core import trace
from rung.core.op import Func, Value
from rung.core.types import I64
from rung.core.verify import verify
from rung.loop import ir as loop
from rung.loop.canonical import canonical
from rung.loop.fuse import fuse
from rung.loop.siblings import MAX_BUFFERS, join_siblings
from rung.program.ir import Check, KernelCall, Module
from rung.tensor.to_loop import to_loop


def joined(program: Func) -> Module:
    return canonical(join_siblings(fuse(to_loop(program), price, price), price, price))


def outputs(program: Func) -> list[int]:
    """How many results each launch has."""
    ops = joined(program).main.body.ops
    return [len(op.results) for op in ops if isinstance(op, KernelCall)]


def projections(*widths: int, m: int = 1, k: int = 64, norm: bool = True) -> Func:
    """A row, normed, times a matrix of each width."""
    p = Prog("projections")
    x, g = p.param("x", m, k), p.param("g", k)
    ws = [p.param(f"w{n}", width, k) for n, width in enumerate(widths)]
    h = p.rms_norm(x, g) if norm else x
    return p.done(*(p.einsum("ik,jk->ij", h, w) for w in ws))


def test_the_text_of_two_projections() -> None:
    assert str(joined(projections(512, 64, norm=False)).kernels[0]) == """\
kernel mm(x0: f32[1,64], x1: f32[512,64], x2: f32[64,64]) -> y0: f32[1,512], y1: f32[1,64]
  axes k 64, i 64, j 8
  mm = contract add mul x0[0,k], x1[64*j+i,k] over k 64 : f32 over i,j acc f32
  y0[0,64*j+i] = mm
  mm1 = contract add mul x0[0,k], x2[i,k] over k 64 : f32 over i acc f32
  y1[0,i] = mm1"""


@pytest.mark.parametrize("widths", [(48, 48), (16, 128), (96, 32, 32)], ids=str)
def test_projections_of_one_row_are_one_kernel(widths: tuple[int, ...]) -> None:
    program = projections(*widths)
    assert outputs(program) == [len(widths)]
    check(to_loop(program), joined(program), draw(program), exact=False)


def test_a_norm_is_computed_once_for_all_projections() -> None:
    (kernel,) = joined(projections(64, 16, 16)).kernels
    assert sum(not op.product for op in loop.folds(kernel)) == 1


def split_heads() -> Func:
    """Query and key, whose heads are dimensions of their own, and a value of whole rows."""
    p = Prog("split_heads")
    x = p.param("x", 1, 32)
    q, k, v = (p.einsum("ik,jk->ij", x, p.param(f"w{n}", n, 32)) for n in (96, 24, 24))
    return p.done(p.map("exp", p.permute(p.view(q, 12, 8), 1, 0)), p.view(k, 3, 8), v)


def symbolic() -> Func:
    p = Prog("symbolic")
    x, w, v = p.param("x", "s0", 16), p.param("w", 16), p.param("v", 16)
    return p.done(p.map("add", x, w), p.reduce("max", p.map("mul", x, v), 1))


def gates() -> Func:
    """What training keeps of a gated unit: both projections and their product."""
    p = Prog("gates")
    x, a, b = p.param("x", 2, 32), p.param("a", 48, 32), p.param("b", 48, 32)
    return p.done(*(p.einsum("ik,jk->ij", x, w) for w in (a, b)))


def norm_gradients() -> Func:
    """A fold of each row that a result over all axes reads, and one of each column."""
    p = Prog("norm_gradients")
    x, g = p.param("x", 24, 16), p.param("g", 24, 16)
    low = p.reduce("add", p.map("mul", x, g), 1, keep=True)
    return p.done(p.map("sub", g, low), p.reduce("add", g, 0))


def launches(module: Module) -> int:
    return sum(isinstance(op, KernelCall) for op in module.main.body.ops)


@pytest.mark.parametrize("make", [split_heads, symbolic, gates, norm_gradients],
                         ids=lambda f: f.__name__)
def test_joined_kernels_keep_the_meaning(make: object) -> None:
    program = make()  # type: ignore[operator]
    before = fuse(to_loop(program), price, price)
    after = joined(program)
    assert launches(after) < launches(before)
    for kernel in after.kernels:
        verify(kernel, loop.VOCABULARY, loop.verify_kernel)
    check(before, after, draw(program, {"s0": 5}), exact=False)


def test_a_transformer_layer_keeps_its_meaning() -> None:
    program = models.transformer(2)
    before = fuse(to_loop(program), price, price)
    assert len(joined(program).kernels) == len(canonical(before).kernels) - 2
    check(before, joined(program), draw(program, ints=16), exact=False)


def chained() -> tuple[Prog, list[Value]]:
    p = Prog("chained")
    x, w = p.param("x", 1, 16), p.param("w", 16, 16)
    y = p.einsum("ik,jk->ij", x, w)
    return p, [y, p.einsum("ik,jk->ij", y, w)]


def different_sizes() -> tuple[Prog, list[Value]]:
    p = Prog("sizes")
    x = p.param("x", 1, 16)
    return p, [p.einsum("ik,jk->ij", x, p.param(f"w{n}", n, 16)) for n in (10, 12)]


def transposed() -> tuple[Prog, list[Value]]:
    p = Prog("transposed")
    x = p.param("x", 8, 16)
    return p, [p.reduce("add", x, 0), p.reduce("add", x, 1)]


def mixed() -> tuple[Prog, list[Value]]:
    p = Prog("mixed")
    x, w = p.param("x", 4, 16), p.param("w", 8, 16)
    return p, [p.einsum("ik,jk->ij", x, w), p.reduce("add", x, 1)]


def unlike() -> tuple[Prog, list[Value]]:
    """Only a number is read by both."""
    p = Prog("unlike")
    x, y, s = p.param("x", 8), p.param("y", 8), p.param("s")
    return p, [p.map("mul", p.map("neg", x), s), p.map("mul", p.map("exp", y), s)]


def test_a_long_chain_of_neighbours_is_no_kernel_of_everything() -> None:
    """Each reads what the one before reads: pricing larger and larger kernels takes long."""
    p = Prog("neighbours")
    xs = [p.param(f"x{n}", 64) for n in range(80)]
    program = p.done(*(p.map("add", *pair) for pair in pairwise(xs)))
    for kernel in joined(program).kernels:
        assert 8 < len(kernel.params) + len(kernel.outs) <= MAX_BUFFERS
    check(to_loop(program), joined(program), draw(program), exact=True)


DECLINED = {chained: "one needs the other", transposed: "the outputs have no loop in common",
            different_sizes: "neither of the extents 10 and 12 divides the other",
            mixed: "only one of them is a contraction",
            unlike: "nothing is read along a common axis"}


@pytest.mark.parametrize("make", DECLINED, ids=lambda f: f.__name__)
def test_what_stays_apart_says_why(make: object) -> None:
    p, values = make()  # type: ignore[operator]
    with trace.listen() as events:
        assert outputs(p.done(*values)) == [1, 1]
    assert DECLINED[make] in {  # type: ignore[index]
        e.detail for e in events if (e.kind, e.place) == ("declined", "siblings")}


def test_what_a_check_waits_for_stays_apart() -> None:
    """Joined with it, an update of a parameter would come before the check."""
    def program(checked: bool) -> Func:
        p = Prog("counter")
        x = p.param("x", 4, dtype=I64, role="mutated")
        at = p.map("add", x, 1)
        if checked:
            p.b.add(Check(at, *map(size, (0, 9)), "IndexError", "out of range"))
        new = p.map("mul", x, 2)
        p.write(x, new)
        return p.done(at)

    assert outputs(program(checked=False)) == [2]
    assert outputs(program(checked=True)) == [1, 1]


def test_a_kernel_without_a_mapping_stays_apart() -> None:
    program = projections(64, 64)
    module = fuse(to_loop(program), price, price)

    def settle(kernel: Func) -> float | None:
        return None if len(kernel.outs) > 1 else 1.0

    assert launches(join_siblings(module, price, settle)) == launches(module)
    assert launches(join_siblings(module, price, price)) < launches(module)
