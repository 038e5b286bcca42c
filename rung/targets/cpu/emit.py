"""C source of kernels and stretches for the CPU: one translation unit that includes nothing."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from rung.core.expr import Expr, to_source
from rung.core.op import Func
from rung.kernel.ir import For
from rung.targets import stretch as stretches
from rung.targets.base import strides_of
from rung.targets.c_family import Prelude
from rung.targets.cpu.groups import CpuPrelude, GroupEmitter
from rung.targets.cpu.sized import marked, sized, skeleton
from rung.targets.device import Checked, Launched, Stretch
from rung.targets.emit import Style, dealt
from rung.targets.stretch import at, c_text


class CpuEmitter(GroupEmitter):
    """Parallel loops become OpenMP loops; only the outermost one is shared among threads."""

    open_cores = 0

    def c(self, expr: Expr) -> str:
        return to_source(expr, str, marked if self.func.attr("like") else str)

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
    groups: dict[Hashable, list[tuple[Func, str]]] = {}
    for kernel in kernels:
        text, like = CpuEmitter(kernel, prelude, style).source(), kernel.attr("like")
        groups.setdefault((like, *skeleton(text)) if like else kernel, []).append((kernel, text))
    names = {k.name for k in kernels}
    bodies = [sized(group, names) for group in groups.values()]
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
    return [*dealt(source, "\n" + HEAD.partition("{")[0], count), ends]


# --- stretches

def emit_stretch(stretch: Stretch) -> str:
    """The functions of a stretch in C."""
    return stretches.emit_stretch(stretch, _launched, _checked)


def _launched(step: Launched) -> str:
    args = [f"(void *)({at(p)})" for p in step.places] + list(step.sizes)
    return f"  run_{step.kernel}({', '.join(args)});"


def _checked(step: Checked, site: int) -> str:
    """The error word of the first element that is out of range."""
    axes = [f"i{n}" for n in range(len(step.type.shape))]
    offset = " + ".join(f"{a} * ({c_text(e)})" for a, e in zip(axes, strides_of(step.type),
                                                           strict=True)) or "0"
    loops = [f"  for (long {a} = 0; {a} < {c_text(size)}; {a}++)"
             for a, size in zip(axes, step.type.shape, strict=True)]
    kind = Prelude().storage(step.type.dtype)
    body = (f"  {{ const long v = ((const {kind} *)({at(step.place)}))[{offset}]; "
            f"if (v < {c_text(step.low)} || v >= {c_text(step.high)}) "
            f"{{ found[0] = v; found[1] = {c_text(step.high)}; return {site}; }} }}")
    return "\n".join([*loops, body])
