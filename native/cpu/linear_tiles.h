// What the linear kernels of block formats (linear_blocks.h) and of dense ones (linear_dense.h) share.
#pragma once

#include "kernels.h"
#include "packed.h"
#include "simd_math.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

namespace {

constexpr uint32_t kTileGroups = kRegisterLanes == 16 ? 2 : 1;  // groups of outputs that a tile takes at once
static_assert(kTileGroups <= kMostTileGroups);
constexpr uint64_t kItemRows = 144;    // rows of a work item
constexpr uint32_t kScaledBlocks = 4;  // of activations, that share a scale
// Rows that go through weights as they are stored.
constexpr int kStreamRows = kRegisterLanes == 16 ? 12 : kRegisterLanes == 8 ? 6 : 4;
constexpr uint64_t kPanelAhead = 5120;  // bytes of weights that are fetched ahead of a panel

FERRUM_NOINLINE void store_output(const Call &call, uint64_t row, uint32_t group, f32x16 value) {
    const auto &p = call.params<ferrum_linear_params>();
    const uint32_t first = group * kOutputs, count = p.out_features - first;
    if (call.constant(FERRUM_CONSTANT_BIAS))
        value = value + (call.constant(FERRUM_CONSTANT_BIAS_F32)
                             ? load_up_to(call.at<const float>(FERRUM_LINEAR_BIAS) + first, count)
                             : load_up_to(call.at<const half>(FERRUM_LINEAR_BIAS) + first, count));
    const uint64_t at = row * p.output_stride + first;
    if (call.constant(FERRUM_CONSTANT_OUTPUT_F32))
        store_up_to(call.at<float>(FERRUM_LINEAR_Y) + at, value, count);
    else
        store_up_to(call.at<half>(FERRUM_LINEAR_Y) + at, value, count);
}

// Sums of a tile: they start at zero, go on where another panel left them, and leave as the outputs they are when no
// more inputs follow. Where nothing is added or cut off, that is straight from registers: a loop of stores to many
// lines would stall.
struct Sums {
    f32x16 (*acc)[kTileGroups];
    bool start;
    half *finished;   // NULL: stays in acc
    uint64_t stride;  // of finished rows

    Sums at(uint64_t row) const { return {acc + row, start, finished ? finished + row * stride : nullptr, stride}; }
    // to(r, g, sum so far) for every one, when `left` blocks of this panel follow.
    template <int kRows, class To>
    FERRUM_ALWAYS_INLINE void add(uint32_t left, To &&to) {
        if (finished && left == 0) {
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (uint32_t g = 0; g < kTileGroups; g++)
                store(finished + r * stride + g * kOutputs, to(r, g, start ? splat(0.0f) : acc[r][g]));
        } else {
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (uint32_t g = 0; g < kTileGroups; g++)
                acc[r][g] = to(r, g, start ? splat(0.0f) : acc[r][g]);
        }
        start = false;
    }
};

}  // namespace

}  // namespace ferrum::cpu::FERRUM_CPU_ISA
