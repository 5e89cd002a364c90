// GGUF blocks, 32 weights at a time: integers and a scale, in the arithmetic of the format's own formula (FACTS G.3).
//
// Each format is a struct with
//   has_min    weight = scale * q + min, else weight = scale * q
//   group      weights that share a scale: 32, or 16
//   decode     block `b` (of 32) of a row: 32 integers, 32 / group scales, and the min
#pragma once

#include "simd.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

struct Block {
    int16_t q[32];
    float scale[2];
    float min;
};

static FERRUM_ALWAYS_INLINE float half_at(const uint8_t *at) {
    half value;
    memcpy(&value, at, 2);
    return (float)value;
}
static FERRUM_ALWAYS_INLINE uint32_t u32_at(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, 4);
    return value;
}

// Byte i holds element i in its low nibble and element i + 16 in its high one.
static FERRUM_ALWAYS_INLINE void nibbles(const uint8_t *from, int16_t *q, int minus) {
    for (int i = 0; i < 16; i++) {
        q[i] = (int16_t)((from[i] & 15) - minus);
        q[i + 16] = (int16_t)((from[i] >> 4) - minus);
    }
}
static FERRUM_ALWAYS_INLINE void nibbles_and_fifth_bits(const uint8_t *from, uint32_t bits, int16_t *q, int minus) {
    for (int i = 0; i < 16; i++) {
        q[i] = (int16_t)(((from[i] & 15) | (bits >> i & 1) << 4) - minus);
        q[i + 16] = (int16_t)(((from[i] >> 4) | (bits >> (i + 16) & 1) << 4) - minus);
    }
}

struct q4_0 {
    static constexpr bool has_min = false;
    static constexpr int group = 32;
    static FERRUM_ALWAYS_INLINE void decode(const uint8_t *row, uint64_t b, Block &out) {
        const uint8_t *at = row + b * 18;
        out.scale[0] = half_at(at);
        nibbles(at + 2, out.q, 8);
    }
};

struct q4_1 {
    static constexpr bool has_min = true;
    static constexpr int group = 32;
    static FERRUM_ALWAYS_INLINE void decode(const uint8_t *row, uint64_t b, Block &out) {
        const uint8_t *at = row + b * 20;
        out.scale[0] = half_at(at);
        out.min = half_at(at + 2);
        nibbles(at + 4, out.q, 0);
    }
};

struct q5_0 {
    static constexpr bool has_min = false;
    static constexpr int group = 32;
    static FERRUM_ALWAYS_INLINE void decode(const uint8_t *row, uint64_t b, Block &out) {
        const uint8_t *at = row + b * 22;
        out.scale[0] = half_at(at);
        nibbles_and_fifth_bits(at + 6, u32_at(at + 2), out.q, 16);
    }
};

struct q5_1 {
    static constexpr bool has_min = true;
    static constexpr int group = 32;
    static FERRUM_ALWAYS_INLINE void decode(const uint8_t *row, uint64_t b, Block &out) {
        const uint8_t *at = row + b * 24;
        out.scale[0] = half_at(at);
        out.min = half_at(at + 2);
        nibbles_and_fifth_bits(at + 8, u32_at(at + 4), out.q, 0);
    }
};

struct q8_0 {
    static constexpr bool has_min = false;
    static constexpr int group = 32;
    static FERRUM_ALWAYS_INLINE void decode(const uint8_t *row, uint64_t b, Block &out) {
        const uint8_t *at = row + b * 34;
        out.scale[0] = half_at(at);
        for (int i = 0; i < 32; i++) out.q[i] = (int8_t)at[2 + i];
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
        const uint8_t *qs = at + 16 + 32 * (j / 2);
        const int shift = 4 * (j % 2);
        for (int i = 0; i < 32; i++) out.q[i] = (int16_t)(qs[i] >> shift & 15);
    }
};

struct q5_k {
    static constexpr bool has_min = true;
    static constexpr int group = 32;
    static FERRUM_ALWAYS_INLINE void decode(const uint8_t *row, uint64_t b, Block &out) {
        const uint8_t *at = row + b / 8 * 176;
        const int j = b % 8;
        k_scale(at, j, at + 4, out);
        const uint8_t *qh = at + 16, *qs = at + 48 + 32 * (j / 2);
        const int shift = 4 * (j % 2);
        for (int i = 0; i < 32; i++) out.q[i] = (int16_t)((qs[i] >> shift & 15) | (qh[i] >> j & 1) << 4);
    }
};

struct q6_k {
    static constexpr bool has_min = false;
    static constexpr int group = 16;
    static FERRUM_ALWAYS_INLINE void decode(const uint8_t *row, uint64_t b, Block &out) {
        const uint8_t *at = row + b / 8 * 210;
        const int j = b % 8, part = j % 4;  // four blocks of 32 a half
        const uint8_t *ql = at + 64 * (j / 4) + 32 * (part % 2), *qh = at + 128 + 32 * (j / 4);
        const int low = 4 * (part / 2), high = 2 * part;
        for (int i = 0; i < 32; i++) out.q[i] = (int16_t)(((ql[i] >> low & 15) | (qh[i] >> high & 3) << 4) - 32);
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
        uint16_t upper[kLanes] = {};
        memcpy(upper, (const uint16_t *)row + i, 2 * (count < kLanes ? count : kLanes));
        uint32_t bits[kLanes];
        for (int j = 0; j < kLanes; j++) bits[j] = (uint32_t)upper[j] << 16;
        f32x16 r;
        memcpy(&r, bits, sizeof(r));
        return r;
    }
};

}  // namespace ferrum::cpu::FERRUM_CPU_ISA
