// The products of add_lora_ and linear_lora: delta[row] = (x[row] @ A.T) @ B for the rows of every adapter of a batch.
//
// An adapter is a list of pages of 16 ranks. Rows of one adapter are taken in blocks. `shrink` makes S [rows, ranks] of
// a block in float32, `expand` makes S @ B: both are bound by arithmetic where a block has many rows, so x is taken in
// parts of kBlockK columns, that a tile of x may stay in the first cache and the pages' part in the second. A block of
// few rows is bound by reading its pages: `stream` reads them once, from end to end, and fetches ahead.
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
  float* s;       // [num_slices, num_rows, num_pages * 16]
  float* delta;   // [num_rows, padded(out_features)], or null: expand adds to y instead

  int64_t ranks() const { return num_pages * kPageRank; }
  float* s_of(int64_t slice) const { return s + slice * num_rows * ranks(); }
};

template <class T, class P>   // the types of x and y, and of the pool
class Lora {
 public:
  explicit Lora(const LoraCall& call) : call_(call), pool_(call.pool) {}

 protected:
  static bool streams(const RowBlock& block) { return block.num_rows <= kRows; }
  int64_t s_size(const RowBlock& block) const { return pool_.num_slices * block.num_rows * block.ranks(); }
  int64_t delta_width() const { return padded(pool_.out_features); }

  // Cuts the segments into blocks.
  void plan() {
    const LoraSegments& segments = call_.segments;
    const int64_t most = segments.num_segments + segments.num_rows / kBlockRows;
    blocks_ = static_cast<RowBlock*>(scratch(kPlan, most * sizeof(RowBlock)));
    const int64_t page_cost = kPageRank * (pool_.num_slices * pool_.in_features + pool_.out_features);
    for (int64_t s = 0; s < segments.num_segments; s++) {
      const int32_t page = segments.page_starts[s], num_pages = segments.page_starts[s + 1] - page;
      if (num_pages == 0) continue;
      const int32_t end = segments.row_starts[s + 1];
      for (int64_t row = segments.row_starts[s]; row < end; row += kBlockRows) {
        const int64_t num_rows = end - row < kBlockRows ? end - row : kBlockRows;
        blocks_[num_blocks_++] = {segments.rows + row, segments.pages + page, num_rows, num_pages, nullptr, nullptr};
        // Reading a page costs about as much as two rows' arithmetic with it.
        const int64_t cost = (num_rows + 2) * num_pages * page_cost;
        cost_ += cost;
        largest_cost_ = cost > largest_cost_ ? cost : largest_cost_;
      }
    }
  }

  // S[:, first_rank:last_rank] of one slice.
  void shrink(const RowBlock& block, int64_t slice, int64_t first_rank, int64_t last_rank) const {
    const int64_t in = pool_.in_features;
    const T* x = static_cast<const T*>(call_.x);
    const float* rows[kBlockRows];
    float* copy = static_cast<float*>(scratch(kLocal, block.num_rows * padded(kBlockK) * sizeof(float)));
    for (int64_t r = 0; r < block.num_rows; r++) rows[r] = copy + r * padded(kBlockK);
    for (int64_t k = 0; k < in; k += kBlockK) {
      const int64_t end = k + kBlockK < in ? k + kBlockK : in;
      for (int64_t r = 0; r < block.num_rows; r++)
        arrange<P>(x + block.rows[r] * call_.x_stride + k, end - k, 1.0f, copy + r * padded(kBlockK));
      shrink_part(block, slice, first_rank, last_rank, rows, k, end);
    }
  }

