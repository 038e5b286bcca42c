"""Loop IR: a kernel is SSA over named axes; each value's axes are its loop nest.

    kernel softmax(x: f32[512,2048]) -> y: f32[512,2048]
      m = fold max x[i,j] over j 2048 : f32 over i
      e = exp(x[i,j] - m) : f32 over i,j
      s = fold add e over j 2048 : f32 over i
      y[i,j] = e / s

Loads read a buffer's value at kernel entry. No op has a schedule: that is the mapping.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np

from rung.core.errors import VerifyError
from rung.core.expr import Expr, is_size, sym
from rung.core.interp import Interp, bind_buffers
from rung.core.lexer import Cursor
from rung.core.op import RESERVED, Builder, Func, Names, Op, Value, Vocabulary
from rung.core.ops import (
    Cast,
    Const,
    FoldBase,
    IndexValue,
    LoadBase,
    Map,
    StoreBase,
    Sub,
    buffers_of,
    verify_buffers,
)
from rung.core.rewrite import merge_equal
from rung.core.scalar import LAST, MONOIDS, SCALARS
from rung.core.types import BF16, F16, TensorType, Type, axes_of, axes_type, dtype_of
from rung.loop.carriers import CARRIERS, Carrier, Make


@dataclass(frozen=True)
class Axes:
    """Extents of a kernel's axes; their order means nothing."""

    extents: tuple[tuple[str, Expr], ...]

    def __str__(self) -> str:
        return ", ".join(f"{name} {extent}" for name, extent in self.extents)

    def implied(self, func: Func) -> bool:
        """Whether the ops imply these extents, so that text can omit them."""
        return dict(find_axes(func).extents) == dict(self.extents)

    def renamed(self, names: Mapping[str, str]) -> Axes:
        """With other names, which determine the order."""
        symbols = {old: sym(new) for old, new in names.items()}
        return Axes(tuple(sorted(((names.get(name, name), extent.subs(symbols))
                                  for name, extent in self.extents), key=lambda pair: pair[0])))


def read_axes(p: Cursor) -> Axes:
    """`i 504, j 512` to Axes."""
    return Axes(p.listed(lambda: (p.name(), p.expr())))


@dataclass(frozen=True, eq=False)
class Load(LoadBase):
    """One element of a buffer for each point of the axes in its subscripts."""

    def infer(self) -> tuple[Type, ...]:
        return (axes_type(dtype_of(self.buf.type), free_axes(self.subs, self.mask)),)

    def run(self, interp: Interp, *operands: Any) -> Any:
        return interp.read(operands[0], self.subs, self.mask, self.fill)


@dataclass(frozen=True, eq=False)
class Store(StoreBase):
    """Writes one element for each point of the axes in its subscripts.

    With `combine`, a monoid, `x[at[n],j] add= v` adds it to the old value: points of equal
    subscripts are sequential, in the order of `clashing` axes, also for `x[at[n],j] last= v`.
    """

    combine: str = ""

    @cached_property
    def nest(self) -> tuple[str, ...]:
        return free_axes(self.subs, self.mask)

    @property
    def clashing(self) -> tuple[str, ...]:
        """Axes along which points of a combining store may have equal subscripts."""
        plain = {str(s) for s in self.subs if isinstance(s, Expr)}
        return tuple(a for a in free_axes(self.subs) if self.combine and a not in plain)

    def check(self) -> None:
        super().check()
        missing = set(axes_of(self.value.type)) - set(free_axes(self.subs, self.mask))
        if missing:
            raise VerifyError(f"the value varies over {', '.join(sorted(missing))}, "
                              f"the subscripts do not")
        if not self.combine:
            return
        kind = dtype_of(self.buf.type)
        known = self.combine == LAST or (self.combine in MONOIDS and kind not in (BF16, F16))
        if not known or self.buf.role != "mutated":
            raise VerifyError(f"cannot combine by {self.combine} into {self.buf.name}, {kind}")

    def run(self, interp: Interp, *operands: Any) -> Any:
        ufunc = MONOIDS[self.combine].ufunc if self.combine in MONOIDS else None
        interp.write(operands[0], self.subs, interp.values[self.value], self.mask, ufunc)


