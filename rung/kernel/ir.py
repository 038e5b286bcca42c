"""Kernel IR: loops, arrays in memory spaces and unrolled SSA vectors.

    kernel-ir colsum(x: f32[512,512]) -> y: f32[512]
      unroll r<4
      for j in 0..512 step 64 at core
        c = for i in 0..512 carry c0 = 0.0 ...

A value is a family: `f32x16 over r<4` is four vectors of 16 lanes, named apart when emitted.
`lane` in a subscript runs over the lanes; `x[i,j : 16]` is 16 lanes from x[i,j]. Loop variables and
unrolled axes live in index expressions by name. A loop `at` a parallel level is bound to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rung.core.errors import VerifyError
from rung.core.expr import is_size
from rung.core.interp import Interp, bind_buffers
from rung.core.lexer import Cursor
from rung.core.op import RESERVED, Block, Effect, Func, Op, Value, Vocabulary, expressions, walk
from rung.core.ops import (
    Cast,
    Const,
    IndexValue,
    LoadBase,
    Map,
    StoreBase,
    Yield,
    buffers_of,
    verify_buffers,
)
from rung.core.scalar import MONOIDS
from rung.core.text import LANE
from rung.core.types import I64, ArrayType, Axis, Type, VecType, dtype_of
from rung.kernel.intrinsics import Apply as Apply
from rung.kernel.loops import THREADS
from rung.kernel.loops import For as For
from rung.kernel.loops import If as If
from rung.kernel.moves import Commit as Commit
from rung.kernel.moves import Engine
from rung.kernel.moves import Transfer as Transfer
from rung.kernel.moves import Wait as Wait
from rung.kernel.roles import FREE as FREE
from rung.kernel.roles import FULL as FULL
from rung.kernel.roles import Await as Await
from rung.kernel.roles import Ring as Ring
from rung.kernel.roles import Role as Role
from rung.kernel.roles import Roles as Roles
from rung.kernel.roles import Signal as Signal
from rung.kernel.tokens import verify_roles

Unroll = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Unrolled:
    """The unrolled axes of a kernel and their counts."""

    counts: Unroll

    def __str__(self) -> str:
        return ", ".join(f"{name}<{count}" for name, count in self.counts)

    def __iter__(self) -> Any:
        return iter(self.counts)

    def implied(self, func: Func) -> bool:
        return not self.counts

    def renamed(self, names: Mapping[str, str]) -> Unrolled:
        return Unrolled(tuple((names.get(name, name), count) for name, count in self.counts))


@dataclass(frozen=True)
class Raster:
    """Persistent blocks take tiles of the grid one by one, in bands of `group` rows."""

    group: int

    def __str__(self) -> str:
        return f"raster {self.group}"

    def implied(self, func: Func) -> bool:
        return False

    def renamed(self, names: Mapping[str, str]) -> Raster:
        return self


def read_raster(p: Cursor) -> Raster:
    """`raster 8` to Raster."""
    p.take("raster")
    return Raster(p.integer())


@dataclass(frozen=True)
class Like:
    """Kernels with the same `name` here differ in numbers only, which may be arguments of one
    function of the source: memory bounds them, not arithmetic."""

    name: str

    def __str__(self) -> str:
        return self.name

    def implied(self, func: Func) -> bool:
        return False

    def renamed(self, names: Mapping[str, str]) -> Like:
        return self


def read_like(p: Cursor) -> Like:
    return Like(p.name())


def read_unroll(p: Cursor) -> Unrolled:
    """`r<14, q<2` to Unrolled."""
    def one() -> tuple[str, int]:
        name = p.name()
        p.take("<")
        return name, p.integer()

    return Unrolled(p.listed(one))


@dataclass(frozen=True, eq=False)
class Load(LoadBase):
    """Elements of a buffer or array, `lanes` at a time, once per step of the unrolled axes."""

    lanes: int = 1
    unroll: Unroll = ()
    inline: ClassVar[str] = "single"
    on_entry: ClassVar[bool] = False

    def infer(self) -> tuple[Type, ...]:
        return (_family(self),)

    def run(self, interp: Interp, *operands: Any) -> Any:
        _set_lanes(interp, self.lanes)
        return interp.read(operands[0], self.subs, self.mask, self.fill)


@dataclass(frozen=True, eq=False)
class Store(StoreBase):
    """Writes a family of vectors.

    With `combine`, a monoid, it is atomic: `y[t,j] add= v` adds to each element in one step that no
    thread or block sees half of, in any order. Only some memories do it: see `Space.atomics`.
    """

    lanes: int = 1
    unroll: Unroll = ()
    combine: str = ""

    @property
    def family(self) -> VecType:
        """The elements written; the value may have fewer, and is broadcast."""
        return _family(self)

    def check(self) -> None:
        super().check()
        if self.combine and (self.combine not in MONOIDS or isinstance(self.buf.type, ArrayType)):
            raise VerifyError(f"no atomic {self.combine} into {self.buf.type}")

    def run(self, interp: Interp, *operands: Any) -> Any:
        _set_lanes(interp, self.lanes)
        how = MONOIDS[self.combine].ufunc if self.combine else None
        interp.write(operands[0], self.subs, interp.values[self.value], self.mask, how)


def _family(op: Load | Store) -> VecType:
    """The elements that subscripts distinguish, data-dependent ones included."""
    subs = [s.type for s in op.subs if isinstance(s, Value) and isinstance(s.type, VecType)]
    unroll = dict.fromkeys((*op.unroll, *(u for t in subs for u in t.unroll)))
    lanes = max([op.lanes, *(t.lanes for t in subs)])
    return VecType(dtype_of(op.buf.type), lanes, tuple(unroll))


@dataclass(frozen=True, eq=False)
class KernelIndex(IndexValue):
    """An index expression as an i64 family."""

    lanes: int = 1
    unroll: Unroll = ()

    def infer(self) -> tuple[Type, ...]:
        return (VecType(I64, self.lanes, self.unroll),)

    def run(self, interp: Interp, *operands: Any) -> Any:
        _set_lanes(interp, self.lanes)
        return interp.index(self.expr)


def _set_lanes(interp: Interp, lanes: int) -> None:
    interp.symbols[LANE] = interp.spread(LANE, lanes)


@dataclass(frozen=True, eq=False)
class Alloc(Op):
    """An array in a memory space, undefined until written; its scope is its block."""

    types: tuple[Type, ...] = ()
    keyword: ClassVar[str] = "alloc"
    form: ClassVar[str] = "alloc"
    effect: ClassVar[Effect] = Effect.ORDERED

    def infer(self) -> tuple[Type, ...]:
        return self.types

    def check(self) -> None:
        if len(self.types) != 1 or not isinstance(self.types[0], ArrayType):
            raise VerifyError("an allocation has one array type")

    def run(self, interp: Interp, *operands: Any) -> Any:
        (t,) = self.types
        assert isinstance(t, ArrayType)
        poison = np.nan if t.dtype.is_float else 77
        return np.full(t.shape, poison, t.dtype.numpy)


@dataclass(frozen=True, eq=False)
class Fill(Op):
    """A family of vectors that all hold one number, such as an accumulator's initial value."""

    value: float | int | bool
    types: tuple[Type, ...] = ()
    keyword: ClassVar[str] = "fill"
    form: ClassVar[str] = "fill {value}"

    def infer(self) -> tuple[Type, ...]:
        return self.types

    def check(self) -> None:
        if len(self.types) != 1 or not isinstance(self.types[0], VecType):
            raise VerifyError("a fill has one vector type")

    def run(self, interp: Interp, *operands: Any) -> Any:
        (t,) = self.types
        assert isinstance(t, VecType)
        shape = [dict(t.unroll).get(a, t.lanes if a == LANE else 1) for a in interp.axes]
        return np.full(shape, self.value, t.dtype.numpy)


