"""Integer expressions: sizes, strides and indices over axes and size symbols.

An `Expr` is a constant plus integer multiples of products of atoms (`Sym`, `FloorDiv`, `Mod`), kept
canonical and interned: equal expressions are the same object. Operators apply the rules that need
no ranges, `simplify(bounds)` those that do: `(i*s1+j)//s1` is `i+j//s1`, and `i` if 0 <= j < s1.
A denominator, and each symbol that is a factor of one, is taken to be > 0; a symbol without
bounds is a size: >= 0, no upper limit. `==` is identity: use `is_const(3)`, never `e == 3`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd, inf, isinf
from operator import add, floordiv, index, mod, mul, sub
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from rung.core.errors import ParseError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Value: TypeAlias = int | NDArray[np.int64]

# symbol -> (lo, hi), inclusive; hi None: unbounded. Bounds must not refer to each other in a cycle.
Bounds: TypeAlias = "Mapping[str, tuple[int | Expr, int | Expr | None]]"
Monomial: TypeAlias = "tuple[Atom, ...]"
Poly: TypeAlias = dict[Monomial, int]
Interval: TypeAlias = tuple[float, float]  # ints, or an infinity


@dataclass(frozen=True, slots=True, eq=False)
class Sym:
    """An axis or a size. Atoms are interned by the operators: match on them, do not build them."""

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


Atom: TypeAlias = Sym | FloorDiv | Mod


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Expr:
    """const + sum(coef * product(atoms)); `poly` is the same, with the constant under `()`."""

    const: int
    terms: tuple[tuple[int, Monomial], ...]  # in the order of printing
    poly: Mapping[Monomial, int]

    @staticmethod
    def of(x: int | str | Expr) -> Expr:
        """An integer, the symbol of that name, or `x` itself."""
        if isinstance(x, Expr):
            return x
        return sym(x) if isinstance(x, str) else _make({(): k} if (k := index(x)) else {})

    def __add__(self, o: int | Expr) -> Expr:
        return _make(_add(dict(self.poly), Expr.of(o).poly))

    def __sub__(self, o: int | Expr) -> Expr:
        return _make(_add(dict(self.poly), Expr.of(o).poly, -1))

    def __mul__(self, o: int | Expr) -> Expr:
        out: Poly = {}
        for m, k in Expr.of(o).poly.items():
            _add(out, {_times(m, n): c for n, c in self.poly.items()}, k)
        return _make(out)

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
        return _render(self, lambda atom: atom.text, str)

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
        return len(self.terms) == 1 and str(self) in self.symbols()

    def symbols(self) -> frozenset[str]:
        """The names in it, also those inside `//` and `%`."""
        return frozenset[str]().union(*(a.names for _, m in self.terms for a in m))

    def subs(self, mapping: Mapping[str, Expr | int]) -> Expr:
        """All symbols in `mapping` replaced at once."""

        def replace(a: Atom) -> Expr:
            if isinstance(a, Sym):
                return Expr.of(mapping.get(a.name, a.name))
            num, den = a.num.subs(mapping), a.den.subs(mapping)
            return num // den if isinstance(a, FloorDiv) else num % den

        return self if mapping.keys().isdisjoint(self.symbols()) else _rebuild(self, replace)

    def coefficient(self, name: str) -> Expr | None:
        """The factor of symbol `name`; None when it is in a `//`, a `%` or not linear."""
        coef, rest = _linear(self, _sym_atom(name))
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
                value = value * _atom_value(a, env)
            total = total + value
        return total

    def range(self, bounds: Bounds) -> tuple[int | None, int | None]:
        """(lo, hi), inclusive, that hold for all values in bounds; None is unknown."""
        lo, hi = _interval(self, bounds)
        lo = _lower(self, bounds) if isinf(lo) else lo
        hi = -_lower(-self, bounds) if isinf(hi) else hi
        return None if isinf(lo) else int(lo), None if isinf(hi) else int(hi)

    def simplify(self, bounds: Bounds) -> Expr:
        """An expression equal to this for all values in bounds, with fewer `//` and `%`."""
        return _Simplifier(bounds, {}).expr(self)


# Interning, for the life of the process: `setdefault` keeps it right with threads.
_EXPRS: dict[frozenset[tuple[Monomial, int]], Expr] = {}
_ATOMS: dict[tuple[object, ...], Atom] = {}
_NAME = r"[A-Za-z_][A-Za-z0-9_.]*"


def _make(poly: Poly) -> Expr:
    """The one Expr with this `poly`, which has no zeros and is not changed any more."""
    key = frozenset(poly.items())
    found = _EXPRS.get(key)
    if found is not None:
        return found
    made = _recombined(poly)
    if made is None:
        terms = sorted(((k, m) for m, k in poly.items() if m), key=_print_order)
        made = Expr(poly.get((), 0), tuple(terms), poly)
    return _EXPRS.setdefault(key, made)


def _print_order(term: tuple[int, Monomial]) -> tuple[bool, int, int, int, str]:
    coef, mono = term
    text = "*".join(a.text for a in mono)
    return coef < 0, -len(mono), -abs(coef), -len(text), text


def _sym_atom(name: str) -> Atom:
    found = _ATOMS.get((Sym, name))
    if found is None and not re.fullmatch(_NAME, name):
        raise ValueError(f"not a symbol name: {name!r}")
    return found or _ATOMS.setdefault((Sym, name), Sym(name, name, frozenset([name])))


def _binary(kind: type[FloorDiv | Mod], num: Expr, den: Expr) -> Expr:
    """The atom as it stands, no rule applied."""
    text = f"{_operand(str(num))}{'//' if kind is FloorDiv else '%'}{_operand(str(den))}"
    made = kind(num, den, text, num.symbols() | den.symbols())
    return _make({(_ATOMS.setdefault((kind, num, den), made),): 1})


def sym(name: str) -> Expr:
    """The symbol of that name: letters, digits, `_` and `.`, not a digit first."""
    return _make({(_sym_atom(name),): 1})


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
    return tuple(sorted(a + b, key=lambda atom: atom.text)) if a and b else a or b


def _drop(mono: Monomial, part: Monomial) -> Monomial | None:
    """mono / part, or None when it does not divide."""
    left = list(mono)
    for a in part:
        if a not in left:
            return None
        left.remove(a)
    return tuple(left)


def _linear(e: Expr, atom: Atom) -> tuple[Expr, Expr]:
    """(coef, rest) with e == coef*atom + rest; a power keeps the other factors in coef."""
    coef = {_drop(m, (atom,)) or (): k for m, k in e.poly.items() if atom in m}
    return _make(coef), _make({m: k for m, k in e.poly.items() if atom not in m})


def _rebuild(e: Expr, replace: Callable[[Atom], Expr]) -> Expr:
    out: Poly = {}
    for mono, k in e.poly.items():
        term = Expr.of(k)
        for a in mono:
            term = term * replace(a)
        _add(out, term.poly)
    return _make(out)


def _atom_value(a: Atom, env: Mapping[str, Value]) -> Value:
    if isinstance(a, Sym):
        return env[a.name]
    num, den = a.num.evaluate(env), a.den.evaluate(env)
    return num // den if isinstance(a, FloorDiv) else num % den


# Rules without ranges.
@cache
def _floordiv(num: Expr, den: Expr) -> Expr:
    q, r = _split(num, den)
    if r is ZERO:
        return q
    g, small, small_den = _reduced(r, den)
    if g is not ONE:  # (g*a + b)//(g*c) -> a//c, 0 <= b < g
        return q + small // small_den
    match r.terms:
        case ((1, (FloorDiv(a, c),)),):  # (a//c + k)//d -> (a + k*c)//(c*d)
            return q + (a + c * r.const) // (c * den)
    return q + _binary(FloorDiv, r, den)


@cache
def _mod(num: Expr, den: Expr) -> Expr:
    r = _split(num, den)[1]
    g, small, small_den = _reduced(r, den)
    if g is not ONE:  # (g*a + b)%(g*c) -> g*(a%c) + b, 0 <= b < g
        return g * (small % small_den) + (r - g * small)
    for atom in _atoms(r):  # (k*(a % m) + b)%c -> (k*a + b)%c, c divides k*m
        if isinstance(atom, Mod):
            k, rest = _linear(r, atom)
            if _split(k * atom.den, den)[1] is ZERO:
                return (k * atom.num + rest) % den
    return r if r is ZERO else _binary(Mod, r, den)


def _split(num: Expr, den: Expr) -> tuple[Expr, Expr]:
    """(q, r) with num == q*den + r, where q takes all that divides; a constant r is in [0, den)."""
    c = den.const_value
    if c is not None:
        if c <= 0:
            raise ZeroDivisionError(f"({num}) divided by {c}: not positive")
        q = _make({m: k // c for m, k in num.poly.items() if k % c == 0 or (not m and k // c)})
        return q, num - q * c
    q, lead, k0 = ZERO, den.terms[0][1], den.terms[0][0]
    for k, mono in num.terms:
        left = _drop(mono, lead)
        if left is not None and k % k0 == 0:
            t = _make({left: k // k0})
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
        return _make({_drop(m, mono) or (): c // k for m, c in e.poly.items() if c // k})

    return (ONE, r, den) if k == 1 and not mono else (_make({mono: k}), divide(r), divide(den))


def _recombined(poly: Poly) -> Expr | None:
    """k*c*(a//c) + k*(a%c) -> k*a, or None when there is no such pair."""
    for mono, k in poly.items():
        for a in mono:
            if isinstance(a, Mod):
                factor = _make({_drop(mono, (a,)) or (): k})
                whole = factor * a.den * (a.num // a.den)
                if all(poly.get(m) == c for c, m in whole.terms):
                    rest = _add(_add(dict(poly), whole.poly, -1), {mono: -k})
                    return _make(rest) + factor * a.num
    return None


def is_size(name: str) -> bool:
    """Whether the symbol `name` is a size (`s0`, `u1`, ...) and not an axis."""
    return re.fullmatch(r"[su][0-9]+", name) is not None


ZERO, ONE = Expr.of(0), Expr.of(1)


# Ranges and proofs.
def _interval(e: Expr, bounds: Bounds) -> Interval:
    lo: float = e.const
    hi: float = e.const
    for coef, mono in e.terms:
        term: Interval = (coef, coef)
        for a in mono:
            ends = [x * y if x and y else 0 for x in term for y in _atom_interval(a, bounds)]
            term = min(ends), max(ends)
        lo, hi = lo + term[0], hi + term[1]
    return lo, hi


def _atom_interval(a: Atom, bounds: Bounds) -> Interval:
    if isinstance(a, Sym):
        low, high = bounds.get(a.name, (0, None))
        top = inf if high is None else _interval(Expr.of(high), bounds)[1]
        return _interval(Expr.of(low), bounds)[0], top
    lo, hi = _interval(a.num, bounds)
    c, d = (max(x, 1) for x in _interval(a.den, bounds))
    q_lo, q_hi = _div(lo, d if lo >= 0 else c), _div(hi, c if hi >= 0 else d)
    if isinstance(a, FloorDiv):
        return q_lo, q_hi
    if q_lo == q_hi and (c == d or q_lo == 0):
        return lo - q_lo * c if q_lo else lo, hi - q_lo * c if q_lo else hi
    return 0, min(d - 1, hi) if lo >= 0 else d - 1


def _div(x: float, c: float) -> float:
    if isinf(x):
        return x
    return x // c if not isinf(c) else 0 if x >= 0 else -1


def _atoms(e: Expr) -> Iterator[Atom]:
    return iter(dict.fromkeys(a for _, m in e.terms for a in m))


def _lower(e: Expr, bounds: Bounds, fuel: int = 16) -> float:
    """A number <= e: atoms give way to their symbolic bounds one by one, the rest to numbers."""
    best = _interval(e, bounds)[0]
    if not fuel or not e.terms:
        return best
    order = {a: _elimination_order(a, bounds) for a in _atoms(e)}
    for atom in sorted(order, key=lambda a: order[a]):
        coef, rest = _linear(e, atom)
        if order[atom][0] == 2 and not coef.terms:
            continue  # a number times a symbol between numbers: the interval is exact in it
        down = _interval(coef, bounds)[0] >= 0 or _lower(coef, bounds, fuel - 1) >= 0
        if down or _lower(-coef, bounds, fuel - 1) >= 0:
            part, scale = _atom_lower(atom, coef, down, bounds)
            if part is not None:
                low = _lower(rest * scale + part, bounds, fuel - 1)
                return max(best, low if isinf(low) else -(-low // scale))
    return best


def _elimination_order(a: Atom, bounds: Bounds) -> tuple[int, str]:
    """Axes before the sizes that bound them, so that equal sizes cancel."""
    if not isinstance(a, Sym):
        return 1, a.text
    ends = bounds.get(a.name, ())
    return 2 if all(x is None or not Expr.of(x).terms for x in ends) else 0, a.text


def _atom_lower(a: Atom, k: Expr, down: bool, bounds: Bounds) -> tuple[Expr | None, int]:
    """(part, scale) with scale*k*a >= part, where k >= 0 if `down`, else k <= 0."""
    match a:
        case Sym(name):
            low, high = bounds.get(name, (0, None))
            end = low if down else high
            return None if end is None else k * end, 1
        case Mod(_, den):
            return ZERO if down else k * (den - 1), 1
        case FloorDiv(num, den):  # (num - den + 1)/den <= num//den <= num/den
            end = num - den + 1 if down else num
            if den.const_value is not None:
                return k * end, den.const_value
            q, r = _split(k, den)
            if r is ZERO:
                return q * end, 1
            return (ZERO if down else k * num) if prove_nonneg(num, bounds) else None, 1


def prove_nonneg(e: Expr | int, bounds: Bounds) -> bool:
    """True only if e >= 0 for all values in bounds; False says nothing."""
    e = Expr.of(e)
    return _interval(e, bounds)[0] >= 0 or _lower(e, bounds) >= 0


def prove_lt(a: Expr | int, b: Expr | int, bounds: Bounds) -> bool:
    """True only if a < b for all values in bounds."""
    return prove_nonneg(Expr.of(b) - a - 1, bounds)


def prove_eq(a: Expr | int, b: Expr | int, bounds: Bounds | None = None) -> bool:
    """True only if a == b for all values in bounds."""
    return (Expr.of(a) - b).simplify(bounds or {}) is ZERO


@dataclass(frozen=True, slots=True)
class _Simplifier:
    """One call of `simplify`."""

    bounds: Bounds
    memo: dict[Expr, Expr]

    def expr(self, e: Expr) -> Expr:
        if e in self.memo:
            return self.memo[e]
        self.memo[e] = e  # ends a cycle of rules, should there be one
        out = _rebuild(e, self.atom)
        self.memo[e] = out = out if out is e else self.expr(out)
        return out

    def atom(self, a: Atom) -> Expr:
        if isinstance(a, Sym):
            low, high = self.bounds.get(a.name, (0, None))
            return Expr.of(a.name if high is None or Expr.of(high) is not Expr.of(low) else low)
        return self.divmod(self.expr(a.num), self.expr(a.den))[isinstance(a, Mod)]

    def divmod(self, num: Expr, den: Expr) -> tuple[Expr, Expr]:
        q, r = _split(num, den)
        k = self.quotient(r, den)
        if k is not None:
            return q + k, r - den * k
        c = den.const_value or 1
        for g in sorted({gcd(c, coef) for coef, _ in r.terms} - {1}, reverse=True):
            # (g*a + b)//(g*h) -> a//h and (g*a + b)%(g*h) -> g*(a%h) + b, 0 <= b < g
            a = _make({m: coef // g for m, coef in r.poly.items() if m and coef % g == 0})
            b = r - a * g
            k = self.quotient(b, g)
            if k is not None:
                return q + (a + k) // (c // g), (a + k) % (c // g) * g + (b - g * k)
        return q + r // den, r % den

    def quotient(self, r: Expr, den: Expr | int) -> int | None:
        """r // den when the ranges make it one number."""
        c = Expr.of(den).const_value
        lo, hi = r.range(self.bounds)
        if c and lo is not None and hi is not None and lo // c == hi // c:
            return lo // c
        for k in (0, -1):
            part = r - Expr.of(den) * k
            if prove_nonneg(part, self.bounds) and prove_lt(part, den, self.bounds):
                return k
        return None


# Text.
def _operand(text: str) -> str:
    return text if re.fullmatch(r"[\w.]+", text) else f"({text})"


def _render(e: Expr, atom: Callable[[Atom], str], number: Callable[[int], str]) -> str:
    parts = []
    for coef, mono in e.terms:
        bare = coef == 1 and len(mono) == 1
        factors = [atom(a) if bare or isinstance(a, Sym) else f"({atom(a)})" for a in mono]
        factors = factors if abs(coef) == 1 else [number(abs(coef)), *factors]
        parts.append("-+"[coef > 0] + "*".join(factors))
    if e.const or not parts:
        first = e.const > 0 and all(coef < 0 for coef, _ in e.terms)
        parts.insert(0 if first else len(parts), "-+"[e.const >= 0] + number(abs(e.const)))
    return "".join(parts).removeprefix("+")


def to_source(e: Expr, name: Callable[[str], str]) -> str:
    """C text over `long` variables, which must not be negative.

    C rounds towards zero; so a numerator that could be negative gets the form that rounds down.
    """

    def number(k: int) -> str:
        return str(k) if k < 2**31 else f"{k}L"

    def atom(a: Atom) -> str:
        if isinstance(a, Sym):
            return name(a.name)
        n, d = (_operand(_render(x, atom, number)) for x in (a.num, a.den))
        if isinstance(a, FloorDiv):
            return f"{n}/{d}" if _plainly_nonneg(a.num) else f"({n}/{d}-({n}%{d}<0))"
        return f"{n}%{d}" if _plainly_nonneg(a.num) else f"({n}%{d}+{d})%{d}"

    return _render(e, atom, number)


def _plainly_nonneg(e: Expr) -> bool:
    """Whether e >= 0 is seen from its signs alone, with all symbols >= 0."""
    divisions = (a for a in _atoms(e) if isinstance(a, FloorDiv))
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
