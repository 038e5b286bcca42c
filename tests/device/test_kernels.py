"""Kernels on a GPU under several candidate mappings, some with roles and with blocks that stay.

Each is launched by its name, with raw addresses: large ones against torch in float64, and all kinds
at odd sizes against Loop IR on NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from mapped import KERNELS, SYMBOLIC, difference, kernel
from mapped import SIZES as ODD

from rung.core.op import Func
from rung.core.types import dtype_of, shape_of
from rung.frontends.torch.tensors import stream_on
from rung.targets.base import buffers_of, symbols_of, target
from rung.targets.device import Launch, device
from rung.tile.legality import is_legal
from rung.tile.mapping import parse_mapping
from rung.tile.to_kernel import to_kernel

COUNT = 3  # candidates of a kernel
PLACE = "cuda:0"
TARGET = target("cuda")
TORCH = {"f32": torch.float32, "bf16": torch.bfloat16, "i64": torch.int64}
SIZES: dict[str, list[dict[str, Any]]] = {
    "relu_mm": [{"M": m, "K": k, "N": n} for m, k, n in (
        (1, 13, 500), (13, 512, 1), (500, 512, 1000), (512, 512, 512), (1000, 1000, 13))],
    "softmax": [{"M": m, "N": n} for m, n in ((1, 1), (13, 500), (512, 1000), (1000, 13))],
    "colsum": [{"M": m, "N": n} for m, n in ((1, 13), (500, 1), (512, 512), (1000, 1000))],
    "norm_proj": [{"M": m, "K": k, "N": n} for m, k, n in ((1, 512, 1000), (13, 500, 13))],
    "rotate": [{"H": 8, "D": 64, "L": 512}, {"H": 1, "D": 26, "L": 13}],
    "attend": [{"H": 4, "G": 4, "D": 64, "L": 500}, {"H": 1, "G": 1, "D": 16, "L": 13}],
    "online": [{"H": 4, "G": 4, "D": 64, "L": 1000}, {"H": 1, "G": 1, "D": 16, "L": 1}]}
LARGE = [("relu_mm", {"M": "s0", "K": "s1", "N": "s2"}, {"s0": 500, "s1": 513, "s2": 1000}),
            ("softmax", {"M": "s0", "N": "s1"}, {"s0": 13, "s1": 1000})]


ROLES = {"relu_mm": """map relu_mm on cuda.sm90
  i: grid *, thread 16, reg 4
  j: grid *, thread 16, reg 4
  k: pipe *, unroll 16
  place x, w in shared at k.pipe pad 1 ring 3 by cp.async
  use mm with ffma
  roles load x1 regs 40, math x2 regs 232
""", "softmax": """map softmax on cuda.sm90
  i: grid *
  j: seq *, thread 128, reg 2
  place e in shared at i.grid
  place x in shared at j.seq ring 2 by cp.async
  roles load x1, math x1
""", "norm_proj": """map norm_proj on cuda.sm90
  i: grid *, thread 8
  j: grid *, thread 16
  k: pipe *, unroll 8
  place w in shared at k.pipe ring 2 by cp.async
  place x in shared at k.pipe ring 3 by cp.async
  roles load x1, math x1
"""}
"""Mappings with roles, which no candidate has."""
STAYS = """map relu_mm on cuda.sm90
  i: grid *, thread 8
  j: grid *, thread 16
  k: pipe *, unroll 16
  place x, w in shared at k.pipe pad 1 ring 2 by cp.async
  order persistent raster 8
"""
"""Small tiles, so that blocks take several."""


@dataclass
class Case:
    """One kernel under one mapping, with what its sizes are."""

    func: Func
    lowered: Func
    known: dict[str, int]


def cases(name: str, dtype: str, sizes: Mapping[str, Any], known: dict[str, int]
          ) -> Iterator[Case]:
    """A kernel under the mappings above that are legal for it, and under candidates."""
    machine, func = TARGET.machine, kernel(name, dtype, machine=TARGET.name, **sizes)
    given = [parse_mapping(ROLES[name])] if name in ROLES else []
    given += [parse_mapping(STAYS)] if name == "relu_mm" else []
    given = [m for m in given if is_legal(func, m, machine)]
    for mapping in (*given, *islice(TARGET.candidates(func, machine, known), COUNT)):
        mapped = func.with_attr("mapping", mapping)
        yield Case(mapped, to_kernel(mapped, machine), known)


def named(found: Sequence[Case]) -> list[Func]:
    """The kernels of several cases, under names that differ."""
    return [replace(c.lowered, name=f"k{n}_{c.func.name}") for n, c in enumerate(found)]


def loaded(kernels: Sequence[Func]) -> list[Launch]:
    """A launch of each kernel."""
    on = device(TARGET, PLACE, partial(stream_on, torch.device(PLACE)))
    found = on.load(kernels, TARGET.emit(kernels))
    return [found[k.name] for k in kernels]


def reference(name: str, t: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a kernel means, in float64."""
    d = {k: v.double() if v.is_floating_point() else v for k, v in t.items()}
    match name:
        case "relu_mm":
            return torch.relu((d["x"] + d["bias"]) @ d["w"])
        case "softmax":
            return torch.softmax(d["x"], 1)
        case "colsum":
            return d["x"].sum(0)
        case "norm_proj":
            r = torch.rsqrt((d["x"] ** 2).sum(1, keepdim=True) * 0.01 + 1e-5)
            return (d["x"] * r * d["g"]) @ d["w"].T
        case "rotate":
            low, high = d["k"].chunk(2, 1)
            turned = torch.cat([-high, low], 1)
            d["cache"][:, int(d["pos"])] = d["k"] * d["cosine"] + turned * d["sine"]
            return d["cache"]
    z = torch.einsum("hgd,htd->hgt", d["q"], d["kc"]) * 0.25
    hidden = torch.arange(z.shape[2], device=z.device) > d["pos"]
    return torch.einsum("hgt,hte->hge", z.masked_fill(hidden, -torch.inf).softmax(2), d["vc"])


