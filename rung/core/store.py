"""Files on disk that are whole or not there: the cache of what was compiled.

An entry is a file beside its note, the hash of its name and content. It appears by rename and is
read only where the note fits, so that what a killed process, a full disk or another hand left is
an entry that is not there. The folder is the user's own and nobody else may enter it.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from functools import cache
from hashlib import sha256
from pathlib import Path
from time import time

from rung.core import trace
from rung.core.config import Settings

log = logging.getLogger("rung")
PART = ".part"  # what a name ends in until its content is complete


def folder(kind: str) -> Path:
    """A folder of the cache, made with mode 0700; a fresh one for this process where it cannot be
    made, or it or the cache is another user's, or others can write there."""
    path = Settings.from_environment().cache_dir / kind
    try:
        for step in (path.parent, path):
            step.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = step.stat()
            if found.st_uid != os.getuid() or found.st_mode & 0o022:
                raise PermissionError(f"{step} is open to other users")
        if os.access(path, os.W_OK):
            _tidy(path)
            return path
        raise PermissionError(f"{path} cannot be written to")
    except OSError as error:
        _warn(str(error))
        return scratch()


@cache
def scratch() -> Path:
    """A folder that lives as long as this process; OSError if there is no room for one."""
    return Path(_kept().name)


@cache
def _kept() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="rung-", ignore_cleanup_errors=True)


@cache
def _warn(reason: str) -> None:
    trace.emit("declined", "store", "cache", reason)
    log.warning("the cache is not used: %s", reason)


def note_of(path: Path) -> Path:
    return path.with_suffix(".sha256")


def mark(name: str, content: bytes) -> str:
    """The note of an entry; it names the entry, so that two of them cannot be exchanged."""
    return sha256(name.encode() + b"\0" + content).hexdigest()


def read(path: Path) -> bytes | None:
    """The content of an entry; None if it is missing or not what was written."""
    try:
        content = path.read_bytes()
        return content if note_of(path).read_text() == mark(path.name, content) else None
    except (OSError, UnicodeDecodeError):
        return None


def write(path: Path, content: bytes) -> Path:
    """Make an entry; where it lies then, which is the process's own folder if the disk is full or
    may not be written to. OSError if there is no room there either."""
    try:
        return _write(path, content)
    except OSError as error:
        _warn(f"{path.parent}: {error.strerror or error}")
        return _write(scratch() / path.name, content)


def _write(path: Path, content: bytes) -> Path:
    with tempfile.TemporaryDirectory(dir=path.parent, suffix=PART) as work:
        made, note = Path(work, path.name), Path(work, "note")
        made.write_bytes(content)
        note.write_text(mark(path.name, content))
        os.replace(made, path)
        os.replace(note, note_of(path))
    return path


@cache
def _tidy(path: Path) -> None:
    """Remove, once in a process, what killed ones left in a folder an hour ago or earlier."""
    for part in path.glob(f"*{PART}"):
        try:
            if part.stat().st_mtime < time() - 3600:
                shutil.rmtree(part)
        except OSError as error:
            trace.emit("declined", "store", str(part), str(error))
