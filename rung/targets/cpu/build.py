"""C source to a shared library, through the system's compiler and a cache on disk.

A library is found by the hash of all that it depends on: sources, flags, compiler. `core.store`
keeps it, so that processes that build the same library at the same time do no harm.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from rung.core import store, trace
from rung.core.config import Settings
from rung.core.errors import TargetCompileError
from rung.core.machine import Machine
from rung.targets.cpu.machine import flags

COMMON = ("-std=gnu11", "-O2", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off",
          "-fno-tree-vectorize", "-fno-tree-slp-vectorize",  # gcc 12.2's halve sums of conversions
          "-shared", "-fPIC", "-Wno-psabi", "-Wno-unknown-warning-option")
KIND = "cpu"  # the cache's folder
RECORD = "compiler", "last.json"  # the entry that says which compiler fills the cache
ROOM = 4 << 20  # bytes that compiling needs at least
NO_COMPILER = """no C compiler was found: set RUNG_CC, or install one
  Debian and Ubuntu: apt-get install gcc
  without root:      pip install ziglang"""


def build(sources: Sequence[str], machine: Machine) -> Path:
    """The library of C sources for a CPU, compiled at the same time;
    TargetCompileError if there is none."""
    return _library(sources, command_for(machine), (*openmp(), "-lm"))


def command_for(machine: Machine) -> tuple[str, ...]:
    """The compiler and its flags for a CPU."""
    return (*_known()[0], *COMMON, *flags(machine), *(("-fopenmp",) if openmp() else ()))


def build_plain(source: str, *flags: str) -> Path:
    """The library of a source without kernels, which any CPU of this kind runs."""
    return _library([source], (*_known()[0], *COMMON, *flags), ())


def build_cpp(source: str, options: Sequence[str], libraries: Sequence[str], least: str) -> Path:
    """The library of one C++ source, by the C compiler, which knows C++ where that is installed;
    `least` is the shortest source that these options take."""
    return _library([source], (*_known()[0], "-x", "c++", *options), libraries, least)


def _library(sources: Sequence[str], command: Sequence[str], libraries: Sequence[str],
             least: str = "") -> Path:
    key = sha256("\0".join([*sources, *command, *libraries, version()]).encode()).hexdigest()
    if keep := Settings.from_environment().keep:
        keep.mkdir(parents=True, exist_ok=True)
        for n, source in enumerate(sources):
            (keep / f"{key[:16]}{f'_{n}' if n else ''}.c").write_text(source)
    found = find(f"{key}.so")
    trace.emit("fired" if found else "declined", "cache", key)
    return found or _compile(sources, command, libraries, f"{key}.so", least)


def find(library: str) -> Path | None:
    """Where a library of this name can be loaded from; None if there is none that can be."""
    entry = store.find(KIND, library)
    return _loadable(entry)[0] if entry else None


def _loadable(entry: store.Entry) -> tuple[Path | None, str]:
    """Where a library can be loaded from, which is a copy where its folder is mounted noexec; or
    None, and why it cannot."""
    if not (why := _unloadable(entry.path)):
        return entry.path, ""
    with suppress(OSError):
        copy = store.own(entry)
        if not _unloadable(copy.path):
            store.warn(f"cannot be loaded from: {why}")
            return copy.path, ""
    return None, why


def _unloadable(library: Path) -> str:
    """Why a library cannot be loaded; "" if it can."""
    try:
        ctypes.CDLL(str(library))
        return ""
    except OSError as error:
        return str(error)


# --- the compiler

def compiler() -> tuple[str, ...]:
    """The command of the C compiler; TargetCompileError tells how to get one."""
    return _compiler(Settings.from_environment().cc)


def _known() -> tuple[tuple[str, ...], str]:
    """The compiler's command and version; on a machine without one, as in an image that has a warm
    cache, those of the compiler that filled the cache."""
    try:
        return compiler(), _version(compiler())
    except TargetCompileError:
        entry = store.find(*RECORD)
        if entry is None:
            raise
        command, version = json.loads(entry.content)
        return tuple(command), version


def _record() -> None:
    """Keep which compiler fills the cache."""
    content = json.dumps(_known()).encode()
    with suppress(OSError):
        if (entry := store.find(*RECORD)) is None or entry.content != content:
            store.write(*RECORD, content)


@cache
def _compiler(asked: str) -> tuple[str, ...]:
    words = tuple(shlex.split(asked))
    if words and shutil.which(words[0]):
        return words
    if words:
        raise TargetCompileError(f"the C compiler {asked!r} is not on the PATH (RUNG_CC or CC "
                                 "asks for it)", command=asked)
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return (name,)
    if find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "cc")
    raise TargetCompileError(NO_COMPILER)


def version() -> str:
    """What the compiler says that it is."""
    return _known()[1]


@cache
def _version(command: tuple[str, ...]) -> str:
    try:
        return _run([*command, "--version"]).stdout
    except OSError:  # what it is called to compile tells why
        return ""


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
             name: str, least: str) -> Path:
    """Where the library lies after it was made. Where none can be made here, the error is the same
    for every source."""
    compiler()
    try:
        path, why = _loadable(store.write(KIND, name, _made(sources, command, libraries)))
        if path:
            _record()
            return path
        why = f"a compiled library cannot be loaded: {why}"
    except _Refused as refused:
        if not (why := _fault(tuple(command), tuple(libraries), least)):
            raise refused.kept(name) from None
    except OSError as error:
        why = f"no kernel could be compiled: {error.strerror or error}"
    raise TargetCompileError(_fault(tuple(command), tuple(libraries), least) or why)


def _made(sources: Sequence[str], command: Sequence[str], libraries: Sequence[str]) -> bytes:
    """The library, each source compiled by a process of its own."""
    with store.workplace() as work:
        made, lines = work / "library.so", []
        for n, source in enumerate(sources):
            (work / f"kernels{n}.c").write_text(source)
            lines.append([*command, "-c", f"{work}/kernels{n}.c", "-o", f"{work}/kernels{n}.o"])
        link = [*command, *(f"{work}/kernels{n}.o" for n in range(len(sources))), *libraries]
        if len(sources) == 1:
            lines, link = [], [*command, f"{work}/kernels0.c", *libraries]
        with ThreadPoolExecutor(os.cpu_count()) as several:
            for source, run in zip(sources, several.map(_run, lines), strict=False):
                if run.returncode:
                    raise _Refused(run, source)
        run = _run([*link, "-o", str(made)])
        if run.returncode or not made.exists():
            raise _Refused(run, sources[0])
        return made.read_bytes()


def _run(line: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, capture_output=True, text=True, errors="replace", check=False)


class _Refused(Exception):
    """The compiler made nothing of a source; the text is its first error."""

    def __init__(self, run: subprocess.CompletedProcess[str], source: str):
        super().__init__(next((x for x in run.stderr.splitlines() if "error" in x),
                              run.stderr.strip() or f"it ended with code {run.returncode} and "
                              "made no library"))
        self.run, self.source = run, source

    def kept(self, name: str) -> TargetCompileError:
        """The error; the source and the compiler's words stay in the cache's folder."""
        source = (store.folder(KIND) / name).with_suffix(".c")
        log, words = source.with_suffix(".log"), self.run.stderr
        command = shlex.join(str(source) if w.endswith(".c") else w for w in self.run.args)
        with suppress(OSError):
            source.write_text(self.source)
            log.write_text(f"{command}\n{words}")
        return TargetCompileError(f"{self}\n  source: {source}\n  log: {log}\n  command: {command}",
                                  str(source), words, command)


def _fault(command: tuple[str, ...], libraries: tuple[str, ...], least: str) -> str:
    """Why nothing at all can be compiled here, and what to do; "" if it can."""
    try:
        where = tempfile.gettempdir()
        if shutil.disk_usage(where).free < ROOM:
            return f"there is no room to compile in {where}: make some, or set TMPDIR"
    except OSError as error:
        return f"there is no folder to compile in: {error.strerror or error}; set TMPDIR"
    return _probed(command, libraries, where, least)


@cache
def _probed(command: tuple[str, ...], libraries: tuple[str, ...], where: str, least: str) -> str:
    """What is wrong with a compiler that makes no library of an empty source, or the least."""
    try:
        empty = store.own(store.Entry(Path("empty.so"), _made([least], command, libraries)))
        if not (why := _unloadable(empty.path)):
            return ""
        if os.statvfs(where).f_flag & os.ST_NOEXEC:
            return (f"compiled kernels cannot be loaded from {where}, which is mounted noexec, nor "
                    "from the cache: set RUNG_CACHE_DIR or TMPDIR to a folder that is not")
        why = f"its library cannot be loaded: {why}"
    except _Refused as refused:
        why = str(refused)
    except OSError as error:
        if error.filename != command[0]:
            return f"nothing can be compiled in {where}: {error.strerror or error}; set TMPDIR"
        why = f"it cannot be run: {error.strerror}"
    return (f"the C compiler {shlex.join(compiler())!r} fails on an empty file: {why}; set RUNG_CC "
            "to one that works, which `rung doctor` tells")
