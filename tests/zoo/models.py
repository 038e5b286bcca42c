"""Every architecture of transformers, small: built from its default configuration, made narrow.

All widths of a configuration are divided by one number, so that what must divide still does; few
heads, experts and layers are left. What cannot be built so, offline, is not in the zoo.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING, MODEL_MAPPING_NAMES

WIDTH, HEADS, LAYERS, EXPERTS = 64, 4, 2, 8  # of the small models, at most
UNIT = 16  # of their widths, which products of several experts want aligned
DEEP = re.compile(r"layers?$|depths?$|n_block|num_blocks")
HEADED = re.compile(r"heads?$|head_groups$|n_groups?$|num_groups$")
HEAD_WIDE = re.compile(r"(head_dim|head_size|_kv|kv_channels)$")
WIDE = re.compile(r"size|dim|embd|d_model|d_ff|ffn|rank|channel|hidden|width|inner|lora")
KEPT = re.compile(r"vocab|patch|image|kernel|stride|window|max|token|chunk|batch|pool|_id$|grid")


def names() -> list[str]:
    """The model types that have a base model."""
    return sorted(MODEL_MAPPING_NAMES)


def shrunk(config: Any) -> Any:
    """`config` with small numbers in it and in the configurations inside it."""
    own = next((v for k in ("hidden_size", "d_model", "n_embd", "embed_dim", "dim") for v in (
        getattr(config, k, None),) if isinstance(v, int)), WIDTH)
    factor = max(own // WIDTH, 1)
    for key, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            shrunk(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            setattr(config, key, smaller(key, value, factor))
        elif isinstance(value, list | tuple) and WIDE.search(key) and not KEPT.search(key):
            setattr(config, key, type(value)(
                max(v // factor, 1) if isinstance(v, int) else v for v in value))
    return config


def smaller(key: str, value: int, factor: int) -> int:
    """A number of a configuration whose widths become `factor` times smaller."""
    if DEEP.search(key):
        return min(value, LAYERS)
    if "expert" in key and not WIDE.search(key):
        return min(value, EXPERTS)
    if HEADED.search(key):
        return math.gcd(value, HEADS)
    if HEAD_WIDE.search(key):
        return min(value, WIDTH // HEADS)
    if WIDE.search(key) and not KEPT.search(key) and value >= factor:
        small = value // factor
        return small if small < UNIT else -(-small // UNIT) * UNIT
    return value


def build(name: str) -> nn.Module:
    """A small model with random weights from a fixed seed; whatever fails, raises."""
    config = shrunk(CONFIG_MAPPING[name]())
    found: Any = MODEL_MAPPING[type(config)]
    torch.manual_seed(0)
    make = found[0] if isinstance(found, Sequence) else found
    model: nn.Module = make(config)
    return model.float()


def inputs(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """Two examples of what the model's `forward` asks for; then of its text alone."""
    config: Any = model.config
    text = getattr(config, "text_config", config)
    vision = getattr(config, "vision_config", config)
    ids = torch.randint(2, min(getattr(text, "vocab_size", 99) or 99, 99), (2, 12))
    side = getattr(vision, "image_size", None) or 64
    high, wide = side if isinstance(side, list | tuple) else (side, side)
    known = {
        "input_ids": ids, "decoder_input_ids": ids.flip(1),
        "pixel_values": torch.randn(2, getattr(vision, "num_channels", 3) or 3, high, wide),
        "input_values": torch.randn(2, 4000),
        "input_features": torch.randn(2, getattr(config, "num_mel_bins", 80) or 80, 60)}
    wanted = inspect.signature(model.forward).parameters
    given = {k: v for k, v in known.items() if k in wanted}
    words = {k: v for k, v in given.items() if k.endswith("ids")}
    return [given, words] if words and len(words) < len(given) else [given]
