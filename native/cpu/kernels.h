// The CPU kernels. Each family file is compiled once per instruction set, into a namespace of its own; a table per
// instruction set is what the device picks at run time.
//
// Those files include nothing that emits shared inline functions: the linker keeps one copy of such a function, and a
// copy compiled for AVX-512 would crash a machine without it.
#pragma once

#include "../core/kernel_ids.h"
#include "worker.h"

#ifndef FERRUM_CPU_ISA
#define FERRUM_CPU_ISA portable
#endif

namespace ferrum::cpu {

constexpr uint32_t kMaxSlots = 12;

// A launch with its buffers resolved.
struct Call {
    const ferrum_launch *launch;
    uint8_t *slots[kMaxSlots];
    uint8_t *temp;         // temp_bytes(launch), shared by all threads
    uint64_t temp_offset;  // where in the device's temporary memory that is
    bool temp_is_ready;    // an earlier launch of this barrier group already put the same input there
    unsigned threads;

    template <class Params>
    const Params &params() const {
        return *reinterpret_cast<const Params *>(launch->params);
    }
    bool constant(uint32_t bit) const { return launch->constants & bit; }
    template <class T>
    T *at(uint32_t slot) const {
        return reinterpret_cast<T *>(slots[slot]);
    }
};

using KernelFunction = void (*)(const Call &call, Worker &worker);

// At most this many shared loops in one kernel.
constexpr unsigned kLoopsPerLaunch = 3;

namespace portable {
extern const KernelFunction kernels[kernel_count];
}
namespace avx2 {
extern const KernelFunction kernels[kernel_count];
}
namespace avx512 {
extern const KernelFunction kernels[kernel_count];
}

namespace FERRUM_CPU_ISA {
#define FERRUM_KERNEL_FUNCTION(name) void name(const Call &call, Worker &worker);
FERRUM_KERNELS(FERRUM_KERNEL_FUNCTION)
#undef FERRUM_KERNEL_FUNCTION
}  // namespace FERRUM_CPU_ISA

// ---- Temporary memory of a launch

constexpr uint64_t kPanelWidth = 2048;  // inputs of one panel of decoded weights: 64 KiB, in the second-level cache
constexpr uint64_t kPanelRows = 512;    // rows that one pass over a panel multiplies

// Activations as the linear kernels multiply them: 16-bit fixed point per block of 32 for block formats, float32 for
// dense ones.
struct LinearTemp {
    uint64_t values, scales, sums, panels, bytes;
    uint64_t panel_bytes;  // per thread
    bool fixed_point;
};
LinearTemp linear_temp(const ferrum_launch &launch, unsigned threads);
bool is_linear(uint32_t kernel);

// Working memory of attention: per thread, for the query rows of a block.
struct AttentionTemp {
    uint32_t group;         // query heads of a key head
    uint32_t block_tokens;  // query tokens that one work item takes
    uint32_t blocks;
    uint32_t padded_dim;    // head_dim rounded up to whole vectors
    uint32_t score_stride;  // floats between the rows of scores: a span, and what the last tile may write past it
    uint64_t thread_bytes;
};
AttentionTemp attention_temp(const ferrum_causal_attention_params &params);

uint64_t temp_bytes(const ferrum_launch &launch, unsigned threads);

}  // namespace ferrum::cpu
