"""Ranges of index expressions, proofs from them, and the simplification that needs them.

    simplified((64*h + d)//64, {"d": (0, 63)})  ->  h

A bound may be an expression over sizes; proofs are sound but incomplete.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from math import gcd, inf, isinf
from typing import TypeAlias

from rung.core.expr import (
    ZERO,
    Bounds,
    Expr,
    Factor,
    FloorDiv,
    Interval,
    Mod,
    Sym,
    factors,
    linear,
    make,
    rebuild,
    split,
)


def range_of(e: Expr, bounds: Bounds) -> tuple[int | None, int | None]:
    """(lo, hi), inclusive, that hold for all values in bounds; None is unknown."""
    return _facts(_relevant(e, bounds)).range(e)


def simplified(e: Expr, bounds: Bounds) -> Expr:
    """An expression equal to `e` for all values in bounds, with fewer `//` and `%`."""
    return _facts(_relevant(e, bounds)).simplified(e)


def prove_nonneg(e: Expr | int, bounds: Bounds) -> bool:
    """True only if e >= 0 for all values in bounds; False says nothing."""
    e = Expr.of(e)
    return _facts(_relevant(e, bounds)).nonneg(e) if e.terms else e.const >= 0


def prove_eq(a: Expr | int, b: Expr | int, bounds: Bounds | None = None) -> bool:
    """True only if a == b for all values in bounds."""
    return (Expr.of(a) - b).simplify(bounds or {}) is ZERO


Known: TypeAlias = "tuple[tuple[str, tuple[int | Expr, int | Expr | None]], ...]"


def _relevant(e: Expr, bounds: Bounds) -> Known:
    """The bounds of the symbols in `e`, transitively."""
    found, names = dict.fromkeys(e.names), list(e.names)
    while names:
        for end in bounds.get(names.pop(), ()):
            more = end.names - found.keys() if isinstance(end, Expr) else ()
            names += more
            found.update(dict.fromkeys(more))
    return tuple((name, bounds[name]) for name in sorted(found) if name in bounds)


QUESTIONS = 1 << 16  # the memo is cleared after so many
_asked = count(1)


def _facts(known: Known) -> _Facts:
    if not next(_asked) % QUESTIONS:
        _kept.cache_clear()
    return _kept(known)


@lru_cache(1 << 14)
def _kept(known: Known) -> _Facts:
    return _Facts(dict(known))


FUEL, STEPS = 16, 128  # of one proof: how deep it goes, and how many steps it has in all


class _Facts:
    """Consequences of some bounds, memoized. A proof gives up after `STEPS`: it could take time
    exponential in the depth of nested `//` and `%`."""

    def __init__(self, bounds: Bounds):
        self.bounds = bounds
        self.intervals: dict[Expr | Factor, Interval] = {}
        self.lowest: dict[Expr, float] = {}
        self.simple: dict[Expr, Expr] = {}

    def range(self, e: Expr) -> tuple[int | None, int | None]:
        lo, hi = self.interval(e)
        lo = self.lower(e) if isinf(lo) else lo
        hi = -self.lower(-e) if isinf(hi) else hi
        return None if isinf(lo) else int(lo), None if isinf(hi) else int(hi)

    def nonneg(self, e: Expr) -> bool:
        return self.interval(e)[0] >= 0 or self.lower(e) >= 0

    def interval(self, e: Expr) -> Interval:
        """Numeric bounds of e, each factor bounded independently."""
        if e not in self.intervals:
            lo: float = e.const
            hi: float = e.const
            for coef, mono in e.terms:
                term: Interval = (coef, coef)
                for a in mono:
                    ends = [x * y if x and y else 0 for x in term for y in self.of_factor(a)]
                    term = min(ends), max(ends)
                lo, hi = lo + term[0], hi + term[1]
            self.intervals[e] = lo, hi
        return self.intervals[e]

    def of_factor(self, a: Factor) -> Interval:
        if a not in self.intervals:
            self.intervals[a] = self._of_factor(a)
        return self.intervals[a]

    def _of_factor(self, a: Factor) -> Interval:
        if isinstance(a, Sym):
            low, high = self.bounds.get(a.name, (0, None))
            top = inf if high is None else self.interval(Expr.of(high))[1]
            return self.interval(Expr.of(low))[0], top
        lo, hi = self.interval(a.num)
        c, d = (max(x, 1) for x in self.interval(a.den))
        q_lo, q_hi = _div(lo, d if lo >= 0 else c), _div(hi, c if hi >= 0 else d)
        if isinstance(a, FloorDiv):
            return q_lo, q_hi
        if q_lo == q_hi and (c == d or q_lo == 0):
            return lo - q_lo * c if q_lo else lo, hi - q_lo * c if q_lo else hi
        return 0, min(d - 1, hi) if lo >= 0 else d - 1

    def lower(self, e: Expr) -> float:
        """A numeric lower bound of e."""
        if e not in self.lowest:
            self.lowest[e] = self._lower(e, FUEL, iter(range(STEPS)))
        return self.lowest[e]

    def _lower(self, e: Expr, fuel: int, steps: Iterator[int]) -> float:
        """Factors are replaced by symbolic bounds one by one, the rest by numbers."""
        best = self.interval(e)[0]
        if not fuel or not e.terms or next(steps, None) is None:
            return best
        order = {a: _elimination_order(a, self.bounds) for a in factors(e)}
        for factor in sorted(order, key=lambda a: order[a]):
            coef, rest = linear(e, factor)
            if order[factor][0] == 2 and not coef.terms:
                continue  # a number times a symbol between numbers: the interval is exact in it
            down = self._nonneg(coef, fuel - 1, steps)
            if down or self._nonneg(-coef, fuel - 1, steps):
                part, scale = self._factor_lower(factor, coef, down, steps)
                if part is not None:
                    low = self._lower(rest * scale + part, fuel - 1, steps)
                    return max(best, low if isinf(low) else -(-low // scale))
        return best

    def _nonneg(self, e: Expr, fuel: int, steps: Iterator[int]) -> bool:
        return self.interval(e)[0] >= 0 or self._lower(e, fuel, steps) >= 0

    def _factor_lower(self, a: Factor, k: Expr, down: bool, steps: Iterator[int]
                    ) -> tuple[Expr | None, int]:
        """(part, scale) with scale*k*a >= part, where k >= 0 if `down`, else k <= 0."""
        match a:
            case Sym(name):
                low, high = self.bounds.get(name, (0, None))
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
                end = ZERO if down else k * num
                return end if self._nonneg(num, FUEL, steps) else None, 1

    def simplified(self, e: Expr) -> Expr:
        if e in self.simple:
            return self.simple[e]
        self.simple[e] = e  # ends a cycle of rules, should there be one
        out = rebuild(e, self._factor)
        self.simple[e] = out = out if out is e else self.simplified(out)
        return out

    def _factor(self, a: Factor) -> Expr:
        if isinstance(a, Sym):
            low, high = self.bounds.get(a.name, (0, None))
            return Expr.of(a.name if high is None or Expr.of(high) is not Expr.of(low) else low)
        return self.divmod(self.simplified(a.num), self.simplified(a.den))[isinstance(a, Mod)]

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
            k = self.quotient(b, Expr.of(g))
            if k is not None:
                return q + (a + k) // (c // g), (a + k) % (c // g) * g + (b - g * k)
        return q + r // den, r % den

    def quotient(self, r: Expr, den: Expr) -> int | None:
        """r // den where the ranges make it constant."""
        c = den.const_value
        lo, hi = self.range(r)
        if c and lo is not None and hi is not None and lo // c == hi // c:
            return lo // c
        for k in (0, -1):
            part = r - den * k
            if self.nonneg(part) and self.nonneg(den - part - 1):
                return k
        return None


def _div(x: float, c: float) -> float:
    if isinf(x):
        return x
    return x // c if not isinf(c) else 0 if x >= 0 else -1


def _elimination_order(a: Factor, bounds: Bounds) -> tuple[int, str]:
    """Axes before the sizes that bound them, so that equal sizes cancel."""
    if not isinstance(a, Sym):
        return 1, a.text
    ends = bounds.get(a.name, ())
    return 2 if all(x is None or not Expr.of(x).terms for x in ends) else 0, a.text
