// The C interface: chooses the instruction set, checks every index before anything is written, and calls the kernel.
// Shapes and types were checked by the caller (ray_lora/backends/cpu_kernels.py); a call returns 0 or an Error.
#include "kernels.h"

#define RL_API extern "C" __attribute__((visibility("default")))

using namespace ray_lora;

namespace {

enum Error : int {
  kOk = 0,
  kBadSegments = 1,   // starts do not rise from 0 to the end of their table
  kBadRow = 2,
  kBadPage = 3,
  kBadQueries = 4,    // query_starts do not rise from 0 to num_tokens, or a context is shorter than its queries
  kBadBlock = 5,
  kBadPosition = 6,
  kBadSlot = 7,
};

const Kernels* const kLevels[] = {
    &portable_kernels,
#if defined(__x86_64__)
    &avx2_kernels, &avx512_kernels,
#endif
};

int best_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return 2;
  if (avx2) return 1;
#endif
  return 0;
}

const Kernels* kernels = kLevels[best_level()];

bool within(const int32_t* values, int64_t count, int64_t limit) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; i++) most = uint32_t(values[i]) > most ? uint32_t(values[i]) : most;
  return count == 0 || most < uint64_t(limit);   // a negative value is a large unsigned one
}

bool rise(const int32_t* starts, int64_t count, int64_t end) {
  bool ok = starts[0] == 0 && starts[count] == end;
  for (int64_t i = 0; i < count; i++) ok &= starts[i] <= starts[i + 1];
  return ok;
}

int check(const LoraPool& pool, const LoraSegments& s, int64_t num_tokens) {
  if (!rise(s.row_starts, s.num_segments, s.num_rows)) return kBadSegments;
  if (!rise(s.page_starts, s.num_segments, s.num_page_entries)) return kBadSegments;
  if (!within(s.rows, s.num_rows, num_tokens)) return kBadRow;
  return within(s.pages, s.num_page_entries, pool.num_pages) ? kOk : kBadPage;
}

}  // namespace

// Outputs that a panel of rl_linear's weight holds side by side.
RL_API int rl_panel_size() { return kPanel; }

// The best instruction set here: 0 portable, 1 AVX2, 2 AVX-512.
RL_API int rl_best_level() { return best_level(); }

// For tests: use another one that this machine has. Returns 0 if it does not.
RL_API int rl_set_level(int level) {
  if (level < 0 || level > best_level()) return 0;
  kernels = kLevels[level];
  return 1;
}

RL_API int rl_add_lora(void* y, int64_t y_stride, const void* x, int64_t x_stride, int64_t num_tokens, int dtype,
                       const LoraPool* pool, const LoraSegments* segments, int threads) {
  if (const int error = check(*pool, *segments, num_tokens)) return error;
  kernels->add_lora({y, x, y_stride, x_stride, *pool, *segments, threads}, DType(dtype));
  return kOk;
}

RL_API int rl_paged_attention(void* out, const void* qkv, int64_t qkv_stride, int64_t num_heads, const KVCache* cache,
                              const AttentionTables* tables, float scale, int64_t window, int dtype, int threads) {
  const AttentionTables& t = *tables;
  if (!rise(t.query_starts, t.num_sequences, t.num_tokens)) return kBadQueries;
  for (int64_t s = 0; s < t.num_sequences; s++) {
    const int64_t context_len = t.context_lens[s];
    const int64_t num_blocks = (context_len + cache->block_size - 1) / cache->block_size;
    if (context_len < t.query_starts[s + 1] - t.query_starts[s] || num_blocks > t.max_blocks) return kBadQueries;
    if (!within(t.block_tables + s * t.max_blocks, num_blocks, cache->num_blocks)) return kBadBlock;
  }
  kernels->paged_attention({out, qkv, qkv_stride, num_heads, *cache, t, scale, window, threads}, DType(dtype));
  return kOk;
}

RL_API int rl_rotary_and_cache(void* qkv, int64_t qkv_stride, int64_t num_heads, const void* q_norm, const void* k_norm,
                               float eps, const float* cos, const float* sin, int64_t max_positions,
                               const KVCache* cache, const AttentionTables* tables, int dtype, int threads) {
  const AttentionTables& t = *tables;
  if (!within(t.positions, t.num_tokens, max_positions)) return kBadPosition;
  if (!within(t.slot_mapping, t.num_tokens, cache->num_blocks * cache->block_size)) return kBadSlot;
  kernels->rotary_and_cache({qkv, q_norm, k_norm, cos, sin, qkv_stride, num_heads, *cache, t, eps, threads},
                            DType(dtype));
  return kOk;
}

RL_API void rl_linear(void* out, const void* x, int64_t x_stride, int64_t num_rows, const void* weight,
                      const void* bias, int64_t in_features, int64_t out_features, int dtype, int threads) {
  kernels->linear({out, x, weight, bias, x_stride, num_rows, in_features, out_features, threads}, DType(dtype));
}

RL_API int rl_linear_lora(void* out, const void* x, int64_t x_stride, int64_t num_rows, const void* weight,
                          const void* bias, int64_t in_features, int64_t out_features, int dtype, const LoraPool* pool,
                          const LoraSegments* segments, int threads) {
  if (const int error = check(*pool, *segments, num_rows)) return error;
  kernels->linear_lora({out, x, weight, bias, x_stride, num_rows, in_features, out_features, threads},
                       {out, x, out_features, x_stride, *pool, *segments, threads}, DType(dtype));
  return kOk;
}

RL_API void rl_rms_norm(void* out, void* residual, int64_t residual_stride, const void* x, int64_t x_stride,
                        const void* weight, int64_t num_rows, int64_t size, float eps, int dtype, int threads) {
  kernels->rms_norm({out, residual, x, weight, residual_stride, x_stride, num_rows, size, eps, threads}, DType(dtype));
}

RL_API void rl_silu_and_mul(void* out, const void* gate_up, int64_t stride, int64_t num_rows, int64_t size, int dtype,
                            int threads) {
  kernels->silu_and_mul({out, gate_up, stride, num_rows, size, threads}, DType(dtype));
}
