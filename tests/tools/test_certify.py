"""`rung certify`: which calls are tried, and what the report says of right and wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from planted import plant

from rung.tools import certify
from rung.tools.given import UsageError

BUILD = '''\
import torch
from torch import nn

def build(batch=4):
    return (lambda x, y: (torch.floor(x) + y, y.sum(0))), (torch.randn(batch, 5),
                                                          torch.randn(batch, 5))

def model(batch=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.GELU()), (torch.randn(batch, 5),)

def reaches(batch=4):
    return (lambda x: x[1] + 1), (torch.randn(batch),)
'''


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(BUILD)
    return str(tmp_path / "mine.py")


def test_a_right_function(path: str) -> None:
    text, fine = certify.certify(f"{path}:build", ["batch=0..3"], "cpu.base")
    assert fine, text
    calls = 4 * (certify.SEEDS + 2)
    assert text.startswith(f"{path}:build: {calls} calls, 0 wrong\n")
    assert "recompiles: " in text and "size mismatch" in text
    assert "a warm call at batch=3: rung " in text and "KiB" in text
    assert text.endswith("certified\n")


def test_gradients_of_a_model(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, fine = certify.certify(f"{path}:model", ["batch=0..3"], "cpu.base", train=True)
    assert fine, text
    plant(monkeypatch, "loop.simplify")
    text, fine = certify.certify(f"{path}:model", ["batch=3..3"], "cpu.base", train=True)
    assert not fine and "batch=3, as given, seed 0: result " in text


def test_errors_are_eagers(path: str) -> None:
    text, fine = certify.certify(f"{path}:reaches", ["batch=0..2"], "cpu.base")
    assert fine, text


def test_a_wrong_function_names_sizes_and_strides(path: str,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "loop.simplify")
    text, fine = certify.certify(f"{path}:build", ["batch=2..3"], "cpu.base")
    assert not fine
    assert "  batch=3, as given, seed 0: result 0 is " in text
    assert "  batch=2, strided, seed 0: result 0 is " in text
    assert text.endswith("not certified\n")


def test_sizes_are_ends_and_tails() -> None:
    found = list(certify._sizes({"batch": (0, 64), "seq": (3, 20)}))
    assert found[:2] == [{"batch": 64, "seq": 20}, {"batch": 0, "seq": 3}]
    assert {"batch": 0, "seq": 12} in found and {"batch": 32, "seq": 17} in found
    assert all(0 <= s["batch"] <= 64 and 3 <= s["seq"] <= 20 for s in found)
    assert certify._interesting(5, 5) == [5]


def test_variants() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    (_, given), (_, strided), (_, aliased) = certify._variants((x, y, 2))
    assert given == (x, y, 2)
    assert torch.equal(strided[0], x) and strided[0].stride() == (8, 2) and strided[2] == 2
    assert aliased[0] is aliased[1] is x


@pytest.mark.parametrize("text", ["batch", "batch=3", "batch=5..2", "3=0..4", "batch=-1..4"])
def test_ranges(text: str) -> None:
    with pytest.raises(UsageError, match="a range is like"):
        certify._range(text)
