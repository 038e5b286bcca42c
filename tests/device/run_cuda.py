"""Builds the goldens' kernels with nvcc, runs them on a GPU and compares with torch in float64.

    PYTHONPATH=.:tests python tests/device/run_cuda.py [candidates per kernel]

Needs torch, nvcc and a GPU from sm_90 on. Not a pytest module: CI has no GPU.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from mapped import kernel

from rung.core.op import Func
from rung.core.types import dtype_of, shape_of
from rung.targets.base import buffers_of, symbols_of
from rung.targets.cuda.build import nvcc
from rung.targets.cuda.candidates import candidates
from rung.targets.cuda.emit import blocks_text, emit, entry, launch_shape
from rung.targets.cuda.machine import SM90
from rung.tile.legality import is_legal
from rung.tile.mapping import parse_mapping
from rung.tile.to_kernel import to_kernel

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
SYMBOLIC = [("relu_mm", {"M": "s0", "K": "s1", "N": "s2"}, {"s0": 500, "s1": 513, "s2": 1000}),
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


def cases(count: int) -> list[Case]:
    found: list[Case] = []
    todo = [(name, s, {}) for name, table in SIZES.items() for s in table] + SYMBOLIC
    for name, sizes, known in todo:
        for dtype in ("f32", "bf16"):
            func = kernel(name, dtype, **sizes)
            given = [parse_mapping(ROLES[name])] if name in ROLES else []
            given += [parse_mapping(STAYS)] if name == "relu_mm" else []
            given = [m for m in given if is_legal(func, m, SM90)]
            for mapping in (*given, *islice(candidates(func, SM90, known), count)):
                mapped = func.with_attr("mapping", mapping)
                label = f"{name}_{dtype}" + "_roles" * bool(mapping.roles)
                label += "_stays" * bool(mapping.orders)
                lowered = replace(to_kernel(mapped, SM90), name=f"k{len(found)}_{label}")
                found.append(Case(mapped, lowered, dict(known)))
    return found


def launcher(func: Func) -> str:
    """An `extern "C"` function that launches a kernel on the default stream."""
    shape = launch_shape(func)
    args = [f"({_c(v)} *)b[{n}]" for n, v in enumerate(buffers_of(func))]
    args += [f"s[{n}]" for n, _ in enumerate(symbols_of(func))]
    sizes = " ".join(f"const long {x} = s[{n}];" for n, x in enumerate(symbols_of(func)))
    grow = (f"cudaFuncSetAttribute({entry(func)}, cudaFuncAttributeMaxDynamicSharedMemorySize, "
            f"{shape.dynamic});" if shape.dynamic else "")
    return (f'extern "C" int launch_{func.name}(void **b, const long *s) {{ {sizes} {grow} '
            f"{entry(func)}<<<{blocks_text(func)}, {shape.threads}, {shape.dynamic}>>>"
            f"({', '.join(args)}); return (int)cudaGetLastError(); }}")


def _c(value: Any) -> str:
    return {"f32": "float", "bf16": "unsigned short", "i64": "long"}[dtype_of(value.type).name]


def build(found: list[Case], folder: Path) -> ctypes.CDLL:
    source = emit([c.lowered for c in found])
    source += "\n".join(launcher(c.lowered) for c in found) + "\n"
    path, library = folder / "all.cu", folder / "all.so"
    path.write_text(source)
    subprocess.run([nvcc() or "nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-std=c++17",
                    "-fmad=false", "-shared", "-diag-suppress", "177", "-Xcompiler", "-fPIC",
                    "-o", str(library), str(path)], check=True)
    return ctypes.CDLL(str(library))


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
    torch.manual_seed(0)
    made = {}
    for v in buffers_of(case.func):
        shape = [int(e.evaluate(case.known)) for e in shape_of(v.type)]
        kind = TORCH[dtype_of(v.type).name]
        if kind == torch.int64:
            rows = next(p for p in case.func.params if p.name in ("cache", "vc"))
            last = (shape_of(rows.type)[1].const_value or 1) // 2
            made[v.name] = torch.full(shape, last, dtype=kind, device="cuda")
        elif v in case.func.outs:
            made[v.name] = torch.full(shape, torch.nan, dtype=kind, device="cuda")
        else:
            made[v.name] = torch.randn(shape, dtype=torch.float32, device="cuda").to(kind)
    return made


def run(case: Case, library: ctypes.CDLL) -> tuple[float, float]:
    """(error relative to the scale of the result, microseconds of the fastest of 5 runs)."""
    t = tensors(case)
    want = reference(case.func.name, {k: v.clone() for k, v in t.items()})
    buffers = buffers_of(case.func)
    pointers = (ctypes.c_void_p * len(buffers))(*[t[v.name].data_ptr() for v in buffers])
    symbols = symbols_of(case.lowered)
    sizes = (ctypes.c_long * (len(symbols) + 1))(*[case.known[s] for s in symbols])
    call = library[f"launch_{case.lowered.name}"]
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        status = call(pointers, sizes)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
        if status:
            raise RuntimeError(f"{case.lowered.name}: CUDA error {status}")
    got = t["cache" if case.func.name == "rotate" else "y"].double()
    scale = want.abs().max().clamp(min=1e-3)
    return float(((got - want).abs().max() / scale).nan_to_num(torch.inf)), best * 1e6


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    found = cases(count)
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        library = build(found, Path(folder))
        print(f"{len(found)} kernels built in {time.perf_counter() - start:.1f} s")
        for case in found:
            error, micros = run(case, library)
            fine = error < (2e-2 if "bf16" in case.lowered.name else 2e-5)
            bad += not fine
            shapes = " ".join(str(v.type) for v in buffers_of(case.func))
            print(f"{'ok ' if fine else 'BAD'} {case.lowered.name:24} {error:.2e} {micros:9.1f} us"
                  f"  {shapes}")
            if not fine:
                print(case.func.attr("mapping"))
    print(f"{len(found) - bad} of {len(found)} right")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
