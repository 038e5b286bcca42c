"""ATen as the rungs below know it: the table of meanings, the oracle, and the operators to call."""

from functools import cache, partial

import torch

from rung.frontends.torch import aten, calls, compat, oracle, titles
from rung.frontends.torch.tensors import HOST, tensors_on
from rung.program.externs import Externs, Profiler


@cache
def torch_on(home: torch.device) -> Externs:
    """ATen for programs that run on a device."""
    return Externs(
        partial(aten.lower, gpu=home != HOST), oracle.run,
        partial(calls.callee, home=home), tensors_on(home),
        lambda: f"{torch.__version__} {home}", calls.gives_one, calls.text, titles.title,
        ("aten", *compat.libraries()),
        Profiler(compat.PROFILER, compat.is_profiled, compat.recorded))


TORCH = torch_on(HOST)
