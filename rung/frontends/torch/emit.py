"""What the entries of the table build with: ops of one call, conversions put where torch has them.

Arithmetic on bf16 and f16 happens in f32: operands are upcast, the result is rounded by an
implicit cast.

An entry whose ATen op raises for some elements says so by `e.check(at, low, high, "IndexError",
message)` or, for a divisor, `e.check_nonzero(y)`: eager's exception is then raised before any
argument is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch

from rung.core.errors import Unsupported
from rung.core.expr import Expr, sym
from rung.core.op import Builder, Op, Value
from rung.core.ops import Cast, Const, IndexValue, Map
from rung.core.scalar import cast
from rung.core.types import BF16, BOOL, F16, F32, F64, U8, DType, TensorType, Type, dtype_of
from rung.frontends.torch import shapes
from rung.frontends.torch.calls import is_number
from rung.frontends.torch.tensors import DTYPES
from rung.frontends.torch.types import TORCH_DTYPES
from rung.program.ir import CHECKED, Check
from rung.tensor.ir import Full, Index, Iota, Reduce, axis_names, shape_of

HALVES = (BF16, F16)
Number = bool | int | float
Operand = Value | Number | Expr


def compute_dtype(dtype: DType) -> DType:
    """The type that torch computes in for values of `dtype`."""
    return F32 if dtype in HALVES else dtype


def dimension(dim: int, rank: int) -> int:
    """A dimension counted from the start; scalars count as of rank 1. Unsupported where there is
    none: torch does not always say so before it runs."""
    if not -max(rank, 1) <= dim < max(rank, 1):
        raise Unsupported(f"dimension {dim} of {rank}")
    return dim + max(rank, 1) if dim < 0 else dim


def axis_exprs(rank: int) -> tuple[Expr, ...]:
    """The axes that `Emit.index` names the dimensions of its result by."""
    return tuple(map(sym, axis_names(rank)))


class Emit:
    """Appends the ops of one call, whose results have `types`; `gpu` says that torch would run its
    kernels of GPUs: they divide integers by zero without an error and add float32 in float32."""

    def __init__(self, builder: Builder, types: tuple[Type, ...], gpu: bool = False):
        self.gpu = gpu
        self.builder = builder
        self.types = types

    def result(self, n: int = 0) -> TensorType:
        kind = self.types[n]
        if not isinstance(kind, TensorType):
            raise Unsupported(f"a result of type {kind}")
        return kind

    @property
    def dtype(self) -> DType:
        return self.result().dtype

    @property
    def shape(self) -> tuple[Expr, ...]:
        return self.result().shape

    def op(self, op: Op) -> Value:
        return self.builder.one(op, "t")

    # ---- elementwise
    def map(self, fn: str, *args: Operand) -> Value:
        """A scalar function; numbers take the type of the last operand that is a value."""
        *_, dtype = (dtype_of(a.type) for a in args if isinstance(a, Value))
        return self.op(Map(fn, tuple(a if isinstance(a, Value) else self.value(a, dtype)
                                     for a in args)))

    def literal(self, x: Number, dtype: DType) -> Number:
        """A Python number as `dtype` holds it; Unsupported where it does not fit."""
        if dtype is BOOL:
            return bool(x)
        if dtype.is_float:
            if math.isfinite(x) and abs(x) > torch.finfo(DTYPES[dtype]).max:
                raise Unsupported(f"{x} as {dtype}")  # many of torch's kernels raise
            return float(cast(np.asarray(float(x)), F64, dtype)) if dtype in HALVES else float(x)
        if not math.isfinite(x) or int(x) != x or not _fits(x, dtype):
            raise Unsupported(f"{x} as {dtype}")
        return int(x) % 256 if dtype is U8 else int(x)

    def value(self, x: Operand, dtype: DType) -> Value:
        """`x` converted to `dtype`, where no setting drops eager's rounding: what leaves bf16 has
        its bits."""
        if isinstance(x, Expr):
            x = self.op(IndexValue(x)) if x.const_value is None else x.const_value
        if isinstance(x, Value):
            kept = self.op(Cast(x, BF16)) if dtype_of(x.type) is BF16 is not dtype else x
            return self.widened(kept, dtype)
        return self.op(Const(self.literal(x, dtype), dtype))

    def widened(self, x: Value, dtype: DType) -> Value:
        """`x` as kernels compute with it: the default setting drops the rounding before."""
        return x if dtype_of(x.type) == dtype else self.op(Cast(x, dtype))

    def operand(self, x: Operand, dtype: DType, exact: bool = False) -> Value:
        """`x` as torch reads an operand of an op on `dtype`: in that type, then upcast.

        `exact`: a scalar goes to the computing type at once, as in torch's arithmetic kernels.
        """
        wide = compute_dtype(dtype)
        if isinstance(x, Value) and dtype_of(x.type) == dtype:
            return self.widened(x, wide)
        scalar = not isinstance(x, Value) or not shape_of(x)
        if dtype is wide or (exact and scalar):
            return self.value(x, wide)
        if isinstance(x, bool | int | float):
            return self.value(self.literal(x, dtype), wide)
        return self.value(self.rounded(self.value(x, wide), dtype), wide)

    def rounded(self, x: Value, dtype: DType) -> Value:
        return self.op(Cast(x, dtype, implicit=True)) if dtype_of(x.type) != dtype else x

    def finish(self, x: Value, n: int = 0) -> Value:
        """`x` as result `n`: expanded and rounded."""
        want = self.result(n)
        if dtype_of(x.type) != want.dtype:
            if want.dtype not in HALVES or dtype_of(x.type) is not F32:
                raise Unsupported(f"a result {want.dtype} computed as {dtype_of(x.type)}")
            x = self.rounded(x, want.dtype)
        return self.expand(x, want.shape)

    # ---- index maps
    def index(self, x: Value, shape: Sequence[Expr], subs: Sequence[Expr],
              mask: Sequence[Expr] = (), fill: Number = 0) -> Value:
        """`index`, over axes named as by `axis_names`; `x` itself where nothing moves."""
        axes = axis_names(len(shape))
        same = tuple(shape) == shape_of(x) and tuple(subs) == axis_exprs(len(shape))
        if same and not mask and isinstance(x.type, TensorType):
            return x
        if any(s.is_const(0) for s in shape):
            return self.op(Full(self.literal(0, dtype_of(x.type)), dtype_of(x.type), tuple(shape)))
        return self.op(Index(x, axes, tuple(shape), tuple(subs), tuple(mask), fill))

    def remap(self, x: Value, shape: Sequence[Expr],
              subs: Callable[[tuple[Expr, ...]], Sequence[Expr]]) -> Value:
        """`index` with subscripts as a function of the axes."""
        return self.index(x, shape, subs(axis_exprs(len(shape))))

    def reshape(self, x: Value, shape: Sequence[Expr]) -> Value:
        return self.index(x, shape, shapes.reshape(shape_of(x), axis_names(len(shape)), shape))

    def expand(self, x: Value, shape: Sequence[Expr]) -> Value:
        """Broadcast to `shape`."""
        return self.index(x, shape, shapes.broadcast(shape_of(x), axis_names(len(shape)), shape))

    def expanded(self, shape: Sequence[Expr], *values: Value) -> list[Value]:
        """Tensors broadcast to `shape`; constants stay scalars."""
        return [self.expand(v, shape) if isinstance(v.type, TensorType) else v for v in values]

    def positions(self, shape: Sequence[Expr], axis: int) -> Value:
        """Where each element stands along `axis`, as i64."""
        places = self.op(Iota(shape[axis]))
        return self.index(places, shape, [axis_exprs(len(shape))[axis]])

    # ---- checks
    def check(self, x: Value, low: Expr, high: Expr, error: str, message: str) -> None:
        """Raise `error`, one of `program.ir.ERRORS`, unless low <= v < high for all of `x`. In the
        message, {} is the first element at fault and {size} is `high`."""
        if dtype_of(x.type) not in CHECKED:
            raise Unsupported(f"a check of {x.type}")
        self.builder.add(Check(x, low, high, error, message))

    def check_nonzero(self, x: Value) -> None:
        """Raise as torch does where integers are divided by 0."""
        if not self.gpu:
            self.check(self.map("ne", x, 0), Expr.of(1), Expr.of(2), "RuntimeError",
                       "ZeroDivisionError")

    # ---- reductions
    def summed(self, x: Value) -> Value:
        """`x` in the type in which torch adds many floats of its: on GPUs, whose threads add few
        each, that in which it computes, else float64."""
        return self.value(x, compute_dtype(dtype_of(x.type)) if self.gpu else F64)

    def axes(self, x: Value, dim: int | Sequence[int] | None) -> tuple[int, ...]:
        """The dimensions that a reduction's `dim` means: none given, all of them."""
        rank = len(shape_of(x))
        dims = (dim,) if isinstance(dim, int) else tuple(dim or ())
        found = sorted(dimension(d, rank) for d in dims)
        return tuple(found if rank and found else range(rank))

    def reduce(self, monoid: str, x: Value, axes: Sequence[int], keep: bool = False) -> Value:
        """A reduction in the type of `x`; `keep` leaves the axes with size 1."""
        full = shape_of(x)
        if axes:
            x = self.op(Reduce(monoid, x, tuple(axes), dtype_of(x.type)))
        shape = [Expr.of(1) if n in axes else s for n, s in enumerate(full)]
        return self.reshape(x, shape) if keep else x

    def mean(self, x: Value, axes: Sequence[int], keep: bool = False, less: Number | Expr = 0,
             dtype: DType | None = None) -> Value:
        """Sum over `axes`, as `dtype`, divided by the number of its terms, or by `less` fewer; NaN
        where it has none."""
        count = shapes.product([shape_of(x)[n] for n in axes])
        total = self.value(self.reduce("add", x, axes, keep), dtype or dtype_of(x.type))
        if isinstance(less, Expr) or (less < 0 and count.const_value is None):
            raise Unsupported("a number of terms that is not known")
        if count.const_value is not None:
            terms = max(count.const_value - less, 0) if count.const_value else 0
            return self.map("div", total, float(terms))
        known = self.value(count, dtype_of(total.type))
        return self.map("div", total, self.map("max", self.map("sub", known, less), 0)
                        if less else known)


