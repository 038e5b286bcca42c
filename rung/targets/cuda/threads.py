"""Scans over the threads of a block, and atomic updates: device functions, and calls of them.

A scan over a thread loop is one shuffle for each power of two inside a warp; warps, and threads
that are further apart, exchange their totals through shared memory. Updates that the hardware has
no instruction for go by compare-and-swap.
"""

from __future__ import annotations

from rung.core.scalar import MONOIDS
from rung.core.types import F32, F64, I32, DType, dtype_of
from rung.kernel.ir import Prefix, Store
from rung.targets.c_family import Prelude

PREFIX = """\
// Scans x over COUNT threads that are STRIDE apart; BEFORE: without each thread's own x, so the
// first gets `none`. All are powers of 2.
template <int COUNT, int STRIDE, int THREADS, bool BEFORE, class T, class F>
static __device__ __forceinline__ T prefix(T x, F fold, T none, T *place) {
  constexpr int near = STRIDE >= 32 ? 1 : COUNT * STRIDE <= 32 ? COUNT : 32 / STRIDE;
  constexpr int far = COUNT / near, step = STRIDE * near;
  const int tid = threadIdx.x, mine = tid / STRIDE % near;
  const unsigned mask = (tid | 31) < THREADS ? 0xffffffffu : (1u << THREADS % 32) - 1;
#pragma unroll
  for (int o = 1; o < near; o *= 2) {
    const T y = __shfl_up_sync(mask, x, o * STRIDE);
    if (mine >= o) x = fold(y, x);
  }
  T sum = none;
  if (far > 1) {
    __syncthreads();
    place[tid] = x;
    __syncthreads();
    const int first = tid / (STRIDE * COUNT) * (STRIDE * COUNT) + tid % STRIDE;
    for (int n = 0; n < tid / step % far; n++)
      sum = fold(sum, place[first + n * step + step - STRIDE]);
  }
  if (BEFORE && near > 1) {
    const T y = __shfl_up_sync(mask, x, STRIDE);
    x = mine ? y : none;
  }
  return BEFORE && near == 1 ? sum : far == 1 ? x : fold(sum, x);
}
"""
TEAM_PREFIX = PREFIX.replace(" prefix(", " team_prefix(").replace(
    "__syncthreads()", "team_sync<THREADS>()")
ATOMIC = """\
// Folds x into *at in one step, by the bits W of what was there.
template <class W, class T, class F>
static __device__ __forceinline__ void atomic_fold(T *at, T x, F fold) {
  W was = *(W *)&x, found = atomicCAS((W *)at, was, was);
  while (true) {
    was = found;
    const T next = fold(*(T *)&was, x);
    if (*(W *)&next == was) return;
    found = atomicCAS((W *)at, was, *(W *)&next);
    if (found == was) return;
  }
}
"""


def helpers(source: str) -> str:
    """The definitions that the calls in a source need."""
    found = {"prefix<": PREFIX, "team_prefix<": TEAM_PREFIX, "atomic_fold<": ATOMIC}
    return "".join(text for name, text in found.items() if name in source)


def fold_text(p: Prelude, monoid: str, dtype: DType) -> str:
    """A lambda that folds two elements."""
    kind, step = p.type(dtype), p.call(MONOIDS[monoid].combine, dtype, 1, ["a", "b"])
    return f"[](const {kind} a, const {kind} b) {{ return {step}; }}"


def prefix_text(p: Prelude, op: Prefix, x: str, shape: tuple[int, int, int], place: str,
                team: bool) -> str:
    """A call of `prefix`; `shape` is the count of threads, their stride and those of the block."""
    dtype, name = dtype_of(op.x.type), "team_prefix" if team else "prefix"
    numbers = ", ".join(map(str, (*shape, "true" if op.exclusive else "false")))
    none = p.constant(MONOIDS[op.monoid].identity(dtype), dtype)
    return f"{name}<{numbers}>({x}, {fold_text(p, op.monoid, dtype)}, {none}, {place})"


def atomic_text(p: Prelude, op: Store, pointer: str, value: str) -> str:
    """An atomic update: of integers and in sums an instruction, else by compare-and-swap, which
    has NaN as torch has it."""
    dtype = dtype_of(op.buf.type)
    if op.combine == "add" and dtype in (F32, F64, I32):
        return f"atomicAdd({pointer}, {value});"
    if op.combine == "add":
        word = "unsigned long long"
        return f"atomicAdd(({word} *)({pointer}), ({word})({value}));"
    if op.combine in ("max", "min") and not dtype.is_float:
        word = "int" if dtype is I32 else "long long"
        return f"atomic{op.combine.title()}(({word} *)({pointer}), ({word})({value}));"
    word = "unsigned" if dtype.bytes == 4 else "unsigned long long"
    return f"atomic_fold<{word}>({pointer}, {value}, {fold_text(p, op.combine, dtype)});"
