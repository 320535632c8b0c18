// Vectors of float32 lanes for the instruction set that the including file has switched on (RL_AVX512, RL_AVX2, or
// neither). Arithmetic is GCC's vector extension, so most of this is written once; where an instruction has no such
// spelling (fused multiply-add, half precision, masks, sums across lanes) each set has its own lines.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(RL_AVX512) || defined(RL_AVX2)
#include <immintrin.h>
#endif

#define RL_INLINE inline __attribute__((always_inline))

namespace ray_lora::RL_ISA {

#if defined(RL_AVX512)
constexpr int kLanes = 16, kRows = 6;   // kRows x 4 accumulators and their operands fill the registers
#elif defined(RL_AVX2)
constexpr int kLanes = 8, kRows = 3;
#else
constexpr int kLanes = 4, kRows = 3;
#endif

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

typedef float vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t ivec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t uvec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t hvec __attribute__((vector_size(2 * kLanes)));
typedef float quad __attribute__((vector_size(16)));
typedef float vec_anywhere __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t uvec_anywhere __attribute__((vector_size(4 * kLanes), aligned(2), may_alias));
typedef uint16_t hvec_anywhere __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));
typedef float quad_anywhere __attribute__((vector_size(16), aligned(4), may_alias));

RL_INLINE vec all(float value) { return value - vec{}; }
RL_INLINE vec max(vec a, vec b) { return a > b ? a : b; }
RL_INLINE vec fma(vec a, vec b, vec c) {
#if defined(RL_AVX512)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(RL_AVX2)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__FP_FAST_FMAF)
  for (int i = 0; i < kLanes; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

// 16-bit lanes to 32-bit lanes and back.
RL_INLINE uvec extend(hvec h) {
#if defined(RL_AVX512)
  return (uvec)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(RL_AVX2)
  return (uvec)_mm256_cvtepu16_epi32((__m128i)h);
#else
  return __builtin_convertvector(h, uvec);
#endif
}
RL_INLINE hvec shorten(uvec u) {
#if defined(RL_AVX512)
  return (hvec)_mm512_cvtepi32_epi16((__m512i)u);
#elif defined(RL_AVX2)
  return (hvec)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)u), _mm256_extracti128_si256((__m256i)u, 1));
#else
  return __builtin_convertvector(u, hvec);
#endif
}

// bfloat16 and float16, to and from float32 lanes. Rounding is to nearest, ties to even.
RL_INLINE vec widen(hvec h, bf16) { return (vec)(extend(h) << 16); }
RL_INLINE hvec narrow(vec v, bf16) {
  const uvec u = (uvec)v;
  const uvec rounded = u + 0x7fff + ((u >> 16) & 1);
  return shorten((v == v ? rounded : u | 0x400000) >> 16);
}
RL_INLINE vec widen(hvec h, f16) {
#if defined(RL_AVX512)
  return _mm512_cvtph_ps((__m256i)h);
#elif defined(RL_AVX2)
  return _mm256_cvtph_ps((__m128i)h);
#else
  const uvec u = extend(h), magnitude = u & 0x7fff;
  const uvec scaled = (uvec)((vec)(magnitude << 13) * 0x1p112f);   // exact, for subnormals too
  return (vec)((magnitude >= 0x7c00u ? scaled | 0x7f800000 : scaled) | (u & 0x8000) << 16);
#endif
}
RL_INLINE hvec narrow(vec v, f16) {
#if defined(RL_AVX512)
  return (hvec)_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(RL_AVX2)
  return (hvec)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
#else
  const uvec u = (uvec)v, sign = u & 0x80000000, magnitude = u ^ sign;
  const uvec special = magnitude > 0x7f800000u ? uvec{} + 0x7e00 : uvec{} + 0x7c00;
  const uvec subnormal = (uvec)((vec)magnitude + 0.5f) - 0x3f000000;   // the adder aligns and rounds
  const uvec normal = (magnitude + (0xc8000fffu + ((magnitude >> 13) & 1))) >> 13;
  const uvec finite = magnitude < 0x38800000u ? subnormal : normal;
  return shorten((magnitude >= 0x47800000u ? special : finite) | sign >> 16);
#endif
}

RL_INLINE vec load(const float* p) { return *(const vec_anywhere*)p; }
RL_INLINE void store(float* p, vec v) { *(vec_anywhere*)p = v; }
template <class T>
RL_INLINE vec load(const T* p) { return widen(*(const hvec_anywhere*)p, T{}); }
template <class T>
RL_INLINE void store(T* p, vec v) { *(hvec_anywhere*)p = narrow(v, T{}); }

// The first `count` lanes only: nothing past them is touched, and they load as zero.
template <class T>
RL_INLINE vec load_part(const T* p, int64_t count) {
#if defined(RL_AVX512)
  const __mmask16 mask = (1u << count) - 1;
  if constexpr (std::is_same_v<T, float>) return _mm512_maskz_loadu_ps(mask, p);
  else return widen((hvec)_mm256_maskz_loadu_epi16(mask, p), T{});
#else
  T lanes[kLanes] = {};
  std::memcpy(lanes, p, count * sizeof(T));
  return load(lanes);
#endif
}
template <class T>
RL_INLINE void store_part(T* p, vec v, int64_t count) {
#if defined(RL_AVX512)
  const __mmask16 mask = (1u << count) - 1;
  if constexpr (std::is_same_v<T, float>) _mm512_mask_storeu_ps(p, mask, v);
  else _mm256_mask_storeu_epi16(p, mask, (__m256i)narrow(v, T{}));
#else
  T lanes[kLanes];
  store(lanes, v);
  std::memcpy(p, lanes, count * sizeof(T));
#endif
}

