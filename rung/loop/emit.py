"""Building kernels: a builder with common subexpression elimination, and copying into it.

In: ops of an existing kernel, with replacements of axes, buffers and values. Out: new ops, types
inferred again. `t[i,k]` with i -> 2*j copies to `t[2*j,k]`. Raises Declined where the replacement
of an axis is no index expression.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rung.core import origins
from rung.core.errors import RungError
from rung.core.expr import Expr, Sym, sym
from rung.core.op import Builder, Effect, Func, Names, Op, Value
from rung.core.ops import Cast, Const, IndexValue, Map, Sub
from rung.core.ranges import prove_nonneg
from rung.core.rewrite import dead_code
from rung.core.types import I64, TensorType, axes_of
from rung.loop.ir import Axes, Fold, Load, Store, free_axes

Sizes = Mapping[str, Expr]  # axis -> extent


class Declined(RungError):
    """A rewrite of a kernel is impossible; the message is the reason."""


class Emitter(Builder):
    """A builder over `axes` that returns the earlier results for an equal op."""

    def __init__(self, axes: Sizes = {}, taken: Iterable[str] = ()):  # noqa: B006
        super().__init__(Names([*axes, *taken]))
        self.axes = dict(axes)
        self.bounds: dict[str, tuple[int | Expr, int | Expr | None]] = {
            a: (0, n - 1) for a, n in axes.items()}
        self._seen: dict[Any, tuple[Value, ...]] = {}

    def add(self, op: Op, *hints: str) -> tuple[Value, ...]:
        if op.effect is not Effect.PURE:
            return super().add(op, *hints)
        key = op.key()
        if key not in self._seen:
            self._seen[key] = super().add(op, *(hints or (hint(op),)))
        return self._seen[key]

    def keep(self, op: Op) -> tuple[Value, ...]:
        """Append `op` of another kernel unchanged, if its results' names are free."""
        names, pure = [r.name for r in op.results], op.effect is Effect.PURE
        if (pure and op.key() in self._seen) or not self.names.take(names):
            return self.add(op, *names)
        self.ops.append(op)
        if pure:
            self._seen[op.key()] = op.results
        return op.results

    def axis(self, name: str, extent: Expr) -> str:
        """A new axis, called `name` if that is free."""
        name = self.names(name)
        self.axes[name] = extent
        self.bounds[name] = (0, extent - 1)
        return name

    def index(self, e: Expr) -> Expr:
        """`e`, with fewer divisions if the extents allow."""
        plain = all(isinstance(a, Sym) for _, mono in e.terms for a in mono)
        return e if plain else e.simplify(self.bounds)

    def unproved(self, mask: Iterable[Expr]) -> tuple[Expr, ...]:
        """The conditions e >= 0 that the extents do not imply, each once."""
        found = dict.fromkeys(self.index(e) for e in mask)
        return tuple(e for e in found if not prove_nonneg(e, self.bounds))

    def never(self, mask: Iterable[Expr]) -> bool:
        """Whether some condition e >= 0 is false at every point."""
        return any(prove_nonneg(-e - 1, self.bounds) for e in mask)

    def where(self, mask: Sequence[Expr], yes: Value, no: Value) -> Value:
        """`yes` where every expression of `mask` is >= 0, else `no`."""
        zero = self.one(Const(0, I64))
        tests = [self.one(Map("ge", (self.one(IndexValue(e)), zero))) for e in mask]
        if not tests:
            return yes
        both = tests[0]
        for test in tests[1:]:
            both = self.one(Map("and", (both, test)))
        return self.one(Map("where", (both, yes, no)))

    def kernel(self, name: str, params: Iterable[Value], outs: Iterable[Value]) -> Func:
        """The kernel, without dead ops and unused parameters; axes in order of use."""
        func = Func("kernel", name, tuple(params), tuple(outs), self.block())
        func = dead_code(func)
        used = dict.fromkeys(a for op in func.body.ops for a in op.nest)
        return func.with_attr("axes", Axes(tuple((a, self.axes[a]) for a in used)))


def hint(op: Op) -> str:
    """A name for the result of `op`."""
    match op:
        case Map():
            return op.fn
        case Fold(prefix=True):
            return {"add": "cumsum", "mul": "cumprod"}.get(op.carrier, f"cum{op.carrier}")
        case Fold():
            return "mm" if op.product else "sum" if op.carrier == "add" else op.carrier
        case Load():
            return "t"
        case _:
            return "v"


