"""In whose memory the values of a program lie, and how they came there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import check, draw

from rung.core.op import Func
from rung.core.parse import parse_module
from rung.loop import ir as loop
from rung.program import ir as program_ir
from rung.program.ir import Module
from rung.program.reinplace import reinplace
from rung.program.storage import CALLS, CERTAIN, HOWS, RESHAPE, UPDATE, VIEW, Aliases, leaving
from rung.program.views import views
from rung.tensor.simplify import simplify

VOCABULARIES = {"program": program_ir.VOCABULARY, "kernel": loop.VOCABULARY}

ALL = """
program main(x: f32[4,6] input, i: i64[2] input)
  t = kernel neg(x) : f32[4,6]
  flat = index t [i] of [24] -> [i//6,i%6] : f32[24]
  back = index flat [i,j] of [4,6] -> [6*i + j] : f32[4,6]
  turned = index t [i,j] of [6,4] -> [j,i] : f32[6,4]
  column = call aten.select.int(back, 1, 3) as view : f32[4] strides [6]
  a, b = call aten.split.Tensor(turned, 3) as view : f32[3,4], f32[3,4]
  new = kernel fill(i, back) in place back : f32[4,6]
  state, told = call mine.update.default(i) in place new : f32[4,6], f32[4]
  copied = call copy(state) as copy : f32[4,6]
  empty = call empty([4], [1], f32) as unwritten : f32[4]
  other = call mine.head.default(column, 2, copied) : f32[4]
  p, q = apply layer(told, other) : f32[4], f32[4]
  n = call aten.item.default(told) : index
  return p, b
"""

TABLE = """
flat reshape of t
back reshape of flat
column view of back
a view of turned
b view of turned
new update of back
state update of new
other unknown of column copied
p unknown of other told
q unknown of other told
n unknown of told
"""


def program(text: str) -> Func:
    (found,) = parse_module(text, VOCABULARIES)
    return found


def module(text: str) -> Module:
    found = parse_module(text, VOCABULARIES)
    return Module(tuple(f for f in found if f.kind == "program"),
                  tuple(f for f in found if f.kind == "kernel"))


def names(values: Any) -> str:
    return " ".join(sorted(v.name for v in values))


def test_every_kind_of_op() -> None:
    links = Aliases(program(ALL).body.ops).links
    assert "\n".join(f"{value.name} {link.how} of {names(link.sources)}"
                     for value, link in links.items()) == TABLE.strip()
    assert {link.how for link in links.values()} == set(HOWS)


@pytest.mark.parametrize("hows, value, root", [
    (CERTAIN, "state", "t"), (CERTAIN, "column", "t"), (CERTAIN, "turned", "turned"),
    (CERTAIN, "b", "turned"), (CERTAIN, "copied", "copied"), (CERTAIN, "told", "told"),
    (CERTAIN, "other", "other"), (CERTAIN, "p", "p"),
    ((UPDATE,), "state", "back"), ((RESHAPE, UPDATE), "state", "t"), ((VIEW,), "column", "back")])
def test_roots(hows: tuple[str, ...], value: str, root: str) -> None:
    ops = program(ALL).body.ops
    (found,) = (r for op in ops for r in op.results if r.name == value)
    assert Aliases(ops, hows).root(found).name == Aliases(ops).root(found, hows).name == root


def test_what_may_lie_in_what() -> None:
    func = program(ALL)
    aliases, made = Aliases(func.body.ops), {r.name: r for op in func.body.ops for r in op.results}
    assert names(aliases.within([made["t"]])) == "back column flat new other p q state t"
    assert names(aliases.behind([made["other"]])) == "back column copied flat other t"
    assert names(leaving(func)) == "b back column copied other p told turned"
    assert leaving(func, HOWS) - leaving(func, CALLS) == {made["t"], made["flat"]}


def test_a_call_shares_memory_with_any_operand_and_a_copy_with_none() -> None:
    """`x * 1` must not become `x` where a result may be a view of it, be it the second operand or
    given through a layer; a copy is no view."""
    text = """
program main(x: f32[4] input)
  one = full 1.0 [4] f32 : f32[4]
  u = x * one : f32[4]
  v = x * one : f32[4]
  w = x * one : f32[4]
  a = call mine.second.default(x, u) : f32[4]
  b = apply layer(v) : f32[4]
  c = call copy(w) as copy : f32[4]
  return a, b, c
"""
    done = str(simplify(program(text)))
    assert "default(x, x)" not in done and "layer(x)" not in done and "copy(x)" in done


LAYER = """
program layer(x: f32[4])
  one = full 1.0 [4] f32 : f32[4]
  u = x * one : f32[4]
  y = exp(x) : f32[4]
  return u, y
"""


def test_a_result_of_a_layer_is_not_what_it_was_given() -> None:
    assert "return x, y" not in str(simplify(program(LAYER)))


def repeated(x: torch.Tensor, ws: list[torch.Tensor]) -> list[torch.Tensor]:
    out = []
    for w in ws:
        out.append(x * 1.0)
        h = torch.tanh(x @ w)
        h = torch.cos(torch.sin(h) + h) * h
        x = torch.tanh(torch.exp(h) - h) * x.mean() + x
        out.append(x)
    return out


def test_results_of_repeated_layers_share_no_memory() -> None:
    x, ws = torch.randn(4, 4), [torch.randn(4, 4) for _ in range(6)]
    found = torch.compile(repeated, backend="rung")(x, ws)
    assert len({y.data_ptr() for y in (x, *found)}) == 13
    torch.testing.assert_close(found, repeated(x, ws))


UNDER_A_VIEW = """
program main(x: f32[4,6] input)
  t = kernel neg(x) : f32[4,6]
  v = index t [i] of [24] -> [i//6,i%6] : f32[24]
  c = kernel same(v) : f32[24]
  d = kernel turn(c, t) in place c : f32[24]
  return d

kernel neg(x: f32[4,6]) -> y: f32[4,6]
  y[i,j] = neg(x[i,j])

kernel same(x: f32[24]) -> y: f32[24]
  y[i] = x[i]

kernel turn(x: f32[24] mutated, t: f32[4,6])
  axes i 4, j 6
  x[6*i + j] = t[3-i,j]
"""


def test_a_copy_of_a_view_stays_where_the_kernel_reads_what_is_viewed() -> None:
    given = module(UNDER_A_VIEW)
    done = reinplace(given)
    assert "in place c" in str(done.main)
    check(given, done, draw(given.main))


TWICE = """
program main(c: f32[8,4] mutated, i: i64[2] input, v: f32[2,4] input)
  old = kernel same(c) : f32[8,4]
  new = kernel put(i, v, old) in place old : f32[8,4]
  last = kernel {}(new) : f32[8,4]
  {}
  write c <- last
  return {}

kernel same(x: f32[8,4]) -> y: f32[8,4]
  y[i,j] = x[i,j]

kernel put(n: i64[2], v: f32[2,4], x: f32[8,4] mutated)
  x[n[k],j] = v[k,j]

kernel half(x: f32[8,4]) -> y: f32[8,4]
  y[i,j] = x[i,j] * 0.5

kernel turn(x: f32[8,4]) -> y: f32[8,4]
  axes i 8, j 4
  y[i,j] = x[7-i,j]
"""


@pytest.mark.parametrize("kernel, more, results, in_place", [
    ("half", "", "", True), ("turn", "", "", False),
    ("half", "more = kernel turn(new) : f32[8,4]", "more", False)])
def test_an_argument_that_is_updated_twice(
        kernel: str, more: str, results: str, in_place: bool) -> None:
    """The second kernel reads the argument's memory under the name of its first new state."""
    done = reinplace(views(module(TWICE.format(kernel, more, results))))
    text = str(done.main)
    assert "put(i, v, c) in place c" in text
    assert ("in place new" in text, "write c" in text) == (in_place, not in_place)


def turned(c: torch.Tensor, at: torch.Tensor, row: torch.Tensor) -> None:
    c.index_put_((at,), row)
    c.copy_(c.flip(0) * 0.5)


def halved(c: torch.Tensor, at: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    c.index_put_((at,), row)
    before = c.clone()
    c.mul_(0.5)
    return before.flip(0) + 1


@pytest.mark.parametrize("fn", [turned, halved])
def test_rows_put_into_an_argument_that_is_then_written(fn: Callable[..., Any]) -> None:
    at, row = torch.tensor([1, 3]), torch.randn(2, 4)
    ours = torch.randn(8, 4)
    eager = ours.clone()
    torch.testing.assert_close(torch.compile(fn, backend="rung")(ours, at, row),
                               fn(eager, at, row))
    torch.testing.assert_close(ours, eager)
