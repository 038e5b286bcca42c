"""Passes on whole programs: reinplace, views, memory, outline."""

from __future__ import annotations

import random

import models
import pytest
from programs import Prog, check, draw, price

from rung.core.errors import VerifyError
from rung.core.expr import Expr
from rung.core.op import Func
from rung.core.parse import parse_module
from rung.core.types import I64
from rung.core.verify import verify
from rung.loop import ir as loop
from rung.loop.canonical import canonical
from rung.loop.fuse import fuse
from rung.program import ir as program_ir
from rung.program.ir import Check, Module
from rung.program.memory import ALIGN, Storage, place, plan
from rung.program.outline import inline_applies, outline
from rung.program.reinplace import reinplace
from rung.program.views import views
from rung.tensor.to_loop import to_loop

VOCABULARIES = {"program": program_ir.VOCABULARY, "kernel": loop.VOCABULARY}


def fused(*programs: Func) -> Module:
    return fuse(to_loop(*programs), price, price)


def finished(program: Func, ints: int = 16) -> Module:
    module = fused(program)
    done = canonical(views(reinplace(module)))
    check(module, done, draw(program, ints=ints), exact=False)
    return done


def keywords(module: Module) -> list[str]:
    return [op.keyword for op in module.main.body.ops]


def test_a_cache_is_updated_in_place() -> None:
    module = finished(models.rotate())
    assert keywords(module) == ["kernel", "return"]
    assert "in place cache" in str(module.main)


def test_no_copies_in_a_decoder() -> None:
    module = finished(models.transformer(2))
    assert set(keywords(module)) == {"kernel", "return"}
    assert not [k for k in module.kernels if k.name.startswith("copy")]


def test_a_pointwise_update_is_in_place_and_a_row_update_is_not() -> None:
    module = finished(models.momentum())
    text = str(module.main)
    assert "in place x" in text and "write s <-" in text and "write x" not in text


def _cache(later: str) -> Func:
    p = Prog()
    cache, at, src = p.param("c", 8, 4, role="mutated"), p.param("n", 2, dtype=I64), p.param(
        "s", 2, 4)
    new = p.scatter(cache, 0, at, src)
    out = p.map("exp", cache) if later == "old" else p.map("exp", new)
    p.write(cache, new)
    return p.done(out, *([new] if later == "returned" else []))


@pytest.mark.parametrize("later, in_place", [("new", True), ("returned", False)])
def test_updates_that_are_seen(later: str, in_place: bool) -> None:
    module = finished(_cache(later), 8)
    assert ("write" not in keywords(module)) == in_place


def test_the_old_value_is_never_lost() -> None:
    finished(_cache("old"), 8)


def test_an_input_is_not_overwritten() -> None:
    p = Prog()
    x, at, src = p.param("x", 8, 4), p.param("n", 2, dtype=I64), p.param("s", 2, 4)
    module = finished(p.done(p.scatter(x, 0, at, src)), 8)
    assert keywords(module) == ["kernel", "kernel", "return"]


def _checked(in_front: bool) -> Func:
    p = Prog()
    cache, n = p.param("c", 8, 4, role="mutated"), p.param("n", 2, dtype=I64)
    src = p.param("s", 2, 4, role="mutated")
    if not in_front:
        p.write(src, p.map("neg", src))
    new = p.scatter(cache, 0, n, src)
    p.b.add(Check(p.map("mul", n, 1), Expr.of(0), Expr.of(8), "IndexError", "out of range"))
    p.write(cache, new)
    return p.done()


def test_checks_come_before_updates() -> None:
    module = finished(_checked(True), 8)
    assert keywords(module) == ["kernel", "check", "kernel", "return"]  # i64 map, check, scatter
    assert "write" in keywords(finished(_checked(False), 8))


RESHAPE = """
program main(x: f32[4,6] input)
  t = kernel neg(x) : f32[4,6]
  u = kernel copy(t) : f32[24]
  v = kernel copy(x) : f32[24]
  return {}

kernel neg(x: f32[4,6]) -> y: f32[4,6]
  y[i,j] = neg(x[i,j])

kernel copy(x: f32[4,6]) -> y: f32[24]
  y[6*i + j] = x[i,j]
"""


@pytest.mark.parametrize("results, left", [
    ("u", ["kernel", "index", "index", "return"]),
    ("t, u", ["kernel", "kernel", "index", "return"]),  # results share no memory
    ("v", ["kernel", "index", "kernel", "return"])])  # nor do they with arguments
def test_a_reshape_is_a_view(results: str, left: list[str]) -> None:
    found = parse_module(RESHAPE.format(results), VOCABULARIES)
    programs = tuple(f for f in found if f.kind == "program")
    module = views(Module(programs, tuple(f for f in found if f.kind == "kernel")))
    assert keywords(module) == left
    made = plan(module.main)
    assert made.home[module.main.body.last.operands()[-1]].role == "output"


STRIDED = """
program main(x: f32[4,6])
  t = call aten.{} : f32[2,2,6] strides [12,1,2]
  u = kernel copy(t) : f32[2,6,2]
  return u

kernel copy(x: f32[2,2,6] strides [12,1,2]) -> y: f32[2,6,2]
  y[i,j,k] = x[i,k,j]
"""


@pytest.mark.parametrize("target, made", [
    ("neg.default(x)", "index"), ("view.default(x) as view", "kernel")])
def test_a_copy_in_the_order_of_strided_memory_is_a_view(target: str, made: str) -> None:
    """Not where a call gave a view of an argument, which no result may share."""
    program, copy = parse_module(STRIDED.format(target), VOCABULARIES)
    module = views(Module((program,), (copy,)))
    assert keywords(module) == ["call", made, "return"]
    program_ir.verify_program(module.main)


