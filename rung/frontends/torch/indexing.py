"""Table of the overloads whose indices are data: each read or write is checked as eager does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rung.core.errors import Unsupported
from rung.core.expr import Expr
from rung.core.op import Value
from rung.core.scalar import LAST, MONOIDS
from rung.core.types import BOOL, F64, I32, I64, dtype_of
from rung.frontends.torch.emit import HALVES, Emit, Number, dimension
from rung.frontends.torch.shapes import product
from rung.tensor.ir import Full, Gather, Scatter, shape_of

Build = Callable[..., Value | tuple[Value, ...]]


def check(e: Emit, at: Value, low: Expr, high: Expr, error: str, message: str) -> None:
    if dtype_of(at.type) not in (I32, I64):
        raise Unsupported(f"an index of type {at.type}")
    e.check(at, low, high, error, message)


def wrapped(e: Emit, at: Value, dim: int, size: Expr) -> Value:
    """Indices checked to be in [-size, size), the negative ones counted from the end."""
    check(e, at, -size, size, "IndexError",
          f"index {{}} is out of bounds for dimension {dim} with size {{size}}")
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
          f"index_copy_(): index is out of bounds for dimension {dim} with size {{size}}")
    return e.op(Scatter(x, dim, as_vector(e, at), source))


def index_add(e: Emit, x: Value, dim: int, at: Value, source: Value, alpha: Number = 1) -> Value:
    if not e.shape or not shape_of(source):
        raise Unsupported("index_add of scalars")
    dim = dimension(dim, len(e.shape))
    error = ("IndexError", "index out of range in self") if len(e.shape) == 1 or alpha != 1 else (
        "RuntimeError", f"index {{}} is out of bounds for dimension {dim} with size {{size}}")
    check(e, at, Expr.of(0), e.shape[dim], *error)
    if alpha != 1:
        source = e.map("mul", source, e.value(alpha, e.dtype))
    return added(e, x, dim, as_vector(e, at), source)


def added(e: Emit, x: Value, dim: int, at: Value, source: Value, by: str = "add") -> Value:
    """`source` added to `x` at indices, one after the other as eager does. Half-width floats,
    which eager rounds at each step, stay calls."""
    if e.dtype in HALVES or e.dtype is BOOL or dtype_of(source.type) != e.dtype:
        raise Unsupported(f"{e.dtype} added up where data say")
    return e.op(Scatter(x, dim, at, source, by))


def scattered(e: Emit, x: Value, dim: int, at: Value, source: Value | Number, by: str) -> Value:
    """x[i, at[i, n]] combined with source[i, n] for dimension 1, one n after the other."""
    if not e.shape or not shape_of(at):
        raise Unsupported("a scatter into or by a scalar")
    dim, shape = dimension(dim, len(e.shape)), shape_of(at)
    check(e, at, Expr.of(0), e.shape[dim], "RuntimeError",
          f"index {{}} is out of bounds for dimension {dim} with size {{size}}")
    if not isinstance(source, Value):
        return e.op(Scatter(x, dim, at, e.expand(e.value(source, e.dtype), shape)))
    if dtype_of(source.type) != e.dtype:
        raise Unsupported(f"a scatter of {source.type}")
    part = e.remap(source, shape, list)
    return e.op(Scatter(x, dim, at, part, by)) if by == LAST else added(e, x, dim, at, part, by)


def scatter_reduce(e: Emit, x: Value, dim: int, at: Value, source: Value, how: str,
                   included: bool = True) -> Value:
    """What is written to is combined too, if `included`, or else is the monoid's identity."""
    if how not in SCATTERED:
        raise Unsupported(f"a scatter by {how}")
    by = SCATTERED[how]
    if not included and e.dtype is not BOOL:
        x = scattered(e, x, dim, at, MONOIDS[by].identity(e.dtype), "")
    return scattered(e, x, dim, at, source, by)


