"""C text of instructions whose lanes take groups of narrow elements: words of 32 bits.

A lane of `vdpbf16ps` reads two neighbours along the reduced axis. Where these lie side by side, as
in a panel made for it, a word is loaded as it is; elsewhere words are joined from elements. What is
stored to such a panel is written word by word, and transposed on the way where the groups run along
memory and the lanes across it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from rung.core.expr import Expr
from rung.core.op import Op, Value
from rung.core.text import LANE
from rung.core.types import I32, VecType, dtype_of
from rung.kernel.ir import Apply, Load, Store
from rung.targets.c_family import Prelude
from rung.targets.c_math import HELPERS, Helper
from rung.targets.cpu.atoms import ATOMS
from rung.targets.emit import Emitter
from rung.targets.families import label, points, spread
from rung.targets.masks import still_open

WORD = 4  # bytes that a lane of an instruction takes at once
ROWS = 4  # words of a row that are transposed together
_WIDE = "__builtin_convertvector({}, $u32)"

_JOINS = {
    "word": Helper("const void *p", "int w;\n  __builtin_memcpy(&w, p, sizeof w);\n  return w;",
                   "$i32 w;\n  __builtin_memcpy(&w, p, sizeof w);\n  return w;", result="$i32"),
    "keep": Helper("void *p, $i32 w", "", "__builtin_memcpy(p, &w, sizeof w);", result="void"),
    # a word in all lanes, by a load: else compilers compute with the word before they spread it
    "spread": Helper("const void *p", "", """\
$i32 r;
  __asm__("vpbroadcastd %1, %0" : "=v"(r) : "m"(*(const $i32 *)p));
  return r;""", result="$i32"),
    "join1": Helper("$F a", "int w;\n  __builtin_memcpy(&w, &a, sizeof w);\n  return w;",
                    "return ($i32)a;", result="$i32"),
    "join2": Helper("$F a, $F b", "return (int)((unsigned)a | (unsigned)b << 16);",
                    f"return ($i32)({_WIDE.format('a')} | {_WIDE.format('b')} << 16);",
                    result="$i32"),
    "join4": Helper("$F a, $F b, $F c, $F d",
                    "return (int)((unsigned)a & 255 | ((unsigned)b & 255) << 8\n"
                    "    | ((unsigned)c & 255) << 16 | (unsigned)d << 24);",
                    f"return ($i32)(({_WIDE.format('a')} & 255)\n"
                    f"    | ({_WIDE.format('b')} & 255) << 8 | ({_WIDE.format('c')} & 255) << 16\n"
                    f"    | {_WIDE.format('d')} << 24);", result="$i32"),
    # ROWS words from each of N rows, to vectors of one word of each row; distances in bytes
    "turn": Helper("char *to, long apart, const char *from, long stride", "", """\
for (int w = 0; w < 4; w++)
    for (int r = 0; r < $N; r++)
      __builtin_memcpy(to + w * apart + 4 * r, from + r * stride + 4 * w, 4);""",
                   ((512, 512, "$turned(to, apart, from, stride)"),), result="void"),
    "turned": Helper("char *to, long apart, const char *from, long stride", "", """\
