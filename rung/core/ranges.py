"""Ranges of index expressions, proofs from them, and the simplification that needs them.

    simplified((64*h + d)//64, {"d": (0, 63)})  ->  h

A bound may be an expression over sizes; proofs are sound but incomplete.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, inf, isinf
from typing import TypeAlias

from rung.core.expr import (
    ZERO,
    Atom,
    Bounds,
    Expr,
    FloorDiv,
    Interval,
    Mod,
    Sym,
    atoms,
    linear,
    make,
    rebuild,
    split,
)


def range_of(e: Expr, bounds: Bounds) -> tuple[int | None, int | None]:
    """(lo, hi), inclusive, that hold for all values in bounds; None is unknown."""
    lo, hi = _interval(e, bounds)
    lo = _lower(e, bounds) if isinf(lo) else lo
    hi = -_lower(-e, bounds) if isinf(hi) else hi
    return None if isinf(lo) else int(lo), None if isinf(hi) else int(hi)


def simplified(e: Expr, bounds: Bounds) -> Expr:
    """An expression equal to `e` for all values in bounds, with fewer `//` and `%`."""
    return _simplified(e, _relevant(e, bounds))


Known: TypeAlias = "tuple[tuple[str, tuple[int | Expr, int | Expr | None]], ...]"


def _relevant(e: Expr, bounds: Bounds) -> Known:
    """The bounds of the symbols in `e`, and of those in these bounds: a key of what follows."""
    found, names = dict.fromkeys(e.names), list(e.names)
    while names:
        for end in bounds.get(names.pop(), ()):
            more = end.names - found.keys() if isinstance(end, Expr) else ()
            names += more
            found.update(dict.fromkeys(more))
    return tuple((name, bounds[name]) for name in found if name in bounds)


@lru_cache(1 << 16)
def _simplified(e: Expr, known: Known) -> Expr:
    return _Simplifier(dict(known), {}).expr(e)


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


def _lower(e: Expr, bounds: Bounds, fuel: int = 16) -> float:
    """A number <= e: atoms give way to their symbolic bounds one by one, the rest to numbers."""
    best = _interval(e, bounds)[0]
    if not fuel or not e.terms:
        return best
    order = {a: _elimination_order(a, bounds) for a in atoms(e)}
    for atom in sorted(order, key=lambda a: order[a]):
        coef, rest = linear(e, atom)
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
            q, r = split(k, den)
            if r is ZERO:
                return q * end, 1
            return (ZERO if down else k * num) if prove_nonneg(num, bounds) else None, 1


def prove_nonneg(e: Expr | int, bounds: Bounds) -> bool:
    """True only if e >= 0 for all values in bounds; False says nothing."""
    e = Expr.of(e)
    return _nonneg(e, _relevant(e, bounds)) if e.terms else e.const >= 0


@lru_cache(1 << 16)
def _nonneg(e: Expr, known: Known) -> bool:
    bounds = dict(known)
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
        out = rebuild(e, self.atom)
        self.memo[e] = out = out if out is e else self.expr(out)
        return out

    def atom(self, a: Atom) -> Expr:
        if isinstance(a, Sym):
            low, high = self.bounds.get(a.name, (0, None))
            return Expr.of(a.name if high is None or Expr.of(high) is not Expr.of(low) else low)
        return self.divmod(self.expr(a.num), self.expr(a.den))[isinstance(a, Mod)]

    def divmod(self, num: Expr, den: Expr) -> tuple[Expr, Expr]:
        q, r = split(num, den)
        k = self.quotient(r, den)
        if k is not None:
            return q + k, r - den * k
        c = den.const_value or 1
        for g in sorted({gcd(c, coef) for coef, _ in r.terms} - {1}, reverse=True):
            # (g*a + b)//(g*h) -> a//h and (g*a + b)%(g*h) -> g*(a%h) + b, 0 <= b < g
            a = make({m: coef // g for m, coef in r.poly.items() if m and coef % g == 0})
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
