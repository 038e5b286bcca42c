"""Calls from C: what goes there, what falls to the host's Python, and that both do the same."""

from __future__ import annotations

import gc
import sysconfig
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels import compiled
from programs import Prog

from rung.core.expr import Expr
from rung.core.op import Func
from rung.core.types import I64
from rung.program.ir import Check
from rung.runtime.executable import Executable
from rung.targets.base import target
from rung.targets.cpu import glue

Made = Callable[[Func], Executable]


@pytest.fixture(params=["native", "python"])
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Compiles a program for this CPU, with the C that calls stretches or without it."""
    if request.param == "python":
        monkeypatch.setattr(glue, "glue", lambda: None)

    def make(program: Func) -> Executable:
        run = compiled(program, target("cpu"))
        native = [x for x in run.names.values() if type(x).__module__ == "rung_glue"]
        assert bool(native) == (request.param == "native")
        return run
    return make


def added(*shape: int | str) -> Func:
    p = Prog()
    x, y = p.param("x", *shape), p.param("y", *shape)
    return p.done(p.map("add", x, y))


def picked() -> Func:
    """x[at], for `at` checked to be in 0..4."""
    p = Prog()
    x, at = p.param("x", 4, 3), p.param("at", 2, dtype=I64)
    p.b.add(Check(at, Expr.of(0), Expr.of(4), "IndexError", "no row {}"))
    return p.done(p.gather(x, 0, at))


def test_results_and_the_emptied_list(made: Made) -> None:
    x, y = torch.randn(5, 3), torch.randn(5, 3)
    args = [x, y]
    (got,) = made(added(5, 3))(args)
    assert torch.equal(got, x + y) and args == [] and got.is_contiguous()


@pytest.mark.parametrize("given", [
    torch.randn(3, 5).t(), torch.nn.Parameter(torch.randn(5, 3)), torch.randn(10, 3)[::2],
    torch.randn(1, 3).expand(5, 3)], ids=["transposed", "parameter", "strided", "expanded"])
def test_other_layouts_and_classes(made: Made, given: torch.Tensor) -> None:
    y = torch.randn(5, 3)
    (got,) = made(added(5, 3))([given, y])
    assert torch.equal(got, given + y) and type(got) is torch.Tensor


def test_what_is_no_tensor_is_an_error(made: Made) -> None:
    with pytest.raises((AttributeError, TypeError)):
        made(added(5, 3))([torch.ones(5, 3), 3])
    with pytest.raises(ValueError):
        made(added(5, 3))([torch.ones(5, 3)])


def test_sizes_are_read_at_each_call(made: Made) -> None:
    run = made(added("s0", 3))
    for n in (4, 1, 0, 7):
        x, y = torch.randn(n, 3), torch.randn(n, 3)
        (got,) = run([x, y])
        assert torch.equal(got, x + y)


def test_the_error_word(made: Made) -> None:
    run, x = made(picked()), torch.randn(4, 3)
    assert torch.equal(run([x, torch.tensor([3, 0])])[0], x[[3, 0]])
    for bad in (4, -1):
        with pytest.raises(IndexError, match=f"no row {bad}"):
            run([x, torch.tensor([2, bad])])


def test_arguments_and_results_are_released(made: Made) -> None:
    run = made(added(6))
    x, y = torch.ones(6), torch.ones(6)
    (z,) = run([x, y])
    known = [weakref.ref(t) for t in (x, y, z)]
    del x, y, z
    assert [ref() for ref in known] == [None] * 3


def test_a_call_dies_with_its_program() -> None:
    run: Any = compiled(added(6), target("cpu"))
    known = weakref.ref(run.names["launch_stretch_0"])
    del run
    gc.collect()
    assert known() is None


@pytest.mark.parametrize("missing", ["headers", "exchange"])
def test_without_headers_or_exchange(missing: str, monkeypatch: pytest.MonkeyPatch,
                                     tmp_path: Path) -> None:
    if missing == "headers":
        monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    else:
        monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    glue.glue.cache_clear()
    try:
        run: Any = compiled(added(6), target("cpu"))
        assert type(run.names["stretch_0"]).__module__ != "rung_glue"
        assert torch.equal(run([torch.ones(6)] * 2)[0], torch.full((6,), 2.0))
    finally:
        glue.glue.cache_clear()
