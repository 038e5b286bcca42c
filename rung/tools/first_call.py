"""What the first call costs in a new process, with cold and warm caches.

`measure(backend, model)` starts `python -m rung.tools.first_call BACKEND MODEL` twice in a cache
folder that is empty at first; without a model it is `floor(x) + 1` that is called. From the call
on: wall seconds, and CPU seconds of the process and of the compilers that it started. Importing
torch, and what torch.compile itself imports, is counted apart.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from time import perf_counter
from typing import Any

from rung.core import store
from rung.core.errors import RungError

LIMIT = 300  # seconds after which the process is given up


class FirstCallError(RungError):
    """The process failed."""


def measure(backend: str, model: str = "") -> dict[str, float]:
    """`wall`, `cpu` and `import` seconds of a backend (rung, inductor or eager) with a cold cache,
    and `warm_wall`, `warm_cpu` in the next process."""
    with store.workplace() as cold:
        # one compile thread: Inductor's pool would outlive the call and hide its CPU time
        settings = [f"RUNG_CACHE_DIR={cold}/rung", f"TORCHINDUCTOR_CACHE_DIR={cold}/inductor",
                    "TORCHINDUCTOR_COMPILE_THREADS=1", "RUNG_FRESH=0"]
        command = ["env", *settings, sys.executable, "-m", "rung.tools.first_call", backend, model]
        first, second = _run(command), _run(command)
    return {**first, "warm_wall": second["wall"], "warm_cpu": second["cpu"]}


def _run(command: list[str]) -> dict[str, float]:
    run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    if run.returncode:
        raise FirstCallError(f"the first call under {command[-2]} failed:\n{run.stderr.strip()}")
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def _cpu() -> float:
    """CPU seconds of this process and of its children that have ended."""
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


def _measured(backend: str, model: str) -> dict[str, Any]:
    start = perf_counter()
    import torch
    import torch._dynamo

    from rung.tools import benchmarks

    build = benchmarks.forward(benchmarks.Variant(model)) if model else benchmarks.pointwise
    function, args = build(False)
    compiled = function if backend == "eager" else torch.compile(function, backend=backend)
    imported, wall, cpu = perf_counter() - start, perf_counter(), _cpu()
    with torch.no_grad():
        y = compiled(*args)
    wall, cpu = perf_counter() - wall, _cpu() - cpu
    with torch.no_grad():
        torch.testing.assert_close(y, function(*args), rtol=1e-3, atol=1e-3)
    return {"wall": wall, "cpu": cpu, "import": imported}


if __name__ == "__main__":
    print(json.dumps(_measured(*sys.argv[1:])))