def embedding_backward(e: Emit, grad: Value, at: Value, rows: object, padding: int,
                       by_frequency: bool) -> Value:
    """The sum of the gradients of each row's uses; nothing for the row `padding`, nor for an index
    outside, of which eager says nothing here."""
    if by_frequency:
        raise Unsupported("gradients scaled by frequency")
    count, width = product(shape_of(at)), e.shape[-1]
    at, grad = e.reshape(at, (count,)), e.reshape(grad, (count, width))
    known = e.value(e.shape[0], dtype_of(at.type))
    used = e.map("and", e.map("ge", at, 0), e.map("lt", at, known))
    used = e.map("and", used, e.map("ne", at, padding))
    each = e.remap(used, (count, width), lambda axes: axes[:1])
    at = e.map("where", used, at, e.value(0, dtype_of(at.type)))
    grad = e.map("where", each, grad, e.value(0, e.dtype))
    return added(e, e.op(Full(0.0, e.dtype, e.shape)), 0, at, grad)


def gather(e: Emit, x: Value, dim: int, at: Value, *_: object) -> Value:
    """out[i, j, k] = x[i, at[i, j, k], k] for dimension 1."""
    rank = len(shape_of(x))
    if not rank or not shape_of(at):
        raise Unsupported("gather of or by a scalar")
    dim = dimension(dim, rank)
    size = shape_of(x)[dim]
    check(e, at, Expr.of(0), size, "RuntimeError",
          f"index is out of bounds for dimension {dim} with size {{size}}")
    part = e.remap(x, [size if n == dim else s for n, s in enumerate(shape_of(at))], list)
    found = along_last(e, moved(e, part, dim, rank - 1), moved(e, at, dim, rank - 1))
    return moved(e, found, rank - 1, dim)


def along_last(e: Emit, x: Value, at: Value) -> Value:
    """x[.., at[..]]: the last dimension of `x` by indices that share all the others."""
    last = len(shape_of(x)) - 1
    return e.op(Gather(x, last, at, last))


def moved(e: Emit, x: Value, dim: int, to: int) -> Value:
    """`x` with dimension `dim` in place `to`."""
    order = [n for n in range(len(shape_of(x))) if n != dim]
    order.insert(to, dim)
    return e.remap(x, [shape_of(x)[n] for n in order],
                   lambda at: [at[order.index(n)] for n in range(len(order))])


def indexed(indices: Sequence[Value | None]) -> list[tuple[int, Value]]:
    """The dimensions that are indexed, and by what."""
    return [(n, at) for n, at in enumerate(indices) if at is not None]


def joined(e: Emit, x: Value, found: Sequence[tuple[int, Value]]) -> tuple[int, Value, Value]:
    """(d, `x` with the indexed dimensions as one, d, the index into that): indices of dimensions
    that are not neighbours stand for the first dimensions of what is indexed."""
    dims, size = [n for n, _ in found], shape_of(x)
    dim = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    shape = common_shape([at for _, at in found])
    at = [e.expanded(shape, wrapped(e, part, n, size[n]))[0] for n, part in found]
    for to, n in enumerate(dims, dim):
        x = moved(e, x, n, to)
    return dim, merged(e, x, dim, len(dims)), joint(e, at, [size[n] for n in dims])


def common_shape(values: Sequence[Value]) -> tuple[Expr, ...]:
    """The shape that `values`, which can be, are broadcast to."""
    rank = max(len(shape_of(v)) for v in values)
    padded = [(Expr.of(1),) * (rank - len(shape_of(v))) + shape_of(v) for v in values]
    return tuple(next((s for s in sizes if not s.is_const(1)), sizes[0])
                 for sizes in zip(*padded, strict=True))


def index(e: Emit, x: Value, indices: Sequence[Value | None]) -> Value:
    dim, flat, at = joined(e, x, indexed(indices))
    return e.op(Gather(flat, dim, at))


def merged(e: Emit, x: Value, dim: int, count: int) -> Value:
    """`x` with `count` dimensions from `dim` on as one."""
    size = shape_of(x)
    return e.reshape(x, (*size[:dim], product(size[dim:dim + count]), *size[dim + count:]))


def joint(e: Emit, ats: Sequence[Value], sizes: Sequence[Expr]) -> Value:
    """Indices into several dimensions as one index into all of them, row by row."""
    at = ats[0]
    for place, size in zip(ats[1:], sizes[1:], strict=True):
        at, place = e.value(at, I64), e.value(place, I64)
        at = e.map("add", e.map("mul", at, e.value(size, I64)), place)
    return at