def tensors(case: Case) -> dict[str, torch.Tensor]:
    """Random tensors for a kernel; outputs are full of NaN."""
    torch.manual_seed(0)
    made = {}
    for v in buffers_of(case.func):
        shape = [int(e.evaluate(case.known)) for e in shape_of(v.type)]
        kind = TORCH[dtype_of(v.type).name]
        if kind == torch.int64:
            rows = next(p for p in case.func.params if p.name in ("cache", "vc"))
            last = (shape_of(rows.type)[1].const_value or 1) // 2
            made[v.name] = torch.full(shape, last, dtype=kind, device=PLACE)
        elif v in case.func.outs:
            made[v.name] = torch.full(shape, torch.nan, dtype=kind, device=PLACE)
        else:
            made[v.name] = torch.randn(shape, device=PLACE).to(kind)
    return made


def off(case: Case, launch: Launch) -> float:
    """The largest error of a launch, relative to the scale of the result."""
    t = tensors(case)
    want = reference(case.func.name, {k: v.clone() for k, v in t.items()})
    launch(*(t[v.name].data_ptr() for v in buffers_of(case.lowered)),
           *(case.known[s] for s in symbols_of(case.lowered)))
    torch.cuda.synchronize()
    got = t["cache" if case.func.name == "rotate" else "y"].double()
    error = (got - want).abs().max() / want.abs().max().clamp(min=1e-3)
    return float(error.nan_to_num(torch.inf))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", SIZES)
def test_against_float64(name: str, dtype: str) -> None:
    todo: list[tuple[dict[str, Any], dict[str, int]]] = [(sizes, {}) for sizes in SIZES[name]]
    todo += [(sizes, known) for title, sizes, known in LARGE if title == name]
    found = [c for sizes, known in todo for c in cases(name, dtype, sizes, known)]
    errors = {f"{c.known or ''}{c.func}": off(c, launch)
              for c, launch in zip(found, loaded(named(found)), strict=True)}
    assert len(errors) >= len(todo)
    bound = 2e-5 if dtype == "f32" else 2e-2
    assert {k: e for k, e in errors.items() if not e <= bound} == {}


def on_arrays(lowered: Func, launch: Launch, arrays: dict[str, np.ndarray],
              sizes: Mapping[str, int]) -> None:
    """A launch on copies of arrays, of which bf16 ones are held as f32, written back after it."""
    held = {v: torch.from_numpy(arrays[v.name]).to(PLACE).to(TORCH[dtype_of(v.type).name])
            for v in buffers_of(lowered)}
    launch(*(x.data_ptr() for x in held.values()), *(sizes[s] for s in symbols_of(lowered)))
    torch.cuda.synchronize()
    for v, x in held.items():
        array = arrays[v.name]
        array[...] = x.cpu().to(torch.from_numpy(array).dtype).numpy()


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", KERNELS)
def test_against_loop_ir(name: str, dtype: str, symbolic: bool) -> None:
    if symbolic and name not in SYMBOLIC:
        pytest.skip("it has no symbolic sizes")
    known = {"s0": 13, "s1": 37, "s2": 22} if symbolic else {}
    found = list(cases(name, dtype, ODD[name] | (SYMBOLIC[name] if symbolic else {}), known))
    assert found
    for case, launch in zip(found, loaded(named(found)), strict=True):
        gap = difference(case.func, TARGET.machine, known, lowered=case.lowered,
                         run=partial(on_arrays, case.lowered, launch))
        assert gap < (1e-3 if dtype == "f32" else 0.3), case.func
