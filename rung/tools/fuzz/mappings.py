"""Random legal mappings of known kernels, which must all give the answer of the kernel itself.

`kernel("softmax", "f32", M=5, N=100)` gives a kernel; `difference(kernel, machine)` lowers it by
its mapping and says how far its Kernel IR is from its Loop IR; `legal` draws mappings for it, and
`launches` runs its source on a device that reads the host's memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from rung.core.errors import MappingError
from rung.core.machine import GRID, SEQ, THREAD, UNROLL, VECTOR, Machine
from rung.core.op import Func
from rung.core.parse import parse_module
from rung.core.scalar import round_bf16
from rung.core.types import BF16, TensorType, dtype_of, shape_of
from rung.kernel import ir as kir
from rung.kernel.moves import Engine
from rung.loop import ir as loop
from rung.targets import TARGETS
from rung.targets.base import Target, buffers_of, symbols_of, target
from rung.targets.device import Launched, Stretch, device
from rung.tile import mapping as tile
from rung.tile.complete import contractions, with_buffers, with_values
from rung.tile.legality import is_legal
from rung.tile.mapping import parse_mapping
from rung.tile.to_kernel import to_kernel

SHORT = {"CACHE": "cache: T[{H},{L},{D}]", "QUERY": "q: T[{H},{G},{D}]",
         "KEYS": "kc: T[{H},{L},{D}]", "VALUES": "vc: T[{H},{L},{D}]",
         "STATES": "top: f32[{L},{N}] mutated, count: i64[{L}] mutated",
         "STATE": "f32 over h,g, f32 over h,g, f32 over h,g,e"}
VOCABULARIES = {"kernel": loop.VOCABULARY, "kernel-ir": kir.VOCABULARY}
KERNELS = {
    "relu_mm": """
kernel relu_mm(x: T[{M},{K}], bias: T[{K}], w: T[{K},{N}]) -> y: T[{M},{N}]
  a = F(x[i,k]) + F(bias[k]) : f32 over i,k
  mm = contract add mul a, F(w[k,j]) over k {K} : f32 over i,j acc f32
  y[i,j] = T(relu(mm))
""",
    "headed": """
kernel headed(head: T[3,{N}], x: T[{M},{K}], w: T[{N},{K}]) -> y: T[{tall},{N}]
  axes h 3, i {M}, j {N}, k {K}
  y[h,j] = head[h,j]
  mm = contract add mul F(x[i,k]), F(w[j,k]) over k {K} : f32 over i,j acc f32
  y[i+3,j] = T(mm)
""",
    "kept": """
kernel kept(x: T[{M},{K}], w: T[{K},{N}]) -> y: T[{M},{N}], z: f32[{M},{N}]
  mm = contract add mul F(x[i,k]), F(w[k,j]) over k {K} : f32 over i,j acc f32
  y[i,j] = T(mm * 2.0)
  z[i,j] = mm
""",
    "softmax": """
kernel softmax(x: T[{M},{N}]) -> y: T[{M},{N}]
  m = fold max F(x[i,j]) over j {N} : f32 over i acc f32
  e = exp(F(x[i,j]) - m) : f32 over i,j
  s = fold add e over j {N} : f32 over i acc f32
  y[i,j] = T(e / s)
""",
    "colsum": """
kernel colsum(x: T[{M},{N}]) -> y: T[{N}]
  c = fold add F(x[i,j]) over i {M} : f32 over j acc f32
  y[j] = T(c)
""",
    "share": """
kernel share(x: T[{M},{N}]) -> y: T[{M},{N}], z: T[{M}]
  c = scan add F(x[i,j]) over j {N} : f32 over i,j acc f32
  y[i,j] = T(c * 0.5)
  m = fold max c over j {N} : f32 over i acc f32
  z[i] = T(m)
""",
    "tally": """
kernel tally(x: f32[{M},{N}], at: i64[{M}], y: f32[{L},{N}] mutated, z: f32[{L},{N}] mutated)
  y[at[i],j] add= x[i,j] * 0.5
  z[at[i],j] last= x[i,j]
""",
    "scatter": """
kernel scatter(x: f32[{M},{N}], n: i64[{M}], at: i64[{M}], y: f32[{L},{N}] mutated, STATES)
  y[at[i],j] add= x[i,j] * 0.5
  top[at[i],j] max= x[i,j]
  count[at[i]] add= n[i]
""",
    "apart": """
kernel apart(x: T[{M},{N}], u: T[{M}], v: T[{K}]) -> y: T[{M},{N}], z: T[{M}], w: T[{K}]
  y[i,j] = T(relu(F(x[i,j])))
  z[i] = T(F(u[i]) * 2.0)
  s = fold add F(v[k]) over k {K} : f32 acc f32
  w[h] = T(F(v[h]) * s)
