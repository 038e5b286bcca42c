"""Splicing: one kernel's values computed inside another kernel, by substituting axes.

    kernel add: t[i,j] = x[i,j] + b[j]         kernel relu: y[i,j] = relu(t[i,j])
    ->  kernel: y[i,j] = relu(x[i,j] + b[j])

A load `t[e,f] | mask` of the consumer becomes the producer's stored value with its axes i, j
replaced by e, f; folded axes get fresh names. Two different loads of t are two instances. A `piece`
is a kernel with the arguments and results of its call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rung.core.expr import ONE, ZERO, Expr, is_size
from rung.core.op import Func, Op, Value
from rung.core.ops import Const, Sub
from rung.core.rewrite import renamed
from rung.core.types import dtype_of
from rung.loop.emit import Copier, Declined, Emitter, rebuilt, renaming, shape
from rung.loop.ir import Fold, Load, Store, extents_of, reductions
from rung.loop.normalize import split_axes


@dataclass(frozen=True, eq=False)
class Piece:
    """A kernel and its call: `args` for its parameters; `results` are first the new states of
    `updates`, then the outputs."""

    func: Func
    args: tuple[Value, ...]
    results: tuple[Value, ...]
    updates: tuple[Value, ...] = ()

    @property
    def outs(self) -> dict[Value, Value]:
        """Result of the call to output buffer of the kernel."""
        plain = self.results[len(self.updates):]
        return dict(zip(plain, self.func.outs, strict=True))

    @property
    def params(self) -> dict[Value, Value]:
        """Argument of the call to parameter of the kernel."""
        return dict(zip(self.args, self.func.params, strict=True))

    def behind(self, result: Value) -> set[Value]:
        """The arguments that a result depends on."""
        if len(self.results) == 1:
            return set(self.args)
        states = {r: self.params[u] for r, u in zip(self.results, self.updates, strict=False)}
        buffer = (self.outs | states)[result]
        read = [v for op in self.func.body.ops if isinstance(op, Store) and op.buf is buffer
                for v in op.operands()]
        loaded = {op.buf for v in read for op in _behind(self.func, v) if isinstance(op, Load)}
        return {a for a, p in self.params.items() if p in loaded}


@dataclass
class _Splice:
    """One splice: `made` are instances by load, `kept` the producer's results that are stored as
    well. With `rows`, folds over rows of which one element is read have an axis of their own."""

    producer: Piece
    consumer: Piece
    kept: frozenset[Value]
    rows: bool = False
    out: Emitter = field(init=False)
    params: dict[Value, Value] = field(default_factory=dict)
    outs: dict[Value, Value] = field(default_factory=dict)
    fresh: dict[str, Sub] = field(default_factory=dict)

    def run(self) -> Piece:
        self.out = Emitter(extents_of(self.consumer.func))
        inner = self.producer.outs
        buffers = {b: inner[v] for v, b in self.consumer.params.items() if v in inner}
        for arg, param in (*self.consumer.params.items(), *self.producer.params.items()):
            if arg not in inner:
                self.declare(self.params, arg, param)
        copier = Copier(self.out)
        for arg, param in self.consumer.params.items():
            if arg not in inner:
                copier.values[param] = self.params[arg]
        for result, buffer in self.consumer.outs.items():
            copier.values[buffer] = self.declare(self.outs, result, buffer)
        self.check_kept(buffers)
        for op in self.consumer.func.body.ops:
            if isinstance(op, Load) and op.buf in buffers:
                copier.values[op.result] = self.instance(op, buffers[op.buf], copier)
            else:
                copier.copy(op)
        return self.finish()

    def declare(self, table: dict[Value, Value], value: Value, buffer: Value) -> Value:
        if value not in table:
            table[value] = renamed(buffer, self.out.names(buffer.name))
        return table[value]

    def check_kept(self, buffers: Mapping[Value, Value]) -> None:
        """Declined unless the consumer reads all of each kept result, in order, at some load;
        `buffers` are the producer's, by the parameters of the consumer."""
        loads = [op for op in self.consumer.func.body.ops if isinstance(op, Load)]
        read = {buffers[op.buf] for op in loads if op.buf in buffers
                and self.is_whole(buffers[op.buf], op.subs) and not self.out.unproved(op.mask)}
        missing = next((v for v in self.kept if self.producer.outs[v] not in read), None)
        if missing:
            raise Declined(f"{missing.name} is not read at its own indices")

    def finish(self) -> Piece:
        func = self.out.kernel(self.consumer.func.name, self.params.values(), self.outs.values())
        func = unify(split_axes(func))
        used = {v for op in func.body.ops for v in op.operands()}
        params = {a: p for a, p in self.params.items() if p in used}
        results = (*self.consumer.results[:len(self.consumer.updates)], *self.outs)
        func = _with_params(func, tuple(params.values()))
        return Piece(func, tuple(params), results, self.consumer.updates)

    def instance(self, load: Load, buffer: Value, copier: Copier) -> Value:
        """The value of a `load` of the producer's `buffer`."""
        mask = self.out.unproved(map(copier.expr, load.mask))
        subs = copier.subs(load.subs)
        value = self.stored(buffer, subs, mask)
        if mask:
            value = self.filled(value, mask, load)
        elif buffer in (b for v, b in self.producer.outs.items() if v in self.kept):
            self.keep(buffer, subs, value)
        return value

    def filled(self, value: Value, mask: tuple[Expr, ...], load: Load) -> Value:
        """`value` where `mask` holds, else the load's fill; a single load gets the mask itself."""
        made = next((op for op in reversed(self.out.ops) if value in op.results), None)
        if isinstance(made, Load) and set(made.mask) == set(mask):
            return self.out.one(Load(made.buf, made.subs, made.mask, load.fill))
        other = self.out.one(Const(load.fill, dtype_of(load.buf.type)))
        return self.out.where(mask, value, other)

    def stored(self, buffer: Value, subs: Sequence[Sub], mask: tuple[Expr, ...]) -> Value:
        """The producer's value of `buffer[subs]`, from the store that covers it."""
        found: list[tuple[tuple[Expr, ...], Value]] = []
        stores = [op for op in self.producer.func.body.ops
                  if isinstance(op, Store) and op.buf is buffer]
        for store in stores:
            axes, tests = self.solve(store, subs)
            if self.out.never(tests):
                continue
            needs = self.out.unproved(tests)
            found.append((needs, self.copy(store, axes, (*mask, *needs))))
            if not needs:
                break
        if not found:
            raise Declined("no element of the producer is read")
        value = found[-1][1]  # the stores cover the buffer: the last needs no test
        for needs, other in reversed(found[:-1]):
            value = self.out.where(needs, other, value)
        return value

    def solve(self, store: Store, subs: Sequence[Sub]) -> tuple[dict[str, Sub], list[Expr]]:
        """Values of the producer's axes such that `store` writes at `subs`, and the mask."""
        extents = extents_of(self.producer.func)
        axes: dict[str, Sub] = {}
        needs: list[Expr] = []
        if store.mask:
            raise Declined("the producer's store is masked")
        for place, want, size in zip(store.subs, subs, shape(store.buf), strict=True):
            parts, start, count = _digits(place, extents)
            whole = start is ZERO and count is size
            if axes.keys() & parts or (isinstance(want, Value) and not (whole and len(parts) == 1)):
                raise Declined(f"no axes solve {place} = {want}")
            if isinstance(want, Value):
                axes[parts[0]] = want
                continue
            want = want - start
            if not whole:
                needs += [want, count - 1 - want]
            for axis in reversed(parts):  # the innermost axis is the last digit
                axes[axis] = self.out.index(want % extents[axis] if axis != parts[0] else want)
                want = want // extents[axis]
        return axes, needs

    def copy(self, store: Store, axes: dict[str, Sub], mask: tuple[Expr, ...]) -> Value:
        """The ops behind `store`, copied with `axes` replaced."""
        table = {self.producer.params[a]: self.params[a] for a in self.producer.args}
        ops = list(_behind(self.producer.func, store.value))
        rows: dict[Op, dict[str, Sub]] = {}
        for op in ops:
            if isinstance(op, Fold):
                if not op.prefix and op.axis not in self.fresh:
                    self.fresh[op.axis] = Expr.of(self.out.axis(op.axis, op.extent))
                if self.rows and not op.prefix and _picks(axes.get(op.axis)):
                    rows[op] = {**self.fresh, **{a: e for a, e in axes.items() if a != op.axis}}
                self.whole(op, rows.get(op, {**self.fresh, **axes}), mask)
        copier = Copier(self.out, {**self.fresh, **axes}, dict(table), mask)
        for op in ops:
            if op in rows:
                copier.values |= self.row(op, rows[op], table, mask)
            else:
                copier.copy(op)
        return copier.values[store.value]

    def row(self, op: Op, axes: dict[str, Sub], table: dict[Value, Value], mask: tuple[Expr, ...]
            ) -> dict[Value, Value]:
        """The results of a fold, of whose axis elsewhere only one element is read: what is behind
        the fold has the axis of its own."""
        copier = Copier(self.out, axes, dict(table), mask)
        copier.ops(_behind(self.producer.func, op.results[0]))
        return {r: copier.values[r] for r in op.results}

    def whole(self, op: Fold, axes: Mapping[str, Sub], mask: Iterable[Expr]) -> None:
        """Declined if a folded axis would be shortened, or shared with ops outside of the fold:
        tril(softmax(x)) sums whole rows, also where j > i."""
        name = str(axes.get(op.axis, op.axis))
        outer = [e for a, e in axes.items() if a != op.axis and isinstance(e, Expr)]
        if any(name in e.symbols() for e in (*outer, *mask)):
            raise Declined(f"{name}, which is folded over, also says what is read")
        if self.out.axes.get(name, op.extent) is not op.extent:
            raise Declined(f"a part of {name} is read, which is folded over")

    def keep(self, buffer: Value, subs: Sequence[Sub], value: Value) -> None:
        """Store the producer's value as well, if this instance is the whole buffer, in order."""
        result = next(v for v, b in self.producer.outs.items() if b is buffer)
        if self.is_whole(buffer, subs) and result not in self.outs:
            self.out.add(Store(self.declare(self.outs, result, buffer), tuple(subs), value))

    def is_whole(self, buffer: Value, subs: Sequence[Sub]) -> bool:
        """Whether `subs` cover a whole buffer, in order."""
        pairs = [(str(s), n) for s, n in zip(subs, shape(buffer), strict=True) if not n.is_const(1)]
        return len(dict(pairs)) == len(pairs) and all(self.out.axes.get(a) is n for a, n in pairs)


