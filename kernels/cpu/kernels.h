// The arguments of every kernel and the table of kernels that each instruction set fills in.
// Layouts and semantics are those of ray_lora/ops; ray_lora/backends/cpu_structs.py mirrors these structs in ctypes.
#pragma once
#include <cstdint>

namespace ray_lora {

enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

constexpr int kPageRank = 16;
constexpr int kPanel = 48;   // outputs that a linear layer's packed weight holds side by side

struct LoraPool {
  const void* a;           // [num_pages, num_slices, 16, in_features]
  const void* b;           // [num_pages, 16, out_features]
  const int64_t* slices;   // num_slices + 1 column offsets, from 0 to out_features
  int64_t num_slices, num_pages, in_features, out_features;
  int64_t dtype;
};

struct LoraSegments {
  const int32_t *rows, *row_starts, *pages, *page_starts;
  int64_t num_rows, num_page_entries, num_segments;
};

struct LoraCall {
  void* y;
  const void* x;
  int64_t y_stride, x_stride;   // elements from one row to the next
  const LoraPool& pool;
  const LoraSegments& segments;
  int threads;
};

struct KVCache {
  void *k, *v;   // [num_blocks, num_kv_heads, block_size, head_dim]
  int64_t num_blocks, num_kv_heads, block_size, head_dim;
  int64_t dtype;
};

struct AttentionTables {
  const int32_t *query_starts, *context_lens, *block_tables, *positions, *slot_mapping;
  int64_t num_sequences, max_blocks, num_tokens;
};

struct AttentionCall {
  void* out;         // [num_tokens, num_heads * head_dim], contiguous
  const void* qkv;   // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
  int64_t qkv_stride, num_heads;
  const KVCache& cache;
  const AttentionTables& tables;
  float scale;
  int64_t window;   // 0: all positions
  int threads;
};

struct RotaryCall {
  void* qkv;
  const void *q_norm, *k_norm;   // [head_dim], or null
  const float *cos, *sin;        // [max_positions, head_dim / 2]
  int64_t qkv_stride, num_heads;
  const KVCache& cache;
  const AttentionTables& tables;
  float eps;
  int threads;
};

struct LinearCall {
  void* out;                  // [num_rows, out_features], contiguous
  const void *x, *weight;     // weight [ceil(out_features / kPanel), in_features, kPanel], contiguous
  const void* bias;           // [out_features], or null
  int64_t x_stride, num_rows, in_features, out_features;
  int threads;
};

struct NormCall {
  void* out;         // contiguous
  void* residual;    // null: plain rms_norm of x
  const void* x;
  const void* weight;
  int64_t residual_stride, x_stride, num_rows, size;
  float eps;
  int threads;
};

struct SiluCall {
  void* out;             // [num_rows, size], contiguous
  const void* gate_up;   // [num_rows, 2 * size]
  int64_t stride, num_rows, size;
  int threads;
};

// What one instruction set offers. `dtype` is that of the activations (qkv, x, y).
struct Kernels {
  void (*add_lora)(const LoraCall&, DType dtype);
  void (*paged_attention)(const AttentionCall&, DType dtype);
  void (*rotary_and_cache)(const RotaryCall&, DType dtype);
  void (*linear)(const LinearCall&, DType dtype);
  void (*linear_lora)(const LinearCall&, const LoraCall&, DType dtype);
  void (*rms_norm)(const NormCall&, DType dtype);
  void (*silu_and_mul)(const SiluCall&, DType dtype);
};

extern const Kernels portable_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels, avx512_kernels;
#endif

}  // namespace ray_lora
