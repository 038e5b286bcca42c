"""Integer expressions: sizes, strides and indices over axes and size symbols.

An `Expr` is a constant plus integer multiples of products of factors (`Sym`, `FloorDiv`, `Mod`),
kept canonical and interned: equal expressions are the same object. Operators apply the rules that
need no ranges, `simplify(bounds)` the others: `(i*s1+j)//s1` is `i+j//s1`, and `i` if 0 <= j < s1.
A denominator, and each symbol that is a factor of one, is taken to be > 0; a symbol without
bounds is a size: >= 0, no upper limit. `==` is identity: use `is_const(3)`, never `e == 3`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd
from operator import add, floordiv, index, mod, mul, sub
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from rung.core.errors import ParseError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Value: TypeAlias = int | NDArray[np.int64]

# symbol -> (lo, hi), inclusive; hi None: unbounded. Bounds must not refer to each other in a cycle.
Bounds: TypeAlias = "Mapping[str, tuple[int | Expr, int | Expr | None]]"
Monomial: TypeAlias = "tuple[Factor, ...]"
Poly: TypeAlias = dict[Monomial, int]
Interval: TypeAlias = tuple[float, float]  # ints, or an infinity


@dataclass(frozen=True, slots=True, eq=False)
class Sym:
    """An axis or a size. The operators intern factors: match on them, do not build them."""

    name: str
    text: str
    names: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class FloorDiv:
    """num // den, rounding down."""

    num: Expr
    den: Expr
    text: str
    names: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class Mod:
    """num % den, in [0, den)."""

    num: Expr
    den: Expr
    text: str
    names: frozenset[str]


Factor: TypeAlias = Sym | FloorDiv | Mod


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Expr:
    """const + sum(coef * product(factors)); `poly` is the same, with the constant under `()`."""

    const: int
    terms: tuple[tuple[int, Monomial], ...]  # in the order of printing
    poly: Mapping[Monomial, int]
    names: frozenset[str]  # the symbols in it

    @staticmethod
    def of(x: int | str | Expr) -> Expr:
        """An integer, the symbol of that name, or `x` itself."""
        if isinstance(x, Expr):
            return x
        return sym(x) if isinstance(x, str) else _number(index(x))

    def __add__(self, o: int | Expr) -> Expr:
        return make(_add(dict(self.poly), Expr.of(o).poly))

    def __sub__(self, o: int | Expr) -> Expr:
        return make(_add(dict(self.poly), Expr.of(o).poly, -1))

    def __mul__(self, o: int | Expr) -> Expr:
        out: Poly = {}
        for m, k in Expr.of(o).poly.items():
            _add(out, {_times(m, n): c for n, c in self.poly.items()}, k)
        return make(out)

    def __floordiv__(self, o: int | Expr) -> Expr:
        return _floordiv(self, Expr.of(o))

    def __mod__(self, o: int | Expr) -> Expr:
        return _mod(self, Expr.of(o))

    def __neg__(self) -> Expr:
        return self * -1

    def __rsub__(self, o: int) -> Expr:
        return Expr.of(o) - self

    def __rfloordiv__(self, o: int) -> Expr:
        return Expr.of(o) // self

    def __rmod__(self, o: int) -> Expr:
        return Expr.of(o) % self

    __radd__, __rmul__ = __add__, __mul__

    def __bool__(self) -> NoReturn:
        raise TypeError(f"'{self}' has no truth value: use is_const() or prove_nonneg()")

    def __int__(self) -> NoReturn:
        raise TypeError(f"'{self}' is not an int: use const_value or evaluate()")

    def __str__(self) -> str:
        match self.terms:
            case ((1, (Sym(name),)),) if not self.const:
                return name
        return _render(self, lambda factor: factor.text, str)

    def __repr__(self) -> str:
        return f"Expr({self})"

    def __reduce__(self) -> tuple[Callable[[str], Expr], tuple[str]]:
        return parse_expr, (str(self),)  # copies and pickles come back interned

    @property
    def const_value(self) -> int | None:
        """The integer this is, or None."""
        return None if self.terms else self.const

    def is_const(self, k: int) -> bool:
        """Whether this is the integer `k`."""
        return not self.terms and self.const == k

    def is_symbol(self) -> bool:
        """Whether this is one symbol and nothing else."""
        match self.terms:
            case ((1, (Sym(),)),):
                return not self.const
        return False

    def symbols(self) -> frozenset[str]:
        """The names in it, also those inside `//` and `%`."""
        return self.names

    def subs(self, mapping: Mapping[str, Expr | int]) -> Expr:
        """All symbols in `mapping` replaced at once."""

        def replace(a: Factor) -> Expr:
            if isinstance(a, Sym):
                return Expr.of(mapping.get(a.name, a.name))
            num, den = a.num.subs(mapping), a.den.subs(mapping)
            return num // den if isinstance(a, FloorDiv) else num % den

        return self if mapping.keys().isdisjoint(self.symbols()) else rebuild(self, replace)

    def coefficient(self, name: str) -> Expr | None:
        """The factor of symbol `name`; None when it is in a `//`, a `%` or not linear."""
        coef, rest = linear(self, _sym_factor(name))
        return None if name in coef.symbols() or name in rest.symbols() else coef

    def without(self, name: str) -> Expr:
        """This with symbol `name` at 0."""
        return self.subs({name: 0})

    def evaluate(self, env: Mapping[str, Value]) -> Value:
        """The value, of all symbols given; arrays broadcast and keep their width."""
        total: Value = self.const
        for coef, mono in self.terms:
            value: Value = coef
            for a in mono:
                value = value * _factor_value(a, env)
            total = total + value
        return total

    def range(self, bounds: Bounds) -> tuple[int | None, int | None]:
        """(lo, hi), inclusive, that hold for all values in bounds; None is unknown."""
        from rung.core.ranges import range_of

        return range_of(self, bounds)

    def simplify(self, bounds: Bounds) -> Expr:
        """An expression equal to this for all values in bounds, with fewer `//` and `%`."""
        from rung.core.ranges import simplified

        return simplified(self, bounds)


