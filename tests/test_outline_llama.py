"""Layers of a real model are outlined, and its kernels are those without outlining."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from kernels import lower

from rung import pipeline
from rung.compilation import generated
from rung.core.types import shape_of
from rung.frontends.torch.externs import TORCH
from rung.loop.canonical import canonical
from rung.program.ir import Apply, KernelCall, Module
from rung.runtime.host import host_code
from rung.targets.base import target
from rung.targets.cpu.emit import emit_units
from rung.tools.capture import capture
from rung.tools.flops import flops
from rung.tools.given import Given

LAYERS, TOKENS = 5, 6


def llama(layers: int) -> pipeline.Func:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=50)
    model = transformers.LlamaModel(config).eval()
    ids = torch.arange(TOKENS)[None]
    with torch.no_grad():
        (graph,) = capture(Given("llama", lambda x: model(x, use_cache=False)[0], (ids,))).graphs
    assert graph.imported is not None, graph.refused
    return graph.imported.func


@pytest.fixture(scope="module")
def program() -> pipeline.Func:
    return llama(LAYERS)


def launches(module: Module) -> list[str]:
    return [op.callee for op in module.main.body.ops if isinstance(op, KernelCall)]


def kinds(module: Module) -> Counter[str]:
    """How often kernels of each kind are launched: a name by structure, without what tells equal
    ones apart."""
    return Counter(re.sub(r"_[0-9a-f]{6}$", "", name) for name in launches(canonical(module)))


def test_layers_are_outlined(program: pipeline.Func, monkeypatch: pytest.MonkeyPatch) -> None:
    where = target("cpu.avx512")
    outlined = lower(program, where)
    programs = outlined.modules["program"].programs
    assert len(programs) == 2
    assert sum(len(p.body.ops) for p in programs) < len(program.body.ops) / 2
    monkeypatch.setattr(pipeline.outline, "outline", lambda func: Module((func,)))
    whole = lower(program, where)
    one, two = outlined.modules["loop"], whole.modules["loop"]
    main = programs[0].body
    first = next(op for op in main.ops if isinstance(op, Apply))
    border = {r for op in main.ops for r in op.results}.intersection(first.args)
    here, there = kinds(one), kinds(two)
    assert not there - here
    assert (here - there).total() <= len(border)  # what the first layer may not take in
    assert len(one.kernels) <= len(two.kernels)


@pytest.mark.parametrize("layers", [2, 4])
def test_flops_are_those_of_all_layers(layers: int) -> None:
    """2 x parameters x tokens, and for attention two products of tokens x tokens x width."""
    func = llama(layers)
    table, *weights = (shape_of(p.type) for p in func.params if p.role == "param"
                       and len(shape_of(p.type)) == 2)
    tokens, width = TOKENS, table[1]
    held = sum(int(a.evaluate({}) * b.evaluate({})) for a, b in weights)
    attention = 4 * tokens * tokens * int(width.evaluate({})) * layers
    module = lower(func, target("cpu.avx512")).modules["tensor"]
    assert len(module.programs) == 2
    assert flops(module, {}).total == 2 * held * tokens + attention


def test_what_grows_with_depth() -> None:
    """One `apply` a layer for the costly passes, and in the source at most a line a launch."""
    few, many, where = 4, 9, target("cpu.avx512")
    stages = [lower(llama(layers), where) for layers in (few, many)]
    seen = [[len(p.body.ops) for p in s.modules["program"].programs] for s in stages]
    assert sum(seen[1]) - sum(seen[0]) == many - few
    sources, calls = [], []
    for s in stages:
        module = s.modules["kernel"]
        _, stretches = host_code(module, TORCH)
        sources.append("\n".join(emit_units(generated(module), s.source, stretches)))
        calls.append(len(launches(module)))
    few_lines, many_lines = (source.count("\n") for source in sources)
    assert many_lines - few_lines <= calls[1] - calls[0]