def _fits(x: Number, dtype: DType) -> bool:
    """Whether torch takes the number without an error; a negative integer wraps as u8."""
    if dtype is U8:
        return (0 if isinstance(x, float) else -255) <= x < 256
    return -(1 << (dtype.bits - 1)) <= x < 1 << (dtype.bits - 1)


def promote(x: Operand, y: Operand) -> DType:
    """The type in which torch computes an op on two operands (`torch.result_type`)."""
    return _promoted(_kind(x), _kind(y))


Kind = tuple[DType, bool] | str
"""(dtype, whether it is of rank 0) of a tensor, or the name of a number's class."""


def _kind(x: Operand) -> Kind:
    if isinstance(x, Value):
        return "float" if is_number(x) else (dtype_of(x.type), not shape_of(x))
    return "int" if isinstance(x, Expr) else type(x).__name__


@cache
def _promoted(a: Kind, b: Kind) -> DType:
    def sample(kind: Kind) -> torch.Tensor | Number:
        if isinstance(kind, str):
            return {"bool": True, "int": 1}.get(kind, 1.0)
        dtype, scalar = kind
        return torch.empty((1,) * (not scalar), dtype=DTYPES[dtype], device="meta")

    return TORCH_DTYPES[torch.result_type(sample(a), sample(b))]
