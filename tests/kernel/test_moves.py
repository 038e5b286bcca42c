"""Transfers, waits, barriers and instructions of the Kernel IR, on NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from mapped import VOCABULARIES, arguments, kernel

from rung.core.errors import VerifyError
from rung.core.machine import Atom
from rung.core.op import Func
from rung.core.parse import parse_module
from rung.core.types import dtype_of
from rung.core.verify import verify
from rung.kernel import ir as kir
from rung.kernel.barriers import check_barriers, insert_barriers
from rung.loop import ir as loop
from rung.targets.cpu.atoms import ATOMS
from rung.targets.cuda.machine import SM90
from rung.targets.toy.atoms import MAC16
from rung.tile.match import meaning_of, tile_of
from rung.tile.to_kernel import to_kernel

COPY = """
kernel-ir copy(x: f32[5]) -> y: f32[5]
  unroll r<4
  t = alloc : scratchpad f32[4]
  transfer t at [0] from x at [3] box [4] valid [2] by dma group g
  commit g
  {wait}
  transfer y at [0] from t at [0] box [4] valid [4] by dma group h
  commit h
  wait h pending 0
  y[4] = 1.0
"""


def func(text: str) -> Func:
    (made,) = parse_module(text, VOCABULARIES)
    return made


def copied(wait: str) -> list[float]:
    x, y = np.arange(5, dtype="f"), np.full(5, 9, "f")
    kir.run_kernel_ir(func(COPY.format(wait=wait)), {"x": x, "y": y})
    return [float(v) for v in y]


def test_a_transfer_fills_beyond_what_is_valid() -> None:
    assert copied("wait g pending 0") == [3, 4, 0, 0, 1]


@pytest.mark.parametrize("wait", ["wait g pending 1", "commit g"])
def test_before_its_wait_a_destination_is_poison(wait: str) -> None:
    assert np.isnan(copied(wait)[:4]).all()


def test_a_box_outside_of_a_tensor_is_an_error() -> None:
    text = COPY.format(wait="wait g pending 0").replace("valid [2]", "valid [3]")
    with pytest.raises(IndexError, match="a box"):
        kir.run_kernel_ir(func(text), {"x": np.zeros(5, "f"), "y": np.zeros(5, "f")})


@pytest.mark.parametrize(("old", "new", "message"), [
    ("box [4] valid [2]", "box [4] valid [2,1]", "2 valid extents"),
    ("from x at [3]", "from x at [3,0]", "x has 1 dimensions"),
    ("scratchpad f32[4]", "scratchpad f64[4]", "moves"),
    ("valid [2]", "valid [i]", "no axis or loop variable is called i")])
def test_rules_of_transfers(old: str, new: str, message: str) -> None:
    bad = COPY.format(wait="wait g pending 0").replace(old, new)
    with pytest.raises(VerifyError, match=message):
        verify(func(bad), kir.VOCABULARY, kir.verify_kernel_ir)


def test_text_of_transfers_is_read_back() -> None:
    made = func(COPY.format(wait="wait g pending 0"))
    assert str(func(str(made))) == str(made)


@pytest.mark.parametrize("atom", [MAC16, *ATOMS.values()], ids=lambda x: x.name)
def test_an_instruction_computes_its_meaning(atom: Atom) -> None:
    meaning, (m, n, k) = meaning_of(atom), tile_of(atom)
    a, b = (dtype_of(v.type) for v in meaning.params)
    acc = dtype_of(meaning.outs[0].type)
    call = func(f"kernel-ir {atom.name}(a: {a}[{m},{k}], b: {b}[{k},{n}]) -> d: {acc}[{m},{n}]\n"
                f"  unroll i<{m}, k<{k}\n  z = fill {'0.0' if acc.is_float else '0'} : {acc}x{n} "
                f"over i<{m}\n  c = apply {atom.name} z, a[i,k], b[k,lane : lane {n}] by k : "
                f"{acc}x{n} over i<{m}\n  d[i,lane : lane {n}] = c\n")
    want, got = arguments(meaning, {}), arguments(meaning, {})
    loop.run_kernel(meaning, want)
    kir.run_kernel_ir(call, got)
    assert np.allclose(want["d"], got["d"], atol=1e-5)


GEMM = """
  i: grid *, thread 16, reg 2
  j: grid *, thread 16, reg 2
  k: pipe *, unroll 32
  place x, w in shared at k.pipe pad 1 ring 2 by cp.async
"""
RACE = """
kernel-ir turn(x: f32[8]) -> y: f32[8]
  for it in 0..8 at thread
    a = alloc : shared f32[8]
    for n in 0..2
      a[it] = x[it]
      y[it] = a[7-it]
"""


def test_barriers_stand_between_threads_writes_and_reads() -> None:
    made = insert_barriers(func(RACE), ("shared",))
    assert str(made).count("barrier shared") == 2  # also before the next step writes again
    check_barriers(made, ("shared",))


def test_a_missing_barrier_is_found() -> None:
    with pytest.raises(VerifyError, match="a needs a barrier"):
        check_barriers(func(RACE), ("shared",))


def test_a_ring_needs_one_barrier_a_step() -> None:
    mapped = kernel("relu_mm", mapping=GEMM, machine="cuda.sm90", M=40, K=96, N=48)
    text = str(insert_barriers(to_kernel(mapped, SM90), ("shared",)))
    assert text.count("barrier shared") == 1
