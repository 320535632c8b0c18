// The sum over the ranks of one host, through memory that they share: two copies and a flag, no system call.
//
// Region: one cache line with a round number for each rank, then two sets of one slot for each rank. In round r a rank
// writes its slot of set r % 2, publishes r, waits until all have, and adds up the slots in the order of the ranks, so
// that every rank gets the same bits. A set is written again two rounds later; a rank is there only after all have
// published r + 1, which they do once they have read round r.
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "threads.h"

#define RL_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int64_t kLine = 64;
constexpr int kSpins = 2000;   // some microseconds; then others may have the core

bool wait_for(const std::atomic<uint64_t>& flag, uint64_t round, double timeout_s) {
  const auto has_come = [&] { return flag.load(std::memory_order_acquire) >= round; };
  if (ray_lora::spin(kSpins, has_come)) return true;
  const auto begin = std::chrono::steady_clock::now();
  while (!has_come()) {
    sched_yield();
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
    if (waited.count() > timeout_s) return false;
  }
  return true;
}

}  // namespace

// Bytes of a region for `size` ranks and slots of `slot` floats.
RL_API int64_t rl_all_reduce_bytes(int64_t size, int64_t slot) {
  return size * kLine + 2 * size * slot * int64_t(sizeof(float));
}

// x[count] becomes the sum over the ranks. `round` is this rank's own, 0 at first, as the region is.
// Returns 0, or 1 if a rank did not come within the time.
RL_API int rl_all_reduce(char* region, float* x, int64_t count, int64_t rank, int64_t size, int64_t slot,
                         uint64_t* round, double timeout_s) {
  float* const slots = reinterpret_cast<float*>(region + size * kLine);
  const auto flag = [&](int64_t r) { return reinterpret_cast<std::atomic<uint64_t>*>(region + r * kLine); };
  for (int64_t first = 0; first < count; first += slot) {
    const int64_t n = count - first < slot ? count - first : slot;
    float* const set = slots + int64_t(++*round % 2) * size * slot;
    std::memcpy(set + rank * slot, x + first, n * sizeof(float));
    flag(rank)->store(*round, std::memory_order_release);
    for (int64_t r = 0; r < size; r++)
      if (!wait_for(*flag(r), *round, timeout_s)) return 1;
    float* const out = x + first;
    std::memcpy(out, set, n * sizeof(float));
    for (int64_t r = 1; r < size; r++) {
      const float* const part = set + r * slot;
      for (int64_t i = 0; i < n; i++) out[i] += part[i];
    }
  }
  return 0;
}
