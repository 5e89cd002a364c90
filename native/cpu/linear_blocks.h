// Weights in blocks: products of 16-bit integers.
#pragma once

#include "linear_tiles.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

namespace {

// What goes with a block of 32 activations in fixed point.
struct BlockSums {
    float scale;  // of one unit
    float sum;    // of the block's integers
    int32_t half_sums[2];
};
static_assert(sizeof(BlockSums) == kBlockSumsBytes);

// Activations of the rows of an item, block of 32 inputs by block: so the rows of a tile lie together.
struct FixedPoint {
    int16_t *values;  // [width / 32][rows][32]
    BlockSums *sums;  // [width / 32][rows]
    uint64_t rows;
    FixedPoint at(uint64_t block, uint64_t row) const {
        return {values + (block * rows + row) * 32, sums + block * rows + row, rows};
    }
};

void to_fixed_point(const half *x, uint32_t width, FixedPoint to) {
    const f32x16 magic = splat(12582912.0f);  // rounds to nearest even, see simd_math.h
    for (uint32_t left = width / 32; left;) {
        const uint32_t blocks = left < kScaledBlocks ? left : kScaledBlocks;
        constexpr int kHalves = 2 * kScaledBlocks;
        f32x16 v[kHalves];
        i32x16 top = splat((int32_t)0);
        FERRUM_UNROLL for (int h = 0; h < kHalves; h++) {
            v[h] = h < 2 * (int)blocks ? load(x + 16 * h) : splat(0.0f);
            top = max(top, magnitude_bits(v[h]));
        }
        const int32_t most = largest(top);
        // NaN and infinity have no fixed point: their scale is NaN, and so is every sum that meets it.
        const bool finite = most < 0x7f800000;
        // 2^(14 - e) for a largest in [2^e, 2^(e + 1)); -24 is the exponent of the least float16.
        const int32_t exponent = most >> 23 < 127 - 24 ? -24 : (most >> 23) - 127;
        const f32x16 inverse = splat(power_of_two(14 - (finite ? exponent : 0)));
        const float scale = finite ? power_of_two(exponent - 14) : __builtin_nanf("");
        FERRUM_UNROLL for (int h = 0; h < kHalves; h++) v[h] =
            ((finite ? v[h] * inverse : splat(0.0f)) + magic) - magic;
        float half_sums[kHalves];
        whole_sums(v, half_sums);
        FERRUM_UNROLL for (uint32_t b = 0; b < kScaledBlocks; b++) {
            if (b == blocks) break;
            store_shorts(to.values, to_integer(v[2 * b]));
            store_shorts(to.values + 16, to_integer(v[2 * b + 1]));
            const float first = half_sums[2 * b], second = half_sums[2 * b + 1];
            *to.sums = {scale, first + second, {(int32_t)first, (int32_t)second}};
            to = to.at(1, 0);
        }
        x += 32 * blocks;
        left -= blocks;
    }
}

// kRows rows against one group, whose blocks are unpacked as they come.
template <class F, int kRows>
void multiply_stream(const Call &call, FixedPoint x, uint64_t row, const uint8_t *packed, uint32_t group) {
    using P = Packed<F>;
    const uint32_t blocks = call.params<ferrum_linear_params>().in_features / 32;
    // Sums of one output wait for each other: they are kept in several parts, where there are few.
    constexpr int kChains = !kFusedDots || kRows >= 8 ? 1 : kRows >= 4 ? 2 : 4;
    constexpr int kPairs = 16 / P::groups;
    const P weights{packed};
    f32x16 acc[kRows], scaled[kRows];
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) acc[r] = scaled[r] = splat(0.0f);
    for (uint32_t b = 0; b < blocks; b++, x = x.at(1, 0)) {
        f32x16 scale[P::groups], min;
        FERRUM_UNROLL for (uint64_t i = 0; i < P::block_bytes; i += 64)
            __builtin_prefetch(packed + P::block_at(b) + kStreamAhead + i);
        weights.block_scales(b, scale, min);
        if constexpr (F::has_min)
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) scaled[r] = fma(min, splat(x.sums[r].sum), scaled[r]);
        FERRUM_UNROLL for (int part = 0; part < P::groups; part++) {
            i32x16 dots[kRows][kChains];
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
                FERRUM_UNROLL for (int c = 0; c < kChains; c++) dots[r][c] = splat((int32_t)0);
                if constexpr (F::offset != 0) {
                    const int32_t *halves = x.sums[r].half_sums;
                    dots[r][0] = splat(-F::offset * (P::groups == 1 ? halves[0] + halves[1] : halves[part]));
                }
            }
            FERRUM_UNROLL for (int i = 0; i < kPairs; i++) {
                const int s = part * kPairs + i;
                const i32x16 w = weights.pair(b, s);
                FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
                    int32_t two;
                    memcpy(&two, x.values + 32 * r + 2 * s, 4);
                    dots[r][i % kChains] = dot_pairs(dots[r][i % kChains], w, splat(two));
                }
            }
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
                i32x16 dot = dots[r][0];
                FERRUM_UNROLL for (int c = 1; c < kChains; c++) dot = dot + dots[r][c];
                scaled[r] = fma(to_float(dot), scale[part], scaled[r]);
            }
        }
        if (b % kScaledBlocks == kScaledBlocks - 1 || b == blocks - 1) FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
                acc[r] = fma(scaled[r], splat(x.sums[r].scale), acc[r]);
                scaled[r] = splat(0.0f);
            }
    }
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) store_output(call, row + r, group, acc[r]);
}

