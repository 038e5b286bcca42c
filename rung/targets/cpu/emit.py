"""C source of a set of kernels for the CPU: one translation unit that includes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from rung.core.op import Func
from rung.kernel.ir import For
from rung.targets.c_family import Prelude
from rung.targets.emit import Emitter, Style


class CpuEmitter(Emitter):
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


def emit(kernels: Sequence[Func]) -> str:
    """One source for all kernels; `run_NAME(buffers..., sizes...)` is each one's function.

    The prefix keeps a kernel called `floor` apart from the C library's.
    """
    prelude = Prelude()
    style = Style(head="void run_{name}({params})")
    bodies = [CpuEmitter(k, prelude, style).source() for k in kernels]
    return prelude.text() + "\n" + "\n\n".join(bodies) + "\n"