def index_put(e: Emit, x: Value, indices: Sequence[Value | None], values: Value,
              accumulate: bool) -> Value:
    found = indexed(indices)
    dims = [n for n, _ in found]
    if dtype_of(values.type) != e.dtype:
        raise Unsupported(f"index_put of {values.type}")
    if len(found) == 1 and dtype_of(found[0][1].type) is BOOL:
        return put_where(e, x, *found[0], values, accumulate)
    dim, flat, at = joined(e, x, found)
    count, size = product(shape_of(at)), shape_of(flat)
    source = e.expand(values, (*size[:dim], *shape_of(at), *size[dim + 1:]))
    source = e.reshape(source, (*size[:dim], count, *size[dim + 1:]))
    at = e.reshape(at, (count,))
    flat = added(e, flat, dim, at, source) if accumulate else e.op(Scatter(flat, dim, at, source))
    order = [n for n in range(len(e.shape)) if n not in dims]
    order[dim:dim] = dims
    whole = e.reshape(flat, [e.shape[n] for n in order])
    return e.remap(whole, e.shape, lambda axes: [axes[n] for n in order])


def put_where(e: Emit, x: Value, dim: int, mask: Value, values: Value, accumulate: bool) -> Value:
    """`x` with one number put, or added, wherever a mask of its dimensions from `dim` on says."""
    if any(not s.is_const(1) for s in shape_of(values)):
        raise Unsupported("as many values as a mask has hits")
    rank = len(shape_of(mask))
    hit = e.remap(mask, e.shape, lambda axes: axes[dim:dim + rank])
    value = e.expand(e.reshape(values, ()), e.shape)
    if accumulate:
        value = e.finish(e.map("add", e.operand(x, e.dtype), e.operand(value, e.dtype)))
    return e.map("where", hit, value, x)


def index_fill(e: Emit, x: Value, dim: int, at: Value, value: Value | Number) -> Value:
    if not e.shape or len(shape_of(at)) != 1:
        raise Unsupported("index_fill of or by a scalar")
    dim = dimension(dim, len(e.shape))
    at = wrapped(e, at, dim, e.shape[dim])
    shape = (*e.shape[:dim], *shape_of(at), *e.shape[dim + 1:])
    return e.op(Scatter(x, dim, at, e.expand(e.value(value, e.dtype), shape)))


Targets = tuple[Value, Value, Value | None]
NONE, MEAN = 0, 1  # of a loss's `reduction`


def targets(e: Emit, x: Value, target: Value, weight: Value | None, ignored: int) -> Targets:
    """(checked class of each row, 0 for a row that is ignored; whether it counts; its weight)"""
    if dtype_of(target.type) is not I64:
        raise Unsupported(f"classes of type {target.type}")
    size = shape_of(x)
    axis = min(len(size) - 1, 1)
    at = e.reshape(target, (*size[:axis], *size[axis + 1:]))
    counts = e.map("ne", at, ignored)
    at = e.map("where", counts, at, e.value(0, I64))
    check(e, at, Expr.of(0), size[axis], "IndexError", "Target is out of bounds.")
    if weight is None:
        return at, counts, None
    return at, counts, e.operand(e.op(Gather(weight, 0, at)), dtype_of(weight.type))


def nll_loss(e: Emit, x: Value, target: Value, weight: Value | None, reduction: int, ignored: int
             ) -> tuple[Value, Value]:
    """-weight x[row, target], as it is, summed, or divided by the sum of the weights too."""
    if not e.dtype.is_float:
        raise Unsupported(f"a loss of {e.dtype}")
    at, counts, scale = targets(e, x, target, weight, ignored)
    rank = len(shape_of(x))
    rows = moved(e, x, min(rank - 1, 1), rank - 1)
    loss = e.map("neg", e.operand(along_last(e, rows, at), e.dtype))
    zero = e.value(0, dtype_of(loss.type))
    if scale is not None:
        loss = e.map("mul", loss, scale)
    loss = e.map("where", counts, loss, zero)
    if reduction == NONE and rank > 1:
        return e.finish(loss), e.op(Full(0.0, e.dtype, ()))
    one = e.expand(e.value(1, dtype_of(loss.type)), shape_of(at)) if scale is None else scale
    share = e.map("where", counts, one, zero)
    total, whole = (e.reduce("add", e.value(v, F64), range(rank - 1)) for v in (loss, share))
    if reduction == MEAN:
        total = e.map("div", total, whole)
    inner = dtype_of(loss.type)
    return e.finish(e.value(total, inner)), e.finish(e.value(whole, inner), 1)


