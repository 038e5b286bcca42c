"""Kernel IR to C text: one function for a kernel, shared by the C family of targets.

A family `f32x16 over r<2` becomes the variables `c_0`, `c_1`. Pure ops are written where they are
first needed, so that a value lives in a register only between its uses; before a store to the same
buffer, a loop or a branch everything that must not move past it is written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rung.core.errors import LoweringError
from rung.core.expr import Expr, may_be_negative, sym, to_source
from rung.core.op import Block, Effect, Func, Op, Value, uses, walk
from rung.core.ops import Cast, Const, Map, Yield
from rung.core.scalar import MONOIDS
from rung.core.text import LANE
from rung.core.types import I32, I64, INDEX, ArrayType, DType, TensorType, VecType, dtype_of
from rung.kernel.ir import (
    Alloc,
    Barrier,
    Combine,
    Fill,
    For,
    If,
    KernelIndex,
    Load,
    Store,
    Transfer,
)
from rung.targets.base import buffers_of, strides_of, symbols_of
from rung.targets.c_family import Prelude
from rung.targets.families import Point, label, points, spread
from rung.targets.masks import Ends, ends, settled, still_open
from rung.targets.written import Written, computed


@dataclass(frozen=True)
class Style:
    """What differs between the C family's members."""

    restrict: str = "restrict"
    head: str = "static void {name}({params})"
    words: frozenset[str] = frozenset()  # of the language, that may name values of the IR


