// The only file that uses OpenMP. The library is compiled with -fopenmp and linked without libgomp: the symbols resolve
// to the libgomp that torch has loaded, so there is one pool, and the threads that run torch's operators run these.
#include "threads.h"

#include <cstdlib>

namespace ray_lora {

void run_on_threads(int threads, void (*body)(void*), void* context) {
#pragma omp parallel num_threads(threads)
  body(context);
}

void wait_for_all() {
#pragma omp barrier
}

namespace {
struct Buffers {
  void* memory[kNumScratch] = {};
  size_t size[kNumScratch] = {};
  ~Buffers() {
    for (void* m : memory) std::free(m);
  }
};
thread_local Buffers buffers;
}  // namespace

void* scratch(Scratch which, size_t bytes) {
  Buffers& mine = buffers;
  if (mine.size[which] < bytes) {
    std::free(mine.memory[which]);
    const size_t size = (bytes + bytes / 2 + 4095) & ~size_t{4095};
    mine.memory[which] = std::aligned_alloc(4096, size);
    mine.size[which] = mine.memory[which] ? size : 0;
    if (!mine.memory[which]) std::abort();
  }
  return mine.memory[which];
}

}  // namespace ray_lora
