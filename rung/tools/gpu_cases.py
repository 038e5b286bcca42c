"""What `rung bench gpu_kernels` and `gpu_models` measure, with the bars that they are to keep.

A case builds a function and its arguments on a device, anew for each of the sets that take turns;
`Case.how` says what of it is timed, and `bars` what is expected of the figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch.nn import functional as F

from rung.tools import models
from rung.tools.benchmarks import GPU

KERNELS, MODELS = GPU
Run = Callable[..., Any]
Built = tuple[Run, tuple[Any, ...]]
Build = Callable[[bool, str], Built]
PEERS = ("eager", "inductor")


@dataclass(frozen=True)
class Case:
    """`build(quick, device)` gives a function and its arguments.

    `how` it is timed: `graph`, calls captured in a CUDA graph; `backward`, the same with gradients,
    of a result whose cotangent is the last argument; `calls`, as they are; `step`, a loss, its
    gradients and AdamW; `host`, what a call takes of the host; `decode`, tokens of a model;
    `first`, the first call in a new process. `bars` has the least ratio to each peer, or to the
    better of Inductor's modes (`best`), and the share of the `copy` rate. The geometric mean of a
    `group` is what has the bar 1 of Inductor.
    """

    name: str
    build: Build
    bars: Mapping[str, float] = field(default_factory=dict)
    part: str = KERNELS
    how: str = "graph"
    peers: tuple[str, ...] = PEERS
    group: str = ""


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def norm_gelu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(layer_norm(x, w, b))


def cross_entropy(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x.float(), labels)


def gemv(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(F.linear(x, w, b))


def applied(module: Run, *args: object) -> object:
    return module(*args)


# --- arguments

def of_shapes(function: Run, *shapes: tuple[int, ...],
              dtype: torch.dtype = torch.bfloat16) -> Build:
    """Random arguments of these shapes, a 64th as long each way where it is quick."""
    def build(quick: bool, device: str) -> Built:
        small = [tuple(max(1, n >> 6) if quick else n for n in shape) for shape in shapes]
        return function, tuple(torch.randn(s, device=device, dtype=dtype) for s in small)
    return build


def of_labels(rows: int, classes: int, *more: tuple[int, ...]) -> Build:
    """Logits and labels, and a cotangent where there is to be one."""
    def build(quick: bool, device: str) -> Built:
        n, m = (rows >> 8, classes >> 8) if quick else (rows, classes)
        logits = torch.randn(n, m, device=device, dtype=torch.bfloat16)
        labels = torch.randint(m, (n,), device=device)
        return cross_entropy, (logits, labels, *(torch.ones(s, device=device) for s in more))
    return build


def of_block(sizes: models.Sizes, length: int, bias: bool = False) -> Build:
    """A layer with a cache of 1024 positions, or of as many as the prompt has: the last token of
    it, or the prompt."""
    def build(quick: bool, device: str) -> Built:
        chosen, n = (models.TINY, min(length, 16)) if quick else (sizes, length)
        cache, width = 16 if quick else max(1024, n), chosen.hidden // chosen.heads
        with torch.device(device):
            block = models.DecoderLayer(chosen, bias).bfloat16().requires_grad_(False)
            angles = torch.rand(n, width)
            keys = [torch.randn(1, chosen.kv_heads, cache, width).bfloat16() for _ in "kv"]
            at = torch.tensor([cache - 1]) if n == 1 else torch.arange(n)
            return applied, (block, torch.randn(1, n, chosen.hidden).bfloat16(),
                             angles.cos().bfloat16(), angles.sin().bfloat16(), *keys, at)
    return build


def of_model(name: str, batch: int, length: int = 128, train: bool = False) -> Build:
    """A model of `models`: forward in bf16, or its loss in float32 for autocast. Nothing is
    dropped, so that results can be compared."""
    def build(quick: bool, device: str) -> Built:
        chosen = models.MODELS[name]
        given = chosen.inputs(quick, 2 if quick else batch, 8 if quick else length)
        model, given = chosen.build(quick).to(device), {n: x.to(device) for n, x in given.items()}
        for m in model.modules():
            if isinstance(m, torch.nn.Dropout):
                m.p = 0.0
        if not train:
            given = {n: x.bfloat16() if x.is_floating_point() else x for n, x in given.items()}
            return models.output, (model.eval().bfloat16().requires_grad_(False), given)
        rows = given["input_ids"].numel() if "input_ids" in given else len(next(iter(
            given.values())))
        labels = torch.arange(rows, device=device) % (10 if quick else models.VOCABULARY)
        return models.loss, (model.train(), given, labels)
    return build


def of_llama(quick: bool, device: str) -> Built:
    """TinyLlama-1.1B, and the sizes that a decoder of it needs."""
    sizes = models.TINY if quick else models.LLAMA
    return applied, (models.llama(sizes, torch.bfloat16).to(device), sizes)


# --- the cases

def _names(what: str, shape: tuple[int, ...]) -> str:
    return f"{what}_{'x'.join(map(str, shape))}"


def _normal(what: str, function: Run, rows: int, columns: int, params: int,
            **more: Any) -> Case:
    """A function of a matrix and of parameters as long as its rows."""
    shapes: list[tuple[int, ...]] = [(rows, columns), *[(columns,)] * params]
    shapes += [(rows, columns)] * (more.get("how") == "backward")
    return Case(_names(what, shapes[0]), of_shapes(function, *shapes), **more)


WIDE = ((16384, 4096), (8192, 32768), (4096, 131072))
AT_LEAST = {"inductor": 0.97, "eager": 0.95}
BEST = (*PEERS, "reduce-overhead", "rung-graphs")
_F32 = partial(of_shapes, dtype=torch.float32)
CASES = (
    Case("host_x+1", _F32(lambda x: x + 1, (8,)), {"dynamo + 8 us": 1.0, "inductor": 1 / 0.65},
         how="host", peers=(*PEERS, "dynamo")),
    *(_normal("softmax", softmax, *shape, 0, bars=bars) for shape, bars in zip(WIDE, (
        {"inductor": 1.8, "copy": 0.88}, {"inductor": 1.8, "copy": 0.88}, {"inductor": 1.35}),
        strict=True)),
    *(_normal("rms_norm", rms_norm, *shape, 1, group="rms_norm") for shape in (
        *WIDE, (32768, 1024))),
    _normal("norm_gelu", norm_gelu, *WIDE[0], 2, bars={"inductor": 1.7}),
    Case("cross_entropy", of_labels(8192, 128256), {"inductor": 2.2}),
    Case("colsum", _F32(lambda x: x.sum(0), (16384, 8192)), group="moves"),
    Case("transpose+1", _F32(lambda x: x.t().contiguous() + 1, (16384, 8192)), group="moves"),
    Case("cumsum", _F32(lambda x: x.cumsum(-1), (16384, 8192)), group="moves"),
    Case("floor+1", _F32(lambda x: torch.floor(x) + 1, (1 << 28,)), {"copy": 0.95}, group="moves"),
    *(Case(_names("gemv", (k, n)), of_shapes(gemv, (1, k), (n, k), (n,)), {"inductor": 1.15})
      for k, n in ((3584, 18944), (2048, 5632))),
    Case("llama_decode", of_block(models.LLAMA, 1), {"inductor": 1.5}),
    Case("qwen_decode", of_block(models.QWEN, 1, True), {"inductor": 1.15}),
    _normal("layer_norm_backward", layer_norm, *WIDE[0], 2, bars={"inductor": 1.0},
            how="backward"),
    _normal("rms_norm_backward", rms_norm, *WIDE[0], 1, bars={"inductor": 1.0}, how="backward"),
    Case("cross_entropy_backward", of_labels(8192, 128256, ()), {"inductor": 1.3},
         how="backward"),
    *(Case(f"{name}_prefill_{n}", of_block(sizes, n, name == "qwen"), {"best": 0.97}, MODELS,
           peers=BEST) for name, sizes in (("llama", models.LLAMA), ("qwen", models.QWEN))
      for n in (512, 2048)),
    Case("gpt2_step_8x1024", of_model("gpt2", 8, 1024, True), {"inductor": 1.0}, MODELS, "step"),
    Case("llama_32_tokens", of_llama, {"reduce-overhead": 1.3}, MODELS, "decode",
         ("eager", *BEST[2:])),
    *(Case(f"{name}_forward", of_model(name, 32), AT_LEAST, MODELS, "calls", BEST)
      for name in ("bert", "vit", "resnet")),
    *(Case(f"{name}_step", of_model(name, 32, train=True), AT_LEAST, MODELS, "step")
      for name in ("bert", "vit", "resnet")),
    Case("first_call_llama_block", of_block(models.LLAMA, 512), {"inductor": 2.0}, MODELS,
         how="first", peers=("inductor",)),
)
NAMED = {case.name: case for case in CASES}


def traffic(args: object, results: object) -> int:
    """The bytes of arguments, parameters of modules among them, and of results."""
    leaves = torch.utils._pytree.tree_leaves((args, results))
    modules = [m for m in leaves if isinstance(m, torch.nn.Module)]
    tensors = [x for m in modules for x in m.parameters()] + [
        x for x in leaves if isinstance(x, torch.Tensor)]
    return sum(prod(x.shape) * x.element_size() for x in tensors)