class Emitter:
    """Writes one kernel; `prelude` collects the helpers that it needs."""

    def __init__(self, func: Func, prelude: Prelude, style: Style = Style()):
        self.func, self.p, self.style = func, prelude, style
        self.integer = "long"  # the C type of indices and sizes
        self.lines = Written()
        self.depth = 1
        self.users = uses(func.body)
        named = (*buffers_of(func), *self.users)
        self.names = dict.fromkeys((v.name for v in named), False) | dict.fromkeys(
            style.words, True)
        self.pending: dict[Value, Op] = {}
        self.text: dict[tuple[Value, Point], str] = {}

    def source(self) -> str:
        """The function's text."""
        self._body(self.func.body, ())
        self.finish()
        head = self.style.head.format(name=self.func.name, params=self._params())
        return self.lines.function(self.func.name, head + " {")

    def finish(self) -> None:
        """What stands after the body."""

    def _params(self) -> str:
        written = {op_writes(op) for op in walk(self.func.body)}
        params = [f"{'' if v in written else 'const '}{self.p.storage(dtype_of(v.type))} "
                  f"*{self.style.restrict} {v.name}" for v in buffers_of(self.func)]
        kinds = {s: "long" if may_be_negative(sym(s)) else self.integer
                 for s in symbols_of(self.func)}
        return ", ".join(params + [f"{kind} {s}" for s, kind in kinds.items()])

    def line(self, text: str) -> None:
        self.lines.add("  " * self.depth + text)

    # ---- blocks and statements
    def statement(self, op: Op) -> None:
        match op:
            case Store():
                self._flush_loads(op.buf)
                self._store(op)
            case For():
                self._flush_for(op)
                self._for(op)
            case If():
                self._flush_for(op)
                self._if(op)
            case Alloc():
                self._alloc(op)
            case Transfer():
                self._flush_loads(op.dst)
                self.transfer(op)
            case Barrier():
                self._flush_loads(None)
                self.barrier(op)
            case Yield():
                pass  # its owner reads it
            case _ if op.effect is Effect.PURE and len(op.results) == 1:
                self.pending[op.result] = op
            case _:
                raise LoweringError(f"no C for {op.keyword}")

    def barrier(self, op: Barrier) -> None:
        raise LoweringError("this target has no barriers")

    def transfer(self, op: Transfer) -> None:
        """A copy of a box as a nest of loops, element by element."""
        if op.group:
            raise LoweringError(f"this target has no {op.mover}")
        for n, extent in enumerate(op.box):
            e = element(n)
            self.line("  " * n + f"for (long {e} = 0; {e} < {extent}; {e}++)")
        self.line("  " * len(op.box) + self.moved(op))

    def moved(self, op: Transfer) -> str:
        """The statement that copies one element of a box."""
        to = self._pointer(op.dst, *self.box_offset(op.dst, op.dst_at, op.box), {})
        start = self._pointer(op.src, *self.box_offset(op.src, op.src_at, op.box), {})
        cond = " && ".join(self.inside(op))
        if isinstance(op.dst.type, TensorType):
            return (f"if ({cond}) " if cond else "") + f"*({to}) = *({start});"
        fill = self.p.constant(op.fill, dtype_of(op.dst.type))
        return f"*({to}) = " + (f"{cond} ? *({start}) : {fill};" if cond else f"*({start});")

    def inside(self, op: Transfer) -> list[str]:
        """Conditions that an element of a box is among the valid ones."""
        return [f"{element(n)} < {self.c(v)}" for n, (v, size) in
                enumerate(zip(op.valid, op.box, strict=True))
                if v.const_value is None or v.const_value < size]

    def box_offset(self, buf: Value, at: Sequence[Expr | Value], box: Sequence[int]
                   ) -> tuple[Expr, list[tuple[Value, Expr]]]:
        """Offset of one element of a box, as `_offset` gives it."""
        total, values = self._offset(buf, at, {})
        lead = len(at) - len(box)
        for n, (size, stride) in enumerate(zip(box, strides_of(buf.type)[lead:], strict=True)):
            total = total + (sym(element(n)) * stride if size > 1 else 0)
        return total, values

    def _flush_loads(self, buf: Value | None) -> None:
        """Write loads (of one buffer) that must not move past what follows."""
        for value in self._readers(None if buf is None else {buf}):
            self._force(value)

    def _readers(self, buffers: Collection[Value | None] | None) -> dict[Value, None]:
        """What is pending and reads one of these buffers, or any if there are none, in order."""
        found = dict[Value, None]()
        for value, op in self.pending.items():
            if (buffers is None or op.buf in buffers) if isinstance(op, Load) else any(
                    v in found for v in op.operands()):
                found[value] = None
        return found

    def _flush_for(self, op: Op) -> None:
        """Write what a loop or branch reads, and loads of buffers that it writes."""
        inside = {v for block in op.blocks() for o in walk(block) for v in o.operands()}
        written = {op_writes(o) for block in op.blocks() for o in walk(block)} - {None}
        reads = self._readers(written)
        for value, made in list(self.pending.items()):
            if not isinstance(made, Const) and (value in inside or value in reads):
                self._force(value)

    def _force(self, value: Value) -> None:
        for point in points(value):
            self.get(value, point, name=True)

    # ---- values
    def get(self, value: Value, point: Mapping[str, int], name: bool = False) -> str:
        """The C text of a value at a point: a variable, or its expression if used just once."""
        t = value.type
        assert isinstance(t, VecType), value
        at = tuple((n, point[n]) for n, _ in t.unroll)
        if (value, at) not in self.text:
            op = self.pending[value]
            self.lines.enter([value])
            text = self._expression(op, dict(at))
            if not name and self._inline(value, op):
                self.lines.leave(joins=True)
                return text
            self.text[value, at] = label(value, at, self.names)
            self.line(f"const {self.p.type(t.dtype, t.lanes)} {self.text[value, at]} = {text};")
            self.lines.leave()
        return self.text[value, at]

    def _inline(self, value: Value, op: Op) -> bool:
        if isinstance(op, Const | Fill):
            return True
        readers = self.users.get(value, [])
        if len(readers) != 1:
            return False
        t, wide = value.type, readers[0]
        assert isinstance(t, VecType)
        if t.lanes > 1 and value in getattr(wide, "subs", ()):
            return False  # each lane's address reads it
        around = getattr(wide.results[0].type, "unroll", ()) if wide.results else getattr(
            wide, "unroll", ())
        return not isinstance(wide, Combine) and set(around) == set(t.unroll) and not isinstance(
            wide, Yield)

    def _expression(self, op: Op, point: dict[str, int]) -> str:
        t = op.result.type
        assert isinstance(t, VecType)
        match op:
            case Map("ge", (x, y)) if t.lanes > 1 and (sign := self._sign(x, y, point)):
                return sign
            case Map("where", (test, yes, no)) if (holds := self._known(test, point)) is not None:
                taken = yes if holds else no
                text = self.get(taken, point)
                return self.p.splat(t.dtype, t.lanes, text) if _lanes(taken) < t.lanes else text
            case Map():
                args = [self.get(a, point) for a in op.args]
                scalars = [n for n, a in enumerate(op.args) if t.lanes > 1 and _lanes(a) == 1]
                return self.p.call(op.fn, dtype_of(op.args[-1].type), t.lanes, args, scalars)
            case Const():
                return self.p.constant(op.value, op.dtype)
            case Fill():
                return self.p.constant(op.value, t.dtype, t.lanes)
            case Cast() if t.lanes > 1 and t.dtype is I32 and op.x in self.pending and isinstance(
                    made := self.pending[op.x], KernelIndex):
                return self._index(made.expr.subs(point), t.lanes, I32)
            case Cast():
                return self.p.cast(dtype_of(op.x.type), op.dtype, t.lanes, self.get(op.x, point))
            case KernelIndex():
                return self._index(op.expr.subs(point), t.lanes)
            case Load():
                return self._load(op, point, t)
            case Combine():
                return self._combine(op, point)
            case _:
                raise LoweringError(f"no C for {op.keyword}")

    def _combine(self, op: Combine, point: dict[str, int]) -> str:
        t = op.x.type
        assert isinstance(t, VecType)
        if op.axis == LANE:
            return self.p.reduce(op.monoid, t.dtype, t.lanes, self.get(op.x, point))
        count = dict(t.unroll)[op.axis]
        parts = [self.get(op.x, {**point, op.axis: n}) for n in range(count)]
        fn = MONOIDS[op.monoid].combine
        while len(parts) > 1:  # a tree, so that the additions do not wait for each other
            pairs = [parts[n: n + 2] for n in range(0, len(parts), 2)]
            parts = [self.p.call(fn, t.dtype, t.lanes, p) if len(p) == 2 else p[0]
                     for p in pairs]
        return parts[0]

    def _index(self, expr: Expr, lanes: int, dtype: DType = I64) -> str:
        run = expr.coefficient(LANE)
        if lanes == 1:
            return self.c(expr)
        if run is None:
            places = [self.c(expr.subs({LANE: n})) for n in range(lanes)]
            return self.p.gather(dtype, lanes, places)
        return self.p.ramp(dtype, lanes, self.c(expr.without(LANE)), self.c(run))

    def _place(self, at: Value, zero: Value, point: Mapping[str, int]) -> Expr | None:
        """The position that is asked to be >= 0, if that is what is asked."""
        made, other = self.pending.get(at), self.pending.get(zero)
        asked = isinstance(made, KernelIndex) and isinstance(other, Const) and other.value == 0
        return made.expr.subs(point) if asked and isinstance(made, KernelIndex) else None

    def _sign(self, at: Value, zero: Value, point: Mapping[str, int]) -> str:
        """Whether positions in lanes are >= 0; "" where something else is asked."""
        place = self._place(at, zero, point)
        run = place.coefficient(LANE) if place is not None else None
        if place is None or run is None or not run.const_value:
            return ""
        return self.p.signs(_lanes(at), self.c(place.without(LANE)), run.const_value)

    def _known(self, test: Value, point: Mapping[str, int]) -> bool | None:
        """What a test of positions gives in all lanes, where that is known."""
        match self.pending.get(test):
            case Map("ge", (at, zero)) if (place := self._place(at, zero, point)) is not None:
                return settled(place, _lanes(at))
        return None

    def c(self, expr: Expr) -> str:
        """An index expression in C."""
        return to_source(expr, lambda name: name)

    # ---- memory
    def _offset(self, buf: Value, subs: Sequence[Expr | Value], point: Mapping[str, int]
                ) -> tuple[Expr, list[tuple[Value, Expr]]]:
        """Linear offset in elements: an expression, and data-dependent subscripts with strides."""
        total, values = Expr.of(0), []
        for sub, stride in zip(subs, strides_of(buf.type), strict=True):
            if isinstance(sub, Value):
                values.append((sub, stride))
            else:
                total = total + sub.subs(point) * stride
        return total, values

    def _pointer(self, buf: Value, offset: Expr, values: list[tuple[Value, Expr]],
                 point: Mapping[str, int], lane: int = 0) -> str:
        text = self.c(offset)
        for value, stride in values:
            at = self.get(value, point)
            if _lanes(value) > 1:
                at = self.p.lane(at, lane)
            text += f" + (long)({at}) * ({self.c(stride)})"
        return f"&{label(buf, (), self.names)}[{text}]"

    def _load(self, op: Load, point: Mapping[str, int], t: VecType) -> str:
        fill = self.p.constant(op.fill, t.dtype, t.lanes)
        mask = still_open([e.subs(point) for e in op.mask], t.lanes)
        if mask is None:
            return fill
        scalar, lanes = self._tests(mask[0]), mask[1]
        offset, values = self._offset(op.buf, op.subs, point)
        run = offset.coefficient(LANE)
        simple = all(_lanes(v) == 1 for v, _ in values)
        if t.lanes == 1:
            text = self.p.load(t.dtype, 1, self._pointer(op.buf, offset, values, point))
        elif run is not None and run.is_const(1) and simple and (cut := ends(lanes, self.p)):
            pointer = self._pointer(op.buf, offset.without(LANE), values, point)
            text = self._vector_load(op, t, pointer, cut, fill)
        else:
            text = self._gather(op, t, offset, values, point, lanes)
        return f"({scalar} ? {text} : {fill})" if scalar else text

    def _vector_load(self, op: Load, t: VecType, pointer: str, cut: Ends, fill: str) -> str:
        if not any(cut):
            return self.p.load(t.dtype, t.lanes, pointer)
        text = self.p.load_part(t.dtype, t.lanes, pointer, *cut)
        if op.fill == 0:
            return text
        return self.p.call("where", t.dtype, t.lanes, [self.p.span(t.lanes, *cut), text, fill])

    def _gather(self, op: Load, t: VecType, offset: Expr, values: list[tuple[Value, Expr]],
                point: Mapping[str, int], lanes: list[Expr]) -> str:
        parts = []
        for n in range(t.lanes):
            at = self._pointer(op.buf, offset.subs({LANE: n}), values, point, n)
            part = self.p.load(t.dtype, 1, at)
            conds = self._tests([e.subs({LANE: n}) for e in lanes])
            fill = self.p.constant(op.fill, t.dtype)
            parts.append(f"({conds} ? {part} : {fill})" if conds else part)
        return self.p.gather(t.dtype, t.lanes, parts)

    def _tests(self, mask: Sequence[Expr]) -> str:
        return " && ".join(f"{self.c(e)} >= 0" for e in mask)

    def _store(self, op: Store) -> None:
        t = op.family
        for point in spread(dict.fromkeys(t.unroll)):
            mask = still_open([e.subs(point) for e in op.mask], t.lanes)
            if mask is None:
                continue
            value, scalar = self.get(op.value, point), self._tests(mask[0])
            if t.lanes > 1 and _lanes(op.value) == 1:
                value = self.p.splat(t.dtype, t.lanes, value)
            offset, values = self._offset(op.buf, op.subs, point)
            text = self._store_text(op, t, offset, values, point, value, mask[1])
            self.line(f"if ({scalar}) {{ {text} }}" if scalar else text)

    def _store_text(self, op: Store, t: VecType, offset: Expr,
                    values: list[tuple[Value, Expr]], point: Mapping[str, int], value: str,
                    lanes: list[Expr]) -> str:
        if op.combine:
            raise LoweringError(f"this target has no atomic {op.combine}")
        run = offset.coefficient(LANE)
        if t.lanes == 1:
            return self.p.store(t.dtype, 1, self._pointer(op.buf, offset, values, point), value)
        simple = all(_lanes(v) == 1 for v, _ in values)
        if run is not None and run.is_const(1) and simple and (cut := ends(lanes, self.p)):
            pointer = self._pointer(op.buf, offset.without(LANE), values, point)
            if not any(cut):
                return self.p.store(t.dtype, t.lanes, pointer, value)
            return self.p.store_part(t.dtype, t.lanes, pointer, value, *cut)
        parts = [f"const {self.p.type(t.dtype, t.lanes)} v_ = {value};"]
        for n in range(t.lanes):
            at = self._pointer(op.buf, offset.subs({LANE: n}), values, point, n)
            conds = self._tests([e.subs({LANE: n}) for e in lanes])
            text = self.p.store(t.dtype, 1, at, self.p.lane("v_", n, t.dtype))
            parts.append(f"if ({conds}) {text}" if conds else text)
        return "{ " + " ".join(parts) + " }"

    def _alloc(self, op: Alloc) -> None:
        (t,) = op.types
        assert isinstance(t, ArrayType)
        self.line(self.array(op.result.name, t))

    def array(self, name: str, t: ArrayType) -> str:
        """The declaration of an array; large ones do not go on the stack."""
        size = 1
        for extent in t.shape:
            size *= extent
        element, aligned = self.p.storage(t.dtype), "__attribute__((aligned(64)))"
        if t.bytes <= 1 << 14:
            return f"{element} {name}[{size}] {aligned};"
        # The pointer is this thread's, so a parallel loop inside shares what this thread keeps.
        return (f"static __thread {element} {name}_kept[{size}] {aligned}; "
                f"{element} *const {name} = {name}_kept;")

    # ---- control
    def _for(self, op: For) -> None:
        for result, init, arg in zip(op.results, op.inits, op.body.args, strict=True):
            self._variables(result, init)
            for point in points(result):
                self.text[arg, tuple(point.items())] = self._at(result, point)
        end = self.c(op.hi)
        if op.cap is not None:
            cap = self.c(op.cap)
            end = f"({end} < {cap} ? {end} : {cap})"
        self.open_loop(op, end)
        self.depth += 1
        self._body(op.body, op.results)
        self.depth -= 1
        self.close_loop(op)

    def open_loop(self, op: For, end: str) -> None:
        self.line(f"for (long {op.var} = 0; {op.var} < {end}; {op.var}++) {{")

    def close_loop(self, op: For) -> None:
        self.line("}")

    def _variables(self, result: Value, init: Value | None) -> None:
        """Mutable variables for a carried value, named after the result."""
        t = result.type
        assert isinstance(t, VecType)
        for point in points(result):
            start = f" = {self.get(init, point)}" if init is not None else ""
            if init is not None and _lanes(init) == 1 < t.lanes:
                start = f" = {self.p.splat(t.dtype, t.lanes, self.get(init, point))}"
            name = label(result, tuple(point.items()), self.names)
            self.line(f"{self.p.type(t.dtype, t.lanes)} {name}{start};")
            self.text[result, tuple(point.items())] = name

    def _at(self, value: Value, point: Mapping[str, int]) -> str:
        return self.text[value, tuple(point.items())]

    def _body(self, block: Block, results: Sequence[Value]) -> None:
        outer = self.pending
        self.pending = {v: op for v, op in outer.items() if isinstance(op, Const)}
        for op in block.ops:
            self.lines.enter(computed(op))
            self.statement(op)
            self.lines.leave()
        if results:
            self._yield(block.last.operands(), results)
        self.pending = outer

    def _yield(self, values: Sequence[Value], results: Sequence[Value]) -> None:
        """Assign the carried variables; all new values are computed before the first changes."""
        new = []
        for v, r in zip(values, results, strict=True):
            for p in points(r):
                self.lines.enter([v])
                new.append((self._at(r, p), self.get(v, p), self.lines.leave()))
        for name, text, made in new:
            if name != text:
                self.lines.add("  " * self.depth + f"{name} = {text};", made)

    def _if(self, op: If) -> None:
        for result in op.results:
            self._variables(result, None)
        cond = " && ".join(f"{self.c(e)} >= 0" for e in op.cond)
        self.line(f"if ({cond}) {{")
        for n, block in enumerate((op.then, op.orelse)):
            if n and not block.ops:
                break
            if n:
                self.line("} else {")
            self.depth += 1
            self._body(block, op.results)
            self.depth -= 1
        self.line("}")


def dealt(source: str, start: str, count: int) -> list[str]:
    """A source of functions, each of which begins with `start`, as so many of about equal length,
    all with what comes before the first."""
    prelude, *bodies = source.split(start)
    bodies.sort(key=len, reverse=True)
    return [start.join([prelude, *bodies[n::count]]) for n in range(count)]


def element(n: int) -> str:
    """The variable that counts dimension n of a box."""
    return f"n{n}_"


def op_writes(op: Op) -> Value | None:
    """The memory that an op writes."""
    return op.buf if isinstance(op, Store) else op.dst if isinstance(op, Transfer) else None


def _lanes(value: Value) -> int:
    if value.type == INDEX:
        return 1
    assert isinstance(value.type, VecType)
    return value.type.lanes
