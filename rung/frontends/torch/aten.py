"""Calls of ATen overloads to Tensor IR, by a table of one entry per overload.

    add = call aten.add.Tensor(x, bias) : f32[4,8]         # before
    t = index bias [i,j] of [4,8] -> [j] : f32[4,8]        # after
    add = x + t : f32[4,8]

An entry counts only if this torch has exactly its schema. A call that has no entry, or whose types
or arguments an entry declines, stays. Values of Tensor IR have no strides: what stays, and what is
returned, reads values in the layout that torch gave them, restored by view calls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rung.core import origins, trace
from rung.core.errors import Unsupported, VerifyError
from rung.core.expr import ZERO, may_be_negative
from rung.core.op import Block, Builder, Func, Op, Value, made_by, names_of, uses, walk
from rung.core.ops import Map, Yield
from rung.core.origins import Origin
from rung.core.rewrite import dead_code
from rung.core.scalar import SCALARS
from rung.core.types import DTYPES, F32, F64, FLOAT, TensorType, Type, dtype_of, shape_of
from rung.frontends.torch.activations import ACTIVATIONS
from rung.frontends.torch.attention import ATTENTION
from rung.frontends.torch.calls import bind, is_number, memory_of, numbers, refused, schema_of
from rung.frontends.torch.emit import Emit
from rung.frontends.torch.functions import FUNCTIONS
from rung.frontends.torch.indexing import INDEXING
from rung.frontends.torch.norms import NORMS
from rung.frontends.torch.pointwise import POINTWISE
from rung.frontends.torch.reductions import COMPOSITES, REDUCTIONS
from rung.frontends.torch.types import order_of
from rung.frontends.torch.views import MOVES, VIEWS
from rung.program.ir import Apply, Call, Check, Composite, Return, Write, is_view
from rung.program.storage import VIEW, Aliases
from rung.tensor.ir import Contract, Item, Reduce, Scan


@dataclass(frozen=True)
class Entry:
    """How an overload lowers: `build` takes an `Emit` and the arguments in the schema's order.

    With `composite` the ops become the body of a `composite`, which a library call may replace.
    """

    schema: str
    build: Callable[..., Value | tuple[Value, ...]]
    composite: bool = False


ELEMENTWISE = {*POINTWISE, *FUNCTIONS, *ACTIVATIONS}
FILLED = ("aten.full.default", "aten.full_like.default", "aten.scalar_tensor.default")
"""What takes a float that is not known when it is lowered."""


CONTRACTED = ("aten.tanh_backward.default",)
"""What eager computes with a fused multiply-add."""


def target_of(schema: str) -> str:
    """`aten::relu(Tensor self) -> Tensor` is the schema of `aten.relu.default`."""
    name = schema.partition("(")[0].replace("::", ".")
    return name if name.count(".") == 2 else f"{name}.default"


TABLE: dict[str, Entry] = {
    target_of(schema): Entry(schema, build, entries in (COMPOSITES, NORMS, ATTENTION))
    for entries in (POINTWISE, FUNCTIONS, ACTIVATIONS, VIEWS, MOVES, REDUCTIONS, COMPOSITES, NORMS,
                    ATTENTION, INDEXING)
    for schema, build in entries.items()}


def centres(ops: Sequence[Op]) -> Iterator[Value]:
    """Means of whole tensors that are subtracted from these: where all is far from zero, what is
    left is the order in which eager adds, as in the gradient of a variance."""
    found = {op.result: op.args[0][1] for op in ops if isinstance(op, Call)
             and op.target == "aten.mean.default"}
    for op in ops:
        if isinstance(op, Call) and op.target == "aten.sub.Tensor":
            (_, x), (_, y) = op.args[:2]
            if isinstance(y, Value) and x is found.get(y):
                yield y


def lower(func: Func, precision: str = "default", keep: Collection[str] = (),
          gpu: bool = False) -> Func:
    """`func` with every call that has an entry, and is not in `keep`, as Tensor IR; under the
    precision "eager" those alone whose results have eager's bits. `gpu`: as `Emit` has it."""
    return dead_code(_Lowering(func, keep, precision == "eager", gpu).run())


