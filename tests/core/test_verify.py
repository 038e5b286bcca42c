"""The verifier: one wrong program for each rule, with the caret under the op at fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dumps import ALL, RELU_MM, RULES, SOFTMAX, VOCABULARIES, parse

from rung.core import origins
from rung.core import verify as verifier
from rung.core.errors import VerifyError
from rung.core.expr import sym
from rung.core.op import Block, Builder, Func, Value
from rung.core.ops import Cast, Const, Map
from rung.core.types import F32, I64, TensorType, VecType
from rung.core.verify import verify
from rung.kernel import ir as kernel
from rung.kernel.ir import verify_kernel_ir
from rung.loop.ir import Fold, Load, Store


def failure(func: Func, where: str = "") -> str:
    with pytest.raises(VerifyError) as caught:
        verify(func, VOCABULARIES[func.kind], RULES[func.kind], where)
    return str(caught.value)


def under_caret(report: str) -> str:
    """The text above the caret line."""
    lines = report.splitlines()
    at = next(n for n, line in enumerate(lines) if line.strip() and not line.strip(" ^"))
    start = lines[at].index("^")
    return lines[at - 1][start:start + lines[at].count("^")]


K = "kernel f(x: f32[4,4], n: i64[4]) -> y: f32[4]\n"
N = "kernel-ir f(x: f32[4,32], w: f32[32] mutated) -> y: f32[32]\n"
P = "program f(x: f32[4,4] input, n: i64[4] input, c: f32[4,4] mutated)\n"
STORE = "\n  y[i] = 1.0"

RING = N + """\
  a = alloc : l1 f32[2,4]
  ring k slots 2 of a
  roles
    role load
      for i in 0..8
        await k free step i
        transfer a at [i%2,0] from w at [4*i] box [4] valid [4] group k
        signal k full step i
    role math
      for i in 0..8
        await k full step i
        y[i] = a[i%2,0]
        signal k free step i
"""
TURNS = N + """\
  a = alloc : l1 f32[4]
  ring k slots 1 of a
  b = alloc : l1 f32[4]
  ring o slots 1 of b
  roles
    role load
      await k free step 0
      signal k full step 0
      await o full step 0
      signal o free step 0
    role math
      await o free step 0
      await k full step 0
      signal k free step 0
      signal o full step 0
      y[0] = 1.0
