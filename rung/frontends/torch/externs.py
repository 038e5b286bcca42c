"""ATen as the rungs below know it: the table of meanings, the oracle, and the operators to call."""

from rung.frontends.torch import aten, calls, compat, oracle, titles
from rung.program.externs import Externs

TORCH = Externs(aten.lower, oracle.run, calls.callee, calls.gives_one, calls.text, titles.title,
                compat.PROFILER, compat.is_profiled, compat.recorded)
