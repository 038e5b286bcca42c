"""Instructions of the CPU that multiply narrow elements: matched, mapped, chosen, and run."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from rung.core.errors import MappingError
from rung.core.machine import Machine
from rung.core.op import Func, made_by
from rung.core.parse import parse_module
from rung.core.types import dtype_of
from rung.frontends.torch.tensors import DTYPES
from rung.loop import ir as loop
from rung.targets.cpu import machine as cpu
from rung.targets.cpu.atoms import ATOMS, EXTENSIONS
from rung.targets.cpu.target import candidates, knows, target
from rung.targets.device import device
from rung.tile import legality
from rung.tile.choose import choose
from rung.tile.mapping import parse_mapping
from rung.tile.match import deep, group_of
from rung.tile.to_kernel import to_kernel

ALL = cpu.extended(cpu.AVX512, EXTENSIONS)
HERE = [x.atom.name for x in cpu.extensions(cpu.host()) if knows(x)]

MATMUL = """
kernel mm(x: {a}[{m},{k}], w: {b}[{w}], r: {acc}[{n}]) -> y: {acc}[{m},{n}]
  xa = x[i,k] : {a} over i,k
  v = {acc}(xa) : {acc} over i,k
  wb = w[{at}] : {b} over {at}
  u = {acc}(wb) : {acc} over {at}
  mm = contract add mul {order} over k {k} : {acc} over {axes} acc {acc}
  y[i,j] = mm + r[j]
"""
TYPES = {"vdpbf16ps": ("bf16", "bf16", "f32"), "vpdpbusd": ("u8", "i8", "i32"),
         "vpdpbusd_s8": ("i8", "i8", "i32")}
GROUPS = {name: group_of(x) for name, x in ATOMS.items()}
PLAIN = "  j: l1 *, reg 2, simd 16\n  i: l1 *, reg 3\n  k: seq *, reg {group}\n"
PANEL = ("  j: l1 *, reg 2, simd 16\n  i: l1 *, reg 5\n  k: seq *, reg {deep}\n"
         "  place wb in l1 at j.l1 as panel(j 32, k {group})\n")
OUTER = ("  k: l3 *, seq 4, reg {deep}\n  j: l1 *, reg 2, simd 16\n  i: l1 *, reg 5\n"
         "  place wb in l1 at k.l3 as panel(j 32, k {group})\n"
         "  place xa in l2 at k.l3 as panel(i 5, k {group})\n  carry mm in y\n")


def matmul(atom: str, m: object, n: object, k: object, turned: bool, mapping: str = "",
           swapped: bool = False) -> Func:
    """A matmul of an atom's types, of a weight as `nn.Linear` has it or turned, with a bias."""
    a, b, acc = TYPES[atom]
    at, w = ("k,j", f"{k},{n}") if turned else ("j,k", f"{n},{k}")
    text = MATMUL.format(a=a, b=b, acc=acc, m=m, n=n, k=k, w=w, at=at,
                         order="u, v" if swapped else "v, u", axes="j,i" if swapped else "i,j")
    if mapping:
        text += "map mm on cpu.avx512\n" + mapping.format(
            group=GROUPS[atom], deep=4 * GROUPS[atom]) + f"  use mm with {atom}\n"
    (found,) = parse_module(text, {"kernel": loop.VOCABULARY}, parse_mapping)
    return found


def tensors(func: Func, sizes: dict[str, int]) -> list[torch.Tensor]:
    made = []
    for v in (*func.params, *func.outs):
        shape = [int(e.evaluate(sizes)) for e in v.type.shape]  # type: ignore[union-attr]
        kind = DTYPES[dtype_of(v.type)]
        if kind.is_floating_point:
            made.append(torch.randn(shape).to(kind))
        else:
            low, high = (-128, 127) if kind == torch.int8 else (0, 255)
            made.append(torch.randint(low, high + 1, shape).to(kind))
    return made


def run(lowered: Func, machine: Machine, args: Sequence[torch.Tensor], sizes: dict[str, int]
        ) -> None:
    on = replace(target(machine.name), machine=machine)
    launch = device(on).load([lowered], on.emit([lowered]))[lowered.name]
    launch(*(ctypes.c_void_p(t.data_ptr()) for t in args),
           *(ctypes.c_long(sizes[s]) for s in sorted(sizes)))


@pytest.mark.skipif(not HERE, reason="this CPU, or its compiler, has none of the instructions")
@pytest.mark.parametrize(("mapping", "symbols"), [
    (PLAIN, ""), (PANEL, ""), (OUTER, ""), (PLAIN, "mnk"), (PANEL, "mn"), (OUTER, "k")])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("atom", HERE)
def test_the_instruction_is_right_on_ragged_sizes(atom: str, turned: bool, mapping: str,
                                                  symbols: str) -> None:
    torch.manual_seed(0)
    for m, n, k in ((3, 5, 1), (17, 70, 131), (10, 64, 96)) if symbols else ((16, 33, 70),):
        sizes = {f"s{'mnk'.index(a)}": x for a, x in zip("mnk", (m, n, k), strict=True)
                 if a in symbols}
        given = (f"s{'mnk'.index(a)}" if a in symbols else x
                 for a, x in zip("mnk", (m, n, k), strict=True))
        func = matmul(atom, *given, turned, mapping)
        tree = legality.check(func, func.attr("mapping"), ALL)
        args = tensors(func, sizes)
        x, w, r, _ = (t.double() for t in args)
        want = x @ (w if turned else w.T) + r
        run(to_kernel(func, ALL, tree), ALL, args, sizes)
        bound = 1e-5 * k if args[-1].is_floating_point() else 0.5
        assert (args[-1].double() - want).abs().max() < bound, (m, n, k)


