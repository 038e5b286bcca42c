"""Single mappings whose lowering once went wrong, and the default choice on every machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mapped import KERNELS, difference, kernel

from rung.core.errors import MappingError
from rung.core.op import walk
from rung.core.types import ArrayType
from rung.kernel.ir import Alloc, Store
from rung.targets.base import target
from rung.targets.cpu.machine import AVX512
from rung.targets.toy.machine import TOY
from rung.tile.choose import choose
from rung.tile.to_kernel import to_kernel

SIZES = {"relu_mm": {"M": 17, "K": 96, "N": 80}, "headed": {"M": 17, "K": 96, "N": 80},
         "kept": {"M": 17, "K": 600, "N": 80}, "softmax": {"M": 13, "N": 100},
         "colsum": {"M": 40, "N": 70}, "norm_proj": {"M": 3, "K": 64, "N": 48},
         "rotate": {"H": 2, "D": 32, "L": 24}, "attend": {"H": 2, "G": 2, "D": 32, "L": 40},
         "online": {"H": 2, "G": 2, "D": 32, "L": 40}, "inplace": {"M": 5, "N": 70},
         "share": {"M": 5, "N": 70}, "tally": {"M": 19, "N": 70, "L": 4},
         "scatter": {"M": 19, "N": 70, "L": 4}, "apart": {"M": 5, "N": 70, "K": 37}}


def test_a_value_is_placed_in_a_loop_that_it_does_not_vary_over() -> None:
    """Each core computes the prologue for itself, before its part of the columns."""
    func = kernel("relu_mm", "f32", "  j: core 2, l1 *, reg 2, simd 16\n  i: l1 *, reg 2\n"
                  "  k: seq *\n  place a in l1 at j.core", M=17, K=24, N=100)
    assert difference(func, AVX512) < 1e-4


def test_a_carried_fold_has_lanes_along_the_reduced_axis() -> None:
    """What waits in the output is one number, what runs in registers sixteen."""
    func = kernel("relu_mm", "f32", "  i: l1 *, reg 2\n  j: l1 *\n  k: l3 *, seq 2, simd 16\n"
                  "  carry mm in y", M=5, K=100, N=7)
    assert difference(func, AVX512) < 1e-4


def test_a_carried_state_waits_where_its_own_store_goes() -> None:
    func = kernel("headed", "f32", "  h: l1 *\n  i: l1 *, reg 2\n  j: l1 *, simd 16\n"
                  "  k: l3 *, seq 8\n  carry mm in y", M=5, K=20, N=40)
    assert difference(func, AVX512) < 1e-4


def test_a_carried_state_is_read_by_other_stores_in_its_last_step() -> None:
    mapping = "  i: l1 *, reg 2\n  j: l1 *, simd 16\n  k: l3 *, seq 8\n  carry mm in {}"
    func = kernel("kept", "bf16", mapping.format("z"), M=5, K=30, N=20)
    assert difference(func, AVX512) < 0.02
    with pytest.raises(MappingError, match="y holds bf16, the state of mm is f32"):
        to_kernel(kernel("kept", "bf16", mapping.format("y"), M=5, K=30, N=20), AVX512)
    with pytest.raises(MappingError, match="nothing stores it in x"):
        to_kernel(kernel("kept", "f32", mapping.format("x"), M=5, K=30, N=20), AVX512)


def test_an_array_of_states_has_the_axis_of_the_vectors_last() -> None:
    func = kernel("kept", "f32", "  k: l1 *\n  j: l1 *\n  i: l1 *, simd 16", M=32, K=30, N=7)
    (array,) = [op for op in walk(to_kernel(func, AVX512).body) if isinstance(op, Alloc)]
    assert [t.shape for t in array.types if isinstance(t, ArrayType)] == [(7, 32)]
    assert difference(func, AVX512) < 1e-4


def test_a_carried_state_is_stored_in_one_place() -> None:
    """What waits in `z` is what is stored there at last; `y` is written in the last step alone."""
    func = kernel("kept", "f32", "  i: l1 *, reg 2\n  j: l1 *, simd 16\n  k: l3 *, seq 8\n"
                  "  carry mm in z", M=6, K=30, N=32)
    made = [op.buf.name for op in walk(to_kernel(func, AVX512).body) if isinstance(op, Store)]
    assert sorted(made) == ["y", "z"]
    assert difference(func, AVX512) < 1e-4


@pytest.mark.parametrize("name", ["cpu.avx512", "cpu.avx2", "cpu.base", "toy", "cuda.sm90"])
@pytest.mark.parametrize("func", [name for name in KERNELS if name != "tally"])
def test_the_default_choice_is_right(func: str, name: str) -> None:
    machine = target(name)
    made = kernel(func, "f32", **SIZES[func])
    choice = choose(made, replace(machine.machine, cores=2), machine.candidates)
    assert choice.lowered is not None
    assert difference(choice.kernel, machine.machine, lowered=choice.lowered) < 1e-3


@pytest.mark.parametrize("name", ["cpu.avx512", "cpu.base", "toy", "cuda.sm90"])
def test_the_default_choice_of_an_update_is_right(name: str) -> None:
    test_the_default_choice_is_right("tally", name)


def test_a_scratchpad_has_no_tile_of_an_update_where_data_say() -> None:
    toy = target("toy")
    choice = choose(kernel("tally", "f32", **SIZES["tally"]), toy.machine, toy.candidates)
    mapping = choice.kernel.attr("mapping")
    assert not mapping.places
    assert {level for axis in mapping.axes for level, _ in axis.splits} == {"seq"}
    assert choice.lowered and "s.store  y[t1,j], sum" in toy.emit([choice.lowered])


def test_a_box_of_one_masked_element_may_lie_beyond_the_buffer() -> None:
    func = kernel("rotate", "f32", "  h: seq *\n  d: seq *\n"
                  "  place k, cosine, sine, pos in scratchpad at d.seq by dma\n"
                  "  place cache in scratchpad at d.seq by dma", "toy", H=2, D=6, L=3)
    assert difference(func, TOY) < 1e-4
