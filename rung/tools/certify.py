"""`rung certify`: a user's own function over declared ranges of sizes, against eager and float64.

`BUILD(batch=3)` gives the function and arguments of one size; the first function that it gives is
compiled once and called with the arguments of all sizes: the ends of each range, 0 and 1, numbers
about powers of two, with other strides, with one tensor as two arguments, with other seeds. With
`train` the gradients of a weighted sum of what it gives are results too: those of floating-point
arguments and of the parameters of a module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from rung.entry import rung
from rung.frontends.torch import observed
from rung.frontends.torch.tensors import cloned
from rung.targets.base import target
from rung.targets.cpu import pool
from rung.tools import judge
from rung.tools.given import Args, Function, Given, UsageError, built, inputs_of
from rung.tools.judge import SEEDS
from rung.tools.measure import alternate, median

MOST = 12  # sizes tried of one range, and failures told


@dataclass(frozen=True)
class Flat:
    """The arguments of a call: what is in their lists and dicts, and how it is arranged."""

    leaves: Args
    spec: TreeSpec

    def __call__(self, function: Function, leaves: Sequence[Any]) -> Any:
        args, kwargs = tree_unflatten(leaves, self.spec)
        return function(*args, **kwargs)


def flat(given: Given) -> Flat:
    leaves, spec = tree_flatten((given.args, dict(given.kwargs)))
    return Flat(tuple(leaves), spec)


@dataclass
class Report:
    """What was tried; `failures` has a line each. `seconds` and `peak` bytes of a call of the
    largest size are by who runs it, or `unmeasured` says why there are none."""

    calls: int = 0
    failures: list[str] = field(default_factory=list)
    frames: list[observed.Frame] = field(default_factory=list)
    recompiles: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    unmeasured: str = ""


def certify(text: str, dims: Sequence[str], machine: str = "", train: bool = False
            ) -> tuple[str, bool, dict[str, Any]]:
    """The report, whether every call was right, and the report as the data that docs/json.md
    describes. UsageError for a range that is none."""
    ranges = dict(map(_range, dims))
    if len(ranges) < len(dims):
        raise UsageError(f"one range for each name, not {', '.join(dims)}")
    if machine:
        target(machine)
    report, largest = Report(), {name: high for name, (_, high) in ranges.items()}
    given = built(text, largest)
    twin = _copied(given.function)
    torch._dynamo.reset()

    def backend(gm: Any, examples: Sequence[Any]) -> Any:
        return rung(gm, examples, options={"target": machine, "strict": False})
    compiled, watch = observed.watched(given.function, backend, report.frames, report.recompiles)
    config: Any = torch._dynamo.config
    try:
        with config.patch(recompile_limit=1 << 20):  # past the limit Dynamo would run eager
            for where, args, seed in _calls(text, ranges):
                report.calls += 1
                for mine, theirs in zip(_state(given.function), _state(twin), strict=True):
                    theirs.copy_(mine)  # what an error left undone is told once
                if wrong := _wrong(twin, compiled, args, seed, train):
                    report.failures.append(f"{where}: {wrong}")
            _measure(report, given, compiled, train)
            return _text(report, given, largest), not report.failures, {
                "label": given.label, "certified": not report.failures, "calls": report.calls,
                "failures": report.failures, "graphs": len(report.frames),
                "recompiles": list(dict.fromkeys(report.recompiles)), "sizes": largest,
                "seconds": report.seconds, "peak_bytes": report.peak,
                "unmeasured": report.unmeasured}
    finally:
        watch.remove()
        torch._dynamo.reset()


def _calls(text: str, ranges: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, Flat, int]]:
    """(name, arguments, seed) of every call to try."""
    for sizes in _sizes(ranges):
        args = flat(built(text, sizes))
        for name, leaves in _variants(args.leaves):
            for seed in range(SEEDS if name == "as given" else 1):
                title = [*(f"{n}={size}" for n, size in sizes.items()), name, f"seed {seed}"]
                yield ", ".join(title), replace(args, leaves=leaves), seed


def _range(text: str) -> tuple[str, tuple[int, int]]:
    """`batch=0..64` as a name and two numbers."""
    name, _, rest = text.partition("=")
    low, dots, high = rest.partition("..")
    if not (name.isidentifier() and dots and low.isdigit() and high.isdigit()
            and int(low) <= int(high)):
        raise UsageError(f"a range is like batch=0..64, not {text!r}")
    return name, (int(low), int(high))


def _sizes(ranges: Mapping[str, tuple[int, int]]) -> Iterator[dict[str, int]]:
    """All at their ends, then each over its range while the others are in the middle."""
    if not ranges:
        yield {}
        return
    middle = {name: (low + high + 1) // 2 for name, (low, high) in ranges.items()}
    ends = ({name: r[end] for name, r in ranges.items()} for end in (1, 0))
    one = (middle | {name: size} for name, r in ranges.items() for size in _interesting(*r))
    seen: list[dict[str, int]] = []
    for sizes in chain(ends, one):
        if sizes not in seen:
            seen.append(sizes)
            yield sizes


def _interesting(low: int, high: int) -> list[int]:
    """Ends, 0, 1, and numbers at and about powers of two: full vectors, and tails of them."""
    about = (n + d for n in (2, 4, 8, 16, 32, 64, 256, 1024) for d in (-1, 0, 1))
    found = dict.fromkeys(n for n in (low, high, 0, 1, high - 1, *about) if low <= n <= high)
    return sorted(list(found)[:MOST])


def _variants(args: Args) -> Iterator[tuple[str, Args]]:
    """The arguments as given, laid out otherwise, and with one tensor in two places."""
    yield "as given", args
    tensors = [n for n, x in enumerate(args) if isinstance(x, torch.Tensor)]
    if any(args[n].ndim for n in tensors):
        yield "strided", tuple(_strided(x) for x in args)
    same = [(a, b) for a in tensors for b in tensors if a < b and args[a].shape == args[b].shape
            and args[a].dtype == args[b].dtype]
    if same:
        (a, b), *_ = same
        yield "aliased", tuple(args[a] if n == b else x for n, x in enumerate(args))


def _strided(x: Any) -> Any:
    """The same numbers, every second element of a longer last dimension."""
    if not isinstance(x, torch.Tensor) or not x.ndim:
        return x
    wide = x.new_zeros((*x.shape[:-1], 2 * x.shape[-1]))
    wide[..., ::2] = x.detach()
    return wide[..., ::2]


# --- one call

def _wrong(function: Function, compiled: Function, args: Flat, seed: int, train: bool) -> str:
    """What is wrong with a call, or ""."""
    before = [x.clone() for x in _state(function)]
    ours, mine = _result(compiled, args, seed, train)
    eagers, theirs = _result(function, args, seed, train)
    if isinstance(ours, Exception) or isinstance(eagers, Exception):
        a, b = (type(x).__name__ if isinstance(x, Exception) else "a result"
                for x in (ours, eagers))
        same = a == b or (a == "TorchRuntimeError" and b != "a result")  # Dynamo's name for any
        return "" if same else f"{a} where eager gives {b}"
    if len(ours) != len(eagers):
        return f"{len(ours)} results where eager gives {len(eagers)}"
    pairs = list(zip([*ours, *mine], [*eagers, *theirs], strict=True))
    for n, (a, b) in enumerate(pairs):
        if (a.shape, a.dtype, a.stride()) != (b.shape, b.dtype, b.stride()) and a.numel():
            return f"result {n} is {_kind(a)} where eager's is {_kind(b)}"
    bounds = [judge.BOUNDS.get(b.dtype, 0.0) for _, b in pairs]
    found = judge.wrong([*ours, *mine], [*eagers, *theirs], bounds,
                        _reference(function, before, args, seed, train))
    return next((f"result {x.number} is {x.error:.3g} off, of {x.size:.3g}" for x in found), "")


def _reference(function: Function, before: Sequence[torch.Tensor], args: Flat, seed: int,
               train: bool) -> judge.Reference:
    """What the function gives in float64, and for arguments that are off by roundings, from the
    state `before`."""
    def run(function: Function, leaves: Sequence[Any]) -> list[torch.Tensor] | None:
        for x, old in zip(_state(function), before, strict=True):
            x.copy_(old)
        made, after = _result(function, replace(args, leaves=tuple(leaves)), seed, train)
        return None if isinstance(made, Exception) else [*made, *after]

    def exact() -> list[torch.Tensor] | None:
        wide = _copied(function)
        return run(wide.double() if isinstance(wide, nn.Module) else wide, [
            x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for x in args.leaves])
    return judge.Reference(cache(exact), cache(lambda: [
        run(_copied(function), judge.off_by_roundings(args.leaves, n)) for n in range(SEEDS)]))


def _copied(function: Function) -> Function:
    """A copy with state of its own, where there can be one."""
    try:
        return copy.deepcopy(function)
    except Exception:  # as of parameters that are computed
        return function


def _result(function: Function, args: Flat, seed: int, train: bool
            ) -> tuple[Any, list[torch.Tensor]]:
    """The tensors that a call gives, or the exception that it raises; arguments and buffers of a
    module afterwards."""
    given = cloned(args.leaves)
    torch.manual_seed(seed)
    try:
        made = _called(function, args, given, train)
    except Exception as error:  # whatever the user's function raises: both must do the same
        return error, []
    return made, [x.detach().clone() for x in (*inputs_of(tuple(given)), *_state(function))]


def _state(function: Function) -> Sequence[torch.Tensor]:
    return tuple(function.buffers()) if isinstance(function, nn.Module) else ()


def _called(function: Function, args: Flat, leaves: Sequence[Any], train: bool
            ) -> list[torch.Tensor]:
    """The tensors that a call gives and, with `train`, the gradients of their sum under weights."""
    if not train:
        with torch.no_grad():
            return list(inputs_of((args(function, leaves),)))
    wanted = [x.requires_grad_() for x in inputs_of(tuple(leaves)) if x.is_floating_point()]
    wanted += function.parameters() if isinstance(function, nn.Module) else []
    wanted = [x for x in dict.fromkeys(wanted) if x.requires_grad]
    made = list(inputs_of((args(function, leaves),)))
    roots = [x for x in made if x.requires_grad]
    weights = [torch.arange(x.numel()).cos().to(x.dtype).view(x.shape) for x in roots]
    found = torch.autograd.grad(roots, wanted, weights, allow_unused=True) if roots else ()
    return [x.detach() for x in made] + [
        torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=False)]


def _kind(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} with strides {list(x.stride())}"


# --- the report

def _measure(report: Report, given: Given, compiled: Function, train: bool) -> None:
    runs, args = {"rung": compiled, "eager": given.function}, flat(given)

    def call(run: Function) -> Callable[[], Any]:
        return lambda: _called(run, args, cloned(args.leaves) if train else args.leaves, train)
    try:
        report.seconds = {n: median(t) for n, t in alternate(
            {n: call(r) for n, r in runs.items()}, rounds=5, sample=5e-3).items()}
        report.peak = {n: observed.peak_bytes(call(r), pool.clear) for n, r in runs.items()}
    except Exception as error:  # the largest size fails in eager too, or it was told above
        report.unmeasured = f"{type(error).__name__}: {error}"


def _text(report: Report, given: Given, sizes: Mapping[str, int]) -> str:
    wrong, times = len(report.failures), report.seconds
    lines = [f"{given.label}: {report.calls} calls, {wrong} wrong"]
    lines += [f"  {x}" for x in report.failures[:MOST]]
    lines += [f"  and {wrong - MOST} more"] if wrong > MOST else []
    lines.append(f"graphs: {len(report.frames)}, recompiles: {observed.recompiled(report.frames)}")
    lines += [f"  {x}" for x in dict.fromkeys(report.recompiles)]
    lines += [] if report.frames else ["nothing was compiled: Dynamo leaves this to eager"]
    if report.unmeasured:
        return "\n".join([*lines, f"not measured: {report.unmeasured}", ""])
    at = ", ".join(f"{n}={size}" for n, size in sizes.items())
    lines.append(f"a warm call{' at ' + at if at else ''}: " + "; ".join(
        f"{n} {times[n] * 1e3:.3f} ms, peak {report.peak[n] / 1024:.1f} KiB" for n in times))
    if times["rung"] > 1.05 * times["eager"]:
        lines.append(f"slower than eager, {times['rung'] / times['eager']:.2f} times")
    return "\n".join([*lines, "certified" if not wrong else "not certified", ""])
