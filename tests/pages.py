"""Functions whose pages are tested, as files that a user would give."""

from __future__ import annotations

from pathlib import Path

from rung.tools.given import Given, from_expression, from_file
from rung.tools.page.report import page
from rung.tools.show import Request

RELU = "torch.relu(torch.randn(16, 8) @ torch.randn(8, 4) + torch.randn(4))"
CPU = Request(target="cpu.avx512")

GPT2 = '''
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(
            n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))

    def forward(self, ids):
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss

def build():
    return Loss(), (torch.randint(0, 64, (2, 16)),)
'''

HOSTILE = '''
import torch

def f(x, w):  # </script><script>document.title = "broken"</script> 😀
    note = "</pre><img src=https://example.invalid/x.png> 🪜"
    return torch.relu(x @ w) + len(note)  # <b>&amp;

def build():
    return f, (torch.randn(16, 8), torch.randn(8, 4))
'''

LINELESS = '''
import torch
from torch import fx

def f(x):
    return torch.relu(x) + 1

def build():
    return fx.symbolic_trace(f), (torch.randn(16, 8),)
'''


def given(text: str, folder: Path, name: str = "given") -> Given:
    """What a file of this text builds."""
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    return from_file(f"{path}:build")


def relu() -> str:
    return page(from_expression(RELU), CPU)


def gpt2_step(folder: Path) -> str:
    return page(given(GPT2, folder), Request(target="cpu.avx512", train=True))


def hostile(folder: Path) -> str:
    return page(given(HOSTILE, folder, "😀 & <i>"), CPU)
