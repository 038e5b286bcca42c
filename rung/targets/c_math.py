"""Bodies of the scalar functions in GNU C, written once for scalars and vectors.

In a body, `$F` is the value's type, `$I` the signed integers of its width, `$U` the unsigned ones,
`$M` the bool type (`int`, or 32-bit lanes of 0/-1), `$E` the element's type, `$u16` as many u16,
`$N` the lanes, `$B` the bits of one, `$X` the suffix of C's float functions, `$K(c)` a constant in
all lanes (`$KI`: of `$I`), `$name(...)` another helper for the type: `c_family` finds from these
what a source needs.

The polynomials are our own least-maximum fits (Lawson's iteration, then rounded to f32).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Helper:
    """A function of `params`. Without `vector`, a vector is a loop over lanes of the scalar.

    `atoms` maps a width in bits to an expression in x86 builtins of gcc; `$S` is `ps` or `pd`.
    `portable` is clang's builtin for vectors of any width. No compiler makes instructions of a loop
    over lanes by itself: its vectorisers are off.
    """

    params: str
    scalar: str
    vector: str | None = None
    atoms: tuple[tuple[int, int, str], ...] = ()  # (bits, needed RUNG_ISA, expression)
    result: str = "$F"
    portable: str = ""


def _both(params: str, body: str, result: str = "$F") -> Helper:
    return Helper(params, body, body, result=result)


def horner(variable: str, coefficients: tuple[str, ...]) -> str:
    """The polynomial with `coefficients` from the highest power down, as nested fma."""
    text = f"$K({coefficients[0]})"
    for c in coefficients[1:]:
        text = f"$fma({text}, {variable}, $K({c}))"
    return text


def _atoms(b512: str, b256: str, least: int = 256) -> tuple[tuple[int, int, str], ...]:
    """The 256-bit expression serves 128 bits without its suffix, from the ISA `least` on."""
    return ((512, 512, f"__builtin_ia32_{b512}"), (256, 256, f"__builtin_ia32_{b256}"),
            (128, least, "__builtin_ia32_" + b256.replace("256", "")))


def _rounding(builtin: str, mode: int) -> Helper:
    """`mode` is the instruction's immediate: direction + 8 (no inexact exception)."""
    return Helper("$F a", f"return __builtin_{builtin}$X(a);",
                  atoms=_atoms(f"rndscale$S_mask(a, {mode}, a, -1, 4)", f"round$S256(a, {mode})"),
                  portable=f"__builtin_elementwise_{builtin.replace('rint', 'roundeven')}(a)")


def _extreme(name: str, symbol: str) -> dict[str, Helper]:
    """`max` propagates NaN; `xmax` is x86's `a > b ? a : b`: its second operand if one is NaN."""
    ordered = "__builtin_ia32_cmp$S512_mask(a, a, 7, -1, 4)"
    blend = f"blendv$S256(__builtin_ia32_{name}$S256(a, b), a, __builtin_ia32_cmp$S256(a, a, 3))"
    return {
        f"x{name}": Helper(
            "$F a, $F b", f"return a {symbol} b ? a : b;", f"return $sel(a {symbol} b, a, b);",
            _atoms(f"{name}$S512_mask(a, b, a, -1, 4)", f"{name}$S256(a, b)")),
        f"{name}.float": Helper(
            "$F a, $F b", f"return a != a ? a : $x{name}(a, b);",
            f"return $sel(a != a, a, $x{name}(a, b));",
            _atoms(f"{name}$S512_mask(a, b, a, {ordered}, 4)", blend)),
        f"{name}.int": _both("$F a, $F b", f"return $sel(a {symbol} b, a, b);"),
    }


def _integer(result: str, bits: int) -> Helper:
    """What x86's conversion gives, also outside of the range (the least number), where C's is
    undefined. Only for scalars: vectors are converted by `_fitting` and the instruction."""
    limit = f"0x1p{bits}"
    return Helper("$F a", f"return a >= -{limit}$X && a < {limit}$X ? ({result})a : "
                  f"({result})(1ul << {bits});", result=result)


