"""Loops and branches of the Kernel IR.

    mm = for k in 0..16 cap s0 carry c = c0 : f32x16
      ...
      yield c1
    if nonneg [14-k]
      ...

Loop variables appear in index expressions by name. On NumPy a loop `at` a thread level is not
sequential: its variable spans a dimension of the values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rung.core.errors import VerifyError
from rung.core.expr import Expr
from rung.core.interp import Interp
from rung.core.op import Block, Op, Value
from rung.core.ops import Yield
from rung.core.types import Axis, Type

THREADS = ("wg", "warp", "thread", "lane")  # levels whose steps run in lockstep, one a thread


@dataclass(frozen=True, eq=False)
class For(Op):
    """A loop from 0 up to `hi`, or `cap` if that is less; carries values through `yield`."""

    var: Axis
    hi: Expr
    body: Block
    cap: Expr | None = None
    level: str = ""
    inits: tuple[Value, ...] = ()
    keyword: ClassVar[str] = "for"
    form: ClassVar[str] = "for {var} in 0..{hi}< cap {cap}>< at {level}>< carry {carry}>"

    def infer(self) -> tuple[Type, ...]:
        return tuple(a.type for a in self.body.args)

    def check(self) -> None:
        _check_yield(self.body, tuple(v.type for v in self.inits))

    def run(self, interp: Interp, *operands: Any) -> Any:
        state: Any = operands
        for _ in self.steps(interp):
            out = interp.block(self.body, state)
            state = out if self.inits else state
        return state if len(self.inits) != 1 else state[0]

    def steps(self, interp: Interp) -> Iterator[None]:
        """Sets the loop variable to its values in sequence; for threads to all at once."""
        hi = int(interp.index(self.hi))
        if self.cap is not None:
            hi = min(hi, int(interp.index(self.cap)))
        values = [interp.spread(self.var, hi)] if self.level in THREADS else map(
            np.asarray, range(hi))
        for value in values:
            interp.symbols[self.var] = value
            yield


@dataclass(frozen=True, eq=False)
class If(Op):
    """`then` where every expression of `cond` is >= 0, else `orelse`; both may be empty."""

    cond: tuple[Expr, ...]
    then: Block
    orelse: Block
    types: tuple[Type, ...] = ()
    keyword: ClassVar[str] = "if"
    form: ClassVar[str] = "if nonneg [{cond}]"

    def infer(self) -> tuple[Type, ...]:
        return self.types

    def check(self) -> None:
        for block in (self.then, self.orelse):
            _check_yield(block, self.types)

    def run(self, interp: Interp, *operands: Any) -> Any:
        where = interp.valid(self.cond)
        if where.size != 1:
            raise NotImplementedError("a branch on a thread's index")
        out = interp.block(self.then if where.all() else self.orelse)
        return out if len(self.types) != 1 else out[0]


def _check_yield(block: Block, types: tuple[Type, ...]) -> None:
    given = block.ops[-1].operands() if block.ops and isinstance(block.ops[-1], Yield) else ()
    if tuple(v.type for v in given) != types:
        shown = ", ".join(str(v.type) for v in given) or "nothing"
        raise VerifyError(f"yields {shown}, not {', '.join(map(str, types)) or 'nothing'}")
