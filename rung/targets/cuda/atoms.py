"""Instructions of `cuda.sm90` that contractions run on."""

from rung.core.machine import Atom, Operand

FFMA = Atom("ffma", """\
kernel ffma(a: f32[1,1], b: f32[1,1]) -> d: f32[1,1]
  c = contract add mul a[i,k], b[k,j] over k 1 : f32 over i,j acc f32
  d[i,j] = c
""", (Operand("reg"), Operand("reg")))
