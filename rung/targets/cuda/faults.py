"""Checks that failed on a GPU: noted by a kernel, raised at the next call.

A launch returns before its kernels run, so what a check finds is told later: the kernel of a check
writes the check's number and the element at fault to memory that the host reads without waiting.
Kernels behind a check that failed do nothing, so that none reads out of range.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cache

from rung.targets.cuda import driver
from rung.targets.device import LATE, Refuse


class Faults:
    """What the checks of one device raise, by the numbers that they report."""

    def __init__(self, device: int):
        self.device = device
        self.record = driver.Mapped(3)  # number of the check, or 0; element at fault; upper limit
        self.first, self.refuse = [1], list[Refuse]()
        self.taken = driver.allocate(8)  # says to kernels that a check has failed
        driver.store(self.taken, 0)

    def watch(self, library: driver.LoadedCubin) -> None:
        """Have a library report here, if it has checks or heeds them."""
        for name, there in (("rung_found", self.record.seen), ("rung_taken", self.taken)):
            if variable := library.variable(name):
                driver.store(variable, there)

    def add(self, refuse: Refuse, count: int) -> int:
        """What to add to the numbers of so many checks, which `refuse` knows from 1."""
        base = self.first[-1] - 1
        if count:
            self.first.append(base + 1 + count)
            self.refuse.append(refuse)
        return base

    def is_pending(self) -> bool:
        """Whether a check has failed that nobody was told of."""
        return bool(self.record.numbers[0])

    def fail(self, stream: int) -> None:
        """Raise what was found, if anything was, and forget it in the order of a stream."""
        number, value, limit = self.record.numbers
        if not number:
            return
        self.record.numbers[0] = 0
        with driver.current(self.device):
            driver.clear(self.taken, stream)
        place = bisect_right(self.first, number) - 1
        self.refuse[place](number - self.first[place] + 1, value, limit)

    def settle(self, wait: bool) -> None:
        """Raise what was found, after waiting for the device or not."""
        if wait:
            with driver.current(self.device):
                driver.synchronize()
        self.fail(0)


@cache
def faults(device: int) -> Faults:
    """The record of a device."""
    with driver.current(device):
        found = Faults(device)
    LATE.append(found.settle)
    return found
