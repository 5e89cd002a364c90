// Weight formats, as a lane decodes them: some elements of a row from the bytes as they are stored.
//
// Each format is a struct with
//   unit       elements a lane takes at once: whole octets, runs of eight elements
//   octets     of a unit
//   alignment  of rows that the wide loads need; other rows are read byte by byte
//   window     units in 64 consecutive elements
//   bits       a unit as it is stored
//   load       unit `unit` of a row; kWide: the row is aligned. Dense formats only: `count` elements exist
//   element    where octet `octet` of a unit begins
//   weights    an octet, exact: the float32 nearest to scale * q + min, whose product has few enough bits
//   unit_of    unit `i` of window `window`; octets of such a unit may lie in the next window
// Integers stay in their bytes until they become float: byte i of a word, masked, is q * 256^i, and the scale takes the
// power back.
#ifndef FERRUM_BLOCKS_H
#define FERRUM_BLOCKS_H

#include "common.h"

// ---- Words of a block. Blocks of 18, 22, 34 or 210 bytes are aligned to 2 bytes only.

template <bool kWide>
inline uint load_pair(device const uchar *from) {
    return kWide ? uint(*(device const ushort *)from) : uint(from[0]) | uint(from[1]) << 8;
}
template <bool kWide>
inline float load_scale(device const uchar *from) {
    return float(as_type<half>(ushort(load_pair<kWide>(from))));
}
template <bool kWide>
inline uint load_word_of_pairs(device const uchar *from) {
    return load_pair<kWide>(from) | load_pair<kWide>(from + 2) << 16;
}
template <bool kWide>
inline uint load_word(device const uchar *from) {
    return kWide ? *(device const uint *)from : load_word_of_pairs<false>(from);
}
template <bool kWide>
inline uint4 load_words(device const uchar *from) {
    return kWide ? *(device const uint4 *)from
                 : uint4(load_word<false>(from), load_word<false>(from + 4), load_word<false>(from + 8),
                         load_word<false>(from + 12));
}

// What the four bytes of a word are worth.
inline float4 byte_scales(float scale) {
    return scale * float4(1.0f, 1.0f / 256.0f, 1.0f / 65536.0f, 1.0f / 16777216.0f);
}
inline float4 scaled_bytes(uint word, float4 scales, float offset) {
    const uint4 bytes = uint4(word) & uint4(0xffu, 0xff00u, 0xff0000u, 0xff000000u);
    return fma(float4(bytes), scales, float4(offset));
}
// Bit i of `bits`, i < 4, as bit 4 of byte i: the fifth bit of a 5-bit format.
inline uint fifth_bits(uint bits) {
    return ((bits & 15u) * 0x00204081u & 0x01010101u) << 4;
}
// The low nibbles of a word's bytes, or the high ones.
inline uint nibbles(uint word, uint octet) {
    return (octet == 0 ? word : word >> 4) & 0x0f0f0f0fu;
}

// ---- Blocks of 32 elements. Byte i of sixteen holds element i in its low nibble and element i + 16 in its high one; a
// unit is half of a block's bytes: two octets, 16 elements apart.

struct nibble_bits {
    uint2 q;
    uint2 fifth;  // bit i of x: of element i of the first octet; y: of the second
    float scale;
    float min;
};

struct half_block_units {
    enum { dense = 0, unit = 16, octets = 2, window = 4 };
    typedef nibble_bits bits;
    static inline uint element(uint unit, uint octet) { return unit / 2 * 32 + unit % 2 * 8 + octet * 16; }
    static inline uint unit_of(uint window, uint i) { return 4 * window + i; }
};

struct nibble_units : half_block_units {
    static inline void weights(thread const nibble_bits &b, uint octet, thread float4 &low, thread float4 &high) {
        const float4 scales = byte_scales(b.scale);
        low = scaled_bytes(nibbles(b.q.x, octet), scales, b.min);
        high = scaled_bytes(nibbles(b.q.y, octet), scales, b.min);
    }
};

