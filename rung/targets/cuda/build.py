"""CUDA source to a cubin with nvcc; the log has each kernel's registers, spills and notices."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rung.core.errors import TargetCompileError

FLAGS = ("-cubin", "-std=c++17", "-fmad=false", "-Xptxas", "-v")
NOTICES = ("C7508", "C7511")  # ptxas ignored setmaxnreg, or serialised wgmma


@dataclass(frozen=True)
class Cubin:
    """What nvcc made of one source, and what ptxas said about it."""

    path: Path
    log: str

    def spills(self) -> list[str]:
        """Lines of the log that tell of spilled registers or of a serious notice."""
        lines = self.log.splitlines()
        spilled = [x.strip() for x in lines if "bytes spill loads" in x
                   and " 0 bytes spill loads" not in x]
        return spilled + [x.strip() for x in lines if any(n in x for n in NOTICES)]


def nvcc() -> str | None:
    """The compiler on PATH or in CUDA's usual folder; None if there is none."""
    usual = Path("/usr/local/cuda/bin/nvcc")
    return shutil.which("nvcc") or (str(usual) if usual.exists() else None)


def build(source: str, folder: Path, name: str = "kernels", arch: str = "sm_90a") -> Cubin:
    """Compile for one architecture; raises TargetCompileError with source path, log and command."""
    compiler = nvcc()
    path, out = folder / f"{name}.cu", folder / f"{name}.cubin"
    path.write_text(source)
    if compiler is None:
        raise TargetCompileError("no nvcc was found: install the CUDA toolkit", str(path))
    command = [compiler, *FLAGS, f"-arch={arch}", "-o", str(out), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    log = done.stdout + done.stderr
    if done.returncode:
        raise TargetCompileError(f"nvcc refused {path}:\n{log[-2000:]}", str(path), log,
                                 shlex.join(command))
    return Cubin(out, log)
