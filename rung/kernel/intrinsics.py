"""Instructions callable from Kernel IR: the meaning is here, the text in the target.

The meaning is a Loop IR fragment: legality matches contractions with it, a test compares the
instruction with it. `apply mac16 c, a, b by k16` works on families: a varies over rows and the
unrolled axis k16, b over k16 and lanes; sizes are multiples of the instruction's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rung.core.errors import VerifyError
from rung.core.interp import Interp
from rung.core.op import Op, Value
from rung.core.ops import join
from rung.core.types import F32, Axis, DType, Type, dtype_of


@dataclass(frozen=True)
class Intrinsic:
    """A contraction instruction: rows x columns x depth of one call; 1 x 1 x 1 is scalar."""

    name: str
    rows: int
    cols: int
    depth: int
    acc: DType = F32

    @property
    def meaning(self) -> str:
        """The fragment that one call computes, as Loop IR text."""
        m, n, k = self.rows, self.cols, self.depth
        return (f"kernel {self.name}(a: {self.acc}[{m},{k}], b: {self.acc}[{k},{n}]) -> "
                f"d: {self.acc}[{m},{n}]\n"
                f"  c = contract add mul a[i,k], b[k,j] over k {k} : {self.acc} over i,j "
                f"acc {self.acc}\n  d[i,j] = c\n")


INTRINSICS = {x.name: x for x in (
    Intrinsic("fma", 1, 1, 1), Intrinsic("ffma", 1, 1, 1), Intrinsic("mac16", 16, 16, 16))}


@dataclass(frozen=True, eq=False)
class Apply(Op):
    """`c + a*b` summed over an unrolled axis, on whole families, by an instruction."""

    name: str
    c: Value
    a: Value
    b: Value
    axis: Axis
    keyword: ClassVar[str] = "apply"
    form: ClassVar[str] = "apply {name} {c}, {a}, {b} by {axis}"

    def infer(self) -> tuple[Type, ...]:
        return (self.c.type,)

    def check(self) -> None:
        if self.name not in INTRINSICS:
            raise VerifyError(f"no instruction is called {self.name!r}")
        acc = INTRINSICS[self.name].acc
        if {dtype_of(v.type) for v in (self.c, self.a, self.b)} != {acc}:
            raise VerifyError(f"{self.name} takes {acc}, not {self.c.type}, {self.a.type}, "
                              f"{self.b.type}")
        product = join((self.a.type, self.b.type), acc)
        free = [u for u in getattr(product, "unroll", ()) if u[0] != self.axis]
        if set(free) - set(getattr(self.c.type, "unroll", ())):
            raise VerifyError(f"the product {product} is no {self.c.type}")

    def run(self, interp: Interp, *operands: Any) -> Any:
        at = interp.position(self.axis)
        c, a, b = (np.reshape(x, np.shape(x) or (1,) * len(interp.axes)) for x in operands)
        dims = range(a.ndim)
        keep = [[d for d in dims if x.shape[d] != 1 or d == at] for x in (a, b)]
        out = [d for d in dims if d != at and (d in keep[0] or d in keep[1])]
        y = np.einsum(a.reshape([a.shape[d] for d in keep[0]]), keep[0],
                      b.reshape([b.shape[d] for d in keep[1]]), keep[1], out, optimize=True)
        return c + np.reshape(y, [1 if d not in out else max(a.shape[d], b.shape[d])
                                  for d in dims])
