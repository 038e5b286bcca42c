"""Library matmuls of the CPU as atoms: ATen (MKL) and oneDNN, beside our own kernels by price.

Shares of the peak were measured on a Zen 5 core: MKL 0.40 in fp32, oneDNN 0.78 in fp32 and 0.92 of
the bf16 peak, which is 1.83 times that of fp32. One row is bound by memory, and torch streams a
bf16 matrix at a third of the bandwidth. `dispatch` is the host's part: what a call takes whose
matrices are tiny.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING

from rung.core.cost import known
from rung.core.expr import Expr
from rung.core.machine import Atom, Machine, Operand
from rung.core.op import Func
from rung.core.types import BF16, F32, I8, DType, TensorType, Type, dtype_of, shape_of
from rung.loop.ir import extents_of
from rung.targets.cpu.machine import features
from rung.tile.match import Library, LibraryCall, Tensor, call_of

if TYPE_CHECKING:
    import torch

SKINNY = 8  # rows below which a library's matmul is bound by how it streams the matrix


def _seconds(share: float, dispatch: float
             ) -> Callable[[LibraryCall, Func, Machine, Mapping[str, int]], float]:
    def seconds(call: LibraryCall, kernel: Func, machine: Machine, hints: Mapping[str, int]
                ) -> float:
        extents, dtype = extents_of(kernel), dtype_of(call.tensors["a"].buffer.type)
        batch, m, n, k = (max(1, known(extents[call.axes[a]], hints)) if a in call.axes else 1
                          for a in "hijk")
        peak = machine.rates.flops["f32"] * machine.cores
        if dtype == BF16:
            peak *= 1.83 * 0.92 / share if "avx512_bf16" in features() else 0.2
        if dtype == I8:
            peak *= 4.0 * 0.87 / share if "avx512_vnni" in features() else 1.0
        bytes_ = dtype.bytes * batch * (m * k + k * n + m * n)
        stream = machine.rates.memory * (0.35 if dtype == BF16 and m < SKINNY else 0.9)
        work = 2.0 * batch * m * n * k / (peak * share) if m >= SKINNY else 0.0
        fork = machine.rates.fork if machine.cores > 1 else 0.0
        return max(work, bytes_ / stream) + dispatch + fork

    return seconds


def _meaning(dtype: DType, batch: bool, linear: bool, bias: bool, post: str) -> str:
    """post(sum over k of a*b, plus bias), in the computing type, rounded once at the end."""
    wide, made = {BF16: ("f32({})", "round_bf16({})"), I8: ("i32({})", "{}")}.get(
        dtype, ("{}", "{}"))
    acc = "i32" if dtype == I8 else "f32"
    size, at = ("s3,", "h,") if batch else ("", "")
    shape, turn = ("s1,s2", "j,k") if linear else ("s2,s1", "k,j")
    a, b = wide.format(f"a[{at}i,k]"), wide.format(f"b[{at}{turn}]")
    total = f"mm + {wide.format('bias[j]')}" if bias else "mm"
    return (f"kernel matmul(a: {dtype}[{size}s0,s2], b: {dtype}[{size}{shape}]"
            f"{f', bias: {dtype}[s1]' * bias}) -> y: {acc if dtype == I8 else dtype}[{size}s0,s1]\n"
            f"  mm = contract add mul {a}, {b} over k s2 : {acc} over {at}i,j acc {acc}\n"
            f"  y[{at}i,j] = {made.format(f'{post}({total})' if post else total)}\n")


def _entry(name: str, seconds: Callable[[LibraryCall, Func, Machine, Mapping[str, int]], float],
           dtype: DType, *, batch: bool = False, bias: bool = False, post: str = "") -> Library:
    linear = name == LINEAR
    operands = (Operand("dram", turns=not linear),) * 2 + (Operand("dram"),) * bias
    return Library(Atom(name, _meaning(dtype, batch, linear, bias, post), operands), seconds)


MATMUL, LINEAR, BYTES = "aten.matmul", "onednn.linear", "aten.int_mm"
POSTS = ("", "relu")  # epilogues that oneDNN computes
LIBRARIES = (
    *(_entry(MATMUL, _seconds(0.40, 5e-6), dtype, batch=batch, bias=bias) for dtype in (F32, BF16)
      for batch, bias in ((False, False), (True, False), (False, True))),
    _entry(BYTES, _seconds(0.40, 5e-6), I8),
    *(_entry(LINEAR, _seconds(0.78, 18e-6), F32, bias=bias, post=post)
      for bias in (False, True) for post in POSTS))


ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
ATTENTION_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
GROUP_NORM = "aten.native_group_norm.default"
INT_MATMUL = "aten._int_mm.default"
QUERIES = 8  # from as many on, ATen's attention took 0.3 to 0.7 of the time of our own kernel
HALF_QUERIES = 256  # below, ATen's backward of bf16 took 1.5 to 5 times ours; else 0.5 to 1.1
ELEMENTS = 1 << 13  # from as many on, ATen's group norm took 0.5 to 0.9 of the time of ours


def keeps_call(call: str, operands: Sequence[Type], hints: Mapping[str, int], machine: Machine
               ) -> bool:
    """Whether an ATen call, which could be opened, is faster as it is: attention of many queries,
    which ATen computes in blocks, without the tiles that a causal mask hides, its backward,
    group norm of more than a cache's worth, which it reads once less, and products of bytes where
    no atom computes them."""
    if call == INT_MATMUL:
        return not any(x.rate == "i8" for x in machine.atoms)
    first = operands[0] if operands else None
    if not isinstance(first, TensorType):
        return False
    if call == GROUP_NORM:
        return known(prod(first.shape, start=Expr.of(1)), hints) >= ELEMENTS
    if call not in (ATTENTION, ATTENTION_BACKWARD):
        return False
    queries = known(first.shape[-2], hints)
    if call == ATTENTION:
        return queries >= QUERIES
    return first.dtype != BF16 or queries >= HALF_QUERIES


def called(name: str, kernel: Func, names: Sequence[str]) -> Callable[..., torch.Tensor]:
    """What runs a kernel on tensors given in the order of `names`, its parameters; it makes the
    output, or computes it in its own memory if that is given."""
    entry, call = next((x, call) for x in LIBRARIES if x.atom.name == name
                       if (call := call_of(x.atom, kernel)))
    a, b, bias, out = (_taken(x, names) if (x := call.tensors.get(t)) else None
                       for t in ("a", "b", "bias", "y"))
    assert a and b and out
    make, y = _matmul(entry.atom, call), call.tensors["y"]
    spread, result = _subscript(y, None), names.index(y.buffer.name)

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        made = make(a(tensors), b(tensors), bias(tensors) if bias else None,
                    out(tensors) if len(tensors) > result else None)
        return made[spread] if spread else made

    return run


def _subscript(x: Tensor, one: int | None) -> tuple[slice | int | None, ...]:
    """Takes all along the dimensions that axes run along, `one` for the others, which have size 1;
    empty where there are none of those."""
    rank = len(shape_of(x.buffer.type))
    if len(x.dims) == rank:
        return ()
    return tuple(slice(None) if n in x.dims else one for n in range(rank))


def _taken(x: Tensor, names: Sequence[str]) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
    """Takes an operand from the tensors, without its dimensions of size 1."""
    place, subscript = names.index(x.buffer.name), _subscript(x, 0)
    return (lambda tensors: tensors[place][subscript]) if subscript else itemgetter(place)


def _matmul(atom: Atom, call: LibraryCall) -> Callable[..., torch.Tensor]:
    """Of a, b, the bias and the output's memory, the last two or None."""
    import torch

    if atom.name == LINEAR:
        linear = torch.ops.mkldnn._linear_pointwise.default
        post = next((x for x in POSTS if x and f"{x}(" in atom.meaning), "none")
        return lambda a, b, bias, out: _into(out, linear(a, b, bias, post, [], ""))
    turn_a, turn_b = (call.tensors[t].axes[-1] != call.axes[x] for t, x in (("a", "k"), ("b", "j")))
    product = torch.bmm if "h" in call.axes else torch.mm
    if atom.name == BYTES:
        return lambda a, b, bias, out: _into(
            out, torch._int_mm(a.mT if turn_a else a, b.mT if turn_b else b))

    def run(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None,
            out: torch.Tensor | None) -> torch.Tensor:
        a, b = a.mT if turn_a else a, b.mT if turn_b else b
        return product(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)

    return run


def _into(out: torch.Tensor | None, made: torch.Tensor) -> torch.Tensor:
    return made if out is None else out.copy_(made)