struct five_bit_units : half_block_units {
    static inline void weights(thread const nibble_bits &b, uint octet, thread float4 &low, thread float4 &high) {
        const float4 scales = byte_scales(b.scale);
        const uint fifth = octet == 0 ? b.fifth.x : b.fifth.y;
        low = scaled_bytes(nibbles(b.q.x, octet) | fifth_bits(fifth), scales, b.min);
        high = scaled_bytes(nibbles(b.q.y, octet) | fifth_bits(fifth >> 4), scales, b.min);
    }
};

struct q4_0 : nibble_units {
    enum { alignment = 2 };
    template <bool kWide>
    static inline void load(device const uchar *row, uint unit, uint, thread nibble_bits &b) {
        device const uchar *at = row + ulong(unit / 2) * 18, *q = at + 2 + unit % 2 * 8;
        b.scale = load_scale<kWide>(at);
        b.min = -8.0f * b.scale;
        b.q = uint2(load_word_of_pairs<kWide>(q), load_word_of_pairs<kWide>(q + 4));
    }
};

struct q4_1 : nibble_units {
    enum { alignment = 4 };
    template <bool kWide>
    static inline void load(device const uchar *row, uint unit, uint, thread nibble_bits &b) {
        device const uchar *at = row + ulong(unit / 2) * 20, *q = at + 4 + unit % 2 * 8;
        const uint scales = load_word<kWide>(at);
        b.scale = float(as_type<half>(ushort(scales)));
        b.min = float(as_type<half>(ushort(scales >> 16)));
        b.q = uint2(load_word<kWide>(q), load_word<kWide>(q + 4));
    }
};

struct q5_0 : five_bit_units {
    enum { alignment = 2 };
    template <bool kWide>
    static inline void load(device const uchar *row, uint unit, uint, thread nibble_bits &b) {
        device const uchar *at = row + ulong(unit / 2) * 22, *q = at + 6 + unit % 2 * 8;
        b.scale = load_scale<kWide>(at);
        b.min = -16.0f * b.scale;
        b.fifth = uint2(load_pair<kWide>(at + 2), load_pair<kWide>(at + 4)) >> (unit % 2 * 8);
        b.q = uint2(load_word_of_pairs<kWide>(q), load_word_of_pairs<kWide>(q + 4));
    }
};

struct q5_1 : five_bit_units {
    enum { alignment = 4 };
    template <bool kWide>
    static inline void load(device const uchar *row, uint unit, uint, thread nibble_bits &b) {
        device const uchar *at = row + ulong(unit / 2) * 24, *q = at + 8 + unit % 2 * 8;
        const uint scales = load_word<kWide>(at), fifth = load_word<kWide>(at + 4);
        b.scale = float(as_type<half>(ushort(scales)));
        b.min = float(as_type<half>(ushort(scales >> 16)));
        b.fifth = uint2(fifth, fifth >> 16) >> (unit % 2 * 8);
        b.q = uint2(load_word<kWide>(q), load_word<kWide>(q + 4));
    }
};

struct q8_0 {
    enum { dense = 0, unit = 16, octets = 2, alignment = 2, window = 4 };
    struct bits {
        uint4 q;
        float scale;
    };
    template <bool kWide>
    static inline void load(device const uchar *row, uint unit, uint, thread bits &b) {
        device const uchar *at = row + ulong(unit / 2) * 34, *q = at + 2 + unit % 2 * 16;
        b.scale = load_scale<kWide>(at);
        b.q = uint4(load_word_of_pairs<kWide>(q), load_word_of_pairs<kWide>(q + 4), load_word_of_pairs<kWide>(q + 8),
                    load_word_of_pairs<kWide>(q + 12)) ^
              uint4(0x80808080u);  // q + 128
    }
    static inline uint element(uint unit, uint octet) { return unit * 16 + octet * 8; }
    static inline uint unit_of(uint window, uint i) { return 4 * window + i; }
    static inline void weights(thread const bits &b, uint octet, thread float4 &low, thread float4 &high) {
        const float4 scales = byte_scales(b.scale);
        const uint2 q = octet == 0 ? b.q.xy : b.q.zw;
        low = scaled_bytes(q.x, scales, -128.0f * b.scale);
        high = scaled_bytes(q.y, scales, -128.0f * b.scale);
    }
};

// ---- Blocks of 256 elements

