"""Tensor IR to kernels: each op against its own meaning, and the programs of `models`."""

from __future__ import annotations

from typing import Any

import models
import numpy as np
import pytest
from programs import Prog, check, draw

from rung.core.errors import LoweringError
from rung.core.expr import Expr
from rung.core.op import Block, Func, Value
from rung.core.ops import Yield
from rung.core.types import BF16, F32, I64, shape_of
from rung.core.verify import verify
from rung.loop import ir as loop
from rung.program.ir import Composite, KernelCall, Module, Return
from rung.tensor.simplify import open_composites, simplify
from rung.tensor.to_loop import to_loop


def _ops() -> list[Func]:
    made = []
    for name, build in (
        ("cast", lambda p, x, y, n: p.cast(x, BF16)),
        ("compare", lambda p, x, y, n: p.map("where", p.map("lt", x, y), x, p.map("neg", y))),
        ("sum_two", lambda p, x, y, n: p.reduce("add", x, 0, 2)),
        ("max_all", lambda p, x, y, n: p.reduce("max", x, 0, 1, 2)),
        ("scan", lambda p, x, y, n: p.scan("max", x, 1)),
        ("scan_of_one", lambda p, x, y, n: p.scan("add", p.reduce("add", x, 1, keep=True), 1)),
        ("transpose", lambda p, x, y, n: p.permute(x, 2, 0, 1)),
        ("view", lambda p, x, y, n: p.view(x, 4, 15)),
        ("pad", lambda p, x, y, n: p.index(
            x, [3, 4, 9], lambda i, j, k: [i, j, k - 2], lambda i, j, k: [k - 2, 6 - k], 7.0)),
        ("flip", lambda p, x, y, n: p.index(x, [3, 4, 5], lambda i, j, k: [2 - i, j, k])),
        ("contract_two", lambda p, x, y, n: p.einsum("abc,dbc->ad", x, y)),
        ("outer", lambda p, x, y, n: p.einsum("a,b->ab", p.reduce("add", x, 1, 2),
                                              p.reduce("max", y, 0, 2))),
        ("gather", lambda p, x, y, n: p.gather(x, 1, n)),
        ("scatter", lambda p, x, y, n: p.scatter(x, 2, n, p.slice(y, 2, 0, 2))),
        ("scatter_add", lambda p, x, y, n: p.scatter(x, 2, n, p.slice(y, 2, 0, 2), "add")),
        ("full", lambda p, x, y, n: p.full(2.5, 3, 1)),
        ("iota", lambda p, x, y, n: p.iota(6)),
        ("concat", lambda p, x, y, n: p.concat(1, x, p.slice(y, 1, 1, 2), y)),
        ("scalar", lambda p, x, y, n: p.map("mul", x, 3.0)),
    ):
        p = Prog(name)
        x, y, n = p.param("x", 3, 4, 5), p.param("y", 3, 4, 5), p.param("n", 2, dtype=I64)
        made.append(p.done(build(p, x, y, n)))
    return made


@pytest.mark.parametrize("program", _ops(), ids=lambda p: p.name)
def test_an_op_means_the_same_as_a_kernel(program: Func) -> None:
    module = to_loop(program)
    for kernel in module.kernels:
        verify(kernel, loop.VOCABULARY, loop.verify_kernel)
    exact = program.name not in ("contract_two", "outer")
    check(Module((program,)), module, draw(program, ints=4), exact)


PROGRAMS = [models.relu_mm(), models.softmax(), models.layer_norm(), models.attend(m=3),
            models.rotate(), models.swiglu(), models.linear_bf16(), models.transformer(2),
            models.momentum()]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_programs_mean_the_same(program: Func) -> None:
    inputs = draw(program, ints=16)
    for whole in (False, True):
        check(Module((program,)), to_loop(program, whole=whole), inputs, exact=False)
    check(Module((program,)), Module((simplify(program),)), inputs)


def test_symbolic_sizes() -> None:
    program = models.attend(t="s0", m=2)
    for size in (5, 16):
        inputs = draw(program, {"s0": size}, ints=size)
        check(Module((program,)), to_loop(program), inputs, exact=False)


def test_dimensions_of_one_have_no_axis() -> None:
    p = Prog()
    (kernel,) = to_loop(p.done(p.map("exp", p.param("x", 1, 8, 1)))).kernels
    assert list(loop.extents_of(kernel)) == ["i"]


def test_simplify_composes_and_removes_indices() -> None:
    p = Prog()
    x = p.param("x", 6, 5)
    y = p.permute(p.permute(x, 1, 0), 1, 0)
    func = simplify(p.done(p.map("add", y, p.full(1.0, 6, 5))))
    assert [op.keyword for op in func.body.ops] == ["const", "map", "return"]