# Interning, for the life of the process: `setdefault` keeps it right with threads.
_EXPRS: dict[frozenset[tuple[Monomial, int]], Expr] = {}
_FACTORS: dict[tuple[object, ...], Factor] = {}
_NAME = r"[A-Za-z_][A-Za-z0-9_.]*"


def make(poly: Poly) -> Expr:
    """The one Expr with this `poly`, which has no zeros and is not changed any more."""
    key = frozenset(poly.items())
    found = _EXPRS.get(key)
    if found is not None:
        return found
    made = _recombined(poly)
    if made is None:
        terms = sorted(((k, m) for m, k in poly.items() if m), key=_print_order)
        names = frozenset[str]().union(*(a.names for _, m in terms for a in m))
        made = Expr(poly.get((), 0), tuple(terms), poly, names)
    return _EXPRS.setdefault(key, made)


@cache
def _number(k: int) -> Expr:
    return make({(): k} if k else {})


def _print_order(term: tuple[int, Monomial]) -> tuple[bool, int, int, int, str]:
    coef, mono = term
    text = "*".join(a.text for a in mono)
    return coef < 0, -len(mono), -abs(coef), -len(text), text


def _sym_factor(name: str) -> Factor:
    found = _FACTORS.get((Sym, name))
    if found is None and not re.fullmatch(_NAME, name):
        raise ValueError(f"not a symbol name: {name!r}")
    return found or _FACTORS.setdefault((Sym, name), Sym(name, name, frozenset([name])))


def _binary(kind: type[FloorDiv | Mod], num: Expr, den: Expr) -> Expr:
    """The factor as it stands, no rule applied."""
    text = f"{_operand(str(num))}{'//' if kind is FloorDiv else '%'}{_operand(str(den))}"
    made = kind(num, den, text, num.symbols() | den.symbols())
    return make({(_FACTORS.setdefault((kind, num, den), made),): 1})


def sym(name: str) -> Expr:
    """The symbol of that name: letters, digits, `_` and `.`, not a digit first."""
    return make({(_sym_factor(name),): 1})


# Polynomials.
def _add(into: Poly, poly: Mapping[Monomial, int], k: int = 1) -> Poly:
    for mono, coef in poly.items():
        total = into.get(mono, 0) + coef * k
        if total:
            into[mono] = total
        else:
            into.pop(mono, None)
    return into


def _times(a: Monomial, b: Monomial) -> Monomial:
    return tuple(sorted(a + b, key=lambda factor: factor.text)) if a and b else a or b


def _drop(mono: Monomial, part: Monomial) -> Monomial | None:
    """mono / part, or None when it does not divide."""
    left = list(mono)
    for a in part:
        if a not in left:
            return None
        left.remove(a)
    return tuple(left)


def linear(e: Expr, factor: Factor) -> tuple[Expr, Expr]:
    """(coef, rest) with e == coef*factor + rest; a power keeps the other factors in coef."""
    coef = {_drop(m, (factor,)) or (): k for m, k in e.poly.items() if factor in m}
    return make(coef), make({m: k for m, k in e.poly.items() if factor not in m})


def rebuild(e: Expr, replace: Callable[[Factor], Expr]) -> Expr:
    out: Poly = {}
    for mono, k in e.poly.items():
        term = Expr.of(k)
        for a in mono:
            term = term * replace(a)
        _add(out, term.poly)
    return make(out)


