"""C source to a shared library, through the system's compiler and a cache on disk.

A library is found by the hash of all that it depends on: source, flags, compiler. Entries appear
by rename, carry the hash of their content, and are built anew where that does not fit; so
processes that build the same library at the same time do no harm.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from rung.core import trace
from rung.core.config import Settings
from rung.core.errors import TargetCompileError
from rung.targets.cpu.machine import FLAGS

COMMON = ("-std=gnu11", "-O2", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off",
          "-shared", "-fPIC", "-Wno-psabi", "-Wno-unknown-warning-option")
NO_COMPILER = """no C compiler was found: set RUNG_CC, or install one
  Debian and Ubuntu: apt-get install gcc
  without root:      pip install ziglang"""


def build(source: str, machine: str) -> Path:
    """The library of `source` for a CPU of this name; TargetCompileError if there is none."""
    return _library(source, (*compiler(), *COMMON, *FLAGS[machine],
                             *(("-fopenmp",) if openmp() else ())), (*openmp(), "-lm"))


def build_extension(source: str, headers: Path) -> Path:
    """The library of an extension module of the Python whose headers these are."""
    return _library(source, (*compiler(), *COMMON, f"-I{headers}"), ())


def _library(source: str, command: Sequence[str], libraries: Sequence[str]) -> Path:
    key = sha256("\0".join([source, *command, *libraries, version()]).encode()).hexdigest()
    library = folder() / f"{key}.so"
    if keep := Settings.from_environment().keep:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{key[:16]}.c").write_text(source)
    found = is_whole(library)
    trace.emit("fired" if found else "declined", "cache", key)
    if not found:
        _compile(source, command, libraries, library)
    return library


def is_whole(library: Path) -> bool:
    """Whether a file of the cache is what its builder wrote."""
    try:
        return _sidecar(library).read_text() == sha256(library.read_bytes()).hexdigest()
    except (OSError, UnicodeDecodeError):
        return False


def _sidecar(library: Path) -> Path:
    return library.with_suffix(".sha256")


def folder() -> Path:
    """The cache's folder, readable by this user alone; a fresh one if it cannot be made."""
    path = Settings.from_environment().cache_dir / "cpu"
    try:
        for step in (path.parent, path):
            step.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_uid == os.getuid() and os.access(path, os.W_OK):
            return path
    except OSError as error:
        trace.emit("declined", "cache", str(path), str(error))
    return _scratch()


@cache
def _scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="rung-"))


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


def _compile(source: str, command: Sequence[str], libraries: Sequence[str],
             library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        text, made, note = (Path(work, f"kernels.{kind}") for kind in ("c", "so", "sha256"))
        text.write_text(source)
        line = [*command, str(text), *libraries, "-o", str(made)]
        run = subprocess.run(line, capture_output=True, text=True, check=False)
        if run.returncode:
            raise _refused(source, run, line, library)
        note.write_text(sha256(made.read_bytes()).hexdigest())
        os.replace(made, library)
        os.replace(note, _sidecar(library))


def _refused(source: str, run: subprocess.CompletedProcess[str], line: list[str],
             library: Path) -> TargetCompileError:
    """The error for a source that the compiler refuses; the source stays in the cache's folder."""
    kept = library.with_suffix(".c")
    kept.write_text(source)
    first = next((x for x in run.stderr.splitlines() if "error" in x), run.stderr.strip())
    command = shlex.join(str(kept) if word.endswith("kernels.c") else word for word in line)
    return TargetCompileError(f"{first}\n  source: {kept}\n  command: {command}", str(kept),
                              run.stderr, command)
