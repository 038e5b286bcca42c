"""What the first call costs in a new process, with cold and warm caches.

`measure(backend, model)` starts `python -m rung.tools.first_call BACKEND MODEL cpu` twice in a
cache folder that is empty at first; without a model it is `floor(x) + 1` that is called. `cuda` for
`cpu` runs a case of `gpu_cases`, and `quick` its tiny size without a GPU. From the call on: wall
seconds, and CPU seconds of the process and of the compilers that it started. Importing torch, and
what torch.compile itself imports, is counted apart.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

from rung.core import store
from rung.core.errors import RungError

LIMIT = 300  # seconds after which the process is given up


class FirstCallError(RungError):
    """The process failed."""


def measure(backend: str, model: str = "", where: str = "cpu") -> dict[str, float]:
    """`wall`, `cpu` and `import` seconds of a backend (rung, inductor or eager) with a cold cache,
    and `warm_wall`, `warm_cpu` in the next process."""
    with store.workplace() as cold:
        settings = [f"RUNG_CACHE_DIR={cold}/rung", f"TORCHINDUCTOR_CACHE_DIR={cold}/inductor",
                    f"CUDA_CACHE_PATH={cold}/cuda", "RUNG_FRESH=0"]
        if where == "cpu":  # one compile thread: Inductor's pool would outlive the call and hide
            settings.append("TORCHINDUCTOR_COMPILE_THREADS=1")  # its CPU time
        command = ["env", *settings, sys.executable, "-m", "rung.tools.first_call", backend, model,
                   where]
        first, second = _run(command), _run(command)
    return {**first, "warm_wall": second["wall"], "warm_cpu": second["cpu"]}


def _run(command: list[str]) -> dict[str, float]:
    run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    if run.returncode:
        raise FirstCallError(f"the first call under {command[-3]} failed:\n{run.stderr.strip()}")
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def _cpu() -> float:
    """CPU seconds of this process and of its children that have ended."""
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


def _measured(backend: str, model: str, where: str) -> dict[str, Any]:
    start = perf_counter()
    import torch
    import torch._dynamo

    import rung.entry  # noqa: F401  it registers the backend where Rung is not installed

    function, args = _built(model, where)
    compiled = function if backend == "eager" else torch.compile(function, backend=backend)
    wait: Callable[[], None] = torch.cuda.synchronize if where == "cuda" else lambda: None
    bound = 1e-3
    if where != "cpu":  # bf16; torch's own libraries are loaded before the call, as in a session
        bound = 5e-2
        with torch.no_grad():
            function(*args)
        wait()
    imported, wall, cpu = perf_counter() - start, perf_counter(), _cpu()
    with torch.no_grad():
        y = compiled(*args)
        wait()
    wall, cpu = perf_counter() - wall, _cpu() - cpu
    with torch.no_grad():
        torch.testing.assert_close(y, function(*args), rtol=bound, atol=bound)
    return {"wall": wall, "cpu": cpu, "import": imported}


def _built(model: str, where: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if where != "cpu":
        from rung.tools.gpu_cases import NAMED

        return NAMED[model].build(where == "quick", "cpu" if where == "quick" else where)
    from rung.tools import benchmarks

    build = benchmarks.forward(benchmarks.Variant(model)) if model else benchmarks.pointwise
    return build(False)


if __name__ == "__main__":
    print(json.dumps(_measured(*sys.argv[1:])))
