"""The generators of random numbers that operators draw from: the host's, and one of each GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

CUDA: Any = torch.cuda  # which has no types
States = tuple[torch.Tensor, ...]
"""What the host's generator, then those of the GPUs, if a program uses any, draw from."""


def _gpus() -> range:
    """The numbers of GPUs; none as long as the process has used none."""
    return range(CUDA.device_count() if CUDA.is_initialized() else 0)


def states() -> States:
    return torch.get_rng_state(), *(CUDA.get_rng_state(n) for n in _gpus())


def seeded(seed: int) -> States:
    """The states that a seed gives."""
    places = ["cpu", *(f"cuda:{n}" for n in _gpus())]
    return tuple(torch.Generator(p).manual_seed(seed).get_state() for p in places)


def restore(given: States) -> None:
    torch.set_rng_state(given[0])
    for n, state in enumerate(given[1:]):
        CUDA.set_rng_state(state, n)


def alike(a: States, b: States) -> bool:
    """Whether the same numbers are drawn next; those of a GPU that only one of them knows are not
    compared."""
    return all(x.equal(y) for x, y in zip(a, b, strict=False))


@contextmanager
def drawing(given: States | None) -> Iterator[None]:
    """Draw from given states, if any; what is drawn after this does not notice."""
    before = states()
    if given is not None:
        restore(given)
    try:
        yield
    finally:
        if given is not None:
            restore(before)
