// CUDA on the host: what the kernels of `cuda-emulated` call, and what watches their memory.
//
// Each CUDA thread is a fiber of one host thread; blocks run one after the other. A fiber runs until
// it must wait, so a kernel without barriers is a loop over its threads. Kernels are compiled with
// -fsanitize=thread, but without its library: the functions that are then called before each access
// to memory are defined below. They find the buffer that an address belongs to, and who used it.
//
// Races are found by logical time. What a thread does between two of its synchronizations has one
// stamp; a use of memory comes before what another thread does now if its stamp is at most `level`,
// which a barrier of the whole block raises, or at most what that thread knows of the first one's
// clock, which it learns at mbarriers, named barriers and __syncwarp. Shuffles order no memory.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS 1  // the headers of C, not those of C++ around them
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define HOST __attribute__((no_sanitize("thread"), noinline))
#define __device__
#define __global__ {} static  // extern "C" {} static void NAME: a function of C may have that name
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define LINE int line = __builtin_LINE()

extern "C" const char __ehdr_start[], _end[] __attribute__((visibility("hidden")));  // this library
namespace rung {
enum { THREADS = 1024, LANES = 32, MBARRIERS = 128, BUFFERS = 1024, NAMED = 2 };
const long GUARD = 4096, STACK = 64 << 10, FLIGHTS = 1 << 20;
typedef unsigned Clocks[THREADS];  // a stamp of each thread

struct Cell {  // what is known of one element: threads by number, from 1, and when
  unsigned writer, written, reader[2], read[2];  // the last writer, and two that have read it since
  unsigned flying;                               // who copies to it now, asynchronously
  bool atomic;                                   // the last write was
};
struct Buffer {
  const char *name;
  char *host;  // where the host has it; 0 for shared memory
  long bytes, grain;  // grain: of one element
  bool given, made;  // read from the host before the launch; written to it after
  char *at;
  Cell *cells;  // 0 where nothing is written
};
struct Meeting {  // where threads wait for each other: barriers, mbarriers and shuffles
  unsigned phase, all, missing;
  int line;
  Clocks clocks[2];  // of those that have come, by the phase's parity
  unsigned long values[2][LANES];
};
struct Flight {  // an asynchronous copy, or an arrival after those before it
  char *to;
  const char *from;
  int size, bytes;
  Meeting *arrival;
  unsigned group, stamp;
  Flight *next;
};
struct Thread {
  jmp_buf at;
  Meeting *meeting;  // while its phase has this parity, the thread waits
  unsigned parity, clock, group;
  const char *what;
  int line;
  Flight *first, *last;
};
static struct { unsigned x; } threadIdx, blockIdx, gridDim;
static Thread threads[THREADS];
static Meeting barriers[NAMED], shuffles[THREADS / LANES][LANES], mbarriers[MBARRIERS];
static Buffer buffers[BUFFERS];  // the first is shared memory
static struct { char *at, old[16]; long size; unsigned other; } contested;
static char message[400], *stacks, *shared_memory, *places[BUFFERS], *taken[2 * BUFFERS + 3];
static const char *kernel;
static Flight *flights;
static unsigned *known, tick, level;  // known: of the clock of [thread][other]
static int count, buffer_count, mbarrier_count, taken_count, flight_count, begun, ended, fibers;
static bool running;
static jmp_buf escape, scheduler;
static void (*body)(char *const *, const long *);
static const long *sizes;

HOST static void fault(const char *format, ...) {
  const int n = snprintf(message, sizeof message, "kernel %s, block %u, thread %u: ", kernel,
                         blockIdx.x, threadIdx.x);
  va_list rest;
  va_start(rest, format);
  vsnprintf(message + n, sizeof message - n, format, rest);
  _longjmp(escape, 1);
}

// --- logical time
HOST static unsigned number() { return blockIdx.x * count + threadIdx.x + 1; }
HOST static unsigned *clock_of(unsigned other) { return known + threadIdx.x * count + other; }
HOST static unsigned now() {
  const unsigned own = threads[threadIdx.x].clock;
  return own > level ? own : level + 1;
}
HOST static bool before(unsigned who, unsigned when) {
  if (!who || who == number()) return true;
  const unsigned block = (who - 1) / count, thread = (who - 1) % count;
  return block == blockIdx.x && (when <= level || when <= *clock_of(thread));
}
HOST static void learn(unsigned *mine, const unsigned *others) {
  for (int n = 0; n < count; n++) mine[n] = mine[n] < others[n] ? others[n] : mine[n];
}

// --- memory
enum Use { READ, WRITE, ATOMIC, COPY };
static const char *const USES[] = {"reads", "writes", "updates", "copies to"};

HOST static void race(Use use, const Buffer *b, long n, const char *other, unsigned who) {
  fault("%s byte %ld of %s, a race: thread %u of block %u %s it, in no order", USES[use],
        n * b->grain, b->name, (who - 1) % count, (who - 1) / count, other);
}
HOST static void settle() {  // the write that was contested must have changed nothing
  char *const at = contested.at;
  contested.at = 0;
  if (at && memcmp(at, contested.old, contested.size))
    fault("writes another value where thread %u of block %u wrote, in no order",
          (contested.other - 1) % count, (contested.other - 1) / count);
}
HOST static void use_cell(Buffer *b, long n, Use use) {
  Cell &c = b->cells[n];
  if (c.flying)
    fault("%s byte %ld of %s, to which thread %u still copies asynchronously", USES[use],
          n * b->grain, b->name, (c.flying - 1) % count);
  if (!before(c.writer, c.written) && !(use == ATOMIC && c.atomic)) {
    if (use != WRITE || c.atomic || b == buffers) race(use, b, n, "wrote", c.writer);
    contested.other = c.writer;
  }
  for (int k = 0; k < 2 && use != READ; k++)
    if (!before(c.reader[k], c.read[k])) race(use, b, n, "reads", c.reader[k]);
  if (use != READ) {
    c = {number(), now(), {0, 0}, {0, 0}, use == COPY ? number() : 0, use == ATOMIC};
  } else {
    const bool second = !before(c.reader[0], c.read[0]);
    c.reader[second] = number(), c.read[second] = now();
  }
}
HOST static void use(const void *address, long size, Use use, bool aligned = true) {
  if (!running) return;
  settle();
  char *const p = (char *)address;
  if ((p >= stacks && p < stacks + count * STACK) || (p >= __ehdr_start && p < _end)) return;
  Buffer *b = buffers, *const end = buffers + buffer_count;
  while (b < end && (p < b->at - GUARD || p >= b->at + b->bytes + GUARD)) b++;
  if (b == end) fault("%s %ld B at %p, out of range of all buffers", USES[use], size, address);
  const long at = p - b->at;
  if (at < 0 || at + size > b->bytes)
    fault("%s %ld B at byte %ld of %s, out of range: it has %ld B", USES[use], size, at, b->name,
          b->bytes);
  if (aligned && (long)p % size)
    fault("%s %ld B at byte %ld of %s, which is not aligned", USES[use], size, at, b->name);
  contested.other = 0;
  for (long n = at / b->grain; b->cells && n <= (at + size - 1) / b->grain; n++) use_cell(b, n, use);
  if (!contested.other || size > 16) return;
  contested.at = p, contested.size = size;
  memcpy(contested.old, p, size);
}
#pragma GCC visibility push(hidden)
#define HOOKS(SIZE)                                                                         \
  HOST void __tsan_read##SIZE(void *p) { use(p, SIZE, READ); }                              \
  HOST void __tsan_write##SIZE(void *p) { use(p, SIZE, WRITE); }                            \
  HOST void __tsan_unaligned_read##SIZE(void *p) { use(p, SIZE, READ, false); }             \
  HOST void __tsan_unaligned_write##SIZE(void *p) { use(p, SIZE, WRITE, false); }
extern "C" {
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
HOST void __tsan_read_range(void *p, long size) { use(p, size, READ, false); }
HOST void __tsan_write_range(void *p, long size) { use(p, size, WRITE, false); }
HOST void __tsan_func_entry(void *) {}
HOST void __tsan_func_exit() {}
HOST void __tsan_init() {}
}
#pragma GCC visibility pop

// --- meetings
HOST static unsigned come(Meeting &m, unsigned all, unsigned members, int line, unsigned stamp) {
  settle();
  if (!m.missing) m.all = all, m.missing = members, m.line = line;
  if (m.all != all || m.line != line)
    fault("divergent: comes to line %d, while others wait at line %d%s", line, m.line,
          m.all == all ? "" : " for other threads");
  if (stamp) {  // those who wait here come after what has this stamp
    if (*clock_of(threadIdx.x) < stamp) *clock_of(threadIdx.x) = stamp;
    learn(m.clocks[m.phase % 2], clock_of(0));
    threads[threadIdx.x].clock = ++tick;
  }
  const unsigned parity = m.phase % 2;
  if (!--m.missing) m.phase++;
  return parity;
}
HOST static void wait(Meeting &m, unsigned parity, const char *what, int line) {
  Thread &me = threads[threadIdx.x];
  settle();
  if (m.phase % 2 != parity) return;
  me.meeting = &m, me.parity = parity, me.what = what, me.line = line;
  if (!_setjmp(me.at)) _longjmp(scheduler, 1);
}
HOST static unsigned meet(Meeting &m, unsigned all, unsigned members, const char *what, int line,
                          unsigned stamp) {
  const unsigned parity = come(m, all, members, line, stamp);
  wait(m, parity, what, line);
  if (stamp) learn(clock_of(0), m.clocks[parity]);
  return parity;
}
HOST static void __syncthreads(LINE) {
  if (barriers[0].missing == 1) level = tick++;  // the last to come: all that was is before now
  meet(barriers[0], count, count, "at the barrier", line, 0);
}
template <int ALL> HOST static void team_sync(LINE) {
  meet(barriers[1], ALL, ALL, "at the barrier", line, now());
}
HOST static unsigned long exchange(unsigned mask, unsigned long bits, int from, int line,
                                   unsigned stamp = 0) {
  const int lane = threadIdx.x % LANES;
  Meeting &m = shuffles[threadIdx.x / LANES][__builtin_ctz(mask)];
  if (!(mask >> lane & 1) || !(mask >> from & 1))
    fault("shuffles with lane %d in line %d, but the mask is %x", from, line, mask);
  m.values[m.phase % 2][lane] = bits;
  const char *const what = "for lanes of the shuffle";
  return m.values[meet(m, mask, __builtin_popcount(mask), what, line, stamp)][from];
}
#define SHUFFLE(NAME, FROM, OUTSIDE)                                                          \
  template <class T> HOST static T NAME(unsigned mask, T x, int o, int width = LANES, LINE) { \
    const int lane = threadIdx.x % LANES, first = lane / width * width, from = FROM;          \
    unsigned long bits = 0;                                                                   \
    memcpy(&bits, &x, sizeof x);                                                              \
    bits = exchange(mask, bits, OUTSIDE ? lane : from, line);                                 \
    memcpy(&x, &bits, sizeof x);                                                              \
    return x;                                                                                 \
  }
SHUFFLE(__shfl_xor_sync, lane ^ o, from >= first + width)
SHUFFLE(__shfl_up_sync, lane - o, from < first)
SHUFFLE(__shfl_down_sync, lane + o, from >= first + width)
SHUFFLE(__shfl_sync, first + o % width, false)
HOST static void __syncwarp(unsigned mask = ~0u, LINE) {
  exchange(mask, 0, threadIdx.x % LANES, line, now());
}

// --- mbarriers, whose places hold their numbers, and asynchronous copies
HOST static void mbarrier_init(unsigned long *ring, int slots, int load, int math) {
  for (int n = 0; n < 2 * slots; n++) {
    use(ring + n, 8, WRITE);
    if (ring[n] >= mbarrier_count) ring[n] = mbarrier_count++;
    if (mbarrier_count > MBARRIERS) fault("has too many mbarriers");
    Meeting &m = mbarriers[ring[n]];
    m.phase = m.missing = 0, m.all = n < slots ? load : math;
  }
}
HOST static Meeting &mbarrier(unsigned long *slot) {
  use(slot, 8, READ);
  if (*slot >= mbarrier_count) fault("uses an mbarrier before it is made");
  return mbarriers[*slot];
}
HOST static void mbarrier_arrive(unsigned long *slot) {
  Meeting &m = mbarrier(slot);
  come(m, m.all, m.all, m.line, now());
}
HOST static void mbarrier_wait(unsigned long *slot, int parity, LINE) {
  Meeting &m = mbarrier(slot);
  wait(m, parity, parity ? "for parity 1 of the mbarrier" : "for parity 0 of the mbarrier", line);
  learn(clock_of(0), m.clocks[parity]);
}
HOST static void fly(char *to, const char *from, int size, int bytes, Meeting *arrival) {
  Thread &me = threads[threadIdx.x];
  Flight *const f = flights + flight_count++;
  if (flight_count > FLIGHTS) fault("has too many asynchronous copies");
  *f = {to, from, size, bytes, arrival, me.group, now()};
  (me.first ? me.last->next : me.first) = f;
  me.last = f;
}
template <int SIZE> HOST static void cp_async(void *to, const void *from, int bytes) {
  if (bytes) use(from, SIZE, READ);
  use(to, SIZE, COPY);
  fly((char *)to, (const char *)from, SIZE, bytes, 0);
}
HOST static void cp_async_arrive(unsigned long *slot) {
  fly(0, 0, 0, 0, &mbarrier(slot));
  threads[threadIdx.x].clock = ++tick;
}
HOST static void land() {  // the first flight of this thread
  Thread &me = threads[threadIdx.x];
  Flight *const f = me.first;
  me.first = f->next;
  if (Meeting *m = f->arrival) {
    come(*m, m->all, m->all, m->line, f->stamp);
    return;
  }
  memset(f->to, 0, f->size);
  memcpy(f->to, f->from, f->bytes);
  const long at = f->to - shared_memory, grain = buffers->grain;
  for (long n = at / grain; n * grain < at + f->size; n++) buffers->cells[n].flying = 0;
}
HOST static void cp_async_commit() { threads[threadIdx.x].group++; }
HOST static void cp_async_wait_all() { while (threads[threadIdx.x].first) land(); }
template <int PENDING> HOST static void cp_async_wait() {
  Thread &me = threads[threadIdx.x];
  while (me.first && me.first->group + PENDING < me.group) land();
}
template <int COUNT> static void set_registers_down() {}
template <int COUNT> static void set_registers_up() {}

// --- atomics, and functions that CUDA has and C has not
#define UPDATE(NAME, NEW)                                                                   \
  template <class T, class U> HOST static T NAME(T *p, U given) {                           \
    use(p, sizeof(T), ATOMIC);                                                              \
    const T old = *p, x = (T)given;                                                         \
    *p = NEW;                                                                               \
    return old;                                                                             \
  }
UPDATE(atomicAdd, old + x)
UPDATE(atomicMax, old < x ? x : old)
UPDATE(atomicMin, x < old ? x : old)
UPDATE(atomicExch, x)
template <class T> HOST static T atomicCAS(T *p, T was, T x) {
  use(p, sizeof(T), ATOMIC);
  const T old = *p;
  if (old == was) *p = x;
  return old;
}
template <class T> static T min(T a, T b) { return b < a ? b : a; }
template <class T> static T max(T a, T b) { return a < b ? b : a; }
static int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
static float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
static long long __double_as_longlong(double x) { return __builtin_bit_cast(long long, x); }
static double __longlong_as_double(long long x) { return __builtin_bit_cast(double, x); }
static float rsqrtf(float x) { return 1 / sqrtf(x); }
static double rsqrt(double x) { return 1 / sqrt(x); }

// --- launches
HOST static void fiber() {  // runs the threads that no other fiber has begun
  while (begun < count) {
    threadIdx.x = begun++;
    body(places, sizes);
    settle();
    ended++;
  }
  _longjmp(scheduler, 1);
}
HOST static void begin() {
  static ucontext_t made;
  getcontext(&made);
  made.uc_stack.ss_sp = stacks + STACK * fibers++;
  made.uc_stack.ss_size = STACK;
  makecontext(&made, fiber, 0);
  if (!_setjmp(scheduler)) setcontext(&made);
}
HOST static bool resume() {  // all threads that need no longer wait; false if there was none
  bool any = false;
  for (int n = 0; n < count; n++) {
    Thread &t = threads[n];
    if (!t.meeting || t.meeting->phase % 2 == t.parity) continue;
    any = true, t.meeting = 0, threadIdx.x = n;
    if (!_setjmp(scheduler)) _longjmp(t.at, 1);
  }
  return any;
}
HOST static bool land_late() {  // the next arrival of each thread; false if there was none
  bool any = false;
  for (threadIdx.x = 0; threadIdx.x < count; threadIdx.x++) {
    Flight *&first = threads[threadIdx.x].first, *f = first;
    while (f && !f->arrival) f = f->next;
    for (any |= f != 0; f && first != f->next;) land();
  }
  return any;
}
HOST static void deadlock() {
  int here = 0;
  for (threadIdx.x = 0; !threads[threadIdx.x].meeting; threadIdx.x++) {}
  const Thread &first = threads[threadIdx.x];
  for (int n = 0; n < count; n++) here += threads[n].meeting && threads[n].line == first.line;
  fault("deadlock: %d wait %s of line %d, %d elsewhere, and %d have ended", here, first.what,
        first.line, count - ended - here, ended);
}
HOST static void run_block() {
  const Buffer &shared = buffers[0];
  for (int n = 0; n < count; n++) threads[n] = Thread();
  memset(shared.at, 0xff, shared.bytes);
  memset(shared.cells, 0, (shared.bytes / shared.grain + 1) * sizeof(Cell));
  begun = ended = fibers = mbarrier_count = flight_count = 0;
  level = tick++;
  while (begun < count) begin();
  while (ended < count)
    if (!resume() && !land_late()) deadlock();
}
HOST static char *take(long bytes) {  // zeros, until the end of the launch
  return taken[taken_count++] = (char *)calloc(bytes, 1);
}
// Memory of the device for a buffer: full of NaN, between guards, aligned as the host's.
HOST static void bring(Buffer b) {
  const long start = (long)take(b.bytes + 2 * GUARD + 512) + GUARD;
  b.at = (char *)((start + 255) / 256 * 256 + (long)b.host % 256);
  if (b.made) b.cells = (Cell *)take((b.bytes / b.grain + 1) * sizeof(Cell));
  if (b.given) memcpy(b.at, b.host, b.bytes);
  else memset(b.at, 0xff, b.bytes);
  places[buffer_count] = b.at;
  buffers[buffer_count++] = b;
}
struct Pointer {  // to what a kernel says
  char *p;
  template <class T> operator T *() const { return (T *)p; }
};
// Runs `call(places, symbols)` for each thread. After a fault nothing runs until it is taken.
HOST static void launch(const char *name, void (*call)(char *const *, const long *), long blocks,
                        int block, long shared, int grain, const Buffer *given, int n,
                        const long *symbols) {
  if (message[0]) return;
  kernel = name, body = call, sizes = symbols, gridDim.x = blocks, count = block;
  buffer_count = 0;
  stacks = take(count * STACK), flights = (Flight *)take(FLIGHTS * sizeof(Flight));
  known = (unsigned *)take(4l * count * count);
  bring({"shared memory", 0, shared, grain, false, true});
  shared_memory = buffers[0].at;
  for (int k = 0; k < n; k++) bring(given[k]);
  running = true;
  if (!_setjmp(escape)) {
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) run_block();
    for (Buffer *b = buffers + 1; b <= buffers + n; b++)
      for (long at = 0; b->made && at < b->bytes; at += b->grain)
        if (b->cells[at / b->grain].writer) memcpy(b->host + at, b->at + at, b->grain);
  } else {
    memset(barriers, 0, sizeof barriers);
    memset(shuffles, 0, sizeof shuffles);
  }
  running = false;
  while (taken_count) free(taken[--taken_count]);
}
extern "C" HOST void take_fault(char *to) {
  strcpy(to, message);
  message[0] = 0;
}
}
using namespace rung;
