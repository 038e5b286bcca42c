"""The demo on tiny sizes, its checks on wrong results, and the models it is made of."""

from __future__ import annotations

import pytest
import torch

from rung.tools import demo, measure, models
from rung.tools.demo import Demo, Request, Run

TINY = Request(inductor=False, sizes=models.TINY, tokens=4, others=True)


def test_the_demo_passes(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert demo.main(["--quick", "--no-inductor", "--tokens", "3"]) == 0
    out = capsys.readouterr().out
    assert "the same tokens as eager: ok" in out
    assert 'the same tokens with precision="eager": ok' in out
    assert "kernels: " in out and "rung show" in out


def run(tokens: list[int], *logits: list[float]) -> Run:
    return Run(tokens, [torch.tensor(x) for x in logits])


def test_another_token_is_a_failure() -> None:
    assert demo.differing(run([1, 2]), run([1, 3])) == ["token 1 is 3, eager's is 2"]


@pytest.mark.parametrize(("chosen", "fails"), [(1, False), (2, True)])
def test_a_token_may_be_as_wrong_as_eager(chosen: int, fails: bool) -> None:
    exact = torch.tensor([1.0, 0.9, 0.5], dtype=torch.float64)
    eager = run([0], [1.2, 0.9, 0.5])  # an error of 0.2
    assert bool(list(demo._gap(0, exact, eager, run([chosen])))) == fails


def test_a_failed_check_is_the_exit_code(monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Demo, "llama", lambda self, _: self.check("tokens", ["wrong"]))
    monkeypatch.setattr(Demo, "once", lambda self, *_: None)
    assert Demo(TINY).run() == 1
    assert "demo: failed: tokens: wrong" in capsys.readouterr().err


def test_resnet_50_has_its_size() -> None:
    count = sum(p.numel() for p in models.resnet().parameters())
    assert count == 25_557_032  # torchvision's, and the paper's 25.6M


def test_rounds_alternate() -> None:
    order: list[str] = []
    times = measure.alternate({"a": lambda: order.append("a"), "b": lambda: order.append("b")},
                              rounds=3, sample=0.0)
    assert order[-6:] == ["a", "b"] * 3
    assert all(len(t) == 3 for t in times.values())


def test_the_peak_is_plausible() -> None:
    from rung.targets.base import target

    loop, operations = measure.fma_loop(target("cpu"))
    rate = operations / min(measure.alternate({"peak": loop}, 3, 0.002)["peak"])
    assert 1e9 < rate < 2e12
