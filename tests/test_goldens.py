"""The dumps of some functions on every rung, with their nests, and of `relu_mm` under roles.

`pytest --update` writes them.

A refactor changes none of these files: the goldens of `source` are the replay of every kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels import lower

from rung.compilation import History
from rung.targets.base import target
from rung.tile.mapping import parse_mapping
from rung.tools import benchmarks
from rung.tools.capture import capture
from rung.tools.given import Given
from rung.tools.show import nest_text

FOLDER = Path(__file__).parent / "goldens"
COMMON, BELOW = ("program", "tensor", "loop"), ("tile", "kernel", "source")


def relu_mm() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """As in the design: rows that 14 divides."""
    return (lambda x, bias, w: torch.relu((x + bias) @ w),
            (torch.randn(504, 512), torch.randn(512), torch.randn(512, 512)))


FUNCTIONS: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "relu_mm": relu_mm,
    "softmax": lambda: (lambda x: torch.softmax(x, -1), (torch.randn(512, 2048),)),
    "colsum": lambda: (lambda x: x.sum(0), (torch.randn(4096, 4096),)),
    "floor_add": lambda: (lambda x: torch.floor(x) + 1, (torch.randn(1024, 1024),)),
    "cumsum": lambda: (lambda x: torch.cumsum(x, 0), (torch.randn(256, 1024),)),
    "cache_step": lambda: benchmarks.cache_step(quick=False)}
TARGETS = ("cpu.avx512", "toy", "cuda.sm90")
ROLES = {"toy": """map mm_relu on toy
  i: seq *, atom 16
  j: seq *, lane 16
  k: pipe *, atom 32
  place x0, x1 in scratchpad at k.pipe ring 2 by dma
  place y in scratchpad at j.seq ring 2 by dma
  use mm with mac16
  roles load x1, math x1, store x1
""", "cuda.sm90": """map mm_relu on cuda.sm90
  i: grid *, thread 16, reg 2
  j: grid *, thread 16, reg 2
  k: pipe *, unroll 32
  place x0, x1 in shared at k.pipe pad 1 ring 3 by cp.async
  use mm with ffma
  roles load x1 regs 40, math x2 regs 232
"""}


@cache
def stages(name: str, where: str, mapping: str = "") -> History:
    """All rungs of a function, as on a machine with two cores, or on a GPU without a library of
    matmuls, under a mapping that is given."""
    fn, args = FUNCTIONS[name]()
    with torch.no_grad():
        (graph,) = capture(Given(name, fn, args)).graphs
    assert graph.imported is not None
    found: Any = target(where)
    if where.startswith("cpu"):
        found = replace(found, machine=replace(found.machine, cores=2))
    if where.startswith("cuda"):
        found = replace(found, libraries=())
    given = parse_mapping(mapping) if mapping else None
    return lower(graph.imported.func, found,
                                 mappings={given.kernel: given} if given else None)


@pytest.mark.parametrize("rung", COMMON)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_dump_for_all_machines(name: str, rung: str, golden: Callable[[Path, str], None]) -> None:
    golden(FOLDER / f"{name}.{rung}.ir", stages(name, "cpu.avx512").text(rung))


@pytest.mark.parametrize("where", TARGETS)
@pytest.mark.parametrize("rung", BELOW)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_dump_for_one_machine(name: str, rung: str, where: str,
                              golden: Callable[[Path, str], None]) -> None:
    golden(FOLDER / f"{name}.{where}.{rung}.ir", stages(name, where).text(rung))


@pytest.mark.parametrize("where", TARGETS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nest(name: str, where: str, golden: Callable[[Path, str], None]) -> None:
    golden(FOLDER / f"{name}.{where}.nest.txt", nests(stages(name, where)))


@pytest.mark.parametrize("where", list(ROLES))
def test_nest_of_roles(where: str, golden: Callable[[Path, str], None]) -> None:
    found = stages("relu_mm", where, ROLES[where])
    golden(FOLDER / f"relu_mm_roles.{where}.nest.txt", nests(found))


def nests(found: History) -> str:
    return "\n".join(nest_text(k, found.target) for k in found.at("tile").kernels)


@pytest.mark.parametrize("where", list(ROLES))
@pytest.mark.parametrize("rung", BELOW)
def test_dump_of_roles(rung: str, where: str, golden: Callable[[Path, str], None]) -> None:
    found = stages("relu_mm", where, ROLES[where])
    golden(FOLDER / f"relu_mm_roles.{where}.{rung}.ir", found.text(rung))
