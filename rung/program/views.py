"""Copies that move nothing: a kernel that keeps the order of its memory becomes a view.

    t = kernel copy(x) : f32[32,6]     ->    t = index x [i,j] of [32,6] -> [i//8,i%8,j] : f32[32,6]

On programs of kernel calls, after fusion. An `index` op in such a program is a view: it costs no
launch, and its value lies in the storage of its operand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from rung.core.expr import ONE, ZERO, Expr, sym
from rung.core.op import Func, Op, Value
from rung.core.ranges import prove_eq
from rung.core.types import TensorType
from rung.loop.ir import Load, Store, extents_of
from rung.program import ir
from rung.program.ir import Apply, Call, KernelCall, Module, Write, states, strided
from rung.tensor.ir import Index, axis_names, shape_of


@dataclass(frozen=True)
class Copy:
    """A kernel that copies its one parameter to its one output in memory order."""

    load: Load
    store: Store


def views(module: Module) -> Module:
    """The module with reshaping copies as `index` ops, and without kernels then unused."""
    copies = {k.name: k for k in module.kernels if copy_of(k)}
    programs = tuple(_views(p, copies) for p in module.programs)
    used = {op.callee for p in programs for op in p.body.ops if isinstance(op, KernelCall)}
    return Module(programs, tuple(k for k in module.kernels if k.name in used))


def _views(program: Func, copies: Mapping[str, Func]) -> Func:
    updates = {new: old for op in program.body.ops for new, old in states(op).items()}
    updated, later = set(updates.values()), set(updates)
    copied = {op.results[0]: source_of(op, copies[op.callee]) for op in program.body.ops
              if isinstance(op, KernelCall) and op.callee in copies}
    leaving = _leaving(program)
    taken = {v for v in leaving if v not in copied} | written(program) | set(program.params)
    root: dict[Value, Value] = {}
    ops: list[Op] = []
    for op in program.body.ops:
        result = op.results[0] if op.results else None
        if result not in copied:
            ops.append(op)
            if ir.is_view(op):
                first = op.operands()[0]
                root |= dict.fromkeys(op.results, root.get(first, first))
                later |= set(op.results) if first in later else set()
            elif isinstance(op, Apply):
                taken |= set(op.results)
            continue
        assert result is not None
        source = copied[result]
        home, made = root.get(source, source), view(source, result)
        if (not is_view(made) or {result, source, home} & updated or home.role == "mutated"
                or (result in leaving and (home in taken or source in later))):
            ops.append(op)
        else:
            ops.append(made)
            root[result] = home
            taken |= {home} if result in leaving else set()
        if source in later:
            later.add(result)
    return program.with_ops(ops)


def written(program: Func) -> set[Value]:
    """Values that become those of parameters."""
    return {op.src for op in program.body.ops if isinstance(op, Write)}


def _leaving(program: Func) -> set[Value]:
    """The results, and what the library calls behind them may have made a view of."""
    found = set(program.body.last.operands())
    for op in reversed(program.body.ops):
        if isinstance(op, Call | Apply) and found.intersection(op.results):
            found.update(op.operands())
    return found


def view(source: Value, result: Value) -> Index:
    """The reshape of `source` that `result` is."""
    shape = shape_of(result)
    axes = axis_names(len(shape))
    subs: list[Expr] = []
    flat = linear([sym(a) for a in axes], result)
    bounds = {a: (0, n - 1) for a, n in zip(axes, shape, strict=True)}
    if isinstance(source.type, TensorType) and source.type.strides is not None:
        subs = [(flat // step % n).simplify(bounds)
                for n, step in zip(source.type.shape, source.type.strides, strict=True)]
        return Index(source, axes, shape, tuple(subs), results=(result,))
    for n in reversed(shape_of(source)[1:]):
        subs.append((flat % n).simplify(bounds))
        flat = (flat // n).simplify(bounds)
    subs += [flat] if shape_of(source) else []
    return Index(source, axes, shape, tuple(reversed(subs)), results=(result,))


def source_of(call: KernelCall, copy: Func) -> Value:
    """What a call of a copying kernel copies; the kernel may have parameters that it ignores."""
    found = copy_of(copy)
    assert found is not None
    return call.args[copy.params.index(found.load.buf)]


def copy_of(kernel: Func) -> Copy | None:
    """The load and store of a kernel that copies in memory order; None for another kernel."""
    match kernel.body.ops:
        case (Load() as load, Store() as store) if store.value is load.result:
            pass
        case _:
            return None
    if load.mask or store.mask or store.buf not in kernel.outs:
        return None
    subs = [s for s in (*load.subs, *store.subs) if isinstance(s, Expr)]
    if strided(store.buf) or len(subs) < len(load.subs) + len(store.subs):
        return None
    bounds = {a: (0, n - 1) for a, n in extents_of(kernel).items()}
    same = prove_eq(linear(subs[:len(load.subs)], load.buf),
                    linear(subs[len(load.subs):], store.buf), bounds)
    whole = prod(shape_of(load.buf), start=ONE) is prod(shape_of(store.buf), start=ONE)
    return Copy(load, store) if same and whole else None


def is_view(op: Op) -> bool:
    """Whether an `index` op only reshapes, so that it needs no memory of its own."""
    if not isinstance(op, Index) or op.mask:
        return False
    bounds = {a: (0, n - 1) for a, n in zip(op.axes, op.shape, strict=True)}
    return prove_eq(linear(op.subs, op.x), linear([sym(a) for a in op.axes], op.result), bounds)


def linear(subs: Sequence[Expr], value: Value) -> Expr:
    """The offset, in elements, of an index into a tensor's memory."""
    assert isinstance(value.type, TensorType)
    offset = ZERO
    if value.type.strides is not None:
        return sum((sub * n for sub, n in zip(subs, value.type.strides, strict=True)), offset)
    for sub, n in zip(subs, value.type.shape, strict=True):
        offset = offset * n + sub
    return offset
