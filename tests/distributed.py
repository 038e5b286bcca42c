"""Training on two processes, with and without Rung: `python distributed.py FOLDER NAME`.

Each process runs the named one of `WAYS`, first in eager and then compiled, and writes what
differed to `FOLDER/RANK`.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import dropout, mse_loss, relu
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

WIDTH = 16
BATCHES = (6, 6, 4)
Compile = Callable[[Any], Any]
Way = Callable[[Compile, int], list[torch.Tensor]]


class Block(nn.Module):
    """A residual block with a running average, that a share of the rows skips."""

    def __init__(self, skipped: float) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.skipped = skipped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = dropout(torch.ones_like(x[:, :1]), self.skipped, self.training)
        return x + kept * relu(self.linear(self.norm(x)))


class Net(nn.Module):
    """Blocks, of which the last may go without use, and which may be no graphs of Rung's."""

    def __init__(self, used: int = 2, declined: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(0.2 * n) for n in range(2))
        self.head, self.used, self.declined = nn.Linear(WIDTH, 4), used, declined

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:self.used]:
            x = block(x)
            if self.declined:
                shared = torch.zeros(3).expand(2, 3)
                shared.fill_(1)  # which AOTAutograd takes for a sum
                x = x * shared[0, 0]
        return self.head(x)


def data(rank: int, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(10 * step + rank)
    return torch.randn(size, WIDTH), torch.randn(size, 4)


def state(net: nn.Module) -> list[torch.Tensor]:
    """The parameters, their gradients and the buffers; whole, where processes have parts."""
    found = [*net.parameters(), *(p.grad for p in net.parameters() if p.grad is not None),
             *net.buffers()]
    return [getattr(t, "full_tensor", t.clone)().detach() for t in found]


def data_parallel(used: int = 2, declined: bool = False, megabytes: float = 0.001,
                  accumulate: bool = False, evaluate: bool = False, **how: Any) -> Way:
    def train(compiled: Compile, rank: int) -> list[torch.Tensor]:
        net = DistributedDataParallel(Net(used, declined), bucket_cap_mb=megabytes, **how)
        run, found = compiled(net), []
        steps = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
        for step, size in enumerate(BATCHES):
            if evaluate:
                net.eval()
                with torch.no_grad():
                    found.append(run(data(rank, step, size)[0]))
                net.train()
            if accumulate:
                with net.no_sync():
                    x, y = data(rank, step + 5, size)
                    mse_loss(run(x), y).backward()
            x, y = data(rank, step, size)
            found.append(mse_loss(run(x), y))
            found[-1].backward()
            found += state(net)
            steps.step()
            steps.zero_grad()
        return [*found, *state(net)]
    return train


def sharded(whole: bool, half: bool = False) -> Way:
    def train(compiled: Compile, rank: int) -> list[torch.Tensor]:
        net = nn.Sequential(*(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
                              for _ in range(2)), nn.Linear(WIDTH, 4))
        mesh = init_device_mesh("cpu", (2,))
        policy = MixedPrecisionPolicy(torch.bfloat16 if half else None, torch.float32)
        for block in net:
            if not whole:
                block.forward = compiled(block.forward)
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(net, mesh=mesh)
        run = compiled(net) if whole else net
        steps = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
        for step, size in enumerate(BATCHES):
            x, y = data(rank, step, size)
            mse_loss(run(x.bfloat16() if half else x).float(), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            steps.step()
            steps.zero_grad(set_to_none=step + 1 < len(BATCHES))
        return state(net)
    return train


def tensor_parallel(compiled: Compile, rank: int) -> list[torch.Tensor]:
    net = nn.Sequential(nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, 4))
    parallelize_module(net, init_device_mesh("cpu", (2,)),
                       {"0": ColwiseParallel(), "2": RowwiseParallel()})
    run, found = compiled(net), []
    for step, size in enumerate(BATCHES):
        x, y = data(0, step, size)  # which all processes have whole
        found.append(run(x))
        mse_loss(found[-1], y).backward()
    return [*found, *state(net)]


WAYS: dict[str, Way] = {
    "one bucket": data_parallel(megabytes=25),
    "several buckets": data_parallel(),
    "static graph": data_parallel(static_graph=True),
    "unused parameters": data_parallel(used=1, find_unused_parameters=True),
    "gradients in buckets": data_parallel(gradient_as_bucket_view=True),
    "accumulation": data_parallel(accumulate=True),
    "evaluation": data_parallel(evaluate=True),
    "declined graphs": data_parallel(declined=True),
    "sharded by block": sharded(whole=False),
    "sharded": sharded(whole=True),
    "sharded in halves": sharded(whole=False, half=True),
    "tensor parallel": tensor_parallel}


def differences(name: str, rank: int) -> str:
    """What a way of training computes otherwise when it is compiled; "" if nothing."""
    torch._dynamo.reset()
    found = []
    for compiled in (lambda f: f, lambda f: torch.compile(f, backend="rung")):
        torch.manual_seed(0)
        found.append(WAYS[name](compiled, rank))
    close = dict(rtol=2e-2, atol=2e-3) if "halves" in name else dict(rtol=1e-4, atol=1e-5)
    try:
        assert_close(found[1], found[0], **close)
    except AssertionError as error:
        return str(error)
    return ""


def process(rank: int, folder: Path, name: str) -> None:
    torch.set_num_threads(1)
    dist._DEFAULT_FIRST_BUCKET_BYTES = 512
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2,
                            timeout=timedelta(seconds=100))
    try:
        found = differences(name, rank)
    except Exception:
        found = traceback.format_exc()
    (folder / str(rank)).write_text(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    first = os.fork()
    process(0 if first else 1, Path(sys.argv[1]), sys.argv[2])
    if first:
        os.waitpid(first, 0)