$i32 r[4], lo[2], hi[2];
  for (int q = 0; q < 4; q++)
    for (int b = 0; b < 4; b++)
      __builtin_memcpy((char *)&r[q] + 16 * b, from + (4 * b + q) * stride, 16);
  for (int h = 0; h < 2; h++) {
    $i32 a = r[2 * h], b = r[2 * h + 1];
    lo[h] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    hi[h] = __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15,
                                    31);
  }
  $keep(to, __builtin_shufflevector(lo[0], lo[1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13,
                                    28, 29));
  $keep(to + apart, __builtin_shufflevector(lo[0], lo[1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26,
                                            27, 14, 15, 30, 31));
  $keep(to + 2 * apart, __builtin_shufflevector(hi[0], hi[1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24,
                                                25, 12, 13, 28, 29));
  $keep(to + 3 * apart, __builtin_shufflevector(hi[0], hi[1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11,
                                                26, 27, 14, 15, 30, 31));""", result="void"),
}


class CpuPrelude(Prelude):
    """With the instructions of this CPU and what brings their operands together."""

    helpers: Mapping[str, Helper] = {**HELPERS, **_JOINS, **{
        x.name: Helper("$F c, $i32 a, $i32 b", "", f"{x.text}\n  return c;")
        for x in ATOMS.values()}, **{
        f"{x.name}_excess": Helper("$F c, $i32 b", "", f"{x.excess}\n  return c;")
        for x in ATOMS.values() if x.excess}}


class GroupEmitter(Emitter):
    """Emits `apply` and stores to panels of groups."""

    def statement(self, op: Op) -> None:
        if isinstance(op, Apply):
            self._apply(op)
        else:
            super().statement(op)

    def _apply(self, op: Apply) -> None:
        """All sums of one group before the next: each waits for its last step only then."""
        t, wide = op.result.type, max(op.a, op.b, key=_lanes)
        assert isinstance(t, VecType) and isinstance(wide.type, VecType)
        inner, group = wide.type.unroll, _group(wide)
        count, axes = dict(inner)[op.axis], sorted(t.unroll, key=lambda axis: axis in inner)
        for first in range(0, count, group):
            for point in spread(dict.fromkeys(axes)):
                name = label(op.result, tuple((a, point[a]) for a, _ in t.unroll), self.names)
                args = [self._named(v, point, op.axis, first, t.lanes) for v in (op.a, op.b)]
                old = name if first else self.get(op.c, point)
                kind = "" if first else f"{self.p.type(t.dtype, t.lanes)} "
                self.line(f"{kind}{name} = {self.p.call(op.name, t.dtype, t.lanes, [old, *args])};")
        if ATOMS[op.name].excess:
            self._without_excess(op, group, count)
        for point in points(op.result):
            at = tuple(point.items())
            self.text[op.result, at] = label(op.result, at, self.names)

    def _without_excess(self, op: Apply, group: int, count: int) -> None:
        """What a step summed too much, the same for all that read one part of the operand."""
        t = op.result.type
        assert isinstance(t, VecType)
        found: dict[tuple[str, ...], str] = {}
        for point in points(op.result):
            words = tuple(self._named(op.b, point, op.axis, n, t.lanes)
                          for n in range(0, count, group))
            if words not in found:
                text = self.p.constant(0, t.dtype, t.lanes)
                for word in words:
                    text = self.p.call(f"{op.name}_excess", t.dtype, t.lanes, [text, word])
                found[words] = f"{words[0]}_excess"
                self.line(f"const {self.p.type(t.dtype, t.lanes)} {found[words]} = {text};")
            name = label(op.result, tuple(point.items()), self.names)
            less = self.p.call("sub", t.dtype, t.lanes, [name, found[words]])
            self.line(f"{name} = {less};")

    def _named(self, value: Value, point: Mapping[str, int], axis: str, first: int, lanes: int
               ) -> str:
        """The variable of a group of elements from `first` on, in all lanes."""
        t = value.type
        assert isinstance(t, VecType)
        at = {a: point[a] for a, _ in t.unroll if a != axis}
        name = f"{label(value, tuple(at.items()), self.names)}__{first}"
        key = value, (*at.items(), (axis, first), ("", 0))  # a word is no member of its family
        if key not in self.text:
            text = self._word(value, at, axis, first, lanes)
            self.line(f"const {self.p.type(I32, lanes)} {name} = {text};")
            self.text[key] = name
        return name

    def _word(self, value: Value, at: Mapping[str, int], axis: str, first: int, wide: int) -> str:
        """A group of elements as a word of each lane, the same in `wide` lanes if there is one."""
        group, lanes, t = _group(value), _lanes(value), value.type
        assert isinstance(t, VecType)
        places = [{**at, axis: first + n} for n in range(group)]
        op = self.pending.get(value)
        run = self._run(op, at, axis, first, group) if isinstance(op, Load) else None
        if run is None or not isinstance(op, Load):
            text = self.p.call(f"join{group}", t.dtype, lanes, [self.get(value, p) for p in places])
            return text if lanes > 1 else self.p.splat(I32, wide, text)
        if lanes == 1:
            return self.p.call("spread", I32, wide, [self._pointer(op.buf, run, [], at)])
        step = run.coefficient(LANE)
        if step is not None and step.is_const(group):
            return self.p.call("word", I32, lanes,
                               [self._pointer(op.buf, run.without(LANE), [], at)])
        each = (self._pointer(op.buf, run.subs({LANE: n}), [], at) for n in range(lanes))
        return self.p.gather(I32, lanes, [self.p.call("word", I32, 1, [p]) for p in each])

    def _run(self, op: Load | Store, at: Mapping[str, int], axis: str, first: int, count: int
             ) -> Expr | None:
        """The offset of `count` elements that lie side by side along an axis, none masked."""
        places = [{**at, axis: first + n} for n in range(count)]
        t = op.result.type if isinstance(op, Load) else op.family
        assert isinstance(t, VecType)
        offsets = [self._offset(op.buf, op.subs, p) for p in places]
        start = offsets[0][0]
        if any(values or not (o - start).is_const(n) for n, (o, values) in enumerate(offsets)):
            return None
        whole = all(still_open([e.subs(p) for e in op.mask], t.lanes) == ([], []) for p in places)
        return start if whole else None

    # ---- panels
    def _store(self, op: Store) -> None:
        t = op.family
        axis = next((a for a, n in t.unroll if self._grouped(op, a, n)), "")
        if not axis:
            super()._store(op)
            return
        count, group = dict(t.unroll)[axis], WORD // t.dtype.bytes
        for at in spread([u for u in t.unroll if u[0] != axis]):
            first = 0
            while first < count:
                first += self._turned(op, at, axis, first, count) or self._kept(op, at, axis, first,
                                                                                group)

    def _grouped(self, op: Store, axis: str, count: int) -> bool:
        """Whether each lane's neighbours along an axis are side by side, and the lanes in a row."""
        t = op.family
        group = WORD // t.dtype.bytes
        if t.lanes == 1 or not group or count % group or _lanes(op.value) != t.lanes or (
                group == 1 and not self._across(op, axis)):
            return False
        runs = [self._run(op, at, axis, first, group) for first in range(0, count, group)
                for at in spread([u for u in t.unroll if u[0] != axis])]
        steps = [run.coefficient(LANE) if run is not None else None for run in runs]
        return all(step is not None and step.is_const(group) for step in steps)

    def _across(self, op: Store, axis: str) -> bool:
        """Whether what is stored is loaded along an axis that is not that of the lanes."""
        load, t = self.pending.get(op.value), op.family
        if not isinstance(load, Load) or t.dtype.bytes != WORD or dict(t.unroll)[axis] < ROWS:
            return False
        at = next(iter(spread([u for u in t.unroll if u[0] != axis])))
        run = self._run(load, at, axis, 0, ROWS)
        step = run.coefficient(LANE) if run is not None else None
        return step is not None and step.const_value not in range(ROWS)

    def _kept(self, op: Store, at: Mapping[str, int], axis: str, first: int, group: int) -> int:
        """Store one word of each lane; how many elements of each that were."""
        words = self._word(op.value, at, axis, first, op.family.lanes)
        self.line(self.p.call("keep", I32, op.family.lanes, [self._to(op, at, axis, first), words])
                  + ";")
        return group

    def _turned(self, op: Store, at: Mapping[str, int], axis: str, first: int, count: int) -> int:
        """Store some words of each lane, whose row is loaded at once; 0 where there is none."""
        load, size = self.pending.get(op.value), op.family.dtype.bytes
        many = ROWS * WORD // size
        if not isinstance(load, Load) or first + many > count:
            return 0
        run = self._run(load, at, axis, first, many)
        step = run.coefficient(LANE) if run is not None else None
        if run is None or step is None or step.const_value in range(many):
            return 0
        starts = [self._run(op, at, axis, n, 1) for n in range(first, first + many, WORD // size)]
        gaps = {b - a for a, b in pairwise(x for x in starts if x is not None)}
        if len(gaps) != 1:
            return 0
        start = self._pointer(load.buf, run.without(LANE), [], at)
        args = [f"(char *){self._to(op, at, axis, first)}", self.c(gaps.pop() * size),
                f"(const char *){start}", self.c(step * size)]
        self.line(self.p.call("turn", I32, op.family.lanes, args) + ";")
        return many

    def _to(self, op: Store, at: Mapping[str, int], axis: str, first: int) -> str:
        run = self._run(op, at, axis, first, 1)
        assert run is not None
        return self._pointer(op.buf, run.without(LANE), [], at)


def _group(value: Value) -> int:
    """Elements of a word."""
    return WORD // dtype_of(value.type).bytes


def _lanes(value: Value) -> int:
    assert isinstance(value.type, VecType)
    return value.type.lanes
