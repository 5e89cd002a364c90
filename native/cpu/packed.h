// Weights as the linear kernels read them: sixteen outputs side by side, an output a lane. The device keeps such copies
// of the matrices it was asked to prepare; of others a kernel makes one group at a time, for the duration of a call.
//
// A matrix is ceil(outputs / 16) groups, one after another, the last one filled up with zeros. A group of a block
// format holds first its integers, then its scales, block of 32 inputs by block.
//
// Integers: the lane of an output holds two 16-bit words, for the even and the odd input of a pair, and a word holds a
// field of every pair it covers. So one shift and one mask give sixteen outputs' pair s, which is what dot_pairs takes:
//   4 bits   4 vectors; pair s in bits 4 (s % 4)… of vector s / 4
//   5 bits   those, and 1 vector of fifth bits; pair s in bit s
//   6 bits   those, and 2 vectors of upper two bits; pair s in bits 2 (s % 8)… of vector s / 8
//   8 bits   8 vectors; pair s in byte s % 2 of vector s / 2, signed
// Fields below 8 bits are stored as unsigned; F::offset is what they are above their value.
//
// Scales: formats whose blocks hold float16 scales keep them, [block][16], behind each of them the block's minima if
// the format has some. K formats keep their super-block's two factors as float16 and the small integers they multiply
// as bytes, so a group is as many bytes as its rows in the file.
//
// Dense formats: [input][16].
#pragma once

#include "blocks.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

constexpr int kOutputs = 16;

template <class F>
struct Packed {
    static constexpr int groups = 32 / F::group;
    static constexpr int vectors = F::bits;  // of a block's integers
    static constexpr uint64_t quant_bytes = vectors * 64;
    static constexpr uint64_t super_bytes = F::super ? 32 * (1 + F::has_min) : 0;  // factors of a super-block
    static constexpr uint64_t scale_bytes = F::super ? 16 * (groups + F::has_min) : 32 * (1 + F::has_min);
    static constexpr uint64_t block_bytes = quant_bytes + scale_bytes;
    static constexpr uint64_t group_bytes(uint64_t width) {
        const uint64_t blocks = width / 32;
        return blocks * block_bytes + blocks / 8 * super_bytes;
    }
    // From the start of a group, of block `b` and of the factors of its super-block.
    static constexpr uint64_t block_at(uint64_t b) { return b * block_bytes + (b / 8 + 1) * super_bytes; }
    static constexpr uint64_t factors_at(uint64_t b) { return b / 8 * (8 * block_bytes + super_bytes); }

    const uint8_t *group;

    // Pair `s` of block `b`, an output a lane.
    FERRUM_ALWAYS_INLINE i32x16 pair(uint64_t b, int s) const {
        auto vector = [&](int i) { return load((const int32_t *)(group + block_at(b)) + 16 * i); };
        if constexpr (F::bits == 8) return s % 2 ? high_bytes(vector(s / 2)) : low_bytes(vector(s / 2));
        const i32x16 low = shift_right(vector(s / 4), 4 * (s % 4)) & splat(0x000f000f);
        if constexpr (F::bits == 5) return low | (shift_right(vector(4), s - 4) & splat(0x00100010));
        if constexpr (F::bits == 6) return low | (shift_right(vector(4 + s / 8), 2 * (s % 8) - 4) & splat(0x00300030));
        return low;
    }

    FERRUM_ALWAYS_INLINE void block_scales(uint64_t b, f32x16 (&scale)[groups], f32x16 &min) const {
        const uint8_t *at = group + block_at(b) + quant_bytes;
        if constexpr (F::super) {
            const uint8_t *factors = group + factors_at(b);
            const f32x16 factor = load((const half *)factors);
            FERRUM_UNROLL for (int g = 0; g < groups; g++) scale[g] =
                factor *
                to_float(F::has_min ? load_integers<uint8_t>(at + 16 * g) : load_integers<int8_t>(at + 16 * g));
            if constexpr (F::has_min)
                min = splat(0.0f) -
                      load((const half *)(factors + 32)) * to_float(load_integers<uint8_t>(at + 16 * groups));
        } else {
            scale[0] = load((const half *)at);
            if constexpr (F::has_min) min = load((const half *)(at + 32));
        }
    }
};

