"""CUDA's driver through ctypes: devices, contexts, and kernels from cubins.

Kernels are loaded as libraries, whose handles hold in every context of their device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_int, c_long, c_size_t, c_uint, c_void_p
from functools import cache

from rung.core.errors import LaunchError

MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
DYNAMIC = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
PORTABLE_MAPPED = 3  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP


@cache
def driver() -> ctypes.CDLL:
    """The initialised driver; LaunchError if there is none."""
    try:
        found = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise LaunchError(f"no driver of an NVIDIA GPU is installed: {error}") from None
    if code := found.cuInit(0):
        raise LaunchError(f"the driver cannot start: {_words(found, code)}")
    return found


def version() -> str:
    """Which CUDA the driver is for, such as "driver of CUDA 13.0"; LaunchError if there is none."""
    number = c_int()
    call("cuDriverGetVersion", byref(number))
    return f"driver of CUDA {number.value // 1000}.{number.value % 1000 // 10}"


def _words(loaded: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    loaded.cuGetErrorString(code, byref(text))
    return (text.value or b"error").decode() + f" ({code})"


def words(code: int) -> str:
    """What an error code of the driver says."""
    return _words(driver(), code)


def call(name: str, *args: object) -> None:
    """Call a function of the driver; LaunchError if it fails."""
    if code := driver()[name](*args):
        raise LaunchError(f"{name}: {words(code)}")


def address(function: str) -> int:
    """Where a function of the driver lies."""
    return ctypes.cast(driver()[function], c_void_p).value or 0


@cache
def capability(device: int) -> tuple[int, int]:
    """The compute capability of a device, such as (9, 0)."""
    numbers = []
    for attribute in (MAJOR, MINOR):
        number = c_int()
        call("cuDeviceGetAttribute", byref(number), attribute, device)
        numbers.append(number.value)
    return numbers[0], numbers[1]


@cache
def _context(device: int) -> c_void_p:
    """The primary context of a device, which is torch's too, kept for the life of the process."""
    context = c_void_p()
    call("cuDevicePrimaryCtxRetain", byref(context), device)
    return context


def is_current(device: int) -> bool:
    """Whether launches of this thread go to a device."""
    number = c_int()
    return not driver().cuCtxGetDevice(byref(number)) and number.value == device


@contextmanager
def current(device: int) -> Iterator[None]:
    """Launches of this thread go to a device, also in a thread that had none."""
    if is_current(device):
        yield
        return
    call("cuCtxPushCurrent_v2", _context(device))
    try:
        yield
    finally:
        call("cuCtxPopCurrent_v2", byref(c_void_p()))


class LoadedCubin:
    """A loaded cubin. It stays loaded: a launch of its kernels may still be running."""

    def __init__(self, code: bytes):
        self.code, self.handle = code, c_void_p()
        call("cuLibraryLoadData", byref(self.handle), code, None, None, 0, None, None, 0)

    def kernel(self, name: str, dynamic: int, device: int) -> int:
        """The handle of a kernel that may take so many bytes of dynamic shared memory."""
        kernel = c_void_p()
        call("cuLibraryGetKernel", byref(kernel), self.handle, name.encode())
        # Nothing is loaded while a graph is captured: the function is, by asking for it.
        call("cuKernelGetFunction", byref(c_void_p()), kernel)
        if dynamic:
            call("cuKernelSetAttribute", DYNAMIC, dynamic, kernel, device)
        return kernel.value or 0

    def variable(self, name: str) -> int:
        """The address of a variable in the current context; 0 if there is none of that name."""
        at, size = c_void_p(), c_size_t()
        missing = driver().cuLibraryGetGlobal(byref(at), byref(size), self.handle, name.encode())
        return 0 if missing else at.value or 0


def launch(kernel: int, blocks: int, threads: int, dynamic: int, stream: int,
           addresses: Sequence[int], sizes: Sequence[int]) -> None:
    """Start a kernel, whose parameters are addresses and sizes; LaunchError if that fails."""
    values = [*map(c_void_p, addresses), *map(c_long, sizes)]
    params = (c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    call("cuLaunchKernel", c_void_p(kernel), c_uint(blocks), 1, 1, c_uint(threads), 1, 1,
         c_uint(dynamic), c_void_p(stream), params, None)


class Mapped:
    """Integers in memory of the host that kernels write, and that the host reads as they are."""

    def __init__(self, count: int):
        at, there = c_void_p(), c_void_p()
        call("cuMemHostAlloc", byref(at), c_size_t(8 * count), PORTABLE_MAPPED)
        self.address = at.value or 0
        self.numbers = (c_long * count).from_address(self.address)
        call("cuMemHostGetDevicePointer_v2", byref(there), at, 0)
        self.seen = there.value or 0  # where kernels see it


def allocate(count: int) -> int:
    """The address of so many bytes of the current device, for the life of the process."""
    at = c_void_p()
    call("cuMemAlloc_v2", byref(at), c_size_t(count))
    return at.value or 0


def store(at: int, number: int) -> None:
    """Write an address to memory of the current device, at once."""
    value = c_void_p(number)
    call("cuMemcpyHtoD_v2", c_void_p(at), byref(value), c_size_t(8))


def clear(at: int, stream: int) -> None:
    """Write a zero of 32 bits to memory of the current device, in the order of a stream."""
    call("cuMemsetD32Async", c_void_p(at), c_uint(0), c_size_t(1), c_void_p(stream))


def synchronize() -> None:
    """Wait for all work of the current device."""
    call("cuCtxSynchronize")
