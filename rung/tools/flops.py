"""What a graph must compute and move: model FLOPs, and bytes with and without fusion.

FLOPs count contractions only, as model FLOPs do: 2*m*n*k for a matmul, whatever its schedule; calls
that torch has a formula for (`torch.utils.flop_counter`) count by it, other calls not at all.
Bytes before fusion: every ATen op reads its tensors and writes its results, views nothing; what is
looked up in a table counts, not the table. After: every kernel reads and writes what it touches of
its buffers, once; calls as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from rung.core.cost import HINT, bound, known
from rung.core.expr import Expr
from rung.core.machine import Machine
from rung.core.op import Block, Func, Op, Value
from rung.core.types import TensorType
from rung.frontends.torch.calls import overload, schema_of, to_torch
from rung.frontends.torch.tensors import DTYPES
from rung.program import memory
from rung.program.ir import Apply, Call, Composite, KernelCall, Module, Write, is_view
from rung.program.storage import is_reshape
from rung.runtime.stretches import native
from rung.tensor.ir import Contract

Sizes = Mapping[str, int]
ATTENTION = "_scaled_dot_product_"  # all of these cost what the flash kind costs


@dataclass(frozen=True)
class Flops:
    """`total` of what is counted, and the targets of calls that are not."""

    total: int
    uncounted: tuple[str, ...] = ()


def flops(module: Module, hints: Sizes) -> Flops:
    """The FLOPs of a module on the rung `tensor` (or `program`), outlined layers included."""
    total, unknown = 0, dict[str, None]()
    for op in _ops(module, module.main.body):
        match op:
            case Contract():
                total += 2 * prod(known(n, hints) for n in op.sizes().values())
            case Call() if not is_free(op):
                found = flops_of_call(op, hints)
                total += found or 0
                if found is None:
                    unknown[op.target] = None
    return Flops(total, tuple(unknown))


def flops_of_call(call: Call, hints: Sizes) -> int | None:
    """FLOPs of one call by torch's formula; None where it has none, or one that fails, as that of
    attention does for grouped queries in some versions."""
    try:
        formula = _formula(call.target)
        return _by_formula(call, formula, hints) if formula else None
    except Exception:
        return None


def _ops(module: Module, block: Block) -> Iterator[Op]:
    """The ops that a block runs, those of composites and of outlined layers included."""
    for op in block.ops:
        yield op
        if isinstance(op, Composite):
            yield from _ops(module, op.body)
        elif isinstance(op, Apply):
            yield from _ops(module, module.program(op.callee).body)


def _formula(target: str) -> Callable[..., int] | None:
    if not schema_of(target):
        return None
    packet = overload(target).overloadpacket
    if target.split(".")[1].startswith(ATTENTION) and "backward" not in target:
        packet = torch.ops.aten._scaled_dot_product_flash_attention
    found: Callable[..., int] | None = flop_registry.get(packet)
    return found


def _by_formula(call: Call, formula: Callable[..., int], hints: Sizes) -> int:
    """torch's own count, on tensors without memory."""
    def meta(value: Value) -> Any:
        if not isinstance(value.type, TensorType):
            return known(Expr.of(value.name), hints)
        shape = [known(n, hints) for n in value.type.shape]
        return torch.empty(shape, dtype=DTYPES.get(value.type.dtype), device="meta")

    sizes = {s: hints.get(s, HINT) for _, a in call.args if isinstance(a, Expr)
             for s in a.symbols()}
    args = [to_torch(a, meta, sizes) for name, a in call.args if not name]
    named = {name: to_torch(a, meta, sizes) for name, a in call.args if name}
    outs = [meta(r) for r in call.results]
    return int(formula(*args, **named, out_val=outs[0] if len(outs) == 1 else tuple(outs)))


@dataclass(frozen=True)
class Contractions:
    """FLOPs of a program's convolutions, and of its other calls that contract with a parameter,
    and that do not."""

    convolutions: int
    weights: int
    attention: int


