// Weights of 16 and 32 bits each: products in float32.
#pragma once

#include "linear_tiles.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

namespace {

struct Floats {
    float *values;  // [ceil(width / 32)][rows][32]
    uint64_t rows;
    Floats at(uint64_t block, uint64_t row) const { return {values + (block * rows + row) * 32, rows}; }
};

template <class F, int kRows>
void multiply_stream(const Call &call, Floats x, uint64_t row, const uint8_t *packed, uint32_t group) {
    const auto *weights = (const typename F::Element *)packed;
    const uint32_t width = call.params<ferrum_linear_params>().in_features;
    f32x16 acc[kRows];
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) acc[r] = splat(0.0f);
    for (uint32_t first = 0; first < width; first += 32, x = x.at(1, 0)) {
        const uint32_t count = width - first < 32 ? width - first : 32;
        constexpr uint64_t kBlockBytes = 32 * kOutputs * sizeof(*weights);
        for (uint64_t i = 0; i < kBlockBytes; i += 64)
            __builtin_prefetch((const uint8_t *)(weights + (uint64_t)first * kOutputs) + kStreamAhead + i);
        f32x16 part[kRows];
        FERRUM_UNROLL for (int r = 0; r < kRows; r++) part[r] = splat(0.0f);
        for (uint32_t k = 0; k < count; k++) {
            const f32x16 w = load(weights + (uint64_t)(first + k) * kOutputs);
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) part[r] = fma(splat(x.values[32 * r + k]), w, part[r]);
        }
        FERRUM_UNROLL for (int r = 0; r < kRows; r++) acc[r] = acc[r] + part[r];
    }
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) store_output(call, row + r, group, acc[r]);
}

struct FloatPanel {
    static constexpr int kRows = kRegisterLanes == 16 ? 12 : kRegisterLanes == 8 ? 6 : 3;
    static constexpr uint32_t kBlocks = 4;
    f32x16 values[32][kTileGroups];

    template <class F>
    void unpack(const uint8_t *packed, uint32_t width, uint64_t b, int g) {
        const auto *weights = (const typename F::Element *)packed + b * 32 * kOutputs;
        for (uint64_t i = 0; i < 32 * kOutputs * sizeof(*weights); i += 64)
            __builtin_prefetch((const uint8_t *)(weights + kBlocks * 32 * kOutputs) + i);
        const uint32_t count = width - 32 * b < 32 ? width - 32 * b : 32;
        for (uint32_t k = 0; k < count; k++) values[k][g] = load(weights + k * kOutputs);
    }

    // `width` inputs are left.
    template <int kRows>
    static FERRUM_ALWAYS_INLINE void multiply(const FloatPanel *panel, uint32_t blocks, uint32_t width, Floats x,
                                              Sums out) {
        for (; blocks; blocks--, panel++, x = x.at(1, 0), width -= 32) {
            const uint32_t count = width < 32 ? width : 32;
            f32x16 part[kRows][kTileGroups];
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (uint32_t g = 0; g < kTileGroups; g++)
                part[r][g] = splat(0.0f);
            for (uint32_t k = 0; k < count; k++) FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
                    const f32x16 v = splat(x.values[32 * r + k]);
                    FERRUM_UNROLL for (uint32_t g = 0; g < kTileGroups; g++) part[r][g] =
                        fma(v, panel->values[k][g], part[r][g]);
                }
            out.add<kRows>(blocks - 1,
                           [&](int r, int g, f32x16 sum) __attribute__((always_inline)) { return sum + part[r][g]; });
        }
    }
};

}  // namespace

}  // namespace ferrum::cpu::FERRUM_CPU_ISA
