"""Expressions against brute force: every rule must keep the value for all small integers."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import re
import sys
from types import FrameType

import numpy as np
import pytest

from rung.core import ranges
from rung.core.errors import ParseError
from rung.core.expr import (
    Bounds,
    Expr,
    Mod,
    is_size,
    parse_expr,
    sym,
    to_source,
)
from rung.core.ranges import prove_eq, prove_nonneg

NAMES = ("i", "j", "k0", "s1")
Env = dict[str, int]
i, j, s0, s1 = map(sym, ("i", "j", "s0", "s1"))
AXES: Bounds = {"i": (0, s0 - 1), "j": (0, s1 - 1), "s0": (1, None), "h": (0, 63), "d": (0, 3)}


def random_text(rng: random.Random, depth: int = 3, minus: bool = True) -> str:
    """An expression as Python text, so that `eval` is the independent meaning."""
    if depth == 0 or rng.random() < 0.15:
        return rng.choice([*NAMES, *NAMES, str(rng.randint(0, 9))])
    a = random_text(rng, depth - 1, minus)
    match rng.choice("+-*/%" if minus else "++*/%"):
        case "*":
            return f"({a})*{rng.randint(-3 if minus else 1, 6)}"
        case "/":
            return f"({a})//{rng.choice([2, 3, 4, 6, 8])}"
        case "%":
            return f"({a})%{rng.choice([2, 3, 4, 6, 8])}"
        case op:
            return f"({a}){op}({random_text(rng, depth - 1, minus)})"


def random_symbolic(rng: random.Random) -> str:
    """Divisions by s1, which stays positive, and products of symbols."""
    parts = [
        rng.choice(["i*s1", "j*s1", "i", "j", "k0*i", "2*s1", "s1-1", "3*i*s1", "j%s1", "i//s1"])
    ]
    parts += rng.choices(["i*s1", "-j", "j", "k0", "s1", "i*(s1+1)", "(j//s1)*s1", "j%(2*s1)",
                          "(-j)%s1+j", "j%2+j", "i*s1-s1*(i%4)"], k=2)
    den = rng.choice(["s1", "(2*s1)", "(s1+1)", "(3*s1)", "(s1*s1)"])
    op, tail = rng.choice(["//", "%"]), rng.choice(["", "*3", f"%{rng.randint(2, 5)}", "//2"])
    return f"((({'+'.join(parts)}){op}{den}){tail})+{rng.choice(['i', 'j%s1', 's1*(j//s1)'])}"


def random_bounds(rng: random.Random) -> dict[str, tuple[int, int]]:
    lows = {n: rng.choice([-3, 0, 0, 1]) if n != "s1" else rng.randint(1, 3) for n in NAMES}
    return {n: (lo, lo + rng.randint(0, 4)) for n, lo in lows.items()}


def points(bounds: dict[str, tuple[int, int]]) -> list[Env]:
    ranges = [range(lo, hi + 1) for lo, hi in bounds.values()]
    return [dict(zip(bounds, p, strict=True)) for p in itertools.product(*ranges)]


def cases(count: int, seed: int) -> list[tuple[str, dict[str, tuple[int, int]]]]:
    rng = random.Random(seed)
    make = (random_text, random_symbolic)
    return [(make[n % 3 == 0](rng), random_bounds(rng)) for n in range(count)]


@pytest.mark.parametrize("seed", range(8))
def test_brute_force(seed: int) -> None:
    for text, bounds in cases(60, seed):
        e = parse_expr(text)
        simple, (lo, hi) = e.simplify(bounds), e.range(bounds)
        envs = points(bounds)
        want = [eval(text, {}, env) for env in envs]
        assert parse_expr(str(e)) is e, text
        assert parse_expr(str(simple)) is simple, text
        assert simple.simplify(bounds) is simple, text
        assert want == [e.evaluate(env) for env in envs], (text, e)
        assert want == [simple.evaluate(env) for env in envs], (text, simple, bounds)
        assert (lo is None or lo <= min(want)) and (hi is None or hi >= max(want)), (text, bounds)
        assert not prove_nonneg(e, bounds) or min(want) >= 0, (text, bounds)
        assert not prove_nonneg(2 - e, bounds) or max(want) < 3, (text, bounds)
        assert e.symbols() <= set(NAMES)


@pytest.mark.parametrize("seed", range(4))
def test_subs_and_coefficient(seed: int) -> None:
    rng = random.Random(seed)
    for text, bounds in cases(60, 100 + seed):
        e, part = parse_expr(text), parse_expr(random_text(rng, 2))
        replaced, coef = e.subs({"i": part, "j": sym("i")}), e.coefficient("i")
        for env in rng.sample(points(bounds), k=min(20, len(points(bounds)))):
            inner = {**env, "i": part.evaluate(env), "j": env["i"]}
            assert replaced.evaluate(env) == eval(text, {}, inner), (text, part)
            assert e.without("i").evaluate(env) == eval(text, {}, {**env, "i": 0})
            if coef is not None:
                split = coef * sym("i") + e.without("i")
                assert split.evaluate(env) == e.evaluate(env), (text, coef)


@pytest.mark.parametrize("seed", range(4))
def test_symbolic_bounds(seed: int) -> None:
    """Proofs and simplification where axes end at sizes."""
    rng = random.Random(seed)
    parts = ("i*s1", "j", "s0", "s1", "s0*s1", "i", "j%s1", "i//2", "(s0+3)//4", "i*s1//s0")
    sizes: Bounds = {**AXES, "s1": (1, None)}
    ranges = [
        (a, b, c, d) for a in range(1, 6) for b in range(1, 6) for c in range(a) for d in range(b)
    ]
    envs = [dict(zip(("s0", "s1", "i", "j"), p, strict=True)) for p in ranges]
    proved = 0
    for _ in range(150):
        terms = [f"{rng.choice([-2, -1, 1, 2])}*({p})" for p in rng.sample(parts, k=3)]
        text = "+".join([*terms, str(rng.randint(-2, 2))])
        whole = (
            parse_expr(f"({text})//s1+({text})%(s0*s1)") if rng.random() < 0.5 else parse_expr(text)
        )
        simple = whole.simplify(sizes)
        lo, hi = whole.range(sizes)
        got = [whole.evaluate(env) for env in envs]
        assert got == [simple.evaluate(env) for env in envs], (whole, simple)
        assert (lo is None or lo <= min(got)) and (hi is None or hi >= max(got)), whole
        proved += prove_nonneg(whole, sizes)
        assert not prove_nonneg(whole, sizes) or min(got) >= 0, whole
    assert proved > 3


class C(int):
    """An integer with C's division, to run the text of `to_source`."""

    def __truediv__(self, o: int) -> C:
        q = abs(int(self)) // abs(int(o))
        return C(q if (self < 0) == (o < 0) else -q)

    def __mod__(self, o: int) -> C:
        return self - (self / o) * C(o)

    def __rtruediv__(self, o: int) -> C:  # type: ignore[misc]
        return C(o) / self

    def __rmod__(self, o: int) -> C:
        return C(o) % self

    def __add__(self, o: int) -> C:
        return C(int(self) + int(o))

    def __sub__(self, o: int) -> C:
        return C(int(self) - int(o))

    def __mul__(self, o: int) -> C:
        return C(int(self) * int(o))

    def __neg__(self) -> C:
        return C(-int(self))

    def __rsub__(self, o: int) -> C:
        return C(o) - self

    __radd__, __rmul__ = __add__, __mul__


