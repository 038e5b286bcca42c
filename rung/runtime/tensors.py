"""What the host's code does with tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

try:  # an eighth of the time of torch.empty_strided, and blind to default devices
    from torch._C._dynamo.guards import _empty_strided_cpu as empty
except ImportError:
    def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """New memory."""
        return torch.empty_strided(size, stride, dtype=dtype, device="cpu")

bump = torch.autograd.graph.increment_version
"""Tell autograd that a tensor has changed."""


def fit(x: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """A copy of `x` with these strides; of shape `shape`, which says that it may be expanded."""
    small = x
    for dim, stride in enumerate(strides):
        if stride == 0:
            small = small.narrow(dim, 0, min(1, shape[dim]))
    made = torch.empty_strided(small.shape, tuple(strides), dtype=x.dtype, device=x.device)
    return made.copy_(small).expand(tuple(shape))


def leaves(out: Any) -> list[Any]:
    """The results of a call without structure and without those that are None."""
    return [leaf for leaf in tree_leaves(out) if leaf is not None]


def check(value: torch.Tensor, low: int, high: int, error: type[Exception], message: str) -> None:
    """Raise `error` unless low <= v < high for all elements."""
    if value.numel():
        least, most = value.aminmax()
        if int(least) < low or int(most) >= high:
            raise error(message)