// A block of kTileGroups groups, unpacked.
template <int kScales, bool kMin>
struct IntegerPanel {
    static constexpr int kRows = kRegisterLanes == 16 ? 6 : 3;  // of a tile: as many sums of a block, and of four
    static constexpr uint32_t kBlocks = 3 * kScaledBlocks;      // of a panel
    i32x16 pairs[16][kTileGroups];
    f32x16 scale[kScales][kTileGroups], min[kTileGroups];

    template <class F>
    void unpack(const uint8_t *packed, uint32_t, uint64_t b, int g) {
        const Packed<F> weights{packed};
        FERRUM_UNROLL for (uint64_t i = 0; i < Packed<F>::block_bytes; i += 64)
            __builtin_prefetch(packed + Packed<F>::block_at(b) + kPanelAhead + i);
        f32x16 scales[kScales];
        weights.block_scales(b, scales, min[g]);
        FERRUM_UNROLL for (int i = 0; i < kScales; i++) scale[i][g] = scales[i];
        FERRUM_UNROLL for (int s = 0; s < 16; s++) pairs[s][g] = subtract_shorts(weights.pair(b, s), F::offset);
    }

    template <int kRows>
    static FERRUM_ALWAYS_INLINE void multiply(const IntegerPanel *panel, uint32_t blocks, uint32_t, FixedPoint x,
                                              Sums out) {
        while (blocks) {
            f32x16 scaled[kRows][kTileGroups];
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (uint32_t g = 0; g < kTileGroups; g++)
                scaled[r][g] = splat(0.0f);
            const BlockSums *sums = x.sums;
            for (uint32_t b = 0; b < kScaledBlocks && blocks; b++, blocks--, panel++, x = x.at(1, 0)) {
                if constexpr (kMin)
                    FERRUM_UNROLL for (int r = 0; r < kRows; r++)
                        FERRUM_UNROLL for (uint32_t g = 0; g < kTileGroups; g++) scaled[r][g] =
                            fma(panel->min[g], splat(x.sums[r].sum), scaled[r][g]);
                FERRUM_UNROLL for (int part = 0; part < kScales; part++) {
                    i32x16 dots[kRows][kTileGroups];
                    FERRUM_UNROLL for (int r = 0; r < kRows; r++)
                        FERRUM_UNROLL for (uint32_t g = 0; g < kTileGroups; g++) dots[r][g] = splat((int32_t)0);
                    FERRUM_UNROLL for (int i = 0; i < 16 / kScales; i++) {
                        const int s = part * 16 / kScales + i;
                        FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
                            int32_t two;
                            memcpy(&two, x.values + 32 * r + 2 * s, 4);
                            const i32x16 both = splat(two);
                            FERRUM_UNROLL for (uint32_t g = 0; g < kTileGroups; g++) dots[r][g] =
                                dot_pairs(dots[r][g], panel->pairs[s][g], both);
                        }
                    }
                    FERRUM_UNROLL for (int r = 0; r < kRows; r++)
                        FERRUM_UNROLL for (uint32_t g = 0; g < kTileGroups; g++) scaled[r][g] =
                            fma(to_float(dots[r][g]), panel->scale[part][g], scaled[r][g]);
                }
            }
            out.add<kRows>(blocks, [&](int r, int g, f32x16 sum) __attribute__((always_inline)) {
                return fma(scaled[r][g], splat(sums[r].scale), sum);
            });
        }
    }
};

}  // namespace

}  // namespace ferrum::cpu::FERRUM_CPU_ISA
