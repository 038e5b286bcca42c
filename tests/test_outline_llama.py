"""Layers of a real model are outlined, and its kernels are those without outlining."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from rung import pipeline
from rung.program.ir import KernelCall, Module
from rung.targets.base import target
from rung.tools.capture import capture
from rung.tools.given import Given


@pytest.fixture(scope="module")
def program() -> pipeline.Func:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=50)
    model = transformers.LlamaModel(config).eval()
    ids = torch.arange(6)[None]
    with torch.no_grad():
        (graph,) = capture(Given("llama", lambda x: model(x, use_cache=False)[0], (ids,))).graphs
    assert graph.imported is not None, graph.refused
    return graph.imported.func


def launches(module: Module) -> list[str]:
    return [op.callee for op in module.main.body.ops if isinstance(op, KernelCall)]


def test_layers_are_outlined(program: pipeline.Func, monkeypatch: pytest.MonkeyPatch) -> None:
    where = target("cpu.avx512")
    outlined = pipeline.lower_module(program, where)
    programs = outlined.modules["program"].programs
    assert len(programs) == 2
    assert sum(len(p.body.ops) for p in programs) < len(program.body.ops) / 2
    monkeypatch.setattr(pipeline.outline, "outline", lambda func: Module((func,)))
    whole = pipeline.lower_module(program, where)
    one, two = outlined.modules["loop"], whole.modules["loop"]
    assert Counter(launches(one)) == Counter(launches(two))
    assert len(one.kernels) == len(two.kernels)  # their ops may stand in another order
