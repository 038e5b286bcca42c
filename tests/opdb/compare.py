"""How two outcomes of one program differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median

import torch

from rung.core.errors import RungError

DECLINED, RAISES = "declined", "raises "
SLACK = 4  # how much larger than eager's an error may be


@dataclass
class Outcome:
    """What a call gave: tensors, gradients, sharing of memory, and its arguments after it."""

    outs: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor | None] = field(default_factory=list)
    shared: set[str] = field(default_factory=set)
    inputs: list[torch.Tensor] = field(default_factory=list)
    error: Exception | None = None

    def tensors(self) -> dict[str, torch.Tensor | None]:
        return {f"{kind} {n}": x for kind, xs in (
            ("result", self.outs), ("gradient", self.grads), ("argument", self.inputs))
            for n, x in enumerate(xs)}


def difference(got: Outcome, want: Outcome, precise: Callable[[], Outcome],
               nudged: Callable[[], Sequence[Outcome]] | None = None) -> str:
    """`what: how` of the first difference, or "".

    `precise` gives the outcome in double precision, against which values are judged that are not
    as near to each other as usual. Gradients of a deep model, of which `nudged` gives eager's
    outcomes with its parameters rounded otherwise, are judged as `aligned` says too.
    """
    if isinstance(got.error, RungError):
        return f"{DECLINED}: {type(got.error).__name__}: {got.error}"
    if got.error or want.error:
        return _raised(got.error, want.error)
    if got.shared != want.shared:
        return f"sharing: {sorted(got.shared ^ want.shared)}"
    ours, theirs, once = got.tensors(), want.tensors(), cache(precise)
    alike = cache(lambda: aligned(got.grads, [want.grads, *(x.grads for x in nudged())],
                                  once().grads) if nudged else set())
    for name, y in theirs.items():
        how = _differs(ours[name], y)
        if not how:
            continue
        exact = once() if how.startswith("values") else Outcome()
        if not near(ours[name], y, exact.tensors().get(name)) and not (
                how.startswith("values") and name in alike()):
            return f"{name} {how}"
    return ""


def _raised(got: Exception | None, want: Exception | None) -> str:
    if type(got) is type(want):
        return ""
    text = f"{RAISES}{type(got).__name__}: {str(got).strip()[:300]}" if got else "returns: "
    return f"{text} where eager raises {type(want).__name__}" if want else text


def _differs(x: torch.Tensor | None, y: torch.Tensor | None) -> str:
    if x is None or y is None:
        return "" if x is y else f"presence: {x is not None}"
    for what in ("dtype", "shape", "requires_grad", "layout"):
        if getattr(x, what) != getattr(y, what):
            return f"{what}: {getattr(x, what)} for {getattr(y, what)}"
    if y.layout is torch.strided and steps(x) != steps(y):
        return f"strides: {x.stride()} for {y.stride()}"
    try:
        torch.testing.assert_close(x, y, equal_nan=True)
    except AssertionError as error:
        return f"values: {' '.join(str(error).split())[:300]}"
    return ""


def steps(x: torch.Tensor) -> list[int]:
    """The strides that lead anywhere: of dimensions with more than one element."""
    return [step for size, step in zip(x.shape, x.stride(), strict=True)
            if size > 1] if x.numel() else []


def near(x: torch.Tensor | None, y: torch.Tensor | None, exact: torch.Tensor | None) -> bool:
    """Whether `x` is as near to the exact values as `y`, up to a factor."""
    if x is None or y is None or exact is None or exact.shape != x.shape:
        return False
    if not (x.is_floating_point() or x.is_complex()) or x.layout is not torch.strided:
        return False
    a, b, e = (t.detach().to(torch.complex128).resolve_conj() for t in (x, y, exact))
    special = ~(b.isfinite() & a.isfinite())
    if not torch.equal(torch.nan_to_num(a[special]), torch.nan_to_num(b[special])):
        return False
    err_x, err_y = ((t - e)[~special].abs() for t in (a, b))
    unit = torch.finfo(x.dtype).eps * (1 + e[~special].abs())
    return not err_x.numel() or bool((err_x <= SLACK * torch.maximum(err_y.max(), unit)).all())


Gradients = list[torch.Tensor | None]


def aligned(ours: Gradients, theirs: Sequence[Gradients], exact: Gradients) -> set[str]:
    """The gradients whose errors, as vectors relative to the exact ones, are like eager's.

    The bound is a few times the largest error of `theirs` in the same gradient, or their median
    error in all of them. Derivatives jump at the kinks of a network (relu, hardswish): where
    rounding decides the side, few elements are far off in whichever run it decided otherwise than
    in the exact one, so one run alone does not tell how far off eager can be.
    """
    found = {f"gradient {n}": (_relative(x, e), max(_relative(y, e) for y in ys if y is not None))
             for n, (x, e, *ys) in enumerate(zip(ours, exact, *theirs, strict=False))
             if x is not None and ys[0] is not None and e is not None and x.shape == e.shape}
    usual = median(error for _, error in found.values()) if found else 0.0
    return {name for name, (x, y) in found.items() if x <= SLACK * max(y, usual)}


def _relative(x: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the error over that of the exact values."""
    e = exact.detach().double()
    return float((x.detach().double() - e).norm() / e.norm().clamp_min(torch.finfo(e.dtype).tiny))
