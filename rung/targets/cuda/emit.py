"""CUDA C++ of a set of kernels: one file that includes nothing, an `extern "C"` kernel for each.

The kernel of `softmax` is called `run_softmax`; `plain_softmax` is for launches whose buffers or
sizes do not allow its wide accesses (see `access`). Grid loops become digits of blockIdx.x, thread
loops of threadIdx.x; a block's arrays lie in one arena of shared memory. Roles share a block: the
threads of `math` come first, and a ring has a full and a free mbarrier a slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from rung.core.expr import Expr
from rung.core.machine import GRID, THREAD
from rung.core.op import Func, Op, Value, walk
from rung.core.scalar import MONOIDS
from rung.core.types import BOOL, ArrayType, DType, VecType, dtype_of
from rung.kernel.barriers import insert_barriers
from rung.kernel.ir import (
    FREE,
    FULL,
    Alloc,
    Await,
    Barrier,
    Combine,
    Commit,
    For,
    Load,
    Prefix,
    Ring,
    Role,
    Roles,
    Signal,
    Store,
    Transfer,
    Wait,
)
from rung.targets.c_cuda import CudaPrelude
from rung.targets.cuda import access, threads
from rung.targets.cuda.helpers import helpers
from rung.targets.cuda.machine import SM90
from rung.targets.emit import Emitter, Style, element
from rung.targets.families import label, spread
from rung.targets.masks import still_open
from rung.targets.written import computed

WORDS = frozenset({
    "and", "asm", "bool", "catch", "class", "delete", "export", "friend", "mutable", "namespace",
    "new", "not", "operator", "or", "private", "public", "template", "this", "throw", "try",
    "typename", "using", "virtual", "wchar_t", "xor"})
"""Words of C++ that no value of a kernel is called there."""
STATIC = 48 << 10  # bytes of shared memory that need no attribute of the launch
UNROLLED = 16  # steps of a copy that are written out, so that all their loads are under way
KINDS = {level.name: level.kind for level in SM90.levels}


@dataclass(frozen=True)
class Shape:
    """How a kernel is launched: blocks (of the size symbols), threads, dynamic shared bytes.

    Of `blocks` that stay, one on each SM is enough.
    """

    blocks: Expr
    threads: int
    dynamic: int
    stay: bool = False


def entry(func: Func, plain: bool = False) -> str:
    """A kernel's name in the source: with a prefix, since CUDA has functions called `max`. The
    plain version is there where `access.wide_condition` asks something of a launch."""
    return f"{'plain' if plain else 'run'}_{func.name}"


DECLARED = 'extern "C" { __device__ long *rung_found; __device__ int *rung_taken; }\n'
"""Where checks report the first element at fault, and say that there is one."""


def is_guarded(func: Func) -> bool:
    """Whether a kernel reads or writes at places that data say, which may have failed a check."""
    return any(isinstance(x, Value) for op in walk(func.body) if isinstance(op, Load | Store)
               for x in op.subs)


def launch_loops(func: Func, kind: str) -> list[For]:
    """The grid or thread loops of a kernel, outermost first."""
    return [op for op in walk(func.body) if isinstance(op, For) and KINDS.get(op.level) == kind]


def launch_shape(func: Func) -> Shape:
    """The launch of a kernel."""
    blocks = Expr.of(1)
    for op in launch_loops(func, GRID):
        blocks = blocks * op.hi
    size = shared_bytes(func)
    return Shape(blocks, sum(teams_of(func).values()), size if size > STATIC else 0,
                 func.attr("persistent") is not None)


def threads_of(func: Func) -> int:
    """Threads that compute; a block may have others, which bring tiles."""
    return prod(op.hi.const_value or 1 for op in launch_loops(func, THREAD))


def teams_of(func: Func) -> dict[str, int]:
    """Threads of each role, `math` first."""
    assert SM90.teams is not None
    return {"math": threads_of(func)} | {op.name: op.count * SM90.teams.threads for op in walk(
        func.body) if isinstance(op, Role) and op.name != "math"}


def shared_bytes(func: Func) -> int:
    """Bytes of a block's arena: all arrays, and a place where warps exchange partial folds."""
    ops = list(walk(func.body))
    names = {op.var for op in launch_loops(func, THREAD)}
    sizes = [_rounded(t.bytes) for op in ops if isinstance(op, Alloc) for t in op.types
             if isinstance(t, ArrayType)]
    sizes += [_rounded(16 * op.slots) for op in ops if isinstance(op, Ring)]
    wide = [_held(dtype_of(op.x.type)) for op in ops if isinstance(op, Combine | Prefix)
            and op.axis in names]
    return sum(sizes) + threads_of(func) * max(wide, default=0)


