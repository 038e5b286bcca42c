/* What `calibrate.py` measures with: $LANES floats in a vector, whose multiply-add is that of all
   kernels. Each function does a known number of operations, or reads a known number of bytes; the
   caller takes the time. */

typedef float V __attribute__((vector_size(4 * $LANES), aligned(4)));
typedef float W __attribute__((vector_size(4 * $LANES)));

$CHAINS

/* One chain, whose steps wait for each other. */
float chain(const float *x, long steps) {
  const W a = *(const V *)x, b = *(const V *)(x + $LANES);
  W c0 = *(const V *)x;
  for (long n = 0; n < steps; n++) c0 = $FMA(a, b, c0);
  return c0[0];
}

float chains_all(const float *x, long steps, long threads) {
  float total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total)
  for (long t = 0; t < threads; t++) total += chains(x, steps);
  return total;
}

/* A register tile of some rows and two vectors, as contractions have it. */
float tile(const float *x, long k, long times) {
  const float *w = x + 16 * k;
  float total = 0;
  for (long n = 0; n < times; n++) {
$TILE
    __asm__ volatile("" ::: "memory");
  }
  return total;
}

/* Reads `count` floats, some times. */
static float part(const float *x, long count, long times) {
  W c0 = {0}, c1 = {0}, c2 = {0}, c3 = {0}, c4 = {0}, c5 = {0}, c6 = {0}, c7 = {0};
  for (long n = 0; n < times; n++) {
    for (long i = 0; i + 8 * $LANES <= count; i += 8 * $LANES) {
      const V *v = (const V *)(x + i);
      c0 += v[0]; c1 += v[1]; c2 += v[2]; c3 += v[3];
      c4 += v[4]; c5 += v[5]; c6 += v[6]; c7 += v[7];
    }
    __asm__ volatile("" ::: "memory");
  }
  return (c0 + c1 + c2 + c3 + c4 + c5 + c6 + c7)[0];
}

float reads(const float *x, long count, long times) { return part(x, count, times); }

float reads_all(const float *x, long count, long times, long threads) {
  float total = 0;
  const long each = count / threads;
#pragma omp parallel for schedule(static) reduction(+ : total)
  for (long t = 0; t < threads; t++) total += part(x + t * each, each, times);
  return total;
}

/* Work on one core, and, with `threads`, all threads started and joined after each piece of it. */
float forks(const float *x, long steps, long times, long threads) {
  float total = 0;
  for (long n = 0; n < times; n++) {
    total += chains(x, steps);
    if (threads > 1) {
#pragma omp parallel for schedule(static) reduction(+ : total)
      for (long t = 0; t < threads; t++) total += x[t % 16];
    }
  }
  return total;
}
