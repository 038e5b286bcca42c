"""How a kernel gets at memory: which copies one wide access takes, and how wide its indices are.

In: Kernel IR. Out: `Accesses`, and what they assume of a launch:

    x0[i,8*jt+ju8] over ju8<8, bf16      one load of 16 bytes, where x0 is aligned to 16
    x0[s0*i+8*jt+ju8]                    the same, where s0 % 8 == 0 too
    s0*i+256*jb+jt                       an `int`, where the largest that it gets is below 2^31

A kernel that assumes anything is written twice: so, and plainly for all other launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd

from rung.core.expr import Expr, Factor, FloorDiv, Sym, is_size, may_be_negative, to_source
from rung.core.machine import GRID
from rung.core.op import Func, Op, Value, expressions, walk
from rung.core.ops import Sub
from rung.core.types import ArrayType, VecType, dtype_of
from rung.kernel.ir import For, Load, Store, Transfer
from rung.targets.base import buffers_of, strides_of
from rung.targets.cuda.machine import SM90

WIDTHS = (16, 8, 4)  # bytes of one access
LIMIT = 1 << 31
GRIDS = [level.name for level in SM90.levels if level.kind == GRID]


@dataclass(frozen=True)
class Wide:
    """`count` neighbouring copies of an unrolled axis are one access."""

    axis: str
    count: int


@dataclass(frozen=True)
class Needs:
    """What a kernel needs of a launch: `aligned` buffers begin at multiples of 16 bytes, sizes
    are multiples as `divisible` says, and what is `small` is below 2^31."""

    aligned: tuple[str, ...] = ()
    divisible: tuple[tuple[Expr, int], ...] = ()
    small: tuple[Expr, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.aligned or self.divisible or self.small)

    def holds(self, addresses: Mapping[str, int], sizes: Mapping[str, int]) -> bool:
        """Whether a launch may take the kernel that needs this."""
        return (all(addresses[name] % WIDTHS[0] == 0 for name in self.aligned)
                and all(e.evaluate(sizes) % n == 0 for e, n in self.divisible)
                and all(e.evaluate(sizes) < LIMIT for e in self.small))

    def tests(self, address: Callable[[str], str], size: Callable[[Expr], str]) -> list[str]:
        """The same as conditions in C or Python, where all of them must hold; `address` and `size`
        give the text of a buffer's address as an integer and of an expression."""
        low = " | ".join(map(address, self.aligned))
        parts = [f"(({low}) & {WIDTHS[0] - 1}) == 0"] if low else []
        parts += [f"({size(e)}) % {n} == 0" for e, n in self.divisible]
        return parts + [f"{size(e)} < {LIMIT}" for e in self.small]

    def text(self) -> str:
        """The same in C, of pointers and sizes of these names; "" where there are none."""
        return " && ".join(self.tests("(unsigned long){}".format, lambda e: to_source(e, str)))


@dataclass(frozen=True)
class Accesses:
    """The wide loads and stores of a kernel, elements of each asynchronous copy, and whether
    indices are `int`."""

    wide: Mapping[Op, Wide] = field(default_factory=dict)
    copies: Mapping[Op, int] = field(default_factory=dict)
    ints: bool = False
    needs: Needs = Needs()


def wide_condition(func: Func) -> Needs:
    """What the first version of a kernel assumes of a launch; its `plain` one assumes nothing."""
    return plan(func).needs


def plan(func: Func) -> Accesses:
    """The widest accesses of a kernel that some launch can have."""
    aligned: set[Value] = set()
    divisible: dict[Expr, int] = {}
    wide: dict[Op, Wide] = {}
    copies: dict[Op, int] = {}
    for op in walk(func.body):
        if isinstance(op, Load | Store):
            got = _grouped(op)
            if got is not None:
                wide[op] = got[0]
                aligned.add(op.buf)
                _merge(divisible, got[1])
        elif isinstance(op, Transfer) and op.group:
            copies[op], needed = _copied(op, WIDTHS)
            if copies[op] > 1:
                aligned |= {op.src, op.dst}
                _merge(divisible, needed)
    small, ints = _largest(func)
    names = tuple(v.name for v in buffers_of(func) if v in aligned)
    return Accesses(wide, copies, ints, Needs(names, tuple(divisible.items()), small))


