"""Stretches of CUDA: their C and their Python launch the same, which needs no GPU to see."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_int, c_long, c_uint, c_void_p
from typing import Any

import pytest
import torch

from rung.compilation import Compilation, generated
from rung.frontends.torch.externs import TORCH
from rung.runtime.host import host_code
from rung.targets.base import target
from rung.targets.cpu.build import build_plain
from rung.targets.cuda.stretch import PENDING, KernelLaunch, Stretches
from rung.targets.device import Launched, Stretch
from rung.tools.capture import capture
from rung.tools.given import Given

Launch = tuple[int, int, int, int, tuple[int, ...]]
"""Kernel, blocks, threads, dynamic shared memory, addresses and numbers."""


def embed(x: torch.Tensor, w: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
    found = torch.nn.functional.embedding(at, w)
    return torch.softmax(x + found, -1), (x + 1).sum(0), x.cumsum(0)


def arguments(rows: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(rows, 96), torch.randn(50, 96), torch.zeros(rows, dtype=torch.long)


@pytest.fixture(scope="module", params=[False, True], ids=["static", "dynamic"])
def text(request: pytest.FixtureRequest) -> Stretches:
    x, w, at = arguments(20)
    for tensor in (x, at) if request.param else ():
        torch._dynamo.mark_dynamic(tensor, 0)
    (graph,) = capture(Given("embed", embed, (x, w, at))).graphs
    assert graph.imported is not None
    module = Compilation(target("cuda"), TORCH, hints=graph.hints).lower(
        graph.imported.func).reached()
    return Stretches(generated(module), host_code(module, TORCH)[1], 0)


def by_c(text: Stretches, stretch: Stretch, addresses: list[int], sizes: list[int],
         failing: int = -1, pending: int = 0, base: int = 7
         ) -> tuple[list[Launch], tuple[int, int, int]]:
    """What the C of a stretch launches, with a driver that only writes it down, and its error
    word; the kernel `failing` does not start."""
    library, launches = ctypes.CDLL(str(build_plain(text.c()))), list[Launch]()
    count = len(text.names())

    def start(kernel: int, blocks: int, _y: int, _z: int, threads: int, _ty: int, _tz: int,
              dynamic: int, stream: int, args: Any, _: Any) -> int:
        assert stream == 99
        launches.append((kernel - 1000, blocks, threads, dynamic, tuple(
            c_long.from_address(args[n]).value for n in range(arity[kernel - 1000]))))
        return 5 if kernel - 1000 == failing else 0

    arity = {n: len(x.places) + len(x.numbers) for x in starts(text, stretch)
             for n in (x.kernel, x.kernel + bool(x.needs))}
    kinds = CFUNCTYPE(c_int, c_void_p, *[c_uint] * 7, c_void_p, ctypes.POINTER(c_void_p), c_void_p)
    current = CFUNCTYPE(c_int, ctypes.POINTER(c_int))(lambda at: at.__setitem__(0, 0) or 0)
    kept, word = kinds(start), c_long(pending)
    words: Any = [*range(1000, 1000 + count), ctypes.cast(current, c_void_p).value,
                  ctypes.addressof(word), ctypes.cast(kept, c_void_p).value]
    library.bound.restype = c_void_p
    (c_void_p * len(words)).from_address(library.bound())[:] = words
    assert library.here()
    found, run = (c_long * 2)(99, base), library[stretch.name]
    run.restype = c_long
    site = run((c_void_p * len(addresses))(*addresses), (c_long * len(sizes))(*sizes), found)
    return launches, (site, found[0], found[1])


def starts(text: Stretches, stretch: Stretch) -> list[KernelLaunch]:
    return [text.start(x) if isinstance(x, Launched) else text.check(stretch, x, 1)
            for x in stretch.steps]


def by_python(text: Stretches, stretch: Stretch, addresses: list[int], sizes: list[int]
              ) -> list[Launch]:
    launches, names = list[Launch](), dict[str, Callable[..., None]]()
    exec(text.python()[stretch.name], names)

    def launch(kernel: int, blocks: int, threads: int, dynamic: int, buffers: list[int],
               numbers: list[int]) -> None:
        launches.append((kernel, blocks, threads, dynamic, (*buffers, *numbers)))
    names[stretch.name](addresses, sizes, 7, launch)
    return [x for x in launches if x[1] > 0]


def addresses(skew: int = 0) -> list[int]:
    return [(n + 1) * 4096 + skew for n in range(10)]


@pytest.mark.parametrize("skew", [0, 4])
def test_c_and_python_launch_the_same(text: Stretches, skew: int) -> None:
    wide = {x.kernel for s in text.given for x in starts(text, s) if x.needs.aligned}
    seen = set[int]()
    for stretch in text.given:
        for rows in (20, 1, 33) if stretch.sizes else (20,):
            sizes = [rows] * len(stretch.sizes)
            launches, word = by_c(text, stretch, addresses(skew), sizes)
            assert launches == by_python(text, stretch, addresses(skew), sizes)
            assert word[0] == 0 and len(launches) == len(stretch.steps)
            seen |= {x[0] for x in launches}
    assert wide and wide.isdisjoint(seen) if skew else wide <= seen


def test_a_failed_launch_ends_the_stretch_and_says_which(text: Stretches) -> None:
    stretch = max(text.given, key=lambda s: len(s.steps))
    sizes = [20] * len(stretch.sizes)
    whole, _ = by_c(text, stretch, addresses(), sizes)
    bad = whole[1][0]
    launches, word = by_c(text, stretch, addresses(), sizes, failing=bad)
    assert launches == whole[:2] and word == (-2, bad, 5)


def test_nothing_is_launched_while_a_fault_is_pending(text: Stretches) -> None:
    for stretch in text.given:
        launches, word = by_c(text, stretch, addresses(), [20] * len(stretch.sizes), pending=3)
        assert launches == [] and word[0] == PENDING


def test_a_check_is_told_its_own_number(text: Stretches) -> None:
    ((stretch, check),) = ((s, x) for s in text.given for x in starts(text, s)
                           if x.numbers and x.numbers[-1].startswith("base"))
    launches, _ = by_c(text, stretch, addresses(), [20] * len(stretch.sizes), base=40)
    (one,) = (x for x in launches if x[0] == check.kernel)
    assert one[-1][-1] == 41
    assert "report(site, v, 50)" in text.check_kernels()