def _fitting(bits: int) -> Helper:
    """What a vector's conversion to integers may be given. To clang a lane out of range is poison,
    which a select by bits does not stop; gcc makes the instruction, which needs nothing."""
    limit = f"0x1p{bits}"
    return Helper("$F a", "return a;", f"""
#ifdef __clang__
  return $sel((a >= $K(-{limit})) & (a < $K({limit})), a, $K(-{limit}));
#endif
  return a;""")


def _libm(name: str, params: str = "$F a") -> Helper:
    """C's own function, called for each lane of a vector."""
    args = ", ".join(p.split()[-1] for p in params.split(","))
    return Helper(params, f"return __builtin_{name}$X({args});")


def _circular(name: str, turn: int, result: str) -> Helper:
    """sin, cos or tan: `result` from q quarter turns (`turn` more) and the sin s and cos c of
    the rest r. Reduced as by Cody and Waite: the parts of pi / 2 have so few bits that their
    products with n are exact. Large arguments go to libm, lane by lane."""
    body = f"""$F n = $fma(x, $K(0x1.45f306p-1f), $K({_ROUND_MAGIC})) - {_ROUND_MAGIC};
  $F r = $fma(n, $K(-0x1.92p+0f), x);
  r = $fma(n, $K(-0x1.fb4p-12f), r);
  r = $fma(n, $K(-0x1.444p-24f), r);
  r = $fma(n, $K(-0x1.68c234p-39f), r);
  $F z = r * r, s = r * $fma(z, {_SIN_POLY}, $K(1.0f));
  $F c = $fma(z * z, {_COS_POLY}, $fma(z, $K(-0.5f), $K(1.0f)));
  $I q = $toint(n) + {turn}, odd = -(q & 1), large = $abs(x) > 8192.0f;
  $F y = {result};
"""
    return Helper("$F x", body + f"  return large ? __builtin_{name}f(x) : y;",
                  body + f"""  if ($any(large))
    for (int i = 0; i < $N; i++)
      if (large[i]) y[i] = __builtin_{name}f(x[i]);
  return y;""")



_ROUND_MAGIC = "0x1.8p23f"  # adding and subtracting it rounds |x| < 2^22 to an integer
_SIN_POLY = horner("z", ("-0x1.991bf4p-13f", "0x1.1106c6p-7f", "-0x1.555544p-3f"))
_COS_POLY = horner("z", ("0x1.99e0e4p-16f", "-0x1.6c0c1ap-10f", "0x1.55554ap-5f"))
_CIRCLE = "$unbits(($I)(($U)$bits($sel(odd, c, s)) ^ (($U)q & 2) << 30))"

