"""The models of the demo and the benchmarks, with random weights from a seed.

Most come from a `transformers` configuration; ResNet and the recurrent one are written out here.
`MODELS` has each in its real size and, `quick`, in a tiny one for tests.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rung.core.errors import RungError

SEED = 0


class MissingLibrary(RungError):
    """A model needs a library that cannot be imported."""


def library(name: str, extra: str) -> Any:
    """A module of a library that the `extra` of Rung's package installs."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # as of a torchvision that was built for another torch
        raise MissingLibrary(f"{name} cannot be imported: {error}; see rung[{extra}]") from error


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


LLAMA = Sizes(2048, 32, 4, 5632, 32000, 22)  # TinyLlama-1.1B's shapes
QWEN = Sizes(3584, 28, 4, 18944, 152064, 28)  # Qwen2.5-7B's
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

        self.model, self.forward = model, model if forward is None else forward
        dtype = next(model.parameters()).dtype
        config: Any = model.config
        self.cache: Any = StaticCache(config=config, max_cache_len=sizes.context)
        self.cache.early_initialization(1, sizes.kv_heads, sizes.hidden // sizes.heads, dtype,
                                        next(model.parameters()).device)
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


def llama_step(sizes: Sizes, dtype: torch.dtype = torch.float32
               ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """One token through a Llama: a function of the token, after a prompt of 8."""
    model = llama(sizes, dtype)
    decoder = Decoder(model, sizes)
    decoder.start(torch.arange(8)[None])
    keyword, cache = decoder.keyword, decoder.cache

    def one(ids: torch.Tensor) -> torch.Tensor:
        for layer in cache.layers:
            layer.cumulative_length.fill_(8)
        logits: torch.Tensor = model(ids, **{keyword: cache}, use_cache=True).logits
        return logits

    return one, (torch.tensor([[3]]),)


# --- a layer of a Llama

class Norm(nn.Module):
    """RMSNorm as language models have it: its sum in float32."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        made: torch.Tensor = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * made.to(x.dtype)


class DecoderLayer(nn.Module):
    """A layer of a Llama, of `sizes`, over a static cache.

    A prompt is written to the start of the cache and sees itself; one token is written to its last
    position and sees all of it.
    """

    def __init__(self, sizes: Sizes, bias: bool = False):
        super().__init__()
        hidden, self.width = sizes.hidden, sizes.hidden // sizes.heads
        inner = self.width * sizes.kv_heads
        self.before, self.after = Norm(hidden), Norm(hidden)
        self.q, self.out = nn.Linear(hidden, hidden, bias), nn.Linear(hidden, hidden, False)
        self.k, self.v = nn.Linear(hidden, inner, bias), nn.Linear(hidden, inner, bias)
        self.gate, self.up = (nn.Linear(hidden, sizes.ffn, False) for _ in range(2))
        self.down = nn.Linear(sizes.ffn, hidden, False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, keys: torch.Tensor,
                values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        y, half, one = self.before(x), self.width // 2, x.shape[1] == 1
        q, k, v = (f(y).unflatten(-1, (-1, self.width)).transpose(1, 2)
                   for f in (self.q, self.k, self.v))
        q, k = (t * cos + torch.cat((-t[..., half:], t[..., :half]), -1) * sin for t in (q, k))
        keys.index_copy_(2, at, k)
        values.index_copy_(2, at, v)
        y = nn.functional.scaled_dot_product_attention(
            q, keys if one else k, values if one else v, is_causal=not one, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.after(x)
        made: torch.Tensor = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return made


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


class Recurrent(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.cells, self.head = nn.LSTM(width, width, 2, batch_first=True), nn.Linear(
            width, vocabulary)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.cells(self.words(input_ids))[0])
        return logits


# --- all of them, by name

Inputs = dict[str, torch.Tensor]
VOCABULARY = 64  # tokens are drawn from as many, whatever a model could take


@dataclass(frozen=True)
class Model:
    """`build(quick)` gives a model in training mode, `inputs(quick, batch, length)` random
    arguments for it; `batch` and `length` are those that benchmarks run."""

    what: str
    build: Callable[[bool], nn.Module]
    inputs: Callable[[bool, int, int], Inputs]
    batch: int = 1
    length: int = 128


def output(model: Callable[..., Any], inputs: Inputs) -> torch.Tensor:
    """The logits, or the hidden states of a model without a head."""
    made = model(**inputs)
    found: torch.Tensor = made if isinstance(made, torch.Tensor) else made[0]
    return found


def tokens(quick: bool, batch: int, length: int) -> Inputs:
    return {"input_ids": torch.randint(0, VOCABULARY, (batch, length))}


def _pairs(quick: bool, batch: int, length: int) -> Inputs:
    target = tokens(quick, batch, length)["input_ids"]
    return tokens(quick, batch, length) | {"decoder_input_ids": target}


def _images(name: str) -> Callable[[bool, int, int], Inputs]:
    def images(quick: bool, batch: int, length: int) -> Inputs:
        edge = 32 if quick else 224
        return {name: torch.randn(batch, 3, edge, edge)}
    return images


def _sound(quick: bool, batch: int, length: int) -> Inputs:
    return {"input_features": torch.randn(batch, 80, 32 if quick else 3000)}


def _of_transformers(path: str, full: Mapping[str, Any], quick: Mapping[str, Any]
                     ) -> Callable[[bool], nn.Module]:
    """A class of the library, by its path there, from either of two configurations."""
    def build(small: bool) -> nn.Module:
        logging.getLogger("transformers").setLevel(logging.ERROR)
        module, _, name = f"transformers.{path}".rpartition(".")
        kind: Any = getattr(library(module, "demo"), name)
        torch.manual_seed(SEED)
        made: nn.Module = kind(kind.config_class(**(quick if small else full)))
        return made
    return build


def _of_timm(name: str, quick: Mapping[str, Any]) -> Callable[[bool], nn.Module]:
    """A model of the library, by its name there; `quick` has the sizes of the tiny one."""
    def build(small: bool) -> nn.Module:
        timm = library("timm", "bench")
        torch.manual_seed(SEED)
        made: nn.Module = timm.create_model(name, **(quick if small else {}))
        return made
    return build


def _resnet(quick: bool) -> nn.Module:
    return (resnet((1, 1), 8, 10) if quick else resnet()).train()


def _lstm(quick: bool) -> nn.Module:
    torch.manual_seed(SEED)
    return Recurrent(VOCABULARY, 24 if quick else 512)


_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
          "intermediate_size": 48}
_TEXT = _SMALL | {"vocab_size": VOCABULARY, "max_position_embeddings": 128}
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0,
         "eos_token_id": 0}
_T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
       "num_heads": 4, "dropout_rate": 0.0}
_WHISPER = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4,
            "encoder_ffn_dim": 48, "max_source_positions": 16}
_QWEN = {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
         "intermediate_size": 18944, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
_MIXTRAL = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
            "num_key_value_heads": 2, "intermediate_size": 1024, "vocab_size": VOCABULARY}
_MAMBA = {"hidden_size": 512, "num_hidden_layers": 4, "vocab_size": VOCABULARY}

MODELS: dict[str, Model] = {
    "bert": Model("BERT-base", _of_transformers("BertForMaskedLM", {}, _TEXT | _STILL), tokens),
    "gpt2": Model("GPT-2 124M", _of_transformers("GPT2LMHeadModel", {}, _GPT2), tokens),
    "qwen2": Model("two layers of Qwen2.5-7B's shape", _of_transformers(
        "Qwen2ForCausalLM", _QWEN, _TEXT | {"num_key_value_heads": 2}), tokens, length=32),
    "t5": Model("T5-small", _of_transformers("T5ForConditionalGeneration", {}, _T5), _pairs,
                length=64),
    "vit": Model("ViT-B/16", _of_transformers(
        "ViTForImageClassification", {"num_labels": 1000}, _SMALL | _STILL | {
            "image_size": 32, "patch_size": 8, "num_labels": 10}), _images("pixel_values")),
    "resnet": Model("ResNet-50", _resnet, _images("input")),
    "whisper": Model("Whisper-tiny's encoder", _of_transformers(
        "models.whisper.modeling_whisper.WhisperEncoder", {}, _WHISPER), _sound),
    "lstm": Model("two LSTM layers of 512", _lstm, tokens, 8, 64),
    "mixtral": Model("a small Mixtral", _of_transformers(
        "MixtralForCausalLM", _MIXTRAL, _TEXT | {
            "num_key_value_heads": 2, "num_local_experts": 4}), tokens, length=64),
    "mamba": Model("a small Mamba", _of_transformers(
        "MambaForCausalLM", _MAMBA, {"vocab_size": VOCABULARY, "hidden_size": 32,
                                     "state_size": 4, "num_hidden_layers": 2}), tokens, length=32),
}

_TINY = {"img_size": 32, "num_classes": 10}
TIMM: dict[str, Model] = {
    "resmlp": Model("ResMLP-12", _of_timm("resmlp_12_224", _TINY), _images("x")),
    "mixer": Model("Mixer-B/16", _of_timm("mixer_b16_224", _TINY), _images("x")),
    "swin": Model("Swin-T", _of_timm("swin_tiny_patch4_window7_224", _TINY | {
        "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}), _images("x")),
}


def loss(model: nn.Module, inputs: Inputs, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the first rows of the output, one label each."""
    out = output(model, inputs).float()
    rows = out.reshape(-1, out.shape[-1])[: len(labels)]
    return nn.functional.cross_entropy(rows, labels)
