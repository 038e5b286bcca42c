"""Workspaces: the memory of temporaries, one for each call that runs at the same time.

Calls that follow each other get the same memory, whatever graph they belong to, so that it stays
in the cache and its pages are touched once.
"""

from __future__ import annotations

import torch

ALIGN = 64


class Workspace:
    """At least `bytes` bytes from `address`, a multiple of 64."""

    __slots__ = ("address", "bytes", "memory")

    def __init__(self, count: int):
        self.memory = torch.empty(count + ALIGN, dtype=torch.uint8, device="cpu")
        self.address = -(-self.memory.data_ptr() // ALIGN) * ALIGN
        self.bytes = count


_free: list[Workspace] = []  # append and pop are atomic


def take(count: int) -> Workspace:
    """A workspace that no running call has. One that is too small is given up for a larger one."""
    try:
        found = _free.pop()
    except IndexError:
        return Workspace(count)
    if found.bytes < count:
        del found  # its memory first
        return Workspace(count)
    return found


give = _free.append
"""Hand a workspace back; one that an exception kept from coming back is simply lost."""


def clear() -> None:
    """Give up the workspaces that no call has."""
    _free.clear()
