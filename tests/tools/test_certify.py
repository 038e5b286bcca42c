"""`rung certify`: which calls are tried, and what the report says of right and wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from planted import plant

from rung.core.errors import RungError
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

class Counts(nn.Module):
    """Its results depend on its state, and it refuses batches of 1 as eager does."""
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x):
        self.calls += 1
        return self.norm(x) * self.calls

def counts(batch=4):
    return Counts(), (torch.randn(batch, 5),)

def jumps(batch=4):
    """Sums in another order are as good: the first is above 0 in some of them."""
    x = torch.linspace(0.1, 3, 99)
    limit = x.sum()
    return (lambda x, limit: (x.sum() + (1e-5 if torch.compiler.is_compiling() else 0) > limit)
            .float() * x), (x, limit)

class Forgets(Counts):
    def forward(self, x):
        if not torch.compiler.is_compiling():
            self.calls += 1
        return x + 1

def forgets(batch=4):
    return Forgets(), (torch.randn(batch, 5),)

def untouched(batch=4):
    return (lambda n: n + 1), (batch,)

def reaches(batch=4):
    return (lambda x: x[1] + 1), (torch.randn(batch),)
'''


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(BUILD)
    return str(tmp_path / "mine.py")


def test_a_right_function(path: str) -> None:
    text, fine, _ = certify.certify(f"{path}:build", ["batch=0..3"], "cpu.base")
    assert fine, text
    calls = 4 * (certify.SEEDS + 2)
    assert text.startswith(f"{path}:build: {calls} calls, 0 wrong\n")
    assert "recompiles: " in text and "size mismatch" in text
    assert "a warm call at batch=3: rung " in text and "KiB" in text
    assert text.endswith("certified\n")


def test_gradients_of_a_model(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, fine, _ = certify.certify(f"{path}:model", ["batch=0..3"], "cpu.base", train=True)
    assert fine, text
    plant(monkeypatch, "loop.simplify")
    text, fine, _ = certify.certify(f"{path}:model", ["batch=3..3"], "cpu.base", train=True)
    assert not fine and "batch=3, as given, seed 0: result " in text


def test_errors_are_eagers(path: str) -> None:
    text, fine, _ = certify.certify(f"{path}:reaches", ["batch=0..2"], "cpu.base")
    assert fine, text


def test_state_of_a_module_is_compared_and_its_own(path: str) -> None:
    text, fine, _ = certify.certify(f"{path}:counts", ["batch=1..3"], "cpu.base")
    assert fine, text
    text, fine, _ = certify.certify(f"{path}:forgets", ["batch=2..2"], "cpu.base")
    assert not fine and "result 2 is 1 off" in text


def test_what_jumps_within_a_rounding_is_right(path: str) -> None:
    text, fine, _ = certify.certify(f"{path}:jumps", ["batch=2..2"], "cpu.base")
    assert fine, text


def test_what_rung_does_not_compile_is_told(path: str) -> None:
    text, *_ = certify.certify(f"{path}:untouched", ["batch=2..2"], "cpu.base")
    assert "nothing was compiled: Dynamo leaves this to eager" in text
    with pytest.raises(RungError, match="no target is called 'other'"):
        certify.certify(f"{path}:build", [], "other")
    with pytest.raises(UsageError, match="one range for each name"):
        certify.certify(f"{path}:build", ["batch=0..1", "batch=3..4"])


def test_a_wrong_function_names_sizes_and_strides(path: str,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "loop.simplify")
    text, fine, _ = certify.certify(f"{path}:build", ["batch=2..3"], "cpu.base")
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
