"""C text for scalar and vector values: header-free GNU C, right with and without AVX-512.

`Prelude` gives the expression for each operation and remembers which helpers the source needs;
`text()` is their definitions, to stand before the kernel:

    p = Prelude()
    p.call("exp", F32, 16, ["x"])  ->  "exp_f32x16(x)", and text() defines it and what it calls

A value of `lanes` > 1 is a GNU vector (`f32x16`) aligned as its element. A bool is an `int` 0/1, a
vector of bools 32-bit lanes of 0/-1, in memory both are `unsigned char`. bf16 and f16 are the
bits in `unsigned short`. Sources expect `-ffp-contract=off -fno-math-errno -fno-trapping-math`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from functools import reduce

import numpy as np

from rung.core.scalar import MONOIDS, SCALARS, round_bf16
from rung.core.types import BF16, BOOL, DTYPES, F16, F32, F64, I8, I16, I32, I64, U8, DType
from rung.targets.c_math import HELPERS, Helper

# C types of elements; the ones that are no DType are for use inside helpers.
_ELEMENTS = {"f64": "double", "f32": "float", "bf16": "unsigned short", "f16": "unsigned short",
             "i64": "long", "i32": "int", "i16": "short", "i8": "signed char", "bool": "int",
             "u8": "unsigned char", "u64": "unsigned long", "u32": "unsigned",
             "u16": "unsigned short", "c8": "char", "q64": "long long"}
_BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "bool": 4, "i64": 8, "i32": 4, "i16": 2, "i8": 1,
          "u8": 1, "u64": 8, "u32": 4, "u16": 2, "c8": 1, "q64": 8}
_INFIX = {name: fn.infix[0] for name, fn in SCALARS.items() if fn.infix}
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

# How the masked moves of AVX-512 and of AVX2 name an element type, and the type they take.
_MASKED = {"f32": ("ups", "ps", "f32"), "f64": ("upd", "pd", "f64"), "i32": ("dqusi", "d", "i32"),
           "i64": ("dqudi", "q", "q64"), "i16": ("dquhi", "", "i16"), "u16": ("dquhi", "", "i16"),
           "i8": ("dquqi", "", "c8"), "u8": ("dquqi", "", "c8")}

_HEADER = """\
#if defined(__clang__) || !defined(__GNUC__)
#define RUNG_ISA 0
#elif defined(__AVX512F__) && defined(__AVX512VL__) && defined(__AVX512DQ__) \\
    && defined(__AVX512BW__)
