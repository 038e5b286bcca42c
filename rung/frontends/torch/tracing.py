"""How AOTAutograd traces for Rung: what it writes out in terms of others.

    F.dropout(x, 0.1)   ->   kept = bernoulli(0.9) as bool;   x * (kept * (1 / 0.9))
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from rung.frontends.torch import compat
from rung.frontends.torch.compat import OperatorBase, OpOverload
from rung.frontends.torch.partition import partition

aten = torch.ops.aten

WRITTEN_OUT = [
    aten.diagonal_backward, aten.pixel_shuffle, aten.pixel_unshuffle, aten.rot90,
    aten.select_backward, aten.slice_backward]
"""Operators that torch may write out in terms of others: those whose parts are all in the table."""

OF_FLOATS = {aten.glu: None, aten.mse_loss: None, aten.mse_loss_backward: torch.float16}
"""More of these, whose kernels take real floats alone; one rounds each of its steps in f16."""

KEPT = [aten.hardshrink, aten.softshrink, aten.multi_margin_loss,
        aten.multilabel_margin_loss_forward]
"""Operators that AOTAutograd writes out in Python, whatever decompositions are asked for, and
whose written-out form takes other types, or has other signs of zero and gradients at NaN."""

RESAMPLERS = [getattr(aten, f"{name}{n}d") for name, sizes in (
    ("upsample_nearest", "123"), ("_upsample_nearest_exact", "123"), ("upsample_linear", "1"),
    ("upsample_bilinear", "2"), ("upsample_bicubic", "2"), ("upsample_trilinear", "3"))
    for n in sizes]
"""Operators that AOTAutograd writes out in Python, whatever decompositions are asked for, and
whose written-out form picks other source pixels than the kernel."""


def resampled(packet: Any, x: torch.Tensor, size: Any, *rest: Any) -> torch.Tensor:
    """The overload that takes a size or factors, by the one that takes both; sizes may be
    symbolic, which torch's own does not allow."""
    *corners, factors = rest
    shape = compat.output_size(x.size(), size, factors)
    scales = [None] * len(shape) if factors is None else factors
    made: torch.Tensor = packet.default(x, shape, *corners, *scales)
    return made


def resampled_nearest(x: torch.Tensor, size: Sequence[int], *_: object) -> torch.Tensor:
    """What resampling looks like; torch's own fails at an empty batch."""
    if not all(n > 0 for n in (*x.shape[1:], *size)):
        raise RuntimeError("resampling from or to nothing")
    order = compat.suggest_memory_format(x)
    return x.new_empty((*x.shape[:2], *size)).contiguous(memory_format=order)


def resampled_backward(grad: torch.Tensor, size: Any, given: Any, *_: Any) -> torch.Tensor:
    """What a gradient of resampling looks like, for symbolic sizes too."""
    order = compat.suggest_memory_format(grad)
    return torch.empty(given, dtype=grad.dtype, device=grad.device, memory_format=order)


def one_hot(x: torch.Tensor, classes: int = -1) -> torch.Tensor:
    """The kernel's refusals; `scatter` checks that there are as many classes as `x` asks for."""
    if x.dtype is not torch.int64 or classes <= 0:
        raise RuntimeError("one_hot of no classes, or of what is no int64")
    return x.new_zeros([*x.shape, classes]).scatter_(-1, x.unsqueeze(-1), 1)


def max_pool1d(x: torch.Tensor, *how: object) -> torch.Tensor:
    """The kernel that has a gradient takes integers, the one without does not."""
    if not x.is_floating_point():
        raise NotImplementedError(f"max_pool1d of {x.dtype}")
    made: torch.Tensor = aten.max_pool1d_with_indices(x, *how)[0]
    return made


def of_floats(write: compat.Function, besides: torch.dtype | None = None) -> compat.Function:
    """`write` where the first tensor is of real floats that are not `besides`."""
    return lambda x, *rest: (write(x, *rest) if x.is_floating_point() and x.dtype is not besides
                             else NotImplemented)


def glu_backward(grad: torch.Tensor, x: torch.Tensor, dim: int) -> object:
    """With the kernel's roundings of halves: of the gate, and of either part of the result."""
    if not x.is_floating_point():
        return NotImplemented
    value, gate = x.chunk(2, dim)
    share = gate.sigmoid()
    s, v, g = (t.to(torch.promote_types(x.dtype, torch.float32)) for t in (share, value, grad))
    return torch.cat([share * grad, ((1 - s) * s * v * g).to(x.dtype)], dim)


