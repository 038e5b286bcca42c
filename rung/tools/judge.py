"""One judge of results: what may differ from eager's, as roundings do, and what is wrong.

A result is wrong if it is off by more than its type's roundings, further from float64 than eager
is, and further from eager than eager is from itself where its arguments are off by roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import fx

from rung.core.op import walk
from rung.core.types import BF16, F16, F32, F64, TensorType
from rung.frontends.torch import generators
from rung.frontends.torch.calls import memory_of
from rung.frontends.torch.generators import States
from rung.frontends.torch.oracle import to_numpy
from rung.frontends.torch.tensors import DTYPES, cloned
from rung.program.ir import Module

Arrays = Sequence[Any]
Args = list[Any]
Results = Sequence[Any]
TOLERANCE = {F64: 1e-9, F32: 1e-3, F16: 1e-2, BF16: 2e-2}
BOUNDS = {torch.complex128: 1e-9, torch.complex64: 1e-3} | {
    DTYPES[dtype]: bound for dtype, bound in TOLERANCE.items()}
HALVES = (torch.float32, torch.bfloat16, torch.float16)
WORSE = 4.0  # times eager's own error that a result may be off
SEEDS = 3  # of arguments that are off by roundings


@dataclass(frozen=True)
class Difference:
    """Result `number` is off by `error`, where its largest element is `size`."""

    number: int
    error: float
    size: float

    def __str__(self) -> str:
        return f"result {self.number} by {self.error:.3g} of {self.size:.3g}"


@dataclass(frozen=True)
class Reference:
    """What shows how exact eager's results are; each is run when it is needed."""

    exact: Callable[[], Results | None]
    near: Callable[[], Iterable[Results | None]]


def wrong(found: Results, wanted: Results, bound: float | Sequence[float], reference: Reference
          ) -> Iterator[Difference]:
    """Those of the results `found` that are wrong where eager gives `wanted`."""
    rows = [n for n, (a, b) in enumerate(zip(found, wanted, strict=True))
            if a is not b and a is not None]
    new, old = ([to_numpy(xs[n]) for n in rows] for xs in (found, wanted))
    bounds = bound if isinstance(bound, float) else [bound[n] for n in rows]
    for off in differences(old, new, bounds):
        n, a, b = rows[off.number], old[off.number], new[off.number]
        exact = [to_numpy(x[n]) for x in [reference.exact()] if x]
        if any(_error(x, b) <= WORSE * _error(x, a) < np.inf for x in exact):
            continue  # where eager overflows, float64 says nothing of its roundings
        if not any(x and off.error <= WORSE * _error(a, to_numpy(x[n])) for x in reference.near()):
            yield replace(off, number=n)


def difference(old: Arrays, new: Arrays, bound: float) -> Difference | None:
    """The first result that is not the same bits, nor off by roundings only."""
    return next(differences(old, new, bound), None)


def differences(old: Arrays, new: Arrays, bound: float | Sequence[float]) -> Iterator[Difference]:
    """The results that are not the same bits, nor of floats within `bound` of their largest one;
    what is left of larger numbers that cancel counts as at least a thousandth of those, and under
    the bounds of 16-bit floats as a tenth: one rounding of theirs is not below that."""
    bounds = [bound] * len(old) if isinstance(bound, float) else bound
    share = 0.1 if max(bounds, default=0.0) > TOLERANCE[F32] else 1e-3
    noise = share * max((_size(x) for x in old if _rounds(x)), default=0.0)
    for n, (a, b, limit) in enumerate(zip(old, new, bounds, strict=True)):
        error = _error(a, b)
        if not error <= (limit * max(_size(a), noise) if _rounds(a) else 0.0):
            yield Difference(n, error, _size(a))


def _error(a: Any, b: Any) -> float:
    """By how much the largest difference of two arrays is one; NaN equals itself."""
    if np.array_equal(a, b, equal_nan=True):
        return 0.0
    a, b = (np.asarray(x, complex if np.iscomplexobj(x) else float) for x in (a, b))
    if a.shape != b.shape or not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    return float(np.max(np.abs(a - b), initial=0, where=(a != b) & ~np.isnan(a)))


def _rounds(x: Any) -> bool:
    return np.asarray(x).dtype.kind in "fc"


def _size(x: Any) -> float:
    x = np.abs(np.asarray(x))
    return float(np.max(x, initial=1e-30, where=np.isfinite(x)))


def tolerance(module: Module) -> float:
    """How far a sum in another order may be off, by the widest roundings in a module's programs."""
    values = [v for p in module.programs for v in (*p.params, *(
        r for op in walk(p.body) for r in op.results))]
    return max((TOLERANCE.get(v.type.dtype, 0.0) for v in values
                if isinstance(v.type, TensorType)), default=0.0)