BASIC: dict[str, Helper] = {
    "splat": Helper("$E a", "return a;", "return a - ($F){0};"),  # x - 0 is x, also for -0.0
    "splat.bool": Helper("$E a", "return a;", "return -a - ($F){0};"),
    "within": Helper("long a, long n", "return a < -n ? -n : a > n ? n : a;", result="int"),
    "add.int": _both("$F a, $F b", "return ($F)(($U)a + ($U)b);"),  # unsigned, so that it wraps
    "sub.int": _both("$F a, $F b", "return ($F)(($U)a - ($U)b);"),
    "mul.int": _both("$F a, $F b", "return ($F)(($U)a * ($U)b);"),
    "neg.int": _both("$F a", "return ($F)(0 - ($U)a);"),
    "bits": Helper("$F a", "union { $F f; $I i; } u = {a}; return u.i;", "return ($I)a;",
                   result="$I"),
    "unbits": Helper("$I a", "union { $I i; $F f; } u = {a}; return u.f;", "return ($F)a;"),
    "toint.f32": Helper("$F a", "return $to_i32(a);",
                        "return __builtin_convertvector($fit_i32(a), $I);", result="$I"),
    "to_i32": _integer("int", 31), "to_i64": _integer("long", 63),
    "fit_i32": _fitting(31), "fit_i64": _fitting(63),
    "toreal": Helper("$I a", "return ($F)a;", "return __builtin_convertvector(a, $F);"),
    # Three bit operations: gcc makes them a blend or masked moves, never a loop over lanes.
    "sel": Helper("$I m, $F a, $F b", "return m ? a : b;",
                  "return ($F)(((($I)a ^ ($I)b) & m) ^ ($I)b);"),
    "where": Helper("$M m, $F a, $F b", "return m ? a : b;",
                    "return $sel(__builtin_convertvector(m, $I), a, b);"),
    "where.bool": _both("$M m, $F a, $F b", "return $sel(m, a, b);"),
    "any": Helper("$I m", "return m;", "int r = 0;\n  for (int i = 0; i < $N; i++) r |= m[i];\n"
                  "  return r;", _atoms("ptestmd512(m, m, -1)", "movmskps256(($F)m)"), "int"),
    "not.int": _both("$F a", "return ~a;"),
    "xor": _both("$F a, $F b", "return a ^ b;"),
    "quotient": Helper("$F a, $F b", "return b == 0 ? 0 : b == ($F)-1 && ($F)-1 < 0 ? "
                       "($F)(0 - ($U)a) : a / b;"),
    "shift_left": _both("$F a, $F b", "return $sel((b >= 0) & (b < $B), "
                        "($F)(($U)a << ($U)(b & ($B - 1))), a - a);"),
    "shift_right": _both("$F a, $F b", "return $sel((b >= 0) & (b < $B), a >> (b & ($B - 1)), "
                         "$sel(a < 0, ~(a - a), a - a));"),
    "pow.int": Helper("$F a, $F b", """if (b < 0) return a == 1 || a == ($F)-1 ? b & 1 ? a : 1 : 0;
  $U r = 1, p = a;
  for (; b; b >>= 1, p *= p)
    if (b & 1) r *= p;
  return r;"""),
    "fma.int": _both("$F a, $F b, $F c", "return ($F)(($U)a * ($U)b + ($U)c);"),
    "fma": Helper(
        "$F a, $F b, $F c",
        """
#ifdef __FMA__
  return __builtin_fma$X(a, b, c);
#endif
  return a * b + c;""",
        """
#ifdef __FMA__
#ifdef __clang__
#pragma STDC FP_CONTRACT ON
  return a * b + c;
#endif
  $F r;
  for (int i = 0; i < $N; i++) r[i] = __builtin_fma$X(a[i], b[i], c[i]);
  return r;
#endif
  return a * b + c;""",
        _atoms("vfmadd$S512_mask(a, b, c, -1, 4)", "vfmadd$S256(a, b, c)")),
    **_extreme("max", ">"), **_extreme("min", "<"),
    "relu": _both("$F a", "return $xmax($K(0), a);"),
    "relu.int": _both("$F a", "return $max($K(0), a);"),
    "abs": Helper("$F a", "return __builtin_fabs$X(a);",
                  "return ($F)(($I)a & ~($I)$K(-0.0f));"),
    "abs.int": _both("$F a", "return $sel(a < 0, ($F)(0 - ($U)a), a);"),
    "abs.u8": _both("$F a", "return a;"),
    "sqrt": Helper("$F a", "return __builtin_sqrt$X(a);", atoms=_atoms(
        "sqrt$S512_mask(a, a, -1, 4)", "sqrt$S256(a)", least=128),
        portable="__builtin_elementwise_sqrt(a)"),
    "round": _rounding("rint", 8), "floor": _rounding("floor", 9), "ceil": _rounding("ceil", 10),
    "trunc": _rounding("trunc", 11),
}