def _held(dtype: DType) -> int:
    """Bytes of a value in a register, where a truth is an `int`."""
    return max(4, dtype.bytes)


def _rounded(size: int) -> int:
    return -(-size // 16) * 16


class CudaEmitter(Emitter):
    """One kernel, as each thread sees it."""

    def __init__(self, func: Func, prelude: CudaPrelude, plan: access.Accesses,
                 plain: bool = False):
        self.threads, self.teams = threads_of(func), teams_of(func)
        roles = [op for op in walk(func.body) if isinstance(op, Role)]
        bounds = f"{sum(self.teams.values())}{', 1' if any(op.regs for op in roles) else ''}"
        head = (f'extern "C" __global__ void __launch_bounds__({bounds}) '
                f'{entry(func, plain)}({{params}})')
        super().__init__(func, prelude, Style("__restrict__", head, WORDS))
        self.plan, self.integer = plan, "int" if plan.ints else "long"
        self.sync = "__syncthreads()"
        self.rings: dict[str, Ring] = {}
        self.used = 0
        self.strides: dict[str, int] = {}  # of each thread loop, in threads

    def source(self) -> str:
        size = shared_bytes(self.func)
        if size > STATIC:
            self.line("extern __shared__ __align__(16) unsigned char arena[];")
        elif size:
            self.line(f"__shared__ __align__(16) unsigned char arena[{size}];")
        if is_guarded(self.func):
            self.line("if (rung_taken && *rung_taken) return;  // a check has failed")
        self.line("const unsigned tid = threadIdx.x;")
        if self.func.attr("persistent"):
            self._digits(THREAD, "tid")
            self._tiles(self.func.attr("persistent").group)
        else:
            self._digits(GRID, "blockIdx.x")
            self._digits(THREAD, "tid")
        return super().source()

    def _tiles(self, group: int) -> None:
        """A loop over tiles: `group` rows of the last two grid axes go column by column, so that
        blocks that run together share operands in the L2."""
        loops = launch_loops(self.func, GRID)
        blocks = self.c(launch_shape(self.func).blocks)
        kind = self.integer
        self.line(f"for ({kind} block = blockIdx.x; block < {blocks}; block += gridDim.x) {{")
        self.depth += 1
        if group == 1 or len(loops) < 2:
            self._digits(GRID, "block")
            return
        rows, columns = (self.c(op.hi) for op in loops[-2:])
        band = f"{group} * ({columns})"
        self.line(f"const {kind} plane_ = block % (({rows}) * ({columns}));")
        self.line(f"const {kind} first_ = plane_ / ({band}) * {group};")
        self.line(f"const {kind} rows_ = min(({kind}){group}, ({rows}) - first_);")
        self.line(f"const {kind} {loops[-2].var} = first_ + plane_ % ({band}) % rows_;")
        self.line(f"const {kind} {loops[-1].var} = plane_ % ({band}) / rows_;")
        inner = loops[-1].hi * loops[-2].hi
        for op in reversed(loops[:-2]):
            self.line(f"const {kind} {op.var} = block / ({self.c(inner)}) % ({self.c(op.hi)});")
            inner = inner * op.hi

    def finish(self) -> None:
        if self.func.attr("persistent"):
            self.line("__syncthreads();  // the next tile uses the same arrays")
            self.depth -= 1
            self.line("}")

    def _digits(self, kind: str, index: str) -> None:
        """Declare the variables of grid or thread loops; the last one runs fastest."""
        inner = Expr.of(1)
        for op in reversed(launch_loops(self.func, kind)):
            text = index if inner.is_const(1) else f"{index} / ({self.c(inner)})"
            if op is not launch_loops(self.func, kind)[0]:
                text = f"{text} % ({self.c(op.hi)})"
            self.line(f"const {self.integer if kind == GRID else 'int'} {op.var} = {text};")
            self.strides[op.var] = inner.const_value or 0
            inner = inner * op.hi

    # ---- statements
    def statement(self, op: Op) -> None:
        match op:
            case Commit():
                self.line(f"cp_async_commit();  // {op.group}")
            case Wait():
                self.line(f"cp_async_wait<{op.pending}>();  // {op.group}")
            case For() if KINDS.get(op.level) in (GRID, THREAD):
                for inner in op.body.ops:
                    self.lines.enter(computed(inner))
                    self.statement(inner)
                    self.lines.leave()
            case Ring():
                self._ring(op)
            case Roles():
                self._roles(op)
            case Await() | Signal():
                self._token(op)
            case Combine() | Prefix() if op.axis in self.strides:
                super().statement(op)
                self._force(op.result)  # all threads take part, so not inside a condition
            case _:
                super().statement(op)

    def open_loop(self, op: For, end: str) -> None:
        if op.level == "unroll":
            self.line("#pragma unroll")
        kind = "int" if op.hi.const_value is not None else self.integer
        self.line(f"for ({kind} {op.var} = 0; {op.var} < {end}; {op.var}++) {{")

    def barrier(self, op: Barrier) -> None:
        self.line(f"{self.sync};")

    # ---- wide accesses
    def get(self, value: Value, point: Mapping[str, int], name: bool = False) -> str:
        op = self.pending.get(value)
        wide = self.plan.wide.get(op) if op else None
        if wide is None or not isinstance(op, Load):
            return super().get(value, point, name)
        at = {axis: point[axis] for axis, _ in _unroll(value)}
        if (value, tuple(at.items())) not in self.text:
            self.lines.enter([value])
            self._wide_load(op, wide, at | {wide.axis: at[wide.axis] // wide.count * wide.count})
            self.lines.leave()
        return self.text[value, tuple(at.items())]

    def _wide_load(self, op: Load, wide: access.Wide, first: dict[str, int]) -> None:
        """Declare the copies from `first` on, as one value; each is a part of it."""
        dtype, fill = dtype_of(op.buf.type), self.p.constant(op.fill, dtype_of(op.buf.type))
        mask = still_open([e.subs(first) for e in op.mask], 1)
        name, size = label(op.result, tuple(first.items()), self.names), dtype.bytes
        kind = access.wide_type(self.p.storage(dtype), size, wide.count)
        if mask is not None:
            place = self._pointer(op.buf, *self._offset(op.buf, op.subs, first), first)
            text = f"*(const {kind} *){place}"
            if tests := self._tests(mask[0]):
                self.line(f"{kind} {name} = {access.packed([fill] * wide.count, size)};")
                self.line(f"if ({tests}) {name} = {text};")
            else:
                self.line(f"const {kind} {name} = {text};")
        for n in range(wide.count):
            part = access.unpacked(name, self.p.storage(dtype), size, n)
            part = f"({part} != 0)" if dtype == BOOL else part
            at = tuple((first | {wide.axis: first[wide.axis] + n}).items())
            self.text[op.result, at] = part if mask is not None else fill

    def _store(self, op: Store) -> None:
        wide = self.plan.wide.get(op)
        if wide is None:
            super()._store(op)
            return
        t, dtype = op.family, dtype_of(op.buf.type)
        kind = access.wide_type(self.p.storage(dtype), dtype.bytes, wide.count)
        for first in spread(t.unroll):
            mask = still_open([e.subs(first) for e in op.mask], 1)
            if first[wide.axis] % wide.count or mask is None:
                continue
            parts = [self.get(op.value, first | {wide.axis: first[wide.axis] + n})
                     for n in range(wide.count)]
            place = self._pointer(op.buf, *self._offset(op.buf, op.subs, first), first)
            text = f"*({kind} *){place} = {access.packed(parts, dtype.bytes)};"
            tests = self._tests(mask[0])
            self.line(f"if ({tests}) {text}" if tests else text)

    def _alloc(self, op: Alloc) -> None:
        (t,) = op.types
        assert isinstance(t, ArrayType)
        kind = self.p.storage(t.dtype)
        name = label(op.result, (), self.names)
        self.line(f"{kind} *const {name} = ({kind} *)(arena + {self.used});")
        self.used += _rounded(t.bytes)

    # ---- folds over threads
    def _combine(self, op: Combine, point: dict[str, int]) -> str:
        if op.axis not in self.strides:
            return super()._combine(op, point)
        dtype = dtype_of(op.x.type)
        name = "combine" if self.sync == "__syncthreads()" else "team_combine"
        return (f"{name}<{self._count(op.axis)}, {self.strides[op.axis]}, {self.threads}>("
                f"{self.get(op.x, point)}, {threads.fold_text(self.p, op.monoid, dtype)}, "
                f"{self._exchange(dtype)})")

    def _exchange(self, dtype: DType) -> str:
        """Where warps exchange elements: the end of the arena."""
        place = shared_bytes(self.func) - self.threads * _held(dtype)
        return f"({self.p.type(dtype)} *)(arena + {place})"

    def _count(self, axis: str) -> int:
        (found,) = [x.hi.const_value for x in launch_loops(self.func, THREAD) if x.var == axis]
        return found or 1

    # ---- scans over threads and copies, atomic updates
    def _expression(self, op: Op, point: dict[str, int]) -> str:
        return self._prefix(op, point) if isinstance(op, Prefix) else super()._expression(op, point)

    def _prefix(self, op: Prefix, point: dict[str, int]) -> str:
        dtype = dtype_of(op.x.type)
        if op.axis in self.strides:
            shape = self._count(op.axis), self.strides[op.axis], self.threads
            return threads.prefix_text(self.p, op, self.get(op.x, point), shape,
                                       self._exchange(dtype), self.sync != "__syncthreads()")
        before = {**point, op.axis: point[op.axis] - 1}
        if before[op.axis] < 0 and op.exclusive:
            return self.p.constant(MONOIDS[op.monoid].identity(dtype), dtype)
        last = self.get(op.x, before if op.exclusive else point)
        if before[op.axis] < 0:
            return last
        parts = [self.get(op.result, before, name=True), last]
        return self.p.call(MONOIDS[op.monoid].combine, dtype, 1, parts)

    def _store_text(self, op: Store, t: VecType, offset: Expr, values: list[tuple[Value, Expr]],
                    point: Mapping[str, int], value: str, lanes: list[Expr]) -> str:
        if not op.combine:
            return super()._store_text(op, t, offset, values, point, value, lanes)
        return threads.atomic_text(self.p, op, self._pointer(op.buf, offset, values, point), value)

    # ---- roles
    def _ring(self, op: Ring) -> None:
        """The mbarriers of a ring: those of full slots, then those of free ones."""
        self.rings[op.name] = op
        self.line(f"unsigned long *const {op.name} = (unsigned long *)(arena + {self.used});")
        self.used += _rounded(16 * op.slots)

    def _roles(self, op: Roles) -> None:
        self.line("if (threadIdx.x == 0) {")
        for ring in self.rings.values():
            load, math = self.teams["load"] * len(self._arrivals(ring.name)), self.teams["math"]
            self.line(f"  mbarrier_init({ring.name}, {ring.slots}, {load}, {math});")
        self.line("}")
        self.line("__syncthreads();")
        math = self.teams["math"]
        for role in (x for x in op.body.ops if isinstance(x, Role)):
            if role.name == "math":
                self._role(role, f"if (threadIdx.x < {math})", f"team_sync<{math}>()")
            else:
                self._role(role, f"if (threadIdx.x >= {math})", "", f"threadIdx.x - {math}")

    def _role(self, role: Role, test: str, sync: str, tid: str = "") -> None:
        outer = self.threads, self.sync
        self.threads, self.sync = self.teams[role.name], sync
        self.line(f"{test} {{  // {role.name}")
        self.depth += 1
        if role.regs:
            assert SM90.teams is not None
            grows = role.regs > SM90.teams.registers // sum(self.teams.values())
            self.line(f"set_registers_{'up' if grows else 'down'}<{role.regs}>();")
        if tid:
            self.line(f"const unsigned tid = {tid};")
        for inner in role.body.ops:
            self.statement(inner)
        if role.name == "load":
            self.line("cp_async_wait_all();")
        self.depth -= 1
        self.line("}")
        self.threads, self.sync = outer

    def _token(self, op: Await | Signal) -> None:
        slots = self.rings[op.ring].slots
        at = op.step % slots + (slots if op.token == FREE else 0)
        place = f"{op.ring} + {self.c(at)}"
        if isinstance(op, Await):  # a slot that was never filled is free: as if a phase had passed
            phase = (op.step // slots + (1 if op.token == FREE else 0)) % 2
            self.line(f"mbarrier_wait({place}, {self.c(phase)});  // {op.token}")
            return
        self._flush_loads(None)
        for arrive in self._arrivals(op.ring) if op.token == FULL else ["mbarrier_arrive"]:
            self.line(f"{arrive}({place});  // {op.token}")

    def _arrivals(self, ring: str) -> list[str]:
        """How a thread that loads arrives: with its asynchronous copies, and with its stores."""
        wide = {n > 0 for op, n in self.plan.copies.items()
                if isinstance(op, Transfer) and op.group == ring}
        return ["cp_async_arrive"] * (True in wide) + ["mbarrier_arrive"] * (False in wide)

    # ---- transfers
    def transfer(self, op: Transfer) -> None:
        """All threads of the block share the copy; neighbours take neighbouring elements."""
        width = self.plan.copies.get(op, 0)
        box = [*op.box[:-1], op.box[-1] // max(width, 1)] if op.box else []
        total = prod(box)
        steps = -(-total // self.threads)
        if steps <= UNROLLED:
            self.line("#pragma unroll")
        self.line(f"for (int s_ = 0; s_ < {steps}; s_++) {{")
        self.depth += 1
        rest = "n_"
        self.line(f"const int n_ = {self.threads}*s_+tid;")
        for n in reversed(range(len(box))):
            digit = f"{rest} % {box[n]}" if n else rest
            scale = f" * {width}" if width > 1 and n == len(box) - 1 else ""
            self.line(f"const int {element(n)} = ({digit}){scale};")
            rest = f"{rest} / {box[n]}"
        there = f"if (n_ < {total}) " if total % self.threads else ""
        self.line(there + (self._async(op, width) if width else self.moved(op)))
        self.depth -= 1
        self.line("}")

    def _async(self, op: Transfer, width: int) -> str:
        size = width * dtype_of(op.dst.type).bytes
        to = self._pointer(op.dst, *self.box_offset(op.dst, op.dst_at, op.box), {})
        start = self._pointer(op.src, *self.box_offset(op.src, op.src_at, op.box), {})
        cond = " && ".join(self.inside(op))
        return f"cp_async<{size}>({to}, {start}, {f'{cond} ? {size} : 0' if cond else size});"


def _unroll(value: Value) -> tuple[tuple[str, int], ...]:
    assert isinstance(value.type, VecType)
    return value.type.unroll


def emit(kernels: Sequence[Func], ptx: bool = True) -> str:
    """One source for all kernels; the launch of each is `launch_shape`. Without `ptx` it calls
    the functions that are inline PTX, and leaves them to be defined."""
    prelude = CudaPrelude(ptx)
    bodies = "\n\n".join(text for k in kernels
                         for text in _versions(insert_barriers(k, ("shared",)), prelude))
    declared = DECLARED if "rung_taken" in bodies else ""
    return "\n".join([declared + prelude.text(), helpers(bodies, ptx), bodies, ""])


def _versions(kernel: Func, prelude: CudaPrelude) -> Iterator[str]:
    """A kernel, and again without its wide accesses where not all launches allow them."""
    wide = access.plan(kernel)
    yield CudaEmitter(kernel, prelude, wide).source()
    if wide.needs:
        yield CudaEmitter(kernel, prelude, access.plain(kernel), plain=True).source()
