"""Device functions that the emitted kernels call: the only inline PTX, and folds over threads.

Without the PTX the source runs on what gives functions of the same names, as the emulator does.
"""

from __future__ import annotations

COPIES = """\
template <int BYTES>
static __device__ __forceinline__ void cp_async(void *to, const void *from, int bytes) {
  const unsigned at = (unsigned)__cvta_generic_to_shared(to);
  if (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(at), "l"(from), "r"(bytes));
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :: "r"(at), "l"(from), "n"(BYTES), "r"(bytes));
}
static __device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int PENDING> static __device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}
"""
ROLES = """\
// An mbarrier for each full slot of a ring, then one for each free slot.
static __device__ __forceinline__ void mbarrier_init(unsigned long *ring, int slots, int load,
                                                     int math) {
  for (int n = 0; n < 2 * slots; n++) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(ring + n);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                 :: "r"(at), "r"(n < slots ? load : math) : "memory");
  }
}
static __device__ __forceinline__ void mbarrier_arrive(unsigned long *slot) {
  const unsigned at = (unsigned)__cvta_generic_to_shared(slot);
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at) : "memory");
}
static __device__ __forceinline__ void mbarrier_wait(unsigned long *slot, int parity) {
  const unsigned at = (unsigned)__cvta_generic_to_shared(slot);
  unsigned done = 0;
  while (!done)
    asm volatile("{\\n.reg .pred p;\\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\\n"
                 "selp.u32 %0, 1, 0, p;\\n}" : "=r"(done) : "r"(at), "r"(parity) : "memory");
}
// Arrives when all that this thread copies has arrived.
static __device__ __forceinline__ void cp_async_arrive(unsigned long *slot) {
  const unsigned at = (unsigned)__cvta_generic_to_shared(slot);
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(at) : "memory");
}
static __device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
template <int THREADS> static __device__ __forceinline__ void team_sync() {
  asm volatile("bar.sync 1, %0;" :: "n"(THREADS) : "memory");
}
template <int COUNT> static __device__ __forceinline__ void set_registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT));
}
template <int COUNT> static __device__ __forceinline__ void set_registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT));
}
"""
COMBINE = """\
// Folds x over COUNT threads that are STRIDE apart; every thread gets the result. All powers of 2.
template <int COUNT, int STRIDE, int THREADS, class T, class F>
static __device__ __forceinline__ T combine(T x, F fold, T *place) {
  constexpr int near = STRIDE >= 32 ? 1 : COUNT * STRIDE <= 32 ? COUNT : 32 / STRIDE;
  const int tid = threadIdx.x;
  const bool whole = THREADS % 32 == 0 || (tid | 31) < THREADS;  // all lanes of this warp are there
  const unsigned mask = whole ? 0xffffffffu : (1u << THREADS % 32) - 1;
#pragma unroll
  for (int o = STRIDE; o < near * STRIDE; o *= 2) x = fold(x, __shfl_xor_sync(mask, x, o));
  if (near == COUNT) return x;
  constexpr int far = COUNT / near, step = STRIDE * near;
  const int at = STRIDE > 1 ? tid : tid / 32;  // lanes that have the same need one place
  __syncthreads();
  if (STRIDE > 1 || tid % 32 == 0) place[at] = x;
  __syncthreads();
  if (STRIDE == 1) {
    x = place[tid / COUNT * far + tid % far];
#pragma unroll
    for (int o = 1; o < far; o *= 2) x = fold(x, __shfl_xor_sync(mask, x, o));
    return x;
  }
  const int first = tid / (STRIDE * COUNT) * (STRIDE * COUNT) + tid % step;
  x = place[first];
#pragma unroll
  for (int n = 1; n < far; n++) x = fold(x, place[first + n * step]);
  return x;
}
"""
WIDE = """\
// Neighbouring elements that one access takes; those of 8 and 16 bits come in words.
template <class T, int N> struct alignas(N * sizeof(T)) Wide { T at[N]; };
"""
WORDS = """\
static __device__ __forceinline__ unsigned word2(unsigned short a, unsigned short b) {
  return a | (unsigned)b << 16;
}
static __device__ __forceinline__ unsigned word4(unsigned char a, unsigned char b, unsigned char c,
                                                 unsigned char d) {
  return a | b << 8 | c << 16 | (unsigned)d << 24;
}
"""
TEAM_COMBINE = COMBINE.replace("combine(", "team_combine(").replace(
    "__syncthreads()", "team_sync<THREADS>()")
PREFIX = """\
// Scans x over COUNT threads that are STRIDE apart; BEFORE: without each thread's own x, so the
// first gets `none`. All are powers of 2. Warps exchange their totals through shared memory.
template <int COUNT, int STRIDE, int THREADS, bool BEFORE, class T, class F>
static __device__ __forceinline__ T prefix(T x, F fold, T none, T *place) {
  constexpr int near = STRIDE >= 32 ? 1 : COUNT * STRIDE <= 32 ? COUNT : 32 / STRIDE;
  constexpr int far = COUNT / near, step = STRIDE * near;
  const int tid = threadIdx.x, mine = tid / STRIDE % near;
  const bool whole = THREADS % 32 == 0 || (tid | 31) < THREADS;
  const unsigned mask = whole ? 0xffffffffu : (1u << THREADS % 32) - 1;
#pragma unroll
  for (int o = 1; o < near; o *= 2) {
    const T y = __shfl_up_sync(mask, x, o * STRIDE);
    if (mine >= o) x = fold(y, x);
  }
  T sum = none;
  if (far > 1 && STRIDE == 1) {
    const int warp = tid / 32 % far;
    __syncthreads();
    if (tid % 32 == 31) place[tid / 32] = x;
    __syncthreads();
    T all = place[tid / COUNT * far + tid % far];  // each warp scans the totals of all
#pragma unroll
    for (int o = 1; o < far; o *= 2) {
      const T y = __shfl_up_sync(mask, all, o);
      if (tid % 32 >= o) all = fold(y, all);
    }
    sum = __shfl_sync(mask, all, warp ? warp - 1 : 0);
    if (!warp) sum = none;
  } else if (far > 1) {
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
PTX = ((" cp_async", COPIES), (" mbarrier_", ROLES))
PLAIN = ((" combine<", COMBINE), (" team_combine<", TEAM_COMBINE), ("Wide<", WIDE),
         ("{word", WORDS), (" prefix<", PREFIX), (" team_prefix<", TEAM_PREFIX),
         (" atomic_fold<", ATOMIC))
"""What in the text of kernels asks for functions, and the functions."""


def helpers(kernels: str, ptx: bool = True) -> str:
    """The functions that the text of some kernels calls; `ptx` says whether with those that are
    inline PTX."""
    return "".join(text for call, text in (*(PTX if ptx else ()), *PLAIN) if call in kernels)