def nll_loss_backward(e: Emit, grad: Value, x: Value, target: Value, weight: Value | None,
                      reduction: int, ignored: int, whole: Value) -> Value:
    """-weight grad at the target of each row that counts."""
    at, counts, scale = targets(e, x, target, weight, ignored)
    rank = len(shape_of(x))
    g = e.operand(grad, e.dtype)
    if reduction == MEAN:
        g = e.map("div", g, e.operand(whole, e.dtype))
    g = e.map("neg", e.expand(g, shape_of(at)))
    if scale is not None:
        g = e.map("mul", g, scale)
    g = e.map("where", counts, g, e.value(0, dtype_of(g.type)))
    axis = min(rank - 1, 1)
    shape = [s for n, s in enumerate(shape_of(x)) if n != axis] + [shape_of(x)[axis]]
    at, g = (e.remap(v, shape, lambda axes: axes[:-1]) for v in (at, g))
    hit = e.map("eq", e.positions(shape, rank - 1), at)
    return e.finish(moved(e, e.map("where", hit, g, e.value(0, dtype_of(g.type))), rank - 1, axis))


SCATTERED = {"sum": "add", "add": "add", "prod": "mul", "multiply": "mul", "amax": "max",
             "amin": "min"}
SCATTER = "Tensor self, int dim, Tensor index"
LOSS = "Tensor self, Tensor target, Tensor? weight, int reduction, SymInt ignore_index"
INDEXING: dict[str, Build] = {
    "aten::embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, "
    "bool scale_grad_by_freq=False, bool sparse=False) -> Tensor": embedding,
    "aten::index_select(Tensor self, int dim, Tensor index) -> Tensor": index_select,
    "aten::gather(Tensor self, int dim, Tensor index, *, bool sparse_grad=False) -> Tensor":
        gather,
    **{f"aten::{name}_forward({LOSS}) -> (Tensor output, Tensor total_weight)": nll_loss
       for name in ("nll_loss", "nll_loss2d")},
    **{f"aten::{name}_backward(Tensor grad_output, {LOSS}, Tensor total_weight) -> Tensor":
       nll_loss_backward for name in ("nll_loss", "nll_loss2d")},
    "aten::index_add(Tensor self, int dim, Tensor index, Tensor source, *, Scalar alpha=1) "
    "-> Tensor": index_add,
    "aten::embedding_dense_backward(Tensor grad_output, Tensor indices, SymInt num_weights, "
    "SymInt padding_idx, bool scale_grad_by_freq) -> Tensor": embedding_backward,
    f"aten::scatter.src({SCATTER}, Tensor src) -> Tensor": partial(scattered, by=LAST),
    f"aten::scatter.value({SCATTER}, Scalar value) -> Tensor": partial(scattered, by=""),
    f"aten::scatter_add({SCATTER}, Tensor src) -> Tensor": partial(scattered, by="add"),
    f"aten::scatter.reduce({SCATTER}, Tensor src, *, str reduce) -> Tensor": scatter_reduce,
    f"aten::scatter_reduce.two({SCATTER}, Tensor src, str reduce, *, bool include_self=True) "
    "-> Tensor": scatter_reduce,
    **{f"aten::index_fill.int_{kind}({SCATTER}, {kind} value) -> Tensor": index_fill
       for kind in ("Scalar", "Tensor")},
    "aten::index_copy(Tensor self, int dim, Tensor index, Tensor source) -> Tensor": index_copy,
    "aten::index.Tensor(Tensor self, Tensor?[] indices) -> Tensor": index,
    "aten::_unsafe_index.Tensor(Tensor self, Tensor?[] indices) -> Tensor": index,
    "aten::index_put(Tensor self, Tensor?[] indices, Tensor values, bool accumulate=False) "
    "-> Tensor": index_put,
}
