"""Matmuls of tensor libraries as atoms, which compute whole kernels: what each means, and the call.

Each target says which it has, and what they take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from operator import itemgetter
from typing import TYPE_CHECKING

from rung.core.cost import known
from rung.core.machine import Atom, Machine, Operand
from rung.core.op import Func
from rung.core.types import BF16, F16, F64, I8, DType, dtype_of, shape_of
from rung.loop.ir import extents_of
from rung.targets.base import buffers_of
from rung.tile.match import Library, LibraryCall, Tensor, call_of

if TYPE_CHECKING:
    import torch

MATMUL, LINEAR, BYTES = "aten.matmul", "onednn.linear", "aten.int_mm"
POSTS = ("", "relu")  # epilogues that oneDNN computes
Seconds = Callable[[LibraryCall, Func, Machine, Mapping[str, int]], float]


def _meaning(dtype: DType, batch: bool, linear: bool, bias: bool, post: str) -> str:
    """post(sum over k of a*b, plus bias), in the computing type, rounded once at the end."""
    acc = {I8: "i32", F64: "f64"}.get(dtype, "f32")
    wide, made = "{}" if acc == str(dtype) else f"{acc}({{}})", "{}"
    if dtype in (BF16, F16):
        made = f"round_{dtype}({{}})"
    size, at = ("s3,", "h,") if batch else ("", "")
    shape, turn = ("s1,s2", "j,k") if linear else ("s2,s1", "k,j")
    a, b = wide.format(f"a[{at}i,k]"), wide.format(f"b[{at}{turn}]")
    total = f"mm + {wide.format('bias[j]')}" if bias else "mm"
    return (f"kernel matmul(a: {dtype}[{size}s0,s2], b: {dtype}[{size}{shape}]"
            f"{f', bias: {dtype}[s1]' * bias}) -> y: {acc if dtype == I8 else dtype}[{size}s0,s1]\n"
            f"  mm = contract add mul {a}, {b} over k s2 : {acc} over {at}i,j acc {acc}\n"
            f"  y[{at}i,j] = {made.format(f'{post}({total})' if post else total)}\n")


def matmul(name: str, seconds: Seconds, dtype: DType, *, batch: bool = False, bias: bool = False,
           post: str = "") -> Library:
    """A product of matrices of a type, and the seconds that it takes."""
    linear = name == LINEAR
    operands = (Operand("dram", turns=not linear),) * 2 + (Operand("dram"),) * bias
    return Library(Atom(name, _meaning(dtype, batch, linear, bias, post), operands), seconds)


def amounts(call: LibraryCall, kernel: Func, hints: Mapping[str, int]
            ) -> tuple[DType, int, float, float]:
    """Of a product: the type of its factors, its rows, its operations, and the bytes of its
    matrices."""
    extents, dtype = extents_of(kernel), dtype_of(call.tensors["a"].buffer.type)
    batch, m, n, k = (max(1, known(extents[call.axes[a]], hints)) if a in call.axes else 1
                      for a in "hijk")
    return dtype, m, 2.0 * batch * m * n * k, dtype.bytes * batch * (m * k + k * n + m * n)


def called(libraries: Iterable[Library], kernel: Func) -> Callable[..., torch.Tensor]:
    """What runs a kernel on tensors given in the order of its parameters; it makes the output, or
    computes it in its own memory if that is given."""
    (use,) = kernel.attr("mapping").uses
    names = [v.name for v in buffers_of(kernel)]
    entry, call = next((x, call) for x in libraries if x.atom.name == use.atom
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


# --- to measure them

def memory(count: int) -> torch.Tensor:
    """So many bytes, touched, that are small numbers as floats."""
    import torch

    return torch.ones(count // 4, dtype=torch.float32, device="cpu").view(torch.uint8)


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch's operators run on this thread alone."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def trial(name: str, dtype: DType, memory: torch.Tensor, m: int, n: int, k: int
          ) -> Callable[[], object]:
    """A product of m rows by the transpose of n, with other weights in the memory at each call."""
    import torch

    whole = memory.view({BF16: torch.bfloat16, I8: torch.int8}.get(dtype, torch.float32))
    a, rest = whole[:m * k].view(m, k), whole[m * k:]
    count = min(16, len(rest) // (n * k))
    weights = cycle(rest[:count * n * k].view(count, n, k).unbind())
    if name == LINEAR:
        linear = torch.ops.mkldnn._linear_pointwise.default
        return lambda: linear(a, next(weights), None, "none", [], "")
    product = torch._int_mm if name == BYTES else torch.mm
    return lambda: product(a, next(weights).T)
