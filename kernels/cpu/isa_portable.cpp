// The kernels for any CPU: four lanes, which become SSE2 on x86-64 and NEON on ARM.
#define RL_ISA portable
#include "isa.h"
