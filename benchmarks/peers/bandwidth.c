// What the machine's memory gives to readers: bandwidth THREADS MIB REPEATS prints the best bytes a second of all
// threads together. Huge pages and a prefetch far ahead, since anything less measures the reader.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#define AHEAD 2048

static const char *memory;
static size_t share;
static volatile uint64_t sink;

static void *read_share(void *number) {
  const char *from = memory + (size_t)number * share;
  uint64_t sums[16] = {0};
  for (size_t i = 0; i < share; i += 256) {
    for (int line = 0; line < 4; ++line) __builtin_prefetch(from + i + AHEAD + 64 * line);
    const uint64_t *words = (const uint64_t *)(from + i);
    for (int part = 0; part < 2; ++part)
      for (int k = 0; k < 16; ++k) sums[k] += words[16 * part + k];
  }
  for (int k = 0; k < 16; ++k) sink += sums[k];
  return NULL;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(int count, char **arguments) {
  if (count != 4) return 2;
  const size_t num_threads = strtoul(arguments[1], NULL, 10), bytes = strtoul(arguments[2], NULL, 10) << 20;
  const int repeats = atoi(arguments[3]);
  pthread_t threads[256];
  char *buffer = aligned_alloc(2 << 20, bytes);
  if (!buffer || !num_threads || num_threads > 256) return 1;
  madvise(buffer, bytes, MADV_HUGEPAGE);
  for (size_t i = 0; i < bytes; i += 64) buffer[i] = (char)i;
  memory = buffer;
  share = bytes / num_threads / 256 * 256;
  double best = 0;
  for (int r = 0; r < repeats; ++r) {
    const double start = now();
    for (size_t i = 0; i < num_threads; ++i) pthread_create(threads + i, NULL, read_share, (void *)i);
    for (size_t i = 0; i < num_threads; ++i) pthread_join(threads[i], NULL);
    const double rate = (double)(share * num_threads) / (now() - start);
    if (rate > best) best = rate;
  }
  printf("%.0f\n", best);
  return 0;
}
