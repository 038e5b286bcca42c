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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rung.core.errors import VerifyError
from rung.core.expr import Expr
from rung.core.interp import Interp, bind_sizes
from rung.core.op import Block, Effect, Func, Op, Value, walk
from rung.core.ops import Cast, Const, IndexValue, LoadBase, Map, StoreBase
from rung.core.parse import Vocabulary
from rung.core.scalar import MONOIDS
from rung.core.text import LANE
from rung.core.types import I64, ArrayType, TensorType, Type, VecType, dtype_of

Unroll = tuple[tuple[str, int], ...]
THREADS = ("wg", "warp", "thread", "lane")  # levels whose steps run in lockstep, one a thread


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


def parse_unroll(text: str) -> Unrolled:
    """`r<14, q<2` to Unrolled."""
    pairs = (item.split("<") for item in text.split(","))
    return Unrolled(tuple((name.strip(), int(count)) for name, count in pairs))


@dataclass(frozen=True, eq=False)
class Load(LoadBase):
    """Elements of a buffer or array, `lanes` at a time, once per step of the unrolled axes."""

    lanes: int = 1
    unroll: Unroll = ()
    inline: ClassVar[str] = "single"

    def infer(self) -> tuple[Type, ...]:
        subs = [s.type for s in self.subs if isinstance(s, Value)]
        unroll = dict.fromkeys(
            (*self.unroll, *(u for t in subs if isinstance(t, VecType) for u in t.unroll)))
        lanes = max([self.lanes, *(t.lanes for t in subs if isinstance(t, VecType))])
        return (VecType(dtype_of(self.buf.type), lanes, tuple(unroll)),)

    def run(self, interp: Interp, *operands: Any) -> Any:
        _set_lanes(interp, self.lanes)
        return interp.read(operands[0], self.subs, self.mask, self.fill)


@dataclass(frozen=True, eq=False)
class Store(StoreBase):
    """Writes a family of vectors."""

    lanes: int = 1
    unroll: Unroll = ()

    def run(self, interp: Interp, *operands: Any) -> Any:
        _set_lanes(interp, self.lanes)
        interp.write(operands[0], self.subs, interp.values[self.value], self.mask)


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
    """An array in a memory space, undefined until written; lives to the end of its block."""

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
class For(Op):
    """A loop from 0 up to `hi`, or `cap` if that is less; carries values through `yield`."""

    var: str
    hi: Expr
    body: Block
    cap: Expr | None = None
    level: str = ""
    inits: tuple[Value, ...] = ()
    keyword: ClassVar[str] = "for"
    form: ClassVar[str] = "for {var} in 0..{hi}< cap {cap}>< at {level}>< carry {carry}>{body}"

    def infer(self) -> tuple[Type, ...]:
        return tuple(a.type for a in self.body.args)

    def check(self) -> None:
        _check_yield(self.body, tuple(v.type for v in self.inits))

    def run(self, interp: Interp, *operands: Any) -> Any:
        hi = int(interp.index(self.hi))
        if self.cap is not None:
            hi = min(hi, int(interp.index(self.cap)))
        if self.level in THREADS:
            interp.symbols[self.var] = interp.spread(self.var, hi)
            out = interp.block(self.body, operands)
            return out if len(self.inits) != 1 else out[0]
        state: Any = operands
        for n in range(hi):
            interp.symbols[self.var] = np.asarray(n)
            out = interp.block(self.body, state)
            state = out if self.inits else state
        return state if len(self.inits) != 1 else state[0]


@dataclass(frozen=True, eq=False)
class If(Op):
    """`then` where every expression of `cond` is >= 0, else `orelse`; both may be empty."""

    cond: tuple[Expr, ...]
    then: Block
    orelse: Block
    types: tuple[Type, ...] = ()
    keyword: ClassVar[str] = "if"
    form: ClassVar[str] = "if nonneg [{cond}]{then}{orelse}"

    def infer(self) -> tuple[Type, ...]:
        return self.types

    def check(self) -> None:
        for block in (self.then, self.orelse):
            _check_yield(block, self.types)

    def run(self, interp: Interp, *operands: Any) -> Any:
        where = interp.valid(self.cond)
        if where.size != 1:
            raise NotImplementedError("a branch on a thread's index")
        out = interp.block(self.then if where.all() else self.orelse)
        return out if len(self.types) != 1 else out[0]


