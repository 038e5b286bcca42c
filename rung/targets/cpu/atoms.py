"""Instructions that contractions run on, on CPUs that have them.

A meaning has the operands' types, which may be narrower than the sum's; a layout says what one lane
takes at once. Text is a statement of C on c, a and b, vectors of 32-bit words.
"""

from __future__ import annotations

from dataclasses import dataclass

from rung.core.layout import Panel
from rung.core.machine import Atom, Operand


def _dot(c: str, a: str) -> str:
    return f'__asm__("vpdpbusd %2, %1, %0" : "+v"({c}) : "v"({a}), "v"(b));'


_ONES = Operand("reg", Panel((("k", 1),)))
_PAIRS = Operand("reg", Panel((("k", 2),)))
_FOURS = Operand("reg", Panel((("k", 4),)))

FMA = Atom("fma", """\
kernel fma(a: f32[1,1], b: f32[1,1]) -> d: f32[1,1]
  c = contract add mul a[i,k], b[k,j] over k 1 : f32 over i,j acc f32
  d[i,j] = c
""", (Operand("reg"), Operand("reg")))

def fma4(lanes: int) -> Atom:
    """Four fused multiply-adds one after the other, on as many columns as a register has lanes: for
    operands that lie along the reduced axis, and become panels four elements at a time."""
    return Atom("fma4", f"""\
kernel fma4(a: f32[1,4], b: f32[4,{lanes}]) -> d: f32[1,{lanes}]
  c = contract add mul a[i,k], b[k,j] over k 4 : f32 over i,j acc f32
  d[i,j] = c
""", (_ONES, _ONES), text='__asm__("vfmadd231ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));')


VDPBF16PS = Atom("vdpbf16ps", """\
kernel vdpbf16ps(a: bf16[1,2], b: bf16[2,16]) -> d: f32[1,16]
  c = contract add mul f32(a[i,k]), f32(b[k,j]) over k 2 : f32 over i,j acc f32
  d[i,j] = c
""", (_PAIRS, _PAIRS), "bf16", text='__asm__("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));')


VPDPBUSD = Atom("vpdpbusd", """\
kernel vpdpbusd(a: u8[1,4], b: i8[4,16]) -> d: i32[1,16]
  c = contract add mul i32(a[i,k]), i32(b[k,j]) over k 4 : i32 over i,j acc i32
  d[i,j] = c
""", (_FOURS, _FOURS), "i8", text=_dot("c", "a"))

# a + 128 is unsigned, and 128 times the sums of b's columns are too much
VPDPBUSD_S8 = Atom("vpdpbusd_s8", """\
kernel vpdpbusd_s8(a: i8[1,4], b: i8[4,16]) -> d: i32[1,16]
  c = contract add mul i32(a[i,k]), i32(b[k,j]) over k 4 : i32 over i,j acc i32
  d[i,j] = c
""", (_FOURS, _FOURS), "i8", text=_dot("c", "a ^ (int)0x80808080"),
    excess=_dot("c", "($i32){0} + (int)0x80808080"))


@dataclass(frozen=True)
class Extension:
    """An atom that some CPUs have beside those of their machine."""

    feature: str  # what the CPU reports
    flag: str  # what lets the compiler use it
    atom: Atom


EXTENSIONS = (Extension("avx512_bf16", "-mavx512bf16", VDPBF16PS),
              Extension("avx512_vnni", "-mavx512vnni", VPDPBUSD),
              Extension("avx512_vnni", "-mavx512vnni", VPDPBUSD_S8))
ATOMS = {x.name: x for x in (fma4(16), *(x.atom for x in EXTENSIONS))}
