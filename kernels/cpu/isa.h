// All kernels, compiled for the instruction set that the including file has switched on, and the table that lists them.
#include "add_lora.h"
#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "linear_lora.h"
#include "rotary.h"

#define RL_CONCAT(a, b) a##b
#define RL_TABLE(isa) RL_CONCAT(isa, _kernels)

namespace ray_lora {
extern const Kernels RL_TABLE(RL_ISA) = {
    RL_ISA::add_lora,    RL_ISA::paged_attention, RL_ISA::rotary_and_cache, RL_ISA::linear,
    RL_ISA::linear_lora, RL_ISA::rms_norm,        RL_ISA::silu_and_mul};
}
