"""The scalar functions that every rung shares: type rules, NumPy meanings, monoids and casts.

`SCALARS["add"].result((F32, F32))` is `f32`; `.numpy(a, b)` is what the interpreter computes and
what each target's code is tested against. The meanings follow torch eager: NaN, inf and -0.0
propagate as there, integers wrap, and nothing warns. bf16 and f16 are storage types: they are cast
to f32 before arithmetic, and bf16 arrays are float32 arrays of rounded values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np

from rung.core.errors import VerifyError
from rung.core.types import BF16, BOOL, DTYPES, F16, F32, F64, I64, DType

Array = np.ndarray[Any, np.dtype[Any]]
Meaning = Callable[..., Array]
TypeRule = Callable[[tuple[DType, ...]], DType]


@dataclass(frozen=True)
class ScalarFn:
    """A scalar function. `infix` is its symbol and precedence (higher binds tighter) in dumps.

    `associative` is meant up to float rounding; `cost` is in rough machine operations per element.
    An `approximate` function may be off in the last bit in Rung, in torch, or in both. One that
    `jumps` is discontinuous: a last bit of its argument shows. A `light` one is recomputed rather
    than stored.
    """

    name: str
    arity: int
    result: TypeRule
    numpy: Meaning
    infix: tuple[str, int] | None = None
    commutative: bool = False
    associative: bool = False
    cost: float = 1.0
    approximate: bool = False
    jumps: bool = False
    light: bool = False


# --- type rules: operand types -> result type, ValueError when the function is not defined --------

def _is_real(dtype: DType) -> bool:
    return dtype in (F64, F32)


def _is_number(dtype: DType) -> bool:
    return _is_real(dtype) or dtype.kind in "iu"


def _rule(name: str, arity: int, accepts: Callable[[DType], bool], wanted: str,
          result: DType | None = None) -> TypeRule:
    """All operands have one type that `accepts` takes; the result is `result` or that type."""
    def rule(dtypes: tuple[DType, ...]) -> DType:
        _check_arity(name, arity, dtypes)
        for dtype in dtypes:
            if not accepts(dtype):
                hint = "; cast it to f32 first" if dtype in (BF16, F16) else ""
                raise ValueError(f"{name} takes {wanted}, not {dtype}{hint}")
        _check_equal(name, dtypes)
        return result or dtypes[-1]
    return rule


def _where_rule(dtypes: tuple[DType, ...]) -> DType:
    _check_arity("where", 3, dtypes)
    if dtypes[0] is not BOOL:
        raise ValueError(f"where takes a bool condition, not {dtypes[0]}")
    _check_equal("where", dtypes[1:])
    return dtypes[1]


def _check_arity(name: str, arity: int, dtypes: tuple[DType, ...]) -> None:
    if len(dtypes) != arity:
        raise ValueError(f"{name} takes {arity} operands, not {len(dtypes)}")


def _check_equal(name: str, dtypes: tuple[DType, ...]) -> None:
    if len(set(dtypes)) > 1:
        raise ValueError(f"{name} takes operands of one type, not {', '.join(map(str, dtypes))}")


# --- meanings -------------------------------------------------------------------------------------

def _quiet(meaning: Meaning) -> Meaning:
    """Without floating-point warnings, and an array even where NumPy would give a scalar."""
    @wraps(meaning)
    def quiet(*args: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(meaning(*args))
    return quiet


def _wide(meaning: Meaning) -> Meaning:
    """Computed in float64 and rounded once: float32 results are (nearly) correctly rounded."""
    def wide(*args: Array) -> Array:
        return np.asarray(meaning(*(np.asarray(a, np.float64) for a in args))).astype(
            np.asarray(args[0]).dtype)
    return wide


def _fma(a: Array, b: Array, c: Array) -> Array:
    return _wide(lambda a, b, c: a * b + c)(a, b, c) if a.dtype == np.float32 else a * b + c


def _each(meaning: Callable[[float], float]) -> Meaning:
    """A function of Python's floats at every element."""
    return lambda x: np.vectorize(meaning, otypes=[np.float64])(x) if x.size else x


def _quotient(a: Array, b: Array) -> Array:
    """Towards zero; x / 0 is 0 and least / -1 wraps, so that it is defined for all operands."""
    safe = np.where((b == 0) | (b == -1), np.ones_like(b), b)
    down = np.floor_divide(a, safe)
    toward = down + ((down < 0) & (down * safe != a)).astype(a.dtype)
    return np.where(b == 0, np.zeros_like(a), np.where(b == -1, -a, toward))


def _power(a: Array, b: Array) -> Array:
    """Integers wrap; a negative power of an integer is its reciprocal, rounded towards zero."""
    if a.dtype.kind == "f":
        return _wide(np.power)(a, b)
    odd = np.where(b % 2 == 1, a, np.ones_like(a))
    unit = np.where((a == 1) | (a == -1), odd, np.zeros_like(a))
    return np.where(b < 0, unit, np.power(a, np.where(b < 0, np.zeros_like(b), b)))


