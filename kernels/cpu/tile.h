// The two register tiles that every matrix product here is made of. Both keep one accumulator per result and add to it
// in order, so a result is bit for bit the same whatever tile, block or thread it falls in.
#pragma once
#include "vec.h"

namespace ray_lora::RL_ISA {

// Calls body(constant R, first) over tiles that cover 0..rows, R = kRows while that many are left, then smaller.
template <class Body>
RL_INLINE void for_row_tiles(int64_t rows, const Body& body) {
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows) body(std::integral_constant<int, kRows>{}, r);
  if constexpr (kRows > 4)
    if (r + 4 <= rows) body(std::integral_constant<int, 4>{}, r), r += 4;
  if (r + 2 <= rows) body(std::integral_constant<int, 2>{}, r), r += 2;
  if (r < rows) body(std::integral_constant<int, 1>{}, r);
}

// Products along contiguous memory on both sides: out[r][p] (+)= x[r][0:size] . a[p][0:size].
// Adds to `out` or replaces it; P is a multiple of 4.
template <int R, int P, bool kAdd, class T>
RL_INLINE void dot_tile(const float* const* x, const T* const* a, int64_t size, float* out, int64_t out_stride) {
  vec sums[R][P] = {};
  const auto step = [&](auto&& load_x, auto&& load_a) {
    vec xs[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) xs[r] = load_x(x[r]);
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) {
      const vec as = load_a(a[p]);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) sums[r][p] = fma(xs[r], as, sums[r][p]);
    }
  };
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    step([i](const float* p) { return load(p + i); }, [i](const T* p) { return load(p + i); });
  if (i < size)
    step([=](const float* p) { return load_part(p + i, size - i); },
         [=](const T* p) { return load_part(p + i, size - i); });
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int p = 0; p < P; p += 4) {
      quad_anywhere* to = (quad_anywhere*)(out + r * out_stride + p);
      const quad q = sum4(sums[r][p], sums[r][p + 1], sums[r][p + 2], sums[r][p + 3]);
      *to = kAdd ? *to + q : q;
    }
}

// Scaled rows added up: sums[r] = a[r][0] * row[0] + a[r][1] * row[1] + ..., over columns n .. n + V * kLanes of the rows.
// With V = 1 only the first `lanes` columns are touched. Ends by calling finish(r, column, lanes, sum).
template <int R, int V, class T, class Finish>
RL_INLINE void sum_tile(const float* a, int64_t a_stride, const T* const* rows, int64_t depth, int64_t n, int64_t lanes,
                        const Finish& finish) {
  vec sums[R][V] = {};
  for (int64_t k = 0; k < depth; k++) {
    vec row[V];
    if constexpr (V == 1) row[0] = load_lanes(rows[k] + n, lanes);
    else
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) row[v] = load(rows[k] + n + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const vec scale = all(a[r * a_stride + k]);
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) sums[r][v] = fma(scale, row[v], sums[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) finish(r, n + v * kLanes, V == 1 ? lanes : int64_t{kLanes}, sums[r][v]);
}

// sum_tile over columns first .. last.
template <int R, class T, class Finish>
RL_INLINE void sum_columns(const float* a, int64_t a_stride, const T* const* rows, int64_t depth, int64_t first,
                           int64_t last, const Finish& finish) {
  constexpr int V = tile_width(R);
  int64_t n = first;
  for (; n + V * kLanes <= last; n += V * kLanes) sum_tile<R, V>(a, a_stride, rows, depth, n, kLanes, finish);
  for (; n < last; n += kLanes)
    sum_tile<R, 1>(a, a_stride, rows, depth, n, last - n < kLanes ? last - n : kLanes, finish);
}

// Calls body(T{}) with the storage type that `dtype` names.
template <class Body>
RL_INLINE void with_dtype(int64_t dtype, const Body& body) {
  if (dtype == kFloat32) body(float{});
  else if (dtype == kBFloat16) body(bf16{});
  else body(f16{});
}

}  // namespace ray_lora::RL_ISA