HALVES: dict[str, Helper] = {
    "narrow": Helper("$U a", "return ($u16)a;", "return __builtin_convertvector(a, $u16);",
                     result="$u16"),
    "widen_u16": Helper("$u16 a", "return a;", "return __builtin_convertvector(a, $U);", (
        (512, 512, "($U)__builtin_ia32_pmovzxwd512_mask(($i16)a, ($I){0}, -1)"),
        (256, 256, "($U)__builtin_ia32_pmovzxwd256(($i16)a)")), "$U"),
    "from_bf16": _both("$u16 a", "return $unbits(($I)($widen_u16(a) << 16));"),
    "to_bf16": _both("$F a", """$U b = ($U)$bits(a);
  b = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
  return $narrow(($U)$pick(a == a, ($I)b, $KI(0x7fc0)));""", result="$u16"),
    # The half's exponent and fraction, moved, are a float 2^112 too small.
    "from_f16": Helper("$u16 a", _FROM_F16 := """$U h = $widen_u16(a), b = (h & 0x7fff) << 13;
  $I r = $bits($unbits(($I)b) * 0x1p112f);
  r = $pick(($I)(h & 0x7c00) == 0x7c00, ($I)(b | 0x7f800000), r);
  return $unbits(($I)((h & 0x8000) << 16) | r);""", _FROM_F16, (
        (512, 512, "__builtin_ia32_vcvtph2ps512_mask(($i16)a, ($F){0}, -1, 4)"),
        (256, 256, "__builtin_ia32_vcvtph2ps256(($i16)a)"))),
    # Below 2^-14 adding 0.5 rounds to the unit of denormal halves; from 65520 on it is infinity.
    "to_f16": Helper("$F a", _TO_F16 := """$I b = $bits(a) & 0x7fffffff;
  $I r = ($I)((($U)b + 0xfff + (($U)(b >> 13) & 1)) >> 13) - 0x1c000;
  r = $pick(b < 0x38800000, $bits($unbits(b) + 0.5f) - 0x3f000000, r);
  r = $pick(b >= 0x477ff000, $KI(0x7c00), r);
  r = $pick(a == a, r, $KI(0x7e00));
  return $narrow(($U)(r | (($bits(a) >> 16) & 0x8000)));""", _TO_F16, (
        (512, 512, "($u16)__builtin_ia32_vcvtps2ph512_mask(a, 0, ($i16){0}, -1)"),
        (256, 256, "($u16)__builtin_ia32_vcvtps2ph256(a, 0)")), "$u16"),
    "pick": Helper("$I m, $I a, $I b", "return m ? a : b;", "return ((a ^ b) & m) ^ b;",
                   result="$I"),
}


def _widening(element: str, builtin: str) -> Helper:
    """To i32 in steps of two, which gcc turns into few instructions."""
    steps = "a" if element == "i16" else "__builtin_convertvector(a, $i16)"
    source = "($c8)a" if element != "i16" else "a"
    return Helper(f"${element} a", "return a;", f"return __builtin_convertvector({steps}, $i32);",
                  ((512, 512, f"__builtin_ia32_{builtin}512_mask({source}, ($i32){{0}}, -1)"),),
                  "$i32")


WIDEN: dict[str, Helper] = {"widen_u8": _widening("u8", "pmovzxbd"),
                            "widen_i8": _widening("i8", "pmovsxbd"),
                            "widen_i16": _widening("i16", "pmovsxwd")}


def _conversion(params: str, *atoms: tuple[int, int, str]) -> Helper:
    """For vectors of two widths, whose halves gcc converts one by one."""
    atoms = tuple((bits, isa, f"($F)__builtin_ia32_{text}") for bits, isa, text in atoms)
    return Helper(params, "return a;", "return __builtin_convertvector(a, $F);", atoms)


CONVERT: dict[str, Helper] = {
    "i32_to_i64": _conversion("$i32 a", (512, 512, "pmovsxdq512_mask(a, ($q64){0}, -1)"),
                              (256, 256, "pmovsxdq256(a)")),
    "i64_to_i32": _conversion("$i64 a", (256, 512, "pmovqd512_mask(($q64)a, ($F){0}, -1)")),
    "f32_to_i64": _conversion("$f32 a", (512, 512, "cvttps2qq512_mask(a, ($q64){0}, -1, 4)")),
    "i32_to_f64": _conversion("$i32 a", (512, 512, "cvtdq2pd512_mask(a, ($F){0}, -1)"),
                              (256, 256, "cvtdq2pd256(a)")),
    # a loop, where it must be: gcc 12 fails on __builtin_convertvector in some comparisons
    "f32_to_f64": Helper("$f32 a", "return a;", portable="__builtin_convertvector(a, $F)", atoms=(
        (512, 512, "__builtin_ia32_cvtps2pd512_mask(a, ($F){0}, -1, 4)"),
        (256, 256, "__builtin_ia32_cvtps2pd256(a)"))),
}

