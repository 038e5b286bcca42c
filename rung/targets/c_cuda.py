"""The same text for CUDA C++ (nvcc and NVRTC, no includes), one lane to a thread.

`CudaPrelude().call("exp", F32, 1, ["x"])` is `exp_f32(x)`, a device function over `expf`. Compile
with `-fmad=false`: products and sums are fused by a pass, where the precision lets it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rung.core.types import BOOL, F32, F64, DType
from rung.targets.c_family import Prelude
from rung.targets.c_math import HELPERS, Helper, horner

# log2(erfc(a)) / a for 0 <= a < 3.9, so that erfc errs by 2e-8 at most; beyond, erfc goes to 0.
_ERFC_POLY = horner("a", ("-0x1.7c7eacp-15f", "0x1.d325e0p-12f", "-0x1.86729ap-10f",
                           "-0x1.962172p-11f", "0x1.cee88ap-6f", "-0x1.301722p-3f",
                           "-0x1.d63aacp-1f", "-0x1.a0be9ep+0f"))


def _library(name: str, params: str = "$F a") -> Helper:
    args = ", ".join(p.split()[-1] for p in params.split(","))
    return Helper(params, f"return {name}$X({args});")


_DEVICE: dict[str, Helper] = {
    **{name: _library(name) for name in ("sqrt", "rsqrt", "floor", "ceil", "trunc")},
    **{f"{name}{kind}": _library(name) for kind in ("", ".f32") for name in (
        "exp", "exp2", "log", "tanh", "erf", "sin", "cos", "tan", "expm1", "log1p", "log2", "log10",
        "erfc", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh")},
    **{f"{name}{kind}": _library(name, "$F a, $F b") for name, kind in (
        ("atan2", ""), ("hypot", ""), ("pow", ".float"), ("fmod", ""), ("nextafter", ""))},
    "to_i32": Helper("$F a", "return (int)a;", result="int"),
    "to_i64": Helper("$F a", "return (long)a;", result="long"),
    "abs": _library("fabs"), "round": _library("rint"),
    "fma": _library("fma", "$F a, $F b, $F c"),
    # Cheaper than the library where an error relative to 1 is allowed. Its own `exp` and
    # `tanh` take 8 and 13 instructions, and can hardly take fewer.
    "pow2": Helper("$F a", "return exp2f(a);"), "over": Helper("$F a", "return 1 / a;"),
    "erfp1.f32": Helper("$F x", f"""float a = $abs(x), e = $pow2(a * {_ERFC_POLY});
  return x < 0.0f ? e : 2.0f - e;"""),
    "exp_approx.f32": Helper("$F a", "return $pow2(a * 1.44269504f);"),
    # 1 / (1 + e^-a), both scaled so that `over` meets and makes normal numbers only.
    "sigmoid.f32": Helper("$F a", """return $over($fma($exp(-a), 0.125f, 0.125f)) * 0.125f;"""),
    "silu.f32": Helper("$F a", "return a * $sigmoid(a);"),
    "bits": Helper("$F a", "return __float_as_int(a);", result="$I"),
    "bits.f64": Helper("$F a", "return __double_as_longlong(a);", result="$I"),
    "unbits": Helper("$I a", "return __int_as_float(a);"),
    "unbits.f64": Helper("$I a", "return __longlong_as_double(a);"),
}


def _instruction(ptx: str, params: str, letters: str, result: str = "$F") -> Helper:
    """One PTX instruction; inline PTX has a letter for the type of the result, then of each
    operand."""
    names = [p.split()[-1] for p in params.split(",")]
    places = ", ".join(f"%{n}" for n in range(len(letters)))
    given = ", ".join(f'"{x}"({name})' for x, name in zip(letters[1:], names, strict=True))
    return Helper(params, f'{result} r;\n  asm("{ptx} {places};" : "={letters[0]}"(r) : {given});\n'
                          "  return r;", result=result)


# What inline PTX says better than C does. The helpers of these names in c_math mean the same, but
# that a NaN becomes 0x7fff in 16 bits, as torch's conversions on a GPU have it.
PTX: dict[str, Helper] = {
    "to_bf16": _instruction("cvt.rn.bf16.f32", "$F a", "hf", "$u16"),
    "to_f16": _instruction("cvt.rn.f16.f32", "$F a", "hf", "$u16"),
    "from_f16": _instruction("cvt.f32.f16", "$u16 a", "fh"),
    "max.f32": _instruction("max.NaN.f32", "$F a, $F b", "fff"),
    "min.f32": _instruction("min.NaN.f32", "$F a, $F b", "fff"),
    "pow2": _instruction("ex2.approx.ftz.f32", "$F a", "ff"),  # 2^-22.5 off, relatively
    "over": _instruction("rcp.approx.ftz.f32", "$F a", "ff"),  # 1 ulp off
}


class CudaPrelude(Prelude):
    """`Prelude` for device code; every `lanes` is 1. Without `ptx` there is no inline PTX in it."""

    header = ""
    qualifiers = "static __device__ __forceinline__"
    infinity: Mapping[DType, str] = {
        F32: "__int_as_float(0x7f800000)", F64: "__longlong_as_double(0x7ff0000000000000)"}
    nan: Mapping[DType, str] = {
        F32: "__int_as_float(0x7fc00000)", F64: "__longlong_as_double(0x7ff8000000000000)"}

    def __init__(self, ptx: bool = True):
        super().__init__()
        self.helpers = {**HELPERS, **_DEVICE, **(PTX if ptx else {})}

    def type(self, dtype: DType, lanes: int = 1) -> str:
        """The C type of a value."""
        _one(lanes)
        return super().type(dtype, lanes)

    def splat(self, dtype: DType, lanes: int, scalar: str) -> str:
        """The scalar itself."""
        _one(lanes)
        return super().splat(dtype, lanes, scalar)

    def call(self, fn: str, dtype: DType, lanes: int, args: Sequence[str],
             scalars: Collection[int] = ()) -> str:
        """See `Prelude.call`."""
        _one(lanes)
        return super().call(fn, dtype, lanes, args, scalars)

    def load(self, dtype: DType, lanes: int, pointer: str) -> str:
        """The element; `x[i]` where the pointer is the address of that."""
        text = pointer[1:] if pointer.startswith("&") else f"(*({pointer}))"
        return f"({text} != 0)" if dtype == BOOL else text

    def store(self, dtype: DType, lanes: int, pointer: str, value: str) -> str:
        """See `Prelude.store`."""
        return f"{pointer[1:]} = {value};" if pointer.startswith("&") else super().store(
            dtype, lanes, pointer, value)


def _one(lanes: int) -> None:
    if lanes != 1:
        raise ValueError(f"CUDA values have one lane, not {lanes}")