@dataclass(frozen=True, eq=False)
class Combine(Op):
    """Collapses one parallel direction of a family: `lane`, an unrolled axis, or a thread loop."""

    monoid: str
    x: Value
    axis: Axis
    keyword: ClassVar[str] = "combine"
    form: ClassVar[str] = "combine {monoid} {x} by {axis}"

    def infer(self) -> tuple[Type, ...]:
        t = self.x.type
        if not isinstance(t, VecType):
            raise VerifyError(f"combines {t}, not vectors")
        if self.axis == LANE:
            return (VecType(t.dtype, 1, t.unroll),)
        return (VecType(t.dtype, t.lanes, tuple(u for u in t.unroll if u[0] != self.axis)),)

    def check(self) -> None:
        if self.monoid not in MONOIDS:
            raise VerifyError(f"no monoid is called {self.monoid!r}")

    def run(self, interp: Interp, *operands: Any) -> Any:
        x, at = _along(interp, operands[0], self.x.type, self.axis)
        return np.expand_dims(MONOIDS[self.monoid].reduce(x, (at,)), at)


def _along(interp: Interp, x: np.ndarray, t: Type, axis: Axis) -> tuple[np.ndarray, int]:
    """A family with all its elements along a thread loop, also where they are the same, and which
    dimension that is."""
    at, x = interp.position(axis), np.asarray(x)
    x = x.reshape(x.shape or (1,) * len(interp.axes))
    assert isinstance(t, VecType)
    if axis == LANE or axis in dict(t.unroll):
        return x, at
    count = np.size(interp.symbols[axis])
    return np.broadcast_to(x, (*x.shape[:at], count, *x.shape[at + 1:])), at


