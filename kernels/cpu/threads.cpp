// The threads of all kernels: one team for the process, apart from torch's, whose threads fall asleep between launches as
// soon as the process has more of them than cores. Waking one takes longer than many a launch.
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>

namespace ray_lora {
namespace {

constexpr int kMostThreads = 255;
constexpr int kSpins = 500;   // some microseconds: about what lies between two launches of a step

template <class Done>
void spin_or_yield(const Done& done) {
  if (!spin(kSpins, done))
    while (!done()) sched_yield();
}

thread_local int team_size = 1;

class Team {
 public:
  void run(int threads, void (*body)(void*), void* context) {
    for (; num_workers_ < threads - 1; num_workers_++) start_worker(num_workers_);
    body_ = body;
    context_ = context;
    arrived_.store(0, std::memory_order_relaxed);
    working_.store(threads - 1, std::memory_order_relaxed);
    const uint64_t job = ((job_.load(std::memory_order_relaxed) >> 8) + 1) << 8 | threads;
    job_.store(job);
    if (sleepers_.load() > 0) {
      std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
    team_size = threads;
    body(context);
    team_size = 1;
    spin_or_yield([&] { return working_.load(std::memory_order_acquire) == 0; });
  }

  void wait_for_all() {
    const int64_t size = team_size;
    const int64_t target = arrived_.fetch_add(1, std::memory_order_acq_rel) / size * size + size;
    spin_or_yield([&] { return arrived_.load(std::memory_order_acquire) >= target; });
  }

  std::mutex busy;   // held by the caller of run

 private:
  void start_worker(int index) {
    sigset_t all, before;   // signals are for the threads of the program
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread([this, index, seen = job_.load()] { work(index, seen); }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  // A job's number and its threads are one word: a worker that it does not concern reads nothing else of it, and the
  // others hold up the next one.
  void work(int index, uint64_t seen) {
    for (;;) {
      const auto has_job = [&] { return job_.load() != seen; };
      if (!spin(kSpins, has_job)) {
        std::unique_lock<std::mutex> lock(sleep_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, has_job);
        sleepers_.fetch_sub(1);
      }
      seen = job_.load();
      team_size = static_cast<int>(seen & 0xff);
      if (index >= team_size - 1) continue;
      body_(context_);
      working_.fetch_sub(1, std::memory_order_release);
    }
  }

  int num_workers_ = 0;
  void (*body_)(void*) = nullptr;
  void* context_ = nullptr;
  std::atomic<uint64_t> job_{0};
  alignas(64) std::atomic<int> working_{0};
  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::mutex sleep_;
  std::condition_variable wake_;
};

// Never deleted, for its threads wait in it until the process ends. A forked child has none of them, and makes its own.
Team& team() {
  static std::atomic<Team*> current{new Team};
  static std::atomic<pid_t> owner{getpid()};
  if (const pid_t here = getpid(); owner.load() != here) {
    current.store(new Team);
    owner.store(here);
  }
  return *current.load();
}

}  // namespace

void run_on_threads(int threads, void (*body)(void*), void* context) noexcept {
  Team& workers = team();
  std::unique_lock<std::mutex> lock(workers.busy, std::try_to_lock);
  if (!lock) return body(context);
  workers.run(threads < kMostThreads ? threads : kMostThreads, body, context);
}

void wait_for_all() {
  if (team_size > 1) team().wait_for_all();
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