  // The part over columns k .. end, whose x begins at `rows`.
  void shrink_part(const RowBlock& block, int64_t slice, int64_t first_rank, int64_t last_rank,
                   const float* const* rows, int64_t k, int64_t end) const {
    const int64_t in = pool_.in_features, ranks = block.ranks();
    for_row_tiles(block.num_rows, [&](auto R, int64_t r) {
      constexpr int W = dot_width(R);
      for (int64_t rank = first_rank; rank < last_rank; rank += W) {
        const float* x_at[R];
        const P* a_at[W];
        for (int i = 0; i < R; i++) x_at[i] = rows[r + i];
        const int64_t page = block.pages[rank / kPageRank];
        for (int i = 0; i < W; i++) a_at[i] = page_of_a(page, slice) + (rank % kPageRank + i) * in + k;
        float* out = block.s_of(slice) + r * ranks + rank;
        const FetchAhead ahead{distance(page_of_a(page, 0), page_of_b(page))};   // expand comes next
        if (k == 0) dot_tile<R, W, false, Arranged>(x_at, a_at, end - k, out, ranks, ahead);
        else dot_tile<R, W, true, Arranged>(x_at, a_at, end - k, out, ranks, ahead);
      }
    });
  }

  // delta[:, first:last] = S @ B[:, first:last], or added to y; columns of one slice.
  void expand(const RowBlock& block, int64_t slice, int64_t first, int64_t last) const {
    if (block.delta)
      return expand_to(block, slice, first, last, [&](int64_t row, int64_t column, int64_t lanes, vec sum) {
        store_lanes(block.delta + row * delta_width() + column, sum, lanes);
      });
    T* y[kBlockRows];
    for (int64_t r = 0; r < block.num_rows; r++) y[r] = static_cast<T*>(call_.y) + block.rows[r] * call_.y_stride;
    expand_to(block, slice, first, last, [&](int64_t row, int64_t column, int64_t lanes, vec sum) {
      store_lanes(y[row] + column, load_lanes(y[row] + column, lanes) + sum, lanes);
    });
  }

  template <class Put>
  void expand_to(const RowBlock& block, int64_t slice, int64_t first, int64_t last, const Put& put) const {
    const int64_t ranks = block.ranks();
    const P** b = static_cast<const P**>(scratch(kLocal, ranks * sizeof(P*)));
    for (int64_t rank = 0; rank < ranks; rank++)
      b[rank] = page_of_b(block.pages[rank / kPageRank]) + rank % kPageRank * pool_.out_features;
    const float* s = block.s_of(slice);
    const int64_t span = block.num_rows <= kRows ? last - first : kBlockN;
    for (int64_t n = first; n < last; n += span) {
      const int64_t end = n + span < last ? n + span : last;
      for_row_tiles(block.num_rows, [&](auto R, int64_t r) {
        sum_columns<R>(s + r * ranks, ranks, b, ranks, n, end, [&](int i, int64_t column, int64_t lanes, vec sum) {
          put(r + i, column, lanes, sum);
        });
      });
    }
  }

  // All of a block, by one thread; `following` is the block that it will take next.
  void whole_block(const RowBlock& block, const RowBlock& following) const {
    if (streams(block)) return stream(block, following.pages[0]);
    for (int64_t slice = 0; slice < pool_.num_slices; slice++) shrink(block, slice, 0, block.ranks());
    for (int64_t slice = 0; slice < pool_.num_slices; slice++)
      expand(block, slice, pool_.slices[slice], pool_.slices[slice + 1]);
  }

  // The whole delta of a block of few rows. While one page is read, the same place of the next one is fetched; after
  // the block's last that is `page_after`.
  void stream(const RowBlock& block, int64_t page_after) const {
    for_row_tiles(block.num_rows, [&](auto R, int64_t r) {
      const T* x[R];
      for (int i = 0; i < R; i++) x[i] = static_cast<const T*>(call_.x) + block.rows[r + i] * call_.x_stride;
      const int64_t s_stride = pool_.num_slices * kPageRank;
      float* s = static_cast<float*>(scratch(kLocal, R * s_stride * sizeof(float)));
      float* delta = block.delta + r * delta_width();
      std::memset(delta, 0, R * delta_width() * sizeof(float));
      for (int64_t p = 0; p < block.num_pages; p++) {
        const int64_t page = block.pages[p];
        const int64_t next = p + 1 < block.num_pages ? block.pages[p + 1] : r + R < block.num_rows ? page : page_after;
        stream_a<R>(x, page, next, s, s_stride);
        stream_b<R>(s, s_stride, page, next, delta);
      }
    });
  }