@dataclass(frozen=True, eq=False)
class Prefix(Op):
    """Along an unrolled axis or a thread loop, the family folded from the first position up to each
    one; if `exclusive`, up to the one before, which is the identity at the first."""

    monoid: str
    x: Value
    axis: Axis
    exclusive: bool = False
    keyword: ClassVar[str] = "prefix"
    form: ClassVar[str] = "prefix {monoid} {x} by {axis}"
    forms: ClassVar[tuple[tuple[str, Mapping[str, Any]], ...]] = (
        ("exclusive {monoid} {x} by {axis}", {"exclusive": True}),)

    def written(self) -> str:
        return self.forms[0][0] if self.exclusive else self.form

    def infer(self) -> tuple[Type, ...]:
        return (self.x.type,)

    def check(self) -> None:
        t = self.x.type
        if not isinstance(t, VecType) or t.lanes > 1:
            raise VerifyError(f"no prefixes of {t}, only of families of single elements")
        if self.monoid not in MONOIDS:
            raise VerifyError(f"no monoid is called {self.monoid!r}")

    def run(self, interp: Interp, *operands: Any) -> Any:
        (x, at), monoid = _along(interp, operands[0], self.x.type, self.axis), MONOIDS[self.monoid]
        found = monoid.prefixes(x, at)
        if not self.exclusive:
            return found
        first = np.full_like(found.take([0], at), monoid.identity(dtype_of(self.x.type)))
        return np.concatenate([first, found.take(range(found.shape[at] - 1), at)], at)


@dataclass(frozen=True, eq=False)
class Barrier(Op):
    """Waits for all threads of the block; their writes to `space` are then visible to all."""

    space: str
    keyword: ClassVar[str] = "barrier"
    form: ClassVar[str] = "barrier {space}"
    effect: ClassVar[Effect] = Effect.ORDERED

    def run(self, interp: Interp, *operands: Any) -> Any:
        return None


OPS = (Load, Store, KernelIndex, Alloc, Fill, For, If, Yield, Combine, Prefix, Apply, Barrier,
       Transfer, Commit, Wait, Ring, Roles, Role, Await, Signal, Map, Const, Cast)


