"""Printer and parser: text is an interface, whatever prints parses back to the same text."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from dumps import (
    ALL,
    COLSUM,
    LAYER,
    RELU_MM,
    RELU_MM_MAP,
    RULES,
    SOFTMAX,
    VOCABULARIES,
    parse,
    random_kernel,
)

from rung.core.errors import ParseError, VerifyError
from rung.core.lexer import CONSTANTS, TOKEN
from rung.core.op import RESERVED, Builder, Func, Value, walk
from rung.core.ops import Cast, Const, Map
from rung.core.parse import parse_module
from rung.core.text import print_func
from rung.core.types import BF16, BOOL, DTYPES, F32, F64, I8, I64, TensorType
from rung.core.verify import verify
from rung.loop.ir import Store, run_kernel


@pytest.mark.parametrize("text", ALL, ids=lambda text: text.split("(")[0])
def test_round_trip(text: str) -> None:
    func = parse(text)
    verify(func, VOCABULARIES[func.kind], RULES[func.kind])
    assert str(parse(str(func))) == str(func)


@pytest.mark.parametrize("text", [RELU_MM, RELU_MM + "\n" + RELU_MM_MAP, SOFTMAX, COLSUM, LAYER],
                         ids=lambda text: text.split("(")[0])
def test_dumps_print_as_they_were_written(text: str) -> None:
    assert str(parse(text)) == text


@pytest.mark.parametrize("seed", range(150))
def test_round_trip_of_random_kernels(seed: int) -> None:
    func = parse(random_kernel(seed))
    verify(func, VOCABULARIES["kernel"], RULES["kernel"])
    again = parse(str(func))
    assert str(again) == str(func)
    rng = np.random.default_rng(seed)
    arrays = {v.name: rng.standard_normal([s.const_value for s in v.type.shape]).astype(np.float32)
              for v in (*func.params, *func.outs)}
    other = {name: array.copy() for name, array in arrays.items()}
    run_kernel(func, arrays)
    run_kernel(again, other)
    np.testing.assert_array_equal(arrays["y"], other["y"])


def test_layout_and_comments_do_not_matter() -> None:
    spaced = SOFTMAX.replace("\n", "  # note: m = 1\n\n").replace(" : ", "  :  ")
    assert str(parse("\n\n# a kernel\n" + spaced)) == SOFTMAX


def test_functions_of_a_module_are_apart() -> None:
    both = parse_module(f"{RELU_MM}\n\n{SOFTMAX}\n", VOCABULARIES)
    assert [str(f) for f in both] == [RELU_MM, SOFTMAX]


def test_relu_mm_runs() -> None:
    rng = np.random.default_rng(0)
    x, bias, w = (rng.standard_normal(s).astype(np.float32) for s in ((504, 512), 512, (512, 512)))
    y = np.empty((504, 512), np.float32)
    run_kernel(parse(RELU_MM), {"x": x, "bias": bias, "w": w, "y": y})
    np.testing.assert_allclose(y, np.maximum((x + bias) @ w, 0), rtol=1e-4, atol=1e-4)


def test_softmax_runs() -> None:
    x = np.random.default_rng(0).standard_normal((512, 2048)).astype(np.float32)
    y = np.empty_like(x)
    run_kernel(parse(SOFTMAX), {"x": x, "y": y})
    wide = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    np.testing.assert_allclose(y, wide / wide.sum(1, keepdims=True), rtol=1e-5)


def kernel_of(build: Builder, value: Value) -> Func:
    y = Value("y", TensorType(value.type.dtype, ()))
    build.add(Store(y, (), value))
    return VOCABULARIES["kernel"].finish(Func("kernel", "f", (), (y,), build.block()))


NUMBERS = [(1.0, F32), (-0.0, F32), (1, I64), (1, F32), (True, BOOL), (False, BOOL), (1.5, F64),
           (math.inf, F32), (-math.inf, F64), (math.nan, F32), (1e-30, F32), (-7, I8), (3e38, BF16),
           (-(2**63), I64), (1e300, F64)]


@pytest.mark.parametrize(("value", "dtype"), NUMBERS)
def test_constants_come_back_as_they_were(value: float, dtype: object) -> None:
    build = Builder()
    func = kernel_of(build, build.one(Const(value, dtype)))
    const = parse(str(func)).body.ops[0]
    assert isinstance(const, Const)
    assert (type(const.value), repr(const.value), const.dtype) == (type(value), repr(value), dtype)


@pytest.mark.parametrize("implicit", [False, True])
def test_the_cast_of_a_constant_is_no_constant(implicit: bool) -> None:
    build = Builder()
    func = kernel_of(build, build.one(Cast(build.one(Const(0.1, F32)), BF16, implicit)))
    const, cast, _ = parse(str(func)).body.ops
    assert const.value == 0.1 and const.dtype == F32
    assert cast.implicit == implicit and cast.dtype == BF16


@pytest.mark.parametrize("value", [1.0, -1.0])
def test_the_cast_of_a_sum_that_begins_with_a_number(value: float) -> None:
    build = Builder()
    less = build.one(Map("sub", (build.one(Const(value, F32)), build.one(Const(0.1, F32)))))
    func = kernel_of(build, build.one(Cast(less, BF16)))
    assert str(parse(str(func))) == str(func)
    assert isinstance(parse(str(func)).body.ops[-2], Cast)


def test_infix_keeps_its_order() -> None:
    for left, right in [("sub", "sub"), ("sub", "add"), ("div", "mul"), ("mul", "add"),
                        ("add", "mul"), ("mul", "div")]:
        build = Builder()
        a, b, c = (build.one(Const(float(n), F32)) for n in range(3))
        for value in (build.one(Map(left, (build.one(Map(right, (a, b))), c))),
                      build.one(Map(left, (a, build.one(Map(right, (b, c))))))):
            func = kernel_of(Builder(), value)
            func = func.with_ops([*build.ops, *func.body.ops])
            tree = parse(str(func)).body.ops
            assert [op.fn for op in tree if isinstance(op, Map)][-1] == left, str(func)
            assert str(parse(str(func))) == str(func)


def test_hidden_operations_never_take_a_printed_name() -> None:
    func = parse("kernel f(x: f32[4]) -> y: f32[4]\n  load = exp(x[i]) : f32 over i\n"
                 "  map = exp(load + 1.0) : f32 over i\n  y[i] = map * load")
    names = [v.name for op in walk(func.body) for v in op.results]
    assert len(names) == len(set(names))


def test_notes_are_comments() -> None:
    text = print_func(parse(SOFTMAX), lambda op: "here" if op.keyword == "fold" else "")
    assert text.splitlines()[1].endswith("f32 over i acc f32  # here")
    assert str(parse(text)) == SOFTMAX


def test_all_keywords_are_reserved() -> None:
    ops = [op for v in VOCABULARIES.values() for op in v.ops if op.form]
    keywords = {form.split()[0] for op in ops for form in (op.form, *(f for f, _ in op.forms))}
    assert {op.keyword for op in ops} <= keywords
    keywords |= {name for v in VOCABULARIES.values() for name, _ in v.attrs}
    assert keywords | DTYPES.keys() | CONSTANTS.keys() <= RESERVED


K = "kernel f(x: f32[4,4]) -> y: f32[4]\n"
P = "program f(x: f32[4] input)\n"
BAD = [
    ("", "x = 1", 1, 1, "expected a new kernel, kernel-ir, program"),
    ("", "  kernel f()", 1, 3, "expected a new"),
    ("", "kernel f(x f32)", 1, 12, "expected :, not f32"),
    ("", "kernel f(x: g32)", 1, 13, "no type is called g32"),
    ("", "kernel f(x: f32[4)", 1, 18, "expected ], not )"),
    ("", "kernel f(x: f32, x: f32)", 1, 24, "x is defined twice"),
    ("", "kernel f(x: f32) -> 3", 1, 21, "expected a name"),
    ("", "kernel f(x: l1 f32[s0])", 1, 22, "an array has constant sizes"),
    ("", "kernel f(x: f32x4 over r)", 1, 24, "has a count"),
    ("", "map f on cpu", 1, 1, "the mapping of a kernel above"),
    ("", SOFTMAX + "\n\n" + SOFTMAX, 7, 1, "expected a new"),
    ("", RELU_MM + "\n\nmap relu_mm on cpu\n  k l3", 7, 1, "not a statement of a mapping"),
    (K, "  y[i] = $", 2, 10, "unexpected '$'"),
    (K, "  y[i] = x[i,j", 2, 15, "expected ], not end of line"),
    (K, "  y[i] = x[i,1//0]", 2, 17, "not positive"),
    (K, "  y[i] = z[i]", 2, 10, "no value is called z"),
    (K, "  y[i] = (1.0", 2, 14, "expected ), not end of line"),
    (K, "  y[i] = sine(x[i,i])", 2, 3, "no scalar function is called 'sine'"),
    (K, "  y[i] = 1.0 1.0", 2, 14, "expected end of line, not 1.0"),
    (K, "  a = exp(x[i,j]) : f32 over i", 2, 30, "the type is f32 over i,j, not f32 over i"),
    (K, "  a = x[i,j] + 1 : f32 over i,j", 2, 3, "operands of one type"),
    (K, "  a, b = exp(x[i,j]) : f32", 2, 22, "names the one result"),
    (K, "  exp(x[i,j])", 2, 14, "names the one result"),
    (K, "  a = fold add x[i,j] over j 4 : f32 over j acc f32", 2, 3, "gives f32 over i, the text"),
    (K, "  a = fold sum x[i,j] over j 4 : f32 over i acc f32", 2, 3, "no carrier is called 'sum'"),
    (K, "  a = fold add x[i,j] over 4 : f32 over i acc f32", 2, 28, "expected a name, not 4"),
    (K, "  a = fold add x[i,j] over j 4 : f32 over i acc f3", 2, 49, "no dtype is called f3"),
    (K, "  axes i\n  y[i] = 1.0", 2, 9, "expected a number, a symbol"),
    (K, "    y[i] = 1.0\n  y[i] = 1.0", 3, 1, "unexpected"),
    (K, "  y[i] = 1.0\n    y[i] = 1.0", 3, 5, "expected a"),
    (K, "  for k in 0..4", 2, 3, "no value is called for"),
    (P, "  a = x[i] : f32", 2, 8, "names the one result"),
    (P, "  y[i] = x", 2, 3, "no value is called y"),
    (P, "  a = full x [4] f32 : f32[4]", 2, 12, "expected a num, not x"),
    (P, "  a = reduce add x over [1.5] : f32[4] acc f32", 2, 26, "expected an integer, not 1.5"),
    (P, '  a = call "f\\q"(x) : f32[4]', 2, 12, "unexpected '\"'"),
]


@pytest.mark.parametrize(("head", "text", "line", "column", "message"), BAD)
def test_parse_errors(head: str, text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse(head + text)
    assert (caught.value.line, caught.value.column) == (line, column), caught.value
    assert message in str(caught.value)


def mutant(text: str, rng: random.Random) -> str:
    """`text` with a token deleted, doubled, swapped with the next, or replaced by any other."""
    spans = [m.span() for m in TOKEN.finditer(text) if m.lastgroup not in ("space", "indent")]
    (a, b), (c, d) = rng.choice(list(pairwise(spans)))
    other = text[slice(*rng.choice(spans))]
    first, second = text[a:b], text[c:d]
    pair = rng.choice([("", second), (first, f"{second} {second}"), (second, first),
                       (other, second), (first, other)])
    return text[:a] + pair[0] + text[b:c] + pair[1] + text[d:]


@pytest.mark.parametrize("text", ALL, ids=lambda text: text.split("(")[0])
def test_mutants_fail_cleanly_or_are_valid(text: str) -> None:
    rng = random.Random(text)
    for n in range(120):
        bad = mutant(text, rng)
        for _ in range(n % 3):
            bad = mutant(bad, rng)
        try:
            func = parse(bad)
            verify(func, VOCABULARIES[func.kind], RULES[func.kind])
        except (ParseError, VerifyError):
            continue
        assert str(parse(str(func))) == str(func), bad