def splice(producer: Piece, consumer: Piece, kept: frozenset[Value] = frozenset(),
           rows: bool = False) -> Piece:
    """`consumer` with what it loads from `producer` computed inside; `kept` results of the
    producer become outputs of the new kernel, and with `rows` one element of what a fold has run
    over may be read. Raises Declined with the reason."""
    return _Splice(producer, consumer, kept, rows).run()


def _digits(place: Sub, extents: dict[str, Expr]) -> tuple[list[str], Expr, Expr]:
    """(axes, start, count): `place` is start + a number below count with the axes as its digits.

    Declined for other subscripts, such as 2*i or i + j.
    """
    if isinstance(place, Value):
        raise Declined("the producer stores at data-dependent indices")
    axes = [s for s in place.symbols() if not is_size(s)]
    coefs = {a: place.coefficient(a) for a in axes}
    start, count, parts = place.subs(dict.fromkeys(axes, 0)), ONE, list[str]()
    while len(parts) < len(axes):
        axis = next((a for a in axes if coefs[a] is count and a not in parts), None)
        if axis is None:
            raise Declined(f"the producer stores at {place}")
        parts.append(axis)
        count = count * extents[axis]
    return parts[::-1], start, count


def _behind(func: Func, value: Value) -> Iterator[Op]:
    """The ops that `value` needs, in order."""
    wanted, ops = {value}, []
    for op in reversed(func.body.ops):
        if any(r in wanted for r in op.results):
            wanted.update(op.operands())
            ops.append(op)
    return reversed(ops)


