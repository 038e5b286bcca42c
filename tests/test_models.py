"""Small models with random weights: as near to float64 as eager is, and training as eager does.

The quick ones run always; `make test-all` runs all, dynamic and in bf16 too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

Inputs = dict[str, torch.Tensor]
Make = Callable[[], tuple[nn.Module, Callable[[int, int], Inputs]]]
VOCABULARY, WIDTH = 64, 32


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def tokens(batch: int, length: int) -> Inputs:
    return {"input_ids": torch.randint(0, VOCABULARY, (batch, length))}


def of_transformers(name: str, inputs: Callable[[int, int], Inputs] = tokens, **config: Any
                    ) -> Make:
    """A model of the library by the name of its class, from its configuration."""
    def make() -> tuple[nn.Module, Callable[[int, int], Inputs]]:
        library = pytest.importorskip("transformers")
        kind = getattr(library, name)
        return kind(kind.config_class(**config)), inputs
    return make


class Block(nn.Module):
    def __init__(self, width: int, out: int, stride: int):
        super().__init__()
        self.a = nn.Conv2d(width, out, 3, stride, 1, bias=False)  # Adam amplifies the noise that
        self.b = nn.Conv2d(out, out, 3, 1, 1, bias=False)  # is the gradient before a norm
        self.n, self.m = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.side = nn.Conv2d(width, out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.m(self.b(F.relu(self.n(self.a(x))))) + self.side(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 8, 7, 2, 3), nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.pool(self.stem(x))).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.cells, self.head = nn.LSTM(16, 24, 2, batch_first=True), nn.Linear(24, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(self.words(input_ids))[0])


def images(batch: int, length: int) -> Inputs:
    return {"x": torch.randn(batch, 3, 32, 32)}


def pixels(batch: int, length: int) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, 32, 32)}


def pairs(batch: int, length: int) -> Inputs:
    return tokens(batch, length) | {"decoder_input_ids": tokens(batch, length)["input_ids"]}


SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 48}
TEXT = SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": 128}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 128,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0,
        "eos_token_id": 0}
T5 = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2,
      "num_heads": 4, "dropout_rate": 0.0}
MODELS: dict[str, Make] = {
    "llama": of_transformers("LlamaForCausalLM", **TEXT, num_key_value_heads=2),
    "gpt2": of_transformers("GPT2LMHeadModel", **GPT2),
    "resnet": lambda: (ResNet(), images),
    "lstm": lambda: (Recurrent(), tokens),
    "bert": of_transformers("BertForMaskedLM", **TEXT, **STILL),
    "vit": of_transformers("ViTForImageClassification", pixels, **SIZES, **STILL, image_size=32,
                           patch_size=8, num_labels=10),
    "t5": of_transformers("T5ForConditionalGeneration", pairs, **T5),
    "mixtral": of_transformers("MixtralForCausalLM", **TEXT, num_key_value_heads=2,
                               num_local_experts=4),
    "mamba": of_transformers("MambaForCausalLM", vocab_size=VOCABULARY, hidden_size=WIDTH,
                             state_size=4, num_hidden_layers=2),
}
QUICK = ("llama", "gpt2", "resnet", "lstm")
NAMES = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
SETTINGS = pytest.mark.parametrize("dynamic, dtype", [
    (False, torch.float32), pytest.param(False, torch.bfloat16, marks=pytest.mark.slow),
    pytest.param(True, torch.float32, marks=pytest.mark.slow)], ids=str)


def output(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    made = model(**inputs)
    return made if isinstance(made, torch.Tensor) else made.logits


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {k: x.to(dtype) if x.is_floating_point() else x for k, x in inputs.items()}


def compiled(fn: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
    return torch.compile(fn, backend="rung", dynamic=True if dynamic else None,
                         options={"strict": True})


def near(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """`got` is as far from float64 as eager is, up to a small factor."""
    assert (got.dtype, got.shape, got.stride()) == (eager.dtype, eager.shape, eager.stride())
    slack = 8 * torch.finfo(eager.dtype).eps * float(exact.abs().max())
    far = [float((x.double() - exact).abs().max()) for x in (got, eager)]
    assert far[0] <= 4 * far[1] + slack


@SETTINGS
@pytest.mark.parametrize("name", NAMES)
def test_inference(name: str, dynamic: bool, dtype: torch.dtype) -> None:
    model, inputs = MODELS[name]()
    model = model.to(dtype).eval()
    exact, fn = copy.deepcopy(model).double(), compiled(lambda x: output(model, x), dynamic)
    for batch, length in ((2, 7), (1, 7), (3, 64), (7, 2)) if dynamic else ((2, 7),):
        given = cast(inputs(batch, length), dtype)
        with torch.no_grad():
            eager = output(model, given)
            try:
                judge = output(exact, cast(given, torch.float64))
            except RuntimeError:  # the grouped products of experts have no float64
                judge = eager.double()
            near(fn(given), eager, judge)


def trained(model: nn.Module, batches: list[Inputs], through: Callable[..., Any]) -> list[float]:
    """The losses of a step of AdamW on each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(inputs: Inputs, labels: torch.Tensor) -> torch.Tensor:
        out = output(model, inputs).float()
        return F.cross_entropy(out.reshape(-1, out.shape[-1])[: len(labels)], labels)

    step, losses = through(loss_of), []
    for inputs in batches:
        optimizer.zero_grad()
        loss = step(inputs, torch.arange(next(iter(inputs.values())).shape[0]))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@SETTINGS
@pytest.mark.parametrize("name", NAMES)
def test_training(name: str, dynamic: bool, dtype: torch.dtype) -> None:
    model, inputs = MODELS[name]()
    model = model.to(dtype).train()
    sizes = ((2, 7), (3, 9), (4, 33)) if dynamic else ((2, 7),) * 3
    batches = [cast(inputs(*size), dtype) for size in sizes]
    theirs, ours = copy.deepcopy(model), model
    want = trained(theirs, batches, lambda fn: fn)
    got = trained(ours, batches, lambda fn: compiled(fn, dynamic))
    tolerance = 2e-5 if dtype is torch.float32 else 3e-2
    assert got == pytest.approx(want, rel=tolerance, abs=tolerance)
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=10 * tolerance, atol=10 * tolerance)
