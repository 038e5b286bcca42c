"""Workspaces: the memory of temporaries, one for each call that runs at the same time.

Calls that follow each other get the same memory, whatever graph they belong to, so that it stays
in the cache and its pages are touched once.
"""

from __future__ import annotations

from rung.targets.device import Memory, Workspace


class Pool:
    """The workspaces that no running call has. One that an exception kept from coming back is
    simply lost."""

    def __init__(self, memory: Memory):
        self.memory, self.free = memory, list[Workspace]()
        self.give = self.free.append  # append and pop are atomic

    def take(self, count: int) -> Workspace:
        """A workspace. One that is too small is given up for a larger one."""
        try:
            found = self.free.pop()
        except IndexError:
            return Workspace(count, self.memory)
        if found.bytes < count:
            del found  # its memory first
            return Workspace(count, self.memory)
        return found


_pools: dict[Memory, Pool] = {}


def of(memory: Memory) -> Pool:
    """The pool of what allocates in this way."""
    return _pools.setdefault(memory, Pool(memory))


def clear() -> None:
    """Give up the workspaces that no call has."""
    for pool in _pools.values():
        pool.free.clear()
