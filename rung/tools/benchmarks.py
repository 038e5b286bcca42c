"""The functions that `rung bench` measures, each with its sizes and its small sizes for `--quick`.

`NAMES` needs no torch, so that the command line can list it; the builders import what they need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from rung.tools import models

Function = Callable[..., Any]
Built = tuple[Function, tuple[Any, ...]]


@dataclass(frozen=True)
class Benchmark:
    """`build(quick)` gives a function and its arguments; `flops(quick)` its model FLOPs or 0.

    With `train` the function is a loss, and a step of AdamW is measured around it.
    """

    name: str
    what: str
    build: Callable[[bool], Built]
    flops: Callable[[bool], int] = lambda quick: 0
    group: str = ""
    train: bool = False


def pointwise(quick: bool, shape: tuple[int, ...] = (1024, 1024)) -> Built:
    import torch

    return lambda x: torch.floor(x) + 1, (torch.randn((64, 64) if quick else shape),)


def _mm_size(quick: bool) -> int:
    return 48 if quick else 512


def relu_mm(quick: bool) -> Built:
    import torch

    n = _mm_size(quick)
    return (lambda x, bias, w: torch.relu((x + bias) @ w),
            (torch.randn(n, n), torch.randn(n), torch.randn(n, n)))


def softmax(quick: bool) -> Built:
    import torch

    return lambda x: torch.softmax(x, -1), (torch.randn(8 if quick else 512, 2048),)


def colsum(quick: bool) -> Built:
    import torch

    n = 64 if quick else 4096
    return lambda x: x.sum(0), (torch.randn(n, n),)


def cache_step(quick: bool) -> Built:
    """One token against a KV cache, which is an argument that the function changes."""
    import torch

    heads, length, width = (2, 16, 8) if quick else (32, 1024, 64)
    hidden = heads * width
    cache = [torch.randn(1, heads, length, width) for _ in "kv"]
    angle = torch.rand(width)
    args = (torch.randn(1, hidden), torch.rand(hidden), torch.randn(hidden, hidden) * 0.02,
            torch.randn(2 * hidden, hidden) * 0.02, torch.cos(angle), torch.sin(angle), *cache,
            torch.tensor([length // 2]))
    return step, args


def step(x: torch.Tensor, norm: torch.Tensor, wq: torch.Tensor, wkv: torch.Tensor,
         cos: torch.Tensor, sin: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
         at: torch.Tensor) -> torch.Tensor:
    """RMSNorm, two projections, rotate, write into the cache, attention of the token against it."""
    import torch

    _, heads, length, width = keys.shape
    h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * norm
    q = (h @ wq.T).view(1, heads, 1, width)
    k, v = (h @ wkv.T).view(1, 2 * heads, 1, width).chunk(2, 1)
    q, k = (t * cos + torch.cat((-t[..., width // 2:], t[..., : width // 2]), -1) * sin
            for t in (q, k))
    keys.index_copy_(2, at, k)
    values.index_copy_(2, at, v)
    scores = q @ keys.transpose(-1, -2) / width ** 0.5
    late = torch.arange(length) > at
    return torch.softmax(scores.masked_fill(late, float("-inf")), -1) @ values


def llama(quick: bool) -> Built:
    """One token through a Llama with a static cache."""
    from rung.tools import models  # loads torch

    return models.llama_step(models.TINY if quick else replace(models.LLAMA, layers=4))


def forward(name: str) -> Callable[[bool], Built]:
    """A model of `models.MODELS`, without gradients."""
    def build(quick: bool) -> Built:
        from rung.tools import models

        chosen = models.MODELS[name]
        model, given = chosen.build(quick).eval(), _inputs(chosen, quick)
        return lambda: models.output(model, given), ()
    return build


def training(name: str) -> Callable[[bool], Built]:
    """The loss of a model of `models.MODELS`; its first argument has the parameters."""
    def build(quick: bool) -> Built:
        import torch

        from rung.tools import models

        chosen = models.MODELS[name]
        given = _inputs(chosen, quick)
        rows = given["input_ids"].numel() if "input_ids" in given else chosen.batch
        labels = torch.arange(rows) % models.VOCABULARY
        return models.loss, (chosen.build(quick).train(), given, labels)
    return build


def _inputs(model: models.Model, quick: bool) -> models.Inputs:
    return model.inputs(quick, model.batch, 8 if quick else model.length)


MODELS = ("bert", "gpt2", "qwen2", "t5", "vit", "resnet", "whisper", "lstm", "mixtral", "mamba")
TRAINED = ("gpt2", "resnet", "vit")
MODELS_GROUP = "models"
BENCHMARKS = (
    Benchmark("tiny", "floor(x) + 1, 8 elements", lambda quick: pointwise(False, (8,))),
    Benchmark("pointwise", "floor(x) + 1, 1024 x 1024", pointwise),
    Benchmark("relu_mm", "relu((x + bias) @ w), 512^3", relu_mm,
              lambda quick: 2 * _mm_size(quick) ** 3),
    Benchmark("softmax", "softmax over rows, 512 x 2048", softmax),
    Benchmark("colsum", "column sum, 4096 x 4096", colsum),
    Benchmark("cache_step", "one token against a KV cache of 1024", cache_step),
    Benchmark("llama", "one token through a Llama of TinyLlama's widths, 4 layers", llama,
              group=MODELS_GROUP),
    *(Benchmark(name, f"{name}, forward", forward(name), group=MODELS_GROUP) for name in MODELS),
    *(Benchmark(f"train_{name}", f"{name}, a training step", training(name), group=MODELS_GROUP,
                train=True) for name in TRAINED),
)
FIRST_CALL = "first_call"
NAMES = (*(b.name for b in BENCHMARKS), MODELS_GROUP, FIRST_CALL)
