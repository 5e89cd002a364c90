// GGUF blocks, 32 weights at a time: integers and what scales them, as the format stores it.
//
// Each format is a struct with
//   bits       of an integer; 16 and 32 for dense formats
//   offset     what `decode` gives above the integer's value
//   has_min    weight = scale * q + min, else weight = scale * q
//   group      weights that share a scale: 32, or 16
//   super      a K format: scale and min are factors of a super-block of 256, each times a small integer (and the min
//              negated), else they are the block's own
//   decode     block `b` (of 32) of a row
#pragma once

#include "simd_integers.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

struct Quants {
    i32x16 q;  // 32 integers, as pairs
    half scale, min;
    uint8_t small_scale[2], small_min;
};

static FERRUM_ALWAYS_INLINE half half_at(const uint8_t *at) {
    half value;
    memcpy(&value, at, 2);
    return value;
}

// Byte i of sixteen holds element i in its low nibble and element i + 16 in its high one.
static FERRUM_ALWAYS_INLINE u8x32 nibbles(const uint8_t *from) {
    uint8_t twice[32];
    memcpy(twice, from, 16);
    memcpy(twice + 16, from, 16);
    const u8x32 both = load_bytes(twice);
    u8x32 high = {};
    for (int i = 16; i < 32; i++) high[i] = 255;
    return (shift_and_mask(both, 4, 15) & high) | (both & 15 & ~high);
}

// 16 in every byte whose bit of `at`, a little-endian u32, is set: the fifth bit of a 5-bit format.
static FERRUM_ALWAYS_INLINE u8x32 fifth_bits(const uint8_t *at) {
    uint64_t spread[4];
    for (int i = 0; i < 4; i++) spread[i] = at[i] * 0x0101010101010101u;
    u8x32 bytes;
    memcpy(&bytes, spread, sizeof(bytes));
    u8x32 bit = {};
    for (int i = 0; i < 32; i++) bit[i] = (uint8_t)(1 << (i % 8));
    return (u8x32)((bytes & bit) != 0) & 16;
}

struct legacy {
    static constexpr int group = 32;
    static constexpr bool super = false;
};

struct q4_0 : legacy {
    static constexpr int bits = 4, offset = 8;
    static constexpr bool has_min = false;
    static FERRUM_ALWAYS_INLINE void decode(const uint8_t *row, uint64_t b, Quants &out) {
        const uint8_t *at = row + b * 18;
        out.scale = half_at(at);
        out.q = widen<uint8_t>(nibbles(at + 2));
    }
};

struct q4_1 : legacy {
    static constexpr int bits = 4, offset = 0;
    static constexpr bool has_min = true;
    static FERRUM_ALWAYS_INLINE void decode(const uint8_t *row, uint64_t b, Quants &out) {
        const uint8_t *at = row + b * 20;
        out.scale = half_at(at);
        out.min = half_at(at + 2);
        out.q = widen<uint8_t>(nibbles(at + 4));
    }
};

struct q5_0 : legacy {
    static constexpr int bits = 5, offset = 16;
    static constexpr bool has_min = false;
    static FERRUM_ALWAYS_INLINE void decode(const uint8_t *row, uint64_t b, Quants &out) {
        const uint8_t *at = row + b * 22;
        out.scale = half_at(at);
        out.q = widen<uint8_t>(nibbles(at + 6) | fifth_bits(at + 2));
    }
};

struct q5_1 : legacy {
    static constexpr int bits = 5, offset = 0;
    static constexpr bool has_min = true;
    static FERRUM_ALWAYS_INLINE void decode(const uint8_t *row, uint64_t b, Quants &out) {
        const uint8_t *at = row + b * 24;
        out.scale = half_at(at);
        out.min = half_at(at + 2);
        out.q = widen<uint8_t>(nibbles(at + 8) | fifth_bits(at + 4));
    }
};

struct q8_0 : legacy {
    static constexpr int bits = 8, offset = 0;
    static constexpr bool has_min = false;
    static FERRUM_ALWAYS_INLINE void decode(const uint8_t *row, uint64_t b, Quants &out) {
        const uint8_t *at = row + b * 34;
        out.scale = half_at(at);
        out.q = widen<int8_t>(load_bytes(at + 2));
    }
};

