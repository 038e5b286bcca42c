"""The host's code: what it allocates, launches, drops and hands back."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import models
import pytest
import torch
from kernels import compiled
from programs import Prog

from rung.core.errors import LoweringError
from rung.core.expr import Expr
from rung.core.op import Builder, Func, Names, Value
from rung.core.types import F32, I64, DType, TensorType
from rung.frontends.torch import tensors
from rung.frontends.torch.externs import TORCH
from rung.frontends.torch.tensors import fit
from rung.program.ir import Call, Check, Module, Return, Write
from rung.runtime.executable import Executable
from rung.runtime.host import host_code
from rung.targets.base import target
from rung.targets.cpu import pool
from rung.targets.device import ALIGN, device


def made(program: Func) -> Executable:
    return compiled(program, target("cpu"))


def host(*ops: Any, params: Sequence[Value]) -> Executable:
    """What runs a program without kernels."""
    builder = Builder(Names([p.name for p in params]))
    for op in ops:
        builder.ops.append(op)
    program = Func("program", "main", tuple(params), (), builder.block())
    code, stretches = host_code(Module((program,)), TORCH)
    cpu = device(target("cpu"))
    return Executable(code, cpu, TORCH, cpu.load([], "", stretches) if stretches else {}, {})


def value(name: str, *shape: int, role: str = "input", dtype: DType = F32) -> Value:
    return Value(name, TensorType(dtype, tuple(map(Expr.of, shape))), role)


def test_temporaries_are_addresses_in_one_workspace() -> None:
    p = Prog()
    x, w = p.param("x", 6, 8), p.param("w", 8, 8)
    run = made(p.done(p.softmax(p.einsum("ik,kj->ij", p.softmax(x), w))))
    assert run.text.count("= empty(") == 1 and run.text.count("= stretch_") == 1
    assert "take(" in run.text and "give(w)" in run.text
    a, b = torch.randn(6, 8), torch.randn(8, 8)
    (got,) = run([a, b])
    torch.testing.assert_close(got, ((a.softmax(-1)) @ b).softmax(-1))


def test_a_stretch_ends_where_a_large_argument_is_last_read() -> None:
    p = Prog()
    x, v = p.param("x", 4096, 128), p.param("v", 4096, 128)
    run = made(p.done(p.scan("max", p.scan("add", p.map("add", x, v), 0), 1)))
    lines = [line.strip() for line in run.text.partition("def run")[2].splitlines()]
    first, second = (n for n, line in enumerate(lines) if "stretch_" in line)
    assert first < lines.index("del x, v") < second
    a, b = torch.randn(4096, 128), torch.randn(4096, 128)
    want = (a + b).cumsum(0).cummax(1).values
    torch.testing.assert_close(run([a, b])[0], want, rtol=1e-3, atol=1e-2)


def test_equal_stretches_are_one_function() -> None:
    p = Prog()
    x = y = p.param("x", 6, 4)
    shifts = (1.0, 1.0, 1.0, 2.0)
    for shift in shifts:
        y = p.b.one(Call("aten.lgamma.default", (("", p.map("add", y, shift)),), (x.type,)))
    run = made(p.done(y))
    assert run.text.count("= stretch_0(") == shifts.count(1.0)
    assert run.text.count("def stretch_") == len(set(shifts))
    given = torch.randn(6, 4)
    want = given
    for shift in shifts:
        want = (want + shift).lgamma()
    assert torch.equal(run([given])[0], want)


def test_the_list_of_arguments_is_emptied_and_inputs_die() -> None:
    args = [torch.randn(9)]
    run = made(models.floor_add())
    run(args)
    assert args == []
    assert "del x" in run.text


def test_code_is_shown_in_tracebacks() -> None:
    import traceback

    run = made(models.floor_add())
    with pytest.raises(AttributeError) as caught:
        run([3])
    assert "is_contiguous" in "".join(traceback.format_exception(caught.value))


def test_names_that_python_or_the_host_uses() -> None:
    p = Prog()
    x, y = p.param("take", 4), p.param("lambda", 4)
    got = made(p.done(p.map("add", x, y)))([torch.ones(4), torch.ones(4)])
    assert got[0].tolist() == [2.0] * 4


def test_an_argument_in_another_layout_is_copied() -> None:
    (got,) = made(models.softmax(5, 8))([torch.randn(8, 5).t()])
    torch.testing.assert_close(got.sum(-1), torch.ones(5))


def test_a_mutated_argument_in_another_layout_is_updated() -> None:
    p = Prog()
    x = p.param("x", 3, 4, role="mutated")
    y = p.map("add", x, 1.0)
    p.write(x, y)
    run, given = made(p.done()), torch.zeros(4, 3).t()
    run([given])
    assert (given == 1).all()


def test_calls() -> None:
    x, s, i = value("x", 2, 3), value("values", 2, 3, role=""), value("order", 2, 3, role="",
                                                                       dtype=I64)
    call = Call("aten.sort.stable", (("", x), ("stable", True), ("dim", -1), ("descending", True)),
                (s.type, i.type), results=(s, i))
    run = host(call, Return((i, s)), params=[x])
    given = torch.tensor([[1.0, 3, 2], [5, 4, 6]])
    order, values = run([given])
    assert order.tolist() == [[1, 2, 0], [2, 0, 1]] and values[0].tolist() == [3, 2, 1]


def test_checks_raise_before_writes() -> None:
    x, at = value("x", 4, role="mutated"), value("at", 2, dtype=I64)
    y = value("y", 4)
    ops = (Check(at, Expr.of(0), Expr.of(4), "IndexError", "no such row"), Write(x, y),
           Return(()))
    run = host(*ops, params=[x, at, y])
    kept = torch.zeros(4)
    for bad in (-1, 4):
        with pytest.raises(IndexError, match="no such row"):
            run([kept, torch.tensor([0, bad]), torch.ones(4)])
    assert (kept == 0).all()
    run([kept, torch.tensor([0, 3]), torch.ones(4)])
    assert (kept == 1).all()


def test_what_the_host_cannot_do() -> None:
    p = Prog()
    program = p.done(p.full(1.0, 4))
    with pytest.raises(LoweringError, match="the host cannot do full"):
        host_code(Module((program,)), TORCH)


def test_workspaces_are_used_again() -> None:
    own = pool.Pool(TORCH.tensors.memory)
    one = own.take(1000)
    two = own.take(1000)
    assert one is not two and one.address % ALIGN == 0
    own.give(one)
    assert own.take(500) is one
    own.give(one)
    assert own.take(5000).bytes == 5000 and not own.free


def test_a_workspace_that_is_too_small_goes_before_the_larger_one_comes() -> None:
    made = list[weakref.ref[Any]]()

    def memory(count: int) -> tuple[object, int]:
        assert all(one() is None for one in made)
        x, address = TORCH.tensors.memory(count)
        made.append(weakref.ref(x))
        return x, address
    own = pool.Pool(memory)
    own.give(own.take(1000))
    assert own.take(5000).bytes == 5000 and len(made) == 2


@pytest.mark.parametrize("make", [
    TORCH.tensors.functions["empty"], tensors.memory_on(tensors.HOST)])
def test_new_memory_has_the_layout(make: Any) -> None:
    with torch.device("meta"):
        x = make((2, 3), (1, 2), torch.bfloat16)
    assert (x.shape, x.stride(), x.dtype, x.device.type) == ((2, 3), (1, 2), torch.bfloat16, "cpu")


def test_fit_keeps_expanded_dimensions() -> None:
    x = torch.randn(1, 4).expand(3, 4).contiguous()
    y = fit(x, (3, 4), (0, 1), x.dtype)
    assert torch.equal(x, y) and y.stride() == (0, 1)


def test_fit_takes_any_stride_of_one_element() -> None:
    x = torch.randn(3, 4).t().unsqueeze(1)
    assert fit(x, (4, 1, 3), (1, 77, 4), x.dtype) is x
    assert fit(x, (4, 1, 3), (3, 3, 1), x.dtype).is_contiguous()
    assert fit(x, (4, 1, 3), (1, 77, 4), torch.bfloat16).dtype is torch.bfloat16
