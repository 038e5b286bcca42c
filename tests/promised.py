"""Programs that are promised something of a result before it is made, which then is not so.

Run as a script, it breaks each promise under Rung and says what came of it: the sanitizers' run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Args = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Promised:
    """A function with arguments for which the promises hold, others for which they do not, and a
    part of the error then."""

    fn: Callable[..., Any]
    kept: Args
    broken: Args
    error: str
    train: bool = False


def compiled(program: Promised, dynamic: bool | None = None) -> Callable[..., Any]:
    """The function under Rung, called once with arguments that keep the promise."""
    torch._dynamo.reset()
    made: Callable[..., Any] = torch.compile(program.fn, backend="rung", dynamic=dynamic)
    made(*copies(program.kept, program.train))
    return made


def copies(args: Args, train: bool) -> list[torch.Tensor]:
    return [x.clone().requires_grad_(train) for x in args]


def capturing() -> Any:
    """Patches Dynamo's settings so that sizes and numbers that follow data stay in a graph."""
    return torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True,
                                      capture_scalar_outputs=True)


# --- checks of the user

def checked_rows(mask: torch.Tensor) -> torch.Tensor:
    at = mask.nonzero()
    torch._check(at.size(0) == 4)
    return at + 3


def returned_rows(mask: torch.Tensor) -> torch.Tensor:
    at = mask.nonzero()
    torch._check(at.size(0) == 4)
    return at


