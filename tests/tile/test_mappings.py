"""Random mappings: all that are legal give the answer of the Loop IR, on every machine.

A mapping may not change what a kernel means, so any draw is a test. What is drawn is printed on
failure, and can be pasted as text.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from mapped import arguments, difference, kernel

from rung.core.errors import MappingError
from rung.core.machine import GRID, SEQ, THREAD, UNROLL, VECTOR, Machine
from rung.core.op import Func
from rung.kernel.barriers import check_barriers, insert_barriers
from rung.kernel.ir import verify_kernel_ir
from rung.loop import ir as loop
from rung.targets.base import buffers_of
from rung.targets.cpu.machine import AVX512, host
from rung.targets.cpu.target import target
from rung.targets.cuda.machine import SM90
from rung.targets.toy.machine import TOY
from rung.targets.toy.target import ToyEngine
from rung.tile import mapping as tile
from rung.tile.complete import contractions, with_buffers, with_values
from rung.tile.legality import is_legal
from rung.tile.to_kernel import to_kernel

SIZES = {
    "relu_mm": {"M": 13, "K": 21, "N": 18}, "softmax": {"M": 5, "N": 70},
    "colsum": {"M": 37, "N": 20}, "norm_proj": {"M": 3, "K": 40, "N": 18},
    "rotate": {"H": 3, "D": 24, "L": 9}, "attend": {"H": 2, "G": 3, "D": 16, "L": 21},
    "online": {"H": 2, "G": 3, "D": 16, "L": 21}}
SYMBOLIC = {"relu_mm": {"M": "s0", "K": "s1", "N": "s2"}, "softmax": {"M": "s0", "N": "s1"},
            "colsum": {"M": "s0", "N": "s1"}, "online": {"H": 2, "G": 3, "D": 16, "L": "s1"}}
KNOWN = {"s0": 13, "s1": 21, "s2": 18}
HOST = host()
KINDS = (GRID, SEQ, THREAD, UNROLL, VECTOR)
LEVELS = {m.name: {kind: [x.name for x in m.levels if x.kind == kind] for kind in KINDS}
          for m in (AVX512, HOST, TOY, SM90)}


class Draw:
    """Draws mappings for one kernel on one machine."""

    def __init__(self, rng: random.Random, func: Func, machine: Machine):
        self.rng, self.func, self.machine = rng, func, machine
        self.levels = LEVELS[machine.name]
        self.known = all(e.const_value is not None for e in loop.extents_of(func).values())

    def mapping(self) -> tile.Mapping | None:
        rng = self.rng
        axes = list(loop.extents_of(self.func))
        rng.shuffle(axes)
        lines = tuple(tile.AxisLine(a, self.splits()) for a in axes)
        made = tile.Mapping(self.func.name, self.machine.name, lines, uses=self.uses())
        try:
            return self.places(made)
        except MappingError:
            return None

    def splits(self) -> tuple[tuple[str, int | None], ...]:
        rng, out = self.rng, list[tuple[str, int | None]]()
        if self.levels[GRID] and rng.random() < 0.4:
            out.append((rng.choice(self.levels[GRID]), rng.choice((2, 3, 8))))
        for name in self.levels[SEQ]:
            if rng.random() < 0.35:
                out.append((name, rng.choice((1, 2, 4, 8))))
        if self.levels[UNROLL] and rng.random() < 0.4:
            out.append((self.levels[UNROLL][0], rng.choice((2, 3, 4, 16))))
        if self.levels[VECTOR] and rng.random() < 0.4:
            out.append((self.levels[VECTOR][0], rng.choice((4, 8, 16))))
        if out and out[0][0] in (*self.levels[GRID], *self.levels[SEQ]):
            out[0] = (out[0][0], None)
        else:
            out.insert(0, (rng.choice(self.levels[SEQ]), None))
        if self.levels[THREAD] and rng.random() < 0.5:
            out.insert(rng.randint(1, len(out)), ("thread", rng.choice((2, 4, 8, 16))))
        return tuple(out)

    def uses(self) -> tuple[tile.Use, ...]:
        found = contractions(self.func)
        atoms = [a for a in self.machine.atoms]
        if not found or self.rng.random() < 0.5:
            return ()
        return (tile.Use(self.rng.choice(found)[0].result.name, self.rng.choice(atoms)),)

    def places(self, made: tile.Mapping) -> tile.Mapping | None:
        rng = self.rng
        near = {TOY.name: "scratchpad", SM90.name: "shared"}.get(self.machine.name, "l1")
        values = [v.name for op in self.func.body.ops for v in op.results]
        values += [v.name for v in self.func.params] if self.machine is not TOY else []
        loops = [(x.axis, level) for x in made.axes for level, _ in x.splits
                 if level not in (*self.levels[UNROLL], *self.levels[VECTOR], "thread")]
        for name in rng.sample(values, min(len(values), rng.choice((0, 0, 1, 2)))):
            mover = "cp.async" if self.machine is SM90 and name not in made.names() and any(
                name == v.name for v in self.func.params) else ""
            ring = rng.choice((1, 2, 3)) if mover else 1
            pad = rng.choice((0, 1)) if mover else 0
            made = replace(made, places=(*made.places, tile.Place(
                (name,), near, *rng.choice(loops), None, pad, ring, mover)))
        done = with_values(self.func, made, self.machine, near)
        if done and self.machine is TOY:
            done = with_buffers(self.func, done, TOY, near, rng.choice((1, 2, 3)))
        if done and near == "l1" and rng.random() < 0.3 and contractions(self.func):
            done = replace(done, carries=(tile.Carry(contractions(self.func)[0][0].result.name,
                                                     self.func.outs[0].name if self.func.outs
                                                     else "cache"),))
        return done


def legal(rng: random.Random, func: Func, machine: Machine, tries: int) -> list[tile.Mapping]:
    drawn = [Draw(rng, func, machine).mapping() for _ in range(tries)]
    return [m for m in drawn if m is not None and is_legal(func, m, machine)]


def run(func: Func, mapping: tile.Mapping, machine: Machine) -> float:
    mapped = func.with_attr("mapping", mapping)
    lowered = to_kernel(mapped, machine)
    if machine is SM90:
        lowered = insert_barriers(lowered, ("shared",))
        check_barriers(lowered, ("shared",))
    verify_kernel_ir(lowered)
    if machine is TOY:
        return difference(mapped, machine, KNOWN, ToyEngine, lowered)
    return difference(mapped, machine, KNOWN, lowered=lowered)


CASES = [(name, sizes) for table in (SIZES, SYMBOLIC) for name, sizes in table.items()]
IDS = [f"{name}-{'symbolic' if sizes is SYMBOLIC.get(name) else 'fixed'}" for name, sizes in CASES]


@pytest.mark.parametrize("machine", [AVX512, TOY, SM90], ids=lambda m: m.name)
@pytest.mark.parametrize(("name", "sizes"), CASES, ids=IDS)
def test_legal_mappings_do_not_change_the_answer(name: str, sizes: dict[str, int | str],
                                                 machine: Machine) -> None:
    func = kernel(name, **sizes)
    seed = f"{name} {machine.name} {sorted(sizes)}"
    found = legal(random.Random(seed), func, machine, 60)
    for mapping in found[:4]:
        assert run(func, mapping, machine) < 1e-4, mapping


@pytest.mark.parametrize("name", list(SIZES))
def test_compiled_mappings_give_the_answer_too(name: str) -> None:
    func = kernel(name, **SIZES[name])
    drawn = legal(random.Random(f"compiled {name}"), func, HOST, 40)[:4]
    kernels = [replace(to_kernel(func.with_attr("mapping", m), HOST), name=f"{name}{n}")
               for n, m in enumerate(drawn)]
    cpu = target(HOST.name)
    launches = cpu.load(kernels, cpu.emit(kernels))
    for lowered, mapping in zip(kernels, drawn, strict=True):
        want, got = arguments(func, {}), arguments(func, {})
        loop.run_kernel(func, want)
        launches[lowered.name](*(got[v.name].ctypes.data for v in buffers_of(lowered)))
        for out in (v.name for v in (*func.params, *func.outs)):
            assert np.allclose(want[out], got[out], atol=1e-4), mapping
