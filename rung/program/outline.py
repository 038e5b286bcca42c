"""Repeated layers as one program that is applied several times, before they are lowered.

    ... 12 x the same 90 calls ...    ->    x1, k1 = apply layer(x, w0, cache0)
                                            x2, k2 = apply layer(x1, w1, cache1) ...

The period is found from each op's class, attributes and result types, without operands. Cuts are
where only the residual stream crosses: values with several readers in the next layer, which fusion
would store anyway. So kernels equal those of the whole program, except that the first layer does
not fuse with the embedding, which would make it differ from the others. Passes up to
`inline_applies`, after fusion, see one layer only. Near linear in the number of ops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from rung.core import origins, trace
from rung.core.op import Effect, Func, Names, Op, Value, attributes, names_of
from rung.core.ops import Const
from rung.core.rewrite import substitute
from rung.program.ir import Apply, KernelCall, Module, Return

LEAST = 8  # ops in a layer that is worth a program of its own
TRIES = 8  # candidate periods that are looked at closely


@dataclass(frozen=True)
class Repetition:
    """`count` equal segments of `period` ops, the first at `start`."""

    start: int
    period: int
    count: int

    def segment(self, n: int) -> range:
        first = self.start + n * self.period
        return range(first, first + self.period)


def outline(program: Func) -> Module:
    """The program with each run of equal layers as applications of one program."""
    main, layers = program, list[Func]()
    for _ in range(4):
        reads = _reads(main.body.ops)
        run = _find(reads)
        if run is None:
            break
        main, layer = _outlined(main, reads, run, f"layer{len(layers)}")
        layers.append(layer)
    return Module((main, *layers))


def inline_applies(module: Module) -> Module:
    """The main program with every `apply` replaced by the applied program's ops."""
    table = {p.name: p for p in module.programs}
    main = module.main
    names = names_of(main)
    ops: list[Op] = []
    same: dict[Value, Value] = {}
    for old in main.body.ops:
        (op,) = substitute([old], same)
        if isinstance(op, Apply):
            _follow(op, table[op.callee], module)
            ops += _inlined(op, table[op.callee], names, same)
        else:
            ops.append(op)
    return Module((main.with_ops(ops),), module.kernels)


def _follow(call: Apply, layer: Func, module: Module) -> None:
    """The values in a layer's kernels are those of this copy too."""
    for op in layer.body.ops if origins.following() else ():
        if isinstance(op, KernelCall):
            inner = [r for x in module.kernel(op.callee).body.ops for r in x.results]
            origins.derive_copy(inner, inner, call.results)


def _inlined(call: Apply, layer: Func, names: Names, same: dict[Value, Value]) -> Iterator[Op]:
    """The layer's ops; `same` collects results that are its arguments, or given twice."""
    values = dict(zip(layer.params, call.args, strict=True))
    for inner, outer in zip(layer.body.last.operands(), call.results, strict=True):
        if values.setdefault(inner, outer) is not outer:
            same[outer] = values[inner]
    for old in layer.body.ops[:-1]:
        (op,) = substitute([old], values)
        results = tuple(values.get(r) or Value(names(r.name), r.type) for r in old.results)
        values.update(zip(old.results, results, strict=True))
        origins.derive_copy(results, old.results, call.results)
        yield replace(op, results=results)


# --- the search

@dataclass(frozen=True)
class _Reads:
    """The defining op and the readers of each value, by number."""

    ops: Sequence[Op]
    maker: dict[Value, int]
    readers: dict[Value, list[int]]

    def inputs(self, segment: range) -> list[Value]:
        """What a segment reads from outside, constants apart, in order of first use."""
        read = (v for n in segment for v in self.ops[n].operands())
        return list(dict.fromkeys(v for v in read if self.maker.get(v, -1) not in segment
                                  and not (v in self.maker and self.is_constant(v))))

    def is_constant(self, v: Value) -> bool:
        return isinstance(self.ops[self.maker[v]], Const)

    def outputs(self, segment: range) -> list[Value]:
        """What others read of a segment's results, in order."""
        return [r for n in segment for r in self.ops[n].results
                if any(at not in segment for at in self.readers.get(r, ()))]

    def crossing(self, segment: range) -> list[Value]:
        """What the next segment reads of this one's results."""
        after = range(segment.stop, segment.stop + len(segment))
        return [r for n in segment for r in self.ops[n].results
                if any(at in after for at in self.readers.get(r, ()))]


def _reads(ops: Sequence[Op]) -> _Reads:
    readers: dict[Value, list[int]] = {}
    for n, op in enumerate(ops):
        for v in op.operands():
            readers.setdefault(v, []).append(n)
    return _Reads(ops, {r: n for n, op in enumerate(ops) for r in op.results}, readers)


def _find(reads: _Reads) -> Repetition | None:
    """The repetition of most ops, cut so that fusion is unchanged."""
    marks = _marks(reads.ops)
    best: Repetition | None = None
    for period in _periods(marks):
        for start, length in _stretches(marks, period):
            run = _cut(reads, start, length + period, period)
            if run and (best is None or run.count * run.period > best.count * best.period):
                best = run
    return best


