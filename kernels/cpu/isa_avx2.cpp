// The kernels for AVX2 with FMA and half-precision conversion (x86-64-v3).
#if defined(__x86_64__)
#define RL_ISA avx2
#define RL_AVX2
#include "isa_headers.h"
#pragma GCC target("avx2,fma,f16c")
#include "isa.h"
#endif