_EXP_POLY = horner("r", ("0x1.6a1f5ep-10f", "0x1.123cccp-7f", "0x1.555904p-5f", "0x1.55548ep-3f",
                          "0x1.fffffcp-2f", "1.0f", "1.0f"))
_EXPM1_POLY = horner("r", ("0x1.9e76fcp-13f", "0x1.6d3d38p-10f", "0x1.1112d8p-7f",
                            "0x1.5554f6p-5f", "0x1.555554p-3f", "0.5f"))
_TANH_POLY = horner("z", ("-0x1.825836p-8f", "0x1.54b898p-6f", "-0x1.b898dcp-5f",
                           "0x1.1109aep-3f", "-0x1.55553ep-2f"))
_ERF_SMALL = horner("z", ("0x1.6510b4p-14f", "-0x1.aca38ep-11f", "0x1.550a44p-8f",
                           "-0x1.b81524p-6f", "0x1.ce2e54p-4f", "-0x1.812744p-2f",
                           "-0x1.fa84dcp-25f"))
_ERF_LARGE = horner("b", ("-0x1.5d723cp-16f", "0x1.c45954p-12f", "-0x1.106262p-8f",
                           "0x1.9aebbap-6f", "-0x1.bb454cp-4f", "-0x1.444d1ep-1f",
                           "-0x1.212626p+0f", "0x1.62d95p-13f"))
_LOG_POLY = horner("f", ("0x1.14573ep-4f", "-0x1.de3bf8p-4f", "0x1.e6f08cp-4f", "-0x1.fc220ep-4f",
                          "0x1.233766p-3f", "-0x1.555c4ep-3f", "0x1.99a4b6p-3f", "-0x1.000006p-2f",
                          "0x1.555548p-2f"))