#define RUNG_ISA 512
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define RUNG_ISA 256
#else
#define RUNG_ISA 128
#endif
#ifndef __has_builtin
#define __has_builtin(name) 0
#endif
#pragma GCC diagnostic ignored "-Wpsabi"
"""

_PART_MASK = """\
static inline __attribute__((always_inline)) unsigned long part_mask(long n, long lanes) {
  return n <= 0 ? 0 : n >= lanes ? -1ul : (1ul << n) - 1;
}
"""

_BOUNDED = """\
static inline __attribute__((always_inline)) int bounded(long n, int lanes) {
  return n < 0 ? 0 : n > lanes ? lanes : (int)n;
}
"""


class Prelude:
    """The helper definitions that one C source needs, collected as its expressions are written."""

    header = _HEADER
    qualifiers = "static inline __attribute__((always_inline))"
    helpers: Mapping[str, Helper] = HELPERS
    infinity: Mapping[DType, str] = {F32: "__builtin_inff()", F64: "__builtin_inf()"}
    nan: Mapping[DType, str] = {F32: '__builtin_nanf("")', F64: '__builtin_nan("")'}

    def __init__(self) -> None:
        self._types: dict[str, str] = {}
        self._functions: dict[str, str] = {}

    def text(self) -> str:
        """The definitions used so far, each after those it depends on."""
        return "\n".join([self.header, *self._types.values(), "", *self._functions.values()])

    # --- types and constants ----------------------------------------------------------------------

    def type(self, dtype: DType, lanes: int = 1) -> str:
        """The C type of a value."""
        held = "i32" if dtype == BOOL else self._stored(dtype)
        return self._element(held if lanes > 1 else dtype.name, lanes)

    def storage(self, dtype: DType) -> str:
        """The C type of an element in memory."""
        return _ELEMENTS["u8" if dtype == BOOL else dtype.name]

    def constant(self, value: float | int | bool, dtype: DType, lanes: int = 1) -> str:
        """An exact literal."""
        return self.splat(dtype, lanes, self._literal(value, dtype))

    def splat(self, dtype: DType, lanes: int, scalar: str) -> str:
        """The scalar in all lanes."""
        return scalar if lanes == 1 else f"{self._helper('splat', dtype, lanes)}({scalar})"

    def iota(self, dtype: DType, lanes: int) -> str:
        """0, 1, 2, ... in the lanes."""
        return self.gather(dtype, lanes, [self._literal(i, dtype) for i in range(lanes)])

    def ramp(self, dtype: DType, lanes: int, base: str, run: str) -> str:
        """base, base + run, base + 2 * run, ..."""
        start, step = self.splat(dtype, lanes, base), self.splat(dtype, lanes, run)
        apart = self.call("mul", dtype, lanes, [step, self.iota(dtype, lanes)])
        return self.call("add", dtype, lanes, [start, apart])

    def signs(self, lanes: int, base: str, run: int) -> str:
        """Whether those are >= 0, in lanes of 32 bits: far from 0 all of them have one sign."""
        reach = abs(run) * lanes
        if reach > 1 << 30:
            return ""
        near = self.call("within", I64, 1, [base, str(reach)])
        return self.call("ge", I32, lanes, [self.ramp(I32, lanes, near, str(run)),
                                            self.constant(0, I32, lanes)])

    def gather(self, dtype: DType, lanes: int, elements: Sequence[str]) -> str:
        """The vector of scalar `elements`."""
        if lanes == 1:
            return elements[0]
        if dtype == BOOL:
            elements = [f"-({e})" for e in elements]
        return f"({self.type(dtype, lanes)}){{{', '.join(elements)}}}"

    def lane(self, value: str, k: int | str, dtype: DType = F32) -> str:
        """The scalar in lane `k` of a vector of `dtype` (of which only bool matters)."""
        return f"(({value})[{k}] != 0)" if dtype == BOOL else f"({value})[{k}]"

    # --- operations -------------------------------------------------------------------------------

    def call(self, fn: str, dtype: DType, lanes: int, args: Sequence[str],
             scalars: Collection[int] = ()) -> str:
        """`fn` of SCALARS; `dtype` is its last operand's. Positions in `scalars` are splatted."""
        args = [self.splat(BOOL if fn == "where" and i == 0 else dtype, lanes, arg)
                if i in scalars else arg for i, arg in enumerate(args)]
        if fn in _COMPARISONS:
            return self._compare(fn, dtype, lanes, args)
        if fn == "not" and dtype == BOOL:
            return f"(!{args[0]})" if lanes == 1 else f"(~{args[0]})"
        if fn == "reciprocal":
            return f"(1 / {args[0]})"
        if fn == "neg" and dtype.is_float:
            return f"(-{args[0]})"
        if fn in _INFIX and (dtype.is_float or dtype == BOOL or fn in ("and", "or")):
            return f"({args[0]} {_INFIX[fn]} {args[1]})"
        return f"{self._helper(fn, dtype, lanes)}({', '.join(args)})"

    def _compare(self, fn: str, dtype: DType, lanes: int, args: Sequence[str]) -> str:
        """Inline where the comparison's own lanes are those of a bool, else converted to them."""
        text = f"({args[0]} {_INFIX[fn]} {args[1]})"
        size = 4 if dtype == BOOL else dtype.bytes
        return text if lanes == 1 else self._convert(f"i{8 * size}", "i32", lanes, text)

    def cast(self, src: DType, dst: DType, lanes: int, arg: str) -> str:
        """The conversion of `rung.core.scalar.cast`."""
        if src == dst:
            return arg
        if src in (BF16, F16):
            wide = f"{self._helper(f'from_{src}', F32, lanes)}({arg})"
            return self.cast(F32, dst, lanes, wide)
        if dst in (BF16, F16):
            single = self.cast(src, F32, lanes, arg)
            return f"{self._helper(f'to_{dst}', F32, lanes)}({single})"
        if dst == BOOL:
            return self.call("ne", src, lanes, [arg, self.constant(0, src, lanes)])
        if src == BOOL:  # by `neg`, since gcc 12 takes least > -x, of signed vectors, for true
            whole = arg if lanes == 1 else self.call("neg", I32, lanes, [arg])
            return self.cast(I32, dst, lanes, whole)
        if src.is_float and dst in (I16, I8, U8):
            return self.cast(I32, dst, lanes, self.cast(src, I32, lanes, arg))
        if dst.is_float and src in (I16, I8, U8):
            return self.cast(I32, dst, lanes, self.cast(src, I32, lanes, arg))
        return self._convert(src.name, dst.name, lanes, arg)

    def _convert(self, src: str, dst: str, lanes: int, arg: str) -> str:
        """Between element types, integers to integers in steps that the machine has."""
        if lanes == 1 and src in ("f32", "f64") and dst in ("i32", "i64"):
            return f"{self._helper(f'to_{dst}', DTYPES[src], 1)}({arg})"
        if lanes == 1:
            return f"({_ELEMENTS[dst]})({arg})"
        if src == dst:
            return arg
        if "f" not in src + dst and _BYTES[src] < 4 <= _BYTES[dst]:
            arg, src = f"{self._helper(f'widen_{src}', I32, lanes)}({arg})", "i32"
        if "f" not in src + dst and _BYTES[src] > 2 * _BYTES[dst]:
            arg = self._convert(src, "i32" if _BYTES[src] == 8 else "i16", lanes, arg)
        if src == dst:
            return arg
        if "f" in src and dst in ("i32", "i64"):
            arg = f"{self._helper(f'fit_{dst}', DTYPES[src], lanes)}({arg})"
        if f"{src}_to_{dst}" in self.helpers:
            return f"{self._helper(f'{src}_to_{dst}', DTYPES[dst], lanes)}({arg})"
        return f"__builtin_convertvector({arg}, {self._element(dst, lanes)})"

    def reduce(self, monoid: str, dtype: DType, lanes: int, value: str) -> str:
        """All lanes combined, in the order of a tree, to a scalar."""
        if lanes == 1:
            return value
        name = f"reduce_{monoid}_{dtype}x{lanes}"
        if name not in self._functions:
            half, fn = lanes // 2, MONOIDS[monoid].combine
            sides = [self._half(dtype, lanes, "v", side) for side in (0, 1)]
            result = self.reduce(monoid, dtype, half, self.call(fn, dtype, half, sides))
            self._define(name, self.type(dtype), f"{self.type(dtype, lanes)} v",
                         f"return {result};")
        return f"{name}({value})"

    def _half(self, dtype: DType, lanes: int, value: str, side: int) -> str:
        half = lanes // 2
        if half == 1:
            return self.lane(value, side, dtype)
        picked = ", ".join(str(side * half + i) for i in range(half))
        return f"__builtin_shufflevector({value}, {value}, {picked})"

    # --- memory -----------------------------------------------------------------------------------

    def load(self, dtype: DType, lanes: int, pointer: str) -> str:
        """`lanes` elements at `pointer`, a pointer to elements that needs no more alignment."""
        if lanes == 1:
            return f"(*({pointer}) != 0)" if dtype == BOOL else f"(*({pointer}))"
        stored = self._element(self._stored(dtype), lanes)
        return self._to_value(dtype, lanes, f"(*(const {stored} *)({pointer}))")

    def store(self, dtype: DType, lanes: int, pointer: str, value: str) -> str:
        """The statement that stores `value` at `pointer`."""
        if lanes == 1:
            return f"*({pointer}) = {value};"
        stored = self._element(self._stored(dtype), lanes)
        return f"*({stored} *)({pointer}) = {self._to_storage(dtype, lanes, value)};"

    def load_part(self, dtype: DType, lanes: int, pointer: str, first: str, end: str) -> str:
        """The lanes from `first` to before `end`, the rest 0; touches no memory outside of them."""
        name = self._part("load", self._stored(dtype), lanes, bool(first))
        args = ", ".join(filter(None, (pointer, first, end or str(lanes))))
        return self._to_value(dtype, lanes, f"{name}({args})")

    def store_part(self, dtype: DType, lanes: int, pointer: str, value: str, first: str, end: str
                   ) -> str:
        """The statement that stores the lanes from `first` to before `end`."""
        name = self._part("store", self._stored(dtype), lanes, bool(first))
        stored = self._to_storage(dtype, lanes, value)
        args = ", ".join(filter(None, (pointer, stored, first, end or str(lanes))))
        return f"{name}({args});"

    def span(self, lanes: int, first: str, end: str) -> str:
        """A truth for each lane: whether it is at or after `first` and before `end`."""
        self._functions.setdefault("bounded", _BOUNDED)
        sides = [(fn, self.splat(I32, lanes, f"bounded({at}, {lanes})"))
                 for fn, at in (("ge", first), ("lt", end)) if at]
        tests = [self.call(fn, I32, lanes, [self.iota(I32, lanes), at]) for fn, at in sides]
        return reduce(lambda a, b: self.call("and", BOOL, lanes, [a, b]), tests)

    def _stored(self, dtype: DType) -> str:
        return {"bool": "u8", "bf16": "u16", "f16": "u16"}.get(dtype.name, dtype.name)

    def _to_value(self, dtype: DType, lanes: int, stored: str) -> str:
        if dtype != BOOL:
            return stored
        kind = self._element("i32", lanes)  # a comparison gives a type like it, but another
        return f"(({kind})({self._convert('u8', 'i32', lanes, stored)} != 0))"

    def _to_storage(self, dtype: DType, lanes: int, value: str) -> str:
        return self._convert("i32", "u8", lanes, f"({value} & 1)") if dtype == BOOL else value

    def _part(self, what: str, element: str, lanes: int, cut: bool) -> str:
        """The helper that loads or stores the first `n` lanes of a vector, with `cut` only those
        from lane `m` on."""
        name = f"{what}_{'span' if cut else 'part'}_{element}x{lanes}"
        if name in self._functions:
            return name
        vector, scalar = self._element(element, lanes), _ELEMENTS[element]
        loading = what == "load"
        loop = f"for (int i = 0; i < {lanes}; i++)\n    if ({'i >= m && ' * cut}i < n) "
        plain = (f"{vector} r = {{0}};\n  {loop}r[i] = p[i];\n  return r;" if loading
                 else f"{loop}p[i] = v[i];")
        body = self._masked(what, element, lanes, plain, cut)
        params = f"const {scalar} *p" if loading else f"{scalar} *p, {vector} v"
        params += ", long m, long n" if cut else ", long n"
        self._define(name, vector if loading else "void", params, body)
        return name

    def _masked(self, what: str, element: str, lanes: int, plain: str, cut: bool) -> str:
        """`plain`, or the builtin under its #if where a vector has a width of the hardware."""
        bits = _BYTES[element] * lanes * 8
        if bits not in (128, 256, 512):
            return plain
        stem, avx2, taken = _MASKED[element]
        vector, taken = self._element(element, lanes), self._element(taken, lanes)
        self._functions.setdefault("part_mask", _PART_MASK)
        new, old = f"__builtin_ia32_{what}{stem}{bits}_mask", ""
        mask = f"part_mask(n, {lanes})" + f" & ~part_mask(m, {lanes})" * cut
        pointer = "(void *)p"
        if bits < 512 and avx2:
            lane = "i64" if _BYTES[element] == 8 else "i32"
            iota, kind = self._iota(lane, lanes), _ELEMENTS[lane]
            test = f"{iota} < ({kind})n"
            test = f"({test}) & ({iota} >= ({kind})m)" if cut else test
            test = f"({self._element('q64' if lane == 'i64' else lane, lanes)})({test})"
            old = f"__builtin_ia32_mask{what}{avx2}{256 if bits == 256 else ''}({pointer}, {test}"
            clamp = " ".join(f"{v} = {v} < 0 ? 0 : {v} > {lanes} ? {lanes} : {v};"
                             for v in ("n", "m")[:1 + cut])
        if what == "load":
            first = f"return ({vector}){new}({pointer}, ({taken}){{0}}, {mask});"
            second = f"{clamp}\n  return ({vector}){old});" if old else ""
        else:
            first = f"{new}({pointer}, ({taken})v, {mask});"
            second = f"{clamp}\n  {old}, ({taken})v);" if old else ""
        middle = f"#elif RUNG_ISA >= 256\n  {second}\n" if second else ""
        return f"\n#if RUNG_ISA >= 512\n  {first}\n{middle}#else\n  {plain}\n#endif"

    def _iota(self, element: str, lanes: int) -> str:
        return f"({self._element(element, lanes)}){{{', '.join(map(str, range(lanes)))}}}"

    # --- definitions ------------------------------------------------------------------------------

    def _element(self, element: str, lanes: int) -> str:
        """The C type of `lanes` elements; defines it if it is a vector."""
        if lanes == 1:
            return _ELEMENTS[element]
        name, size = f"{element}x{lanes}", _BYTES[element]
        self._types.setdefault(name, (
            f"typedef {_ELEMENTS[element]} {name} "
            f"__attribute__((vector_size({size * lanes}), aligned({size}), may_alias));"))
        return name

    def _define(self, name: str, result: str, params: str, body: str) -> None:
        body = body[1:] if body.startswith("\n") else "  " + body
        self._functions[name] = f"{self.qualifiers} {result} {name}({params}) {{\n{body}\n}}\n"

    def _helper(self, name: str, dtype: DType, lanes: int) -> str:
        """The C name of a helper; defines it and, first, the helpers that it calls."""
        c_name = f"{name}_{dtype}" + (f"x{lanes}" if lanes > 1 else "")
        if c_name not in self._functions:
            helper = self._find(name, dtype)
            body = helper.scalar if lanes == 1 else self._vector_body(helper, name, dtype, lanes)
            result, params, body = (self._expand(part, dtype, lanes)
                                    for part in (helper.result, helper.params, body))
            self._define(c_name, result, params, body)
        return c_name

    def _find(self, name: str, dtype: DType) -> Helper:
        kind = "float" if dtype.is_float else "bool" if dtype == BOOL else "int"
        for key in (f"{name}.{dtype}", f"{name}.{kind}", name):
            if key in self.helpers:
                return self.helpers[key]
        raise ValueError(f"no C helper for {name} of {dtype}")

    def _vector_body(self, helper: Helper, name: str, dtype: DType, lanes: int) -> str:
        body = helper.vector
        if body is None:
            args = ", ".join(f"{p.split()[-1]}[i]" for p in helper.params.split(","))
            one = self._helper(name, dtype, 1)
            body = (f"{helper.result} r;\n  for (int i = 0; i < {lanes}; i++) "
                    f"r[i] = {one}({args});\n  return r;")
        choices = [(f"RUNG_ISA >= {isa}", text) for bits, isa, text in helper.atoms
                   if bits == dtype.bits * lanes and dtype in (F32, F64, I32, I64)]
        if helper.portable:
            choices.append((f"__has_builtin({helper.portable.partition('(')[0]})", helper.portable))
        if not choices:
            return body
        body = body[1:] if body.startswith("\n") else "  " + body
        tests = "\n#el".join(f"if {test}\n  return {text};" for test, text in choices)
        return f"\n#{tests}\n#else\n{body}\n#endif"

    def _expand(self, text: str, dtype: DType, lanes: int) -> str:
        """Replace the `$` names of a helper's text (see `c_math`)."""
        size = 4 if dtype == BOOL else dtype.bytes
        unsigned = f"u{size * 8}" if lanes > 1 or size == 8 else "u32"
        single = dtype == F32
        plain = {"E": self.type(dtype), "M": self.type(BOOL, lanes), "N": str(lanes),
                 "B": str(8 * size), "X": "f" if single else "", "S": "ps" if single else "pd"}

        def name(match: re.Match[str]) -> str:
            word = match[1]
            if word in _BYTES:
                return self._element(word, lanes)
            if word == "K":
                return "" if lanes == 1 else self._helper("splat", dtype, lanes)
            if word == "KI":
                return "" if lanes == 1 else self._helper("splat", I64 if size == 8 else I32, lanes)
            if word == "F":
                return self.type(dtype, lanes)
            if word in ("I", "U"):
                return self._element(f"i{size * 8}" if word == "I" else unsigned, lanes)
            return plain[word] if word in plain else self._helper(word, dtype, lanes)
        return re.sub(r"\$([A-Z](?![A-Za-z])|\w+)", name, text)

    # --- literals ---------------------------------------------------------------------------------

    def _literal(self, value: float | int | bool, dtype: DType) -> str:
        if dtype == BOOL:
            return str(int(bool(value)))
        if dtype in (BF16, F16):
            return f"((unsigned short){_half_bits(float(value), dtype):#x})"
        if dtype.is_float:
            return self._real_literal(float(value), dtype)
        low = -(1 << (dtype.bits - 1)) if dtype.kind == "i" else 0
        suffix = "l" if dtype == I64 else ""
        if int(value) == low < 0:
            digits = f"({low + 1}{suffix} - 1)"
        else:
            digits = f"({int(value)}{suffix})" if value < 0 else f"{int(value)}{suffix}"
        return digits if dtype.bits >= 32 else f"(({_ELEMENTS[dtype.name]}){digits})"

    def _real_literal(self, value: float, dtype: DType) -> str:
        if math.isnan(value):
            return self.nan[dtype]
        with np.errstate(over="ignore"):
            value = float(np.float32(value)) if dtype == F32 else value
        if math.isinf(value):
            return self.infinity[dtype] if value > 0 else f"(-{self.infinity[dtype]})"
        text = value.hex() + ("f" if dtype == F32 else "")
        return f"({text})" if text.startswith("-") else text


def _half_bits(value: float, dtype: DType) -> int:
    """The bits of `value` rounded to bf16 or f16."""
    with np.errstate(over="ignore"):
        if dtype == F16:
            return int(np.float32(value).astype(np.float16).view(np.uint16))
        return int(round_bf16(np.asarray(value, np.float32)).view(np.uint32)) >> 16
