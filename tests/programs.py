"""Small programs of Tensor IR ops for the tests of the middle rungs, and running both sides.

`Prog` is a builder with broadcasting: `p.map("add", x, bias)` puts in the `index` that eager's
broadcasting means. `check` runs two modules on the same random inputs and compares bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rung.core.expr import Expr, is_size, sym
from rung.core.machine import Machine, Rates, Space
from rung.core.op import Builder, Func, Names, Value
from rung.core.ops import Cast, Const, Map
from rung.core.scalar import round_bf16
from rung.core.types import BF16, BOOL, F32, DType, TensorType, dtype_of
from rung.loop.run import run_module
from rung.program.ir import Module, Return, Write
from rung.tensor.ir import (
    Concat,
    Contract,
    Full,
    Gather,
    Index,
    Iota,
    Reduce,
    Scan,
    Scatter,
    axis_names,
    shape_of,
    symbols,
)

CPU = Machine("test", (), (Space("dram", 1 << 34, 37e9), Space("l3", 32 << 20, 117e9)),
              Rates(37e9, 117e9, {"f32": 272e9, "bf16": 498e9}, 1e-6), 16, 32, cores=2)


def size(x: int | str) -> Expr:
    return Expr.of(x)


class Prog:
    """One program under construction."""

    def __init__(self, name: str = "main"):
        self.name = name
        self.b = Builder(Names())
        self.params: list[Value] = []

    def param(self, name: str, *shape: int | str, dtype: DType = F32, role: str = "input") -> Value:
        value = Value(self.b.names(name), TensorType(dtype, tuple(map(size, shape))), role)
        self.params.append(value)
        return value

    def const(self, x: float | int | bool, dtype: DType = F32) -> Value:
        return self.b.one(Const(x, dtype))

    def map(self, fn: str, *args: Value | float) -> Value:
        dtype = next(dtype_of(a.type) for a in args if isinstance(a, Value))
        shape: tuple[Expr, ...] = ()
        for a in args:
            if isinstance(a, Value):
                shape = _wider(shape, shape_of(a))
        whole = [self.expand(a, shape) if isinstance(a, Value) else self.const(a, dtype)
                 for a in args]
        return self.b.one(Map(fn, tuple(whole)), fn)

    def expand(self, x: Value, shape: Sequence[Expr]) -> Value:
        if not isinstance(x.type, TensorType) or shape_of(x) == tuple(shape):
            return x
        axes = axis_names(len(shape))
        lead = len(shape) - len(shape_of(x))
        subs = [Expr.of(0) if n.is_const(1) else sym(a)
                for n, a in zip(shape_of(x), axes[lead:], strict=True)]
        return self.index(x, shape, lambda *_: subs)

    def index(self, x: Value, shape: Sequence[Expr | int | str],
              at: Callable[..., Sequence[Expr | int]],
              mask: Callable[..., Sequence[Expr]] = lambda *_: (), fill: float = 0) -> Value:
        axes = axis_names(len(shape))
        syms = symbols(axes)
        return self.b.one(Index(x, axes, tuple(map(Expr.of, shape)),
                                tuple(map(Expr.of, at(*syms))), tuple(mask(*syms)), fill), "t")

    def permute(self, x: Value, *dims: int) -> Value:
        shape = [shape_of(x)[d] for d in dims]
        return self.index(x, shape, lambda *s: [s[dims.index(n)] for n in range(len(dims))])

    def view(self, x: Value, *shape: int | str) -> Value:
        """A reshape, as the front end writes it: flat index divided out again."""
        def at(*s: Expr) -> list[Expr]:
            flat = Expr.of(0)
            for axis, n in zip(s, shape, strict=True):
                flat = flat * Expr.of(n) + axis
            subs = []
            for n in reversed(shape_of(x)):
                subs.append(flat % n)
                flat = flat // n
            return subs[::-1]
        return self.index(x, list(shape), at)

    def slice(self, x: Value, dim: int, start: int, stop: int) -> Value:
        shape: list[Any] = list(shape_of(x))
        shape[dim] = stop - start
        return self.index(x, shape, lambda *s: [a + start if n == dim else a
                                                for n, a in enumerate(s)])

    def reduce(self, monoid: str, x: Value, *axes: int, keep: bool = False) -> Value:
        axes = tuple(a % len(shape_of(x)) for a in axes)
        y = self.b.one(Reduce(monoid, x, axes, dtype_of(x.type)), monoid)
        if not keep:
            return y
        shape = [Expr.of(1) if n in axes else s for n, s in enumerate(shape_of(x))]
        return self.index(y, shape, lambda *s: [a for n, a in enumerate(s) if n not in axes])

    def scan(self, monoid: str, x: Value, dim: int) -> Value:
        return self.b.one(Scan(monoid, x, dim, dtype_of(x.type)), "cum")

    def einsum(self, text: str, a: Value, b: Value) -> Value:
        left, out = text.split("->")
        x, y = left.split(",")
        return self.b.one(Contract("add", "mul", a, tuple(x), b, tuple(y), tuple(out),
                                   dtype_of(a.type)), "mm")

    def cast(self, x: Value, dtype: DType, implicit: bool = False) -> Value:
        return self.b.one(Cast(x, dtype, implicit), "c")

    def gather(self, x: Value, dim: int, at: Value) -> Value:
        return self.b.one(Gather(x, dim, at))

    def scatter(self, x: Value, dim: int, at: Value, src: Value) -> Value:
        return self.b.one(Scatter(x, dim, at, src))

    def concat(self, dim: int, *xs: Value) -> Value:
        return self.b.one(Concat(xs, dim))

    def iota(self, n: int | str) -> Value:
        return self.b.one(Iota(Expr.of(n)))

    def full(self, x: float, *shape: int, dtype: DType = F32) -> Value:
        return self.b.one(Full(x, dtype, tuple(map(size, shape))))

    def softmax(self, x: Value) -> Value:
        e = self.map("exp", self.map("sub", x, self.reduce("max", x, -1, keep=True)))
        return self.map("div", e, self.reduce("add", e, -1, keep=True))

    def rms_norm(self, x: Value, w: Value) -> Value:
        n = shape_of(x)[-1].const_value or 1
        mean = self.map("mul", self.reduce("add", self.map("mul", x, x), -1, keep=True), 1.0 / n)
        return self.map("mul", self.map("mul", x, self.map("rsqrt", self.map("add", mean, 1e-5))),
                        w)

    def write(self, dst: Value, src: Value) -> None:
        self.b.add(Write(dst, src))

    def done(self, *values: Value) -> Func:
        self.b.add(Return(values))
        return Func("program", self.name, tuple(self.params), (), self.b.block())


def _wider(a: tuple[Expr, ...], b: tuple[Expr, ...]) -> tuple[Expr, ...]:
    n = max(len(a), len(b))
    a, b = ((Expr.of(1),) * (n - len(x)) + x for x in (a, b))
    return tuple(y if x.is_const(1) else x for x, y in zip(a, b, strict=True))


def draw(program: Func, sizes: dict[str, int] | None = None, seed: int = 0,
         ints: int = 2) -> list[Any]:
    """Random arguments; integers are below `ints`, bf16 is held, rounded, in float32."""
    rng = np.random.default_rng(seed)
    out: list[Any] = []
    for p in program.params:
        assert isinstance(p.type, TensorType)
        shape = [int(n.evaluate(sizes or {})) for n in p.type.shape]
        if p.type.dtype.kind in "iu":
            x = rng.permutation(max(ints, int(np.prod(shape))))[:int(np.prod(shape))] % ints
            out.append(x.reshape(shape).astype(p.type.dtype.numpy))
        elif p.type.dtype is BOOL:
            out.append(rng.random(shape) < 0.5)
        else:
            x = rng.standard_normal(shape).astype(np.float32)
            out.append(round_bf16(x) if p.type.dtype is BF16 else x.astype(p.type.dtype.numpy))
    return out


def results(module: Module, inputs: Sequence[Any]) -> list[Any]:
    """What the module returns, and its arguments afterwards."""
    given = [np.array(x) for x in inputs]
    return [*map(np.array, run_module(module, given)), *given]


def check(before: Module, after: Module, inputs: Sequence[Any], exact: bool = True) -> None:
    """Both modules give the same on `inputs` (bits, or to rounding)."""
    for a, b in zip(results(before, inputs), results(after, inputs), strict=True):
        if exact:
            np.testing.assert_array_equal(a, b)
        else:
            top = np.abs(a[np.isfinite(a)]).max(initial=1.0)
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6 * top)


__all__ = ["CPU", "Prog", "check", "draw", "is_size", "results"]
