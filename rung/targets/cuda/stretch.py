"""Stretches on CUDA: how each kernel is launched, as C and as Python of the same steps.

    stretch_0(p, s): softmax(p[0], p[1])    ->    launch(0, s0, 256, 0, [p[0], p[1]], [s0])

A check is a small kernel: it notes the first element at fault where the host sees it later.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rung.core.expr import Expr
from rung.core.op import Func
from rung.targets import stretch as stretches
from rung.targets.base import buffers_of, strides_of
from rung.targets.c_cuda import CudaPrelude
from rung.targets.cuda.access import Needs, wide_condition
from rung.targets.cuda.emit import entry, launch_shape
from rung.targets.cuda.machine import SM90
from rung.targets.device import Checked, Launched, Place, Stretch
from rung.targets.stretch import at, c_text

THREADS = 256  # of a block of a check
PENDING, FAILED = -1, -2  # error words: a check has failed before; a launch did not start
REPORT = """
static __device__ void report(long site, long value, long limit) {
  if (atomicCAS(rung_taken, 0, 1)) return;
  rung_found[1] = value;
  rung_found[2] = limit;
  __threadfence_system();
  *(volatile long *)rung_found = site;
}
"""
HEAD = """\
static struct { void *kernels[%d]; int (*current)(int *); const volatile long *pending;
  int (*start)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
               void **, void **); } cuda;
