// paged_attention: causal attention of each row to its own sequence's blocks.
//
// A task is one KV head and up to kTileRows query rows of one sequence (a token's heads that share the KV head are rows
// side by side). It walks the keys in chunks of kChunk, aligned to kChunk whatever the task, with a running maximum and
// sum (online softmax) in float32, so a row's result does not depend on which rows are beside it.
#pragma once
#include "kernels.h"
#include "threads.h"
#include "tile.h"

namespace ray_lora::RL_ISA {

constexpr int64_t kChunk = 64;
constexpr int64_t kTileRows = 192;

// dst[d][key] = keys[key][d], in float32; the columns from `count` to kChunk become zero.
template <class T>
void transpose_keys(const T* const* keys, int64_t count, int64_t head_dim, float* dst) {
  float rows[4][kLanes];
  for (int64_t key = 0; key < kChunk; key += 4)
    for_lanes(head_dim, [&](int64_t d, int64_t lanes) {
      for (int i = 0; i < 4; i++) store(rows[i], key + i < count ? load_lanes(keys[key + i] + d, lanes) : vec{});
      for (int j = 0; j < lanes; j += 4) {   // 4 x 4 at a time, in registers
        typedef int32_t index __attribute__((vector_size(16)));
        const quad a = *(quad_anywhere*)&rows[0][j], b = *(quad_anywhere*)&rows[1][j];
        const quad c = *(quad_anywhere*)&rows[2][j], e = *(quad_anywhere*)&rows[3][j];
        const quad ab0 = __builtin_shuffle(a, b, index{0, 4, 1, 5}), ab1 = __builtin_shuffle(a, b, index{2, 6, 3, 7});
        const quad ce0 = __builtin_shuffle(c, e, index{0, 4, 1, 5}), ce1 = __builtin_shuffle(c, e, index{2, 6, 3, 7});
        const quad out[4] = {
            __builtin_shuffle(ab0, ce0, index{0, 1, 4, 5}), __builtin_shuffle(ab0, ce0, index{2, 3, 6, 7}),
            __builtin_shuffle(ab1, ce1, index{0, 1, 4, 5}), __builtin_shuffle(ab1, ce1, index{2, 3, 6, 7})};
        for (int i = 0; i < 4 && j + i < lanes; i++) *(quad_anywhere*)&dst[(d + j + i) * kChunk + key] = out[i];
      }
    });
}

template <class T>   // the type of qkv and of the cache
class Attention {
 public:
  explicit Attention(const AttentionCall& call)
      : call_(call), group_(call.num_heads / call.cache.num_kv_heads), dim_(call.cache.head_dim),
        tile_tokens_(group_ < kTileRows ? kTileRows / group_ : 1) {}

  void run() {
    const AttentionTables& tables = call_.tables;
    int64_t num_tiles = 0, cost = 0;
    for (int64_t s = 0; s < tables.num_sequences; s++) {
      const int64_t queries = tables.query_starts[s + 1] - tables.query_starts[s];
      num_tiles += (queries + tile_tokens_ - 1) / tile_tokens_;
      cost += queries * tables.context_lens[s] * call_.num_heads * dim_;
    }
    Tile* tiles = static_cast<Tile*>(scratch(kPlan, num_tiles * sizeof(Tile)));
    num_tiles = 0;
    for (int32_t s = 0; s < tables.num_sequences; s++)   // a sequence's last tile sees most keys: it goes first
      for (int32_t last = tables.query_starts[s + 1]; last > tables.query_starts[s]; last -= tile_tokens_) {
        const int64_t first = last - tile_tokens_, start = tables.query_starts[s];
        tiles[num_tiles++] = {s, int32_t(first > start ? first : start), last};
      }
    const int64_t heads = call_.cache.num_kv_heads;
    Counter next;
    parallel(cost < 200000 ? 1 : call_.threads, [&] {
      for (int64_t i = next.next(); i < num_tiles * heads; i = next.next()) attend(tiles[i / heads], i % heads);
    });
  }

