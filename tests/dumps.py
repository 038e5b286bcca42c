"""Dumps of every rung that several tests read, and a generator of random ones."""

from __future__ import annotations

import random

from rung.core.op import Func
from rung.core.parse import parse_module
from rung.kernel import ir as kernel
from rung.loop import ir as loop
from rung.program import ir as program
from rung.tile.mapping import parse_mapping

VOCABULARIES = {v.kind: v for v in (program.VOCABULARY, loop.VOCABULARY, kernel.VOCABULARY)}
RULES = {"program": program.verify_program, "kernel": loop.verify_kernel,
         "kernel-ir": kernel.verify_kernel_ir}

RELU_MM = """\
kernel relu_mm(x: f32[504,512], bias: f32[512], w: f32[512,512]) -> y: f32[504,512]
  a = x[i,k] + bias[k] : f32 over i,k
  mm = contract add mul a, w[k,j] over k 512 : f32 over i,j acc f32
  y[i,j] = relu(mm)"""

RELU_MM_MAP = """\
map relu_mm on cpu.avx512
  k: l3 *, seq 256
  j: l2 *, reg 2, simd 16
  i: l1 *, reg 14
  place a in l2 at k.l3 as panel(i 14)
  carry mm in y"""

SOFTMAX = """\
kernel softmax(x: f32[512,2048]) -> y: f32[512,2048]
  m = fold max x[i,j] over j 2048 : f32 over i acc f32
  e = exp(x[i,j] - m) : f32 over i,j
  s = fold add e over j 2048 : f32 over i acc f32
  y[i,j] = e / s"""

ONLINE = """\
kernel online(x: f32[s0,s1]) -> y: f32[s0,s1]
  m, s = fold softmax x[i,j] over j s1 : f32 over i, f32 over i acc f32
  y[i,j] = exp(x[i,j] - m) / s"""

PADDED = """\
kernel padded(x: bf16[s0,7], ids: i64[s0], s7: index) -> y: bf16[s0,9], z: bool[s0,9]
  axes i s0, j 9
  t = f32(x[ids[i],j - 1 | j - 1, 7 - j else -inf]) : f32 over i,j
  u = t * (t - (t - 1.0)) + f32((2)) - f64_(t) : f32 over i,j
  y[i,j] = round_bf16(u)
  z[i,j] = (t < 0.5) & (index(i + n) == 3) | not(true)"""
PADDED = PADDED.replace(" - f64_(t)", "").replace("j - 1", "j-1").replace("7 - j", "7-j").replace(
    "i + n", "i+s7")

COLSUM = """\
kernel-ir colsum(x: f32[512,s0]) -> y: f32[s0]
  unroll r<2, q<4
  buf = alloc : l1 f32[2,64]
  for jb in 0..(s0+63)//64 at core
    c0 = fill 0.0 : f32x16 over q<4,r<2
    c = for i in 0..256 carry c1 = c0 : f32x16 over q<4,r<2
      yield c1 + x[2*i+r,64*jb+lane+16*q : 16 | s0-64*jb-16*q-lane-1]
    t = combine add c by r : f32x16 over q<4
    if nonneg [s0-64*jb-64]
      y[64*jb+lane+16*q : 16] = t
    else
      buf[0,lane+16*q : 16] = t
      barrier l1
      for k in 0..s0-64*jb cap 64
        y[64*jb+k] = buf[0,k]"""
COLSUM = COLSUM.replace("64*jb+lane+16*q : 16", "64*jb+16*q : 16").replace("[0,lane+16*q : 16]",
                                                                          "[0,16*q : 16]")

LAYER = """\
program layer(x: f32[s0,512] input, w: f32[512,512] param, cache: f32[8,512] mutated, s0: index)
  one = const_ : f32
  t = call aten.mm.default(x, w) : f32[s0,512]
  v, g = call aten.var_mean.correction(t, [1], correction=0.0, keepdim=true, out=None, (2.0), \
size(2*s0), f32, "a b") effect rng : f32[s0,1], f32[s0,1]
  n = composite aten.relu.default(t) : f32[s0,512]
    yield relu(t)
  h = reduce max n over [1] : f32[s0] acc f32
  f = full 1 [4] i64 : i64[4]
  p = iota s0 : i64[s0]
  check p in 0..8 else IndexError "index out of range"
  q = index n [i,j] of [512,s0+2] -> [j-1,i] where j-1,s0-j else -inf : f32[512,s0+2]
  c = contract add mul t [i,k], w [k,j] -> [i,j] : f32[s0,512] acc f32
  g1 = gather w dim 0 at p : f32[s0,512]
  d = concat c, g1 dim 1 : f32[s0,1024]
  k = kernel softmax(d, cache) in place cache : f32[8,512]
  l = apply block(k) : f32[8,512]
  write cache <- l
  return h, v, g"""
LAYER = LAYER.replace("  one = const_ : f32\n", "")

ALL = [RELU_MM, RELU_MM + "\n" + RELU_MM_MAP, SOFTMAX, ONLINE, PADDED, COLSUM, LAYER]


def parse(text: str) -> Func:
    """The one function in `text`."""
    (func,) = parse_module(text, VOCABULARIES, parse_mapping)
    return func


def random_kernel(seed: int) -> str:
    """A kernel of random loads, folds and expressions, that verifies."""
    rng = random.Random(seed)
    axes = {"i": 3, "j": 4, "k": 2}
    names = ["a", "b", "c"]
    shapes = {n: rng.sample(list(axes), rng.randint(1, 3)) for n in names}
    params = ", ".join(f"{n}: f32[{','.join(str(axes[a]) for a in s)}]" for n, s in shapes.items())
    lines, values = [], dict(shapes)

    def leaf() -> tuple[str, list[str]]:
        name = rng.choice(list(values))
        text = f"{name}[{','.join(shapes[name])}]" if name in shapes else name
        return (text, values[name]) if rng.random() < 0.8 else (f"{rng.randint(0, 9)}.5", [])

    def tree(depth: int) -> tuple[str, list[str]]:
        if depth == 0:
            return leaf()
        (left, l_axes), (right, r_axes) = tree(depth - 1), tree(rng.randint(0, depth - 1))
        forms = ["({} + {})", "({} * {})", "({} - {})", "max({}, {})", "fma({}, {}, 1.0)"]
        return rng.choice(forms).format(left, right), list(dict.fromkeys([*l_axes, *r_axes]))

    for n in range(rng.randint(2, 6)):
        text, over = tree(rng.randint(1, 3))
        if not over:
            continue
        value = f"v{n}"
        if rng.random() < 0.4:
            axis = rng.choice(over)
            lines.append(f"  {value} = fold {rng.choice(['add', 'max'])} {text} over {axis} "
                         f"{axes[axis]} : TYPE acc f32")
            over = [a for a in over if a != axis]
        else:
            lines.append(f"  {value} = {text} : TYPE")
        lines[-1] = lines[-1].replace("TYPE", f"f32 over {','.join(over)}" if over else "f32")
        values[value] = over
    last, over = next(((n, o) for n, o in reversed(values.items()) if o), ("", []))
    stored = f"{last}[{','.join(shapes[last])}]" if last in shapes else last
    lines.append(f"  y[{','.join(over)}] = {stored}")
    sizes = ",".join(str(axes[a]) for a in over)
    return "\n".join([f"kernel random({params}) -> y: f32[{sizes}]",
                      "  axes " + ", ".join(f"{a} {n}" for a, n in axes.items()), *lines])