FLOATS = """
kernel mm(x: f32[{m},{k}], w: f32[{n},{k}], r: f32[{n}]) -> y: f32[{m},{n}]
  wb = w[j,k] : f32 over j,k
  mm = contract add mul x[i,k], wb over k {k} : f32 over i,j acc f32
  y[i,j] = mm + r[j]
"""
COLUMNS = ("  j: l1 *, reg 2, simd {lanes}\n  i: l1 *, reg 3\n  k: seq *, reg 4\n"
           "  place wb in l1 at j.l1 as panel(j {wide})\n")
BLOCKS = COLUMNS.replace("  k: seq *, reg 4\n", "  k: l3 *, seq 4, reg 4\n") + "  carry mm in y\n"


@pytest.mark.parametrize("mapping", [COLUMNS, BLOCKS])
@pytest.mark.parametrize("machine", [cpu.AVX512, cpu.AVX2], ids=lambda m: m.name)
def test_floats_along_the_reduced_axis_become_panels(machine: Machine, mapping: str) -> None:
    if not cpu.NEEDS[machine.name] <= cpu.features():
        pytest.skip(f"this CPU is no {machine.name}")
    torch.manual_seed(0)
    for m, n, k in ((3, 5, 1), (17, 70, 131), (16, 33, 70), (10, 64, 96), ("s0", 40, 45)):
        text = FLOATS.format(m=m, n=n, k=k) + f"map mm on {machine.name}\n" + mapping.format(
            lanes=machine.lanes, wide=2 * machine.lanes) + "  use mm with fma4\n"
        (func,) = parse_module(text, {"kernel": loop.VOCABULARY}, parse_mapping)
        tree = legality.check(func, func.attr("mapping"), machine)
        sizes = {"s0": 7} if m == "s0" else {}
        args = tensors(func, sizes)
        x, w, r, _ = (t.double() for t in args)
        run(to_kernel(func, machine, tree), machine, args, sizes)
        assert (args[-1].double() - (x @ w.T + r)).abs().max() < 1e-5 * w.shape[1], (m, n, k)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("atom", TYPES)
def test_an_instruction_is_chosen_for_its_types_by_price(atom: str, swapped: bool) -> None:
    """Also with the factors in the other order; a machine without it may multiply the floats that
    halves are read as."""
    func = matmul(atom, 64, 96, 256, False, swapped=swapped)
    (fold,) = loop.contractions(func)
    found = deep(ALL, fold, made_by(func))
    assert found and found.atom.name == atom
    for machine, used in ((ALL, [atom]), (cpu.AVX512, ["fma4"] * (atom == "vdpbf16ps"))):
        chosen = choose(func, machine, candidates)
        mapping = chosen.kernel.attr("mapping")
        assert [u.atom for u in mapping.uses] == used
        assert parse_mapping(str(mapping)) == mapping
        if used == [atom]:
            assert mapping.placed("wb").panel.blocks[1] == ("k", GROUPS[atom])


def test_an_instruction_of_other_types_is_refused() -> None:
    func = matmul("vdpbf16ps", 8, 32, 16, False, PLAIN)
    legality.check(func, func.attr("mapping"), ALL)
    bare = matmul("vdpbf16ps", 8, 32, 15, False, PLAIN.replace("seq *, reg {group}", "reg 16"))
    with pytest.raises(MappingError, match="needs a loop over k, whose last block is padded"):
        legality.check(bare, bare.attr("mapping"), ALL)
    text = re.sub(r"\bbf16\b", "f16", str(func))
    (other,) = parse_module(text, {"kernel": loop.VOCABULARY}, parse_mapping)
    with pytest.raises(MappingError, match=r"vdpbf16ps computes kernel vdpbf16ps.*, not mm"):
        legality.check(other, other.attr("mapping"), ALL)
    with pytest.raises(MappingError, match=r"cpu\.avx512 has no atom vdpbf16ps"):
        legality.check(func, func.attr("mapping"), cpu.AVX512)


def test_a_cpu_without_the_instructions_has_no_such_atoms(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = frozenset(cpu.NEEDS["cpu.avx512"])
    monkeypatch.setattr(cpu, "features", lambda: plain)
    assert target("cpu").machine.atoms == cpu.AVX512.atoms
    monkeypatch.setattr(cpu, "features", lambda: plain | {x.feature for x in EXTENSIONS})
    able = [x.atom for x in EXTENSIONS if knows(x)]
    assert target("cpu").machine.atoms == (*reversed(able), *cpu.AVX512.atoms)
    assert set(cpu.flags(ALL)) - set(cpu.flags(cpu.AVX512)) == {x.flag for x in EXTENSIONS}


def test_kernels_of_instructions_mean_the_same_on_numpy() -> None:
    from mapped import difference
    for mapping in (PLAIN, PANEL, OUTER):
        func = matmul("vdpbf16ps", 7, 40, 37, True, mapping)
        assert difference(func, ALL) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_sum_too_short_for_an_instruction_has_a_mapping(dtype: torch.dtype) -> None:
    for n in (1, 2, 3, 5, 7):
        torch._dynamo.reset()
        x = torch.randn(1, n).to(dtype)
        compiled = torch.compile(torch.nn.functional.linear, backend="rung",
                                 options={"strict": True})
        torch.testing.assert_close(compiled(x, x), torch.nn.functional.linear(x, x))
