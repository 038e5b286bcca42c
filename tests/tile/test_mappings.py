"""Random mappings: all that are legal give the answer of the Loop IR, on every machine.

A mapping may not change what a kernel means, so any draw is a test. What is drawn is printed on
failure, and can be pasted as text.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from mapped import SIZES, SYMBOLIC, Anyhow, Late, arguments, difference, kernel, legal

from rung.core.machine import Machine
from rung.core.op import Func
from rung.core.verify import verify
from rung.kernel.barriers import check_barriers, insert_barriers
from rung.kernel.ir import VOCABULARY, verify_kernel_ir
from rung.kernel.moves import Engine
from rung.loop import ir as loop
from rung.targets.base import buffers_of
from rung.targets.cpu.machine import AVX512, host
from rung.targets.cpu.target import target
from rung.targets.cuda.machine import SM90
from rung.targets.device import device
from rung.targets.toy.device import ToyEngine
from rung.targets.toy.machine import TOY
from rung.tile import mapping as tile
from rung.tile.to_kernel import to_kernel

KNOWN = {"s0": 13, "s1": 21, "s2": 18}
HOST = host()


def run(func: Func, mapping: tile.Mapping, machine: Machine, turns: type[Engine] = Engine
        ) -> float:
    mapped = func.with_attr("mapping", mapping)
    lowered = to_kernel(mapped, machine)
    if machine is SM90:
        lowered = insert_barriers(lowered, ("shared",))
        check_barriers(lowered, ("shared",))
    verify(lowered, VOCABULARY, verify_kernel_ir)
    if machine is TOY:
        turns = type("Turns", (turns, ToyEngine), {}) if turns is not Engine else ToyEngine
    return difference(mapped, machine, KNOWN, turns, lowered)


CASES = [(name, sizes) for table in (SIZES, SYMBOLIC) for name, sizes in table.items()]
IDS = [f"{name}-{'symbolic' if sizes is SYMBOLIC.get(name) else 'fixed'}" for name, sizes in CASES]


RARE = {("tally", "toy"), ("scatter", "toy"), ("apart", "toy"), ("online", "toy"),
        ("online", "cpu.avx512")}
"""The toy cannot scatter, and hardly a draw has places there for all buffers of `apart`, or fits
both chains of `online` at symbolic sizes."""


@pytest.mark.parametrize("machine", [AVX512, TOY, SM90], ids=lambda m: m.name)
@pytest.mark.parametrize(("name", "sizes"), CASES, ids=IDS)
def test_legal_mappings_do_not_change_the_answer(name: str, sizes: dict[str, int | str],
                                                 machine: Machine) -> None:
    func = kernel(name, **sizes)
    seed = f"{name} {machine.name} {sorted(sizes)}"
    found = legal(random.Random(seed), func, machine, 4)
    assert found or (name, machine.name) in RARE
    for mapping in found:
        assert run(func, mapping, machine) < 1e-4, mapping


@pytest.mark.parametrize("machine", [TOY, SM90], ids=lambda m: m.name)
@pytest.mark.parametrize(("name", "sizes"), CASES, ids=IDS)
def test_roles_do_not_either_whoever_goes_first(name: str, sizes: dict[str, int | str],
                                                machine: Machine) -> None:
    func = kernel(name, **sizes)
    found = legal(random.Random(f"{name} roles"), func, machine, 3, roles=True)
    for mapping in found:
        for turns in (Engine, Late, Anyhow):
            assert run(func, mapping, machine, turns) < 1e-4, mapping


@pytest.mark.parametrize("name", list(SIZES))
def test_compiled_mappings_give_the_answer_too(name: str) -> None:
    func = kernel(name, **SIZES[name])
    drawn = legal(random.Random(f"compiled {name}"), func, HOST, 4)
    kernels = [replace(to_kernel(func.with_attr("mapping", m), HOST), name=f"{name}{n}")
               for n, m in enumerate(drawn)]
    cpu = target(HOST.name)
    launches = device(cpu).load(kernels, cpu.emit(kernels))
    for lowered, mapping in zip(kernels, drawn, strict=True):
        want, got = arguments(func, {}), arguments(func, {})
        loop.run_kernel(func, want)
        launches[lowered.name](*(got[v.name].ctypes.data for v in buffers_of(lowered)))
        for out in (v.name for v in (*func.params, *func.outs)):
            assert np.allclose(want[out], got[out], atol=1e-4), mapping