def _factor_value(a: Factor, env: Mapping[str, Value]) -> Value:
    if isinstance(a, Sym):
        return env[a.name]
    num, den = a.num.evaluate(env), a.den.evaluate(env)
    return num // den if isinstance(a, FloorDiv) else num % den


# Rules without ranges.
@cache
def _floordiv(num: Expr, den: Expr) -> Expr:
    q, r = split(num, den)
    if r is ZERO:
        return q
    g, small, small_den = _reduced(r, den)
    if g is not ONE:  # (g*a + b)//(g*c) -> a//c, 0 <= b < g
        return q + small // small_den
    match r.terms:
        case ((1, (FloorDiv(a, c),)),):  # (a//c + k)//d -> (a + k*c)//(c*d)
            return q + (a + c * r.const) // (c * den)
    if den.const_value and all(k < 0 for k, _ in r.terms):  # -a//c -> -((a + c - 1)//c)
        return q - (den - 1 - r) // den
    return q + _binary(FloorDiv, r, den)


@cache
def _mod(num: Expr, den: Expr) -> Expr:
    r = split(num, den)[1]
    g, small, small_den = _reduced(r, den)
    if g is not ONE:  # (g*a + b)%(g*c) -> g*(a%c) + b, 0 <= b < g
        return g * (small % small_den) + (r - g * small)
    for factor in factors(r):  # (k*(a % m) + b)%c -> (k*a + b)%c, c divides k*m
        if isinstance(factor, Mod):
            k, rest = linear(r, factor)
            if split(k * factor.den, den)[1] is ZERO:
                return (k * factor.num + rest) % den
    return r if r is ZERO else _binary(Mod, r, den)