def _marks(ops: Sequence[Op]) -> list[int]:
    """A number for each op, equal for ops that differ in operands only; each effect has its own,
    except random draws, which keep their order."""
    table: dict[Hashable, int] = {}
    marks = []
    for n, op in enumerate(ops):
        key: Hashable = (type(op), tuple(_shape(x) for _, x in attributes(op)),
                         tuple(r.type for r in op.results))
        if op.effect not in (Effect.PURE, Effect.RNG) or isinstance(op, Apply):
            key = n
        marks.append(table.setdefault(key, len(table)))
    return marks


def _shape(x: object) -> Hashable:
    if isinstance(x, Value):
        return Value
    if isinstance(x, tuple):
        return tuple(_shape(y) for y in x)
    return repr(x) if not isinstance(x, Hashable) or isinstance(x, int | float) else x


def _periods(marks: Sequence[int]) -> list[int]:
    """The commonest distances between an op and the next of its kind, weighted by length."""
    last: dict[int, int] = {}
    gaps: Counter[int] = Counter()
    for n, mark in enumerate(marks):
        if mark in last and n - last[mark] >= LEAST:
            gaps[n - last[mark]] += 1
        last[mark] = n
    return sorted(gaps, key=lambda g: (-gaps[g], g))[:TRIES]


def _stretches(marks: Sequence[int], period: int) -> Iterator[tuple[int, int]]:
    """(start, length) of the ranges in which every op equals the one a period later."""
    start = None
    for n in range(len(marks) - period + 1):
        same = n + period < len(marks) and marks[n] == marks[n + period]
        if same and start is None:
            start = n
        if not same and start is not None:
            if n - start >= period:
                yield start, n - start
            start = None


def _cut(reads: _Reads, start: int, length: int, period: int) -> Repetition | None:
    """The best borders of segments in a range; None where all change fusion."""
    found: list[tuple[int, int]] = []
    for shift in range(min(period, length - 2 * period + 1)):
        border = start + shift + period
        crossing = reads.crossing(range(border - period, border))
        shared = all(len(reads.readers[v]) > 1 for v in crossing)
        if shared and crossing and reads.maker[crossing[-1]] == border - 1:
            found.append((len(crossing), shift))
    for _, shift in sorted(found):
        run = _same_flow(reads, Repetition(start + shift, period, (length - shift) // period))
        if run is not None:
            return run
    trace.emit("declined", "outline", f"period {period}", "no border leaves fusion unchanged")
    return None


def _same_flow(reads: _Reads, run: Repetition) -> Repetition | None:
    """The longest part of `run` whose segments have equal data flow."""
    first = 0
    if run.count > 2 and any(v in reads.maker and len(reads.readers[v]) == 1
                             for v in reads.inputs(run.segment(0))):
        first = 1  # what comes before fuses into the first layer
    flow = _flow(reads, run.segment(first))
    end = first + 1
    while end < run.count and _flow(reads, run.segment(end)) == flow:
        end += 1
    if end - first < 2:
        return None
    return Repetition(run.start + first * run.period, run.period, end - first)


def _flow(reads: _Reads, segment: range) -> Hashable:
    """The data flow of a segment: inside, from outside, and to the outside."""
    ops = reads.ops
    outside = {v: n for n, v in enumerate(reads.inputs(segment))}

    def place(v: Value) -> Hashable:
        if v in outside:
            return outside[v], v.type
        at = reads.maker[v]
        return (at - segment.start, ops[at].results.index(v)) if at in segment else v

    inside = tuple(tuple(place(v) for v in ops[n].operands()) for n in segment)
    return inside, tuple(place(v) for v in reads.outputs(segment))


# --- the rewrite

def _outlined(main: Func, reads: _Reads, run: Repetition, name: str) -> tuple[Func, Func]:
    ops, maker = reads.ops, reads.maker
    first = run.segment(0)
    given, given_back = reads.inputs(first), reads.outputs(first)
    params = {v: Value(v.name, v.type) for v in given}
    read = {v for n in first for v in ops[n].operands()}
    constants = [ops[maker[v]] for v in read if v in maker and maker[v] not in first
                 and isinstance(ops[maker[v]], Const)]
    body = [*constants, *substitute([ops[n] for n in first], params)]
    layer = Func("program", name, tuple(params.values()), (),
                 replace(main.body, ops=(*body, Return(tuple(given_back)))))
    calls, impure = [], "rng" if any(op.effect is Effect.RNG for op in body) else ""
    made: dict[Value, Value] = {}  # the program's own values keep their origins
    for n in range(run.count):
        segment = run.segment(n)
        args = tuple(made.get(v, v) for v in reads.inputs(segment))
        old = reads.outputs(segment)
        outs = tuple(map(replace, old))
        made |= zip(old, outs, strict=True)
        calls.append(Apply(name, args, tuple(v.type for v in outs), impure, results=outs))
        origins.note_copy(outs, {a: b for one, two in zip(first, segment, strict=True)
                                 for x, y in zip(ops[one].results, ops[two].results, strict=True)
                                 for a, b in zip(origins.of(x), origins.of(y), strict=False)})
    end = run.segment(run.count - 1).stop
    trace.emit("fired", "outline", name, f"{run.count} layers of {run.period} ops")
    rest = substitute(ops[end:], made)
    return main.with_ops([*ops[:run.start], *calls, *rest]), layer