def _check_yield(block: Block, types: tuple[Type, ...]) -> None:
    given = block.ops[-1].operands() if block.ops and isinstance(block.ops[-1], Yield) else ()
    if tuple(v.type for v in given) != types:
        shown = ", ".join(str(v.type) for v in given) or "nothing"
        raise VerifyError(f"yields {shown}, not {', '.join(map(str, types)) or 'nothing'}")


@dataclass(frozen=True, eq=False)
class Yield(Op):
    """The values that a block hands to its owner."""

    values: tuple[Value, ...]
    keyword: ClassVar[str] = "yield"
    form: ClassVar[str] = "yield {values}"

    def run(self, interp: Interp, *operands: Any) -> Any:
        return operands


@dataclass(frozen=True, eq=False)
class Fill(Op):
    """A family of vectors that all hold one number: what an accumulator starts from."""

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
    axis: str
    keyword: ClassVar[str] = "combine"
    form: ClassVar[str] = "combine {monoid} {x} by {axis}"

    def infer(self) -> tuple[Type, ...]:
        t = self.x.type
        assert isinstance(t, VecType)
        if self.axis == LANE:
            return (VecType(t.dtype, 1, t.unroll),)
        return (VecType(t.dtype, t.lanes, tuple(u for u in t.unroll if u[0] != self.axis)),)

    def check(self) -> None:
        if self.monoid not in MONOIDS:
            raise VerifyError(f"no monoid is called {self.monoid!r}")

    def run(self, interp: Interp, *operands: Any) -> Any:
        at = interp.position(self.axis)
        x = np.asarray(operands[0])
        x = x.reshape(x.shape or (1,) * len(interp.axes))
        return np.expand_dims(MONOIDS[self.monoid].reduce(x, (at,)), at)


@dataclass(frozen=True, eq=False)
class Barrier(Op):
    """All threads of the block have arrived; what they wrote to `space` is visible to all."""

    space: str
    keyword: ClassVar[str] = "barrier"
    form: ClassVar[str] = "barrier {space}"
    effect: ClassVar[Effect] = Effect.ORDERED

    def run(self, interp: Interp, *operands: Any) -> Any:
        return None


OPS = (Load, Store, KernelIndex, Alloc, Fill, For, If, Yield, Combine, Barrier, Map, Const, Cast)


def run_kernel_ir(func: Func, arrays: Mapping[str, np.ndarray]) -> None:
    """Run Kernel IR on NumPy arrays by parameter and output name, in place."""
    buffers = [(v, arrays[v.name]) for v in (*func.params, *func.outs)
               if isinstance(v.type, TensorType)]
    sizes = bind_sizes([(v.type.shape, a.shape) for v, a in buffers])
    unroll = func.attr("unroll", Unrolled(()))
    threads = [(op.var, op) for op in walk(func.body) if isinstance(op, For)
               and op.level in THREADS]
    axes = (*(name for name, _ in threads), *(name for name, _ in unroll), LANE)
    interp = Interp(sizes, tuple(dict.fromkeys(axes)))
    for name, count in unroll:
        interp.symbols[name] = interp.spread(name, count)
    for value, array in buffers:
        interp.values[value] = array
    interp.block(func.body)


def counts(unroll: Iterable[tuple[str, int]], names: Iterable[str]) -> Unroll:
    """The part of `unroll` whose names are among `names`."""
    wanted = set(names)
    return tuple((n, c) for n, c in unroll if n in wanted)


VOCABULARY = Vocabulary("kernel-ir", OPS, (("unroll", parse_unroll),))