def _shift(left: bool) -> Meaning:
    """By a negative number or too many bits, all bits leave: 0, or the sign of a right shift."""
    def shift(a: Array, b: Array) -> Array:
        bits = 8 * a.dtype.itemsize
        inside = (b >= 0) & (b < bits)
        by = np.where(inside, b, np.zeros_like(b))
        if left:
            return np.where(inside, np.left_shift(a, by), np.zeros_like(a))
        return np.where(inside, np.right_shift(a, by), np.where(a < 0, -1, 0).astype(a.dtype))
    return shift


def _relu(x: Array) -> Array:
    return np.where(x < 0, np.zeros_like(x), x)  # a NaN is not < 0 and stays


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _arithmetic(name: str, meaning: Meaning, arity: int = 2, infix: tuple[str, int] | None = None,
                laws: str = "", cost: float = 1.0) -> ScalarFn:
    return _make(name, meaning, _rule(name, arity, _is_number, "f64, f32 or integers"),
                 arity, infix, laws, cost)


def _real(name: str, meaning: Meaning, cost: float, arity: int = 1,
          infix: tuple[str, int] | None = None, laws: str = "~") -> ScalarFn:
    rule = _rule(name, arity, _is_real, "f64 or f32")
    return _make(name, meaning, rule, arity, infix, laws, cost)


def _compare(name: str, meaning: Meaning, symbol: str, bools: bool = False) -> ScalarFn:
    def accepts(dtype: DType) -> bool:
        return _is_number(dtype) or (bools and dtype == BOOL)
    wanted = "f64, f32, integers" + (" or bool" if bools else "")
    return _make(name, meaning, _rule(name, 2, accepts, wanted, BOOL), 2, (symbol, 5),
                 "c" if bools else "", 1.0)


def _bits(name: str, meaning: Meaning, arity: int = 2, infix: tuple[str, int] | None = None,
          laws: str = "") -> ScalarFn:
    """A function of each bit: a bool is one, an integer its bits."""
    return _make(name, meaning, _rule(name, arity, lambda d: d.kind in "iub", "bool or integers"),
                 arity, infix, laws, 1.0)


def _integer(name: str, meaning: Meaning, cost: float) -> ScalarFn:
    return _make(name, meaning, _rule(name, 2, lambda d: d.kind in "iu", "integers"), 2, None, "",
                 cost)


def _make(name: str, meaning: Meaning, rule: TypeRule, arity: int,
          infix: tuple[str, int] | None, laws: str, cost: float) -> ScalarFn:
    return ScalarFn(name, arity, rule, _quiet(meaning), infix, "c" in laws, "a" in laws, cost,
                    "~" in laws, "j" in laws, "l" in laws)


LIBM = 300.0  # cost of a function that is called for each lane

# `laws`: c(ommutative), a(ssociative), ~ approximate, j(umps), l(ight).
# Costs are operations of an AVX-512 implementation.
SCALARS: dict[str, ScalarFn] = {fn.name: fn for fn in (
    _arithmetic("add", np.add, infix=("+", 10), laws="cal"),
    _arithmetic("sub", np.subtract, infix=("-", 10), laws="l"),
    _arithmetic("mul", np.multiply, infix=("*", 20), laws="cal"),
    _arithmetic("neg", np.negative, arity=1, laws="l"),
    _arithmetic("abs", np.abs, arity=1),
    _arithmetic("min", np.minimum, laws="cal", cost=2),
    _arithmetic("max", np.maximum, laws="cal", cost=2),
    _arithmetic("relu", _relu, arity=1, laws="l"),
    _arithmetic("fma", _fma, arity=3),
    _real("div", np.divide, 8, arity=2, infix=("/", 20), laws=""),
    _real("sqrt", np.sqrt, 10),
    _real("rsqrt", _wide(lambda x: 1 / np.sqrt(x)), 18),
    _real("reciprocal", np.reciprocal, 8, laws=""),
    _real("exp", _wide(np.exp), 13),
    _real("exp_approx", _wide(np.exp), 13),  # its error grows with its operand
    _real("exp2", _wide(np.exp2), 13),
    _real("log", _wide(np.log), 28),
    _real("sigmoid", _wide(_sigmoid), 24),
    _real("silu", _wide(lambda x: x * _sigmoid(x)), 24),
    _real("tanh", _wide(np.tanh), 34),
    _real("erf", _wide(_each(math.erf)), 34),
    _real("erfp1", _wide(_each(lambda x: math.erfc(-x))), 34),  # 1 + erf(x)
    _real("sin", _wide(np.sin), 30),
    _real("cos", _wide(np.cos), 30),
    _real("tan", _wide(np.tan), 40, laws="~j"),
    _real("expm1", _wide(np.expm1), 18),
    _real("log1p", _wide(np.log1p), 40),
    *(_real(name, _wide(meaning), LIBM, arity) for name, meaning, arity in (
        ("log2", np.log2, 1), ("log10", np.log10, 1), ("erfc", _each(math.erfc), 1),
        ("asin", np.arcsin, 1), ("acos", np.arccos, 1), ("atan", np.arctan, 1),
        ("sinh", np.sinh, 1), ("cosh", np.cosh, 1), ("asinh", np.arcsinh, 1),
        ("acosh", np.arccosh, 1), ("atanh", np.arctanh, 1),
        ("atan2", np.arctan2, 2), ("hypot", np.hypot, 2))),
    _arithmetic("pow", _power, laws="~", cost=LIBM),
    _real("fmod", np.fmod, LIBM, arity=2, laws="~j"),
    _real("nextafter", np.nextafter, LIBM, arity=2, laws=""),
    _real("copysign", np.copysign, 2, arity=2, laws=""),
    _real("floor", np.floor, 1, laws="j"),
    _real("ceil", np.ceil, 1, laws="j"),
    _real("trunc", np.trunc, 1, laws="j"),
    _real("round", np.rint, 1, laws="j"),  # half to even
    _compare("eq", np.equal, "==", bools=True),
    _compare("ne", np.not_equal, "!=", bools=True),
    _compare("lt", np.less, "<"),
    _compare("le", np.less_equal, "<="),
    _compare("gt", np.greater, ">"),
    _compare("ge", np.greater_equal, ">="),
    _bits("and", np.bitwise_and, infix=("&", 4), laws="ca"),
    _bits("or", np.bitwise_or, infix=("|", 3), laws="ca"),
    _bits("xor", np.bitwise_xor, laws="ca"),
    _bits("not", np.invert, arity=1),
    _integer("quotient", _quotient, 80),
    _integer("shift_left", _shift(left=True), 4),
    _integer("shift_right", _shift(left=False), 4),
    _make("where", np.where, _where_rule, 3, None, "l", 1.0),
)}