IN_PLACE = """
program main(x: f32[4,6] input)
  t = kernel neg(x) : f32[4,6]
  v = kernel flat(t) : f32[24]
  c = kernel same(t) : f32[4,6]
  d = kernel {}(c{}) in place c : f32[4,6]
  return {}

kernel neg(x: f32[4,6]) -> y: f32[4,6]
  y[i,j] = neg(x[i,j])

kernel same(x: f32[4,6]) -> y: f32[4,6]
  y[i,j] = x[i,j]

kernel flat(x: f32[4,6]) -> y: f32[24]
  y[6*i + j] = x[i,j]

kernel zero(x: f32[4,6] mutated)
  x[0,j] = 0.0

kernel turn(x: f32[4,6] mutated, v: f32[24])
  x[i,j] = v[23 - 6*i - j]
"""


@pytest.mark.parametrize("update, more, results, in_place", [
    ("zero", "", "d", True), ("zero", "", "d, v", False), ("turn", ", v", "d", False)])
def test_nothing_is_updated_under_a_view_that_is_read(
        update: str, more: str, results: str, in_place: bool) -> None:
    found = parse_module(IN_PLACE.format(update, more, results), VOCABULARIES)
    module = reinplace(views(Module(found[:1], found[1:])))
    assert ("in place t" in str(module.main)) is in_place


def test_what_a_call_reads_is_a_tensor_until_then() -> None:
    """Whatever the call makes of it holds its memory by itself."""
    (program,) = parse_module("""
program p(x: f32[64])
  t = kernel floor(x) : f32[64]
  u = call aten.neg.default(t) : f32[64]
  v = kernel floor(u) : f32[64]
  w = kernel floor(v) : f32[64]
  return w
""", VOCABULARIES)
    made = plan(program)
    homes = {v.name: s for v, s in made.home.items()}
    assert (homes["t"].offset, homes["t"].last) == (None, 1)
    assert homes["v"].offset == 0 and made.workspace == homes["v"].bytes.const_value


def test_the_plan_of_a_layer() -> None:
    made = plan(finished(models.transformer(2)).main)
    assert made.launches == 16
    assert made.workspace == made.peak == 448
    assert "storage kc_0     mutated  1024 B" in str(made)
    caches = [s for s in made.storages if s.role == "mutated"]
    assert all(len(s.values) == 2 for s in caches)


def test_symbolic_sizes_get_their_own_buffers() -> None:
    p = Prog()
    x, w = p.param("x", "s0", 8), p.param("w", 8, 8)
    h = p.map("relu", p.einsum("ik,kj->ij", x, w))
    program = p.done(p.einsum("ik,kj->ij", h, w))
    made = plan(canonical(fused(program)).main)
    temps = [s for s in made.storages if s.role == "temp"]
    assert [str(s.bytes) for s in temps] == ["32*s0"] and temps[0].offset is None


def test_placed_storages_do_not_overlap() -> None:
    rng = random.Random(0)
    for _ in range(50):
        storages = [Storage(f"t{n}", "temp", Expr.of(rng.randint(1, 5000)), (), a, a + rng.randint(
            0, 6)) for n in range(20) for a in [rng.randint(0, 20)]]
        offsets, top = place(storages)
        for n, a in enumerate(storages):
            end = offsets[a.name] + (a.bytes.const_value or 0)
            assert offsets[a.name] % ALIGN == 0 and end <= top
            for b in storages[:n]:
                if a.first <= b.last and b.first <= a.last:
                    start, size = offsets[b.name], b.bytes.const_value or 0
                    assert end <= start or start + size <= offsets[a.name]


@pytest.mark.parametrize("layers", [4, 8])
def test_outlining_changes_no_kernel(layers: int) -> None:
    program = models.transformer(layers)
    module = outline(program)
    assert len(module.programs) == 2 and len(module.programs[1].body.ops) < 100
    check(Module((program,)), module, draw(program, ints=16))
    short, whole = (canonical(views(reinplace(m))) for m in (
        inline_applies(fused(*module.programs)), fused(program)))
    assert sorted(map(str, short.kernels)) == sorted(map(str, whole.kernels))
    assert [getattr(op, "callee", "") for op in short.main.body.ops] == [
        getattr(op, "callee", "") for op in whole.main.body.ops]
    check(whole, short, draw(program, ints=16), exact=False)


def test_nothing_to_outline() -> None:
    program = models.mlp()
    assert outline(program).programs == (program,)


def test_a_layer_is_given_what_its_parameters_say() -> None:
    text = """program main(x: f32[4,8] input)
  y = apply layer0(x) : f32[4,8]
  return y

program layer0(x: f32[4,8] strides [1,4])
  return x
"""
    programs = parse_module(text, {"program": program_ir.VOCABULARY})
    with pytest.raises(VerifyError, match="layer0 is given x: "):
        program_ir.verify_calls(Module(programs))


LAYER = """
program main(x: f32[4] input)
  a, b, c = apply layer(x) : f32[4], f32[4], f32[4]
  d, e, f = apply layer(b) : f32[4], f32[4], f32[4]
  return a, b, c, d, e, f

program layer(x: f32[4] input)
  y = kernel neg(x) : f32[4]
  return y, y, x

kernel neg(x: f32[4]) -> y: f32[4]
  y[i] = neg(x[i])
"""


def test_a_layer_may_give_a_value_twice_or_what_it_was_given() -> None:
    found = parse_module(LAYER, VOCABULARIES)
    module = Module(tuple(found[:2]), tuple(found[2:]))
    inlined = inline_applies(module)
    verify(inlined.main, program_ir.VOCABULARY, program_ir.verify_program)
    assert keywords(inlined) == ["kernel", "kernel", "return"]
    check(module, inlined, draw(module.main))
