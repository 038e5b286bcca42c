"""The models of the demo and the benchmarks, with random weights from a seed.

Llama and GPT-2 come from their `transformers` configurations, ResNet-50 is written out here.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

SEED = 0


@dataclass(frozen=True)
class Sizes:
    """The sizes of a Llama or a GPT-2."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    layers: int
    context: int = 64


LLAMA = Sizes(2048, 32, 4, 5632, 32000, 4)  # TinyLlama-1.1B's widths
GPT2 = Sizes(768, 12, 12, 3072, 50257, 4)
TINY = Sizes(64, 4, 2, 96, 128, 2)


def llama(sizes: Sizes, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A Llama for causal language modelling."""
    from transformers import LlamaConfig, LlamaForCausalLM

    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = LlamaConfig(
        hidden_size=sizes.hidden, num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads, intermediate_size=sizes.ffn,
        vocab_size=sizes.vocabulary, num_hidden_layers=sizes.layers,
        max_position_embeddings=2048)
    torch.manual_seed(SEED)
    model: nn.Module = LlamaForCausalLM(config)
    return model.eval().to(dtype)


def gpt2(sizes: Sizes) -> nn.Module:
    """A GPT-2 for causal language modelling."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=sizes.hidden, n_head=sizes.heads, n_inner=sizes.ffn,
                        vocab_size=sizes.vocabulary, n_layer=sizes.layers)
    torch.manual_seed(SEED)
    model: nn.Module = GPT2LMHeadModel(config)
    return model.eval()


class Decoder:
    """Runs a Llama token by token over one static cache. `forward` may be a compiled model."""

    def __init__(self, model: nn.Module, sizes: Sizes,
                 forward: Callable[..., Any] | None = None):
        from transformers import StaticCache

        self.forward = model if forward is None else forward
        dtype = next(model.parameters()).dtype
        config: Any = model.config
        self.cache: Any = StaticCache(config=config, max_cache_len=sizes.context)
        self.cache.early_initialization(1, sizes.kv_heads, sizes.hidden // sizes.heads, dtype,
                                        torch.device("cpu"))
        known = inspect.signature(type(model).forward).parameters
        self.keyword = "past_key_values" if "past_key_values" in known else "cache"

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [vocabulary] after the tokens `ids` [1, n]."""
        with torch.no_grad():
            out = self.forward(ids, **{self.keyword: self.cache}, use_cache=True)
        logits: torch.Tensor = out.logits[0, -1]
        return logits

    def start(self, prompt: torch.Tensor) -> torch.Tensor:
        """`step` on an empty cache."""
        self.cache.reset()
        return self.step(prompt)


def llama_step(sizes: Sizes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """One token through a Llama: a function of the token, after a prompt of 8."""
    model = llama(sizes)
    decoder = Decoder(model, sizes)
    decoder.start(torch.arange(8)[None])
    keyword, cache = decoder.keyword, decoder.cache

    def one(ids: torch.Tensor) -> torch.Tensor:
        cache.layers[0].cumulative_length.fill_(8)
        logits: torch.Tensor = model(ids, **{keyword: cache}, use_cache=True).logits
        return logits

    return one, (torch.tensor([[3]]),)


# --- ResNet-50

class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        outputs = 4 * width
        self.path = nn.Sequential(
            *_conv(inputs, width, 1), nn.ReLU(), *_conv(width, width, 3, stride), nn.ReLU(),
            *_conv(width, outputs, 1))
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Sequential(*(() if same else _conv(inputs, outputs, 1, stride)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.path(x) + self.shortcut(x))


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, ...]:
    return (nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False),
            nn.BatchNorm2d(outputs))


def resnet(blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000
           ) -> nn.Module:
    """ResNet (He et al., 2015) of bottlenecks; (3, 4, 6, 3) is ResNet-50."""
    torch.manual_seed(SEED)
    layers: list[nn.Module] = [*_conv(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for n, count in enumerate(blocks):
        for k in range(count):
            layers.append(Bottleneck(inputs, width << n, 2 if n and not k else 1))
            inputs = 4 * (width << n)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(inputs, classes)).eval()
