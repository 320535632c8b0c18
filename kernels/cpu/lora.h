// add_lora_: y[rows] += (x[rows] @ A.T) @ B for every adapter of the batch and every slice of the output, in one launch.
//
// An adapter is a list of pages of 16 ranks. `shrink` makes S [rows, ranks] in float32, `expand` adds S @ B to y. Few
// rows: both are bound by reading the pages, which each is read once, front to back. Many rows: x is taken in blocks of
// kBlockRows rows and kBlockK columns, so that a tile of x stays in the first cache and the pages' part in the second.
#pragma once
#include "kernels.h"
#include "threads.h"
#include "tile.h"

namespace ray_lora::RL_ISA {

constexpr int64_t kBlockRows = 48;
constexpr int64_t kBlockK = 1024;   // S is summed over blocks of this many columns: part of the order that is fixed
constexpr int64_t kBlockN = 512;

// Rows of one adapter that are worked on together.
struct RowBlock {
  const int32_t *rows, *pages;
  int64_t num_rows, num_pages;
  float* s;   // [num_slices, num_rows, num_pages * 16]

  int64_t ranks() const { return num_pages * kPageRank; }
  float* s_of(int64_t slice) const { return s + slice * num_rows * ranks(); }
};

// Part of a block's shrink (ranks `first`.. of a slice) or expand (columns `first`.. of it).
struct Task {
  int32_t block, slice, first, last;
};

template <class T, class P>   // the types of x and y, and of the pool
class Lora {
 public:
  explicit Lora(const LoraCall& call) : call_(call), pool_(call.pool) {}

  void run() {
    plan();
    if (threads_ == 1 || largest_ * threads_ * 2 <= total_) {   // enough blocks: each is done by one thread, in cache
      Counter next;
      parallel(threads_, [&] {
        for (int64_t i = next.next(); i < num_blocks_; i = next.next()) {
          RowBlock block = blocks_[i];
          block.s = static_cast<float*>(scratch(kShared, s_size(block) * sizeof(float)));
          for (int64_t slice = 0; slice < pool_.num_slices; slice++) shrink(block, slice, 0, block.ranks());
          for (int64_t slice = 0; slice < pool_.num_slices; slice++)
            expand(block, slice, pool_.slices[slice], pool_.slices[slice + 1]);
        }
      });
      return;
    }
    share_blocks();
  }

 private:
  int64_t s_size(const RowBlock& block) const { return pool_.num_slices * block.num_rows * block.ranks(); }

  // Cuts the segments into blocks of rows, and chooses how many threads they are worth.
  void plan() {
    const LoraSegments& segments = call_.segments;
    const int64_t most = segments.num_segments + segments.num_rows / kBlockRows;
    blocks_ = static_cast<RowBlock*>(scratch(kPlan, most * sizeof(RowBlock)));
    const int64_t page_cost = kPageRank * (pool_.num_slices * pool_.in_features + pool_.out_features);
    for (int64_t s = 0; s < segments.num_segments; s++) {
      const int32_t page = segments.page_starts[s], num_pages = segments.page_starts[s + 1] - page;
      const int32_t end = segments.row_starts[s + 1];
      if (num_pages == 0) continue;
      for (int64_t row = segments.row_starts[s]; row < end; row += kBlockRows) {
        const int64_t num_rows = end - row < kBlockRows ? end - row : kBlockRows;
        blocks_[num_blocks_++] = {segments.rows + row, segments.pages + page, num_rows, num_pages, nullptr};
        // Reading a page costs about as much as two rows' arithmetic with it.
        const int64_t cost = (num_rows + 2) * num_pages * page_cost;
        total_ += cost;
        largest_ = cost > largest_ ? cost : largest_;
      }
    }
    threads_ = total_ < 400000 ? 1 : call_.threads;
  }

  // Few or unequal blocks: all threads shrink parts of them, meet, and expand parts of them.
  void share_blocks() {
    constexpr int64_t kShrinkRanks = kPageRank / 2;
    int64_t s_total = 0, num_shrinks = 0, num_expands = 0;
    for (int64_t i = 0; i < num_blocks_; i++) {
      s_total += s_size(blocks_[i]);
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
      s += s_size(blocks_[i]);
      for (int32_t slice = 0; slice < pool_.num_slices; slice++) {
        for (int32_t rank = 0; rank < blocks_[i].ranks(); rank += kShrinkRanks)
          shrinks[num_shrinks++] = {i, slice, rank, rank + int32_t{kShrinkRanks}};
        const int32_t end = pool_.slices[slice + 1];
        for (int32_t n = pool_.slices[slice]; n < end; n += kBlockN)
          expands[num_expands++] = {i, slice, n, end - n < kBlockN ? end : n + int32_t{kBlockN}};
      }
    }
    Counter next_shrink, next_expand;
    parallel(threads_, [&] {
      for (int64_t i = next_shrink.next(); i < num_shrinks; i = next_shrink.next())
        shrink(blocks_[shrinks[i].block], shrinks[i].slice, shrinks[i].first, shrinks[i].last);
      wait_for_all();
      for (int64_t i = next_expand.next(); i < num_expands; i = next_expand.next())
        expand(blocks_[expands[i].block], expands[i].slice, expands[i].first, expands[i].last);
    });
  }

