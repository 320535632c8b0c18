// Threads and scratch memory.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ray_lora {

// Runs body(context) on `threads` threads, the caller being one of them; on the caller alone while another thread's body
// has the team. Ends the process where there is no memory or no thread for the team: what waited for others would hang.
void run_on_threads(int threads, void (*body)(void*), void* context) noexcept;

// Waits until every thread of the running body has arrived.
void wait_for_all();

// At least `bytes` of memory that belongs to this thread, aligned to a cache line; kept and reused, never shrunk.
// `which` tells apart buffers that are in use at once.
enum Scratch { kPlan, kShared, kLocal, kNumScratch };
void* scratch(Scratch which, size_t bytes);

// Asks `done` up to `times` times without giving up the core; whether it came true.
template <class Done>
bool spin(int times, const Done& done) {
  for (int i = 0; i < times; i++) {
    if (done()) return true;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  return false;
}

template <class Body>
void parallel(int threads, Body body) {
  if (threads <= 1) return body();
  run_on_threads(threads, [](void* context) { (*static_cast<Body*>(context))(); }, &body);
}

// Hands out 0, 1, 2, ... to whichever thread asks next, so that a thread that is late takes less.
class Counter {
 public:
  int64_t next() { return __atomic_fetch_add(&value_, 1, __ATOMIC_RELAXED); }

 private:
  int64_t value_ = 0;
};

// Calls body(first, last) on ranges that cover 0..count; on the caller's thread alone where the work is small.
// `cost` is that of one element, in multiply-adds or floats moved; about 60 thousand pay for waking the pool.
template <class Body>
void parallel_rows(int threads, int64_t count, int64_t cost, const Body& body) {
  if (threads <= 1 || count <= 1 || count * cost < 60000) return body(int64_t{0}, count);
  const int64_t pieces = count < 4 * threads ? count : 4 * threads;
  Counter counter;
  parallel(threads, [&] {
    for (int64_t i = counter.next(); i < pieces; i = counter.next()) body(i * count / pieces, (i + 1) * count / pieces);
  });
}

}  // namespace ray_lora
