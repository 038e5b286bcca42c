"""What the first call of `floor(x) + 1` costs in a new process, with cold and warm caches.

`measure(backend)` starts `python -m rung.tools.first_call BACKEND` twice in a cache folder that is
empty at first. From the call on: wall seconds, and CPU seconds of the process and of the compilers
that it started. Importing torch, and what torch.compile itself imports, is counted apart.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from time import perf_counter
from typing import Any

from rung.core.errors import RungError

LIMIT = 300  # seconds after which the process is given up


class FirstCallError(RungError):
    """The process failed."""


def measure(backend: str) -> dict[str, float]:
    """`wall`, `cpu` and `import` seconds of a backend (rung, inductor or eager) with a cold cache,
    and `warm_wall`, `warm_cpu` in the next process."""
    with tempfile.TemporaryDirectory(prefix="rung-first-") as cold:
        # one compile thread: Inductor's pool would outlive the call and hide its CPU time
        settings = [f"RUNG_CACHE_DIR={cold}/rung", f"TORCHINDUCTOR_CACHE_DIR={cold}/inductor",
                    "TORCHINDUCTOR_COMPILE_THREADS=1", "RUNG_FRESH=0"]
        command = ["env", *settings, sys.executable, "-m", "rung.tools.first_call", backend]
        first, second = _run(command), _run(command)
    return {**first, "warm_wall": second["wall"], "warm_cpu": second["cpu"]}


def _run(command: list[str]) -> dict[str, float]:
    run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    if run.returncode:
        raise FirstCallError(f"the first call under {command[-1]} failed:\n{run.stderr.strip()}")
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def _cpu() -> float:
    """CPU seconds of this process and of its children that have ended."""
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


def _measured(backend: str) -> dict[str, Any]:
    start = perf_counter()
    import torch
    import torch._dynamo

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.floor(x) + 1

    x = torch.randn(1024, 1024)
    compiled = function if backend == "eager" else torch.compile(function, backend=backend)
    imported, wall, cpu = perf_counter() - start, perf_counter(), _cpu()
    y = compiled(x)
    wall, cpu = perf_counter() - wall, _cpu() - cpu
    assert torch.equal(y, function(x)), "wrong result"
    return {"wall": wall, "cpu": cpu, "import": imported}


if __name__ == "__main__":
    print(json.dumps(_measured(sys.argv[1])))
