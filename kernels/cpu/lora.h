// add_lora_: y[rows] += (x[rows] @ A.T) @ B, for every adapter of the batch and every slice of the output at once.
//
// An adapter is a list of pages of 16 ranks. `shrink` makes S [rows, ranks] in float32, `expand` adds S @ B to y.
// With few rows both are bound by reading the pages: each is read once, and the tiles fetch ahead. With many rows they
// are bound by arithmetic: x is taken in blocks of kBlockRows rows and kBlockK columns, so that a tile of x stays in
// the first cache and the pages' part in the second.
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
    constexpr int32_t kShrinkRanks = kPageRank / 2;
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
          shrinks[num_shrinks++] = {i, slice, rank, rank + kShrinkRanks};
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
    const int64_t in = pool_.in_features;
    const T* x = static_cast<const T*>(call_.x);
    if (block.num_rows <= kRows) {   // one tile reads every rank's A from end to end
      const T* rows[kRows];
      for (int64_t r = 0; r < block.num_rows; r++) rows[r] = x + block.rows[r] * call_.x_stride;
      return shrink_part<InOrder<T>>(block, slice, first_rank, last_rank, rows, 0, in, true);
    }
    const float* rows[kBlockRows];   // more tiles go through a part of A and of x that fit the cache
    float* copy = static_cast<float*>(scratch(kLocal, block.num_rows * padded(kBlockK) * sizeof(float)));
    for (int64_t r = 0; r < block.num_rows; r++) rows[r] = copy + r * padded(kBlockK);
    for (int64_t k = 0; k < in; k += kBlockK) {
      const int64_t end = k + kBlockK < in ? k + kBlockK : in;
      for (int64_t r = 0; r < block.num_rows; r++)
        arrange<P>(x + block.rows[r] * call_.x_stride + k, end - k, 1.0f, copy + r * padded(kBlockK));
      shrink_part<Arranged>(block, slice, first_rank, last_rank, rows, k, end, false);
    }
  }

  // The part over columns first_k .. last_k, whose x begins at `rows`.
  template <class X>
  void shrink_part(const RowBlock& block, int64_t slice, int64_t first_rank, int64_t last_rank,
                   const typename X::type* const* rows, int64_t first_k, int64_t last_k, bool streams) const {
    const int64_t in = pool_.in_features, ranks = block.ranks();
    for_row_tiles(block.num_rows, [&](auto R, int64_t r) {
      constexpr int W = dot_width(R);
      for (int64_t rank = first_rank; rank < last_rank; rank += W) {
        const P* a = row_of_a(block, slice, rank);
        const P* after = rank + W < last_rank ? row_of_a(block, slice, rank + W) : a;
        for (int64_t k = first_k; k < last_k; k += kBlockK) {
          const int64_t size = last_k - k < kBlockK ? last_k - k : kBlockK;
          const typename X::type* x_at[R];
          const P *a_at[W], *next[W];
          for (int i = 0; i < R; i++) x_at[i] = rows[r + i] + k - first_k;
          for (int i = 0; i < W; i++) {
            a_at[i] = a + i * in + k;
            next[i] = k + size < in ? a_at[i] + size : after + i * in;
          }
          float* out = block.s_of(slice) + r * ranks + rank;
          const P* const* following = streams ? next : nullptr;
          if (k == 0) dot_tile<R, W, false, X>(x_at, a_at, size, out, ranks, following);
          else dot_tile<R, W, true, X>(x_at, a_at, size, out, ranks, following);
        }
      }
    });
  }

  const P* row_of_a(const RowBlock& block, int64_t slice, int64_t rank) const {
    const int64_t page = block.pages[rank / kPageRank];
    return static_cast<const P*>(pool_.a) +
           ((page * pool_.num_slices + slice) * kPageRank + rank % kPageRank) * pool_.in_features;
  }
  const P* row_of_b(const RowBlock& block, int64_t rank) const {
    const int64_t page = block.pages[rank / kPageRank];
    return static_cast<const P*>(pool_.b) + (page * kPageRank + rank % kPageRank) * pool_.out_features;
  }

  // y[rows, first:last] += S @ B[:, first:last], columns of one slice.
  void expand(const RowBlock& block, int64_t slice, int64_t first, int64_t last) const {
    const int64_t ranks = block.ranks();
    const P** b = static_cast<const P**>(scratch(kLocal, ranks * sizeof(P*)));
    for (int64_t rank = 0; rank < ranks; rank++) b[rank] = row_of_b(block, rank);
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
