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

struct Call;

// A kernel that works row by row: one row of it. `width` is the row's, for kernels whose params do not tell.
using RowFunction = void (*)(const Call &call, uint64_t row, uint32_t width);

// A launch with its buffers resolved.
struct Call {
    const ferrum_launch *launch;
    uint8_t *slots[kMaxSlots];
    const uint8_t *packed;  // of a linear launch whose weight the device has prepared: its copy, else NULL
    uint8_t *temp;          // temp_bytes(launch), shared by all threads
    uint64_t temp_offset;   // where in the device's temporary memory that is
    bool temp_is_ready;     // an earlier launch of this barrier group already put the same input there
    unsigned threads;
    // The prepared matrix that the next linear launch of a few rows reads, or NULL; its tiles of groups, which threads
    // share, and their size.
    const uint8_t *next_packed;
    uint32_t next_tiles, next_tile_bytes;
    // A launch whose output is this one's input, row for row, and that this one runs, each row right before it reads
    // it; and the function of a launch that is run so.
    const Call *before;
    RowFunction row_function;

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

// A matrix to be laid out as packed.h says, a group of sixteen outputs a work item.
struct Packing {
    const uint8_t *from;
    uint64_t rows, width, row_bytes;
    uint32_t format;
    uint8_t *to;
};
constexpr uint64_t kGroupOutputs = 16;
uint64_t packed_bytes(uint32_t format, uint64_t rows, uint64_t width);

// What every instruction set has. `row_function`: NULL for kernels that do not work row by row.
#define FERRUM_INSTRUCTION_SET(name)                   \
    namespace name {                                   \
    extern const KernelFunction kernels[kernel_count]; \
    RowFunction row_function(uint32_t kernel);         \
    void pack(const Packing &job, uint64_t group);     \
    }
FERRUM_INSTRUCTION_SET(portable)
FERRUM_INSTRUCTION_SET(avx2)
FERRUM_INSTRUCTION_SET(avx512)
FERRUM_INSTRUCTION_SET(neon)
#undef FERRUM_INSTRUCTION_SET

namespace FERRUM_CPU_ISA {
#define FERRUM_KERNEL_FUNCTION(name) void name(const Call &call, Worker &worker);
FERRUM_KERNELS(FERRUM_KERNEL_FUNCTION)
#undef FERRUM_KERNEL_FUNCTION
}  // namespace FERRUM_CPU_ISA

// ---- Temporary memory of a launch

// Activations as the linear kernels multiply them: 16-bit fixed point for block formats, float32 for dense ones. And
// per thread, room for the groups of a tile whose weights come unprepared.
struct LinearTemp {
    uint64_t values, sums, groups, bytes;
    uint64_t thread_bytes;
    bool fixed_point;
};
constexpr uint64_t kBlockSumsBytes = 16;
constexpr uint32_t kMostTileGroups = 2;  // groups of sixteen outputs that a tile takes, and threads share
constexpr uint64_t kStreamAhead = 8192;  // bytes of weights that are fetched ahead where rows are few
LinearTemp linear_temp(const ferrum_launch &launch, unsigned threads);
bool is_linear(uint32_t kernel);
uint32_t linear_format(uint32_t kernel);

// Working memory of attention: per thread, for the query rows of a block. Sizes are in floats.
constexpr uint32_t kGroupRows = 12;           // rows that go through a span together
constexpr uint32_t kAttentionRows = 192;      // of a block, where there are many
constexpr uint32_t kAttentionFloats = 24576;  // of queries, so that they leave room in the second cache
struct AttentionTemp {
    uint32_t group;         // query heads of a key head
    uint32_t block_tokens;  // query tokens that one work item takes
    uint32_t blocks;
    uint32_t padded_dim;    // head_dim rounded up to whole vectors
    uint32_t score_stride;  // between rows of scores: a span, and what the last tile may write past it
    uint32_t key_stride;    // the same between dims of keys, float16, a whole number of lines
    uint64_t acc, sums, query, scores, keys, values;
    uint64_t thread_bytes;
};
AttentionTemp attention_temp(const ferrum_causal_attention_params &params);

uint64_t temp_bytes(const ferrum_launch &launch, unsigned threads);

}  // namespace ferrum::cpu
