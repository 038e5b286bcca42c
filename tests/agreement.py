"""Helpers: what a function does compiled against what it does in eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rung.compilation import History
from rung.core import trace
from rung.frontends.torch.calls import schema_of
from rung.program.ir import Call

Calls = Sequence[Sequence[Any]]


def rung(fn: Callable[..., Any], strict: bool = True, **kwargs: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="rung", options={"strict": strict}, **kwargs)


def leaves(x: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(x)


def copied(args: Sequence[Any]) -> list[Any]:
    """Copies with the same strides in copies of the storages, which they share as `args` do; they
    require gradients where `args` do."""
    storages: dict[int, torch.UntypedStorage] = {}
    found: dict[int, Any] = {}
    for x in args:
        if not isinstance(x, torch.Tensor):
            found[id(x)] = x
        elif id(x) not in found:
            place = x.untyped_storage()
            storage = storages.setdefault(place._cdata, place.clone())
            new = torch.empty(0, dtype=x.dtype).set_(
                storage, x.storage_offset(), x.shape, x.stride())
            found[id(x)] = new.requires_grad_(x.requires_grad)
    return [found[id(x)] for x in args]


def sharing(outs: Sequence[Any], args: Sequence[Any]) -> set[str]:
    """Which tensors among results and arguments are one, or lie in one storage."""
    named = {f"out {n}": x for n, x in enumerate(outs)} | {
        f"in {n}": x for n, x in enumerate(args)}
    found = {k: x for k, x in named.items() if isinstance(x, torch.Tensor) and x.numel()}
    return {f"{a} {'is' if found[a] is found[b] else '~'} {b}" for a in found for b in found
            if a < b and found[a].untyped_storage().data_ptr() ==
            found[b].untyped_storage().data_ptr()}


def outcome(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[list[Any], list[Any], Any]:
    """Results, gradients of the arguments, and the sharing of one call."""
    outs = leaves(fn(*args))
    roots = [x for x in outs if isinstance(x, torch.Tensor) and x.requires_grad]
    wanted = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
    shared = sharing(outs, args)
    grads = torch.autograd.grad(
        [(x.double() * (n + 1)).sum() for n, x in enumerate(roots)], wanted,
        allow_unused=True) if roots else []
    return outs, list(grads), shared


def steps(x: torch.Tensor) -> list[int]:
    """The strides of dimensions with more than one element: the others lead nowhere."""
    return [step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1]


def same(got: Any, want: Any, exact: bool = False) -> None:
    assert type(got) is type(want)
    if not isinstance(want, torch.Tensor):
        assert got == want
        return
    assert (got.dtype, got.shape, steps(got)) == (want.dtype, want.shape, steps(want))
    tolerance: dict[str, Any] = {"rtol": 0, "atol": 0} if exact else {}
    torch.testing.assert_close(got, want, equal_nan=True, **tolerance)


def agrees(fn: Callable[..., Any], args: Sequence[Any], exact: bool = False, strict: bool = True,
           more: Sequence[Sequence[Any]] = (), **kwargs: Any) -> None:
    """`fn` does the same compiled as in eager, to its arguments too, in this call and in `more`."""
    run = rung(fn, strict, **kwargs)
    for given in (args, *more):
        theirs, ours = copied(given), copied(given)
        want, want_grads, want_sharing = outcome(fn, theirs)
        got, got_grads, got_sharing = outcome(run, ours)
        assert got_sharing == want_sharing
        for a, b in zip([*got, *got_grads, *ours], [*want, *want_grads, *theirs], strict=True):
            same(a, b, exact)


def calls_left(fn: Callable[..., Any], calls: Calls, **kwargs: Any) -> set[str]:
    """Operators that are called in the graphs of `fn`, whose results are eager's; each graph is
    compiled, and there are kernels."""
    run = rung(fn, **kwargs)
    with trace.listen() as events:
        for args in calls:
            for got, want in zip(leaves(run(*args)), leaves(fn(*args)), strict=True):
                same(got, want)
    histories: list[History] = [e.data["history"] for e in events if e.kind == "compiled"]
    assert any(s.modules["kernel"].kernels for s in histories)
    return {op.target for s in histories for op in s.modules["kernel"].main.body.ops
            if isinstance(op, Call) and schema_of(op.target)} - {"aten.scalar_tensor.default"}
