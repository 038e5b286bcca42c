"""Bugs to plant: a module whose first addition subtracts, in a pass of the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rung import pipeline
from rung.core.op import Block, Func, Op
from rung.core.ops import Map
from rung.pipeline import Pass
from rung.program.ir import Call, Check, Module


def with_a_bug(module: Module) -> Module:
    """Its first addition subtracts; where there is none it stays as it is."""
    found = [False]

    def changed(op: Op) -> Op:
        match op:
            case _ if found[0]:
                return op
            case Call(target="aten.add.Tensor"):
                found[0], op = True, replace(op, target="aten.sub.Tensor")
            case Map(fn="add"):
                found[0], op = True, replace(op, fn="sub")
            case _ if op.blocks():
                op = op.map({}, lambda b: Block(b.args, tuple(map(changed, b.ops))))
        return op

    def func(f: Func) -> Func:
        return f.with_ops([changed(op) for op in f.body.ops])
    return Module(tuple(map(func, module.programs)), tuple(map(func, module.kernels)))


def other_checks(**changes: Any) -> Callable[[Module], Module]:
    """What changes the checks of a module's programs."""
    def changed(op: Op) -> Op:
        return replace(op, **changes) if isinstance(op, Check) else op
    return lambda module: Module(tuple(p.with_ops(map(changed, p.body.ops))
                                       for p in module.programs), module.kernels)


def plant(monkeypatch: pytest.MonkeyPatch, name: str,
          bug: Callable[[Module], Module] = with_a_bug) -> None:
    """The pass `name`, such as loop.fuse, also breaks the module."""
    def bad(p: Pass) -> Pass:
        return replace(p, run=lambda m, c: bug(p.run(m, c)))
    monkeypatch.setattr(pipeline, "PASSES", tuple(
        bad(p) if f"{p.rung}.{p.name}" == name else p for p in pipeline.PASSES))