// Q4_K, Q5_K: run i of 32 bytes holds elements 64 i … in its low nibbles and 64 i + 32 … in its high ones. A unit is
// half of a run: two octets of each.
struct k_bits {
    uint4 q;
    uint4 fifth;      // bits 2 i and 2 i + 1 of every byte, shifted down
    float2 scale;     // of low and high nibbles
    float2 negative;  // -min
};

struct k_units {
    enum { dense = 0, unit = 32, octets = 4, alignment = 16, window = 2 };
    typedef k_bits bits;
    static inline uint element(uint unit, uint octet) {
        return unit / 2 * 64 + unit % 2 * 16 + octet % 2 * 8 + octet / 2 * 32;
    }
    static inline uint unit_of(uint window, uint i) { return 2 * window + i; }
};

// `head`: d and dmin, and 12 bytes with eight scales and eight minima of six bits.
inline void k_scales(uint4 head, uint run, thread k_bits &b) {
    const uint scales = run < 2 ? head.y & 0x3f3f3f3fu : (head.w & 0x0f0f0f0fu) | (head.y >> 2 & 0x30303030u);
    const uint mins = run < 2 ? head.z & 0x3f3f3f3fu : (head.w >> 4 & 0x0f0f0f0fu) | (head.z >> 2 & 0x30303030u);
    const uint shift = run % 2 * 16;
    const half2 d = as_type<half2>(head.x);
    b.scale = float(d.x) * float2(float(scales >> shift & 0xffu), float(scales >> (shift + 8) & 0xffu));
    b.negative = float(d.y) * float2(float(mins >> shift & 0xffu), float(mins >> (shift + 8) & 0xffu));
}

struct q4_k : k_units {
    template <bool kWide>
    static inline void load(device const uchar *row, uint unit, uint, thread k_bits &b) {
        device const uchar *at = row + ulong(unit / 8) * 144;
        k_scales(load_words<kWide>(at), unit % 8 / 2, b);
        b.q = load_words<kWide>(at + 16 + unit % 8 * 16);
    }
    static inline void weights(thread const k_bits &b, uint octet, thread float4 &low, thread float4 &high) {
        const uint2 q = octet % 2 == 0 ? b.q.xy : b.q.zw;
        const float4 scales = byte_scales(octet < 2 ? b.scale.x : b.scale.y);
        const float min = -(octet < 2 ? b.negative.x : b.negative.y);
        low = scaled_bytes(nibbles(q.x, octet / 2), scales, min);
        high = scaled_bytes(nibbles(q.y, octet / 2), scales, min);
    }
};

struct q5_k : k_units {
    template <bool kWide>
    static inline void load(device const uchar *row, uint unit, uint, thread k_bits &b) {
        device const uchar *at = row + ulong(unit / 8) * 176;
        const uint run = unit % 8 / 2;
        k_scales(load_words<kWide>(at), run, b);
        b.fifth = load_words<kWide>(at + 16 + unit % 2 * 16) >> (2 * run);
        b.q = load_words<kWide>(at + 48 + unit % 8 * 16);
    }
    static inline void weights(thread const k_bits &b, uint octet, thread float4 &low, thread float4 &high) {
        const uint2 q = octet % 2 == 0 ? b.q.xy : b.q.zw;
        const uint2 fifth = ((octet % 2 == 0 ? b.fifth.xy : b.fifth.zw) >> (octet / 2) & 0x01010101u) << 4;
        const float4 scales = byte_scales(octet < 2 ? b.scale.x : b.scale.y);
        const float min = -(octet < 2 ? b.negative.x : b.negative.y);
        low = scaled_bytes(nibbles(q.x, octet / 2) | fifth.x, scales, min);
        high = scaled_bytes(nibbles(q.y, octet / 2) | fifth.y, scales, min);
    }
};

