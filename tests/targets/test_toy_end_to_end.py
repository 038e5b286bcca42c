"""torch.compile on the toy machine: kernels, transfers and all, run on NumPy."""

from __future__ import annotations

import torch

from rung.tools import benchmarks


def test_cache_step_runs_on_the_toy_machine() -> None:
    fn, args = benchmarks.cache_step(quick=True)
    copies = [t.clone() for t in args]
    options = {"strict": True, "target": "toy"}
    with torch.no_grad():
        got = torch.compile(fn, backend="rung", options=options)(*args)
        want = fn(*copies)
    torch.testing.assert_close(got, want)
    for mine, eagers in zip(args, copies, strict=True):
        torch.testing.assert_close(mine, eagers)
