"""Kernels touch nothing outside of their buffers: canaries around every tensor and workspace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from functions import CASES

from rung.compilation import Compilation
from rung.core.types import IndexType
from rung.frontends.torch.externs import TORCH
from rung.program.ir import Module
from rung.targets.cpu import glue
from rung.targets.cpu.device import Cpu
from rung.tools.check import draw

MARGIN, CANARY = 4096, 0xA5


class Fence:
    """Hands out memory between canaries."""

    def __init__(self) -> None:
        self.fenced: list[tuple[torch.Tensor, int]] = []

    def memory(self, count: int) -> torch.Tensor:
        whole = torch.full((count + 2 * MARGIN,), CANARY, dtype=torch.uint8)
        self.fenced.append((whole, count))
        return whole[MARGIN:MARGIN + count]

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
              ) -> torch.Tensor:
        count = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        return self.memory(count * dtype.itemsize).view(dtype).as_strided(size, stride)

    def take(self, count: int) -> Any:
        return type("Workspace", (), {"address": self.memory(count).data_ptr()})

    def check(self) -> None:
        for whole, count in self.fenced:
            assert (whole[:MARGIN] == CANARY).all() and (whole[MARGIN + count:] == CANARY).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_written_outside(name: str, dtype: torch.dtype,
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    fence, made, lowered = Fence(), list[Any](), list[Module]()
    monkeypatch.setattr(glue, "glue", lambda: None)  # so that the host's own code runs
    monkeypatch.setitem(TORCH.tensors.functions, "empty", fence.empty)
    monkeypatch.setattr(Cpu, "workspaces", lambda *_: (fence.take, lambda _: None))
    real = Compilation.executable

    def record(self: Compilation, module: Module, *rest: Any) -> Any:
        lowered.append(module)
        made.append(real(self, module, *rest))
        return made[-1]
    monkeypatch.setattr(Compilation, "executable", record)
    case = CASES[name]
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(case.fn, backend="rung", dynamic=False, options={"strict": True})(
            *case.args(13, dtype))
    (run,) = made
    (module,) = lowered
    run(_inputs(module.main, fence))
    fence.check()


def _inputs(program: Any, fence: Fence) -> list[Any]:
    inputs: list[Any] = []
    for param, array in zip(program.params, draw(program) or (), strict=True):
        if isinstance(param.type, IndexType):
            inputs.append(int(array))
            continue
        x = torch.from_numpy(array)
        x = x.to(torch.bfloat16) if param.type.dtype.name == "bf16" else x
        inputs.append(fence.empty(x.shape, x.stride(), x.dtype).copy_(x))
    return inputs
