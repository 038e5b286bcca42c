"""Ops that several rungs share: scalar functions, constants, casts, loads, stores and folds."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rung.core.errors import VerifyError
from rung.core.expr import Expr, is_size
from rung.core.interp import Interp
from rung.core.op import Effect, Func, Op, Value
from rung.core.scalar import SCALARS, cast
from rung.core.types import (
    BOOL,
    F64,
    I64,
    AxesType,
    Axis,
    DType,
    IndexType,
    TensorType,
    Type,
    VecType,
    axes_type,
    dtype_of,
)

Sub = Expr | Value  # one subscript: an index expression, or a data-dependent integer value


def join(types: tuple[Type, ...], dtype: DType) -> Type:
    """The type of an elementwise result: equal tensor shapes, or the union of axes.

    Raises VerifyError when two tensors differ in shape (broadcasting is an explicit `index`).
    """
    shaped = [t for t in types if not (isinstance(t, VecType | IndexType) and is_scalar(t))]
    if not shaped:
        return VecType(dtype)
    if all(isinstance(t, TensorType) for t in shaped):
        shapes = {t.shape for t in shaped if isinstance(t, TensorType)}
        if len(shapes) > 1:
            raise VerifyError(f"shapes differ: {' and '.join(map(str, types))}")
        return TensorType(dtype, shapes.pop())
    if all(isinstance(t, AxesType) for t in shaped):
        axes = dict.fromkeys(a for t in shaped if isinstance(t, AxesType) for a in t.axes)
        return axes_type(dtype, tuple(axes))
    if all(isinstance(t, VecType) for t in shaped):
        vecs = [t for t in shaped if isinstance(t, VecType)]
        widths = {t.lanes for t in vecs} - {1}
        if len(widths) > 1:
            raise VerifyError(f"lane counts differ: {' and '.join(map(str, types))}")
        unroll = dict.fromkeys(u for t in vecs for u in t.unroll)
        return VecType(dtype, max(t.lanes for t in vecs), tuple(unroll))
    raise VerifyError(f"operands of different rungs: {' and '.join(map(str, types))}")


def is_scalar(t: Type) -> bool:
    """True for a register scalar, which every elementwise op broadcasts."""
    return isinstance(t, IndexType) or (isinstance(t, VecType) and t.lanes == 1 and not t.unroll)


@dataclass(frozen=True, eq=False)
class Map(Op):
    """A scalar function of the table `core.scalar`, at every index or lane."""

    fn: str
    args: tuple[Value, ...]
    keyword: ClassVar[str] = "map"
    inline: ClassVar[str] = "single"

    def infer(self) -> tuple[Type, ...]:
        if self.fn not in SCALARS:
            raise VerifyError(f"no scalar function is called {self.fn!r}")
        if len(self.args) != SCALARS[self.fn].arity:
            raise VerifyError(f"{self.fn} takes {SCALARS[self.fn].arity} operands, "
                              f"not {len(self.args)}")
        types = tuple(a.type for a in self.args)
        try:
            dtype = SCALARS[self.fn].result(tuple(dtype_of(t) for t in types))
        except ValueError as error:
            raise VerifyError(f"{self.fn}: {error}") from None
        return (join(types, dtype),)

    def run(self, interp: Interp, *operands: Any) -> Any:
        return SCALARS[self.fn].numpy(*operands)


@dataclass(frozen=True, eq=False)
class Const(Op):
    """A number known at compile time; a scalar that elementwise ops broadcast."""

    value: float | int | bool
    dtype: DType
    keyword: ClassVar[str] = "const"
    inline: ClassVar[str] = "always"

    def infer(self) -> tuple[Type, ...]:
        return (VecType(self.dtype),)

    def run(self, interp: Interp, *operands: Any) -> Any:
        return cast(np.asarray(self.value, np.float64 if isinstance(self.value, float) else None),
                    _held(self.value), self.dtype)


@dataclass(frozen=True, eq=False)
class IndexValue(Op):
    """An index expression over axes, loop variables and sizes, as an i64 value."""

    expr: Expr
    keyword: ClassVar[str] = "index"
    inline: ClassVar[str] = "single"

    def infer(self) -> tuple[Type, ...]:
        axes = tuple(sorted(s for s in self.expr.symbols() if not is_size(s)))
        return (axes_type(I64, axes),)

    def run(self, interp: Interp, *operands: Any) -> Any:
        return interp.index(self.expr)


def _held(value: float | int | bool) -> DType:
    return BOOL if isinstance(value, bool) else I64 if isinstance(value, int) else F64


@dataclass(frozen=True, eq=False)
class Cast(Op):
    """Conversion as torch does it. `implicit` marks a rounding that eager does only because an op
    ends there."""

    x: Value
    dtype: DType
    implicit: bool = False
    keyword: ClassVar[str] = "cast"
    inline: ClassVar[str] = "single"

    def infer(self) -> tuple[Type, ...]:
        return (join((self.x.type,), self.dtype),)

    def check(self) -> None:
        if self.implicit and not self.dtype.is_float:
            raise VerifyError("only a cast to a float type can be an implicit rounding")

    def run(self, interp: Interp, *operands: Any) -> Any:
        return cast(operands[0], dtype_of(self.x.type), self.dtype)


@dataclass(frozen=True, eq=False)
class Yield(Op):
    """The values that a block hands to its owner."""

    values: tuple[Value, ...]
    keyword: ClassVar[str] = "yield"
    form: ClassVar[str] = "yield {values}"

    def run(self, interp: Interp, *operands: Any) -> Any:
        return operands


@dataclass(frozen=True, eq=False)
class LoadBase(Op):
    """`buf[subs]`, or `fill` where some expression of `mask` is negative.

    With `on_entry` it reads the buffer's value at kernel entry, despite earlier stores.
    """

    buf: Value
    subs: tuple[Sub, ...]
    mask: tuple[Expr, ...] = ()
    fill: float | int | bool = 0
    keyword: ClassVar[str] = "load"
    inline: ClassVar[str] = "always"
    on_entry: ClassVar[bool] = True

    def check(self) -> None:
        rank = rank_of(self.buf.type)
        if len(self.subs) != rank:
            raise VerifyError(f"{self.buf.name} has {rank} dimensions, "
                              f"not {len(self.subs)}")
        _check_subs(self.subs)


@dataclass(frozen=True, eq=False)
class StoreBase(Op):
    """`buf[subs] = value`, where no expression of `mask` is negative."""

    buf: Value
    subs: tuple[Sub, ...]
    value: Value
    mask: tuple[Expr, ...] = ()
    keyword: ClassVar[str] = "store"
    effect: ClassVar[Effect] = Effect.MUTATES

    def check(self) -> None:
        rank = rank_of(self.buf.type)
        if len(self.subs) != rank:
            raise VerifyError(f"{self.buf.name} has {rank} dimensions, not {len(self.subs)}")
        if dtype_of(self.buf.type) != dtype_of(self.value.type):
            raise VerifyError(f"stores {dtype_of(self.value.type)} into {self.buf.type}")
        _check_subs(self.subs)


@dataclass(frozen=True, eq=False)
class FoldBase(Op):
    """Inputs combined along one axis: a fold; of products, a contraction; with `prefix`, a scan."""

    carrier: str
    args: tuple[Value, ...]
    axis: Axis
    extent: Expr
    acc: DType
    product: str = ""  # the scalar function of the inputs whose results are combined
    prefix: bool = False  # gives the state after each step, not only after the last


def _check_subs(subs: tuple[Sub, ...]) -> None:
    for sub in subs:
        if isinstance(sub, Value) and dtype_of(sub.type).kind not in "iu":
            raise VerifyError(f"subscript {sub.name} is {sub.type}, not an integer")


def buffers_of(func: Func) -> tuple[Value, ...]:
    """A kernel's arguments: parameters, then outputs."""
    return (*func.params, *func.outs)


def verify_buffers(func: Func, accesses: Collection[LoadBase | StoreBase],
                  arrays: Collection[Value] = ()) -> None:
    """Stores go to outputs, mutated parameters and `arrays`, each output gets one; size names."""
    for param in func.params:
        if isinstance(param.type, IndexType) and not is_size(param.name):
            raise VerifyError(f"parameter {param.name} is a size, call it s0, s1, ...")
    written = {op.buf for op in accesses if isinstance(op, StoreBase)}
    for op in accesses:
        may = op.buf in func.outs or op.buf in arrays or op.buf.role == "mutated"
        if isinstance(op, StoreBase) and not may:
            raise VerifyError(f"{op.buf.name} is neither an output nor a mutated parameter", op)
        if op.buf not in (*buffers_of(func), *arrays):
            raise VerifyError(f"{op.buf.name} is a value, not memory", op)
    for out in func.outs:
        if out not in written:
            raise VerifyError(f"output {out.name} is never stored")


def rank_of(t: Type) -> int:
    """Number of dimensions of a tensor or array type."""
    if not hasattr(t, "shape"):
        raise VerifyError(f"{t} is not indexed memory")
    return len(t.shape)
