"""Types and sizes of torch's values as those of the IR, and the order of dimensions in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from rung.core.errors import Unsupported
from rung.core.expr import ONE, Expr, may_be_negative, sym
from rung.core.op import Func
from rung.core.types import BOOL, FLOAT, INDEX, DType, TensorType, Type, VecType, contiguous
from rung.frontends.torch.compat import Sympy, size_expr
from rung.frontends.torch.tensors import DTYPES

TORCH_DTYPES: dict[torch.dtype, DType] = {theirs: ours for ours, theirs in DTYPES.items()}


def hints_of(func: Func, example_inputs: Sequence[Any]) -> dict[str, int]:
    """What each size symbol of a program is in the inputs that its graph was traced with."""
    hints: dict[str, int] = {}
    for param, x in zip(func.params, example_inputs, strict=False):
        pairs = [(sym(param.name), x)]
        if isinstance(param.type, TensorType):
            pairs = list(zip(param.type.shape, x.shape, strict=True))
        for size, actual in pairs:
            number = actual.node.hint if isinstance(actual, torch.SymInt) else actual
            if size.is_symbol() and isinstance(number, int):
                hints[str(size)] = number
    return hints


def to_expr(e: Sympy, known: Mapping[Sympy, Expr] = MappingProxyType({}),
            other: Callable[[Sympy, Sequence[Expr]], Expr] | None = None) -> Expr:
    """A sympy expression of a size, in which some are `known`. `other` gives symbols, and other
    functions of arguments than + * // % of sizes; Unsupported where nothing does."""
    if e in known or e.is_Integer:
        return known[e] if e in known else Expr.of(int(e))
    args = [to_expr(x, known, other) for x in e.args]
    match type(e).__name__, args:
        case "Add", _:
            return sum(args, Expr.of(0))
        case "Mul", _:
            product = ONE
            for x in args:
                product = product * x
            return product
        case "Pow", [x, n] if n.const_value is not None and n.const_value > 0:
            return to_expr(e.args[0] ** (n.const_value - 1), known, other) * x
        case ("FloorDiv" | "CleanDiv"), [x, y] if _are_sizes(args):
            return x // y
        case ("Mod" | "PythonMod"), [x, y] if _are_sizes(args):
            return x % y
        case "ModularIndexing", [x, y, z] if _are_sizes(args):
            return x // y % z
        case "Max", [x, y] if ONE in (x, y) and _are_sizes(args):
            return y if x is ONE else x  # strides of sizes that could be 0
    if other is None and not e.is_Symbol:
        raise Unsupported(f"size {e}")
    return other(e, args) if other else sym(e.name)


def _are_sizes(args: Sequence[Expr]) -> bool:
    """Whether the algebra of sizes holds for these, of which all but the first are > 0."""
    return not any(map(may_be_negative, args)) and all((x.const_value or 1) > 0 for x in args[1:])


def size_of(size: int | torch.SymInt) -> Expr:
    return to_expr(size_expr(size)) if isinstance(size, torch.SymInt) else Expr.of(int(size))


def dtype_of(dtype: torch.dtype, negated: bool = False) -> DType:
    """The type of elements; those that Rung cannot compute with have kind x (or c, complex).

    `negated`: the memory holds them with the opposite sign, as that of `z.conj().imag` does.
    """
    found = None if negated else TORCH_DTYPES.get(dtype)
    return found or DType(str(dtype).removeprefix("torch."), "c" if dtype.is_complex else "x",
                          8 * dtype.itemsize)


def order_of(kind: Type) -> tuple[int, ...] | None:
    """The dimensions from the slowest to the fastest in memory; None for a layout with gaps."""
    assert isinstance(kind, TensorType)
    order: list[int] = []
    rest = list(range(len(kind.shape)))
    if kind.strides is None:
        return tuple(rest)
    want = ONE
    while rest:
        found = _fastest(rest, kind.shape, kind.strides, want)
        if found is None:
            return None
        rest.remove(found)
        order.insert(0, found)
        want = want * kind.shape[found]
    return tuple(order)


def _fastest(rest: Sequence[int], shape: Sequence[Expr], strides: Sequence[Expr],
             want: Expr) -> int | None:
    fits = (n for n in reversed(rest) if shape[n] is ONE or strides[n] is want)
    return next(fits, None)


def type_of(val: Any, size_of: Callable[[int | torch.SymInt], Expr] = size_of) -> Type:
    """The type of a node's `meta['val']`."""
    if isinstance(val, bool | torch.SymBool):
        return VecType(BOOL)
    if isinstance(val, int | torch.SymInt):
        return INDEX
    if isinstance(val, float | torch.SymFloat):
        return FLOAT
    sparse = isinstance(val, torch.Tensor) and val.layout is torch.sparse_coo
    if not isinstance(val, torch.Tensor) or val.is_quantized or (
            val.layout is not torch.strided and not sparse):
        raise Unsupported(f"a value of {type(val).__name__}")
    dtype = dtype_of(val.dtype, val.is_neg())
    shape = tuple(size_of(s) for s in val.shape)
    if sparse:  # library calls alone make and read it
        return TensorType(DType(f"sparse_{dtype}", "x", dtype.bits), shape)
    strides = tuple(size_of(s) for s in val.stride())
    plain = zip(shape, strides, contiguous(shape), strict=True)
    if any(s.is_const(0) for s in shape) or all(s is ONE or a is b for s, a, b in plain):
        return TensorType(dtype, shape)
    return TensorType(dtype, shape, strides)