def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout as a graph has it; where everything is dropped, eager draws nothing."""
    if train and p == 1 and x.numel():
        return x * x.new_zeros(())
    return aten.native_dropout(x, p, train)[0] if train and p and x.numel() else x


def dropout_(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    return x.copy_(dropout(x, p, train)) if train and p else x


def native_dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    """(result, what was kept) with the bits of `F.dropout`: one draw, in the order of memory. On
    CUDA, eager itself calls the operator."""
    if train is False or not isinstance(p, float) or not x.is_floating_point() or x.is_cuda:
        return NotImplemented
    order = compat.memory_order(x)
    unset = torch.empty([x.shape[d] for d in order], dtype=torch.bool, device=x.device)
    kept = aten.bernoulli.p(unset, 1 - p)
    if order != sorted(order):
        kept = kept.permute([order.index(d) for d in range(x.dim())])
    return x * noise(kept, 1 - p, x.dtype), kept


def native_dropout_backward(grad: torch.Tensor, kept: torch.Tensor, scale: float) -> Any:
    if not isinstance(scale, float) or not grad.is_floating_point() or grad.is_cuda:
        return NotImplemented
    return grad * noise(kept, 1 / scale if scale else 0, grad.dtype)


def noise(kept: torch.Tensor, share: float, dtype: torch.dtype) -> torch.Tensor:
    """What eager multiplies by: 1 / `share`, rounded as it rounds it, where `kept`, else 0."""
    with compat.untraced_values():
        scale = torch.ones((), dtype=dtype).div(share).item() if share else 0.0
    return kept.to(dtype) * scale


def channel_shuffle(x: torch.Tensor, groups: int) -> torch.Tensor:
    """With the layout of the kernel's result, of which torch's written-out form knows nothing."""
    made: torch.Tensor = SHUFFLED(x, groups)
    last = compat.memory_order(x) == [0, 2, 3, 1]
    return made.contiguous(memory_format=torch.channels_last) if last else made


def with_float_arguments(write: compat.Function) -> compat.Function:
    """`write` for floats that are arguments of the user's: torch can keep these unknown in
    arithmetic and comparisons alone, and compiles anew for each value that another operator takes.
    In half precision, where kernels round their floats, it does."""
    def written(*args: Any) -> Any:
        wide = all(x.dtype in (torch.float32, torch.float64) for x in args
                   if isinstance(x, torch.Tensor))
        known = not any(isinstance(x, torch.SymFloat) for x in args)
        return NotImplemented if known or not wide else write(*args)
    return written


def elu(x: torch.Tensor, alpha: float, scale: float = 1, input_scale: float = 1) -> torch.Tensor:
    return torch.where(x < 0, torch.expm1(x * input_scale) * (alpha * scale), x * scale)


def celu(x: torch.Tensor, alpha: float) -> torch.Tensor:
    return elu(x, alpha, 1, 1 / alpha)


def softshrink(x: torch.Tensor, limit: float) -> torch.Tensor:
    inside = torch.where(x.isnan(), x, 0)
    return torch.where(x > limit, x - limit, torch.where(x < -limit, x + limit, inside))


def hardshrink(x: torch.Tensor, limit: float) -> torch.Tensor:
    return torch.where((x > limit) | (x < -limit) | x.isnan(), x, 0)


def shrink_backward(grad: torch.Tensor, x: torch.Tensor, limit: float) -> torch.Tensor:
    return torch.where((x > limit) | (x < -limit), grad, 0)


BY_FLOATS: dict[OperatorBase, compat.Function] = {
    **compat.get_decompositions([
        aten.leaky_relu, aten.leaky_relu_backward, aten.elu_backward, aten.softplus,
        aten.softplus_backward, aten.threshold, aten.threshold_backward]),
    aten.elu.default: elu, aten.celu.default: celu, aten.softshrink.default: softshrink,
    aten.hardshrink.default: hardshrink, aten.softshrink_backward.default: shrink_backward,
    aten.hardshrink_backward.default: shrink_backward}
"""Operators by arithmetic, comparisons and what takes no floats, with the kernels' results."""


def assert_async(x: torch.Tensor) -> None:
    """The overload that torch does not drop where nobody reads its result, which is none."""
    aten._assert_async.msg(x, "Expected Tensor with single nonzero value, but got zero")


SHUFFLED = compat.get_decompositions([aten.channel_shuffle])[aten.channel_shuffle.default]
DECOMPOSITIONS: dict[OperatorBase, compat.Function] = {
    **compat.get_decompositions(WRITTEN_OUT),
    **{op: of_floats(f, besides) for packet, besides in OF_FLOATS.items()
       for op, f in compat.get_decompositions([packet]).items()},
    **{op: with_float_arguments(write) for op, write in BY_FLOATS.items()},
    aten._assert_async.default: assert_async,
    aten.channel_shuffle.default: channel_shuffle, aten.glu_backward.default: glu_backward,
    aten.native_dropout.default: native_dropout,
    aten.native_dropout_backward.default: native_dropout_backward}

KERNELS: dict[OpOverload, compat.Function | None] = {
    **{p.default: None for p in (*RESAMPLERS, *KEPT)},
    **{p.vec: partial(resampled, p) for p in RESAMPLERS},
    aten.dropout.default: dropout, aten.dropout_.default: dropout_,
    aten.one_hot.default: one_hot, aten.max_pool1d.default: max_pool1d}
"""What stands for operators that AOTAutograd writes out in Python by itself; None: themselves."""

METAS: dict[OpOverload, compat.Function] = {
    **{p.default: resampled_nearest for p in RESAMPLERS if "nearest" in p.__name__},
    **{getattr(aten, f"{p.__name__}_backward").default: resampled_backward for p in RESAMPLERS}}


compile_graphs = partial(compat.compile_graphs, partition=partition,
                         decompositions=DECOMPOSITIONS, kernels=KERNELS,
                         metas=METAS)
"""`compat.compile_graphs` with all of this."""
