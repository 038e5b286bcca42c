"""Where kernels come from: the nodes of the graph that each call computes, and names made of them.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels import lower
from torch import Tensor, nn

from rung import pipeline
from rung.core.origins import Origin
from rung.frontends.torch.externs import TORCH
from rung.program.ir import Module
from rung.targets.base import target
from rung.tools.capture import capture
from rung.tools.explain import explain
from rung.tools.given import Given
from rung.tools.show import Request, show, sites_of


def lowered(fn: Callable[..., Any], *args: Tensor, train: bool = False) -> list[Module]:
    """The module of kernels of each graph of a function."""
    graphs = capture(Given("test", fn, args), train).graphs
    return [lower(g.imported.func, target("cpu.avx512")).modules["loop"]
            for g in graphs if g.imported]


def sites(module: Module) -> dict[str, list[tuple[Origin, ...]]]:
    """What each call of each kernel computes."""
    return {k.name: sites_of(module, k) for k in module.kernels}


def targets(origins: tuple[Origin, ...]) -> list[str]:
    return [o.target for o in origins]


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.permute(0, 2, 3, 1), (16,)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """A block of a ConvNeXt: convolutions stay calls between the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.norm, self.act = Norm(), nn.GELU()
        self.up, self.down = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(self.mix(x)))
        y = self.act(y)
        y = self.down(y)
        return y + x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.Sequential(Block()) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


def test_a_kernel_of_repeated_layers_names_what_each_call_computes() -> None:
    (module,) = lowered(Net().eval(), torch.randn(2, 16, 6, 6))
    found = sites(module)
    calls = [site for kernel in found.values() for site in kernel
             if "aten.gelu.default" in targets(site)]
    assert len(calls) == 4 and all(targets(c) == ["aten.gelu.default"] for c in calls)
    assert [c[0].module for c in calls] == [f"stages.{n}.0.act" for n in range(4)]
    assert {c[0].code for c in calls} == {"y = self.act(y)"}
    assert not any("convolution" in t for k in found.values() for s in k for t in targets(s))
    assert all(targets(s) == ["aten.add.Tensor"] for s in found["add"])


def test_what_lowering_notes_is_not_of_the_program() -> None:
    (graph,) = capture(Given("test", Net().eval(), (torch.randn(2, 16, 6, 6),))).graphs
    assert graph.imported is not None
    first, second = (sites(lower(graph.imported.func, target("cpu.avx512")
                                                 ).modules["loop"]) for _ in range(2))
    assert first == second


def test_what_is_told_of_a_shared_kernel() -> None:
    given = Given("net", Net().eval(), (torch.randn(2, 16, 6, 6),))
    text = show(given, Request("loop", "cpu.avx512"))
    assert re.search(r"# gelu: called at 4 sites\n# gelu: \S+test_origins.py:\d+  y = self.act\(y\)"
                     r"  \(aten.gelu.default\)  in stages.0.0.act, (.*), stages.3.0.act\n", text)
    told = explain(given, Request(target="cpu.avx512"), ["kernels"])
    assert "graph level: 1 ATen call in one kernel: aten.gelu.default\n" in told


def test_an_intermediate_of_two_nodes_is_of_the_one_that_is_computed() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        one = F.layer_norm(x, (64,), w)
        two = F.layer_norm(x, (64,), b)  # of the same mean and variance
        return one, two.exp()

    (graph,) = capture(Given("test", fn, (torch.randn(8, 64), torch.ones(64), torch.ones(64)))
                       ).graphs
    assert graph.imported is not None
    module, context = Module((graph.imported.func,)), pipeline.Context(target("cpu.avx512"), TORCH)
    for step in pipeline.PASSES[:[p.name for p in pipeline.PASSES].index("siblings")]:
        module = step.run(module, context)
    calls = {tuple(o.node for o in s) for kernel in sites(module).values() for s in kernel}
    norm, other = "native_layer_norm", "native_layer_norm_1"
    assert {(norm,), (other, "exp")} <= calls  # each computes its own, though they share parts
    assert not any({norm, other} <= set(c) and len(c) > 2 for c in calls)


def test_merged_equal_nodes_are_both_named() -> None:
    def fn(x: Tensor) -> Tensor:
        a = torch.erf(x)
        b = torch.erf(x)
        return a + b

    (module,) = lowered(fn, torch.randn(8, 64))
    ((site,),) = sites(module).values()
    assert targets(site) == ["aten.erf.default", "aten.erf.default", "aten.add.Tensor"]


def test_what_is_read_through_is_computed_where_it_is_read() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        padded = F.pad(x, (1, 1))
        return padded * y

    (module,) = lowered(fn, torch.randn(8, 64), torch.randn(66))
    ((site,),) = sites(module).values()
    assert targets(site) == ["aten.constant_pad_nd.default", "aten.mul.Tensor"]


