"""The compilation cache on disk: files are complete or absent.

An entry is a file beside its note, the hash of its name and content. It appears by rename and is
read only where the note fits: remains of a killed process, a full disk or tampering count as
absent. The folder belongs to the user, or to root who filled it for others, and nobody else may
write there. A read-only cache is still read; new entries then go to a folder of this process.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from rung.core import trace
from rung.core.config import Settings

log = logging.getLogger("rung")
OWN, LOCK = "rung-process-", "lock"  # start of the names of one process's folders; a file in each
UNLOCKABLE = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of file systems without locks


class Entry(NamedTuple):
    """Where a whole entry lies, and its content."""

    path: Path
    content: bytes


def folder(kind: str) -> Path:
    """Where entries of a kind are made: a folder of the cache, with mode 0700, or else the
    process's own; OSError if there is no room for one."""
    try:
        path = trusted(kind)
        if not os.access(path, os.W_OK):
            raise PermissionError(f"{path} cannot be written to")
        return path
    except OSError as error:
        warn(f"cannot be added to: {error}")
        return scratch()


def trusted(kind: str) -> Path:
    """A folder of the cache that nobody but the user and root can write to; OSError says why there
    is none."""
    path = Settings.from_environment().cache_dir / kind
    for step in (path.parent, path):
        step.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = step.stat()
        if found.st_uid not in (0, os.getuid()):
            raise PermissionError(f"{step} belongs to user {found.st_uid}")
        if found.st_mode & 0o022:
            raise PermissionError(f"others can write to {step} (mend it by chmod go-w {step})")
    return path


def warn(what: str) -> None:
    """Log what is wrong with the cache, once per process."""
    trace.emit("declined", "store", "cache", what)
    if not _told:
        log.warning("rung: the cache of compiled kernels %s. This process keeps its kernels in a "
                    "temporary folder; set RUNG_CACHE_DIR to a folder of your own that can be "
                    "written to and is not mounted noexec", what)
    _told.add(what)


_told: set[str] = set()


# --- entries

def note_of(path: Path) -> Path:
    return path.with_suffix(".sha256")


def mark(name: str, content: bytes) -> str:
    """The note of an entry; it names the entry, so that two of them cannot be exchanged."""
    return sha256(name.encode() + b"\0" + content).hexdigest()


def find(kind: str, name: str) -> Entry | None:
    """An entry of the cache or of this process; None if it is missing or not what was written."""
    folders = [_scratch[os.getpid()]] if os.getpid() in _scratch else []
    with suppress(OSError):
        sweep(Path(tempfile.gettempdir()))
    with suppress(OSError):
        folders.append(trusted(kind))
    for folder in folders:
        with suppress(OSError, UnicodeDecodeError):
            content = (folder / name).read_bytes()
            if note_of(folder / name).read_text() == mark(name, content):
                return Entry(folder / name, content)
    return None


def write(kind: str, name: str, content: bytes) -> Entry:
    """Make an entry, in the process's own folder if the disk is full or may not be written to;
    OSError if there is no room there either."""
    path = folder(kind)
    try:
        return _write(path / name, content)
    except OSError as error:
        warn(f"cannot be added to: {path}: {error.strerror or error}")
        return _write(scratch() / name, content)


def own(entry: Entry) -> Entry:
    """A copy of an entry in the process's own folder."""
    return _write(scratch() / entry.path.name, entry.content)


def _write(path: Path, content: bytes) -> Entry:
    with workplace(path.parent) as work:
        made, note = work / path.name, work / "note"
        made.write_bytes(content)
        note.write_text(mark(path.name, content))
        os.replace(made, path)
        os.replace(note, note_of(path))
    return Entry(path, content)


# --- folders of one process

@contextmanager
def workplace(where: Path | None = None) -> Iterator[Path]:
    """A folder of this process in `where`, else in TMPDIR, that is removed at the end, or by the
    next process if this one is killed."""
    path, lock = _made(where)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def scratch() -> Path:
    """A folder that lives as long as this process; OSError if there is no room for one."""
    process = os.getpid()
    if process not in _scratch:
        path, _ = _made(None)
        _scratch[process] = path
        atexit.register(_remove, path, process)
    return _scratch[process]


_scratch: dict[int, Path] = {}  # by process: a fork makes one of its own


def _remove(path: Path, process: int) -> None:
    if process == os.getpid():
        shutil.rmtree(path, ignore_errors=True)


def _made(where: Path | None) -> tuple[Path, int]:
    """A new folder, and its lock, which is held until this process and its forks end."""
    sweep(where or Path(tempfile.gettempdir()))
    while True:
        path = Path(tempfile.mkdtemp(prefix=OWN, dir=where))
        try:
            return path, _locked(path, os.O_CREAT)
        except (FileNotFoundError, BlockingIOError):
            pass  # another process took it for what a killed one left
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise


def _locked(path: Path, create: int = 0) -> int:
    """The open lock of a folder; BlockingIOError while a process lives that made the folder."""
    lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | create, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(path / LOCK)
    except OSError as error:
        if not create or error.errno not in UNLOCKABLE:
            os.close(lock)
            raise
    return lock


@cache
def sweep(where: Path) -> None:
    """Remove, once in a process, what killed processes of this user left in a folder."""
    with suppress(OSError), os.scandir(where) as found:
        for path in [Path(e.path) for e in found if e.name.startswith(OWN)]:
            with suppress(OSError):
                if path.lstat().st_uid == os.getuid():
                    lock = _locked(path)
                    shutil.rmtree(path, ignore_errors=True)
                    os.close(lock)