class _Lowering:
    """State of one run: `new` gives what became of a value, which `results` bring into the layout
    and the memory that torch gave it."""

    def __init__(self, func: Func, keep: Collection[str], bits: bool, gpu: bool):
        self.func, self.keep, self.bits, self.gpu = func, keep, bits, gpu
        self.builder = Builder(names_of(func))
        self.new: dict[Value, Value] = {}
        self.scalars: dict[Value, Value] = {}
        self.centres = set(centres(func.body.ops))
        self.results = _Results(func, _Layouts(func, self.builder, self.new))

    def run(self) -> Func:
        ops = self.func.body.ops
        for n, op in enumerate(ops):
            if isinstance(op, Call) and self.lowered(op):
                continue
            if isinstance(op, Call | Apply):
                op = op.map({v: self.operand(op, v) for v in op.operands()})
                self.results.layouts.append(op, op.results)
                continue
            if isinstance(op, Write):
                self.results.layouts.save(op.dst, n)
            self.builder.ops.append(self.results.leave(op) if isinstance(op, Return)
                                    else op.map(self.new))
        return self.func.with_ops(self.builder.ops)

    # ---- one call
    def lowered(self, call: Call) -> bool:
        """Whether `call` could be replaced; the reason against it goes to the trace."""
        inner = self.builder.inner()
        try:
            entry = self.entry(call)
            values = self.build(entry, call, inner)
            if self.bits and (entry.schema in NORMS or call.target in CONTRACTED
                              or not has_bits(inner.ops)):
                raise Unsupported("its rounding is not eager's")
        except (Unsupported, VerifyError) as error:
            trace.emit("declined", "lower", call.target, str(error))
            return False
        trace.emit("fired", "lower", call.target)
        for old in call.results if not origins.of_all(call.results) else ():
            place = len(self.builder.ops)
            origins.record(old, [Origin(old.name, call.target, place=place)])  # of a text
        made = {v for op in inner.ops for v in op.results}
        names = {v: replace(v, name=old.name) for old, v in
                 zip(call.results, values, strict=True) if v in made}
        for op in _named(inner.ops, names):
            if isinstance(op, Check):
                op = replace(op, node=call.results[0].name)
            self.builder.ops.append(op)
            for part in walk(Block((), (op,))):
                origins.derive_parts(part.results, call.results)
        origins.derive((names[v] for v in values[:1] if v in names), call.results)
        unread = self.unread(call, inner.ops) if origins.following() else ()
        for old, v in zip(call.results, values, strict=True):
            self.new[old] = names.get(v, v)
            origins.absorb(self.new[old], old, *unread)
            self.results.layouts.note(old, self.new[old])
        return True

    def unread(self, call: Call, ops: Sequence[Op]) -> Iterable[Value]:
        """The operands of a call whose meaning does not read them, and what they alone read."""
        read, found = {v for op in ops for v in op.operands()}, dict[Value, None]()
        made, readers = self.known
        todo = [v for v in call.operands() if self.new.get(v, v) not in read]
        while todo:
            found[v := todo.pop()] = None
            if v in made and len({*readers[v]}) == 1:
                todo += [x for x in made[v].operands() if x not in found]
        return found

    @cached_property
    def known(self) -> tuple[Mapping[Value, Op], Mapping[Value, Sequence[Op]]]:
        """What makes each value, and what reads it."""
        return made_by(self.func), uses(self.func.body)

    def entry(self, call: Call) -> Entry:
        entry = TABLE.get(call.target)
        if entry is None or call.target in self.keep:
            raise Unsupported("kept" if entry else "no entry")
        if schema_of(call.target) != entry.schema:
            raise Unsupported(f"the schema of this torch is {schema_of(call.target)}")
        if not self.centres.isdisjoint(call.results):
            raise Unsupported("a mean whose last bit shows in what it is subtracted from")
        for kind in (*call.types, *(v.type for v in call.operands())):
            if kind != FLOAT and (
                    not isinstance(kind, TensorType) or kind.dtype not in DTYPES.values()):
                raise Unsupported(f"a value of type {kind}")
            if isinstance(kind, TensorType) and kind.device:
                raise Unsupported(f"a tensor on {kind.device}")
            if entry.schema in INDEXING and ZERO in shape_of(kind):
                raise Unsupported("eager has other checks where there are no elements")
        first = next((a for _, a in call.args), None)
        if entry.schema.partition("(")[2].startswith(("Tensor ", "Tensor(")) and is_number(
                first):
            raise Unsupported("a number in place of a tensor")
        for x, index in numbers(call):
            if isinstance(x, Value):
                if index or not (entry.schema in ELEMENTWISE or call.target in FILLED):
                    raise Unsupported("a float that is not known")
            elif index and may_be_negative(x):
                raise Unsupported("an index that may be negative")
        if entry.schema in ELEMENTWISE and (why := refused(call)):
            raise Unsupported(why)
        if not is_view(call) and any(order_of(t) is None for t in call.types):
            raise Unsupported("a result with gaps in memory")
        return entry

    def build(self, entry: Entry, call: Call, inner: Builder) -> tuple[Value, ...]:
        """The results of `call`, from ops appended to `inner`."""
        types = tuple(map(plain, call.types))
        moved = call.map(self.new | {
            v: self.scalar(v) for v in call.operands() if is_number(v)})
        body = inner.inner() if entry.composite else inner
        out = entry.build(Emit(body, types, self.gpu), *bind(moved))
        values = out if isinstance(out, tuple) else (out,)
        for op in body.ops:
            op.check()
        found = tuple(plain(v.type) for v in values)
        if found != types:
            raise Unsupported(f"gives {', '.join(map(str, found))}")
        if not body.ops or not entry.composite:
            return values
        body.add(Yield(values))
        return inner.add(Composite(call.target, moved.args, body.block(), types), "t")

    def scalar(self, number: Value) -> Value:
        """A float that the host computes, as kernels read it: from a tensor."""
        if number not in self.scalars:
            made = Call("aten.scalar_tensor.default", (("", number), ("dtype", F64)),
                        (TensorType(F64, ()),))
            self.scalars[number] = self.builder.one(Item(self.builder.one(made, number.name)))
        return self.scalars[number]

    def operand(self, op: Op, old: Value) -> Value:
        """What a call that stays reads: some find their way in the storage by themselves."""
        storage = isinstance(op, Call) and op.target in STORAGE and old is op.operands()[0]
        return self.results.replayed(old) if storage else self.results.layouts.of(old)