def test_gradients_are_of_the_line_and_module_of_their_function() -> None:
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    _, backward = lowered(net, torch.randn(64, 16), train=True)
    found = [s for k in sites(backward).values() for s in k]
    (gradient,) = {o for s in found for o in s if o.target == "aten.gelu_backward.default"}
    assert (gradient.module, gradient.function, gradient.backward) == ("1", "gelu", True)


# --- lines and modules

PACKAGE = """
import torch

def halved(x):
    return torch.erf(x)

class Halver(torch.nn.Module):
    def forward(self, x):
        return halved(x)
"""


@pytest.mark.parametrize(("inside", "place"), [
    (False, "test_origins.py"), (True, "site-packages/wares/__init__.py")])
def test_a_helper_of_a_package_is_not_the_users_line_but_a_model_of_it_is(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool, place: str) -> None:
    path = tmp_path / "site-packages" / "wares" / "__init__.py"
    path.parent.mkdir(parents=True)
    path.write_text(PACKAGE)
    monkeypatch.syspath_prepend(path.parents[1])
    monkeypatch.delitem(sys.modules, "wares", raising=False)
    wares = importlib.import_module("wares")

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = wares.Halver()

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x) if inside else wares.halved(x)  # type: ignore[no-any-return]

    (module,) = lowered(Own(), torch.randn(8, 64))
    (((origin,),),) = sites(module).values()
    assert place in origin.line and origin.module == ("part" if inside else "")


# --- names

class RmsLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.RMSNorm(64), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))  # type: ignore[no-any-return]


NAMES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "gelu": (F.gelu, (torch.randn(8, 64),)),
    "layer_norm": (lambda x: F.layer_norm(x, (64,)), (torch.randn(8, 64),)),
    "softmax": (lambda x: torch.softmax(x, -1), (torch.randn(8, 64),)),
    "log_softmax": (lambda x: x.log_softmax(-1), (torch.randn(8, 64),)),
    "rms_norm": (lambda x: F.rms_norm(x, (64,)), (torch.randn(8, 64),)),
    "rms_norm_linear": (RmsLinear(), (torch.randn(8, 64),)),
    "linear_relu": (lambda x, w, b: F.relu(F.linear(x, w, b)),
                    (torch.randn(8, 64), torch.randn(64, 64), torch.randn(64))),
    "floor_add": (lambda x: torch.floor(x) + 1, (torch.randn(8),)),
    "mm_relu": (lambda x, w: torch.relu((x + 1) @ w), (torch.randn(8, 64), torch.randn(64, 64))),
    "mean": (lambda x: x.mean(-1), (torch.randn(8, 64),)),
    "cat": (lambda x, y: torch.cat([x, y]), (torch.randn(8, 64), torch.randn(4, 64))),
    "copy": (lambda x: x.t().contiguous(), (torch.randn(8, 64),))}


@pytest.mark.parametrize("name", NAMES)
def test_names_are_those_of_the_users_functions(name: str) -> None:
    fn, args = NAMES[name]
    (module,) = lowered(fn, *args)
    assert [k.name for k in module.kernels] == [name]


def test_names_of_gradients() -> None:
    net = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU())
    _, backward = lowered(net, torch.randn(8, 64), train=True)
    names = {re.sub(r"_[0-9a-f]{6}$", "", k.name) for k in backward.kernels}
    assert names and all(re.fullmatch(r"((layer_norm|linear|gelu)_)+backward", n) for n in names)


def test_equal_kernels_are_one_under_the_name_of_the_first() -> None:
    def fn(x: Tensor) -> Tensor:
        y = torch.sort(torch.square(x))[0]
        return y * y

    (module,) = lowered(fn, torch.randn(8, 64))
    ((name, (one, two)),) = sites(module).items()
    assert (name, targets(one), targets(two)) == (
        "square", ["aten.pow.Tensor_Scalar"], ["aten.mul.Tensor"])


def test_a_hash_tells_two_of_one_name_apart() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sum(0), x[:7].sum(1)

    (module,) = lowered(fn, torch.randn(64, 64))
    first, second = sorted((k.name for k in module.kernels), key=len)
    assert first == "sum" and re.fullmatch(r"sum_[0-9a-f]{6}", second)


def test_names_are_short_and_legal_in_c() -> None:
    def fn(x: Tensor) -> Tensor:
        for f in (torch.erf, torch.tanh, torch.sin, torch.exp, torch.log1p, F.softplus, F.mish):
            x = f(x)
        return x

    (module,) = lowered(fn, torch.randn(8, 64))
    (kernel,) = module.kernels
    assert kernel.name == "exp_log1p_softplus_mish"