""",
    "inplace": """
kernel inplace(x: T[{M},{N}] mutated)
  x[i,j] = T(relu(F(x[i,j])))
""",
    "norm_proj": """
kernel norm_proj(x: T[{M},{K}], g: T[{K}], w: T[{N},{K}]) -> y: T[{M},{N}]
  q = F(x[i,k]) * F(x[i,k]) : f32 over i,k
  s = fold add q over k {K} : f32 over i acc f32
  r = rsqrt(s * 0.01 + 1e-05) : f32 over i
  a = F(x[i,k]) * r * F(g[k]) : f32 over i,k
  mm = contract add mul a, F(w[j,k]) over k {K} : f32 over i,j acc f32
  y[i,j] = T(mm)
""",
    "rotate": """
kernel rotate(k: T[{H},{D}], cosine: T[{D}], sine: T[{D}], pos: i64[1], CACHE mutated)
  low = F(k[h,d-{half} | d-{half}]) : f32 over h,d
  high = F(k[h,d+{half} | {half}-d-1]) : f32 over h,d
  r = F(k[h,d]) * F(cosine[d]) + (low - high) * F(sine[d]) : f32 over h,d
  cache[h,pos[0],d] = T(r)
""",
    "attend": """
kernel attend(QUERY, KEYS, VALUES, pos: i64[1]) -> y: T[{H},{G},{D}]
  z = contract add mul F(q[h,g,d]), F(kc[h,t,d]) over d {D} : f32 over h,g,t acc f32
  u = where(index(t) <= pos[0], z * 0.25, -inf) : f32 over t,h,g
  m = fold max u over t {L} : f32 over h,g acc f32
  p = exp(u - m) : f32 over t,h,g
  l = fold add p over t {L} : f32 over h,g acc f32
  o = contract add mul p, F(vc[h,t,e]) over t {L} : f32 over h,g,e acc f32
  y[h,g,e] = T(o / l)
""",
    "online": """
kernel online(QUERY, KEYS, VALUES, pos: i64[1]) -> y: T[{H},{G},{D}]
  z = contract add mul F(q[h,g,d]), F(kc[h,t,d]) over d {D} : f32 over h,g,t acc f32
  u = where(index(t) <= pos[0], z * 0.25, -inf) : f32 over t,h,g
  m, l, o = fold attend u, F(vc[h,t,e]) over t {L} : STATE acc f32
  y[h,g,e] = T(o / l)
