"""C source of kernels and stretches for the CPU: one translation unit that includes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rung.core.expr import Expr, to_source
from rung.core.op import Func
from rung.kernel.ir import For
from rung.targets.base import strides_of
from rung.targets.c_family import Prelude
from rung.targets.cpu.groups import CpuPrelude, GroupEmitter
from rung.targets.device import Checked, Launched, Place, Stretch
from rung.targets.emit import Style


class CpuEmitter(GroupEmitter):
    """Parallel loops become OpenMP loops; only the outermost one is shared among threads."""

    open_cores = 0

    def open_loop(self, op: For, end: str) -> None:
        if op.level == "core":
            if not self.open_cores:
                self.line("#pragma omp parallel for schedule(static)")
            self.open_cores += 1
        super().open_loop(op, end)

    def close_loop(self, op: For) -> None:
        super().close_loop(op)
        self.open_cores -= op.level == "core"


HEAD = "void run_{name}({params})"
"""The prefix keeps a kernel called `floor` apart from the C library's."""


def emit(kernels: Sequence[Func]) -> str:
    """One source for all kernels; `run_NAME(buffers..., sizes...)` is each one's function."""
    prelude, style = CpuPrelude(), Style(head=HEAD)
    bodies = [CpuEmitter(k, prelude, style).source() for k in kernels]
    return prelude.text() + "\n" + "\n\n".join(bodies) + "\n"


UNIT = 1 << 16
"""Characters of source that are worth a run of the compiler of their own."""


def emit_units(kernels: Sequence[Func], source: str, stretches: Sequence[Stretch]) -> list[str]:
    """The sources of a library of kernels, whose one source this is, and stretches: several of
    about equal length where that is long, so that they are compiled at the same time."""
    count = min(1 + len(source) // UNIT, len(kernels) or 1)
    calls = [f"void run_{k.name}();" for k in kernels] if count > 1 else []
    ends = "\n".join([*calls, *map(emit_stretch, stretches)])
    if count == 1:
        return [f"{source}\n{ends}"]
    start = "\n" + HEAD.partition("{")[0]
    prelude, *bodies = source.split(start)
    bodies.sort(key=len, reverse=True)
    return [*(start.join([prelude, *bodies[n::count]]) for n in range(count)), ends]


# --- stretches

def emit_stretch(stretch: Stretch) -> str:
    """Three functions of a stretch: one that runs it, `step_NAME`, which runs it from a step on or
    that step alone, and `layout_NAME`, which writes the sizes and strides of its tensors, one after
    the other."""
    tensors = (*stretch.given, *stretch.made)
    sizes = [f"  const long {s} = s[{n}]; (void){s};" for n, s in enumerate(stretch.sizes)]
    checks = itertools.count(1)
    steps = [_launched(step) if isinstance(step, Launched) else _checked(step, next(checks))
             for step in stretch.steps]
    return "\n".join([
        f"void layout_{stretch.name}(const long *s, long *d) {{", *sizes,
        *_layout([e for t in tensors for e in (*t.shape, *strides_of(t))]), "}", "",
        f"long step_{stretch.name}(char *const *p, const long *s, long *found, long n, int one) {{",
        *sizes, "  switch (n) {",
        *(f"  case {n}:{step} if (one) break;" for n, step in enumerate(steps)), "  }",
        "  return 0;", "}", "",
        f"long {stretch.name}(char *const *p, const long *s, long *found) {{",
        f"  return step_{stretch.name}(p, s, found, 0, 0);", "}", ""])


def _layout(numbers: Sequence[Expr]) -> list[str]:
    """Statements that write `numbers` to `d`: known ones from a table, since compilers take long
    for many lines."""
    known = ", ".join(str(e.const_value or 0) for e in numbers)
    copy = [f"  static const long known[] = {{{known}}};",
            f"  for (long n = 0; n < {len(numbers)}; n++) d[n] = known[n];"]
    return [*(copy if numbers else []), *(f"  d[{n}] = {_c(e)};" for n, e in enumerate(numbers)
                                          if e.const_value is None)]


def _launched(step: Launched) -> str:
    args = [f"(void *)({_at(p)})" for p in step.places] + list(step.sizes)
    return f"  run_{step.kernel}({', '.join(args)});"


def _checked(step: Checked, site: int) -> str:
    """The error word of the first element that is out of range."""
    axes = [f"i{n}" for n in range(len(step.type.shape))]
    offset = " + ".join(f"{a} * ({_c(e)})" for a, e in zip(axes, strides_of(step.type),
                                                           strict=True)) or "0"
    loops = [f"  for (long {a} = 0; {a} < {_c(size)}; {a}++)"
             for a, size in zip(axes, step.type.shape, strict=True)]
    kind = Prelude().storage(step.type.dtype)
    body = (f"  {{ const long v = ((const {kind} *)({_at(step.place)}))[{offset}]; "
            f"if (v < {_c(step.low)} || v >= {_c(step.high)}) "
            f"{{ found[0] = v; found[1] = {_c(step.high)}; return {site}; }} }}")
    return "\n".join([*loops, body])


def _at(place: Place) -> str:
    number, skip = place
    return f"p[{number}] + {skip}" if skip else f"p[{number}]"


def _c(e: Expr) -> str:
    return to_source(e, lambda name: name)