def split(num: Expr, den: Expr) -> tuple[Expr, Expr]:
    """(q, r) with num == q*den + r, where q takes all that divides; a constant r is in [0, den)."""
    c = den.const_value
    if c is not None:
        if c <= 0:
            raise ZeroDivisionError(f"({num}) divided by {c}: not positive")
        q = make({m: k // c for m, k in num.poly.items() if k % c == 0 or (not m and k // c)})
        return q, num - q * c
    q, lead, k0 = ZERO, den.terms[0][1], den.terms[0][0]
    for k, mono in num.terms:
        left = _drop(mono, lead)
        if left is not None and k % k0 == 0:
            t = make({left: k // k0})
            part = t * den
            if all(num.poly.get(m) == c for m, c in part.poly.items()):
                q, num = q + t, num - part
    return q, num


def _reduced(r: Expr, den: Expr) -> tuple[Expr, Expr, Expr]:
    """(g, r // g, den / g): g is the integer and the symbols that divide den and r's terms."""
    k = gcd(*den.poly.values(), *(c for c, _ in r.terms))
    monos = [*den.poly, *r.poly]
    shared = Counter(monos[0])
    for m in monos[1:]:
        shared &= Counter(m)
    mono = tuple(a for a in shared.elements() if isinstance(a, Sym))

    def divide(e: Expr) -> Expr:
        return make({_drop(m, mono) or (): c // k for m, c in e.poly.items() if c // k})

    return (ONE, r, den) if k == 1 and not mono else (make({mono: k}), divide(r), divide(den))


def _recombined(poly: Poly) -> Expr | None:
    """k*c*(a//c) + k*(a%c) -> k*a and k*(a%c) - k*a -> -k*c*(a//c), or None for no such pair."""
    for mono, k in poly.items():
        for a in mono:
            if isinstance(a, Mod):
                factor = make({_drop(mono, (a,)) or (): k})
                rest = _add(dict(poly), {mono: -k})
                whole = factor * a.den * (a.num // a.den)
                if _holds(poly, whole):
                    return make(_add(rest, whole.poly, -1)) + factor * a.num
                opposite = factor * a.num * -1
                if _holds(poly, opposite):
                    return make(_add(rest, opposite.poly, -1)) - whole
                if a.den.is_const(2) and _holds(poly, factor * a.num):  # a % 2 is (-a) % 2
                    return make(_add(rest, opposite.poly)) - factor * 2 * (-a.num // 2)
    return None


def _holds(poly: Poly, part: Expr) -> bool:
    """Whether the terms of `part` are all in `poly`."""
    return all(poly.get(m) == c for c, m in part.terms)


def is_size(name: str) -> bool:
    """Whether the symbol `name` is a size (`s0`, `u1`, ...) or number (`z0`), and not an axis."""
    return name[:1] in ("s", "u", "z") and name.isascii() and name[1:].isdigit()


def may_be_negative(e: Expr) -> bool:
    """Whether `e` contains a number of the user's: it has any sign, so it may not be in an index,
    whose algebra assumes sizes."""
    return any(name.startswith("z") and is_size(name) for name in e.symbols())


ZERO, ONE = Expr.of(0), Expr.of(1)


def factors(e: Expr) -> Iterator[Factor]:
    return iter(dict.fromkeys(a for _, m in e.terms for a in m))


# Text.
def _operand(text: str) -> str:
    return text if re.fullmatch(r"[\w.]+", text) else f"({text})"


def _render(e: Expr, factor: Callable[[Factor], str], number: Callable[[int], str]) -> str:
    parts = []
    for coef, mono in e.terms:
        bare = coef == 1 and len(mono) == 1
        factors = [factor(a) if bare or isinstance(a, Sym) else f"({factor(a)})" for a in mono]
        factors = factors if abs(coef) == 1 else [number(abs(coef)), *factors]
        parts.append("-+"[coef > 0] + "*".join(factors))
    if e.const or not parts:
        first = e.const > 0 and all(coef < 0 for coef, _ in e.terms)
        parts.insert(0 if first else len(parts), "-+"[e.const >= 0] + number(abs(e.const)))
    return "".join(parts).removeprefix("+")


def to_source(e: Expr, name: Callable[[str], str], outer: Callable[[str], str] = str) -> str:
    """C text over `long` variables, which must not be negative; `outer` writes the numbers that
    are in no `//` or `%`.

    C rounds towards zero; so a numerator that could be negative gets the form that rounds down.
    """

    def number(k: int) -> str:
        return str(k) if k < 2**31 else f"{k}L"

    def factor(a: Factor) -> str:
        if isinstance(a, Sym):
            return name(a.name)
        n, d = (_operand(_render(x, factor, number)) for x in (a.num, a.den))
        if isinstance(a, FloorDiv):
            return f"{n}/{d}" if _plainly_nonneg(a.num) else f"({n}/{d}-({n}%{d}<0))"
        return f"{n}%{d}" if _plainly_nonneg(a.num) else f"({n}%{d}+{d})%{d}"

    return _render(e, factor, lambda k: outer(number(k)))


def _plainly_nonneg(e: Expr) -> bool:
    """Whether signs alone prove e >= 0, with all symbols >= 0."""
    divisions = (a for a in factors(e) if isinstance(a, FloorDiv))
    return min(e.poly.values(), default=0) >= 0 and all(_plainly_nonneg(a.num) for a in divisions)


def parse_expr(text: str) -> Expr:
    """The expression that prints like this; blanks and parentheses may be anywhere."""
    tokens = [(m.start() + 1, m[0]) for m in re.finditer(rf"[0-9]+|{_NAME}|//|\S", text)]
    parser = ExprParser([*tokens, (len(text) + 1, "")])
    e = parser.expr()
    return parser.fail("expected an operator") if parser.peek() else e


_INFIX = {"+": (1, add), "-": (1, sub), "*": (2, mul), "//": (2, floordiv), "%": (2, mod)}


class ExprParser:
    """Reads one expression from `at` on and stops at the first token that cannot continue it.

    Tokens are (column, text, ...); the last one is no part of an expression.
    """

    def __init__(self, tokens: Sequence[tuple[Any, ...]]):
        self.tokens, self.at = tokens, 0

    def peek(self, ahead: int = 0) -> str:
        """The text of a token that is not taken yet."""
        return str(self.tokens[min(self.at + ahead, len(self.tokens) - 1)][1])

    def fail(self, message: str, back: int = 0) -> NoReturn:
        """Raise ParseError at the current token, or at one taken before it."""
        raise ParseError(message, 1, self.tokens[self.at - back][0])

    def expr(self, level: int = 0) -> Expr:
        left = self.unit()
        while _INFIX.get(self.peek(), (0,))[0] > level:
            strength, apply = _INFIX[self.peek()]
            self.at += 1
            start, right = self.at, self.expr(strength)
            try:
                left = apply(left, right)
            except ZeroDivisionError as error:
                self.fail(str(error), back=self.at - start)
        return left

    def unit(self) -> Expr:
        token = self.peek()
        if token != "-" and token != "(" and not re.fullmatch(rf"[0-9]+|{_NAME}", token):
            self.fail(f"expected a number, a symbol or '(', found {token or 'the end'}")
        self.at += 1
        if token == "-":
            return -self.unit()
        if token != "(":
            return Expr.of(int(token) if token.isdigit() else token)
        e = self.expr()
        if self.peek() != ")":
            self.fail(f"expected ')', found {self.peek() or 'the end'}")
        self.at += 1
        return e