# --- conversions ----------------------------------------------------------------------------------

def round_bf16(x: Array) -> Array:
    """float32 -> the nearest bf16 values (ties to even), held in float32."""
    x = np.asarray(x, np.float32)
    bits = x.view(np.uint32)
    with np.errstate(over="ignore"):  # only the bits of a NaN overflow
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), np.float32(np.nan), rounded.view(np.float32))


def cast(x: Array, src: DType, dst: DType) -> Array:
    """`x.to(dst)` of torch; floats outside an integer type's range give unspecified values.

    Half-width floats are reached through f32 (so f64 is rounded twice), integers narrower than 32
    bits through i32.
    """
    x = np.asarray(x)
    if src == dst:
        return x
    if dst == BOOL:
        return np.asarray(x != 0)
    with np.errstate(all="ignore"):
        if dst in (BF16, F16):
            single = x.astype(np.float32)
            return round_bf16(single) if dst == BF16 else single.astype(np.float16)
        if src.is_float and dst.kind in "iu" and dst != I64:
            x = x.astype(np.int32)
        return x.astype(dst.numpy)


# --- monoids of folds -----------------------------------------------------------------------------

@dataclass(frozen=True)
class Monoid:
    """An associative function with an identity, by which folds and reductions combine."""

    name: str
    combine: str
    ufunc: np.ufunc

    def identity(self, dtype: DType) -> float | int | bool:
        """The value x with combine(x, y) = y for all y of `dtype`."""
        if dtype == BOOL and self.name not in ("and", "or"):
            raise VerifyError(f"{self.name} has no identity in bool")
        if self.name in ("min", "max"):
            return _extreme(dtype, low=self.name == "max")
        if self.name == "and" and dtype != BOOL:
            return int(np.invert(np.zeros((), dtype.numpy)))
        value = self.name in ("mul", "and")
        return value if dtype == BOOL else float(value) if dtype.is_float else int(value)

    def reduce(self, array: Array, axes: tuple[int, ...]) -> Array:
        """Reduce over `axes`, accumulating in the array's own type; NaN propagates."""
        with np.errstate(all="ignore"):
            return np.asarray(self.ufunc.reduce(array, axis=axes, dtype=array.dtype,
                                                initial=self.identity(_OF_NUMPY[array.dtype])))


    def prefixes(self, array: Array, axis: int) -> Array:
        """The reductions of the first 1, 2, .. elements along `axis`, in the array's own type."""
        with np.errstate(all="ignore"):
            sums = np.asarray(self.ufunc.accumulate(array, axis=axis, dtype=array.dtype))
            first = np.asarray(self.identity(_OF_NUMPY[array.dtype]), array.dtype)
            return np.asarray(self.ufunc(first, sums))


def _extreme(dtype: DType, low: bool) -> float | int:
    if dtype.is_float:
        return -math.inf if low else math.inf
    info = np.iinfo(dtype.numpy)
    return int(info.min if low else info.max)


_OF_NUMPY = {d.numpy: d for d in DTYPES.values() if d != BF16}  # F32 for float32
MONOIDS: dict[str, Monoid] = {m.name: m for m in (
    Monoid("add", "add", np.add), Monoid("mul", "mul", np.multiply),
    Monoid("max", "max", np.maximum), Monoid("min", "min", np.minimum),
    Monoid("and", "and", np.bitwise_and), Monoid("or", "or", np.bitwise_or))}
LAST = "last"  # how stores combine that leave the last one: no monoid, as nothing is an identity