def test_simplify_keeps_what_differs() -> None:
    p = Prog()
    x = p.param("x", 6, dtype=F32)
    func = p.done(p.cast(p.cast(x, BF16), F32))
    assert len(simplify(func).body.ops) == 3


def _composite() -> Func:
    p = Prog()
    x = p.param("x", 6)
    inner = Prog()
    y = inner.map("exp", x)
    body = Block((), (*inner.b.ops, Yield((y,))))
    out = Value("out", x.type)
    op = Composite("aten.exp.default", (("", x),), body, (x.type,), results=(out,))
    return Func("program", "main", tuple(p.params), (), Block((), (op, Return((out,)))))


def test_composites_are_opened_or_calls() -> None:
    func = _composite()
    with pytest.raises(LoweringError, match="neither opened nor a call"):
        to_loop(func)
    opened = open_composites(func, lambda op: False)
    check(Module((func,)), Module((opened,)), [np.arange(6, dtype=np.float32)])
    assert [op.keyword for op in open_composites(func, lambda op: True).body.ops] == [
        "call", "return"]


def test_a_symbol_as_a_number() -> None:
    p = Prog()
    x = p.param("x", "s0")
    func = p.done(p.map("add", x, p.cast(p.index(p.iota("s0"), [Expr.of("s0")],
                                                 lambda i: [i]), F32)))
    check(Module((func,)), to_loop(func), draw(func, {"s0": 7}))


@pytest.mark.parametrize("name, build, moves", [
    ("heads", lambda p, x: p.view(p.permute(x, 1, 0, 2), 4, 15), True),
    ("part", lambda p, x: p.view(p.slice(x, 2, 1, 3), 12, 2), True),
    ("turned", lambda p, x: p.permute(p.reduce("max", x, 0), 1, 0), False)])
def test_a_library_gets_whole_operands_through_casts(name: str, build: Any, moves: bool) -> None:
    """What moves or cuts an operand is a kernel of its own; what only turns it is none."""
    p = Prog(name)
    x = p.param("x", 3, 4, 5, dtype=BF16)
    a = build(p, x)
    _, k = shape_of(a.type)
    b = p.param("b", int(str(k)), 7, dtype=BF16)
    program = p.done(p.einsum("ab,bc->ac", p.cast(a, F32), p.cast(b, F32)))
    module = to_loop(simplify(program), whole=True)
    (product,) = (k for k in module.kernels if any(op.product for op in loop.folds(k)))
    loads = [op for op in product.body.ops if isinstance(op, loop.Load)]
    assert all(not op.mask and all(isinstance(e, Expr) and e.is_symbol() for e in op.subs)
               for op in loads)
    (call,) = (op for op in module.main.body.ops if isinstance(op, KernelCall)
               and op.callee == product.name)
    of = {r: op.callee for op in module.main.body.ops for r in op.results}
    assert of[call.args[0]].startswith("index") == moves
    check(Module((program,)), module, draw(program, ints=4), exact=False)


def test_products_that_read_a_filled_up_matrix_either_way_share_it() -> None:
    p = Prog()
    x, a, b = (p.param(n, *shape, dtype=BF16) for n, shape in (
        ("x", (5, 7)), ("a", (5, 3)), ("b", (8, 3))))
    wide = p.index(x, [5, 8], lambda i, j: [i, j], lambda i, j: [6 - j])
    turned = p.permute(wide, 1, 0)
    one = p.einsum("ab,bc->ac", p.cast(turned, F32), p.cast(a, F32))
    two = p.einsum("ab,bc->ac", p.cast(wide, F32), p.cast(b, F32))
    program = p.done(one, two)
    module = to_loop(simplify(program), whole=True)
    calls = [op for op in module.main.body.ops if isinstance(op, KernelCall)]
    assert [c.callee.rstrip("0123456789") for c in calls] == ["index", "contract", "contract"]
    assert all(calls[0].results[0] in c.args for c in calls[1:])
    check(Module((program,)), module, draw(program, ints=4), exact=False)


def test_what_a_product_reads_of_a_parameter_is_read_before_the_parameter_is_written() -> None:
    p = Prog()
    x, a = p.param("x", 5, 7, role="mutated"), p.param("a", 5, 3)
    turned = p.index(x, [8, 5], lambda i, j: [j, i], lambda i, j: [6 - i])
    p.write(x, p.map("mul", x, 2.0))
    program = p.done(p.einsum("ab,bc->ac", turned, a))
    for whole in (False, True):
        module = to_loop(program, whole=whole)
        check(Module((program,)), module, draw(program), exact=False)
