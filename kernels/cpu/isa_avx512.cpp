// The kernels for AVX-512 with its byte and word, double and quad word, and vector length parts (x86-64-v4).
#if defined(__x86_64__)
#define RL_ISA avx512
#define RL_AVX512
#include "isa_headers.h"
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#include "isa.h"
#endif
