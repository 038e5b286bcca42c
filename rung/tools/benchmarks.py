"""The functions that `rung bench` measures, each with its sizes and its small sizes for `--quick`.

`NAMES` needs no torch, so that the command line can list it; the builders import what they need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def windows(quick: bool) -> Built:
    """Attention in shifted windows on two scales of an image, in one graph for all image sizes:
    padding to whole windows nests `%` and `//` of the sizes."""
    import torch

    width, high, wide = 32, *((22, 26) if quick else (110, 150))
    x = torch.randn(2, high, wide, width)
    for axis in (1, 2):
        torch._dynamo.maybe_mark_dynamic(x, axis)
    first, merge, last = (torch.randn(a, b) * a ** -0.5 for a, b in (
        (width, 3 * width), (4 * width, width), (width, 3 * width)))
    return two_scales, (x, first, merge, last)


def two_scales(x: torch.Tensor, first: torch.Tensor, merge: torch.Tensor, last: torch.Tensor
               ) -> torch.Tensor:
    """Attention in windows, pixels merged in fours, attention in windows again."""
    import torch
    from torch.nn import functional as F

    x = shifted_windows(x, first)
    x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
    x = torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1) @ merge
    return shifted_windows(x, last)


def shifted_windows(x: torch.Tensor, qkv: torch.Tensor, n: int = 4, heads: int = 4
                    ) -> torch.Tensor:
    """Attention among the pixels of each window of n x n, of an image that is moved by n/2."""
    import torch
    from torch.nn import functional as F

    batch, high, wide, width = x.shape
    y = F.pad(x, (0, 0, 0, -wide % n, 0, -high % n)).roll((-n // 2, -n // 2), (1, 2))
    rows, columns = y.shape[1] // n, y.shape[2] // n
    y = y.view(batch, rows, n, columns, n, width).transpose(2, 3).reshape(-1, n * n, width)
    q, k, v = (y @ qkv).view(-1, n * n, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    y = torch.softmax(q @ k.mT, -1) @ v
    y = y.transpose(1, 2).reshape(batch, rows, columns, n, n, width).transpose(2, 3)
    y = y.reshape(batch, rows * n, columns * n, width).roll((n // 2, n // 2), (1, 2))
    return x.add(y[:, :high, :wide])


@dataclass(frozen=True)
class Variant:
    """A model of `models`, its batch (0: its own) and its type of floating-point numbers."""

    model: str
    batch: int = 0
    dtype: str = "float32"

    @property
    def name(self) -> str:
        return (self.model + (f"_b{self.batch}" if self.batch else "")
                + ("" if self.dtype == "float32" else "_bf16"))

    def __str__(self) -> str:
        return (self.model + (f", batch {self.batch}" if self.batch else "")
                + ("" if self.dtype == "float32" else f", {self.dtype}"))

    def built(self, quick: bool) -> tuple[Any, models.Inputs, int]:
        """The model, the arguments of a call, and its batch."""
        import torch

        from rung.tools import models

        chosen, dtype = (models.MODELS | models.TIMM)[self.model], getattr(torch, self.dtype)
        batch = self.batch or chosen.batch
        given = chosen.inputs(quick, batch, 8 if quick else chosen.length)
        return chosen.build(quick).to(dtype), {
            n: x.to(dtype) if x.is_floating_point() else x for n, x in given.items()}, batch


def llama(variant: Variant) -> Callable[[bool], Built]:
    """One token through a Llama with a static cache."""
    def build(quick: bool) -> Built:
        import torch

        from rung.tools import models

        sizes = models.TINY if quick else replace(models.LLAMA, layers=4)
        return models.llama_step(sizes, getattr(torch, variant.dtype))
    return build


def forward(variant: Variant) -> Callable[[bool], Built]:
    """A model without gradients."""
    def build(quick: bool) -> Built:
        from rung.tools import models

        model, given, _ = variant.built(quick)
        model.eval()
        return lambda: models.output(model, given), ()
    return build


def training(variant: Variant) -> Callable[[bool], Built]:
    """The loss of a model; its first argument has the parameters."""
    def build(quick: bool) -> Built:
        import torch

        from rung.tools import models

        model, given, batch = variant.built(quick)
        rows = given["input_ids"].numel() if "input_ids" in given else batch
        labels = torch.arange(rows) % models.VOCABULARY
        return models.loss, (model.train(), given, labels)
    return build


def _of_models(dtype: str, group: str) -> Iterator[Benchmark]:
    """The rows of all models in one type."""
    one = Variant("llama", dtype=dtype)
    yield Benchmark(one.name, f"one token through a Llama of TinyLlama's widths, 4 layers, {dtype}",
                    llama(one), group=group)
    for variant in (Variant(name, dtype=dtype) for name in MODELS):
        yield Benchmark(variant.name, f"{variant}, forward", forward(variant), group=group)
    for variant in (Variant(name, dtype=dtype) for name in TRAINED):
        yield Benchmark(f"train_{variant.name}", f"{variant}, a training step", training(variant),
                        group=group, train=True)


MODELS = ("bert", "gpt2", "qwen2", "t5", "vit", "resnet", "whisper", "lstm", "mixtral", "mamba")
TRAINED = ("gpt2", "resnet", "vit")
TIMM = ("resmlp", "mixer", "swin")
GROUPS = ("models", "bf16", "timm")
BENCHMARKS = (
    Benchmark("tiny", "floor(x) + 1, 8 elements", lambda quick: pointwise(False, (8,))),
    Benchmark("pointwise", "floor(x) + 1, 1024 x 1024", pointwise),
    Benchmark("relu_mm", "relu((x + bias) @ w), 512^3", relu_mm,
              lambda quick: 2 * _mm_size(quick) ** 3),
    Benchmark("softmax", "softmax over rows, 512 x 2048", softmax),
    Benchmark("colsum", "column sum, 4096 x 4096", colsum),
    Benchmark("cache_step", "one token against a KV cache of 1024", cache_step),
    Benchmark("windows", "attention in shifted windows, one graph for all image sizes", windows),
    *_of_models("float32", "models"),
    *_of_models("bfloat16", "bf16"),
    *(Benchmark(v.name, f"{v}, forward", forward(v), group="timm") for v in (
        Variant(name, batch, dtype) for name in TIMM for batch in (2, 8)
        for dtype in ("float32", "bfloat16"))),
)
FIRST_CALL = "first_call"
GPU = ("gpu_kernels", "gpu_models")  # groups of `gpu_cases`
NAMES = (*(b.name for b in BENCHMARKS), *GROUPS, FIRST_CALL, *GPU)