def equal_rows(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = x.nonzero(), y.nonzero()
    torch._check(a.size(0) == b.size(0))
    return a * 2, b + 1


def rows_of_an_argument(mask: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    at = mask.nonzero()
    torch._check(at.size(0) == y.size(0))
    return at[:, 0] * y


def viewed_rows(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0].view(2, 3) + 1


def multiplied_rows(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows = x[mask.bool()]
    torch._check(rows.size(0) == 2)
    return (rows @ x).relu()


def distinct(x: torch.Tensor) -> torch.Tensor:
    values, counts = torch.unique(x, return_counts=True)
    torch._check(values.size(0) == 3)
    return values * counts


def fixed_lengths(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    first, second = lengths.tolist()
    torch._check(first == 3)
    torch._check(second == 5)
    return x[:first].sum() + x[first:first + second] * 2


def asserted(x: torch.Tensor) -> torch.Tensor:
    assert (x > 0).all().item()
    return x + 1


def repeated(x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    y = x.repeat_interleave(times)
    torch._check(y.size(0) == 4)
    return y * x


def overwritten(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    at = mask.nonzero()[:, 0]
    torch._check(at.size(0) == 4)
    x.add_(at)
    return x + 1


# --- fake implementations of the user, which data prove wrong

def liar(name: str, make: Callable[[torch.Tensor], Any], fake: Callable[[torch.Tensor], Any],
         result: str = "Tensor") -> Callable[[torch.Tensor], Any]:
    """An operator that makes a copy, or of a first element that is negative, what `make` says."""
    LIBRARY.define(f"{name}(Tensor x) -> {result}")
    LIBRARY.impl(name, lambda x: make(x) if x.flatten()[0] < 0 else fake(x), "CPU")
    LIBRARY.impl(name, fake, "Meta")
    op: Callable[[torch.Tensor], Any] = getattr(torch.ops.rung_promised, name).default
    return op


LIBRARY = torch.library.Library("rung_promised", "DEF")
head = liar("head", lambda x: x[:2].clone(), torch.clone)
none = liar("none", lambda x: x.new_empty(0), torch.clone)
long = liar("long", lambda x: torch.cat([x, x]), torch.clone)
part = liar("part", lambda x: torch.cat([x, x])[:3], torch.clone)
flat = liar("flat", lambda x: x.reshape(-1, 1).clone(), torch.clone)
wide = liar("wide", torch.Tensor.double, torch.clone)
away = liar("away", lambda x: x.to("meta"), torch.clone)
several = liar("several", lambda x: [x.clone()], lambda x: [x.clone(), x.clone()], "Tensor[]")
minus = liar("minus", torch._neg_view, torch.clone)


class Gradient(torch.autograd.Function):
    """A copy, with a gradient by an operator that lies."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = head(grad)
        return found


def of_liar(op: Callable[[torch.Tensor], Any], then: Callable[[Any], Any], error: str,
            train: bool = False) -> Promised:
    x = torch.arange(1.0, 9.0)
    return Promised(lambda x: then(op(x)), (x,), (-x,), error, train)


MASK, FEW = torch.tensor([0, 1, 1, 1, 1, 0, 0]), torch.tensor([0, 1, 0, 0, 1, 0, 0])
NONZERO = r"nonzero\.default gave \(2, 1\).* where \(4, 1\)"
PROGRAMS = {
    "checked rows": Promised(checked_rows, (MASK,), (FEW,), NONZERO),
    "no rows": Promised(checked_rows, (MASK,), (0 * MASK,), r"gave \(0, 1\).* where \(4, 1\)"),
    "returned rows": Promised(returned_rows, (MASK,), (FEW,), NONZERO),
    "equal rows": Promised(equal_rows, (MASK, MASK), (MASK, FEW), "gave|Runtime assertion"),
    "rows of an argument": Promised(rows_of_an_argument, (MASK, torch.ones(4)),
                                    (FEW, torch.ones(4)), NONZERO),
    "viewed rows": Promised(viewed_rows, (torch.tensor([1.0, 2, 3, 4, 5, 6, 0, 0]),),
                            (torch.tensor([1.0, 2, 3, 0, 0, 0, 0, 0]),), r"gave \(3,\).*\(6,\)"),
    "multiplied rows": Promised(multiplied_rows, (torch.eye(3), torch.tensor([1, 0, 1])),
                                (torch.eye(3), torch.tensor([1, 0, 0])), r"\(1, 3\).*\(2, 3\)"),
    "distinct": Promised(distinct, (torch.tensor([3, 1, 1, 2]),), (torch.tensor([3, 1, 1, 1]),),
                         r"unique.* gave \(2,\).* where \(3,\)"),
    "fixed lengths": Promised(fixed_lengths, (torch.ones(8), torch.tensor([3, 5])),
                              (torch.ones(8), torch.tensor([3, 1 << 40])), "gave 1099.* where 5"),
    "asserted": Promised(asserted, (torch.ones(3),), (-torch.ones(3),), "gave False.* where True"),
    "repeated": Promised(repeated, (torch.ones(4), torch.tensor([1, 2, 0, 1])),
                         (torch.ones(4), torch.tensor([1, 0, 0, 1])), r"\(2,\).* where \(4,\)"),
    "overwritten": Promised(overwritten, (MASK, torch.ones(4)), (FEW, torch.ones(4)), NONZERO),
    "fewer": of_liar(head, lambda y: y + 1, r"rung_promised\.head\.default gave \(2,\).*\(8,\)"),
    "none": of_liar(none, lambda y: y * 2 + 1, r"none\.default gave \(0,\).*\(8,\)"),
    "more": of_liar(long, lambda y: y.sum(), r"long\.default gave \(16,\).*\(8,\)"),
    "a view": of_liar(part, lambda y: y.view(2, 4).t() + 1, r"part\.default gave \(3,\).*\(8,\)"),
    "more dimensions": of_liar(flat, lambda y: y + 1, r"flat\.default gave \(8, 1\).*\(8,\)"),
    "another type": of_liar(wide, lambda y: y + 1, r"wide\.default gave .*float64.*float32"),
    "another device": of_liar(away, lambda y: y + 1, r"away\.default gave .*meta.*cpu"),
    "another sign": of_liar(minus, lambda y: y + 1, r"minus\.default gave .*negated"),
    "fewer results": of_liar(several, lambda ys: ys[0] + ys[1], r"several\.default gave 1 "),
    "sorted": of_liar(head, lambda y: torch.sort(y)[0] + 1, r"head\.default gave \(2,\).*\(8,\)"),
    "gradient": of_liar(lambda x: Gradient.apply(x * 2), lambda y: y * y,
                        r"head\.default gave \(2,\).*\(8,\)", train=True)}


def broken(program: Promised, fn: Callable[..., Any]) -> Any:
    """The result of a call that breaks the promise; in training, the gradient."""
    args = copies(program.broken, program.train)
    out = fn(*args)
    if program.train:
        out.sum().backward()
        return args[0].grad
    return out


def main() -> None:
    with capturing():
        for name, program in PROGRAMS.items():
            try:
                broken(program, compiled(program))
                print(f"{name}: no error")
            except RuntimeError as error:
                print(f"{name}: {error}")


if __name__ == "__main__":
    main()