"""
OTHER = ("      signal k full step 0\n      await o full step 0\n",
         "      await o full step 0\n      signal k full step 0\n")


def ring(old: str, new: str) -> str:
    """RING with one thing wrong."""
    assert old in RING
    return RING.replace(old, new)


BAD = [
    # every function
    (P + "  return x\n  return x", "return x", "return ends the function"),
    (P + "  a = composite f(x) : f32[4,4]\n    yield x\n    yield x\n  return a", "yield x",
     "yield ends a nested block"),
    (P + "  yield x\n  return x", "yield x", "yield ends a nested block"),
    (P + "  a = call f(x) : f32[4]\n  write a <- a\n  return x", "write a <- a",
     "a is not a mutated parameter"),
    # Loop IR: ops
    (K + "  y[i] = x[i]", "x[i]", "x has 2 dimensions, not 1"),
    (K + "  y[i,i] = 1.0", "y[i,i] = 1.0", "y has 1 dimensions, not 2"),
    (K + "  y[i] = 1", "y[i] = 1", "stores i64 into f32[4]"),
    (K + "  y[i] = x[i,j]", "y[i] = x[i,j]", "the value varies over j, the subscripts do not"),
    (K + "  a = exp(x[i,j]) : f32 over i,j\n  m = fold max a over j 4 : f32 over i acc f32\n"
     "  y[i] = x[m,i]", "x[m,i]", "subscript m is f32 over i, not an integer"),
    (K + "  s = fold add n[i] over i 4 : f32 acc f32" + STORE,
     "s = fold add n[i] over i 4 : f32 acc f32", "is i64 over i, the accumulator f32"),
    (K + "  s = fold add x[i,i] over j 4 : f32 over i acc f32" + STORE,
     "s = fold add x[i,i] over j 4 : f32 over i acc f32", "no input varies over j"),
    (K + "  s = contract add mul x[i,j], x[i,j] over k 4 : f32 over i,j acc f32" + STORE,
     "s = contract add mul x[i,j], x[i,j] over k 4 : f32 over i,j acc f32",
     "no input varies over k"),
    (K + "  s = contract sub mul x[i,j], x[i,j] over j 4 : f32 over i acc f32" + STORE,
     "s = contract sub mul x[i,j], x[i,j] over j 4 : f32 over i acc f32",
     "no monoid is called 'sub'"),
    (K + "  s = contract add log x[i,j], x[i,j] over j 4 : f32 over i acc f32" + STORE,
     "s = contract add log x[i,j], x[i,j] over j 4 : f32 over i acc f32",
     "cannot contract by log"),
    (K + "  y[i] add= 1.0", "y[i] add= 1.0", "cannot combine by add into y, f32"),
    (K + "  y[i] last= 1.0", "y[i] last= 1.0", "cannot combine by last into y, f32"),
    (P + "  r = scatter x dim 0 at n <- x by sub : f32[4,4]\n  return r",
     "r = scatter x dim 0 at n <- x by sub", "no monoid is called 'sub'"),
    (K + "  s = scan add x[i,i] over j 4 : f32 over i acc f32" + STORE,
     "s = scan add x[i,i] over j 4 : f32 over i acc f32", "no input varies over j"),
    (K + "  s = scan sub x[j,i] over j 4 : f32 over j,i acc f32" + STORE,
     "s = scan sub x[j,i] over j 4 : f32 over j,i acc f32", "no monoid is called 'sub'"),
    (K + "  s = scan add n[j] over j 4 : f32 over j acc f32" + STORE,
     "s = scan add n[j] over j 4 : f32 over j acc f32", "is i64 over j, the accumulator f32"),
    (K + "  y[i] = f32(round_i64(x[i,i]))", "round_i64(x[i,i])", "only a cast to a float type"),
    # Loop IR: kernels
    (K + "  y[i] = 1.0\n  y[2*k] = 1.0", "y[2*k] = 1.0", "axis k has no extent"),
    (K + "  axes i 4, j 3\n  s = fold add x[i,j] over j 4 : f32 over i acc f32" + STORE,
     "s = fold add x[i,j] over j 4 : f32 over i acc f32", "j has extent 3, folded 4"),
    (K + "  y[i] = 1.0\n  n[i] = 1", "n[i] = 1", "n is neither an output nor a mutated parameter"),
    (K + "  a = exp(x[i,j]) : f32 over i,j\n  y[i] = a[i,i]", "a[i,i]", "not indexed memory"),
    # Kernel IR: ops
    (N + "  for i in 0..4\n    yield 1.0", "for i in 0..4", "yields f32, not nothing"),
    (N + "  a = for i in 0..4 carry b = 1.0 : f32\n    yield 1", "a = for i in 0..4 carry",
     "yields i64, not f32"),
    (N + "  a = if nonneg [1] : f32\n    yield 1.0", "a = if nonneg [1] : f32",
     "yields nothing, not f32"),
    (N + "  a = alloc : f32", "a = alloc : f32", "an allocation has one array type"),
    (N + "  a = fill 1.0 : f32[4]", "a = fill 1.0 : f32[4]", "a fill has one vector type"),
    (N + "  a = fill 1.0 : f32x4\n  b = combine sub a by lane : f32",
     "b = combine sub a by lane : f32", "no monoid is called 'sub'"),
    # Kernel IR: kernels
    (N + "  y[i] = 1.0", "y[i] = 1.0", "no axis or loop variable is called i here"),
    (N + "  for i in 0..4\n    y[i] = 1.0\n  y[i] = 1.0", "y[i] = 1.0",
     "no axis or loop variable is called i here"),
    (N + "  for i in 0..k\n    y[i] = 1.0", "for i in 0..k", "variable is called k here"),
    (N + "  for i in 0..4\n    for i in 0..4\n      y[i] = 1.0", "for i in 0..4",
     "loop variable i has the name of something else"),
    (N + "  for x in 0..4\n    y[0] = 1.0", "for x in 0..4", "loop variable x has the name"),
    (N + "  unroll r<4\n  for r in 0..4\n    y[r] = 1.0", "for r in 0..4", "loop variable r has"),
    (N + "  x[0,0] = 1.0\n  y[0] = 1.0", "x[0,0] = 1.0", "x is neither an output nor a mutated"),
    (N + "  y[lane] = 1.0", "y[lane] = 1.0", "is called lane here"),
    (N + "  unroll r<4\n  y[0] = x[r,0]", "y[0] = x[r,0]", "stores f32 over r<4 to fewer elements"),
    (N + "  a = fill 1.0 : f32x4\n  y[0 : 8] = a", "y[0 : 8] = a", "stores f32x4 to fewer"),
    (N + "  a = fill 1.0 : f32 over r<4\n  y[0] = 1.0", "a = fill 1.0 : f32 over r<4",
     "is unrolled unlike the kernel"),
    (N + "  b = alloc : l9 f32[4]\n  y[0] = 1.0", "b = alloc : l9 f32[4]", "l9 is no memory space"),
    (N + "  b = alloc : l1 f32[4]\n  a = if nonneg [1] : l1 f32[4]\n    yield b\n"
     "  else\n    yield b\n  y[0] = a[0]", "a[0]", "a is a value, not memory"),
    (N + "  barrier l9\n  y[0] = 1.0", "barrier l9", "l9 is no memory space here"),
    # Kernel IR: roles
    (ring("slots 2", "slots 0"), "ring k slots 0 of a", "a ring has a slot at least"),
    (ring("of a", "of w"), "ring k slots 2 of w", "w is no array"),
    (ring("slots 2", "slots 3"), "ring k slots 3 of a", "a is l1 f32[2,4], without 3 slots"),
    (ring("  roles\n", "  roles\n    barrier l1\n"), "roles", "a barrier among roles"),
    (ring("await k full", "await k half"), "await k half", "a ring has no token 'half'"),
    (ring("  roles\n", "  await k full step 0\n  roles\n"), "await k full", "only roles have"),
    (ring("    role math\n", "    role math\n      ring l slots 2 of a\n"), "ring l",
     "a ring inside of a role"),
    (N + "  role math\n    y[0] = 1.0", "role math", "a role outside of `roles`"),
    (ring("role math", "role load"), "role load", "two roles are called load"),
    (ring("await k free", "await l free"), "await l free", "there is no ring l"),
    (ring("        signal k full step i\n", ""), "ring k slots",
     "k full is signalled in 0 places, not one"),
    (ring("await k full step i\n", "await k full step i\n        await k full step i\n"),
     "await k full", "k full is awaited in 2 places, not one"),
    (ring("    role math\n      for i in 0..8\n", ""), "await k free",
     "k is filled and drained by one role"),
    (ring("        signal k full step i\n", "      for j in 0..8\n        signal k full step j\n"),
     "signal k full", "k changes hands in another block"),
    (ring("math\n      for i in 0..8", "math\n      for i in 0..7"), "await k full step i",
     "k is filled and drained in unlike loops"),
    (RING.replace("in 0..8", "in 0..8 cap 7"), "await k free step i", "in unlike loops"),
    (ring("await k free step i", "await k free step 2*i"), "await k free", "the step is i here"),
    (ring("        y[i] = a[i%2,0]\n        signal k free step i\n",
          "        signal k free step i\n        y[i] = a[i%2,0]\n"), "a[i%2,0]",
     "the slot of k is not held here: that is after `await k full`"),
    (ring("y[i] = a[i%2,0]", "y[i] = a[0,0]"), "a[0,0]", "the slot of k is i%2 here"),
    (ring("        y[i] =", "        if nonneg [i]\n          signal k full step i\n"
          "        y[i] ="),
     "signal k full", "a token under a condition"),
    (ring("  ring k slots 2 of a\n", "  ring k slots 2 of a\n  b = alloc : l1 f32[4]\n").replace(
        "y[i] =", "y[i] = b[0] +").replace("signal k full", "b[0] = 1.0\n        signal k full"),
     "b[0]", "b passes between roles without a ring"),
    (TURNS.replace(*OTHER), "await o full", "roles wait for each other without a token"),
    (RING.replace("  ring k slots 2 of a\n", "  ring k slots 2 of a\n  b = alloc : l1 f32[4]\n"
                  "  ring o slots 1 of b\n").replace(
        "    role math\n", "      await o free step 0\n      signal o full step 0\n    role math\n"
        "      await o full step 0\n      signal o free step 0\n"),
     "await o free", "roles wait for each other without a token"),
    # Program: ops
    (P + "  a = call f(x) effect bad : f32[4,4]\n  return a", "a = call f(x) effect bad",
     "no effect is called 'bad'"),
    (P + "  a = composite f(x) : f32[4]\n    yield x\n  return a", "a = composite f(x) : f32[4]",
     "the body yields other types than the call"),
    (P + "  write c <- n\n  return x", "write c <- n", "writes i64[4] into f32[4,4]"),
    (P + '  check n in 0..4 else Error "no"\n  return x', "check n in 0..4 else Error",
     "Error is none of IndexError, RuntimeError"),
    (P + "  r = scan sub x dim 0 : f32[4,4] acc f32\n  return r", "r = scan sub x dim 0",
     "no monoid is called 'sub'"),
    (P + "  r = scan add x dim 2 : f32[4,4] acc f32\n  return r", "r = scan add x dim 2",
     "dimension 2 of f32[4,4]"),
    (P + "  r = scan add n dim 0 : f32[4] acc f32\n  return r", "r = scan add n dim 0",
     "scans i64[4] with accumulator f32"),
    (P + "  r = reduce sub x over [0] : f32[4] acc f32\n  return r", "r = reduce sub x over [0]",
     "no monoid is called 'sub'"),
    (P + "  r = reduce add x over [0,0] : f32[4] acc f32\n  return r", "r = reduce add x over",
     "axes (0, 0) of f32[4,4]"),
    (P + "  r = reduce add n over [0] : f32[] acc f32\n  return r", "r = reduce add n over [0]",
     "reduces i64[4] with accumulator f32"),
    (P + "  r = index n [i] of [4] -> [k] : i64[4]\n  return r", "r = index n [i] of [4]",
     "k uses k, not an axis"),
    (P + "  r = index n [i,j] of [4] -> [i] : i64[4]\n  return r", "r = index n [i,j] of [4]",
     "2 axes for 1 sizes"),
    (P + "  r = index x [i] of [4] -> [i] : f32[4]\n  return r", "r = index x [i] of [4]",
     "1 subscripts into f32[4,4]"),
    (P + "  r = contract add mul n [i], n [i] -> [] : f32[] acc f32\n  return r",
     "r = contract add mul n [i], n [i] -> []", "operands i64[4], i64[4]; accumulator f32"),
    (P + "  r = gather x dim 2 at n : f32[4,4,4]\n  return r", "r = gather x dim 2",
     "dimension 2 of f32[4,4]"),
    (P + "  r = gather x dim 0 at x : f32[4,4,4]\n  return r", "r = gather x dim 0",
     "index x is f32[4,4], not an integer"),
    (P + "  r = scatter x dim 0 at n <- n : f32[4,4]\n  return r", "r = scatter x dim 0",
     "cannot write i64[4] into f32[4,4] dim 0"),
    (P + "  r = concat n, x dim 0 : i64[8]\n  return r", "r = concat n, x dim 0",
     "parts of different types"),
    # Program: programs
    (P + "  a = call f(x) : f32[4]", "a = call f(x) : f32[4]", "a program ends in `return`"),
    (P + '  write c <- x\n  check n in 0..4 else IndexError "no"\n  return x', "check n in 0..4",
     "a check stands before the first write to an argument"),
    (P + "  a = iota k : i64[k]\n  return a", "a = iota k : i64[k]", "k is no size"),
]


@pytest.mark.parametrize(("text", "line", "message"), BAD, ids=lambda x: x.split("\n")[-1][:40])
def test_rule(text: str, line: str, message: str) -> None:
    func = parse(text)
    with pytest.raises(VerifyError) as caught:
        verify(func, VOCABULARIES[func.kind], RULES_ON_CPU[func.kind])
    report = str(caught.value)
    assert message in report.splitlines()[0]
    assert under_caret(report).startswith(line), report


RULES_ON_CPU = RULES | {"kernel-ir": lambda func: verify_kernel_ir(func, ("l1", "l2"))}

HEADS = [
    ("kernel f(x: f32[4]) -> y: f32[4]", "output y is never stored"),
    ("kernel-ir f(x: f32[4]) -> y: f32[4]", "output y is never stored"),
    ("kernel f(i: f32[4]) -> y: f32[4]\n  axes i 4\n  y[0] = 1.0", "i is an axis and a value"),
    ("kernel f(n: index)", "parameter n is a size, call it s0, s1, ..."),
    ("kernel-ir f(n: index)", "parameter n is a size, call it s0, s1, ..."),
    ("kernel f(fold: f32[4])", "fold is a reserved word"),
    ("kernel-ir f(r: f32[4])\n  unroll r<2", "r is an unrolled axis and a value"),
    ("program f(x: f32[4] unknown)\n  return x", "x has role unknown, not one of"),
    ("program f(x: f32[4]) -> y: f32[4]\n  return x", "it has no output y"),
    ("program f(x: f32[4])", "a program ends in `return`"),
]


@pytest.mark.parametrize(("text", "message"), HEADS)
def test_rule_of_a_whole_function(text: str, message: str) -> None:
    report = failure(parse(text))
    assert message in report.splitlines()[0] and "^" not in report


# What text cannot say.

def build(ops: list[object], *params: Value) -> Func:
    y = Value("y", TensorType(F32, ()))
    store = Store(y, (), ops[-1].results[0])
    return VOCABULARIES["kernel"].finish(
        Func("kernel", "f", params, (y,), Block((), (*ops, store))))


def const(name: str, value: object = 1.0) -> Const:
    return Const(value, F32, results=(Value(name, VecType(F32)),))


def test_operands_are_defined_before() -> None:
    a = const("a")
    b = Map("exp", (a.result,), results=(Value("b", VecType(F32)),))
    report = failure(build([b, a]))
    assert report.splitlines()[0] == "a is not defined here"
    assert "exp(" in under_caret(report)


def test_operands_of_a_block_end_with_it() -> None:
    inner = Builder()
    value = inner.one(kernel.Fill(1.0, (VecType(F32),)))
    loop = kernel.For("i", sym("s0"), inner.block())
    y = Value("y", TensorType(F32, (sym("s0"),)))
    func = Func("kernel-ir", "f", (), (y,), Block((), (loop, kernel.Store(y, (sym("s0"),), value))))
    report = failure(func)
    assert f"{value.name} is not defined here" in report
    assert under_caret(report).startswith("y[s0] =")


def test_names_are_unique() -> None:
    one, other = (Cast(const("c").result, F32, results=(Value("a", VecType(F32)),)) for _ in "ab")
    c = const("c")
    one, other = (replace(op, x=c.result) for op in (one, other))
    sum_ = Map("add", (one.result, other.result), results=(Value("b", VecType(F32)),))
    report = failure(build([c, one, other, sum_]))
    assert report.splitlines()[0] == "two values are called a"
    assert under_caret(report) == "f32((1.0))"


def test_names_are_unique_across_blocks() -> None:
    text = ("kernel-ir f() -> y: f32[4]\n  for i in 0..4\n    a = fill 1.0 : f32\n    y[i] = a\n"
            "  for j in 0..4\n    a = fill 1.0 : f32\n    y[j] = a")
    assert "two values are called a" in failure(parse(text))


def test_types_are_those_inferred() -> None:
    c = const("c")
    wrong = Map("exp", (c.result,), results=(Value("b", VecType(I64)),))
    report = failure(build([c, wrong]))
    assert report.splitlines()[0] == "the result is f32, not i64"


@pytest.mark.parametrize("op", [
    Map("sine", (const("c").result,)), Map("add", (const("c").result,)),
    Fold("add", (), "i", sym("s0"), F32), Load(Value("x", VecType(F32)), (sym("i"),)),
])
def test_ops_that_have_no_type(op: object) -> None:
    made = replace(op, results=(Value("b", VecType(F32)),))
    known = [const("c")] if isinstance(op, Map) else []
    if known:
        made = replace(made, args=(known[0].result,))
    params = [op.buf] if isinstance(op, Load) else []
    assert "^" in failure(build([*known, made], *params))


def test_ops_of_other_rungs() -> None:
    fill = kernel.Fill(1.0, (VecType(F32),), results=(Value("a", VecType(F32)),))
    report = failure(build([fill]))
    assert report.splitlines()[0] == "a kernel has no Fill"
    assert under_caret(report) == "a = fill 1.0 : f32"


def test_functions_of_other_rungs() -> None:
    with pytest.raises(VerifyError, match="a kernel where a program is meant"):
        verify(parse(SOFTMAX), VOCABULARIES["program"])


# The report and the work it saves.

def test_report_names_pass_and_origins() -> None:
    func = parse(K + "  a = exp(x[i,j]) : f32 over i,j\n  y[i] = a")
    origins.record(func.body.ops[1].result, [
        origins.Origin("exp_3", "aten.exp.default", "model.py:12", "x.exp()")])
    assert failure(func, "fuse").splitlines() == [
        "after fuse: the value varies over j, the subscripts do not",
        "kernel f(x: f32[4,4], n: i64[4]) -> y: f32[4]",
        "  y[i] = exp(x[i,j])",
        "  ^^^^^^^^^^^^^^^^^^",
        "from aten.exp.default, node exp_3, model.py:12: x.exp()",
    ]


def test_unchanged_ops_stay_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    func = parse(RELU_MM)
    verify(func, VOCABULARIES["kernel"])
    seen = []
    check = verifier.check_op
    monkeypatch.setattr(verifier, "check_op", lambda op: (seen.append(op), check(op)))
    verify(func, VOCABULARIES["kernel"])
    assert not seen
    new = replace(func.body.last)
    verify(func.with_ops([*func.body.ops[:-1], new]), VOCABULARIES["kernel"])
    assert seen == [new]


def test_a_broken_op_is_not_remembered() -> None:
    func = parse(K + "  y[i] = x[i]")
    assert failure(func) == failure(func)


@pytest.mark.parametrize("text", [*ALL, RING, TURNS], ids=lambda text: text.split("(")[0])
def test_good_functions_pass(text: str) -> None:
    func = parse(text)
    verify(func, VOCABULARIES[func.kind], RULES[func.kind])