def contractions(program: Func, hints: Sizes) -> Contractions:
    """The contractions of a program of ATen calls, by whether an operand is a parameter, or a view
    or cast of one."""
    fixed = {p for p in program.params if p.role in ("param", "const")}
    totals = dict.fromkeys(("convolutions", "weights", "attention"), 0)
    for op in program.body.ops:
        if not isinstance(op, Call):
            continue
        if fixed.issuperset(op.operands()) and (is_view(op) or op.target in CASTS):
            fixed.update(op.results)
        elif found := flops_of_call(op, hints):
            totals["convolutions" if op.target in CONVOLUTIONS else
                   "weights" if fixed.intersection(op.operands()) else "attention"] += found
    return Contractions(**totals)


CONVOLUTIONS = ("aten.convolution.default", "aten._convolution.default")
CASTS = ("aten._to_copy.default", "aten.clone.default")


# --- bytes

def size_of(value: Value, hints: Sizes) -> int:
    """Bytes of a tensor."""
    if not isinstance(value.type, TensorType):
        return 0
    kind = value.type
    repeated = [s.const_value == 0 for s in kind.strides or [Expr.of(1)] * len(kind.shape)]
    return kind.dtype.bytes * prod(1 if again else known(n, hints)
                                   for n, again in zip(kind.shape, repeated, strict=True))


LOOKUPS = ("aten.embedding.default", "aten.gather.default", "aten.index.Tensor",
           "aten.index_select.default", "aten.take.default", "aten._unsafe_index.Tensor")
"""Calls that read of their first operand as many elements as they give."""


def is_free(op: Op) -> bool:
    """Whether an op is a view, which moves nothing."""
    return is_view(op) or is_reshape(op) or (
        isinstance(op, Call) and op.target == "aten._unsafe_view.default")


def bytes_of_op(op: Op, hints: Sizes) -> int:
    """What one op that runs by itself reads and writes."""
    if isinstance(op, Write):
        return 2 * size_of(op.src, hints)
    if is_free(op) or not op.results:
        return 0
    read = [size_of(v, hints) for v in dict.fromkeys(op.operands())]
    written = sum(size_of(r, hints) for r in op.results)
    if isinstance(op, Call) and op.target in LOOKUPS:
        read[0] = min(read[0], written)
    return sum(read) + written


def bytes_before(program: Func, hints: Sizes) -> int:
    """Bytes of a program of ATen calls, each run by itself."""
    return sum(bytes_of_op(op, hints) for op in program.body.ops)


def bytes_after(module: Module, machine: Machine, hints: Sizes) -> int:
    """Bytes of the kernels and of the calls that are left, of a module on the rung `loop`."""
    total = 0.0
    for op in module.main.body.ops:
        if isinstance(op, KernelCall):
            cost = bound(module.kernel(op.callee), machine, hints)
            total += cost.memory + cost.cache
        else:
            total += bytes_of_op(op, hints)
    return int(total)


def peak(module: Module, hints: Sizes) -> int:
    """Bytes that a call of a lowered module holds at most beside its arguments: the workspace, and
    from when they are made to when they are last read its results and those of library calls."""
    plan = memory.plan(module.main, native(module))
    own = [s for s in plan.storages if s.role in ("temp", "call", "output") and s.offset is None]
    last = {s.name: s.last for s in own}
    size = {s.name: known(s.bytes, hints) for s in own}
    for step in reversed(plan.steps):
        if step.kind == "call" and is_free(step.op):  # what it gives lies in what it is given
            view, base = (plan.home[v].name for v in (step.op.results[0], step.op.operands()[0]))
            size[view] = 0
            last[base] = max(last.get(base, 0), last.get(view, 0))
    return plan.workspace + max((sum(size[s.name] for s in own if s.first <= n <= last[s.name])
                                 for n in range(len(plan.steps))), default=0)
