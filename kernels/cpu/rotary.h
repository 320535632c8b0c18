// rotary_and_cache_: normalise (if asked) and rotate queries and keys in place, then write keys and values to blocks.
#pragma once
#include "elementwise.h"
#include "kernels.h"
#include "threads.h"

namespace ray_lora::RL_ISA {

// One head, its halves being first and second: first * cos - second * sin, and second * cos + first * sin.
template <class T>
void rotate_head(T* head, const T* norm, float eps, const float* cos, const float* sin, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  float scale = 1.0f;
  if (norm) {
    vec squares = {};
    for_lanes(head_dim, [&](int64_t i, int64_t lanes) {
      const vec v = load_lanes(head + i, lanes);
      squares = fma(v, v, squares);
    });
    scale = inverse_norm(squares, head_dim, eps);
  }
  for_lanes(half, [&](int64_t i, int64_t lanes) {
    vec first = load_lanes(head + i, lanes), second = load_lanes(head + half + i, lanes);
    if (norm) {
      first = rounded<T>(rounded<T>(first * scale) * load_lanes(norm + i, lanes));
      second = rounded<T>(rounded<T>(second * scale) * load_lanes(norm + half + i, lanes));
    }
    const vec c = load_lanes(cos + i, lanes), s = load_lanes(sin + i, lanes);
    store_lanes(head + i, first * c - second * s, lanes);
    store_lanes(head + half + i, second * c + first * s, lanes);
  });
}

template <class T>   // the type of qkv and of the cache
void rotate_and_cache_row(const RotaryCall& call, int64_t token) {
  const KVCache& cache = call.cache;
  const int64_t dim = cache.head_dim, position = call.tables.positions[token], slot = call.tables.slot_mapping[token];
  const float *cos = call.cos + position * (dim / 2), *sin = call.sin + position * (dim / 2);
  T* heads = static_cast<T*>(call.qkv) + token * call.qkv_stride;
  for (int64_t h = 0; h < call.num_heads + cache.num_kv_heads; h++) {
    const void* norm = h < call.num_heads ? call.q_norm : call.k_norm;
    rotate_head(heads + h * dim, static_cast<const T*>(norm), call.eps, cos, sin, dim);
  }
  const T* keys = heads + call.num_heads * dim;
  for (int64_t h = 0; h < cache.num_kv_heads; h++) {
    const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
    const int64_t at = ((block * cache.num_kv_heads + h) * cache.block_size + offset) * dim;
    std::memcpy(static_cast<T*>(cache.k) + at, keys + h * dim, dim * sizeof(T));
    std::memcpy(static_cast<T*>(cache.v) + at, keys + (cache.num_kv_heads + h) * dim, dim * sizeof(T));
  }
}

inline void rotary_and_cache(const RotaryCall& call, DType dtype) {
  const int64_t cost = (call.num_heads + 2 * call.cache.num_kv_heads) * call.cache.head_dim;
  with_dtype(dtype, [&](auto type) {
    parallel_rows(call.threads, call.tables.num_tokens, cost, [&](int64_t first, int64_t last) {
      for (int64_t token = first; token < last; token++) rotate_and_cache_row<decltype(type)>(call, token);
    });
  });
}

}  // namespace ray_lora::RL_ISA
