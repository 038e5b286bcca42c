"""Products of matrices whose rows begin where libraries ask for it.

    y = mm(a, b)             ->    y = mm(a, pad(b, [0, 7]))[:, :50257]        where a, b are bf16

cuBLAS runs tensor cores at full rate if each row of a 16-bit matrix, or each column of one that
lies in memory by columns, begins at a multiple of 16 bytes. Of 50,257 classes it does not, and a
product takes five to eight times as long (H200, torch 2.11: 6.7 ms against 0.86). What is added is
0, so that no result changes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from rung.core import trace
from rung.frontends.torch.calls import insert, is_view, seen

aten = torch.ops.aten
ROWS = {"cuda": 16}  # bytes of which rows begin at a multiple, by what kind of device they are on
LEAST = 128  # products that each element takes part in, for which a copy of it pays
PRODUCTS = aten.mm.default, aten.addmm.default
TURNS = aten.t.default, aten.permute.default, aten.transpose.int


def align(graph: fx.Graph) -> bool:
    """Give the products of a graph room behind the rows of factors and results, where they need it
    and are large; whether any did."""
    work = _Aligned(graph)
    for node in list(graph.nodes):
        if node.target in PRODUCTS and not node.kwargs and any(more := _missing(node)):
            work.product(node, *more)
    return bool(work.padded)


@dataclass
class _Aligned:
    graph: fx.Graph
    padded: dict[tuple[fx.Node, int, int], fx.Node] = field(default_factory=dict)

    def product(self, node: fx.Node, rows: int, terms: int, columns: int) -> None:
        """A product of so many more rows, columns, and terms of each element."""
        sizes = [(0, columns)] * (len(node.args) - 2) + [(rows, terms), (terms, columns)]
        given = [self.larger(x, node, *more) for x, more in zip(node.args, sizes, strict=True)]
        with self.graph.inserting_before(node):
            made = insert(node, node.target, *given)
            for dim, more in enumerate((rows, columns)):
                if more:
                    made = insert(node, aten.slice.Tensor, made, dim, 0,
                                  node.meta["val"].shape[dim])
        trace.emit("fired", "aligned", node.name,
                   f"{rows} more rows, {terms} more terms, {columns} more columns")
        node.replace_all_uses_with(made)
        self.graph.erase_node(node)
        self.follow(made)

    def larger(self, x: Any, product: fx.Node, rows: int, columns: int) -> Any:
        """`x` with zeros behind it, in its order of memory: one copy for all that read it."""
        if not rows and not columns:
            return x
        x = _once(x)
        turned = _by_columns(x)
        home = x.args[0] if turned else x
        wanted = home, *((columns, rows) if turned else (rows, columns))
        if wanted not in self.padded:
            with self.graph.inserting_before(_after(home)):
                self.padded[wanted] = self.filled(home, *wanted[1:], like=product)
        if not turned:
            return self.padded[wanted]
        with self.graph.inserting_before(product):
            return insert(product, x.target, self.padded[wanted], *x.args[1:])

    def filled(self, x: Any, rows: int, columns: int, like: fx.Node) -> fx.Node:
        """A matrix with zeros behind its rows and columns; a vector with zeros behind it, which a
        product has to find in memory, and not to make while it reads."""
        val = x.meta["val"]
        if val.dim() == 2:
            return insert(like, aten.constant_pad_nd.default, x, [0, columns, 0, rows])
        zeros = insert(like, aten.new_zeros.default, x, [columns])
        return insert(like, aten.cat.default, [x, zeros])

    def follow(self, node: fx.Node) -> None:
        """The views of a result take its strides. What leaves the graph, and what operators read
        that are not torch's own, is contiguous as before."""
        for user in list(node.users):
            if user.target is aten._unsafe_view.default:
                user.target = aten.view.default
            value = _view_of_gaps(user) if is_view(user) else None
            if value is not None:
                user.meta["val"] = value
                self.follow(user)
            elif is_view(user) or getattr(user.target, "namespace", "") != "aten":
                with self.graph.inserting_before(user):
                    whole = insert(node, aten.clone.default, node,
                                   memory_format=torch.contiguous_format)
                user.replace_input_with(node, whole)


def _view_of_gaps(view: fx.Node) -> torch.Tensor | None:
    """The view of a tensor with gaps; None where there is none, or of other elements."""
    if view.target is not aten.as_strided.default:
        with suppress(RuntimeError, ValueError):
            return seen(view)
    return None


def _after(node: fx.Node) -> fx.Node:
    """The first place where `node` can be read."""
    place = node.next
    while place.op == "placeholder":
        place = place.next
    return place


def _missing(product: Any) -> tuple[int, int, int]:
    """How many rows, terms and columns a product lacks; none where it is small, of unknown sizes,
    or of matrices that lie in memory neither way."""
    *bias, (turned_a, a), (turned_b, b) = [
        (_by_columns(x), x.meta["val"]) for x in product.args]
    m, k, n = sizes = *a.shape, b.shape[1]
    step = ROWS.get(a.device.type, 0) // a.dtype.itemsize
    if not step or a.dtype.itemsize != 2 or not all(
            isinstance(size, int) and size >= LEAST for size in sizes):
        return 0, 0, 0
    if not all(turned or x.stride(1) == 1 for turned, x in ((turned_a, a), (turned_b, b))) or any(
            x.shape != (n,) for _, x in bias):
        return 0, 0, 0
    loose_a = a.stride(1 if turned_a else 0) % step
    loose_b = b.stride(1 if turned_b else 0) % step
    between = (loose_a and not turned_a) or (loose_b and turned_b)
    return -m % step if loose_a and turned_a else 0, -k % step if between else 0, -n % step


def _once(x: Any) -> Any:
    """What a transpose of a transpose is of, with all its elements."""
    while x.target in TURNS and x.args[0].target in TURNS and (
            x.meta["val"].stride() == x.args[0].args[0].meta["val"].stride()):
        x = x.args[0].args[0]
    return x


def _by_columns(x: Any) -> bool:
    """Whether a matrix is the transpose of one that lies in memory by rows."""
    val = x.meta["val"]
    return x.target in TURNS and val.dim() == 2 and val.stride(0) == 1 != val.stride(1) and (
        x.args[0].meta["val"].dim() == 2)
