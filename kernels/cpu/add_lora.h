// add_lora_: y[rows] += (x[rows] @ A.T) @ B, for every adapter of the batch and every slice of the output at once.
#pragma once
#include "lora.h"

namespace ray_lora::RL_ISA {

// Part of a block's shrink (ranks `first`.. of a slice) or expand (columns `first`.. of it).
struct Task {
  int32_t block, slice, first, last;
};

template <class T, class P>
class AddLora : Lora<T, P> {
  using Base = Lora<T, P>;
  using Base::blocks_, Base::num_blocks_, Base::pool_, Base::call_;

 public:
  using Base::Base;

  void run() {
    this->plan();
    threads_ = this->cost_ < 400000 ? 1 : call_.threads;
    if (threads_ > 1 && this->largest_cost_ * threads_ * 2 > this->cost_) return share_blocks();
    Counter next;
    parallel(threads_, [&] {   // enough blocks: each is done by one thread, in cache
      for (int64_t i = next.next(); i < num_blocks_;) {
        const int64_t following = next.next();
        add_block(blocks_[i], blocks_[following < num_blocks_ ? following : i]);
        i = following;
      }
    });
  }

 private:
  void add_block(RowBlock block, const RowBlock& following) const {
    const bool streams = this->streams(block);
    const int64_t floats = streams ? block.num_rows * this->delta_width() : this->s_size(block);
    (streams ? block.delta : block.s) = static_cast<float*>(scratch(kShared, floats * sizeof(float)));
    this->whole_block(block, following);
    if (streams) this->add_delta(block, 0, pool_.out_features);
  }

  // Few or unequal blocks: all threads shrink parts of them, meet, and expand parts of them.
  void share_blocks() {
    constexpr int32_t kShrinkRanks = kPageRank / 2;
    int64_t s_total = 0, num_shrinks = 0, num_expands = 0;
    for (int64_t i = 0; i < num_blocks_; i++) {
      s_total += this->s_size(blocks_[i]);
      num_shrinks += pool_.num_slices * blocks_[i].ranks() / kShrinkRanks;
      num_expands += pool_.out_features / kBlockN + pool_.num_slices;
    }
    const size_t task_bytes = (num_shrinks + num_expands) * sizeof(Task);
    float* s = static_cast<float*>(scratch(kShared, s_total * sizeof(float) + task_bytes));
    Task* shrinks = reinterpret_cast<Task*>(s + s_total);
    Task* expands = shrinks + num_shrinks;
    num_shrinks = num_expands = 0;
    for (int32_t i = 0; i < num_blocks_; i++) {
      blocks_[i].s = s;
      s += this->s_size(blocks_[i]);
      for (int32_t slice = 0; slice < pool_.num_slices; slice++) {
        for (int32_t rank = 0; rank < blocks_[i].ranks(); rank += kShrinkRanks)
          shrinks[num_shrinks++] = {i, slice, rank, rank + kShrinkRanks};
        const int32_t end = pool_.slices[slice + 1];
        for (int32_t n = pool_.slices[slice]; n < end; n += kBlockN)
          expands[num_expands++] = {i, slice, n, end - n < kBlockN ? end : n + int32_t{kBlockN}};
      }
    }
    Counter next_shrink, next_expand;
    parallel(threads_, [&] {
      for (int64_t i = next_shrink.next(); i < num_shrinks; i = next_shrink.next())
        this->shrink(blocks_[shrinks[i].block], shrinks[i].slice, shrinks[i].first, shrinks[i].last);
      wait_for_all();
      for (int64_t i = next_expand.next(); i < num_expands; i = next_expand.next())
        this->expand(blocks_[expands[i].block], expands[i].slice, expands[i].first, expands[i].last);
    });
  }

  int threads_ = 1;
};

inline void add_lora(const LoraCall& call, DType dtype) {
  with_dtype(dtype, [&](auto activation) {
    with_dtype(call.pool.dtype, [&](auto stored) { AddLora<decltype(activation), decltype(stored)>(call).run(); });
  });
}

}  // namespace ray_lora::RL_ISA
