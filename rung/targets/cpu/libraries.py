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

from rung.core.expr import Expr
from rung.core.machine import Machine
from rung.core.op import Func
from rung.core.types import BF16, F32, TensorType, Type, shape_of
from rung.targets.cpu.machine import features
from rung.tile.atoms import Library, Matmul, Operand
from rung.tile.price import known

if TYPE_CHECKING:
    import torch

SKINNY = 8  # rows below which a library's matmul is bound by how it streams the matrix


def _seconds(share: float, dispatch: float
             ) -> Callable[[Matmul, Func, Machine, Mapping[str, int]], float]:
    def seconds(mm: Matmul, kernel: Func, machine: Machine, hints: Mapping[str, int]) -> float:
        batch, m, n, k = mm.sizes(kernel, hints)
        peak = machine.rates.flops["f32"] * machine.cores
        if mm.dtype == BF16:
            peak *= 1.83 * 0.92 / share if "avx512_bf16" in features() else 0.2
        bytes_ = mm.dtype.bytes * batch * (m * k + k * n + m * n)
        stream = machine.rates.memory * (0.35 if mm.dtype == BF16 and m < SKINNY else 0.9)
        work = 2.0 * batch * m * n * k / (peak * share) if m >= SKINNY else 0.0
        fork = machine.rates.fork if machine.cores > 1 else 0.0
        return max(work, bytes_ / stream) + dispatch + fork

    return seconds


def _has_onednn() -> bool:
    import torch  # a process without it asks for no library

    built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return built and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _fits_aten(mm: Matmul) -> bool:
    return mm.post == "none" and mm.dtype in (F32, BF16) and not (mm.bias and mm.batch)


def _fits_linear(mm: Matmul) -> bool:
    plain = not mm.batch and mm.a.axes == (mm.m, mm.k) and mm.b.axes == (mm.n, mm.k)
    return plain and mm.dtype == F32 and _has_onednn()


LIBRARIES = (Library("aten.matmul", _fits_aten, _seconds(0.40, 5e-6)),
             Library("onednn.linear", _fits_linear, _seconds(0.78, 18e-6)))


ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
ATTENTION_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
GROUP_NORM = "aten.native_group_norm.default"
QUERIES = 8  # from as many on, ATen's attention took 0.3 to 0.7 of the time of our own kernel
HALF_QUERIES = 256  # below, ATen's backward of bf16 took 1.5 to 5 times ours; else 0.5 to 1.1
ELEMENTS = 1 << 13  # from as many on, ATen's group norm took 0.5 to 0.9 of the time of ours


def keeps_call(call: str, operands: Sequence[Type], hints: Mapping[str, int]) -> bool:
    """Whether an ATen call, which could be opened, is faster as it is: attention of many queries,
    which ATen computes in blocks, without the tiles that a causal mask hides, its backward, and
    group norm of more than a cache's worth, which it reads once less."""
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


def matmul(name: str, mm: Matmul, names: Sequence[str]) -> Callable[..., torch.Tensor]:
    """What runs the matmul on tensors given in the order of `names`, the kernel's parameters; it
    makes the output, or computes it in its own memory if that is given."""
    a, b, out = (_taken(x, names) for x in (mm.a, mm.b, mm.out))
    bias = _taken(mm.bias, names) if mm.bias else None
    make = _matmul(name, mm)
    spread = _subscript(mm.out, None)
    result = names.index(mm.out.buffer.name)

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        made = make(a(tensors), b(tensors), bias(tensors) if bias else None,
                    out(tensors) if len(tensors) > result else None)
        return made[spread] if spread else made

    return run


def _subscript(x: Operand, one: int | None) -> tuple[slice | int | None, ...]:
    """Takes all along the dimensions that axes run along, `one` for the others, which have size 1;
    empty where there are none of those."""
    rank = len(shape_of(x.buffer.type))
    if len(x.dims) == rank:
        return ()
    return tuple(slice(None) if n in x.dims else one for n in range(rank))


def _taken(x: Operand, names: Sequence[str]) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
    """Takes an operand from the tensors, without its dimensions of size 1."""
    place, subscript = names.index(x.buffer.name), _subscript(x, 0)
    return (lambda tensors: tensors[place][subscript]) if subscript else itemgetter(place)


def _matmul(name: str, mm: Matmul) -> Callable[..., torch.Tensor]:
    """Of a, b, the bias and the output's memory, the last two or None."""
    import torch

    if name == "onednn.linear":
        linear, post = torch.ops.mkldnn._linear_pointwise.default, mm.post
        return lambda a, b, bias, out: _into(out, linear(a, b, bias, post, [], ""))
    turn_a, turn_b = mm.a.axes[-1] != mm.k, mm.b.axes[-1] != mm.n
    product = torch.bmm if mm.batch else torch.mm

    def run(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None,
            out: torch.Tensor | None) -> torch.Tensor:
        a, b = a.mT if turn_a else a, b.mT if turn_b else b
        return product(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)

    return run


def _into(out: torch.Tensor | None, made: torch.Tensor) -> torch.Tensor:
    return made if out is None else out.copy_(made)