@dataclass(frozen=True, eq=False)
class Fold(FoldBase):
    """Folds inputs along one axis with a carrier: a monoid, or one of several states.

    With a `product`, a scalar function of two inputs, it is a `contract` in text and folds their
    products, in one op so that atoms can match it. With `prefix` it is a `scan`: its value varies
    over the folded axis, so readers at the same position share its loop, and others read it from
    memory.
    """

    keyword: ClassVar[str] = "fold"
    form: ClassVar[str] = "fold {carrier} {args} over {axis} {extent} {:} acc {acc}"
    forms: ClassVar[tuple[tuple[str, Mapping[str, Any]], ...]] = (
        ("contract {carrier} {product} {args} over {axis} {extent} {:} acc {acc}", {}),
        ("scan {carrier} {args} over {axis} {extent} {:} acc {acc}", {"prefix": True}))

    @property
    def rule(self) -> Carrier:
        if self.carrier not in CARRIERS:
            raise VerifyError(f"no carrier is called {self.carrier!r}")
        return CARRIERS[self.carrier]

    @property
    def plain(self) -> bool:
        """Whether it folds one input by a monoid, so that it equals a fold of partial folds."""
        return self.carrier in MONOIDS and not self.product and not self.prefix

    @property
    def sums_products(self) -> bool:
        """Whether it is a contraction of linear algebra: a sum of products."""
        return (self.carrier, self.product) == ("add", "mul")

    @property
    def is_fma(self) -> bool:
        """Whether one step is a fused multiply-add of both inputs."""
        return self.sums_products and self.acc.is_float

    def step(self, make: Make, state: Sequence[Value], xs: Sequence[Value]) -> tuple[Value, ...]:
        """The state after one more element or family of elements; `xs` is the product if not
        fused."""
        if self.is_fma:
            return (make(Map("fma", (*xs, state[0])), state[0].name),)
        return self.rule.step(make, state, xs)

    def written(self) -> str:
        contract, scan = (form for form, _ in self.forms)
        return scan if self.prefix else contract if self.product else self.form

    @cached_property
    def nest(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(a for x in self.args for a in axes_of(x.type)))

    def infer(self) -> tuple[Type, ...]:
        inputs = 2 if self.product else 1 if self.prefix else self.rule.inputs
        if len(self.args) != inputs:
            raise VerifyError(f"{self.carrier} folds {inputs} inputs, not {len(self.args)}")
        reads = (range(inputs),) if self.product or self.prefix else self.rule.reads
        axes = (dict.fromkeys(a for n in read for a in axes_of(self.args[n].type))
                for read in reads)
        return tuple(axes_type(self.acc, tuple(a for a in names if self.prefix or a != self.axis))
                     for names in axes)

    def check(self) -> None:
        if (self.product or self.prefix) and self.carrier not in MONOIDS:
            raise VerifyError(f"no monoid is called {self.carrier!r}")
        if self.product and (self.prefix or self.product not in SCALARS
                             or SCALARS[self.product].arity != 2):
            raise VerifyError(f"cannot contract by {self.product}")
        for arg in self.args:
            if dtype_of(arg.type) != self.acc:
                raise VerifyError(f"{arg.name} is {arg.type}, the accumulator {self.acc}")
        if not any(self.axis in axes_of(a.type) for a in self.args):
            raise VerifyError(f"no input varies over {self.axis}")

    def run(self, interp: Interp, *operands: Any) -> Any:
        at, rank = interp.position(self.axis), len(interp.axes)
        xs = [np.asarray(x).reshape(np.shape(x) or (1,) * rank) for x in operands]
        if self.prefix:
            return MONOIDS[self.carrier].prefixes(xs[0], at)
        if self.product and not self.sums_products:
            xs = [SCALARS[self.product].numpy(*xs)]
        extent = int(interp.index(self.extent))
        wide = [np.broadcast_to(x, (*x.shape[:at], extent, *x.shape[at + 1:])) for x in xs]
        if self.sums_products:
            return np.expand_dims(_einsum(wide[0], xs[1], at), at)
        return self.rule.numpy(wide, at)


def _einsum(a: np.ndarray, b: np.ndarray, at: int) -> np.ndarray:
    """Sum of products along dimension `at`, leaving size-1 dimensions to broadcasting."""
    dims = range(a.ndim)
    keep_a = [d for d in dims if a.shape[d] != 1 or d == at]
    keep_b = [d for d in dims if b.shape[d] != 1 or (d == at and b.shape[d] == a.shape[d])]
    out = [d for d in dims if d != at and (d in keep_a or d in keep_b)]
    a2 = a.reshape([a.shape[d] for d in keep_a])
    b2 = b.reshape([b.shape[d] for d in keep_b])
    y = np.asarray(np.einsum(a2, keep_a, b2, keep_b, out, optimize=True))
    return y.reshape([(a if a.shape[d] != 1 else b).shape[d] if d in out else 1
                      for d in dims if d != at])


def free_axes(subs: Iterable[Sub], mask: Iterable[Expr] = ()) -> tuple[str, ...]:
    """The axes that subscripts vary over, in order of appearance."""
    axes: dict[str, None] = {}
    for sub in (*subs, *mask):
        names = axes_of(sub.type) if isinstance(sub, Value) else sorted(sub.symbols())
        axes.update((n, None) for n in names if not is_size(n))
    return tuple(axes)