// Calls body(offset, lanes) over 0..size, the last time perhaps with fewer than kLanes.
template <class Body>
RL_INLINE void for_lanes(int64_t size, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) body(i, kLanes);
  if (i < size) body(i, size - i);
}
template <class T>
RL_INLINE vec load_lanes(const T* p, int64_t lanes) { return lanes == kLanes ? load(p) : load_part(p, lanes); }
template <class T>
RL_INLINE void store_lanes(T* p, vec v, int64_t lanes) {
  if (lanes == kLanes) store(p, v);
  else store_part(p, v, lanes);
}

// 2 * kLanes adjacent values as two vectors, in the order that is cheapest: bfloat16 lies in pairs in 32-bit lanes, so
// its even values are a shift and its odd ones a mask away; other types keep their order. `split` makes this order of
// two vectors in the usual one, and `join` undoes it.
struct Pair {
  vec first, second;
};
template <class T>
RL_INLINE Pair load_pair(const T* p) {
  if constexpr (std::is_same_v<T, bf16>) {
    const uvec both = *(const uvec_anywhere*)p;
    return {(vec)(both << 16), (vec)(both & 0xffff0000)};
  } else {
    return {load(p), load(p + kLanes)};
  }
}
template <class T>
RL_INLINE Pair load_pair_part(const T* p, int64_t count) {
  T values[2 * kLanes] = {};
  std::memcpy(values, p, count * sizeof(T));
  return load_pair(values);
}
template <class T>
RL_INLINE Pair join(vec first, vec second) {
  if constexpr (!std::is_same_v<T, bf16>) return {first, second};
  ivec low, high;
  for (int i = 0; i < kLanes; i++) low[i] = i / 2 + i % 2 * kLanes, high[i] = low[i] + kLanes / 2;
  return {__builtin_shuffle(first, second, low), __builtin_shuffle(first, second, high)};
}
template <class T>
RL_INLINE Pair split(vec a, vec b) {
  if constexpr (!std::is_same_v<T, bf16>) return {a, b};
  ivec even, odd;
  for (int i = 0; i < kLanes; i++) even[i] = 2 * i, odd[i] = 2 * i + 1;
  return {__builtin_shuffle(a, b, even), __builtin_shuffle(a, b, odd)};
}

// Asks for a cache line that will be read soon.
RL_INLINE void fetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// What a value becomes when stored as T and read again.
template <class T>
RL_INLINE vec rounded(vec v) {
  if constexpr (std::is_same_v<T, float>) return v;
  else return widen(narrow(v, T{}), T{});
}

// The sums over lanes of four vectors, by one fixed tree.
RL_INLINE quad sum4(vec a, vec b, vec c, vec d) {
#if defined(RL_AVX512)
  const vec ab = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
  const vec cd = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
  const vec abcd = _mm512_shuffle_ps(ab, cd, 0x44) + _mm512_shuffle_ps(ab, cd, 0xee);
  const __m256 half = _mm512_castps512_ps256(abcd) + _mm512_extractf32x8_ps(abcd, 1);
  return _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);
#elif defined(RL_AVX2)
  const vec ab = _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b);
  const vec cd = _mm256_unpacklo_ps(c, d) + _mm256_unpackhi_ps(c, d);
  const vec abcd = _mm256_shuffle_ps(ab, cd, 0x44) + _mm256_shuffle_ps(ab, cd, 0xee);
  return _mm256_castps256_ps128(abcd) + _mm256_extractf128_ps(abcd, 1);
#else
  const vec ab = __builtin_shuffle(a, b, ivec{0, 4, 1, 5}) + __builtin_shuffle(a, b, ivec{2, 6, 3, 7});
  const vec cd = __builtin_shuffle(c, d, ivec{0, 4, 1, 5}) + __builtin_shuffle(c, d, ivec{2, 6, 3, 7});
  return __builtin_shuffle(ab, cd, ivec{0, 1, 4, 5}) + __builtin_shuffle(ab, cd, ivec{2, 3, 6, 7});
#endif
}
RL_INLINE float sum(vec v) { return sum4(v, v, v, v)[0]; }
RL_INLINE float largest(vec v) {
#if defined(RL_AVX512)
  return _mm512_reduce_max_ps(v);
#else
  float most = v[0];
  for (int i = 1; i < kLanes; i++) most = v[i] > most ? v[i] : most;
  return most;
#endif
}

// e^x to about one unit in the last place; 0 below -87.3, infinite above 88.7, NaN for NaN.
// x = n ln 2 + r with |r| <= ln(2)/2; e^r by a polynomial; 2^n by adding n to the exponent.
RL_INLINE vec exp(vec x) {
  const vec shifted = fma(x, all(1.44269504f), all(12582912.0f));   // 1.5 * 2^23: the low bits now hold n
  const vec n = shifted - 12582912.0f;
  const vec r = fma(n, all(-1.42860677e-6f), fma(n, all(-0.693145752f), x));
  vec p = fma(r, all(1.98756912e-4f), all(1.39819994e-3f));
  p = fma(p, r, all(8.33345205e-3f));
  p = fma(p, r, all(4.16657962e-2f));
  p = fma(p, r, all(0.166666657f));
  p = fma(p, r, all(0.5f));
  p = fma(p, r * r, r) + 1.0f;
  const vec result = (vec)((ivec)p + ((ivec)shifted << 23));
  const vec low = x < -87.3f ? vec{} : result;
  return x > 88.7f ? all(INFINITY) : low;
}

}  // namespace ray_lora::RL_ISA
