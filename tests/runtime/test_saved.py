"""Compiled programs on disk: found by structure, used without lowering, never when damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rung.compilation import Compilation, History
from rung.core import store
from rung.core.config import Settings
from rung.core.op import Func
from rung.frontends.torch import compat
from rung.runtime import saved


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, settings: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(compat, "is_traced", lambda: False)  # pytest listens, and wants the passes
    settings(cache_dir=tmp_path / "cache", fresh=False)
    return tmp_path / "cache" / "programs"


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the programs that were lowered."""
    found, real = list[str](), Compilation.lower

    def record(self: Compilation, program: Func) -> History:
        found.append(program.name)
        return real(self, program)
    monkeypatch.setattr(Compilation, "lower", record)
    return found


def rung(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, backend="rung", options={"strict": True, **options})


def mixed(x: torch.Tensor, w: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.softmax(x @ w, -1)[at], torch.sort(x + 1)[0] @ w, x * torch.tensor([2.0])


def arguments(n: int = 6) -> tuple[torch.Tensor, ...]:
    return torch.randn(n, 8), torch.randn(8, 8), torch.tensor([1, n - 1])


def check(fn: Callable[..., Any], *args: torch.Tensor, **options: Any) -> None:
    for a, b in zip(rung(fn, **options)(*args), fn(*args), strict=True):
        torch.testing.assert_close(a, b)


def test_an_equal_program_is_not_lowered_again(lowered: list[str], cache: Path) -> None:
    def renamed(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.softmax(a @ b, -1)[c], torch.sort(a + 1)[0] @ b, a * torch.tensor([2.0])

    check(mixed, *arguments())
    check(mixed, *arguments())
    check(renamed, *arguments())
    assert len(lowered) == 1 and len(list(cache.glob("*.json"))) == 1


def test_errors_name_the_line_of_the_program_at_hand(lowered: list[str]) -> None:
    for fn in (mixed, lambda x, w, at: mixed(x, w, at)):
        x, w, _ = arguments()
        with pytest.raises(IndexError, match="index 6 is out of bounds for dimension 0 with size 6"
                           ) as caught:
            rung(fn)(x, w, torch.tensor([0, 6]))
        assert "return torch.softmax" in "".join(caught.value.__notes__)
    assert len(lowered) == 1


def test_constants_are_those_of_the_call() -> None:
    for scale in (2.0, 3.0):
        table = torch.full((8,), scale)
        check(lambda x, table=table, scale=scale: (x * table, x + scale), torch.randn(4, 8))


@pytest.mark.parametrize("change", [
    lambda: check(mixed, *arguments(7)), lambda: check(mixed, *arguments(), precision="eager"),
    lambda: check(mixed, *arguments(), target="cpu.base"),
    lambda: check(lambda x, w, at: mixed(x, w, at)[:2], *arguments())])
def test_what_is_in_the_key(change: Callable[[], None], lowered: list[str]) -> None:
    check(mixed, *arguments())
    change()
    assert len(lowered) == 2


@pytest.mark.parametrize("what", ["torch", "threads", "rung"])
def test_versions_and_machine_are_in_the_key(what: str, lowered: list[str],
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    check(mixed, *arguments())
    if what == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    elif what == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9")
    else:
        monkeypatch.setattr(saved, "own_version", lambda: "another")
    check(mixed, *arguments())
    assert len(lowered) == 2


def damaged(cache: Path, how: str) -> None:
    (program,) = cache.glob("*.json")
    library = cache.parent / "cpu" / json.loads(program.read_text())["library"]
    path = library if how.startswith("library") else program
    content = path.read_bytes()
    path.unlink()  # this process has the old file loaded
    match how.split()[1]:
        case "cut":
            path.write_bytes(content[:100])
        case "swapped":
            other = store.write(path.parent.name, f"other{path.suffix}", b"{}").path
            for a, b in ((other, path), (store.note_of(other), store.note_of(path))):
                b.write_bytes(a.read_bytes())
        case _:
            assert how.endswith("gone")


@pytest.mark.parametrize("how", [f"{what} {how}" for what in ("library", "program")
                                 for how in ("cut", "gone", "swapped")])
def test_a_damaged_entry_is_made_anew(how: str, lowered: list[str], cache: Path) -> None:
    check(mixed, *arguments())
    damaged(cache, how)
    check(mixed, *arguments())
    assert len(lowered) == 2
    check(mixed, *arguments())
    assert len(lowered) == 2


def test_fresh_looks_at_nothing(lowered: list[str], settings: Callable[..., None]) -> None:
    settings(cache_dir=Settings.from_environment().cache_dir, fresh=True)
    check(mixed, *arguments())
    check(mixed, *arguments())
    assert len(lowered) == 2