template <class F>
static constexpr uint64_t packed_group_bytes(uint64_t width) {
    if constexpr (F::bits > 8)
        return width * kOutputs * (F::bits / 8);
    else
        return Packed<F>::group_bytes(width);
}

// ---- Packing

// The first `count` of sixteen rows' blocks, as one group.
template <class F>
static void pack_blocks(const uint8_t *rows, uint64_t row_bytes, int count, uint64_t width, uint8_t *to) {
    using P = Packed<F>;
    if (count < kOutputs) memset(to, 0, P::group_bytes(width));
    for (uint64_t b = 0; b < width / 32; b++) {
        i32x16 pairs[kOutputs];
        uint8_t *at = to + P::block_at(b) + P::quant_bytes;
        FERRUM_UNROLL for (int o = 0; o < kOutputs; o++) {
            if (o >= count) {
                pairs[o] = splat((int32_t)0);
                continue;
            }
            Quants w;
            F::decode(rows + o * row_bytes, b, w);
            pairs[o] = w.q;
            if constexpr (F::super) {
                for (int g = 0; g < P::groups; g++) at[16 * g + o] = w.small_scale[g];
                if constexpr (F::has_min) at[16 * P::groups + o] = w.small_min;
                uint8_t *factors = to + P::factors_at(b);
                memcpy(factors + 2 * o, &w.scale, 2);
                if constexpr (F::has_min) memcpy(factors + 32 + 2 * o, &w.min, 2);
            } else {
                memcpy(at + 2 * o, &w.scale, 2);
                if constexpr (F::has_min) memcpy(at + 32 + 2 * o, &w.min, 2);
            }
        }
        transpose(pairs);
        i32x16 out[P::vectors];
        FERRUM_UNROLL for (int v = 0; v < P::vectors; v++) out[v] = splat((int32_t)0);
        FERRUM_UNROLL for (int s = 0; s < 16; s++) {
            if constexpr (F::bits == 8) {
                const i32x16 byte = pairs[s] & splat(0x00ff00ff);
                out[s / 2] = out[s / 2] | shift_right(byte, s % 2 ? -8 : 0);
            } else {
                out[s / 4] = out[s / 4] | shift_right(pairs[s] & splat(0x000f000f), -4 * (s % 4));
                if constexpr (F::bits == 5)
                    out[4] = out[4] | shift_right(shift_right(pairs[s], 4) & splat(0x00010001), -s);
                if constexpr (F::bits == 6)
                    out[4 + s / 8] =
                        out[4 + s / 8] | shift_right(shift_right(pairs[s], 4) & splat(0x00030003), -2 * (s % 8));
            }
        }
        memcpy(to + P::block_at(b), out, sizeof(out));
    }
}

template <class T>
static void pack_dense(const uint8_t *rows, uint64_t row_bytes, int count, uint64_t width, uint8_t *to) {
    T *out = (T *)to;
    for (uint64_t k = 0; k < width; k += 16) {
        const int inputs = width - k < 16 ? (int)(width - k) : 16;
        i32x16 v[kOutputs];
        FERRUM_UNROLL for (int o = 0; o < kOutputs; o++) {
            const T *from = (const T *)(rows + o * row_bytes) + k;
            T some[16] = {};
            if (o < count && inputs < 16) memcpy(some, from, inputs * sizeof(T));
            v[o] = load_bits(o < count && inputs == 16 ? from : some);
        }
        transpose(v);
        for (int i = 0; i < inputs; i++) store_bits(out + (k + i) * kOutputs, v[i]);
    }
}

template <class F>
static void pack_group(const uint8_t *rows, uint64_t row_bytes, int count, uint64_t width, uint8_t *to) {
    if constexpr (F::bits > 8)
        pack_dense<typename F::Element>(rows, row_bytes, count, width, to);
    else
        pack_blocks<F>(rows, row_bytes, count, width, to);
}

}  // namespace ferrum::cpu::FERRUM_CPU_ISA
