// out = x @ weight.T + bias, then add_lora_ to it: what the two kernels make one after the other, to the bit.
//
// With few rows the product leaves memory bandwidth idle, and reading the adapters' pages leaves arithmetic idle. So
// some threads begin with the pages, of which they make deltas, and others with the panels of the weight; whoever is
// done helps with the rest. A panel's part of out gets the deltas in the cache of the thread that made it.
#pragma once
#include "add_lora.h"
#include "linear.h"

namespace ray_lora::RL_ISA {

template <class T, class P>
class LinearLora : Lora<T, P> {
  using Base = Lora<T, P>;
  using Base::blocks_, Base::num_blocks_, Base::pool_;

 public:
  LinearLora(const LinearCall& call, const LoraCall& lora) : Base(lora), call_(call), linear_(call) {}

  void run() {
    this->plan();
    const int64_t cost = (call_.num_rows + 2) * call_.in_features * call_.out_features + this->cost_;
    if (linear_.num_blocks() != 1 || this->largest_cost_ * call_.threads > cost) {   // many rows, or ranks to share out
      linear_.run();
      return AddLora<T, P>(Base::call_).run();
    }
    allocate();
    Counter threads;
    parallel(cost < 200000 ? 1 : call_.threads, [&] {
      const int32_t me = static_cast<int32_t>(threads.next()) + 1;
      const bool pages_first = me % 4 == 1;
      if (pages_first) read_pages();
      multiply(me);
      if (!pages_first) read_pages();
      wait_for_all();
      for (int64_t panel = 0; panel < linear_.num_panels(); panel++)
        if (unfinished_[panel] == me) finish(panel);
    });
  }

 private:
  void allocate() {
    int64_t floats = 0;
    for (int64_t i = 0; i < num_blocks_; i++) floats += delta_size(blocks_[i]) + this->s_size(blocks_[i]);
    const size_t panels_bytes = linear_.num_panels() * sizeof(int32_t);
    float* next = static_cast<float*>(scratch(kShared, floats * sizeof(float) + panels_bytes));
    for (int64_t i = 0; i < num_blocks_; i++) {
      blocks_[i].delta = next;
      next += delta_size(blocks_[i]);
      blocks_[i].s = next;
      next += this->s_size(blocks_[i]);
    }
    unfinished_ = reinterpret_cast<int32_t*>(next);
    std::memset(unfinished_, 0, panels_bytes);
  }
  int64_t delta_size(const RowBlock& block) const { return block.num_rows * this->delta_width(); }

  void read_pages() {
    for (int64_t i = next_block_.next(); i < num_blocks_;) {
      const int64_t following = next_block_.next();
      this->whole_block(blocks_[i], blocks_[following < num_blocks_ ? following : i]);
      __atomic_fetch_add(&blocks_read_, 1, __ATOMIC_RELEASE);
      i = following;
    }
  }

  void multiply(int32_t me) {
    __atomic_fetch_add(&multiplying_, 1, __ATOMIC_RELAXED);
    for (int64_t panel = next_panel_.next(); panel < linear_.num_panels(); panel = next_panel_.next()) {
      linear_.panel(panel, 0, panel + __atomic_load_n(&multiplying_, __ATOMIC_RELAXED));
      if (__atomic_load_n(&blocks_read_, __ATOMIC_ACQUIRE) == num_blocks_) finish(panel);
      else unfinished_[panel] = me;
    }
  }

  // Adds the deltas to a panel's part of out.
  void finish(int64_t panel) const {
    const int64_t first = panel * kPanel;
    const int64_t last = first + kPanel < call_.out_features ? first + kPanel : call_.out_features;
    for (int64_t i = 0; i < num_blocks_; i++) this->add_delta(blocks_[i], first, last);
  }

  const LinearCall& call_;
  const Linear<T> linear_;
  Counter next_block_, next_panel_;
  int64_t blocks_read_ = 0, multiplying_ = 0;
  int32_t* unfinished_ = nullptr;   // by panel: the thread, from 1, that made it before all pages were read
};

inline void linear_lora(const LinearCall& call, const LoraCall& lora, DType dtype) {
  with_dtype(dtype, [&](auto activation) {
    with_dtype(lora.pool.dtype,
               [&](auto stored) { LinearLora<decltype(activation), decltype(stored)>(call, lora).run(); });
  });
}

}  // namespace ray_lora::RL_ISA
