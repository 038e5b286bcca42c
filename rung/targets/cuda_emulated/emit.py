"""C++ of CUDA kernels for this host: the emulator's text, the kernels, and a function for each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rung.core.expr import Expr, to_source
from rung.core.op import Func, Value, walk
from rung.core.types import TensorType, dtype_of
from rung.kernel.ir import Alloc, Combine, Prefix
from rung.targets.base import buffers_of, strides_of, symbols_of
from rung.targets.cpu.emit import emit_stretch
from rung.targets.cuda.access import wide_condition
from rung.targets.cuda.emit import entry, launch_shape, shared_bytes
from rung.targets.device import Stretch

HOST = Path(__file__).with_name("host.h").read_text()
ARENA = re.compile(r"(extern )?__shared__ __align__\(16\) unsigned char arena\[\d*\];")
STAY = 3  # blocks of a launch whose blocks stay, so that each has several tiles


def emit_library(kernels: Sequence[Func], source: str, stretches: Sequence[Stretch]) -> str:
    """The source of a library: `run_NAME` of each kernel, as the CPU's have it, and stretches.
    Lines are counted from the start of the kernels' source."""
    source = ARENA.sub("unsigned char *const arena = (unsigned char *)shared_memory;", source)
    return "\n".join([HOST, '#line 1 "kernels.cu"', source, 'extern "C" {', *map(_run, kernels),
                      *map(emit_stretch, stretches), "}\n"])


def _run(kernel: Func) -> str:
    name, buffers, sizes = kernel.name, buffers_of(kernel), symbols_of(kernel)
    shape, numbers = launch_shape(kernel), range(len(buffers))
    params = [*(f"void *p{n}" for n in numbers), *(f"long {s}" for s in sizes)]
    blocks = to_source(shape.blocks, str)
    if shape.stay:
        blocks = f"({blocks} < {STAY} ? {blocks} : {STAY})"
    grain = min((_grain(v) for op in walk(kernel.body)  # a combine's exchange is shared memory too
                 if isinstance(op, Alloc | Combine | Prefix) for v in op.results), default=4)
    return "\n".join([
        f"static void call_{name}(char *const *p, const long *s) {{", *_chosen(kernel), "}",
        f"void run_{name}({', '.join(params)}) {{",
        f"  const Buffer given[] = {{{', '.join(_buffer(kernel, n) for n in numbers)}}};",
        f"  static long sizes[{len(sizes) + 1}];",  # where kernels may read
        *(f"  sizes[{n}] = {s};" for n, s in enumerate(sizes)),
        f'  launch("{name}", call_{name}, {blocks}, {shape.threads}, {shared_bytes(kernel)}, '
        f"{grain}, given, {len(buffers)}, sizes);", "}"])


def _chosen(kernel: Func) -> Iterator[str]:
    """Statements that call a kernel, or its plain version where this launch needs that."""
    names, sizes = [v.name for v in buffers_of(kernel)], symbols_of(kernel)
    yield from (f"  char *const {x} = p[{n}];" for n, x in enumerate(names, 1))
    yield from (f"  const long {x} = s[{n}];" for n, x in enumerate(sizes))
    args = ", ".join([*(f"Pointer{{{x}}}" for x in names), *sizes])
    if needs := wide_condition(kernel).text():
        yield f"  if (!({needs})) return {entry(kernel, plain=True)}({args});"
    yield f"  {entry(kernel)}({args});"


def _buffer(kernel: Func, n: int) -> str:
    """What the emulator is told of the buffer in the parameter `pN`."""
    v = buffers_of(kernel)[n]
    given, made = v not in kernel.outs, v in kernel.outs or v.role == "mutated"
    return f'{{"{v.name}", (char *)p{n}, {_bytes(v)}, {_grain(v)}, {int(given)}, {int(made)}}}'


def _grain(buffer: Value) -> int:
    return dtype_of(buffer.type).bytes


def _bytes(buffer: Value) -> str:
    """From the first to the last element, as C text of the sizes."""
    assert isinstance(buffer.type, TensorType)
    shape, last = buffer.type.shape, Expr.of(1)
    for size, stride in zip(shape, strides_of(buffer.type), strict=True):
        last = last + (size - 1) * stride
    some = " && ".join([f"({to_source(e, str)}) > 0" for e in shape] or ["1"])
    return f"({some} ? ({to_source(last, str)}) * {_grain(buffer)} : 0)"