"""}


def kernel(name: str, dtype: str = "f32", mapping: str = "", machine: str = "cpu.avx512",
           **sizes: int | str) -> Func:
    """A kernel of `KERNELS` at given sizes, under the statements of a mapping if there are any."""
    wide, text = dtype == "f32", KERNELS[name]
    for word, meaning in SHORT.items():
        text = text.replace(word, meaning)
    text = text.replace("F(", "(" if wide else "f32(").replace(
        " T(", " (" if wide else f" {dtype}(").replace("T[", f"{dtype}[")
    width, rows = sizes.get("D", 0), sizes.get("M", 0)
    text = text.format(**sizes, half=int(width) // 2, tall=rows + 3 if isinstance(rows, int) else 0)
    if mapping:
        text += f"\nmap {name} on {machine}\n{mapping}\n"
    (made,) = parse_module(text, VOCABULARIES, parse_mapping)
    return made


def arguments(func: Func, sizes: Mapping[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    """Random arrays for a kernel; outputs are full of NaN."""
    rng = np.random.default_rng(seed)
    found: dict[str, np.ndarray] = {}
    for value in (*func.params, *func.outs):
        shape = [int(e.evaluate(sizes)) for e in shape_of(value.type)]
        dtype = dtype_of(value.type)
        data: Any = rng.integers(0, 4, shape)
        if dtype.is_float:
            data = rng.standard_normal(shape).astype("f")
            data = round_bf16(data) if dtype.name == "bf16" else data
            data = np.full(shape, np.nan) if value in func.outs else data
        found[value.name] = np.ascontiguousarray(data, dtype.numpy)
    return found


Run = Callable[[dict[str, np.ndarray], Mapping[str, int]], object]
"""Runs a kernel on arrays, at given sizes."""


def difference(func: Func, machine: Machine, sizes: Mapping[str, int] | None = None,
               engine: type[Engine] = Engine, lowered: Func | None = None,
               run: Run | None = None) -> float:
    """The largest absolute difference between Loop IR and Kernel IR, or what `run` does, NaN if one
    is not written."""
    lowered = lowered or to_kernel(func, machine)
    want, got = arguments(func, sizes or {}), arguments(func, sizes or {})
    loop.run_kernel(func, want)
    if run:
        run(got, sizes or {})
    else:
        kir.run_kernel_ir(lowered, got, engine)
    names = [v.name for v in (*func.params, *func.outs)]
    gaps = [np.abs(want[n].astype("f8") - got[n].astype("f8")).max(initial=0) for n in names]
    return float(np.max(gaps))  # NaN if there is one


def launches(kernels: Sequence[Func], on: Target, source: str = "") -> list[Run]:
    """What runs each of some kernels of Kernel IR on the device of a target, where one library has
    them all; `source` if it is not what the target emits for them."""
    alone = []
    for k in kernels:
        types = tuple(v.type for v in buffers_of(k) if isinstance(v.type, TensorType))
        step = Launched(k.name, tuple((n, 0) for n in range(len(types))), symbols_of(k))
        alone.append(Stretch(f"alone_{k.name}", types, (), symbols_of(k), (step,)))
    loaded = device(on).load(kernels, source or on.emit(kernels), alone)

    def run(kernel: Func, arrays: dict[str, np.ndarray], sizes: Mapping[str, int]) -> None:
        held = {v: arrays[v.name] for v in buffers_of(kernel)}
        halves = {v: (x.view(np.uint32) >> 16).astype(np.uint16) for v, x in held.items()
                  if dtype_of(v.type) == BF16}
        addresses = [halves.get(v, x).ctypes.data for v, x in held.items()]
        loaded[f"alone_{kernel.name}"](addresses, [sizes[s] for s in symbols_of(kernel)])
        for v, half in halves.items():
            held[v][...] = (half.astype(np.uint32) << 16).view(np.float32)

    return [partial(run, k) for k in kernels]


# ---- random mappings
SIZES = {
    "relu_mm": {"M": 13, "K": 21, "N": 18}, "headed": {"M": 7, "K": 21, "N": 18},
    "kept": {"M": 13, "K": 21, "N": 18}, "softmax": {"M": 5, "N": 70},
    "colsum": {"M": 37, "N": 20}, "norm_proj": {"M": 3, "K": 40, "N": 18},
    "rotate": {"H": 3, "D": 24, "L": 9}, "attend": {"H": 2, "G": 3, "D": 16, "L": 21},
    "online": {"H": 2, "G": 3, "D": 16, "L": 21}, "share": {"M": 5, "N": 22},
    "tally": {"M": 11, "N": 22, "L": 4}, "scatter": {"M": 11, "N": 22, "L": 4},
    "apart": {"M": 5, "N": 22, "K": 37}, "inplace": {"M": 5, "N": 70}}
SYMBOLIC: dict[str, dict[str, int | str]] = {
    "relu_mm": {"M": "s0", "K": "s1", "N": "s2"}, "softmax": {"M": "s0", "N": "s1"},
    "colsum": {"M": "s0", "N": "s1"}, "share": {"M": "s0", "N": "s1"},
    "online": {"H": 2, "G": 3, "D": 16, "L": "s1"}}
KINDS = (GRID, SEQ, THREAD, UNROLL, VECTOR)


class Draw:
    """Draws mappings for one kernel on one machine, with roles if asked."""

    def __init__(self, rng: random.Random, func: Func, machine: Machine, roles: bool = False):
        self.rng, self.func, self.machine, self.roles = rng, func, machine, roles
        self.levels = {kind: [x.name for x in machine.levels if x.kind == kind] for kind in KINDS}
        self.near = machine.spaces[0]
        self.mover = next(iter(machine.asynchronous), "") if machine.threaded else ""
        self.known = all(e.const_value is not None for e in loop.extents_of(func).values())

    def mapping(self) -> tile.Mapping | None:
        rng = self.rng
        axes = list(loop.extents_of(self.func))
        rng.shuffle(axes)
        lines = tuple(tile.AxisLine(a, self.splits(n)) for n, a in enumerate(axes))
        made = tile.Mapping(self.func.name, self.machine.name, lines, uses=self.uses(),
                            roles=self.crew() if self.roles else ())
        try:
            return self.places(made)
        except MappingError:
            return None

    def splits(self, number: int) -> tuple[tuple[str, int | None], ...]:
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
        if self.levels[THREAD] and (number < 2 if self.roles else rng.random() < 0.5):
            count = (16, 8)[number] if self.roles else rng.choice((2, 4, 8, 16))
            out.insert(rng.randint(1, len(out)), ("thread", count))
        return tuple(out)

    def crew(self) -> tuple[tile.Roles, ...]:
        known = self.machine.teams.roles if self.machine.teams else ()
        names = known if self.rng.random() < 0.5 else known[:2]
        return (tile.Roles(tuple((name, 1, 0) for name in names)),)

    def uses(self) -> tuple[tile.Use, ...]:
        found = contractions(self.func)
        atoms = [a.name for a in self.machine.atoms]
        if not found or self.rng.random() < 0.5:
            return ()
        return (tile.Use(self.rng.choice(found)[0].result.name, self.rng.choice(atoms)),)

    def places(self, made: tile.Mapping) -> tile.Mapping | None:
        rng, near, explicit = self.rng, self.near.name, self.near.explicit
        values = [v.name for op in self.func.body.ops for v in op.results]
        values += [] if explicit else [v.name for v in self.func.params]
        loops = [(x.axis, level) for x in made.axes for level, _ in x.splits
                 if level not in (*self.levels[UNROLL], *self.levels[VECTOR], "thread")]
        for name in rng.sample(values, min(len(values), rng.choice((0, 0, 1, 2)))):
            moved = bool(self.mover) and name not in made.names() and any(
                name == v.name for v in self.func.params)
            ring, pad = (rng.choice((1, 2, 3)), rng.choice((0, 1))) if moved else (1, 0)
            made = replace(made, places=(*made.places, tile.Place(
                (name,), near, *rng.choice(loops), None, pad, ring, self.mover if moved else "")))
        done = with_values(self.func, made, self.machine, near)
        if done and explicit:
            done = with_buffers(self.func, done, self.machine, near, rng.choice((1, 2, 3)))
        return self.carried(done) if done and not explicit and not self.machine.threaded else done

    def carried(self, made: tile.Mapping) -> tile.Mapping:
        """With a contraction that waits in a buffer, now and then."""
        found = contractions(self.func)
        if self.rng.random() >= 0.3 or not found:
            return made
        buffer = self.func.outs[0].name if self.func.outs else "cache"
        return replace(made, carries=(tile.Carry(found[0][0].result.name, buffer),))


def legal(rng: random.Random, func: Func, machine: Machine, count: int, roles: bool = False
          ) -> list[tile.Mapping]:
    """So many random mappings that are legal; fewer only where 300 draws give fewer."""
    drawn = (Draw(rng, func, machine, roles).mapping() for _ in range(300))
    return list(islice((m for m in drawn if m is not None and is_legal(func, m, machine)), count))


# ---- the fuzzer's part
def wrong(seed: int, name: str = "") -> Iterator[tuple[str, str]]:
    """(what is wrong, the kernel under its mapping) for a kernel, sizes and a machine by seed; if
    it is the target called `name`, its device runs the kernel too."""
    rng = random.Random(seed)
    title = rng.choice(list(SIZES))
    least = {"L": 4}  # positions in it are drawn below 4
    sizes: dict[str, int | str] = {n: x if n == "D" else rng.randint(least.get(n, 1), 2 * x)
                                   for n, x in SIZES[title].items()}
    if rng.random() < 0.3:
        sizes |= SYMBOLIC.get(title, {})
    drawn = rng.choice(list(TARGETS))
    on = target(name or drawn)
    func = kernel(title, "f32", "", on.name, **sizes)
    known = {f"s{n}": rng.randint(4, 40) for n in range(3)}
    for mapping in legal(rng, func, on.machine, 2):
        mapped = func.with_attr("mapping", mapping)
        if what := _wrong(mapped, on, known, bool(name)):
            shrunk = _least(mapped, lambda k: is_legal(func, k.attr("mapping"), on.machine)
                           and bool(_wrong(k, on, known, bool(name))))
            yield what, f"# sizes {known}\n{shrunk}\n"


def _wrong(mapped: Func, on: Target, known: Mapping[str, int], launched: bool) -> str:
    """How a mapped kernel fails, if it does."""
    try:
        lowered = to_kernel(mapped, on.machine)
        runs = [None, *(launches([lowered], on) if launched else [])]
        gaps = [difference(mapped, on.machine, known, Engine, lowered, run) for run in runs]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if (gap := float(np.max(gaps))) < 1e-3 else f"{mapped.name} is off by {gap:.3g}"


def _least(mapped: Func, fails: Callable[[Func], bool]) -> Func:
    """The kernel under as few statements of its mapping as still fail."""
    made: tile.Mapping = mapped.attr("mapping")
    for part in ("places", "carries", "uses", "roles"):
        for one in getattr(made, part):
            rest: Any = {part: tuple(x for x in getattr(made, part) if x is not one)}
            less = replace(made, **rest)
            if fails(mapped.with_attr("mapping", less)):
                return _least(mapped.with_attr("mapping", less), fails)
    return mapped
