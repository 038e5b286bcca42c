"""Table of the overloads whose indices are data: each read or write is checked as eager does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rung.core.errors import Unsupported
from rung.core.expr import Expr
from rung.core.op import Value
from rung.core.types import I32, I64, dtype_of
from rung.frontends.torch.emit import Emit, dimension
from rung.frontends.torch.shapes import product
from rung.tensor.ir import Gather, Scatter, shape_of

Build = Callable[..., Value]


def check(e: Emit, at: Value, low: Expr, high: Expr, error: str, message: str) -> None:
    if dtype_of(at.type) not in (I32, I64):
        raise Unsupported(f"an index of type {at.type}")
    e.check(at, low, high, error, message)


def wrapped(e: Emit, at: Value, dim: int, size: Expr) -> Value:
    """Indices checked to be in [-size, size), the negative ones counted from the end."""
    check(e, at, -size, size, "IndexError",
          f"index is out of bounds for dimension {dim} with size {size}")
    below = e.map("lt", at, 0)
    known = e.value(size, dtype_of(at.type))
    return e.map("where", below, e.map("add", at, known), at)


def as_vector(e: Emit, at: Value) -> Value:
    return at if shape_of(at) else e.reshape(at, (Expr.of(1),))


def embedding(e: Emit, weight: Value, at: Value, *_: object) -> Value:
    check(e, at, Expr.of(0), shape_of(weight)[0], "IndexError", "index out of range in self")
    return e.op(Gather(weight, 0, at))


def index_select(e: Emit, x: Value, dim: int, at: Value) -> Value:
    rank = len(shape_of(x))
    if not rank or len(shape_of(at)) != 1:
        raise Unsupported("index_select of or by a scalar")
    dim = dimension(dim, rank)
    error = ("RuntimeError", "INDICES element is out of DATA bounds") if dim == 1 else (
        "IndexError", "index out of range in self")  # torch has a kernel of its own for dim 1
    check(e, at, Expr.of(0), shape_of(x)[dim], *error)
    return e.op(Gather(x, dim, at))


def index_copy(e: Emit, x: Value, dim: int, at: Value, source: Value) -> Value:
    if not e.shape or not shape_of(source):
        raise Unsupported("index_copy of scalars")
    dim = dimension(dim, len(e.shape))
    check(e, at, Expr.of(0), e.shape[dim], "IndexError",
          f"index_copy_(): index is out of bounds for dimension {dim} with size {e.shape[dim]}")
    return e.op(Scatter(x, dim, as_vector(e, at), source))


def indexed(indices: Sequence[Value | None]) -> tuple[int, list[Value]]:
    """The first of the dimensions that are indexed, which must be neighbours, and by what."""
    found = [(n, at) for n, at in enumerate(indices) if at is not None]
    first = found[0][0]
    if [n for n, _ in found] != list(range(first, first + len(found))):
        raise Unsupported("index tensors that are not neighbours")
    return first, [at for _, at in found]


def index(e: Emit, x: Value, indices: Sequence[Value | None]) -> Value:
    """Several index tensors are one into their dimensions merged."""
    dim, found = indexed(indices)
    size = shape_of(x)
    shape = e.shape[dim:len(e.shape) - (len(size) - dim - len(found))]
    at: Value | None = None
    for n, part in enumerate(found, dim):
        (place,) = e.expanded(shape, wrapped(e, part, n, size[n]))
        at = place if at is None else e.map("add", e.map("mul", at, e.value(
            size[n], dtype_of(at.type))), e.value(place, dtype_of(at.type)))
    merged = product(size[dim:dim + len(found)])
    rows = e.reshape(x, (*size[:dim], merged, *size[dim + len(found):]))
    return e.op(Gather(rows, dim, at)) if at is not None else x


def index_put(e: Emit, x: Value, indices: Sequence[Value | None], values: Value,
              accumulate: bool) -> Value:
    dim, found = indexed(indices)
    at = found[0]
    if accumulate or len(found) > 1 or len(shape_of(at)) > 1:
        raise Unsupported("index_put that accumulates, or by more than one vector")
    if dtype_of(values.type) != e.dtype:
        raise Unsupported(f"index_put of {values.type}")
    shape = (*e.shape[:dim], *shape_of(at), *e.shape[dim + 1:])
    source = e.expand(values, shape)
    vector = as_vector(e, wrapped(e, at, dim, e.shape[dim]))
    if not shape_of(at):
        source = e.reshape(source, (*e.shape[:dim], Expr.of(1), *e.shape[dim + 1:]))
    return e.op(Scatter(x, dim, vector, source))


INDEXING: dict[str, Build] = {
    "aten::embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, "
    "bool scale_grad_by_freq=False, bool sparse=False) -> Tensor": embedding,
    "aten::index_select(Tensor self, int dim, Tensor index) -> Tensor": index_select,
    "aten::index_copy(Tensor self, int dim, Tensor index, Tensor source) -> Tensor": index_copy,
    "aten::index.Tensor(Tensor self, Tensor?[] indices) -> Tensor": index,
    "aten::_unsafe_index.Tensor(Tensor self, Tensor?[] indices) -> Tensor": index,
    "aten::index_put(Tensor self, Tensor?[] indices, Tensor values, bool accumulate=False) "
    "-> Tensor": index_put,
}