@pytest.mark.parametrize("minus", [False, True])
def test_to_source(minus: bool) -> None:
    rng = random.Random(7)
    for n in range(200):
        text = random_symbolic(rng) if n % 4 == 0 and minus else random_text(rng, 4, minus)
        source = to_source(parse_expr(text), lambda name: f"v_{name}")
        wrapped = re.sub(r"\b(\d+)L?\b", r"C(\1)", source)  # the names have no bare digits
        for env in points({"i": (0, 7), "j": (0, 3), "k0": (0, 2), "s1": (1, 3)}):
            values = {f"v_{name}": C(v) for name, v in env.items()}
            assert eval(wrapped, {"C": C}, values) == eval(text, {}, env), (text, source, env)


def test_source_text() -> None:
    def name(n: str) -> str:
        return n.replace(".", "_")

    assert to_source(parse_expr("(t.x+3)//4*(j%2)"), name) == "((t_x+3)/4)*(j%2)"
    assert to_source(parse_expr("i*2147483648-2147483647"), name) == "2147483648L*i-2147483647"
    assert to_source(parse_expr("(i-j)%8"), name) == "((i-j)%8+8)%8"


def test_interning() -> None:
    assert i * 2 + j is j + 2 * i
    assert i.is_symbol() and not any(e.is_symbol() for e in (2 * i, i + 1, i * j, i // 2, i - i))
    assert is_size("s0") and not is_size("s") and not is_size("k0")
    assert Expr.of("i") is i and Expr.of(i) is i and (i - i).is_const(0)
    assert (i + 3) * s0 is s0 * i + 3 * s0
    assert (j - 1) // 64 is (j + 63) // 64 - 1
    assert copy.deepcopy(i // 3) is i // 3 and pickle.loads(pickle.dumps(i % s0)) is i % s0
    assert (5 - i) // 1 is -i + 5 and 7 % (i + 1) is Expr.of(7) % (1 + i)
    match (i % 3).terms:
        case ((1, (Mod(num, den),)),):
            assert num is i and den.is_const(3)
        case other:
            pytest.fail(str(other))


def test_refused() -> None:
    with pytest.raises(TypeError):
        Expr.of(None)  # type: ignore[arg-type]
    for bad in (bool, int, lambda e: e < 3, lambda e: range(e), lambda e: e / 2):
        with pytest.raises(TypeError):
            bad(i)
    for op in ("__floordiv__", "__mod__"):
        for den in (0, -2):
            with pytest.raises(ZeroDivisionError):
                getattr(i, op)(den)
    with pytest.raises(AttributeError):
        i.const = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="not a symbol"):
        sym("a b")


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "-3",
        "14*ib+r",
        "k0+k",
        "(j+3)//64",
        "64*h+d",
        "i-1",
        "5-i",
        "-i",
        "-i-5",
        "i*s1+j",
        "-(i//2)",
        "(i//2)*s0",
        "5//s0",
        "d-64*h",
        "i%(s0+1)",
        "((i//2+j)%5)//3",
        "j//s1+i",
        "-((j+2)//3)",
        "(i-j)//3",
        "tile.x_0",
    ],
)
def test_print(text: str) -> None:
    assert str(parse_expr(text)) == text
    assert parse_expr(f" ({text.replace('*', ' * ')}) ") is parse_expr(text)


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("", 1),
        ("i+", 3),
        ("(i", 3),
        ("i j", 3),
        ("2i", 2),
        ("i//0", 4),
        ("i % 0", 5),
        ("i/2", 2),
        ("i+$", 3),
        (")", 1),
        ("i*(j-)", 6),
        ("i//(2-2)", 4),
        ("i//00", 4),
        ("i~j", 2),
    ],
)
def test_parse_errors(text: str, column: int) -> None:
    with pytest.raises(ParseError) as caught:
        parse_expr(text)
    assert (caught.value.line, caught.value.column) == (1, column), caught.value


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("(64*i+j)//64", "j//64+i"),
        ("(4*i+j+9)%4", "(j+1)%4"),
        ("i//3//5", "i//15"),
        ("i%12%4", "i%4"),
        ("(2*i+5)//4", "i//2+1"),
        ("6*i//(4*s0)", "(3*i)//(2*s0)"),
        ("s0*i//(s0*s1)", "i//s1"),
        ("(i*s1+j)//s1", "j//s1+i"),
        ("(i*(s1+1)+j)%(s1+1)", "j%(s1+1)"),
        ("6*(i//3)+2*(i%3)", "2*i"),
        ("s1*(j//s1)+j%s1+i", "i+j"),
        ("s0*(i//4)*4+s0*(i%4)", "i*s0"),
        ("i-i%4+j", "4*(i//4)+j"),
        ("(-i)%4+i", "4*((i+3)//4)"),
        ("s0*((i+j)%s1)-s0*i-s0*j", "-((i+j)//s1)*s0*s1"),
        ("((-i)%4+i)//(((-i)%4+i)//4)", "4"),
        ("i%2+i", "2*((i+1)//2)"),
        ("i%3+i", "i%3+i"),
        ("(7-i)//2", "3-(i//2)"),
        ("(1-i)//s0", "(1-i)//s0"),
    ],
)
def test_rules_without_ranges(text: str, want: str) -> None:
    assert str(parse_expr(text)) == want


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("(i*s1+j)//s1", "i"),
        ("(i*s1+j)%s1", "j"),
        ("(i*s1+j)//(s0*s1)", "0"),
        ("(j+s1-1-j)//s1", "0"),
        ("(h*s1*s0+i*s1+j)//s1%s0", "i"),
        ("(4*h+d)//8", "h//2"),
        ("(4*h+d)%16", "4*(h%4)+d"),
        ("(h+64)//64", "1"),
        ("(d-4)%4", "d"),
        ("h//64+d%4", "d"),
        ("(d%4+h)%64-h", "(d+h)%64-h"),
        ("one*5+i", "i"),
    ],
)
def test_rules_with_ranges(text: str, want: str) -> None:
    assert str(parse_expr(text).simplify({**AXES, "one": (0, 0), "s1": (1, None)})) == want


