"""NVRTC, CUDA's compiler as a library: source text to a cubin, without a GPU, a driver or headers.

It comes with each CUDA build of torch. As a script this compiles a file, so that several compile at
the same time:

    python -I nvrtc.py LIBRARY SOURCE CUBIN OPTION...
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")  # by the major version of CUDA
FOLDERS = ("cu13/lib", "cuda_nvrtc/lib")  # of the packages called nvidia


@cache
def library() -> str:
    """The path or name of the library that can be loaded; "" if there is none."""
    return next((x for x in (*_packaged(), *NAMES) if _loads(x)), "")


def _packaged() -> Iterator[str]:
    spec = find_spec("nvidia")
    for where in spec.submodule_search_locations or () if spec else ():
        for folder in FOLDERS:
            yield from (str(path) for name in NAMES if (path := Path(where, folder, name)).exists())


def _loads(name: str) -> bool:
    try:
        return bool(ctypes.CDLL(name))
    except OSError:
        return False


@cache
def _opened(name: str) -> ctypes.CDLL:
    """The library; it finds its own part by name alone, among what is loaded."""
    for part in Path(name).parent.glob("libnvrtc-builtins.so.*") if "/" in name else ():
        ctypes.CDLL(str(part))
    return ctypes.CDLL(name)


@cache
def version(name: str) -> tuple[int, int]:
    """Major and minor version of a library."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _opened(name).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def compile_source(name: str, source: bytes, options: Sequence[str]) -> tuple[bytes, str]:
    """The cubin, empty if the compiler refuses the source, and the compiler's log."""
    nvrtc, program = _opened(name), ctypes.c_void_p()
    given = (ctypes.c_char_p * len(options))(*(x.encode() for x in options))
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None)
    refused = nvrtc.nvrtcCompileProgram(program, len(options), given)
    log = _read(nvrtc, "ProgramLog", program)
    cubin = b"" if refused else _read(nvrtc, "CUBIN", program)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin, log.rstrip(b"\0").decode(errors="replace")


def _read(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    nvrtc[f"nvrtcGet{what}Size"](program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    nvrtc[f"nvrtcGet{what}"](program, text)
    return text.raw


def main(name: str, source: str, out: str, *options: str) -> bool:
    """Compile the file `source` to the file `out`, the log to stderr; whether that failed."""
    cubin, log = compile_source(name, Path(source).read_bytes(), options)
    sys.stderr.write(log)
    if cubin:
        Path(out).write_bytes(cubin)
    return not cubin


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