def find_axes(func: Func) -> Axes:
    """Extents read off the folds and the plain subscripts of stores, then of loads."""
    extents: dict[str, Expr] = {}
    accesses: list[Load | Store] = [op for op in func.body.ops if isinstance(op, Store)]
    accesses += [op for op in func.body.ops if isinstance(op, Load)]
    for op in func.body.ops:
        if isinstance(op, Fold):
            extents[op.axis] = op.extent
    for access in accesses:
        shape = access.buf.type.shape if isinstance(access.buf.type, TensorType) else ()
        for sub, size in zip(access.subs, shape, strict=False):
            if isinstance(sub, Expr) and sub.is_symbol() and not is_size(str(sub)):
                extents.setdefault(str(sub), size)
    used = dict.fromkeys(a for op in func.body.ops for a in op.nest)
    return Axes(tuple((a, extents[a]) for a in used if a in extents))


def folds(func: Func) -> list[Fold]:
    """The folds, contractions and scans of a kernel."""
    return [op for op in func.body.ops if isinstance(op, Fold)]


def contractions(func: Func) -> list[Fold]:
    """The folds of products."""
    return [op for op in folds(func) if op.product]


def reductions(func: Func) -> list[Fold]:
    """The folds that are no scans: their axis is absent from the result and local to the fold."""
    return [op for op in folds(func) if not op.prefix]


def overwritten(ops: Sequence[Op], store: Store) -> set[Op]:
    """The loads before a store to their buffer, which read the old value."""
    before = ops[:ops.index(store)]
    return {op for op in before if isinstance(op, Load) and op.buf is store.buf}


@lru_cache(1 << 14)
def stride(op: Load | Store, axis: str) -> int:
    """Elements between neighbours along `axis`: 0, 1, or a large number when unknown."""
    t = op.buf.type
    assert isinstance(t, TensorType)
    strides = t.strides
    total, step = 0, Expr.of(1)
    for n in range(len(t.shape) - 1, -1, -1):
        sub = op.subs[n]
        here = strides[n] if strides is not None else step
        step = step * t.shape[n]
        if isinstance(sub, Value):
            if axis in axes_of(sub.type):
                return 1 << 20
            continue
        run = sub.coefficient(axis)
        if run is None:
            return 1 << 20
        product = (run * here).const_value
        if product is None:
            return 1 << 20
        total += product
    return abs(total)


def extents_of(func: Func) -> dict[str, Expr]:
    """Axis to extent of a kernel."""
    axes = func.attr("axes")
    return dict(axes.extents) if axes else {}


def make_kernel(name: str, params: Iterable[Value], outs: Iterable[Value],
                builder: Builder, axes: Mapping[str, Expr]) -> Func:
    """A kernel from a builder's ops; keeps only axes in use."""
    used = dict.fromkeys(a for op in builder.ops for a in op.nest)
    table = Axes(tuple((a, axes[a]) for a in used))
    return Func("kernel", name, tuple(params), tuple(outs), builder.block(), (("axes", table),))


def run_kernel(func: Func, arrays: Mapping[str, np.ndarray],
               known: Mapping[str, int] | None = None) -> None:
    """Run a kernel on NumPy arrays by parameter and output name; stores go into the arrays.

    `known` gives the sizes that cannot be read off a shape, as in x: f32[8*s0].
    """
    extents = extents_of(func)
    buffers = [(v, np.asarray(arrays[v.name])) for v in (*func.params, *func.outs)]
    sizes = {**(known or {}), **bind_buffers(buffers)}
    interp = Interp(sizes, tuple(extents))
    for axis, extent in extents.items():
        interp.symbols[axis] = interp.spread(axis, int(extent.evaluate(sizes)))
    written = {op.buf for op in func.body.ops if isinstance(op, Store)}
    for value, array in buffers:  # loads see the state on entry, stores the array itself
        interp.values[value] = array.copy() if value in written else array
    late = [op for op in func.body.ops if isinstance(op, Store)]
    for op in func.body.ops:
        if not isinstance(op, Store):
            interp.step(op)
    for op in late:
        op.run(interp, arrays[op.buf.name])


def verify_kernel(func: Func) -> None:
    """Rules of a whole kernel: axes have extents and names of their own, outputs are stored."""
    extents = extents_of(func)
    values = {v.name for op in func.body.ops for v in op.results}
    for axis in sorted(extents.keys() & (values | RESERVED | {p.name for p in buffers_of(func)})):
        raise VerifyError(f"{axis} is an axis and a value, or a reserved word")
    for op in func.body.ops:
        for axis in op.nest:
            if axis not in extents:
                raise VerifyError(f"axis {axis} has no extent", op)
        if isinstance(op, Fold) and extents[op.axis] != op.extent:
            raise VerifyError(f"{op.axis} has extent {extents[op.axis]}, folded {op.extent}", op)
    verify_buffers(func, [op for op in func.body.ops if isinstance(op, Load | Store)])


def finish_kernel(func: Func) -> Func:
    """Adds what text omits: the axes' extents; equal loads become one op."""
    func = merge_equal(func, (Load,))
    return func if func.attr("axes") else func.with_attr("axes", find_axes(func))


VOCABULARY = Vocabulary("kernel", (Load, Store, Fold, Map, Const, Cast, IndexValue),
                        (("axes", read_axes),), finish_kernel)
__all__ = ["Axes", "Fold", "Load", "Names", "Store"]
