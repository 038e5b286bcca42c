"""ATen as the rungs below know it: the table of meanings, the oracle, and the operators to call."""

import torch

from rung.frontends.torch import aten, calls, compat, oracle, titles
from rung.frontends.torch.tensors import TENSORS
from rung.program.externs import Externs, Profiler

TORCH = Externs(
    aten.lower, oracle.run, calls.callee, TENSORS, lambda: str(torch.__version__), calls.gives_one,
    calls.text, titles.title, ("aten", *compat.libraries()),
    Profiler(compat.PROFILER, compat.is_profiled, compat.recorded))