void *bound(void) { return &cuda; }
long here(void) { int device; return !cuda.current(&device) && device == %d; }
"""
START = [f"  if (*cuda.pending) return {PENDING};",
         "  void *stream = (void *)found[0]; const long base = found[1]; (void)base;"]


NOTHING = Needs()


@dataclass(frozen=True)
class KernelLaunch:
    """One launch: the number of the kernel, `most` blocks at once (0: all of them), its threads and
    dynamic shared memory, where its buffers are, and its numbers as text. The plain version of the
    kernel has the next number, and is launched where not all holds that the kernel `needs`, of
    buffers by the names that it has for them."""

    kernel: int
    blocks: Expr
    most: int
    threads: int
    dynamic: int
    places: tuple[Place, ...]
    numbers: tuple[str, ...]
    needs: Needs = NOTHING
    names: tuple[str, ...] = ()

    def c(self) -> str:
        blocks, buffers = c_text(self.blocks), range(len(self.places))
        if self.most:
            blocks = f"{blocks} < {self.most} ? {blocks} : {self.most}"
        lines = [f"char *b{n} = {at(place)};" for n, place in enumerate(self.places)]
        lines += [f"long n{n} = {x};" for n, x in enumerate(self.numbers)]
        args = [*(f"&b{n}" for n in buffers), *(f"&n{n}" for n in range(len(self.numbers)))]
        tests = " && ".join(self._tests([f"(long)b{n}" for n in buffers], c_text))
        kernel = f"{self.kernel} + !({tests})" if tests else str(self.kernel)
        lines += [
            f"void *args[] = {{{', '.join(args)}}};", f"const long blocks = {blocks};",
            f"const int kernel = {kernel};",
            "const int failed = blocks > 0 ? cuda.start(cuda.kernels[kernel], blocks, 1, 1, "
            f"{self.threads}, 1, 1, {self.dynamic}, stream, args, 0) : 0;",
            f"if (failed) {{ found[0] = kernel; found[1] = failed; return {FAILED}; }}"]
        return "\n    {" + "\n     ".join(["", *lines]) + " }"

    def python(self) -> str:
        blocks = f"min({self.blocks}, {self.most})" if self.most else str(self.blocks)
        tests = " and ".join(self._tests([f"({at(place)})" for place in self.places], str))
        kernel = f"{self.kernel} + (not ({tests}))" if tests else str(self.kernel)
        return (f"launch({kernel}, {blocks}, {self.threads}, {self.dynamic}, "
                f"[{', '.join(map(at, self.places))}], [{', '.join(self.numbers)}])")

    def _tests(self, addresses: Sequence[str], size: Callable[[Expr], str]) -> list[str]:
        """What must hold for the kernel itself to be launched."""
        return self.needs.tests(dict(zip(self.names, addresses, strict=False)).__getitem__, size)


class Stretches:
    """The text of stretches of `kernels`, and the kernels of their checks."""

    def __init__(self, kernels: Sequence[Func], given: Sequence[Stretch], device: int):
        self.device, self.given = device, given
        self.kernels = {k.name: k for k in kernels}
        self.checks = {(s.name, n): step for s in given for n, step in enumerate(
            (x for x in s.steps if isinstance(x, Checked)), 1)}
        self.numbers = {name: n for n, (name, _) in enumerate(self.names())}

    def names(self) -> list[tuple[str, int]]:
        """Each kernel's name in the source and its bytes of dynamic shared memory."""
        return [(entry(k, plain), launch_shape(k).dynamic) for k in self.kernels.values()
                for plain in (False, True)[:1 + bool(wide_condition(k))]] + [
            (_name(*key), 0) for key in self.checks]

    def check_kernels(self) -> str:
        """CUDA text of the kernels of checks; "" if there are none."""
        texts = [_check_kernel(_name(*key), step) for key, step in self.checks.items()]
        return "\n".join([REPORT, *texts]) if texts else ""

    def c(self) -> str:
        """C text of the stretches."""
        head = HEAD % (len(self.numbers) or 1, self.device)
        return "\n".join([head, *map(self._c, self.given)])

    def _c(self, s: Stretch) -> str:
        return stretches.emit_stretch(s, lambda step: self.start(step).c(),
                                      lambda step, n: self.check(s, step, n).c(), START)

    def python(self) -> dict[str, str]:
        """The body of each stretch in Python, over the addresses p, the sizes and `base`."""
        return {s.name: "\n".join(self._python(s)) for s in self.given}

    def _python(self, s: Stretch) -> Iterator[str]:
        checks = itertools.count(1)
        sizes = "".join(f"{name}, " for name in s.sizes)
        yield f"def {s.name}(p, s, base, launch):"
        yield f"    {sizes}= s" if sizes else "    pass"
        for step in s.steps:
            start = self.start(step) if isinstance(step, Launched) else self.check(
                s, step, next(checks))
            yield f"    {start.python()}"

    def start(self, step: Launched) -> KernelLaunch:
        """The launch of a kernel."""
        kernel = self.kernels[step.kernel]
        shape = launch_shape(kernel)
        return KernelLaunch(
            self.numbers[entry(kernel)], shape.blocks, SM90.cores if shape.stay else 0,
            shape.threads, shape.dynamic, step.places, step.sizes, wide_condition(kernel),
            tuple(v.name for v in buffers_of(kernel)))

    def check(self, s: Stretch, step: Checked, number: int) -> KernelLaunch:
        """The launch of a check."""
        blocks = Expr.of(1)
        for size in step.type.shape:
            blocks = blocks * size
        blocks = (blocks + (THREADS - 1)) // THREADS
        return KernelLaunch(self.numbers[_name(s.name, number)], blocks, 8 * SM90.cores, THREADS, 0,
                     (step.place,), (*_sizes(step), f"base + {number}"))


def _name(stretch: str, number: int) -> str:
    return f"check_{stretch}_{number}"


def _sizes(step: Checked) -> list[str]:
    """The size symbols that a check reads, by name."""
    exprs = (*step.type.shape, *strides_of(step.type), step.low, step.high)
    return sorted({s for e in exprs for s in e.symbols()})


def _check_kernel(name: str, step: Checked) -> str:
    """A kernel that reports an element out of range, if there is one and none was reported yet."""
    count, offset, rest = Expr.of(1), [], "n"
    for size, stride in reversed(list(zip(step.type.shape, strides_of(step.type), strict=True))):
        offset.append(f"{rest} % ({c_text(size)}) * ({c_text(stride)})")
        rest, count = f"{rest} / ({c_text(size)})", count * size
    kind = CudaPrelude().storage(step.type.dtype)
    sizes = "".join(f", long {s}" for s in _sizes(step))
    return f"""\
extern "C" __global__ void {name}(const {kind} *x{sizes}, long site) {{
  for (long n = blockIdx.x * {THREADS}L + threadIdx.x; n < {c_text(count)};
       n += gridDim.x * {THREADS}L) {{
    const long v = x[{' + '.join(offset) or '0'}];
    if (v < {c_text(step.low)} || v >= {c_text(step.high)}) report(site, v, {c_text(step.high)});
  }}
}}
"""
