"""Tensor IR: map, reduce and index on whole tensors, and ops defined by them.

    a = index bias [i,k] -> [k] : f32[504,512]
    h = x + a : f32[504,512]
    mm = contract add mul h[i,k], w[k,j] -> [i,j] : f32[504,512] acc f32

Broadcasting, transposes, slices, reshapes, pads and flips are all `index`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, ClassVar

import numpy as np

from rung.core.errors import VerifyError
from rung.core.expr import Expr, is_size, sym
from rung.core.interp import Interp
from rung.core.op import RESERVED, Op, Value
from rung.core.ops import Cast, Const, Map
from rung.core.scalar import LAST, MONOIDS, SCALARS
from rung.core.types import I64, Axis, DType, TensorType, Type, VecType, dtype_of


def shape_of(value: Value) -> tuple[Expr, ...]:
    """The shape of a tensor value; () for a scalar constant."""
    return value.type.shape if isinstance(value.type, TensorType) else ()


@dataclass(frozen=True, eq=False)
class Reduce(Op):
    """A monoid along `axes` (dimensions, dropped from the result)."""

    monoid: str
    x: Value
    axes: tuple[int, ...]
    acc: DType
    keyword: ClassVar[str] = "reduce"
    form: ClassVar[str] = "reduce {monoid} {x} over [{axes}] {:} acc {acc}"

    def infer(self) -> tuple[Type, ...]:
        kept = (s for n, s in enumerate(shape_of(self.x)) if n not in self.axes)
        return (TensorType(self.acc, tuple(kept)),)

    def check(self) -> None:
        if self.monoid not in MONOIDS:
            raise VerifyError(f"no monoid is called {self.monoid!r}")
        if any(not 0 <= a < len(shape_of(self.x)) for a in self.axes) or (
                len(set(self.axes)) < len(self.axes)):
            raise VerifyError(f"axes {self.axes} of {self.x.type}")
        if dtype_of(self.x.type) != self.acc:
            raise VerifyError(f"reduces {self.x.type} with accumulator {self.acc}")
        MONOIDS[self.monoid].identity(self.acc)

    def run(self, interp: Interp, *operands: Any) -> Any:
        monoid = MONOIDS[self.monoid]
        kept = [s for n, s in enumerate(operands[0].shape) if n not in self.axes]
        if operands[0].size == 0:
            return np.full(kept, monoid.identity(self.acc), self.acc.numpy)
        return monoid.reduce(operands[0], self.axes).reshape(kept)


@dataclass(frozen=True, eq=False)
class Scan(Op):
    """The prefix form of `reduce` along one dimension: out[.., n, ..] is of x[.., 0..n, ..]."""

    monoid: str
    x: Value
    dim: int
    acc: DType
    keyword: ClassVar[str] = "scan"
    form: ClassVar[str] = "scan {monoid} {x} dim {dim} {:} acc {acc}"

    def infer(self) -> tuple[Type, ...]:
        return (TensorType(self.acc, shape_of(self.x)),)

    def check(self) -> None:
        if self.monoid not in MONOIDS:
            raise VerifyError(f"no monoid is called {self.monoid!r}")
        if not 0 <= self.dim < len(shape_of(self.x)):
            raise VerifyError(f"dimension {self.dim} of {self.x.type}")
        if dtype_of(self.x.type) != self.acc:
            raise VerifyError(f"scans {self.x.type} with accumulator {self.acc}")

    def run(self, interp: Interp, *operands: Any) -> Any:
        return MONOIDS[self.monoid].prefixes(operands[0], self.dim)


@dataclass(frozen=True, eq=False)
class Index(Op):
    """out[axes] = x[subs] where every `mask` expression is >= 0, else `fill`."""

    x: Value
    axes: tuple[Axis, ...]
    shape: tuple[Expr, ...]
    subs: tuple[Expr, ...]
    mask: tuple[Expr, ...] = ()
    fill: float | int | bool = 0
    keyword: ClassVar[str] = "index"
    form: ClassVar[str] = ("index {x} [{axes}] of [{shape}] -> [{subs}]"
                           "< where {mask}>< else {fill}>")

    def infer(self) -> tuple[Type, ...]:
        return (TensorType(dtype_of(self.x.type), self.shape),)

    def check(self) -> None:
        if len(self.axes) != len(self.shape):
            raise VerifyError(f"{len(self.axes)} axes for {len(self.shape)} sizes")
        if len(self.subs) != len(shape_of(self.x)):
            raise VerifyError(f"{len(self.subs)} subscripts into {self.x.type}")
        for expr in (*self.subs, *self.mask):
            free = {s for s in expr.symbols() if not is_size(s)} - set(self.axes)
            if free:
                raise VerifyError(f"{expr} uses {', '.join(sorted(free))}, not an axis")

    def run(self, interp: Interp, *operands: Any) -> Any:
        sizes = [int(interp.index(s)) for s in self.shape]
        grid = np.indices(sizes, sparse=True)
        before = dict(interp.symbols)
        interp.symbols.update(zip(self.axes, grid, strict=True))
        out = interp.read(np.asarray(operands[0]), self.subs, self.mask, self.fill)
        interp.symbols = before
        return np.broadcast_to(out, sizes).copy()


@dataclass(frozen=True, eq=False)
class Contract(Op):
    """out[out_axes] = combine over the other axes of product(a[a_axes], b[b_axes])."""

    combine: str
    product: str
    a: Value
    a_axes: tuple[Axis, ...]
    b: Value
    b_axes: tuple[Axis, ...]
    out_axes: tuple[Axis, ...]
    acc: DType
    keyword: ClassVar[str] = "contract"
    form: ClassVar[str] = ("contract {combine} {product} {a} [{a_axes}], {b} [{b_axes}] "
                           "-> [{out_axes}] {:} acc {acc}")

    def sizes(self) -> dict[str, Expr]:
        """Axis to extent; VerifyError where the operands disagree."""
        table: dict[str, Expr] = {}
        for value, axes in ((self.a, self.a_axes), (self.b, self.b_axes)):
            if len(axes) != len(shape_of(value)):
                raise VerifyError(f"{len(axes)} axes for {value.type}")
            for axis, size in zip(axes, shape_of(value), strict=True):
                if table.setdefault(axis, size) != size:
                    raise VerifyError(f"{axis} is {table[axis]} and {size}")
        return table

    def infer(self) -> tuple[Type, ...]:
        sizes = self.sizes()
        if unknown := [a for a in self.out_axes if a not in sizes]:
            raise VerifyError(f"no operand has axis {', '.join(unknown)}")
        return (TensorType(self.acc, tuple(sizes[a] for a in self.out_axes)),)

    def check(self) -> None:
        if self.combine not in MONOIDS or self.product not in SCALARS:
            raise VerifyError(f"cannot contract by {self.combine} and {self.product}")
        if {dtype_of(self.a.type), dtype_of(self.b.type)} != {self.acc}:
            raise VerifyError(f"operands {self.a.type}, {self.b.type}; accumulator {self.acc}")

    def run(self, interp: Interp, *operands: Any) -> Any:
        letters = {axis: n for n, axis in enumerate(self.sizes())}
        a, b, out = ([letters[x] for x in axes]
                     for axes in (self.a_axes, self.b_axes, self.out_axes))
        if (self.combine, self.product) != ("add", "mul"):
            raise NotImplementedError(f"contract {self.combine} {self.product}")
        return np.einsum(operands[0], a, operands[1], b, out)


@dataclass(frozen=True, eq=False)
class Gather(Op):
    """x with dimension `dim` replaced by those of `at`: out[.., at.., ..] = x[.., at[..], ..].

    The first `batch` dimensions are the same ones in both: out[b, at.., ..] = x[b, at[b, ..], ..].
    """

    x: Value
    dim: int
    at: Value
    batch: int = 0
    keyword: ClassVar[str] = "gather"
    form: ClassVar[str] = "gather {x} dim {dim} at {at}< batch {batch}>"

    def infer(self) -> tuple[Type, ...]:
        shape = shape_of(self.x)
        new = (*shape[: self.dim], *shape_of(self.at)[self.batch:], *shape[self.dim + 1:])
        return (TensorType(dtype_of(self.x.type), new),)

    def check(self) -> None:
        shape = shape_of(self.x)
        if not 0 <= self.dim < len(shape):
            raise VerifyError(f"dimension {self.dim} of {self.x.type}")
        if dtype_of(self.at.type).kind not in "iu":
            raise VerifyError(f"index {self.at.name} is {self.at.type}, not an integer")
        if not 0 <= self.batch <= self.dim or (
                shape[:self.batch] != shape_of(self.at)[:self.batch]):
            raise VerifyError(f"{self.x.type} and {self.at.type} share no {self.batch} dimensions")

    def run(self, interp: Interp, *operands: Any) -> Any:
        x, at = operands
        if at.size and (at.min() < 0 or at.max() >= x.shape[self.dim]):
            raise IndexError(f"gather index out of range 0..{x.shape[self.dim]}")
        if not self.batch:
            return np.take(x, at, axis=self.dim)
        out = np.empty((*x.shape[:self.dim], *at.shape[self.batch:], *x.shape[self.dim + 1:]),
                       x.dtype)
        for place in np.ndindex(*x.shape[:self.batch]):
            out[place] = np.take(x[place], at[place], axis=self.dim - self.batch)
        return out


@dataclass(frozen=True, eq=False)
class Scatter(Op):
    """x with slices of `dim` overwritten: out[.., at[n], ..] = src[.., n, ..] for a vector `at`.

    If `at` has the shape of `src`, each element has an index of its own, out[i, at[i,n]] =
    src[i,n], and `src` may be smaller than `x`. Of equal indices any one wins; with `combine`, a
    monoid, all are combined with the old value, in order, and with `last` the last one wins.
    """

    x: Value
    dim: int
    at: Value
    src: Value
    combine: str = ""
    keyword: ClassVar[str] = "scatter"
    form: ClassVar[str] = "scatter {x} dim {dim} at {at} <- {src}< by {combine}>"

    def infer(self) -> tuple[Type, ...]:
        return (TensorType(dtype_of(self.x.type), shape_of(self.x)),)

    def check(self) -> None:
        shape, at, src = map(shape_of, (self.x, self.at, self.src))
        if not 0 <= self.dim < len(shape):
            raise VerifyError(f"dimension {self.dim} of {self.x.type}")
        if dtype_of(self.at.type).kind not in "iu":
            raise VerifyError(f"index {self.at.name} is {self.at.type}, not an integer")
        if self.combine not in ("", LAST, *MONOIDS):
            raise VerifyError(f"no monoid is called {self.combine!r}")
        slices = (*shape[:self.dim], *at, *shape[self.dim + 1:])
        if src not in (at, slices) or len(src) != len(shape) or (
                dtype_of(self.src.type) != dtype_of(self.x.type)):
            raise VerifyError(f"cannot write {self.src.type} into {self.x.type} dim {self.dim}")

    def run(self, interp: Interp, *operands: Any) -> Any:
        x, at, src = operands
        if at.size and (at.min() < 0 or at.max() >= x.shape[self.dim]):
            raise IndexError(f"scatter index out of range 0..{x.shape[self.dim]}")
        out = x.copy()
        places = list(np.indices(src.shape, sparse=True))
        places[self.dim] = at if at.ndim == src.ndim else at.reshape(places[self.dim].shape)
        if self.combine in MONOIDS:
            with np.errstate(all="ignore"):
                MONOIDS[self.combine].ufunc.at(out, tuple(places), src)
        else:
            out[tuple(places)] = src
        return out


@dataclass(frozen=True, eq=False)
class Item(Op):
    """The element of a tensor without dimensions, as a scalar that elementwise ops broadcast."""

    x: Value
    keyword: ClassVar[str] = "item"
    form: ClassVar[str] = "item {x}"

    def infer(self) -> tuple[Type, ...]:
        return (VecType(dtype_of(self.x.type)),)

    def check(self) -> None:
        if shape_of(self.x):
            raise VerifyError(f"an item of {self.x.type}")

    def run(self, interp: Interp, *operands: Any) -> Any:
        return operands[0]


@dataclass(frozen=True, eq=False)
class Full(Op):
    """A tensor of one number."""

    value: float | int | bool
    dtype: DType
    shape: tuple[Expr, ...]
    keyword: ClassVar[str] = "full"
    form: ClassVar[str] = "full {value} [{shape}] {dtype}"

    def infer(self) -> tuple[Type, ...]:
        return (TensorType(self.dtype, self.shape),)

    def run(self, interp: Interp, *operands: Any) -> Any:
        return np.full([int(interp.index(s)) for s in self.shape], self.value, self.dtype.numpy)


@dataclass(frozen=True, eq=False)
class Iota(Op):
    """0, 1, ... size-1 as i64."""

    size: Expr
    keyword: ClassVar[str] = "iota"
    form: ClassVar[str] = "iota {size}"

    def infer(self) -> tuple[Type, ...]:
        return (TensorType(I64, (self.size,)),)

    def run(self, interp: Interp, *operands: Any) -> Any:
        return np.arange(int(interp.index(self.size)), dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Concat(Op):
    """Tensors side by side along `dim`."""

    xs: tuple[Value, ...]
    dim: int
    keyword: ClassVar[str] = "concat"
    form: ClassVar[str] = "concat {xs} dim {dim}"

    def infer(self) -> tuple[Type, ...]:
        if any(not 0 <= self.dim < len(shape_of(x)) for x in self.xs) or not self.xs:
            raise VerifyError(f"dimension {self.dim} of {', '.join(str(x.type) for x in self.xs)}")
        shape = list(shape_of(self.xs[0]))
        shape[self.dim] = sum((shape_of(x)[self.dim] for x in self.xs[1:]), shape[self.dim])
        return (TensorType(dtype_of(self.xs[0].type), tuple(shape)),)

    def check(self) -> None:
        if len({dtype_of(x.type) for x in self.xs}) != 1:
            raise VerifyError("parts of different types")
        rest = {tuple(s for n, s in enumerate(shape_of(x)) if n != self.dim) for x in self.xs}
        if len(rest) != 1:
            raise VerifyError("parts whose other sizes differ")

    def run(self, interp: Interp, *operands: Any) -> Any:
        return np.concatenate(operands, self.dim)


def axis_names(rank: int, taken: Collection[Axis] = ()) -> tuple[Axis, ...]:
    """Names for the dimensions of a result that are not `taken`: i, j, .. p, then i1, j1, ..."""
    names = (f"{c}{n or ''}" for n in count() for c in "ijklmnop")
    return tuple(islice((x for x in names if x not in taken and x not in RESERVED), rank))


def symbols(names: tuple[Axis, ...]) -> tuple[Expr, ...]:
    return tuple(sym(n) for n in names)


OPS = (Reduce, Scan, Index, Contract, Gather, Scatter, Item, Full, Iota, Concat, Map, Const, Cast)