@dataclass
class Copier:
    """Copies ops into `out`. `axes` replaces old axes (default: themselves), `values` buffers and
    copied results; loads get `mask` as a further condition."""

    out: Emitter
    axes: dict[str, Sub] = field(default_factory=dict)
    values: dict[Value, Value] = field(default_factory=dict)
    mask: tuple[Expr, ...] = ()

    def ops(self, ops: Iterable[Op]) -> None:
        for op in ops:
            self.copy(op)

    def copy(self, op: Op) -> None:
        """Copy one op and follow its origins: what else it is made of is part of it."""
        before = len(self.out.ops)
        self.op(op)
        if not origins.following():
            return
        origins.derive((self.values[r] for r in op.results), op.results)
        origins.follow_rest((r for new in self.out.ops[before:] for r in new.results),
                            op.results or op.operands())

    def op(self, op: Op) -> tuple[Value, ...]:
        """Copy one op and enter its results in `values`. An unchanged op is kept."""
        moved = self._moved(op)
        new = self.out.keep(op) if moved is op else (
            self.out.add(moved, *(r.name for r in op.results)))
        self.values.update(zip(op.results, new, strict=True))
        return new

    def _moved(self, op: Op) -> Op:
        match op:
            case Load():
                subs = self.subs(op.subs)
                axes = set(free_axes(subs))
                inside = [e for e in self.mask if axes & e.symbols() or not free_axes((e,))]
                mask = self.out.unproved([*map(self.expr, op.mask), *inside])
                return _changed(op, buf=self.values[op.buf], subs=subs, mask=mask)
            case Store():
                mask = self.out.unproved([*map(self.expr, op.mask), *self.mask])
                return _changed(op, buf=self.values[op.buf], subs=self.subs(op.subs),
                                value=self.values[op.value], mask=mask)
            case IndexValue():
                return self._index(op)
            case Fold():
                new = op.map(self.values)
                axis = self.axis(op.axis)
                if not any(axis in axes_of(v.type) for v in new.args):
                    raise Declined(f"nothing folded over {axis} varies over it")
                return _changed(new, axis=axis)
            case _:
                return op.map(self.values)

    def axis(self, name: str) -> str:
        """The new name of a folded axis."""
        new = self.axes.get(name)
        if new is None:
            return name
        if isinstance(new, Value) or not new.is_symbol():
            raise Declined(f"the folded axis {name} would become {new}")
        return str(new)

    def subs(self, subs: Iterable[Sub]) -> tuple[Sub, ...]:
        return tuple(self.sub(s) for s in subs)

    def sub(self, sub: Sub) -> Sub:
        if isinstance(sub, Value):
            return self.values[sub]
        if sub.is_symbol():
            return self.axes.get(str(sub), sub)
        return self.expr(sub)

    def expr(self, e: Expr) -> Expr:
        """`e` over the new axes; Declined if an axis was replaced by a data-dependent value."""
        new: dict[str, Expr | int] = {}
        for name in e.symbols() & self.axes.keys():
            to = self.axes[name]
            if isinstance(to, Value):
                raise Declined(f"{name} in {e} would depend on data")
            new[name] = to
        return self.out.index(e.subs(new)) if new else e

    def _index(self, op: IndexValue) -> Op:
        to = self.sub(op.expr)
        if to is op.expr:
            return op
        return IndexValue(to) if isinstance(to, Expr) else Cast(to, I64)


def _changed(op: Op, **fields: object) -> Op:
    """`op` with these fields; the same object if unchanged."""
    old = op.__dict__
    return op if all(x is old[f] or x == old[f] for f, x in fields.items()) else (
        op.with_fields(**fields))


def rebuilt(func: Func, axes: Mapping[str, Sub], sizes: Sizes | None = None,
            copying: Callable[..., Copier] = Copier) -> Func:
    """`func` with axes replaced; `sizes` are the extents of all new axes, `copying` makes the
    copier."""
    kept = {a: n for a, n in func.attr("axes").extents if a not in axes}
    buffers = (*func.params, *func.outs)
    out = Emitter(sizes or kept, [v.name for v in buffers])
    copying(out, dict(axes), {v: v for v in buffers}).ops(func.body.ops)
    return out.kernel(func.name, func.params, func.outs)


def shape(value: Value) -> tuple[Expr, ...]:
    """The declared shape of a buffer."""
    assert isinstance(value.type, TensorType)
    return value.type.shape


def renaming(pairs: Mapping[str, str]) -> dict[str, Sub]:
    return {old: sym(new) for old, new in pairs.items()}