 private:
  struct Tile {
    int32_t sequence, first, last;   // tokens first .. last
  };

  void attend(const Tile& tile, int64_t kv_head) const {
    const AttentionTables& tables = call_.tables;
    const int64_t start = tables.query_starts[tile.sequence], end = tables.query_starts[tile.sequence + 1];
    const int64_t offset = tables.context_lens[tile.sequence] - end;   // position = token + offset
    const int64_t num_rows = (tile.last - tile.first) * group_;
    const int64_t q_size = padded(dim_);
    const int64_t floats = num_rows * (q_size + dim_ + kChunk + 3) + dim_ * kChunk;
    float* q = static_cast<float*>(scratch(kLocal, floats * sizeof(float)));
    float* out = q + num_rows * q_size;
    float* scores = out + num_rows * dim_;
    float* keys_t = scores + num_rows * kChunk;
    float* running_max = keys_t + dim_ * kChunk;
    float *running_sum = running_max + num_rows, *decay = running_sum + num_rows;
    const bool by_dots = end - start == 1;
    load_queries(tile, kv_head, by_dots, q);
    for (int64_t r = 0; r < num_rows; r++) running_max[r] = -INFINITY, running_sum[r] = 0;
    std::memset(out, 0, sizeof(float) * num_rows * dim_);

    const int64_t stop = tile.last + offset;   // the last row's keys end here
    const int64_t window = call_.window ? call_.window : stop;
    const int64_t oldest = tile.first + offset - window + 1;
    for (int64_t base = oldest > 0 ? oldest / kChunk * kChunk : 0; base < stop; base += kChunk) {
      const int64_t count = stop - base < kChunk ? stop - base : kChunk;
      const T *keys[kChunk], *values[kChunk];
      rows_of_cache(tile.sequence, kv_head, base, count, keys, values);
      if (by_dots) {
        score_by_dots(q, num_rows, keys, count, scores);
      } else {
        transpose_keys(keys, count, dim_, keys_t);
        score_by_sums(q, num_rows, keys_t, scores);
      }
      for (int64_t r = 0; r < num_rows; r++) {
        const int64_t position = tile.first + r / group_ + offset;
        const int64_t from = position - window + 1 - base, to = position + 1 - base;
        decay[r] = softmax(scores + r * kChunk, from > 0 ? from : 0, to < count ? to : count, running_max[r],
                           running_sum[r]);
      }
      for_row_tiles(num_rows, [&](auto R, int64_t r) {
        const float* weights = scores + r * kChunk;
        sum_columns<R>(weights, kChunk, values, count, 0, dim_, [&](int i, int64_t d, int64_t lanes, vec sum) {
          float* o = out + (r + i) * dim_ + d;
          store_lanes(o, fma(load_lanes(o, lanes), all(decay[r + i]), sum), lanes);
        });
      });
    }
    store_result(tile, kv_head, out, running_sum);
  }

  void load_queries(const Tile& tile, int64_t kv_head, bool by_dots, float* q) const {
    for (int64_t token = tile.first; token < tile.last; token++) {
      const T* from = static_cast<const T*>(call_.qkv) + token * call_.qkv_stride + kv_head * group_ * dim_;
      for (int64_t h = 0; h < group_; h++, from += dim_, q += padded(dim_)) {
        if (by_dots) arrange<T>(from, dim_, call_.scale, q);
        else arrange<float>(from, dim_, call_.scale, q);
      }
    }
  }

