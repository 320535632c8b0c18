// The two register tiles that every matrix product here is made of. Both keep one accumulator per result and add to it
// in order, so a result is bit for bit the same whatever tile, block or thread it falls in.
//
// The larger operand is read two vectors at a time, as load_pair (vec.h) gives them.
#pragma once
#include "vec.h"

namespace ray_lora::RL_ISA {

// Rows of A, or vectors of B, that a tile of so many rows handles side by side: as many as the registers hold.
constexpr int dot_width(int rows) { return rows * 8 <= kRows * 4 ? 8 : 4; }
constexpr int sum_width(int rows) { return rows * 16 <= kRows * 4 ? 16 : dot_width(rows); }

// What a tile fetches while it reads 2 * kLanes values at p: nothing, or what lies so many bytes further.
struct FetchNothing {
  template <class T>
  RL_INLINE void operator()(const T*) const {}
};
struct FetchAhead {
  int64_t bytes;
  template <class T>
  RL_INLINE void operator()(const T* p) const {
    constexpr int64_t size = 2 * kLanes * sizeof(T);
    const char* at = reinterpret_cast<const char*>(p) + bytes;
    if (size < 64 && (reinterpret_cast<uintptr_t>(at) & 63) >= size) return;   // fetched before
    for (int64_t i = 0; i < size; i += 64) fetch(at + i);
  }
};

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
// Adds to `out` or replaces it; P is a multiple of 4. X says how x is stored: in its own order (InOrder<type>), or as
// arrange() has left it (Arranged).
template <int R, int P, bool kAdd, class X, class T, class Fetch = FetchNothing>
RL_INLINE void dot_tile(const typename X::type* const* x, const T* const* a, int64_t size, float* out,
                        int64_t out_stride, const Fetch& fetch = {}) {
  vec sums[R][P] = {};
  const auto step = [&](int64_t i, auto&& load_x, auto&& load_a) {
    Pair xs[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) xs[r] = load_x(x[r] + i);
#pragma GCC unroll 16
    for (int p = 0; p < P; p++) {
      const Pair as = load_a(a[p] + i);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) sums[r][p] = fma(xs[r].first, as.first, sums[r][p]);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) sums[r][p] = fma(xs[r].second, as.second, sums[r][p]);
    }
  };
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
#pragma GCC unroll 16
    for (int p = 0; p < P; p++) fetch(a[p] + i);
    step(i, [](auto* p) { return X::template load<T>(p); }, [](const T* p) { return load_pair(p); });
  }
  if (i < size)
    step(i, [=](auto* p) { return X::template load_part<T>(p, size - i); },
         [=](const T* p) { return load_pair_part(p, size - i); });
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int p = 0; p < P; p += 4) {
      quad_anywhere* to = (quad_anywhere*)(out + r * out_stride + p);
      const quad q = sum4(sums[r][p], sums[r][p + 1], sums[r][p + 2], sums[r][p + 3]);
      *to = kAdd ? *to + q : q;
    }
}

template <class S>
struct InOrder {
  using type = S;
  template <class T>
  static RL_INLINE Pair load(const S* p) {
    if constexpr (std::is_same_v<S, T>) return load_pair(p);
    else return split<T>(RL_ISA::load(p), RL_ISA::load(p + kLanes));
  }
  template <class T>
  static RL_INLINE Pair load_part(const S* p, int64_t count) {
    S values[2 * kLanes] = {};
    std::memcpy(values, p, count * sizeof(S));
    return load<T>(values);
  }
};

struct Arranged {
  using type = float;
  template <class T>
  static RL_INLINE Pair load(const float* p) { return {RL_ISA::load(p), RL_ISA::load(p + kLanes)}; }
  template <class T>
  static RL_INLINE Pair load_part(const float* p, int64_t) { return load<T>(p); }
};

// The room that arrange() needs for `size` values.
constexpr int64_t padded(int64_t size) { return (size + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes); }

// Writes `size` values as they will be used beside an operand of type T, many times: float32, in the order of T's
// pairs, times `scale`, zeros up to padded(size).
template <class T, class S>
RL_INLINE void arrange(const S* from, int64_t size, float scale, float* to) {
  int64_t i = 0;
  const auto put = [&](Pair pair) {
    store(to + i, pair.first * scale);
    store(to + i + kLanes, pair.second * scale);
  };
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) put(InOrder<S>::template load<T>(from + i));
  if (i < size) put(InOrder<S>::template load_part<T>(from + i, size - i));
}

// Scaled rows added up: sums[r] = a[r][0] * row[0] + a[r][1] * row[1] + ..., over columns n .. n + V * kLanes.
// With V = 2 only the first `count` columns are touched. Ends by calling finish(r, column, lanes, sum).
template <int R, int V, class T, class Finish>
RL_INLINE void sum_tile(const float* a, int64_t a_stride, const T* const* rows, int64_t depth, int64_t n, int64_t count,
                        const Finish& finish) {
  vec sums[R][V] = {};
  for (int64_t k = 0; k < depth; k++) {
    Pair row[V / 2];
    if constexpr (V == 2) row[0] = load_pair_part(rows[k] + n, count);
    else
#pragma GCC unroll 16
      for (int v = 0; v < V / 2; v++) row[v] = load_pair(rows[k] + n + 2 * v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const vec scale = all(a[r * a_stride + k]);
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) sums[r][v] = fma(scale, v % 2 ? row[v / 2].second : row[v / 2].first, sums[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v += 2) {
      const Pair both = join<T>(sums[r][v], sums[r][v + 1]);
      if constexpr (V > 2) {
        finish(r, n + v * kLanes, int64_t{kLanes}, both.first);
        finish(r, n + (v + 1) * kLanes, int64_t{kLanes}, both.second);
      } else {
        finish(r, n, count < kLanes ? count : kLanes, both.first);
        if (count > kLanes) finish(r, n + kLanes, count - kLanes, both.second);
      }
    }
}

// sum_tile over columns first .. last.
template <int R, class T, class Finish>
RL_INLINE void sum_columns(const float* a, int64_t a_stride, const T* const* rows, int64_t depth, int64_t first,
                           int64_t last, const Finish& finish) {
  constexpr int V = sum_width(R);
  int64_t n = first;
  for (; n + V * kLanes <= last; n += V * kLanes) sum_tile<R, V>(a, a_stride, rows, depth, n, V * kLanes, finish);
  if constexpr (V > 4)
    for (; n + 4 * kLanes <= last; n += 4 * kLanes) sum_tile<R, 4>(a, a_stride, rows, depth, n, 4 * kLanes, finish);
  for (; n < last; n += 2 * kLanes)
    sum_tile<R, 2>(a, a_stride, rows, depth, n, last - n < 2 * kLanes ? last - n : 2 * kLanes, finish);
}

// Calls body(T{}) with the storage type that `dtype` names.
template <class Body>
RL_INLINE void with_dtype(int64_t dtype, const Body& body) {
  if (dtype == kFloat32) body(float{});
  else if (dtype == kBFloat16) body(bf16{});
  else body(f16{});
}

}  // namespace ray_lora::RL_ISA
