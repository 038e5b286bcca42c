"""Intrinsics: instructions callable from Kernel IR. The machine says which ones there are.

`apply mac16 c, a, b by k16` works on families: a varies over rows and the unrolled axis k16, b over
k16 and lanes; sizes are multiples of the instruction's. Operands of a narrower type than c are
converted to it before they are multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rung.core.errors import VerifyError
from rung.core.interp import Interp
from rung.core.op import Op, Value
from rung.core.ops import join
from rung.core.types import Axis, Type, dtype_of


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
        acc = dtype_of(self.c.type)
        if any(dtype_of(v.type).is_float != acc.is_float or dtype_of(v.type).bytes > acc.bytes
               for v in (self.a, self.b)):
            raise VerifyError(f"products of {self.a.type} and {self.b.type} are no {self.c.type}")
        product = join((self.a.type, self.b.type), acc)
        free = [u for u in getattr(product, "unroll", ()) if u[0] != self.axis]
        if set(free) - set(getattr(self.c.type, "unroll", ())):
            raise VerifyError(f"the product {product} is no {self.c.type}")

    def run(self, interp: Interp, *operands: Any) -> Any:
        at = interp.position(self.axis)
        c, a, b = (np.reshape(x, np.shape(x) or (1,) * len(interp.axes)) for x in operands)
        a, b = a.astype(c.dtype), b.astype(c.dtype)
        dims = range(a.ndim)
        keep = [[d for d in dims if x.shape[d] != 1 or d == at] for x in (a, b)]
        out = [d for d in dims if d != at and (d in keep[0] or d in keep[1])]
        y = np.einsum(a.reshape([a.shape[d] for d in keep[0]]), keep[0],
                      b.reshape([b.shape[d] for d in keep[1]]), keep[1], out, optimize=True)
        return c + np.reshape(y, [1 if d not in out else max(a.shape[d], b.shape[d])
                                  for d in dims])
