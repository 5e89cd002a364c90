// GGUF blocks, 32 weights at a time: integers and a scale, in the arithmetic of the format's own formula.
//
// Each format is a struct with
//   has_min    weight = scale * q + min, else weight = scale * q
//   group      weights that share a scale: 32, or 16
//   decode     block `b` (of 32) of a row: 32 integers, 32 / group scales, and the min
#pragma once

#include "simd.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

struct Block {
    i32x16 q;  // 32 integers, as pairs
    float scale[2];
    float min;
};

static FERRUM_ALWAYS_INLINE float half_at(const uint8_t *at) {
    half value;
    memcpy(&value, at, 2);
    return (float)value;
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

struct q4_0 {
    static constexpr bool has_min = false;
    static constexpr int group = 32;
    static FERRUM_ALWAYS_INLINE void decode(const uint8_t *row, uint64_t b, Block &out) {
        const uint8_t *at = row + b * 18;
        out.scale[0] = half_at(at);
        out.q = subtract_each(widen_unsigned(nibbles(at + 2)), 8);
    }
};

struct q4_1 {
    static constexpr bool has_min = true;
    static constexpr int group = 32;
    static FERRUM_ALWAYS_INLINE void decode(const uint8_t *row, uint64_t b, Block &out) {
        const uint8_t *at = row + b * 20;
        out.scale[0] = half_at(at);
        out.min = half_at(at + 2);
        out.q = widen_unsigned(nibbles(at + 4));
    }
};

struct q5_0 {
    static constexpr bool has_min = false;
    static constexpr int group = 32;
    static FERRUM_ALWAYS_INLINE void decode(const uint8_t *row, uint64_t b, Block &out) {
        const uint8_t *at = row + b * 22;
        out.scale[0] = half_at(at);
        out.q = subtract_each(widen_unsigned(nibbles(at + 6) | fifth_bits(at + 2)), 16);
    }
};

struct q5_1 {
    static constexpr bool has_min = true;
    static constexpr int group = 32;
    static FERRUM_ALWAYS_INLINE void decode(const uint8_t *row, uint64_t b, Block &out) {
        const uint8_t *at = row + b * 24;
        out.scale[0] = half_at(at);
        out.min = half_at(at + 2);
        out.q = widen_unsigned(nibbles(at + 8) | fifth_bits(at + 4));
    }
};

struct q8_0 {
    static constexpr bool has_min = false;
    static constexpr int group = 32;
    static FERRUM_ALWAYS_INLINE void decode(const uint8_t *row, uint64_t b, Block &out) {
        const uint8_t *at = row + b * 34;
        out.scale[0] = half_at(at);
        out.q = widen_signed(load_bytes(at + 2));
    }
};

// The 6-bit scale and minimum of sub-block j of Q4_K and Q5_K.
static FERRUM_ALWAYS_INLINE void k_scale(const uint8_t *at, int j, const uint8_t *packed, Block &out) {
    int scale, min;
    if (j < 4) {
        scale = packed[j] & 63;
        min = packed[j + 4] & 63;
    } else {
        scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4;
        min = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4;
    }
    out.scale[0] = half_at(at) * (float)scale;
    out.min = -(half_at(at + 2) * (float)min);
}

struct q4_k {
    static constexpr bool has_min = true;
    static constexpr int group = 32;
    static FERRUM_ALWAYS_INLINE void decode(const uint8_t *row, uint64_t b, Block &out) {
        const uint8_t *at = row + b / 8 * 144;
        const int j = b % 8;
        k_scale(at, j, at + 4, out);
        out.q = widen_unsigned(shift_and_mask(load_bytes(at + 16 + 32 * (j / 2)), 4 * (j % 2), 15));
    }
};

struct q5_k {
    static constexpr bool has_min = true;
    static constexpr int group = 32;
    static FERRUM_ALWAYS_INLINE void decode(const uint8_t *row, uint64_t b, Block &out) {
        const uint8_t *at = row + b / 8 * 176;
        const int j = b % 8;
        k_scale(at, j, at + 4, out);
        const u8x32 fifth = shift_and_mask(load_bytes(at + 16), j, 1) * 16;
        out.q = widen_unsigned(shift_and_mask(load_bytes(at + 48 + 32 * (j / 2)), 4 * (j % 2), 15) | fifth);
    }
};

struct q6_k {
    static constexpr bool has_min = false;
    static constexpr int group = 16;
    static FERRUM_ALWAYS_INLINE void decode(const uint8_t *row, uint64_t b, Block &out) {
        const uint8_t *at = row + b / 8 * 210;
        const int j = b % 8, part = j % 4;  // four blocks of 32 a half
        const u8x32 low = shift_and_mask(load_bytes(at + 64 * (j / 4) + 32 * (part % 2)), 4 * (part / 2), 15);
        const u8x32 high = shift_and_mask(load_bytes(at + 128 + 32 * (j / 4)), 2 * part, 3) * 16;
        out.q = subtract_each(widen_unsigned(low | high), 32);
        for (int g = 0; g < 2; g++) out.scale[g] = half_at(at + 208) * (float)(int8_t)at[192 + 2 * j + g];
    }
};

// Dense formats, 16 elements at a time.
struct f32 {
    static FERRUM_ALWAYS_INLINE f32x16 elements(const uint8_t *row, uint64_t i, uint64_t count) {
        return load_up_to((const float *)row + i, count);
    }
};
struct f16 {
    static FERRUM_ALWAYS_INLINE f32x16 elements(const uint8_t *row, uint64_t i, uint64_t count) {
        return load_up_to((const half *)row + i, count);
    }
};
struct bf16 {
    static FERRUM_ALWAYS_INLINE f32x16 elements(const uint8_t *row, uint64_t i, uint64_t count) {
        return load_up_to((const bfloat *)row + i, count);
    }
};

}  // namespace ferrum::cpu::FERRUM_CPU_ISA
