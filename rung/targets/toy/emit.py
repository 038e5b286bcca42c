"""The toy's assembly: one instruction a line, an operand is a register family or a box of memory.

    dma.in   x_tile[1,0,0], x[16*ib,0], 16x64, k_pipe     ; 40-16*ib of 16 rows are there
    mac16    mm2, mm1, a, b : k16                         ; 2x4x2 calls of 16x16x16
    v.add    a, t, t1 : 32                                ; 32 vectors of 16 lanes
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from rung.core.op import Block, Func, Op
from rung.core.ops import Cast, Const, LoadBase, Map, StoreBase, Sub, Yield
from rung.core.text import print_number
from rung.core.types import ArrayType, VecType
from rung.kernel.ir import (
    Alloc,
    Apply,
    Await,
    Combine,
    Commit,
    Fill,
    For,
    If,
    KernelIndex,
    Ring,
    Role,
    Signal,
    Transfer,
)
from rung.kernel.ir import Wait as WaitOp
from rung.targets.written import Written, computed


def emit(kernels: Sequence[Func]) -> str:
    """One text for all kernels."""
    return "\n".join(_kernel(k) for k in kernels)


def _kernel(kernel: Func) -> str:
    lines = Written()
    _block(lines, kernel.body, 1, "")
    return lines.function(kernel.name, f"{kernel.name}:", "  halt\n")


def _block(lines: Written, block: Block, depth: int, results: str) -> None:
    for op in block.ops:
        if isinstance(op, Yield):
            lines.add(_line(depth, "move", f"{results}, {_names(op.values)}"), op.values)
            continue
        lines.add(_line(depth, *_instruction(op)), computed(op))
        inner = ", ".join(r.name for r in op.results)
        for n, nested in enumerate(op.blocks()):
            if n and nested.ops:
                lines.add(_line(depth, "else", ""))
            _block(lines, nested, depth + 1, inner)
        if op.blocks():
            lines.add(_line(depth, "end", ""))


def _line(depth: int, name: str, operands: str, note: str = "") -> str:
    text = "  " * depth + f"{name:<9}{operands}".rstrip()
    return f"{text:<64}; {note}" if note else text


def _names(values: Sequence[object]) -> str:
    return ", ".join(getattr(v, "name", str(v)) for v in values)


def _memory(buf: str, at: Sequence[Sub]) -> str:
    return f"{buf}[{','.join(str(s) if not hasattr(s, 'name') else s.name for s in at)}]"


def _instruction(op: Op) -> tuple[str, ...]:
    """(name, operands, remark) of one op."""
    out = _names(op.results)
    match op:
        case Alloc():
            (t,) = op.types
            return "space", f"{out}, {t}", f"{t.bytes} B" if isinstance(t, ArrayType) else ""
        case For():
            end = f"min({op.hi}, {op.cap})" if op.cap is not None else str(op.hi)
            carried = ", ".join(f"{r.name} = {i.name}"
                                for r, i in zip(op.results, op.inits, strict=True))
            return "loop", f"{op.var}, {end}", carried
        case If():
            return "if", " and ".join(f"{e} >= 0" for e in op.cond)
        case Transfer():
            return _dma(op)
        case Ring():
            return "ring", f"{op.name}, {op.slots}", _names(op.arrays)
        case Role():
            return "queue", op.name
        case Await() | Signal():
            return op.keyword, f"{op.ring}.{op.token}, {op.step}"
        case Commit():
            return "signal", op.group
        case WaitOp():
            return "wait", f"{op.group}, {op.pending}"
        case Apply():
            return op.name, f"{out}, {op.c.name}, {op.a.name}, {op.b.name} : {op.axis}"
        case StoreBase():
            memory = _memory(op.buf.name, op.subs)
            return f"{_unit(op)}.store", f"{memory}, {op.value.name}", _masks(op)
        case LoadBase():
            memory = _memory(op.buf.name, op.subs)
            return f"{_unit(op)}.load", f"{out}, {memory}{_count(op)}", _masks(op)
        case _:
            return _vector(op, out)


def _unit(op: LoadBase | StoreBase) -> str:
    """The scalar unit reaches single elements of DRAM, lanes the scratchpad alone."""
    return "v" if isinstance(op.buf.type, ArrayType) else "s"


def _vector(op: Op, out: str) -> tuple[str, ...]:
    match op:
        case Map():
            return f"v.{op.fn}", f"{out}, {_names(op.args)}{_count(op)}"
        case Cast():
            return f"v.{op.dtype}", f"{out}, {op.x.name}{_count(op)}"
        case Const():
            return "v.set", f"{out}, {print_number(op.value)}"
        case Fill():
            return "v.set", f"{out}, {print_number(op.value)}{_count(op)}"
        case KernelIndex():
            return "v.index", f"{out}, {op.expr}{_count(op)}"
        case Combine():
            return f"v.fold.{op.monoid}", f"{out}, {op.x.name}, {op.axis}"
    return op.keyword, out


def _dma(op: Transfer) -> tuple[str, ...]:
    way = "in" if isinstance(op.dst.type, ArrayType) else "out"
    box = "x".join(map(str, op.box)) or "1"
    there = "x".join(f"({e})" if e.terms else str(e) for e in op.valid)
    sides = _memory(op.dst.name, op.dst_at), _memory(op.src.name, op.src_at)
    group = (op.group,) if op.group else ()
    return f"dma.{way}", ", ".join((*sides, box, *group)), f"{there} of it"


def _masks(op: LoadBase | StoreBase) -> str:
    return " and ".join(f"{e} >= 0" for e in op.mask)


def _count(op: Op) -> str:
    t = op.result.type
    n = prod(count for _, count in t.unroll) if isinstance(t, VecType) else 1
    return f" : {n}" if n > 1 else ""