# --- a graph

def report(run: Callable[..., Results], graph: fx.GraphModule, inputs: Args, bound: float
           ) -> tuple[str, bool]:
    """What to say of `run` beside the same graph in eager, and whether it is wrong."""
    seed = generators.seeded(0)
    (got, ours), (want, eagers) = (_outcome(f, cloned(inputs), seed) for f in (run, graph))
    if ours or eagers:
        bad = type(ours) is not type(eagers)
        return f"rung: {ours!r:.200}, eager: {eagers!r:.200}" + "  <- wrong" * bad, bad
    found = list(wrong(got, want, bound, of_graph(graph, inputs, seed)))
    numbers = [x.number for x in found]
    off = differences(list(map(to_numpy, want)), list(map(to_numpy, got)), 0.0)
    lines = [f"result {x.number}: {x.error:.3g} apart, of {x.size:.3g}"
             + "  <- wrong" * (x.number in numbers) for x in off]
    end = f"{len(found)} of {len(want)} results and arguments are wrong"
    return "\n".join([*lines, end]), bool(found)


def _outcome(run: Callable[..., Results], args: Args, seed: States
             ) -> tuple[Results, Exception | None]:
    generators.restore(seed)
    try:
        return [*run(*args), *args], None
    except Exception as error:
        return [], error



def of_graph(module: fx.GraphModule, inputs: Results, seed: States) -> Reference:
    """The reference of a graph: its results, and its arguments afterwards."""
    return Reference(cache(partial(widened, module, inputs, seed)), cache(
        lambda: [nudged(module, inputs, seed, n) for n in range(SEEDS)]))


class _Wide(fx.Interpreter):
    """Runs a graph in float64, whatever types its nodes name; only random numbers are drawn in
    their own, since other types draw others."""

    def run_node(self, n: fx.Node) -> Any:
        if torch.Tag.nondeterministic_seeded not in getattr(n.target, "tags", ()):
            return super().run_node(n)

        def own(x: fx.Node) -> Any:
            value = self.env[x]
            return value.to(x.meta["val"].dtype) if isinstance(value, torch.Tensor) else value
        drawn = super().call_function(n.target, *fx.map_arg((n.args, n.kwargs), own))
        return torch.utils._pytree.tree_map_only(torch.Tensor, _wide, drawn)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        def wide(x: object) -> object:
            return torch.float64 if x in HALVES else x
        args, kwargs = torch.utils._pytree.tree_map_only(torch.dtype, wide, (args, kwargs))
        return super().call_function(target, args, kwargs)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.dtype in HALVES else x


def widened(module: fx.GraphModule, inputs: Results, seed: States) -> Args | None:
    """Results and arguments afterwards in float64; None where torch cannot do that."""
    wide = [_wide(x) if isinstance(x, torch.Tensor) else x for x in cloned(inputs)]
    return _again(_Wide(module), wide, seed)


def _again(run: fx.Interpreter, args: Args, seed: States) -> Args | None:
    try:
        with generators.drawing(seed), torch.no_grad():
            return [*run.run(*args), *args]
    except Exception:  # an operator without float64, or one that wants other types to be equal
        return None


# --- what a rounding may change

class _Unwritten(fx.Interpreter):
    """Runs a graph with other numbers in memory that nobody wrote: no result is promised there."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if memory_of(str(n.target)) == "unwritten":
            whole = not (value.is_floating_point() or value.is_complex())
            value.fill_(torch.nan if not whole else value.dtype is torch.bool or
                        torch.iinfo(value.dtype).max)
        return value


def nudged(module: fx.GraphModule, inputs: Results, seed: States, number: int = 0
           ) -> Args | None:
    """Results and arguments afterwards where the arguments are off by a rounding: what jumps, such
    as a comparison of sums, may do so in another place."""
    return _again(_Unwritten(module), off_by_roundings(inputs, number), seed)


def off_by_roundings(args: Results, number: int = 0) -> Args:
    """Copies of arguments whose floating-point numbers are about an ulp off, but for whole numbers,
    with which arithmetic is often exact."""
    copies, numbers = cloned(args), torch.Generator().manual_seed(number)
    memory = {x.untyped_storage()._cdata: x for x in copies if isinstance(x, torch.Tensor)
              and x.layout is torch.strided and x.dtype in (torch.float64, *HALVES)}
    for x in memory.values():
        flat = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
        step = torch.randn(flat.shape, generator=numbers) * torch.finfo(x.dtype).eps
        step = step.to(x.device)
        flat.copy_(torch.where(flat == flat.round(), flat, flat * (1 + step.to(x.dtype))))
    return copies