class _Layouts:
    """Values in the layouts of torch: `exact` gives what became of a value with its strides.

    `old` says what are views of what in torch's program, `made` in the new one; `inside` has, for
    the root of a new value, the olds that lie in it.
    """

    def __init__(self, func: Func, builder: Builder, new: dict[Value, Value]):
        self.builder, self.new = builder, new
        self.old, self.made = Aliases(func.body.ops, (VIEW,)), Aliases(hows=(VIEW,))
        self.exact: dict[Value, Value] = {}
        self.in_order: dict[tuple[Value, tuple[int, ...]], Value] = {}
        self.inside = defaultdict[Value, dict[Value, None]](dict)
        self.last: dict[Value, int] = {}  # the last op that reads a value, or a view of it
        for n, op in enumerate(func.body.ops):
            self.last.update((w, n) for v in op.operands() for w in (self.old.root(v), v))

    def note(self, old: Value, value: Value) -> None:
        """Note that `value` became of `old`, where another value or a parameter is under it."""
        root = self.made.root(value)
        if root is not old:
            self.inside[root][old] = None

    def append(self, op: Op, olds: Sequence[Value]) -> None:
        """Append a call whose results became of `olds`."""
        self.builder.ops.append(op)
        self.made.add(op)
        for old, value in zip(olds, op.results, strict=True):
            self.note(old, value)

    def save(self, written: Value, at: int) -> None:
        """Copy what is memory of its own to torch, and `written` here, before op `at` changes it:
        what is still read."""
        for old in tuple(self.inside[written]):
            if self.last.get(old, at) <= at or self.old.root(old) is written:
                continue
            if self.made.root(self.new.get(old, old)) is written:
                self.new[old] = self.call("aten.clone.default", old, self.of(old))
            if old in self.exact and self.made.root(self.exact[old]) is written:
                del self.exact[old]

    def of(self, old: Value) -> Value:
        """What became of `old`, with the strides of its type."""
        value = self.new.get(old, old)
        if value.type == old.type:
            return value
        if old not in self.exact:
            self._restore(old, value)
        return self.exact[old]

    def _restore(self, old: Value, value: Value) -> None:
        if view := self.old.links.get(old):
            again = view.op.map({v: self.of(v) for v in view.op.operands()})
            self.exact |= self.again(again)
            return
        order = order_of(old.type)
        if order is None or not isinstance(old.type, TensorType):
            raise Unsupported(f"layout of {old.type}")
        if old.type.strides is None:
            self.exact[old] = self.call("aten.clone.default", old, value,
                                        memory_format="memory_format:torch.contiguous_format")
            return
        back = tuple(order.index(n) for n in range(len(order)))
        self.exact[old] = self.call("aten.permute.default", old, self.ordered(old, order), back)

    def ordered(self, old: Value, order: Sequence[int]) -> Value:
        """What became of `old`, with its dimensions in this order."""
        key, value = (old, tuple(order)), self.new[old]
        if key not in self.in_order:
            shape = [shape_of(old.type)[n] for n in order]
            self.in_order[key] = value if list(order) == sorted(order) else Emit(
                self.builder, (old.type,)).remap(value, shape, lambda at: [
                    at[order.index(n)] for n in range(len(order))])
        return self.in_order[key]

    def call(self, target: str, old: Value, *args: Any, **named: Any) -> Value:
        """A call that gives `old` anew."""
        given = (*(("", a) for a in args), *named.items())
        call = Call(target, given, (old.type,), memory=memory_of(target), results=(old,))
        return self.again(call)[old]

    def again(self, call: Op) -> dict[Value, Value]:
        """Append a call with results of its own; gives them by those that it had."""
        values = tuple(replace(r, name=self.builder.names(r.name)) for r in call.results)
        self.append(replace(call, results=values), call.results)
        origins.derive(values, call.results)
        return dict(zip(call.results, values, strict=True))


