"""C source to a shared library, through the system's compiler and a cache on disk.

A library is found by the hash of all that it depends on: sources, flags, compiler. `core.store`
keeps it, so that processes that build the same library at the same time do no harm.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from rung.core import store, trace
from rung.core.config import Settings
from rung.core.errors import TargetCompileError
from rung.targets.cpu.machine import FLAGS

COMMON = ("-std=gnu11", "-O2", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off",
          "-shared", "-fPIC", "-Wno-psabi", "-Wno-unknown-warning-option")
NO_COMPILER = """no C compiler was found: set RUNG_CC, or install one
  Debian and Ubuntu: apt-get install gcc
  without root:      pip install ziglang"""


def build(sources: Sequence[str], machine: str) -> Path:
    """The library of C sources for a CPU of this name, compiled at the same time;
    TargetCompileError if there is none."""
    return _library(sources, command_for(machine), (*openmp(), "-lm"))


def command_for(machine: str) -> tuple[str, ...]:
    """The compiler and its flags for a CPU of this name."""
    return (*compiler(), *COMMON, *FLAGS[machine], *(("-fopenmp",) if openmp() else ()))


def build_extension(source: str, headers: Path) -> Path:
    """The library of an extension module of the Python whose headers these are."""
    return _library([source], (*compiler(), *COMMON, f"-I{headers}"), ())


def _library(sources: Sequence[str], command: Sequence[str], libraries: Sequence[str]) -> Path:
    key = sha256("\0".join([*sources, *command, *libraries, version()]).encode()).hexdigest()
    library = folder() / f"{key}.so"
    if keep := Settings.from_environment().keep:
        keep.mkdir(parents=True, exist_ok=True)
        for n, source in enumerate(sources):
            (keep / f"{key[:16]}{f'_{n}' if n else ''}.c").write_text(source)
    found = is_whole(library)
    trace.emit("fired" if found else "declined", "cache", key)
    return library if found else _compile(sources, command, libraries, library)


def is_whole(library: Path) -> bool:
    """Whether a file of the cache is what its builder wrote."""
    return store.read(library) is not None


def folder() -> Path:
    """The cache's folder, readable by this user alone; a fresh one if it cannot be used."""
    return store.folder("cpu")


# --- the compiler

def compiler() -> tuple[str, ...]:
    """The command of the C compiler; TargetCompileError tells how to get one."""
    return _compiler(Settings.from_environment().cc)


@cache
def _compiler(asked: str) -> tuple[str, ...]:
    words = tuple(shlex.split(asked))
    if words and shutil.which(words[0]):
        return words
    if words:
        raise TargetCompileError(f"the C compiler {asked!r} is not on the PATH", command=asked)
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return (name,)
    if find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "cc")
    raise TargetCompileError(NO_COMPILER)


def version() -> str:
    """What the compiler says that it is."""
    return _version(compiler())


@cache
def _version(command: tuple[str, ...]) -> str:
    run = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return run.stdout


def openmp() -> tuple[str, ...]:
    """What links the OpenMP library of this process, torch's, instead of loading another.

    It comes before the compiler's own, which is then not needed. Clang's OpenMP speaks to another
    library than GCC's; its kernels run on one thread.
    """
    loaded = _loaded("libgomp")
    return ("-Wl,--as-needed", loaded) if loaded and "Free Software" in version() else ()


def _loaded(name: str) -> str:
    """The path of a library of this process, or ""."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ""
    paths = (line.split(maxsplit=5)[-1] for line in lines)
    return next((p for p in paths if Path(p).name.startswith(name)), "")


def _compile(sources: Sequence[str], command: Sequence[str], libraries: Sequence[str],
             library: Path) -> Path:
    """Where the library lies after it was made, each source by a compiler of its own."""
    try:
        with tempfile.TemporaryDirectory(prefix="rung-") as work:
            made = Path(work, "library.so")
            lines = []
            for n, source in enumerate(sources):
                Path(work, f"kernels{n}.c").write_text(source)
                lines.append([*command, "-c", f"{work}/kernels{n}.c", "-o", f"{work}/kernels{n}.o"])
            link = [*command, *(f"{work}/kernels{n}.o" for n in range(len(sources))), *libraries]
            if len(sources) == 1:
                lines, link = [], [*command, f"{work}/kernels0.c", *libraries]
            with ThreadPoolExecutor(os.cpu_count()) as several:
                for source, run in zip(sources, several.map(_run, lines), strict=False):
                    _refuse(run, source, library)
            _refuse(_run([*link, "-o", str(made)]), sources[0], library)
            return store.write(library, made.read_bytes())
    except OSError as error:
        raise TargetCompileError(f"no kernel could be compiled: {error}") from None


def _run(line: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, capture_output=True, text=True, check=False)


def _refuse(run: subprocess.CompletedProcess[str], source: str, library: Path) -> None:
    """The error of a source that the compiler refused; the source and the compiler's words stay in
    the cache's folder."""
    if not run.returncode:
        return
    kept, log = library.with_suffix(".c"), library.with_suffix(".log")
    kept.write_text(source)
    first = next((x for x in run.stderr.splitlines() if "error" in x),
                 run.stderr.strip() or f"the C compiler ended with code {run.returncode}")
    command = shlex.join(str(kept) if w.endswith(".c") else w for w in run.args)
    log.write_text(f"{command}\n{run.stderr}")
    raise TargetCompileError(f"{first}\n  source: {kept}\n  log: {log}\n  command: {command}",
                             str(kept), run.stderr, command)
