"""ARCHITECTURE.md names every source file, and no file that is gone; README's examples run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rung.core import trace

ROOT = Path(__file__).parent.parent


def listed() -> set[str]:
    """Paths below rung/ that ARCHITECTURE.md has a line for."""
    found, folder = set(), ""
    for line in (ROOT / "ARCHITECTURE.md").read_text().splitlines():
        if line.startswith("## "):
            match = re.match(r"## `rung/(\w+)/`", line)
            folder = f"{match[1]}/" if match else ""
        elif match := re.match(r"- `([\w/]+\.py)`", line):
            found.add(folder + match[1])
    return found


def test_architecture_names_every_file() -> None:
    rung = ROOT / "rung"
    present = {str(p.relative_to(rung)) for p in rung.rglob("*.py") if p.name != "__init__.py"}
    assert listed() == present


def test_architecture_is_short() -> None:
    lines = (ROOT / "ARCHITECTURE.md").read_text().splitlines()
    assert len(lines) <= len(listed()) + 50  # a line for each module, and a page of text


# --- README's examples: each names its library, and is run where that is installed

def example(library: str, names: dict[str, Any]) -> dict[str, Any]:
    """The names after the example that imports from `library` ran; it compiled something."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (code,) = (x for x in found if re.search(rf"(?:from|import) {library}\b", x))
    scope = {"torch": torch} | names
    with trace.listen() as events:
        exec(code, scope)
        if "compiled" in scope:
            with torch.no_grad():
                scope["made"] = scope["compiled"](scope["x"])
        if "accelerator" in scope:
            scope["accelerator"].backward(scope["model"](scope["x"]).square().mean())
    assert any(e.kind == "compiled" for e in events)
    assert not any((e.kind, e.place) == ("declined", "backend") for e in events)
    return scope


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=64, num_hidden_layers=1))


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


@pytest.mark.usefixtures("fresh")
def test_example_of_transformers() -> None:
    pytest.importorskip("transformers")
    model, ids = llama().eval(), torch.arange(8)[None]
    made = example("transformers import CompileConfig", {"model": model, "ids": ids})["tokens"]
    assert torch.equal(made, model.generate(ids, max_new_tokens=8))


@pytest.mark.usefixtures("fresh")
def test_example_of_the_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import TrainingArguments

    tokens = torch.arange(64).view(8, 8)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, max_steps=2,
                                  report_to=[], save_strategy="no", disable_tqdm=True)
    made = example("transformers import Trainer", {
        "model": llama(), "arguments": arguments,
        "data": [{"input_ids": row, "labels": row} for row in tokens]})
    assert made["trainer"].state.global_step == 2


@pytest.mark.usefixtures("fresh")
def test_example_of_accelerate() -> None:
    pytest.importorskip("accelerate")
    model = Net()
    made = example("accelerate", {"model": model, "x": torch.randn(4, 8),
                                  "optimizer": torch.optim.AdamW(model.parameters())})
    assert all(p.grad is not None for p in made["model"].parameters())


@pytest.mark.usefixtures("fresh")
def test_example_of_lightning() -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())
    data = torch.utils.data.TensorDataset(torch.randn(8, 8))
    made = example("lightning", {"module": Module(),
                                 "loader": torch.utils.data.DataLoader(data, batch_size=4)})
    assert made["trainer"].global_step == 2


@pytest.mark.usefixtures("fresh")
def test_example_of_torchao() -> None:
    pytest.importorskip("torchao")
    made = example("torchao", {"model": Net(64).eval(), "x": torch.randn(4, 64)})
    with torch.no_grad():
        torch.testing.assert_close(made["made"], made["model"](made["x"]))
