// rms_norm, add_rms_norm_ and silu_and_mul: one pass over each row, which stays in the first cache for the second look.
#pragma once
#include "kernels.h"
#include "threads.h"
#include "tile.h"

namespace ray_lora::RL_ISA {

// 1 / sqrt(mean of squares + eps), from the lanes' sums of squares.
RL_INLINE float inverse_norm(vec squares, int64_t size, float eps) {
  return 1.0f / std::sqrt(sum(squares) / size + eps);
}

template <class T>
void norm_row(const T* x, T* residual, const T* weight, T* out, int64_t size, float eps) {
  vec squares = {};
  for_lanes(size, [&](int64_t i, int64_t lanes) {
    vec v = load_lanes(x + i, lanes);
    if (residual) {
      v = rounded<T>(v + load_lanes(residual + i, lanes));
      store_lanes(residual + i, v, lanes);
    }
    squares = fma(v, v, squares);
  });
  const float scale = inverse_norm(squares, size, eps);
  const T* from = residual ? residual : x;
  for_lanes(size, [&](int64_t i, int64_t lanes) {
    store_lanes(out + i, rounded<T>(load_lanes(from + i, lanes) * scale) * load_lanes(weight + i, lanes), lanes);
  });
}

inline void rms_norm(const NormCall& call, DType dtype) {
  with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    parallel_rows(call.threads, call.num_rows, call.size, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++)
        norm_row(static_cast<const T*>(call.x) + row * call.x_stride,
                 call.residual ? static_cast<T*>(call.residual) + row * call.residual_stride : nullptr,
                 static_cast<const T*>(call.weight), static_cast<T*>(call.out) + row * call.size, call.size, call.eps);
    });
  });
}

inline void silu_and_mul(const SiluCall& call, DType dtype) {
  with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    parallel_rows(call.threads, call.num_rows, 4 * call.size, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++) {
        const T* gate = static_cast<const T*>(call.gate_up) + row * call.stride;
        T* out = static_cast<T*>(call.out) + row * call.size;
        for_lanes(call.size, [&](int64_t i, int64_t lanes) {
          const vec g = load_lanes(gate + i, lanes), up = load_lanes(gate + call.size + i, lanes);
          store_lanes(out + i, rounded<T>(g / (exp(-g) + 1.0f)) * up, lanes);
        });
      }
    });
  });
}

}  // namespace ray_lora::RL_ISA
