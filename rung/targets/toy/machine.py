"""The toy's machine table: invented, and small enough that tiling is never optional.

Lanes compute on nothing in DRAM: what they read or write stands in the scratchpad, where DMA puts
it; the scalar unit reads and writes single elements where they lie. `atom` splits are the rows and
depth of a matrix instruction, `lane` its columns. DMA has a queue for each direction, `load` and
`store`, beside the one of all units, `math`.
"""

from __future__ import annotations

from rung.core.machine import GRID, SEQ, UNROLL, VECTOR, Level, Machine, Rates, Space, Teams
from rung.targets.toy.atoms import MAC16

TOY = Machine(
    "toy",
    (Level("core", GRID, 1), Level("seq", SEQ), Level("pipe", SEQ), Level("atom", UNROLL),
     Level("lane", VECTOR, 16)),
    (Space("scratchpad", 64 << 10, 64e9, "core", explicit=True),
     Space("acc", 64 << 10, 256e9, "core"), Space("dram", 1 << 34, 8e9)),
    Rates(8e9, 64e9, {"f32": 16e9, "f64": 4e9, "i64": 4e9, "i32": 16e9, "mac": 256e9}, 1e-6),
    16, 64, ("dma",), (MAC16,), asynchronous=("dma",),
    teams=Teams(("load", "math", "store")))
MACHINES = {TOY.name: TOY}
