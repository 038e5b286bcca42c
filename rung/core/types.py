"""Element types and the types of values on each rung.

`f32[504,512]` is a tensor, `f32 over i,k` a value over named axes (Loop IR), `f32x16 over r<14` a
vector unrolled over an axis (Kernel IR), `l2 f32[36,256,14]` an array in a memory space.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from rung.core.expr import ONE, Expr

if TYPE_CHECKING:
    from rung.core.lexer import Cursor


@dataclass(frozen=True)
class DType:
    """An element type. `kind` is f(loat), i(nteger), u(nsigned) or b(ool)."""

    name: str
    kind: str
    bits: int

    @cached_property
    def bytes(self) -> int:
        return (self.bits + 7) // 8

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    @property
    def numpy(self) -> np.dtype:
        """The NumPy type that holds values of this type; bf16 is held, rounded, in float32."""
        return np.dtype({"bf16": "float32", "f16": "float16", "bool": "bool"}.get(self.name)
                        or {"f": "float", "i": "int", "u": "uint"}[self.kind] + str(self.bits))

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:  # it is part of many keys
        return hash(self.name)


F64, F32, BF16, F16 = (DType(n, "f", b) for n, b in
                       (("f64", 64), ("f32", 32), ("bf16", 16), ("f16", 16)))
I64, I32, I16, I8 = (DType(f"i{b}", "i", b) for b in (64, 32, 16, 8))
U8 = DType("u8", "u", 8)
BOOL = DType("bool", "b", 8)
DTYPES = {d.name: d for d in (F64, F32, BF16, F16, I64, I32, I16, I8, U8, BOOL)}


@dataclass(frozen=True)
class TensorType:
    """A whole tensor. `strides` in elements; None means contiguous (row-major). `device` is where
    it lies, if not where the program runs."""

    dtype: DType
    shape: tuple[Expr, ...]
    strides: tuple[Expr, ...] | None = None
    device: str = ""

    def __str__(self) -> str:
        text = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        if self.strides is not None:
            text += f" strides [{','.join(map(str, self.strides))}]"
        return text + (f" on {self.device}" if self.device else "")


@dataclass(frozen=True)
class AxesType:
    """A value that varies over named axes, its loop nest; over none it is a scalar `VecType`."""

    dtype: DType
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.dtype} over {','.join(self.axes)}" if self.axes else f"{self.dtype}"


@dataclass(frozen=True)
class VecType:
    """A register value: `lanes` elements wide, replicated over unrolled axes (name, count).

    The axes are kept sorted, so that a type does not depend on which operand came first.
    """

    dtype: DType
    lanes: int = 1
    unroll: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if len(self.unroll) > 1:
            object.__setattr__(self, "unroll", tuple(sorted(self.unroll)))

    def __str__(self) -> str:
        text = f"{self.dtype}x{self.lanes}" if self.lanes > 1 else str(self.dtype)
        if self.unroll:
            text += " over " + ",".join(f"{name}<{count}" for name, count in self.unroll)
        return text


@dataclass(frozen=True)
class ArrayType:
    """An array of fixed shape in a memory space of the machine."""

    space: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        size = self.dtype.bytes
        for extent in self.shape:
            size *= extent
        return size

    def __str__(self) -> str:
        return f"{self.space} {self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class IndexType:
    """A loop variable or symbolic size: a 64-bit integer."""

    def __str__(self) -> str:
        return "index"


def axes_type(dtype: DType, axes: tuple[str, ...]) -> AxesType | VecType:
    """The type of a Loop IR value over `axes`."""
    return AxesType(dtype, axes) if axes else VecType(dtype)


def contiguous(shape: Sequence[Expr | int]) -> tuple[Expr, ...]:
    """Strides in elements of contiguous memory; as torch has them, none is 0."""
    strides = [ONE]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * (ONE if Expr.of(size).is_const(0) else size))
    return tuple(reversed(strides)) if shape else ()


def axes_of(t: Type) -> tuple[str, ...]:
    """The named axes of a Loop IR value; none for a scalar."""
    return t.axes if isinstance(t, AxesType) else ()


def shape_of(t: Type) -> tuple[Expr, ...]:
    """The sizes of a tensor; () for a scalar."""
    return t.shape if isinstance(t, TensorType) else ()


def dtype_of(t: Type) -> DType:
    """The element type; a loop variable or size counts as i64."""
    return I64 if isinstance(t, IndexType) else t.dtype


Type = TensorType | AxesType | VecType | ArrayType | IndexType
INDEX = IndexType()
FLOAT = VecType(F64)  # of a program: a float that the host computes
Axis = str  # a field of this annotation names an axis, a loop variable or an unrolled axis


def read_type(p: Cursor) -> Type:
    """The inverse of `str`; raises ParseError."""
    if p.accept("index"):
        return INDEX
    space = p.name() if _is_type(p.peek(1)) else ""
    word = p.name()
    if not _is_type(word):
        p.fail(f"no type is called {word}", back=1)
    stem, _, lanes = word.partition("x")
    dtype = DTYPES[stem]
    if space:
        sizes = [s.const_value for s in p.sizes()]
        if None in sizes:
            p.fail("an array has constant sizes", back=1)
        return ArrayType(space, dtype, tuple(s or 0 for s in sizes))
    if p.peek() == "[":
        shape, strides = p.sizes(), p.sizes() if p.accept("strides") else None
        return TensorType(dtype, shape, strides, p.name() if p.accept("on") else "")
    pairs = _over(p) if p.accept("over") else []
    unroll = tuple((name, count) for name, count in pairs if count is not None)
    if pairs and not lanes and not unroll:
        return axes_type(dtype, tuple(name for name, _ in pairs))
    if len(unroll) < len(pairs):
        p.fail("an unrolled axis has a count, as in r<14", back=1)
    return VecType(dtype, int(lanes or 1), unroll)


def _over(p: Cursor) -> list[tuple[str, int | None]]:
    """`i,j` or `r<14,q<2`; a comma before a type starts the next type."""
    pairs: list[tuple[str, int | None]] = []
    while not pairs or (not _is_type(p.peek(1)) and p.accept(",")):
        pairs.append((p.name(), p.integer() if p.accept("<") else None))
    return pairs


def _is_type(word: str) -> bool:
    stem, x, lanes = word.partition("x")
    return stem in DTYPES and (not x or lanes.isdigit())