  // Pointers to the keys and values of positions base .. base + count.
  void rows_of_cache(int64_t sequence, int64_t kv_head, int64_t base, int64_t count, const T** keys,
                     const T** values) const {
    const KVCache& cache = call_.cache;
    const int32_t* blocks = call_.tables.block_tables + sequence * call_.tables.max_blocks;
    int64_t index = base / cache.block_size, within = base % cache.block_size;
    for (int64_t i = 0; i < count; index++, within = 0) {
      int64_t at = ((blocks[index] * cache.num_kv_heads + kv_head) * cache.block_size + within) * dim_;
      for (; within < cache.block_size && i < count; within++, i++, at += dim_) {
        keys[i] = static_cast<const T*>(cache.k) + at;
        values[i] = static_cast<const T*>(cache.v) + at;
      }
    }
    for (int64_t i = count; i % 4; i++) keys[i] = keys[count - 1];   // a tile takes four keys; these are not used
  }

  // A few rows: straight from the cache, which is read once.
  void score_by_dots(const float* q, int64_t num_rows, const T* const* keys, int64_t count, float* scores) const {
    for_row_tiles(num_rows, [&](auto R, int64_t r) {
      const float* q_at[R];
      for (int i = 0; i < R; i++) q_at[i] = q + (r + i) * padded(dim_);
      for (int64_t key = 0; key < count; key += 4)
        dot_tile<R, 4, false, Arranged>(q_at, keys + key, dim_, scores + r * kChunk + key, kChunk);
    });
  }

  // Many rows: with the keys transposed once, no sum across lanes is needed.
  void score_by_sums(const float* q, int64_t num_rows, const float* keys_t, float* scores) const {
    const float** rows = static_cast<const float**>(scratch(kShared, dim_ * sizeof(float*)));
    for (int64_t d = 0; d < dim_; d++) rows[d] = keys_t + d * kChunk;
    const int64_t q_size = padded(dim_);
    for_row_tiles(num_rows, [&](auto R, int64_t r) {
      const auto keep = [&](int i, int64_t column, int64_t lanes, vec sum) {
        store_lanes(scores + (r + i) * kChunk + column, sum, lanes);
      };
      sum_columns<R>(q + r * q_size, q_size, rows, dim_, 0, kChunk, keep);
    });
  }

  // scores[from:to] become weights relative to the running maximum, the others zero; returns the factor by which what
  // was summed before shrinks.
  static float softmax(float* scores, int64_t from, int64_t to, float& running_max, float& running_sum) {
    if (to <= from) {
      std::memset(scores, 0, kChunk * sizeof(float));
      return 1.0f;
    }
    for (int64_t i = 0; i < from; i++) scores[i] = -INFINITY;
    for (int64_t i = to; i < kChunk; i++) scores[i] = -INFINITY;
    vec most = load(scores);
    for (int64_t i = kLanes; i < kChunk; i += kLanes) most = max(most, load(scores + i));
    const float chunk_max = largest(most), new_max = chunk_max > running_max ? chunk_max : running_max;
    vec total = {};
    for (int64_t i = 0; i < kChunk; i += kLanes) {
      const vec weight = exp(load(scores + i) - new_max);
      store(scores + i, weight);
      total += weight;
    }
    const float decay = exp(all(running_max - new_max))[0];
    running_max = new_max;
    running_sum = running_sum * decay + sum(total);
    return decay;
  }

  void store_result(const Tile& tile, int64_t kv_head, const float* out, const float* running_sum) const {
    for (int64_t token = tile.first; token < tile.last; token++)
      for (int64_t h = 0; h < group_; h++, out += dim_, running_sum++) {
        T* to = static_cast<T*>(call_.out) + (token * call_.num_heads + kv_head * group_ + h) * dim_;
        for_lanes(dim_, [&](int64_t i, int64_t lanes) {
          store_lanes(to + i, load_lanes(out + i, lanes) / *running_sum, lanes);
        });
      }
  }

  const AttentionCall& call_;
  const int64_t group_, dim_, tile_tokens_;
};

inline void paged_attention(const AttentionCall& call, DType dtype) {
  with_dtype(dtype, [&](auto type) { Attention<decltype(type)>(call).run(); });
}

}  // namespace ray_lora::RL_ISA