def _picks(sub: Sub | None) -> bool:
    """Whether an axis becomes a number that is no axis."""
    return sub is not None and not (isinstance(sub, Expr) and sub.is_symbol())


def _with_params(func: Func, params: tuple[Value, ...]) -> Func:
    return Func(func.kind, func.name, params, func.outs, func.body, func.attrs)


def unify(func: Func) -> Func:
    """Folded axes renamed to an axis of the same extent where that makes two loads equal.

    `fold x[i,k] over k` beside `y[i,j] = x[i,j]` runs over j: legal if no op has both in its nest,
    since a folded axis is local to its fold.
    """
    for _ in range(8):
        pairs = _same_load(func)
        if pairs is None:
            return func
        func = rebuilt(func, renaming(pairs))
    return func


def _same_load(func: Func) -> dict[str, str] | None:
    """A folded axis and another axis, such that two loads become equal; None if there are none."""
    groups: dict[tuple[Value, tuple[Expr, ...]], list[Load]] = {}
    for op in func.body.ops:
        if isinstance(op, Load):
            groups.setdefault((op.buf, op.mask), []).append(op)
    groups = {k: v for k, v in groups.items() if len(v) > 1}
    if not groups:
        return None
    folded = {op.axis for op in reductions(func)}
    nests = [set(op.nest) for op in func.body.ops]
    stored = {a for op in func.body.ops if isinstance(op, Store) for a in op.nest}
    for loads in groups.values():
        for n, one in enumerate(loads):
            for two in loads[:n]:
                pairs = _renaming(one, two, folded - stored, extents_of(func))
                if pairs and not any({a, b} <= nest for nest in nests for a, b in pairs.items()):
                    return pairs
    return None


def _renaming(one: Load, two: Load, free: set[str], extents: dict[str, Expr]) -> (
        dict[str, str] | None):
    """The renaming of `free` axes that makes the two equal."""
    pairs: dict[str, str] = {}
    for a, b in zip(one.subs, two.subs, strict=True):
        if a is b:
            continue
        if not (isinstance(a, Expr) and isinstance(b, Expr) and a.is_symbol() and b.is_symbol()):
            return None
        old, new = (str(a), str(b)) if str(a) in free else (str(b), str(a))
        if old not in free or extents[old] is not extents.get(new) or pairs.get(old, new) != new:
            return None
        pairs[old] = new
    return pairs if not set(pairs) & set(pairs.values()) else None
