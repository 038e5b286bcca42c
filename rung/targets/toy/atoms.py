"""The toy's matrix unit."""

from rung.core.machine import Atom, Operand

MAC16 = Atom("mac16", """\
kernel mac16(a: f32[16,16], b: f32[16,16]) -> d: f32[16,16]
  c = contract add mul a[i,k], b[k,j] over k 16 : f32 over i,j acc f32
  d[i,j] = c
""", (Operand("scratchpad"), Operand("scratchpad")), "mac")
