"""CUDA source to cubins, with NVRTC or nvcc; the log has registers, spills and notices.

Cubins are kept in the cache by the hash of source, compiler and options.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from rung.core import store, trace
from rung.core.errors import TargetCompileError
from rung.targets.cuda import nvrtc

KIND = "cuda"  # the cache's folder
ARCH = "sm_90a"
OPTIONS = ("-std=c++17", "-fmad=false", "-lineinfo")
NOTICES = ("C7508", "C7511")  # ptxas ignored setmaxnreg, or serialised wgmma
NO_COMPILER = ("no CUDA compiler was found: install a CUDA build of torch, which brings NVRTC, or "
               "the CUDA toolkit")


@dataclass(frozen=True)
class Cubin:
    """What a compiler made of one source, and what ptxas said about it."""

    path: Path
    log: str

    def spills(self) -> list[str]:
        """Lines of the log that tell of spilled registers or of a serious notice."""
        lines = self.log.splitlines()
        spilled = [x.strip() for x in lines if "bytes spill loads" in x
                   and " 0 bytes spill loads" not in x]
        return spilled + [x.strip() for x in lines if any(n in x for n in NOTICES)]


def nvcc() -> str | None:
    """nvcc on PATH or in CUDA's usual folder; None if there is none."""
    usual = Path("/usr/local/cuda/bin/nvcc")
    return shutil.which("nvcc") or (str(usual) if usual.exists() else None)


def command(source: Path, out: Path, arch: str = ARCH) -> list[str]:
    """The command that compiles a file; TargetCompileError if there is no compiler."""
    if library := nvrtc.library():
        return [sys.executable, "-I", nvrtc.__file__, library, str(source), str(out),
                f"-arch={arch}", "--ptxas-options=-v", *OPTIONS]
    if found := nvcc():
        virtual = arch.replace("sm", "compute")
        return [found, "-cubin", f"-gencode=arch={virtual},code={arch}", "-Xptxas", "-v",
                *OPTIONS, "-o", str(out), str(source)]
    raise TargetCompileError(NO_COMPILER, str(source))


@cache
def version() -> str:
    """Which compiler there is, "" if there is none."""
    if library := nvrtc.library():
        return "NVRTC {}.{}".format(*nvrtc.version(library))
    found = nvcc()
    return subprocess.run([found, "--version"], capture_output=True, text=True,
                          check=False).stdout if found else ""


def build(source: str, folder: Path, name: str = "kernels", arch: str = ARCH) -> Cubin:
    """Compile; raises TargetCompileError with source path, log and command."""
    path, out = folder / f"{name}.cu", folder / f"{name}.cubin"
    path.write_text(source)
    line = command(path, out, arch)
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    log = done.stdout + done.stderr
    if done.returncode:
        kept = store.write(KIND, f"{_key(source, arch)}.cu", source.encode()).path
        first = next((x for x in log.splitlines() if "error" in x), log.strip())
        raise TargetCompileError(f"{first}\n  source: {kept}", str(kept), log, shlex.join(line))
    return Cubin(out, log)


def cubins(sources: Sequence[str], arch: str = ARCH) -> list[str]:
    """The names in the cache of the cubins of several sources, compiled at the same time."""
    with ThreadPoolExecutor(os.cpu_count()) as several:
        return list(several.map(lambda source: _kept(source, arch), sources))


def _kept(source: str, arch: str) -> str:
    name = f"{_key(source, arch)}.cubin"
    found = store.find(KIND, name)
    trace.emit("fired" if found else "declined", "cache", name)
    if not found:
        with store.workplace() as work:
            store.write(KIND, name, build(source, work, arch=arch).path.read_bytes())
    return name


def _key(source: str, arch: str) -> str:
    return sha256("\0".join([source, version(), arch, *OPTIONS]).encode()).hexdigest()
