"""The machine table of `cuda.sm90`.

Rates were measured on one H200 (copy 4.28 TB/s, L2 9 TB/s, a launch 2.6 us); FFMA at 246 a clock,
SM and 1.7 GHz. `thread` stands for warps and lanes: its steps run in lockstep as far as barriers
and shuffles make them. `unroll` is a loop that is written out, `reg` is copies in registers. Roles
are made of warpgroups, which alone can take registers over from each other.
"""

from __future__ import annotations

from rung.core.machine import GRID, SEQ, THREAD, UNROLL, Flow, Level, Machine, Rates, Space, Teams
from rung.targets.cuda.atoms import FFMA

SMS = 132
SHARE = 1 + 0.8 * (SMS - 1)  # rates are a core's; the memory of n cores counts 1 + 0.8(n - 1)

ATOMICS = tuple((monoid, dtype) for monoid in ("add", "max", "min")
                for dtype in ("f32", "f64", "i32", "i64"))
SM90 = Machine(
    "cuda.sm90",
    (Level("grid", GRID), Level("thread", THREAD, 1024), Level("seq", SEQ), Level("pipe", SEQ),
     Level("unroll", SEQ), Level("reg", UNROLL)),
    (Space("shared", 232448, 29e12 / SMS, "grid"),
     Space("hbm", 141 << 30, 4.28e12 / SHARE, atomics=ATOMICS)),
    Rates(4.28e12 / SHARE, 9e12 / SHARE, {"f32": 55e12 / SMS, "f64": 27e12 / SMS,
                                          "i64": 7e12 / SMS, "i32": 28e12 / SMS}, 2.6e-6,
          forms=("reciprocal", "erfp1", "exp_approx", "i32", "fma"), flow=Flow(16, 32 << 10, 32),
          part=8),
    1, 255, ("ld/st", "cp.async"), (FFMA,), cores=SMS, asynchronous=("cp.async",),
    teams=Teams(("load", "math"), threads=128, most=1024, registers=65536))
MACHINES = {SM90.name: SM90}