class _Results:
    """Results of the program, which share memory with just what torch lets them share with.

    `homes` gives what became of a value as a result; `owner` the base, in torch's program, of what
    lies in a new value; `shared` counts the results that are views of one base.
    """

    def __init__(self, func: Func, layouts: _Layouts):
        self.params, self.layouts, self.base = func.params, layouts, layouts.old.root
        self.homes: dict[Value, Value] = {}
        self.owner: dict[Value, Value] = {p: p for p in func.params}
        self.shared = Counter(map(self.base, set(func.body.last.operands())))

    def leave(self, op: Return) -> Return:
        """The results; a kernel writes what no other result shares in the order of its memory."""
        found = [self.laid_out(v, t) for v, t in zip(op.values, op.layouts, strict=False)]
        if not found:
            return Return(tuple(map(self.owned, op.values)))
        values, layouts = zip(*found, strict=True)
        relaid = any(v.type != t for v, t in found)
        return Return(tuple(values), tuple(layouts) if relaid else ())

    def laid_out(self, old: Value, kind: Type) -> tuple[Value, Type]:
        """A result, and the type under which it leaves."""
        base, order = self.base(old), order_of(kind) if isinstance(kind, TensorType) else None
        new = self.layouts.new.get(old)
        if (order is not None and new and plain(new.type) == plain(kind)
                and self.shared[base] == 1 and base not in self.params):
            made = self.layouts.ordered(old, order)
            if made.type != kind and self.owns(base, made):
                return made, kind
        made = self.owned(old)
        return made, made.type

    def owns(self, base: Value, made: Value) -> bool:
        """Whether no result has the memory of `made` whose base is another; none will."""
        return self.owner.setdefault(self.layouts.made.root(made), base) is base

    def owned(self, old: Value) -> Value:
        """A result: in its layout, and sharing memory with just what torch lets it share with."""
        base = self.base(old)
        if base is not old and (base in self.params or self.shared[base] > 1):
            return self.replayed(old)
        return self.home(old, base)

    def home(self, old: Value, base: Value) -> Value:
        """`old` in memory that no result has whose base is another."""
        if old not in self.homes:
            exact = self.layouts.of(old)
            if not self.owns(base, exact):
                exact = self.layouts.call("aten.clone.default", old, exact)
            elif base is old and exact in self.layouts.made.links:
                # autograd forbids writes to some views
                exact = self.layouts.call("aten.detach.default", old, exact)
            self.homes[old] = exact
        return self.homes[old]

    def replayed(self, old: Value) -> Value:
        """`old` as torch's own view of its base."""
        view = self.layouts.old.links.get(old)
        if view is None:
            return self.home(old, old)
        if old not in self.homes:
            again = view.op.map({v: self.replayed(v) for v in view.op.operands()})
            self.homes |= self.layouts.again(again)
        return self.homes[old]


STORAGE = ("aten.as_strided.default", "aten.as_strided_copy.default",
           "aten.as_strided_scatter.default")
"""Calls that count from the start of the storage, not of the tensor."""


def has_bits(ops: Iterable[Op]) -> bool:
    """Whether results are the same bits however they are computed: no sums or products of floats,
    whose order matters, and no function that is approximated."""
    return all(_has_bits(op) for top in ops for op in walk(Block((), (top,))))


def _has_bits(op: Op) -> bool:
    match op:
        case Map():
            return not SCALARS[op.fn].approximate
        case Reduce() | Scan():
            return op.monoid not in ("add", "mul") or dtype_of(op.x.type) not in (F32, F64)
        case Contract():
            return dtype_of(op.a.type) not in (F32, F64)
    return True


def plain(kind: Type) -> Type:
    """A tensor type without its strides."""
    return TensorType(kind.dtype, kind.shape) if isinstance(kind, TensorType) else kind


def _named(ops: Sequence[Op], names: dict[Value, Value]) -> list[Op]:
    """`ops` with results, and their readers, renamed."""
    return [replace(op.map(names), results=tuple(names.get(r, r) for r in op.results))
            for op in ops]
