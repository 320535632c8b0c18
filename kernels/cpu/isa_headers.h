// Everything from outside that the kernels include. It comes before the instruction set is switched on: an inline
// function of the standard library compiled with AVX-512 could otherwise be the copy that the linker keeps for all.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels.h"