MATH: dict[str, Helper] = {
    "rsqrt": _both("$F a", "return 1 / $sqrt(a);"),
    "sigmoid": _both("$F a", "return 1 / (1 + $exp(-a));"),
    "silu": _both("$F a", "return a / (1 + $exp(-a));"),
    "erfp1": _both("$F a", "return $erfc(-a);"),
    "exp_approx": _both("$F a", "return $exp(a);"),
    **{name: _libm(name) for name in (
        "exp", "exp2", "log", "tanh", "erf", "sin", "cos", "tan", "expm1", "log1p", "log2", "log10",
        "erfc", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh")},
    **{f"{name}{kind}": _libm(name, "$F a, $F b") for name, kind in (
        ("atan2", ""), ("hypot", ""), ("pow", ".float"), ("fmod", ""), ("nextafter", ""))},
    "sin.f32": _circular("sin", 0, _CIRCLE), "cos.f32": _circular("cos", 1, _CIRCLE),
    "tan.f32": _circular("tan", 0, "$sel(odd, -c, s) / $sel(odd, s, c)"),
    # p * 2^n for whole n in [-150, 129], by two factors so that denormal results round once.
    "scale": Helper(
        "$F p, $F n", _SCALE := """$I k = $toint(n), h = k >> 1;
  $U a = ($U)(h + 127) << 23, b = ($U)(k - h + 127) << 23;
  return p * $unbits(($I)a) * $unbits(($I)b);""", _SCALE,
        ((512, 512, "__builtin_ia32_scalef$S512_mask(p, n, p, -1, 4)"),
         (256, 512, "__builtin_ia32_scalef$S256_mask(p, n, p, -1)"),
         (128, 512, "__builtin_ia32_scalef$S128_mask(p, n, p, -1)"))),
    # e^x = 2^n e^r, n = round(x / ln 2), for x where the result is in range or NaN.
    "expcore.f32": _both("$F x", f"""$F n = $fma(x, $K(0x1.715476p+0f), $K({_ROUND_MAGIC}));
  n = n - {_ROUND_MAGIC};
  $F r = $fma(n, $K(-0x1.63p-1f), x);
  r = $fma(n, $K(0x1.bd0106p-13f), r);
  return $scale({_EXP_POLY}, n);"""),
    "exp.f32": _both("$F x", "return $expcore($xmin($K(89.0f), $xmax($K(-105.0f), x)));"),
    "exp2.f32": _both("$F x", f"""x = $xmin($K(129.0f), $xmax($K(-151.0f), x));
  $F n = (x + {_ROUND_MAGIC}) - {_ROUND_MAGIC};
  $F r = (x - n) * 0x1.62e43p-1f;
  return $scale({_EXP_POLY}, n);"""),
    # 2^n e^r - 1 as 2^n (e^r - 1) + (2^n - 1), but for large x, where 2^n overflows first.
    "expm1.f32": _both("$F x", f"""$F t = $xmin($K(89.0f), $xmax($K(-20.0f), x));
  $F n = $fma(t, $K(0x1.715476p+0f), $K({_ROUND_MAGIC})) - {_ROUND_MAGIC};
  $F r = $fma(n, $K(-0x1.63p-1f), t);
  r = $fma(n, $K(0x1.bd0106p-13f), r);
  $F p = $fma(r * r, {_EXPM1_POLY}, r), s = $scale($K(1.0f), n);
  return $copysign($sel(x > 20.0f, $scale(p + 1.0f, n), $fma(s, p, s - 1.0f)), x);"""),
    # log(u) x / (u - 1), u = 1 + x rounded: the errors cancel (Goldberg 1991, theorem 4).
    "log1p.f32": _both("$F x", """$F u = 1.0f + x, y = $log(u) * (x / (u - 1.0f));
  return $sel((u == 1.0f) | (u == __builtin_inff()), x, y);"""),
    "copysign": Helper("$F a, $F b", "return __builtin_copysign$X(a, b);",
                       "$I s = ($I)$K(-0.0f);\n  return ($F)((($I)a & ~s) | (($I)b & s));"),
    # A polynomial near 0, 1 - 2 / (e^2a + 1) beyond.
    "tanh.f32": _both("$F x", f"""$F a = $abs(x), z = a * a;
  $F small = $fma(a * z, {_TANH_POLY}, a);
  $F large = 1.0f - 2.0f / ($exp(a + a) + 1.0f);
  return $copysign($sel(a < 0.6f, small, large), x);"""),
    # x P(x^2) below 0.9, 1 - e^Q(a) beyond; from 4 on the result is 1.
    "erf.f32": _both("$F x", f"""$F a = $abs(x), z = a * a, b = $xmin($K(4.0f), a);
  $F small = $fma(a, {_ERF_SMALL}, a * 0x1.20dd76p+0f);
  $F large = 1.0f - $expcore({_ERF_LARGE});
  return $copysign($sel(a < 0.9f, small, large), x);"""),
    # x = 2^k (1 + f), 1 + f in [sqrt 1/2, sqrt 2]; log(1 + f) = f - f^2/2 + f^3 P(f).
    "log.f32": _both("$F x", f"""$I tiny = x < 0x1p-126f;
  $I b = ($I)(($U)$bits($sel(tiny, x * 0x1p23f, x)) - 0x3f3504f3);
  $F k = $toreal(b >> 23) - $sel(tiny, $K(23.0f), $K(0.0f));
  $F f = $unbits((b & 0x7fffff) + 0x3f3504f3) - 1.0f, s = f * f;
  $F r = $fma(f * s, {_LOG_POLY}, k * -0x1.bd0106p-13f);
  r = $fma(k, $K(0x1.63p-1f), f + $fma(s, $K(-0.5f), r));
  r = $sel(x > 0.0f, r, $sel(x == 0.0f, $K(-__builtin_inff()), $K(__builtin_nanf(""))));
  return $sel(x == __builtin_inff(), x, r);"""),
}

HELPERS: dict[str, Helper] = {**BASIC, **HALVES, **WIDEN, **CONVERT, **MATH}
