"""Copies that keep the order of memory become views.

    t = kernel copy(x) : f32[32,6]     ->    t = index x [i,j] of [32,6] -> [i//8,i%8,j] : f32[32,6]

On programs of kernel calls, after fusion. There an `index` op is a view: no launch, and an alias of
its operand.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from rung.core.expr import ONE, Expr, sym
from rung.core.op import Func, Op, Value
from rung.core.ranges import prove_eq
from rung.core.types import TensorType
from rung.loop.ir import Load, Store, extents_of
from rung.program.ir import Apply, KernelCall, Module, Write, states, strided
from rung.program.storage import HOWS, RESHAPE, VIEW, Aliases, is_reshape, leaving, linear
from rung.tensor.ir import Index, axis_names, shape_of


def views(module: Module) -> Module:
    """The module with reshaping copies as `index` ops, without kernels then unused."""
    kernels = {k.name: k for k in module.kernels}
    programs = tuple(_views(p, kernels) for p in module.programs)
    used = {op.callee for p in programs for op in p.body.ops if isinstance(op, KernelCall)}
    return Module(programs, tuple(k for k in module.kernels if k.name in used))


def _views(program: Func, kernels: Mapping[str, Func]) -> Func:
    olds = {new: old for op in program.body.ops for new, old in states(op).items()}
    updated = set(olds.values())
    copied = {op.results[0]: source for op in program.body.ops
              if (source := source_of(op, kernels))}
    left = leaving(program, HOWS)
    written = {op.src for op in program.body.ops if isinstance(op, Write)}
    taken = {*(v for v in left if v not in copied), *written, *program.params, *olds}
    aliases = Aliases(hows=(RESHAPE, VIEW))
    ops: list[Op] = []
    for op in program.body.ops:
        result = op.results[0] if op.results else None
        if result and (source := copied.get(result)):
            home, made = aliases.root(source), view(source, result)
            if (is_reshape(made) and home.role != "mutated"
                    and updated.isdisjoint((result, source, home))
                    and not (result in left and home in taken)):
                op = made
                taken |= {home} if result in left else set()
        elif isinstance(op, Apply):
            taken |= set(op.results)
        ops.append(op)
        aliases.add(op)
    return program.with_ops(ops)


def view(source: Value, result: Value) -> Index:
    """`result` as a reshape of `source`."""
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


def source_of(op: Op | None, kernels: Mapping[str, Func]) -> Value | None:
    """The operand that a kernel call copies in memory order; None for any other op. The kernel may
    have unused parameters."""
    if not isinstance(op, KernelCall):
        return None
    kernel = kernels[op.callee]
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
    return op.args[kernel.params.index(load.buf)] if same and whole else None
