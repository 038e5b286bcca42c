"""Profilers see kernels by name, with the user's line and module, and pay for it alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from rung.compilation import Compilation
from rung.frontends.torch import compat
from rung.targets.cpu.glue import glue

HERE = Path(__file__).name


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sort(self.act(x))[0]  # calls of torch stand between the kernels
        return torch.sort(F.softmax(x, -1))[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Mlp() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


def rung(fn: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, backend="rung", options={"strict": True})


def events(call: Callable[[], object]) -> list[str]:
    """The names of what a profiler records of a call, in order of time."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        call()
    return [e.name for e in sorted(found.events(), key=lambda e: e.time_range.start)]


def ours(call: Callable[[], object]) -> list[str]:
    return [name for name in events(call) if HERE in name]


def line_of(text: str) -> int:
    source = Path(__file__).read_text().splitlines()
    return next(n for n, line in enumerate(source, 1) if text in line)


EXPECTED = [f"{kernel} {HERE}:{line_of(text)} (stages.{n}{module})" for n in range(3)
            for kernel, text, module in (("gelu", "self.act(x))[0]", ".act"),
                                         ("softmax", "F.softmax(x, -1))", ""))]


def test_each_kernel_call_is_an_event_with_its_line_and_module() -> None:
    run, x = rung(Net()), torch.randn(5, 8)
    with torch.no_grad():
        right = run(x)
        assert ours(lambda: run(x)) == EXPECTED
        torch.testing.assert_close(run(x), right)


def test_gradients_are_events_of_the_lines_of_their_functions() -> None:
    run, x = rung(Mlp()), torch.randn(5, 8, requires_grad=True)
    run(x).sum().backward()
    line = line_of("self.act(x))[0]")
    assert f"gelu_backward {HERE}:{line} (act)" in ours(lambda: run(x).sum().backward())


def test_kernels_that_run_in_one_native_call_are_apart() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.softmax(x, 0), torch.cumsum(x.reshape(-1)[:7], 0)

    run, x = rung(fn), torch.randn(5, 8)
    torch.testing.assert_close(run(x), fn(x))
    assert sorted(name.split()[0] for name in ours(lambda: run(x))) == ["cumsum", "softmax"]


def test_a_program_from_the_cache_keeps_names_and_lines(
        tmp_path: Path, settings: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "is_traced", lambda: False)  # pytest listens, and wants the passes
    settings(cache_dir=tmp_path / "cache", fresh=False)
    x = torch.randn(5, 8)
    with torch.no_grad():
        rung(Net())(x)
        monkeypatch.setattr(Compilation, "lower", None)  # nothing is lowered from here on
        run = rung(Net())
        run(x)
        assert ours(lambda: run(x)) == EXPECTED


def test_a_check_raises_while_a_profiler_runs() -> None:
    def fn(x: Tensor, at: Tensor) -> Tensor:
        return torch.floor(x[at]) + 1

    run, x = rung(fn), torch.randn(8)
    at = torch.tensor([1, 3])
    torch.testing.assert_close(run(x, at), fn(x, at))
    with pytest.raises(IndexError, match="index 9 is out of bounds"):
        ours(lambda: run(x, torch.tensor([1, 9])))
    torch.testing.assert_close(run(x, at), fn(x, at))


def test_without_a_profiler_no_python_runs() -> None:
    run, x = rung(lambda x: torch.floor(x) + 1), torch.randn(8)
    run(x)

    def frames() -> list[str]:
        found: list[str] = []

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code.co_filename.startswith("<rung "):
                found.append(frame.f_code.co_name)
        sys.setprofile(note)
        try:
            run(x)
        finally:
            sys.setprofile(None)
        return found

    native = frames()
    with profile(activities=[ProfilerActivity.CPU]):
        assert frames() == ["run", "stretch_0"]
    assert frames() == native
    assert native == [] or glue() is None
