"""Rewriting: rules, substitution, dead code and common subexpressions keep what does not change."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from dumps import COLSUM, LAYER, RULES, SOFTMAX, VOCABULARIES, parse

from rung.core import origins
from rung.core.op import Builder, Func, Op, Value, walk
from rung.core.ops import Const, Map
from rung.core.rewrite import dead_code, is_pure, merge_equal, renamed, rewrite, substitute
from rung.core.types import F32
from rung.core.verify import verify

K = "kernel f(x: f32[4], z: f32[4]) -> y: f32[4]\n"


def checked(func: Func) -> Func:
    verify(func, VOCABULARIES[func.kind], RULES[func.kind])
    return func


def body(func: Func) -> list[str]:
    return str(func).splitlines()[1:]


def double_to_add(op: Op, b: Builder) -> Sequence[Value] | None:
    # x * 2 -> x + x
    b.one(Const(3.0, F32))  # what a rule that declines has built is dropped
    match op:
        case Map("mul", (x, two)) if two.name.startswith("const"):
            return [b.one(Map("add", (x, x)), "twice")]
    return None


def test_a_rule_replaces_an_op_everywhere() -> None:
    func = parse(K + "  a = x[i] * 2.0 : f32 over i\n  y[i] = (a + 1.0) * a")
    new = checked(rewrite(func, double_to_add))
    assert body(new) == ["  twice = x[i] + x[i] : f32 over i", "  y[i] = (twice + 1.0) * twice"]


def test_a_rule_reaches_into_blocks() -> None:
    func = parse("kernel-ir f(x: f32[4]) -> y: f32[4]\n  for i in 0..4\n    y[i] = x[i] * 2.0")
    new = checked(rewrite(func, double_to_add))
    assert body(new)[1:] == ["    load = x[i] : f32", "    y[i] = load + load"]


@pytest.mark.parametrize("text", [SOFTMAX, COLSUM, LAYER], ids=lambda t: t.split("(")[0])
def test_what_no_rule_changes_is_the_same_object(text: str) -> None:
    func = parse(text)
    assert rewrite(func, double_to_add) is func
    live = dead_code(func)
    assert dead_code(live) is live and (live is func or text == LAYER)
    assert all(a is b for a, b in zip(substitute(func.body.ops, {}), func.body.ops, strict=True))


def test_operands_of_later_ops_are_replaced_and_others_kept() -> None:
    func = parse(K + "  a = x[i] * 2.0 : f32 over i\n  b = exp(x[i]) : f32 over i\n"
                 "  y[i] = a + b")
    new = rewrite(func, double_to_add)
    kept = {id(op) for op in new.body.ops} & {id(op) for op in func.body.ops}
    assert any(isinstance(op, Map) and op.fn == "exp" and id(op) in kept for op in new.body.ops)


def test_origins_go_to_what_replaces_an_op() -> None:
    func = parse(K + "  a = x[i] * 2.0 : f32 over i\n  y[i] = a + a")
    origin = origins.Origin("mul", "aten.mul.Tensor")
    old = next(op for op in func.body.ops if isinstance(op, Map)).result
    origins.record(old, [origin])
    new = rewrite(func, double_to_add)
    twice = next(op.result for op in new.body.ops if isinstance(op, Map))
    assert origins.of(twice) == (origin,)


def test_substitute_in_blocks() -> None:
    func = parse("kernel-ir f(x: f32[4], z: f32[4]) -> y: f32[4]\n  for i in 0..4\n"
                 "    y[i] = x[i]\n  y[0] = 1.0")
    x, z = func.params
    new = substitute(func.body.ops, {x: z})
    assert "z[i]" in str(func.with_ops(new))
    assert new[-1] is func.body.ops[-1]


def test_dead_code_goes_and_stores_stay() -> None:
    func = parse(K + "  a = exp(x[i]) : f32 over i\n  b = exp(a) : f32 over i\n  y[i] = z[i]")
    assert body(checked(dead_code(func))) == ["  y[i] = z[i]"]


def test_loops_that_store_are_alive() -> None:
    func = parse(COLSUM)
    loop = next(op for op in func.body.ops if op.keyword == "for")
    assert not is_pure(loop)
    assert dead_code(func) is func


def test_dead_loops_go() -> None:
    func = parse("kernel-ir f(x: f32[4]) -> y: f32[4]\n  c = for i in 0..4 carry a = 0.0 : f32\n"
                 "    yield a + x[i]\n  y[0] = 1.0")
    assert body(checked(dead_code(func))) == ["  y[0] = 1.0"]


def test_effects_stay_without_readers() -> None:
    func = parse("program f(x: f32[4] input)\n  a = call rand() effect rng : f32[4]\n"
                 "  b = call relu(x) : f32[4]\n  return x")
    assert body(checked(dead_code(func))) == ["  a = call rand() effect rng : f32[4]", "  return x"]


def test_equal_ops_become_one() -> None:
    func = parse(K + "  a = exp(x[i]) : f32 over i\n  b = exp(x[i]) : f32 over i\n  y[i] = a + b")
    new = checked(merge_equal(func))
    assert body(new) == ["  a = exp(x[i]) : f32 over i", "  y[i] = a + a"]
    assert merge_equal(new) is new


def test_two_values_that_are_apart_do_not_become_the_same_third() -> None:
    func = parse("program f(x: f32[4] input)\n  a = call relu(x) : f32[4]\n"
                 "  b = call relu(x) : f32[4]\n  c = call relu(x) : f32[4]\n  return b, c")
    new = checked(merge_equal(func, apart=func.body.last.operands()))
    assert body(new)[-1] == "  return a, c"


@pytest.mark.parametrize(("left", "right"), [
    ("0.0", "-0.0"), ("f32(1)", "1.0"), ("f32(true)", "f32(1)"), ("x[i]", "z[i]"),
    ("x[i | i-1]", "x[i | i-1 else 1.0]"), ("x[i]", "x[i | i-1]"),
])
def test_unequal_ops_stay_apart(left: str, right: str) -> None:
    func = parse(K + f"  y[i] = exp({left}) + exp({right})")
    assert str(merge_equal(func)) == str(func)
    exps = [op for op in merge_equal(func).body.ops if isinstance(op, Map) and op.fn == "exp"]
    assert len(exps) == 2


def test_only_pure_ops_are_merged() -> None:
    func = parse("program f(x: f32[4] input)\n  a = call rand(x) effect rng : f32[4]\n"
                 "  b = call rand(x) effect rng : f32[4]\n  c = call relu(x) : f32[4]\n"
                 "  d = call relu(x) : f32[4]\n  return a, b, c, d")
    assert body(checked(merge_equal(func)))[-1] == "  return a, b, c, c"


def test_loads_are_not_merged_across_a_store_that_they_see() -> None:
    func = parse("kernel-ir f() -> y: f32[4]\n  y[0] = 1.0\n  a = y[0] + 1.0 : f32\n  y[0] = a\n"
                 "  y[1] = y[0]")
    assert str(merge_equal(func)) == str(func)


def test_origins_of_merged_ops_meet() -> None:
    func = parse(K + "  a = exp(x[i]) : f32 over i\n  b = exp(x[i]) : f32 over i\n  y[i] = a + b")
    a, b = (op.result for op in func.body.ops if isinstance(op, Map) and op.fn == "exp")
    origins.record(a, [origins.Origin("e1", "exp")])
    origins.record(b, [origins.Origin("e2", "exp")])
    merge_equal(func)
    assert [o.node for o in origins.of(a)] == ["e1", "e2"]


def test_renamed() -> None:
    value = next(walk(parse(SOFTMAX).body)).result
    assert renamed(value, "q").name == "q" and renamed(value, "q").type == value.type