def run_kernel_ir(func: Func, arrays: Mapping[str, np.ndarray],
                  engine: type[Engine] = Engine, known: Mapping[str, int] | None = None) -> None:
    """Run Kernel IR on NumPy arrays by parameter and output name, in place.

    `known` gives the sizes that cannot be read off a buffer's shape.
    """
    buffers = [(v, np.asarray(arrays[v.name])) for v in (*func.params, *func.outs)]
    sizes = {**(known or {}), **bind_buffers(buffers)}
    unroll = func.attr("unroll", Unrolled(()))
    threads = [(op.var, op) for op in walk(func.body) if isinstance(op, For)
               and op.level in THREADS]
    axes = (*(name for name, _ in threads), *(name for name, _ in unroll), LANE)
    interp = engine(sizes, tuple(dict.fromkeys(axes)))
    for name, count in unroll:
        interp.symbols[name] = interp.spread(name, count)
    for value, array in buffers:
        interp.values[value] = array
    interp.block(func.body)


def counts(unroll: Iterable[tuple[str, int]], names: Iterable[str]) -> Unroll:
    """The part of `unroll` whose names are among `names`."""
    wanted = set(names)
    return tuple((n, c) for n, c in unroll if n in wanted)


def verify_kernel_ir(func: Func, spaces: Collection[str] | None = None) -> None:
    """Rules of a whole kernel: symbols in scope, families as declared, stores to memory only.

    `spaces` are the machine's memory spaces; None allows any.
    """
    ops = list(walk(func.body))
    values = {v.name for v in buffers_of(func)}
    for op in ops:
        values |= {v.name for v in (*op.results, *(a for b in op.blocks() for a in b.args))}
    unroll = tuple(func.attr("unroll", Unrolled(())))
    for name in {name for name, _ in unroll} & (values | RESERVED):
        raise VerifyError(f"{name} is an unrolled axis and a value, or a reserved word")
    for op in ops:
        space = getattr(op.types[0], "space", "") if isinstance(op, Alloc) else None
        space = op.space if isinstance(op, Barrier) else space
        if space is not None and spaces is not None and space not in spaces:
            raise VerifyError(f"{space} is no memory space here", op)
        _verify_family(op, unroll)
    _verify_scope(func.body, {name for name, _ in unroll}, values)
    accesses: list[LoadBase | StoreBase] = [op for op in ops if isinstance(op, Load | Store)]
    accesses += [access for op in ops if isinstance(op, Transfer) for access in op.accesses()]
    verify_roles(func.body)
    verify_buffers(func, accesses, [op.result for op in ops if isinstance(op, Alloc)])


def _verify_scope(block: Block, scope: set[str], values: set[str]) -> None:
    """Index symbols are sizes, unrolled axes or variables of enclosing loops; none is shadowed."""
    for op in block.ops:
        symbols = {s for e in expressions(op) for s in e.symbols() if not is_size(s)}
        symbols |= {op.axis} if isinstance(op, Combine | Prefix | Apply) else set()
        lanes = {LANE} if getattr(op, "lanes", 2) > 1 else set()
        if loose := sorted(symbols - scope - lanes):
            raise VerifyError(f"no axis or loop variable is called {', '.join(loose)} here", op)
        inner = scope
        if isinstance(op, For):
            if op.var in scope or op.var in values or op.var in RESERVED or is_size(op.var):
                raise VerifyError(f"loop variable {op.var} has the name of something else", op)
            inner = scope | {op.var}
        for nested in op.blocks():
            _verify_scope(nested, inner, values)


def _verify_family(op: Op, unroll: Unroll) -> None:
    """The copies of a family are those that its subscripts distinguish."""
    for value in op.results:
        if isinstance(value.type, VecType) and not set(value.type.unroll) <= set(unroll):
            raise VerifyError(f"{value.type} is unrolled unlike the kernel", op)
    if not isinstance(op, Load | Store | KernelIndex):
        return
    used = {s for e in expressions(op) for s in e.symbols()}
    if sorted(op.unroll) != sorted(counts(unroll, used)):
        raise VerifyError("is not unrolled over the axes in its subscripts", op)
    if isinstance(op, Store) and isinstance(op.value.type, VecType):
        held = op.family
        if not set(op.value.type.unroll) <= set(held.unroll) or (
                op.value.type.lanes not in (1, held.lanes)):
            raise VerifyError(f"stores {op.value.type} to fewer elements", op)


VOCABULARY = Vocabulary("kernel-ir", OPS, (
    ("unroll", read_unroll), ("persistent", read_raster), ("like", read_like)))