// The factors of a super-block of Q4_K and Q5_K, and the 6-bit scale and minimum of its sub-block j.
static FERRUM_ALWAYS_INLINE void k_scale(const uint8_t *at, int j, Quants &out) {
    const uint8_t *packed = at + 4;
    out.scale = half_at(at);
    out.min = half_at(at + 2);
    if (j < 4) {
        out.small_scale[0] = packed[j] & 63;
        out.small_min = packed[j + 4] & 63;
    } else {
        out.small_scale[0] = (uint8_t)((packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4);
        out.small_min = (uint8_t)((packed[j + 4] >> 4) | (packed[j] >> 6) << 4);
    }
}

struct q4_k {
    static constexpr int bits = 4, offset = 0, group = 32;
    static constexpr bool has_min = true, super = true;
    static FERRUM_ALWAYS_INLINE void decode(const uint8_t *row, uint64_t b, Quants &out) {
        const uint8_t *at = row + b / 8 * 144;
        const int j = b % 8;
        k_scale(at, j, out);
        out.q = widen<uint8_t>(shift_and_mask(load_bytes(at + 16 + 32 * (j / 2)), 4 * (j % 2), 15));
    }
};

struct q5_k {
    static constexpr int bits = 5, offset = 0, group = 32;
    static constexpr bool has_min = true, super = true;
    static FERRUM_ALWAYS_INLINE void decode(const uint8_t *row, uint64_t b, Quants &out) {
        const uint8_t *at = row + b / 8 * 176;
        const int j = b % 8;
        k_scale(at, j, out);
        const u8x32 fifth = shift_and_mask(load_bytes(at + 16), j, 1) * 16;
        out.q = widen<uint8_t>(shift_and_mask(load_bytes(at + 48 + 32 * (j / 2)), 4 * (j % 2), 15) | fifth);
    }
};

struct q6_k {
    static constexpr int bits = 6, offset = 32, group = 16;
    static constexpr bool has_min = false, super = true;
    static FERRUM_ALWAYS_INLINE void decode(const uint8_t *row, uint64_t b, Quants &out) {
        const uint8_t *at = row + b / 8 * 210;
        const int j = b % 8, part = j % 4;  // four blocks of 32 a half
        const u8x32 low = shift_and_mask(load_bytes(at + 64 * (j / 4) + 32 * (part % 2)), 4 * (part / 2), 15);
        const u8x32 high = shift_and_mask(load_bytes(at + 128 + 32 * (j / 4)), 2 * part, 3) * 16;
        out.q = widen<uint8_t>(low | high);
        out.scale = half_at(at + 208);
        for (int g = 0; g < 2; g++) out.small_scale[g] = at[192 + 2 * j + g];  // signed
    }
};

// The weights of block `b`, in the arithmetic of the format's own formula.
template <class F>
static inline void block_values(const uint8_t *row, uint64_t b, float *values) {
    Quants w;
    F::decode(row, b, w);
    int16_t q[32];
    memcpy(q, &w.q, sizeof(q));
    for (int i = 0; i < 32; i++) {
        float scale = (float)w.scale, min = F::has_min ? (float)w.min : 0.0f;
        if constexpr (F::super) {
            const uint8_t small = w.small_scale[i / F::group];
            scale *= F::has_min ? (float)small : (float)(int8_t)small;
            if constexpr (F::has_min) min = -(min * (float)w.small_min);
        }
        values[i] = scale * (float)(q[i] - F::offset);
        if constexpr (F::has_min) values[i] += min;
    }
}

// Dense formats.
struct f32 {
    static constexpr int bits = 32;
    using Element = float;
};
struct f16 {
    static constexpr int bits = 16;
    using Element = half;
};
struct bf16 {
    static constexpr int bits = 16;
    using Element = bfloat;
};

}  // namespace ferrum::cpu::FERRUM_CPU_ISA