// Q6_K: a half of 128 elements is four parts of 32. Byte l of its first 32 holds the low nibbles of parts 0 and 2, of
// the next 32 those of parts 1 and 3; byte l of its 32 others two high bits of each part. A unit is an octet of every
// part.
struct q6_k {
    enum { dense = 0, unit = 32, octets = 4, alignment = 2, window = 4 };
    struct bits {
        uint4 q;  // low nibbles: xy of parts 0 and 2, zw of 1 and 3
        uint2 high;
        float4 scale;
    };
    template <bool kWide>
    static inline void load(device const uchar *row, uint unit, uint, thread bits &b) {
        device const uchar *at = row + ulong(unit / 8) * 210;
        const uint half_of = unit % 8 / 4, run = unit % 4;
        device const uchar *low = at + half_of * 64 + run * 8, *high = at + 128 + half_of * 32 + run * 8;
        device const uchar *scales = at + 192 + half_of * 8 + run / 2;
        b.q = uint4(load_word_of_pairs<kWide>(low), load_word_of_pairs<kWide>(low + 4),
                    load_word_of_pairs<kWide>(low + 32), load_word_of_pairs<kWide>(low + 36));
        b.high = uint2(load_word_of_pairs<kWide>(high), load_word_of_pairs<kWide>(high + 4));
        b.scale =
            load_scale<kWide>(at + 208) * float4(float(as_type<char>(scales[0])), float(as_type<char>(scales[2])),
                                                 float(as_type<char>(scales[4])), float(as_type<char>(scales[6])));
    }
    static inline uint element(uint unit, uint octet) { return unit / 4 * 128 + unit % 4 * 8 + octet * 32; }
    static inline uint unit_of(uint window, uint i) { return window / 2 * 4 + i; }
    static inline void weights(thread const bits &b, uint octet, thread float4 &low, thread float4 &high) {
        const uint2 q = octet % 2 == 0 ? b.q.xy : b.q.zw;
        const uint2 top = (b.high >> (2 * octet) & 0x03030303u) << 4;
        const float4 scales = byte_scales(b.scale[octet]);
        low = scaled_bytes(nibbles(q.x, octet / 2) | top.x, scales, -32.0f * b.scale[octet]);
        high = scaled_bytes(nibbles(q.y, octet / 2) | top.y, scales, -32.0f * b.scale[octet]);
    }
};

// ---- Dense formats: a unit is an octet. The last one of a row may be short.

struct dense_bits {
    float4 low, high;
};

struct dense_units {
    enum { dense = 1, unit = 8, octets = 1, window = 8 };
    typedef dense_bits bits;
    static inline uint element(uint unit, uint) { return unit * 8; }
    static inline uint unit_of(uint window, uint i) { return 8 * window + i; }
    static inline void weights(thread const dense_bits &b, uint, thread float4 &low, thread float4 &high) {
        low = b.low;
        high = b.high;
    }
};

struct f32 : dense_units {
    enum { alignment = 16 };
    template <bool kWide>
    static inline void load(device const uchar *row, uint unit, uint count, thread dense_bits &b) {
        device const float *at = (device const float *)row + ulong(unit) * 8;
        if (kWide) {
            b.low = *(device const float4 *)at;
            b.high = *(device const float4 *)(at + 4);
        } else {
            b.low = float4(0.0f);
            b.high = float4(0.0f);
            FERRUM_UNROLL for (uint i = 0; i < 4; i++) {
                if (i < count) b.low[i] = at[i];
                if (i + 4 < count) b.high[i] = at[i + 4];
            }
        }
    }
};

struct f16 : dense_units {
    enum { alignment = 8 };
    template <bool kWide>
    static inline void load(device const uchar *row, uint unit, uint count, thread dense_bits &b) {
        device const half *at = (device const half *)row + ulong(unit) * 8;
        if (kWide) {
            b.low = load_quad(at);
            b.high = load_quad(at + 4);
        } else {
            load_octet(at, count, b.low, b.high);
        }
    }
};

// bfloat16 is the upper half of a float32.
struct bf16 : dense_units {
    enum { alignment = 8 };
    static inline float4 widened(uint2 pairs) {
        return as_type<float4>(uint4(pairs.x << 16, pairs.x & 0xffff0000u, pairs.y << 16, pairs.y & 0xffff0000u));
    }
    template <bool kWide>
    static inline void load(device const uchar *row, uint unit, uint count, thread dense_bits &b) {
        device const half *at = (device const half *)row + ulong(unit) * 8;
        const uint4 octet =
            kWide ? uint4(*(device const uint2 *)at, *(device const uint2 *)(at + 4)) : octet_bits(at, count);
        b.low = widened(octet.xy);
        b.high = widened(octet.zw);
    }
};

#endif