def plain(func: Func) -> Accesses:
    """Accesses of single elements, for any launch."""
    moved = [op for op in walk(func.body) if isinstance(op, Transfer) and op.group]
    copies: dict[Op, int] = {
        op: _copied(op, (dtype_of(op.dst.type).bytes,))[0] for op in moved}
    small, ints = _largest(func)
    return Accesses({}, copies, ints and not small)


def _merge(into: dict[Expr, int], needed: Mapping[Expr, int]) -> None:
    for e, n in needed.items():
        into[e] = max(n, into.get(e, 1))


# ---- loads and stores
def offset(buf: Value, subs: Sequence[Sub]) -> tuple[Expr, list[tuple[Value, Expr]]]:
    """Linear offset in elements: an expression, and data-dependent subscripts with strides."""
    total, values = Expr.of(0), []
    for sub, stride in zip(subs, strides_of(buf.type), strict=True):
        if isinstance(sub, Value):
            values.append((sub, stride))
        else:
            total = total + sub * stride
    return total, values


def _grouped(op: Load | Store) -> tuple[Wide, dict[Expr, int]] | None:
    """The widest access that takes copies of one axis together, and what sizes it needs."""
    t = op.result.type if isinstance(op, Load) else op.family
    assert isinstance(t, VecType)
    total, values = offset(op.buf, op.subs)
    if isinstance(op, Store) and op.combine:
        return None  # atomic updates are of single elements
    for axis, count in t.unroll if t.lanes == 1 else ():
        run = total.coefficient(axis)
        if run is None or not run.is_const(1) or any(_varies(v, axis) for v, _ in values):
            continue
        starts = [total.without(axis), *(stride for _, stride in values)]
        for n in (width // dtype_of(op.buf.type).bytes for width in WIDTHS):
            needed: dict[Expr, int] = {}
            if n > 1 and count % n == 0 and all(_multiple(e, n, needed) for e in starts) and all(
                    _same(e, axis, n, needed) for e in op.mask):
                return Wide(axis, n), needed
    return None


def _varies(value: Value, axis: str) -> bool:
    assert isinstance(value.type, VecType)
    return axis in dict(value.type.unroll)


def _multiple(e: Expr, n: int, needed: dict[Expr, int]) -> bool:
    """Whether `e` is a multiple of n, a power of two, where `needed` sizes are of theirs."""
    for coef, mono in e.terms:
        rest = n // gcd(n, coef)
        size = Expr.of(1)
        for factor in mono:
            if isinstance(factor, Sym) and is_size(factor.name):
                size = size * Expr.of(factor.name)
        if rest > 1 and size.is_const(1):
            return False
        if rest > 1:
            needed[size] = max(rest, needed.get(size, 1))
    return e.const % n == 0


def _same(test: Expr, axis: str, n: int, needed: dict[Expr, int]) -> bool:
    """Whether `test >= 0` for all of n neighbouring copies, which begin at a multiple, or none."""
    run, rest = test.coefficient(axis), test.without(axis)
    if run is None or run.const_value not in (0, 1, -1):
        return False
    last = n - 1 if run.is_const(-1) else 0
    return run.is_const(0) or _multiple(rest - last, n, needed)


# ---- transfers
def _copied(op: Transfer, widths: Iterable[int]) -> tuple[int, dict[Expr, int]]:
    """Elements of one asynchronous copy, and what sizes they need; 0 where there is none."""
    size = dtype_of(op.dst.type).bytes
    if op.fill == 0 and op.box and isinstance(op.dst.type, ArrayType):
        for width in (x for x in widths if x in WIDTHS and x % size == 0):
            needed: dict[Expr, int] = {}
            if _boxed(op, width // size, needed):
                return width // size, needed
    return 0, {}


def _boxed(op: Transfer, n: int, needed: dict[Expr, int]) -> bool:
    """Whether n neighbouring elements of the last dimension are together on both sides."""
    sides = ((op.dst, op.dst_at), (op.src, op.src_at))
    steps = [s for value, _ in sides for s in strides_of(value.type)[:-1]]
    ends = [at[-1] for _, at in sides] + [e for e in op.valid[-1:] if not _covers(e, op.box)]
    unit = all(strides_of(value.type)[-1].is_const(1) for value, _ in sides)
    return unit and op.box[-1] % n == 0 and all(
        isinstance(e, Expr) and _multiple(e, n, needed) for e in (*steps, *ends))


def _covers(valid: Expr, box: Sequence[int]) -> bool:
    return valid.const_value is not None and valid.const_value >= box[-1]


# ---- widths of indices
def _largest(func: Func) -> tuple[tuple[Expr, ...], bool]:
    """What must be below 2^31 so that no index, nor a part of one, needs more than an `int`, and
    whether any launch can have that."""
    reach = _Reach(func)
    for e in _indices(func):
        reach.of(e)
    found = dict.fromkeys(reach.found)
    if any(not e.terms and e.const >= LIMIT for e in found):
        return (), False
    sized = [e for e in found if e.terms]
    return tuple(e for e in sized if not any(_below(e, x) for x in sized if x is not e)), True


def _indices(func: Func) -> Iterator[Expr]:
    blocks = Expr.of(1)
    for op in walk(func.body):
        yield from expressions(op)
        match op:
            case For() if op.level in GRIDS:
                blocks = blocks * op.hi
            case Load() | Store():
                yield offset(op.buf, op.subs)[0]
            case Transfer():
                for buf, at in ((op.dst, op.dst_at), (op.src, op.src_at)):
                    yield offset(buf, at)[0] + _extent(buf, op.box)
    yield blocks


def _extent(buf: Value, box: Sequence[int]) -> Expr:
    """Offset of the last element of a box from its first."""
    steps = strides_of(buf.type)[-len(box):] if box else ()
    return sum((s * (n - 1) for s, n in zip(steps, box, strict=True)), Expr.of(0))


class _Reach:
    """The largest magnitudes of expressions, and of all that is computed on the way."""

    def __init__(self, func: Func):
        self.tops: dict[str, Expr] = {}
        self.found: list[Expr] = []
        for op in walk(func.body):
            if isinstance(op, For):
                hi = op.hi - 1 if op.hi.const_value else op.hi
                self.tops[op.var] = self.of(hi)
            families = [*(v.type for v in op.results), op]
            for axis, count in (u for x in families for u in getattr(x, "unroll", ())):
                self.tops[axis] = Expr.of(count - 1)

    def of(self, e: Expr) -> Expr:
        """At least the magnitude of each partial sum of `e`."""
        total = Expr.of(abs(e.const))
        for coef, mono in e.terms:
            term = Expr.of(abs(coef))
            for factor in mono:
                term = term * self._factor(factor)
            total = total + term
        self.found.append(total)
        return total

    def _factor(self, factor: Factor) -> Expr:
        if isinstance(factor, Sym):
            if may_be_negative(Expr.of(factor.name)):
                return Expr.of(1)  # it is a `long`, whatever the indices are
            return self.tops.get(factor.name, Expr.of(factor.name))
        num, den = self.of(factor.num), self.of(factor.den)
        if not isinstance(factor, FloorDiv):
            return den
        return num // den if den.const_value else num


def _below(a: Expr, b: Expr) -> bool:
    """Whether each part of a sum is at most that of another: all are positive."""
    return all(b.poly.get(mono, 0) >= k for mono, k in a.poly.items())


# ---- text
def wide_type(storage: str, size: int, count: int) -> str:
    """The type of `count` elements of `size` bytes in one access."""
    return f"Wide<{storage}, {count}>" if size >= 4 else f"Wide<unsigned, {count * size // 4}>"


def unpacked(name: str, storage: str, size: int, n: int) -> str:
    """Element n of a wide value."""
    if size >= 4:
        return f"{name}.at[{n}]"
    each = 4 // size
    shift = f" >> {8 * size * (n % each)}" if n % each else ""
    text = f"{name}.at[{n // each}]"
    return f"({storage})({text}{shift})" if shift else f"({storage}){text}"


def packed(parts: Sequence[str], size: int) -> str:
    """The elements of a wide value, in braces."""
    if size < 4:
        each = 4 // size
        parts = [f"word{each}({', '.join(parts[n: n + each])})" for n in range(0, len(parts), each)]
    return f"{{{', '.join(parts)}}}"
