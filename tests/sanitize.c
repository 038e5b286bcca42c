// Runs kernels on the cases that come from stdin, each buffer in a place of exactly its size.
// A case is: kernel, number of buffers, number of sizes, sizes, and for each buffer bytes and data.
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { MOST = 64 };
typedef void (*Call)(void **buffers, const long *sizes);
extern const Call calls[];

#ifdef GUARD // the buffer ends where a page begins that nobody may touch
static void *place(long bytes) {
  long page = 4096, whole = (bytes + page - 1) / page * page;
  char *start = mmap(0, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  mprotect(start + whole, page, PROT_NONE);
  return start + whole - bytes;
}
#else // AddressSanitizer knows the block's bounds; one of no bytes is the end of another
static void *place(long bytes) { return bytes ? malloc(bytes) : (char *)malloc(16) + 16; }
#endif

static long number(void) {
  long n;
  if (fread(&n, sizeof n, 1, stdin) != 1) exit(0);
  return n;
}

int main(void) {
  for (;;) {
    long kernel = number(), count = number(), symbols = number(), sizes[MOST], bytes[MOST];
    void *buffers[MOST];
    for (long i = 0; i < symbols; i++) sizes[i] = number();
    for (long i = 0; i < count; i++) {
      buffers[i] = place(bytes[i] = number());
      if (fread(buffers[i], 1, bytes[i], stdin) != (size_t)bytes[i]) return 2;
    }
    calls[kernel](buffers, sizes);
    for (long i = 0; i < count; i++) fwrite(buffers[i], 1, bytes[i], stdout);
    fflush(stdout);
  }
}
