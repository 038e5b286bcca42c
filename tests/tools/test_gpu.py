"""What `rung bench gpu_kernels` and `gpu_models` say of their rows; tiny ones run on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rung.cli import main
from rung.tools import gpu, gpu_ways, models
from rung.tools.gpu_cases import CASES, NAMED, Case, traffic

EAGER = ("eager",)


def shift(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def case(how: str = "graph", **more: Any) -> Case:
    return Case("shift", lambda quick, device: (shift, (torch.randn(64, device=device),)),
                how=how, **more)


def as_rung(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> None:
    """`run` takes the place of what Rung compiles."""
    monkeypatch.setattr(gpu_ways, "contender",
                        lambda function, name: run if name == "rung" else function)


def test_a_right_row_has_figures_and_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    as_rung(monkeypatch, lambda x: 1 + x)
    row = gpu.measured(case(bars={"eager": 1e-9}), EAGER, True, 1e9)
    assert row["seconds"].keys() == {"rung", "eager"} and not row["wrong"]
    assert row["ratio"]["eager"] == row["seconds"]["eager"] / row["seconds"]["rung"]
    assert row["bytes"] == 2 * 64 * 4 and not gpu.is_below(row)
    assert "ok: " in next(gpu.lines(row))


@pytest.mark.parametrize("run", [
    lambda x: x + 1.01, lambda x: (x + 1).index_fill(0, torch.tensor([5]), torch.nan),
    lambda x: x.add_(1)])
def test_a_wrong_row_is_below(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> None:
    """Values, NaN where nothing was written, an argument that was."""
    as_rung(monkeypatch, run)
    row = gpu.measured(case(), EAGER, True)
    assert "is off by" in row["wrong"]["rung"] and gpu.is_below(row)
    assert any("WRONG: rung" in line for line in gpu.lines(row))


def test_a_graph_that_writes_elsewhere_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose kernels have the addresses of the capture's first tensors."""
    as_rung(monkeypatch, lambda x: 1 + x)
    monkeypatch.setattr(gpu_ways, "_again", lambda calls, kept: None)
    row = gpu.measured(case(), EAGER, True)
    assert row["wrong"]["rung"].startswith("captured: result 0 is off by inf")


def test_gradients_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Case("norm", NAMED["layer_norm_backward_16384x4096"].build, how="backward")
    as_rung(monkeypatch, lambda x, w, b: torch.nn.functional.layer_norm(
        x, w.shape, w.detach() + 0 * w, b))
    assert gpu.measured(made, EAGER, True)["wrong"].keys() == {"rung"}


@pytest.mark.parametrize(("bars", "below"), [
    ({"inductor": 1.5}, False), ({"inductor": 2.5}, True), ({"best": 1.5}, True),
    ({"best": 0.7, "copy": 0.5}, False), ({"copy": 0.7}, True), ({"eager": 2.9}, False)])
def test_bars(bars: dict[str, float], below: bool) -> None:
    row: gpu.Row = {"ratio": {"eager": 3.0, "inductor": 2.0, "reduce-overhead": 0.75},
                    "share_of_copy": 0.6}
    row["bars"] = list(gpu.bars(case(bars=bars), row))
    assert len(row["bars"]) == len(bars) and gpu.is_below(row) == below


def test_a_group_has_a_mean() -> None:
    rows: list[gpu.Row] = [{"name": name, "ratio": {"inductor": x}}
                           for name, x in (("colsum", 0.5), ("cumsum", 1.0), ("floor+1", 8.0))]
    found, = gpu.means([*rows, {"name": "transpose+1", "error": "no"}])
    assert found["name"] == "mean of moves" and not gpu.is_below(found)
    assert found["bars"][0]["is"] == pytest.approx(4 ** (1 / 3))
    rows[2]["ratio"]["inductor"] = 1.5
    assert gpu.is_below(next(gpu.means(rows)))


def test_all_bars_can_be_judged() -> None:
    """A bar is held against a contender of its case, or against what its figures give."""
    for one in CASES:
        known = {*one.peers, "copy", "best", "dynamo + 8 us"}
        assert one.bars.keys() <= known, one.name
        assert one.bars or one.group, one.name
    assert len(NAMED) == len(CASES)


def test_traffic_counts_parameters() -> None:
    module = torch.nn.Linear(3, 5)
    assert traffic((module, {"x": torch.zeros(7)}), [torch.zeros(2)]) == 4 * (20 + 7 + 2)


@pytest.mark.parametrize("name", ["llama_decode", "host_x+1", "llama_32_tokens"])
def test_tiny_rows_by_rung_itself(name: str) -> None:
    row = gpu.measured(NAMED[name], EAGER, True)
    assert not row.get("wrong") and row["seconds"]["rung"] > 0
    if "kernels" in row:
        assert row["kernels"] and row["graphs"] and not row["declined"]


def test_rows_go_on_after_one_whose_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = dict(gpu.asked("gpu_kernels", EAGER, ("colsum", "floor"), True))
    monkeypatch.setattr(gpu, "LIMIT", 0.01)
    with pytest.raises(gpu.RowError, match="it took more than"):
        rows["colsum"]()
    monkeypatch.setattr(gpu, "LIMIT", 200)
    assert rows["floor+1"]()["ratio"].keys() == {"eager"}


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    args = ["bench", "gpu_kernels", "--quick", "--rows", "colsum", "--against", "eager", "--json",
            str(path)]
    assert main(args) == 0
    assert "colsum" in capsys.readouterr().out
    (row,) = json.loads(path.read_text())["results"]
    assert row["name"] == "colsum" and row["share_of_copy"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_only_tiny_rows_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu_models"]) == 1
    assert "there is no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_labels_of_a_step_are_of_classes_that_the_model_has(name: str) -> None:
    """Eager's loss ends the process on a GPU where they are not."""
    with torch.device("meta"):
        model, given, labels = NAMED[f"{name}_step"].build(False, "meta")[1]
    *_, last = (m for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert last.out_features >= models.VOCABULARY and len(labels) == 32 and given