  // S[:, first_rank:last_rank] of one slice.
  void shrink(const RowBlock& block, int64_t slice, int64_t first_rank, int64_t last_rank) const {
    const int64_t in = pool_.in_features, ranks = block.ranks();
    const float* x[kBlockRows];
    rows_of_x(block, x);
    float* s = block.s_of(slice);
    // One tile of rows reads every rank's A from end to end; more tiles go through a part of A that fits the cache.
    const int64_t span = block.num_rows <= kRows ? in : kBlockK;
    for (int64_t k0 = 0; k0 < in; k0 += span) {
      const int64_t k1 = k0 + span < in ? k0 + span : in;
      for_row_tiles(block.num_rows, [&](auto R, int64_t r) {
        constexpr int W = tile_width(R);
        for (int64_t rank = first_rank; rank < last_rank; rank += W) {
          const int64_t page = block.pages[rank / kPageRank];
          const P* a = static_cast<const P*>(pool_.a) +
                       ((page * pool_.num_slices + slice) * kPageRank + rank % kPageRank) * in;
          for (int64_t k = k0; k < k1; k += kBlockK) {
            const float* x_at[R];
            const P* a_at[W];
            for (int i = 0; i < R; i++) x_at[i] = x[r + i] + k;
            for (int i = 0; i < W; i++) a_at[i] = a + i * in + k;
            const int64_t size = k1 - k < kBlockK ? k1 - k : kBlockK;
            float* out = s + r * ranks + rank;
            if (k == 0) dot_tile<R, W, false>(x_at, a_at, size, out, ranks);
            else dot_tile<R, W, true>(x_at, a_at, size, out, ranks);
          }
        }
      });
    }
  }

  // Pointers to the block's rows of x in float32, converted into this thread's scratch where they are stored otherwise.
  void rows_of_x(const RowBlock& block, const float** x) const {
    const T* base = static_cast<const T*>(call_.x);
    if constexpr (std::is_same_v<T, float>) {
      for (int64_t r = 0; r < block.num_rows; r++) x[r] = base + block.rows[r] * call_.x_stride;
    } else {
      const int64_t in = pool_.in_features;
      float* copy = static_cast<float*>(scratch(kLocal, block.num_rows * in * sizeof(float)));
      for (int64_t r = 0; r < block.num_rows; r++, copy += in) {
        const T* row = base + block.rows[r] * call_.x_stride;
        for_lanes(in, [&](int64_t i, int64_t lanes) { store_lanes(copy + i, load_lanes(row + i, lanes), lanes); });
        x[r] = copy;
      }
    }
  }

  // y[rows, first:last] += S @ B[:, first:last], columns of one slice.
  void expand(const RowBlock& block, int64_t slice, int64_t first, int64_t last) const {
    const int64_t ranks = block.ranks(), out = pool_.out_features;
    const P** b = static_cast<const P**>(scratch(kLocal, ranks * sizeof(P*)));
    for (int64_t rank = 0; rank < ranks; rank++)
      b[rank] = static_cast<const P*>(pool_.b) + (block.pages[rank / kPageRank] * int64_t{kPageRank} + rank % kPageRank) * out;
    const float* s = block.s_of(slice);
    T* y = static_cast<T*>(call_.y);
    const int64_t span = block.num_rows <= kRows ? last - first : kBlockN;
    for (int64_t n = first; n < last; n += span) {
      const int64_t end = n + span < last ? n + span : last;
      for_row_tiles(block.num_rows, [&](auto R, int64_t r) {
        sum_columns<R>(s + r * ranks, ranks, b, ranks, n, end, [&](int i, int64_t column, int64_t lanes, vec sum) {
          T* to = y + block.rows[r + i] * call_.y_stride + column;
          store_lanes(to, load_lanes(to, lanes) + sum, lanes);
        });
      });
    }
  }

  const LoraCall& call_;
  const LoraPool& pool_;
  RowBlock* blocks_ = nullptr;
  int64_t num_blocks_ = 0, total_ = 0, largest_ = 0;
  int threads_ = 1;
};

inline void add_lora(const LoraCall& call, DType dtype) {
  with_dtype(dtype, [&](auto activation) {
    with_dtype(call.pool.dtype, [&](auto stored) { Lora<decltype(activation), decltype(stored)>(call).run(); });
  });
}

}  // namespace ray_lora::RL_ISA
