"""C text of stretches: what the targets share whose stretches are called in a C library."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from rung.core.expr import Expr, to_source
from rung.targets.base import strides_of
from rung.targets.device import Checked, Launched, Place, Stretch


def emit_stretch(stretch: Stretch, launched: Callable[[Launched], str],
                 checked: Callable[[Checked, int], str], start: Sequence[str] = ()) -> str:
    """Three functions of a stretch: one that runs it, after the statements of `start`, `step_NAME`,
    which runs it from a step on or that step alone, and `layout_NAME`, which writes the sizes and
    strides of its tensors, one after the other.

    `launched(step)` and `checked(step, number)` are the statements of a step, which may return an
    error word.
    """
    tensors = (*stretch.given, *stretch.made)
    sizes = [f"  const long {s} = s[{n}]; (void){s};" for n, s in enumerate(stretch.sizes)]
    checks = itertools.count(1)
    steps = [launched(step) if isinstance(step, Launched) else checked(step, next(checks))
             for step in stretch.steps]
    return "\n".join([
        f"void layout_{stretch.name}(const long *s, long *d) {{", *sizes,
        *_layout([e for t in tensors for e in (*t.shape, *strides_of(t))]), "}", "",
        f"long step_{stretch.name}(char *const *p, const long *s, long *found, long n, int one) {{",
        *sizes, *start, "  switch (n) {",
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
    return [*(copy if numbers else []), *(f"  d[{n}] = {c_text(e)};" for n, e in enumerate(numbers)
                                          if e.const_value is None)]


def at(place: Place) -> str:
    """The address of a buffer, as C or Python."""
    number, skip = place
    return f"p[{number}] + {skip}" if skip else f"p[{number}]"


def c_text(e: Expr) -> str:
    """An expression of size symbols in C."""
    return to_source(e, lambda name: name)