  template <int R>
  void stream_a(const T* const* x, int64_t page, int64_t next, float* s, int64_t s_stride) const {
    constexpr int W = dot_width(R);
    const int64_t in = pool_.in_features;
    const FetchAhead ahead{distance(page_of_a(page, 0), page_of_a(next, 0))};
    for (int64_t rank = 0; rank < s_stride; rank += W)
      for (int64_t k = 0; k < in; k += kBlockK) {
        const int64_t size = in - k < kBlockK ? in - k : kBlockK;
        const T* x_at[R];
        const P* a_at[W];
        for (int i = 0; i < R; i++) x_at[i] = x[i] + k;
        for (int i = 0; i < W; i++) a_at[i] = page_of_a(page, 0) + (rank + i) * in + k;
        if (k == 0) dot_tile<R, W, false, InOrder<T>>(x_at, a_at, size, s + rank, s_stride, ahead);
        else dot_tile<R, W, true, InOrder<T>>(x_at, a_at, size, s + rank, s_stride, ahead);
      }
  }

  template <int R>
  void stream_b(const float* s, int64_t s_stride, int64_t page, int64_t next, float* delta) const {
    constexpr int W = 4;   // rows of B side by side
    const int64_t out = pool_.out_features;
    const FetchAhead ahead{distance(page_of_b(page), page_of_b(next))};
    for (int64_t rank = 0; rank < kPageRank; rank += W)
      for (int64_t slice = 0; slice < pool_.num_slices; slice++) {
        const int64_t first = pool_.slices[slice], size = pool_.slices[slice + 1] - first;
        const P* b = page_of_b(page) + rank * out + first;
        vec scale[R][W];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 16
          for (int i = 0; i < W; i++) scale[r][i] = all(s[r * s_stride + slice * kPageRank + rank + i]);
        const auto add = [&](int64_t n, int64_t lanes) {
          vec rows[W];
#pragma GCC unroll 16
          for (int i = 0; i < W; i++) rows[i] = load_lanes(b + i * out + n, lanes);
#pragma GCC unroll 16
          for (int r = 0; r < R; r++) {
            float* to = delta + r * delta_width() + first + n;
            vec sum = load_lanes(to, lanes);
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) sum = fma(scale[r][i], rows[i], sum);
            store_lanes(to, sum, lanes);
          }
        };
        int64_t n = 0;
        for (; n + 2 * kLanes <= size; n += 2 * kLanes) {
#pragma GCC unroll 16
          for (int i = 0; i < W; i++) ahead(b + i * out + n);
          add(n, kLanes);
          add(n + kLanes, kLanes);
        }
        for (; n < size; n += kLanes) add(n, size - n < kLanes ? size - n : int64_t{kLanes});
      }
  }

  // y[rows, first:last] += delta[:, first:last].
  void add_delta(const RowBlock& block, int64_t first, int64_t last) const {
    for (int64_t r = 0; r < block.num_rows; r++) {
      T* y = static_cast<T*>(call_.y) + block.rows[r] * call_.y_stride + first;
      const float* delta = block.delta + r * delta_width() + first;
      for_lanes(last - first, [&](int64_t n, int64_t lanes) {
        store_lanes(y + n, load_lanes(y + n, lanes) + load_lanes(delta + n, lanes), lanes);
      });
    }
  }

 private:
  const P* page_of_a(int64_t page, int64_t slice) const {
    return static_cast<const P*>(pool_.a) + (page * pool_.num_slices + slice) * kPageRank * pool_.in_features;
  }
  const P* page_of_b(int64_t page) const {
    return static_cast<const P*>(pool_.b) + page * kPageRank * pool_.out_features;
  }
  static int64_t distance(const P* from, const P* to) {   // in bytes, between any two pages
    return reinterpret_cast<intptr_t>(to) - reinterpret_cast<intptr_t>(from);
  }

 protected:
  const LoraCall& call_;
  const LoraPool& pool_;
  RowBlock* blocks_ = nullptr;
  int64_t num_blocks_ = 0;
  int64_t cost_ = 0, largest_cost_ = 0;   // of all blocks and of the largest, in multiply-adds or what takes as long
};

}  // namespace ray_lora::RL_ISA