@pytest.mark.parametrize(
    "text",
    [
        "s0-1-i",
        "s0*s1-1-i*s1-j",
        "i%s1",
        "s1-1-i%s1",
        "(s0+63)//64-1-ib",
        "s0+62-64*ib",
        "s0-s0//2",
        "(s0-1)//4-i//4",
        "s0*s1-s1",
        "63-h+d",
        "i*s1+j",
        "s0-s0//s1",
    ],
)
def test_prove_nonneg(text: str) -> None:
    bounds: Bounds = {**AXES, "ib": (0, (s0 + 63) // 64 - 1), "s1": (1, None)}
    assert prove_nonneg(parse_expr(text), bounds)
    assert not prove_nonneg(parse_expr(text) * -1 - 1, bounds)


def test_range_and_helpers() -> None:
    assert (2 * sym("h") - 5).range(AXES) == (-5, 121)
    assert (i - s0).range(AXES) == (None, -1)
    assert (i * s1).range(AXES) == (0, None)
    assert (sym("h") // 10 % 4).range(AXES) == (0, 3)
    assert prove_nonneg(s1 - j - 1, AXES) and not prove_nonneg(j - s1 - 1, AXES)
    assert prove_eq((i * s1 + j) // s1, i, AXES) and not prove_eq(i, j) and prove_eq(3, 3)
    assert str((i * s1 + 2 * j).coefficient("i")) == "s1"
    assert (i // 2).coefficient("i") is None and (i * i).coefficient("i") is None
    assert (j % 2).coefficient("i") is Expr.of(0)


def test_evaluate_arrays() -> None:
    e = (i * 3 + j) // 4 + i % s0
    rows, cols = np.arange(5)[:, None], np.arange(7)[None, :]
    want = (rows * 3 + cols) // 4 + rows % 3
    assert np.array_equal(e.evaluate({"i": rows, "j": cols, "s0": 3}), want)
    with pytest.raises(KeyError):
        e.evaluate({"i": 1})


def steps_to_simplify(depth: int) -> int:
    """Calls of functions of `ranges` for an index into rows whose number is nested divisions."""
    size, index = sym(f"s{depth}"), sym("i")
    for _ in range(depth):
        size = (size // 2 % 3 + size // 3 + 3) // 2
    calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename == ranges.__file__

    bounds: Bounds = {"i": (0, size - 1), "j": (0, 15)}
    sys.setprofile(count)
    try:
        simple = ((index * 16 + j) // 16 % size + (index * size + j) // size).simplify(bounds)
    finally:
        sys.setprofile(None)
    for s, at in itertools.product((1, 50, 10**depth), (0, 7, 15)):
        rows = size.evaluate({f"s{depth}": s})
        env = {"i": rows - 1, "j": at, f"s{depth}": s}
        assert simple.evaluate(env) == rows - 1 + ((rows - 1) * rows + at) // rows
    return calls


def test_simplifying_takes_time_linear_in_the_depth_of_divisions() -> None:
    shallow, deep = steps_to_simplify(2), steps_to_simplify(8)
    assert deep < 10 * shallow


def test_answers_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that compiles for days does not keep every answer."""
    monkeypatch.setattr(ranges, "QUESTIONS", 64)
    for n in range(2, 2000):
        assert prove_nonneg(parse_expr(f"{n}*i-i"), {"i": (0, 7)})
    assert len(ranges._kept((("i", (0, 7)),)).intervals) < 4 * 64
