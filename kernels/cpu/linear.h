// out = x @ weight.T + bias.
//
// The weight is packed in panels of kPanel outputs, [panels, in_features, kPanel], so that it is read from end to end
// and a register tile needs no sums across lanes. A tile of up to kLinearRows rows takes a panel in one pass; rows are
// shared out evenly, and further tiles find the panel in the second cache. Each result has one accumulator, added to
// in the order of the inputs: it is bit for bit the same whatever rows are beside it.
#pragma once
#include "kernels.h"
#include "threads.h"
#include "tile.h"

namespace ray_lora::RL_ISA {

// Rows and vectors of a tile: as many accumulators as the registers hold beside a row of the panel.
#if defined(RL_AVX512)
constexpr int kLinearRows = 8, kLinearVectors = 3;
#elif defined(RL_AVX2)
constexpr int kLinearRows = 6, kLinearVectors = 2;
#else
constexpr int kLinearRows = 3, kLinearVectors = 4;
#endif
static_assert(kPanel % (kLinearVectors * kLanes) == 0, "a panel is a whole number of tiles");

// Calls body(constant n) for a number n of 1..N that is known only here.
template <int N, class Body>
RL_INLINE void with_constant(int64_t n, const Body& body) {
  if constexpr (N > 1)
    if (n < N) return with_constant<N - 1>(n, body);
  body(std::integral_constant<int, N>{});
}

template <class T>
class Linear {
 public:
  explicit Linear(const LinearCall& call) : call_(call) {}

  void run() const {
    const int64_t blocks = num_blocks();
    const bool small = call_.num_rows * call_.in_features * call_.out_features < 200000;
    Counter next;
    parallel(small ? 1 : call_.threads, [&] {
      for (int64_t i = next.next(); i < blocks * num_panels(); i = next.next())
        panel(i / blocks, i % blocks, i / blocks + call_.threads);
    });
  }

  int64_t num_panels() const { return (call_.out_features + kPanel - 1) / kPanel; }
  int64_t num_blocks() const { return (call_.num_rows + 8 * kLinearRows - 1) / (8 * kLinearRows); }

  // One panel of the weight with one block of rows; `ahead` is the panel that this thread will probably take next.
  void panel(int64_t index, int64_t block, int64_t ahead) const {
    const int64_t begin = block * call_.num_rows / num_blocks();
    const int64_t num_rows = (block + 1) * call_.num_rows / num_blocks() - begin;
    const int64_t tiles = (num_rows + kLinearRows - 1) / kLinearRows;
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t row = begin + tile * num_rows / tiles, end = begin + (tile + 1) * num_rows / tiles;
      with_constant<kLinearRows>(end - row, [&](auto R) { rows_of_panel<R>(index, row, tile, tiles, ahead); });
    }
  }

 private:
  template <int R>
  void rows_of_panel(int64_t index, int64_t row, int64_t tile, int64_t tiles, int64_t next) const {
    constexpr int64_t kColumns = kLinearVectors * kLanes;
    const T* weight = panel_at(index);
    const float* x[R];
    for (int r = 0; r < R; r++) x[r] = row_of_x(row + r, r);
    Ahead ahead(panel_at(next < num_panels() ? next : index), call_.in_features, tile, tiles);
    for (int64_t n = 0; n < kPanel; n += kColumns) {
      vec sums[R][kLinearVectors] = {};
      const auto step = [&](int64_t k) {
        vec w[kLinearVectors];
#pragma GCC unroll 16
        for (int v = 0; v < kLinearVectors; v++) w[v] = load(weight + k * kPanel + n + v * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          const vec value = all(x[r][k]);
#pragma GCC unroll 16
          for (int v = 0; v < kLinearVectors; v++) sums[r][v] = fma(value, w[v], sums[r][v]);
        }
      };
      int64_t k = 0;
      if (R >= 4 && n == 0 && tile < 2)   // fewer rows are no more than a reading loop, which the processor foresees
        for (; k + 2 <= call_.in_features; k += 2) {
          ahead.fetch_two_steps();
          step(k);
          step(k + 1);
        }
      for (; k < call_.in_features; k++) step(k);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int v = 0; v < kLinearVectors; v++) finish(row + r, index * kPanel + n + v * kLanes, sums[r][v]);
    }
  }

  const T* panel_at(int64_t index) const {
    return static_cast<const T*>(call_.weight) + index * call_.in_features * kPanel;
  }

  // Fetches another panel, evenly over the time that this one is computed with. Two tiles share this where there are so
  // many, each doing half.
  struct Ahead {
    Ahead(const T* panel, int64_t in_features, int64_t tile, int64_t tiles)
        : at(reinterpret_cast<const char*>(panel)), bytes((tiles > 1 ? 1 : 2) * kPanel * sizeof(T)) {
      if (tile == 1) at += in_features / 2 * bytes;
    }
    RL_INLINE void fetch_two_steps() {
      for (int64_t i = 0; i < bytes; i += 64) fetch(at + i);
      at += bytes;
    }
    const char* at;
    const int64_t bytes;
  };

  const float* row_of_x(int64_t row, int64_t place) const {
    const T* x = static_cast<const T*>(call_.x) + row * call_.x_stride;
    if constexpr (std::is_same_v<T, float>) {
      return x;
    } else {
      float* copy = static_cast<float*>(scratch(kLocal, kLinearRows * call_.in_features * sizeof(float)));
      copy += place * call_.in_features;
      for_lanes(call_.in_features, [&](int64_t i, int64_t lanes) {
        store_lanes(copy + i, load_lanes(x + i, lanes), lanes);
      });
      return copy;
    }
  }

  void finish(int64_t row, int64_t column, vec sum) const {
    const int64_t left = call_.out_features - column;
    if (left <= 0) return;
    const int64_t lanes = left < kLanes ? left : kLanes;
    if (call_.bias) sum += load_lanes(static_cast<const T*>(call_.bias) + column, lanes);
    store_lanes(static_cast<T*>(call_.out) + row * call_.out_features + column, sum, lanes);
  }

  const LinearCall& call_;
};

inline void linear(const LinearCall& call, DType dtype) {
  with_dtype(dtype, [&](auto type) { Linear<decltype(type)>(call).run(); });
}

}  // namespace ray_lora::RL_ISA
