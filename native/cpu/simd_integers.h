// Products of 16-bit integers, bytes and bits of sixteen lanes: what quantised weights are made of.
#pragma once

#include "simd.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

// Whether dot_pairs is one instruction, whose sums wait for its multiplication.
#if defined(__AVX512VNNI__)
constexpr bool kFusedDots = true;
#else
constexpr bool kFusedDots = false;
#endif

// acc + a0 * b0 + a1 * b1 for the pairs of 16-bit integers in each lane; exact while the sum fits 32 bits.
static FERRUM_ALWAYS_INLINE i32x16 dot_pairs(i32x16 acc, i32x16 a, i32x16 b) {
#if defined(__AVX512VNNI__)
    acc.part[0] = (IntRegister)_mm512_dpwssd_epi32((__m512i)acc.part[0], (__m512i)a.part[0], (__m512i)b.part[0]);
#elif defined(__AVX2__)
    FERRUM_EACH({  // without the asm, g++ makes all products first and keeps them in memory
        acc.part[i] += (IntRegister)_mm256_madd_epi16((__m256i)a.part[i], (__m256i)b.part[i]);
        asm("" : "+x"(acc.part[i]));
    });
#elif defined(__SSE2__)
    FERRUM_EACH(acc.part[i] += (IntRegister)_mm_madd_epi16((__m128i)a.part[i], (__m128i)b.part[i]));
#elif defined(FERRUM_NEON)
    FERRUM_EACH({
        const int16x8_t x = (int16x8_t)a.part[i], y = (int16x8_t)b.part[i];
        const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
        acc.part[i] += (IntRegister)vpaddq_s32(low, high);
    });
#else
    // By elements: g++ takes minutes over shifts of whole vectors where they are unrolled as in linear.cpp.
    FERRUM_EACH({
        int16_t x[2 * kRegisterLanes], y[2 * kRegisterLanes];
        memcpy(x, &a.part[i], sizeof(x));
        memcpy(y, &b.part[i], sizeof(y));
        int32_t sums[kRegisterLanes];
        for (int j = 0; j < kRegisterLanes; j++) sums[j] = x[2 * j] * y[2 * j] + x[2 * j + 1] * y[2 * j + 1];
        IntRegister both;
        memcpy(&both, sums, sizeof(both));
        acc.part[i] += both;
    });
#endif
    return acc;
}

// Thirty-two bytes, and their widening into the pairs of 16-bit integers that dot_pairs takes.
typedef uint8_t u8x32 __attribute__((vector_size(32)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int16_t ShortRegister __attribute__((vector_size(4 * kRegisterLanes)));
template <class Byte>
constexpr bool kIsSigned = (Byte)-1 < 0;

static FERRUM_ALWAYS_INLINE u8x32 load_bytes(const uint8_t *from) {
    u8x32 r;
    memcpy(&r, from, sizeof(r));
    return r;
}
// Each byte shifted right by `bits`, then masked; `mask` drops what came over from the byte's neighbour.
static FERRUM_ALWAYS_INLINE u8x32 shift_and_mask(u8x32 a, int bits, uint8_t mask) {
    return (u8x32)((u16x16)a >> bits) & mask;
}
// Of int8_t or uint8_t.
template <class Byte>
static FERRUM_ALWAYS_INLINE i32x16 widen(u8x32 a) {
    i32x16 r;
#if defined(__AVX512BW__)
    r.part[0] = (IntRegister)(kIsSigned<Byte> ? _mm512_cvtepi8_epi16((__m256i)a) : _mm512_cvtepu8_epi16((__m256i)a));
#elif defined(__AVX2__)
    const __m128i halves[2] = {_mm256_castsi256_si128((__m256i)a), _mm256_extracti128_si256((__m256i)a, 1)};
    FERRUM_EACH(r.part[i] =
                    (IntRegister)(kIsSigned<Byte> ? _mm256_cvtepi8_epi16(halves[i]) : _mm256_cvtepu8_epi16(halves[i])));
#elif defined(FERRUM_NEON)
    uint8x8_t bytes[4];
    memcpy(bytes, &a, sizeof(bytes));
    FERRUM_EACH(r.part[i] =
                    kIsSigned<Byte> ? (IntRegister)vmovl_s8((int8x8_t)bytes[i]) : (IntRegister)vmovl_u8(bytes[i]));
#else
    Byte bytes[32];
    memcpy(bytes, &a, 32);
    int16_t wide[32];
    for (int i = 0; i < 32; i++) wide[i] = bytes[i];
    memcpy(&r, wide, sizeof(r));
#endif
    return r;
}
// The lower and the upper byte of every 16-bit word, signed.
static FERRUM_ALWAYS_INLINE i32x16 low_bytes(i32x16 a) {
    FERRUM_EACH(a.part[i] = (IntRegister)((ShortRegister)a.part[i] << 8 >> 8));
    return a;
}
static FERRUM_ALWAYS_INLINE i32x16 high_bytes(i32x16 a) {
    FERRUM_EACH(a.part[i] = (IntRegister)((ShortRegister)a.part[i] >> 8));
    return a;
}
// Each 16-bit word less `value`.
static FERRUM_ALWAYS_INLINE i32x16 subtract_shorts(i32x16 a, int16_t value) {
    if (value) FERRUM_EACH(a.part[i] = (IntRegister)((ShortRegister)a.part[i] - value));
    return a;
}
// Sixteen bytes, int8_t or uint8_t, an integer a lane.
template <class Byte>
static FERRUM_ALWAYS_INLINE i32x16 load_integers(const uint8_t *from) {
    i32x16 r;
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128((const __m128i *)from);
    r.part[0] = (IntRegister)(kIsSigned<Byte> ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
    FERRUM_EACH({
        const __m128i bytes = _mm_loadl_epi64((const __m128i *)(from + 8 * i));
        r.part[i] = (IntRegister)(kIsSigned<Byte> ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
    });
#else
    Byte bytes[kLanes];
    memcpy(bytes, from, sizeof(bytes));
    int32_t lanes[kLanes];
    for (int i = 0; i < kLanes; i++) lanes[i] = bytes[i];
    r = load(lanes);
#endif
    return r;
}

// The bits of sixteen elements of 32 or 16 bits, one a lane.
template <class T>
static FERRUM_ALWAYS_INLINE i32x16 load_bits(const T *from) {
    int32_t lanes[kLanes];
    if constexpr (sizeof(T) == 4) {
        memcpy(lanes, from, sizeof(lanes));
    } else {
        uint16_t bits[kLanes];
        memcpy(bits, from, sizeof(bits));
        for (int i = 0; i < kLanes; i++) lanes[i] = bits[i];
    }
    return load(lanes);
}
// And back.
template <class T>
static FERRUM_ALWAYS_INLINE void store_bits(T *to, i32x16 a) {
    int32_t lanes[kLanes];
    memcpy(lanes, &a, sizeof(a));
    if constexpr (sizeof(T) == 4) {
        memcpy(to, lanes, sizeof(lanes));
    } else {
        uint16_t bits[kLanes];
        for (int i = 0; i < kLanes; i++) bits[i] = (uint16_t)lanes[i];
        memcpy(to, bits, sizeof(bits));
    }
}
// Lane j of row i becomes lane i of row j.
static FERRUM_ALWAYS_INLINE void transpose(i32x16 *v) {
#if defined(__AVX512F__)
    __m512i a[16], b[16];
    FERRUM_UNROLL for (int i = 0; i < 16; i++) a[i] = (__m512i)v[i].part[0];
    // Pairs of rows, pairs of pairs, then 128-bit quarters twice.
    FERRUM_UNROLL for (int i = 0; i < 8; i++) {
        b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
    FERRUM_UNROLL for (int i = 0; i < 4; i++) FERRUM_UNROLL for (int j = 0; j < 2; j++) {
        a[4 * i + 2 * j] = _mm512_unpacklo_epi64(b[4 * i + j], b[4 * i + j + 2]);
        a[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(b[4 * i + j], b[4 * i + j + 2]);
    }
    FERRUM_UNROLL for (int j = 0; j < 4; j++) {
        const __m512i low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88),
                      high = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
        const __m512i low2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
        const __m512i high2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
        v[j].part[0] = (IntRegister)_mm512_shuffle_i32x4(low, low2, 0x88);
        v[8 + j].part[0] = (IntRegister)_mm512_shuffle_i32x4(low, low2, 0xdd);
        v[4 + j].part[0] = (IntRegister)_mm512_shuffle_i32x4(high, high2, 0x88);
        v[12 + j].part[0] = (IntRegister)_mm512_shuffle_i32x4(high, high2, 0xdd);
    }
#elif defined(FERRUM_NEON)
    // Squares of 4 by 4: pairs of rows, pairs of pairs.
    i32x16 to[16];
    FERRUM_UNROLL for (int i = 0; i < 4; i++) FERRUM_UNROLL for (int j = 0; j < 4; j++) {
        auto row = [&](int k) { return (int32x4_t)v[4 * i + k].part[j]; };
        const int64x2_t even01 = (int64x2_t)vtrn1q_s32(row(0), row(1)), odd01 = (int64x2_t)vtrn2q_s32(row(0), row(1));
        const int64x2_t even23 = (int64x2_t)vtrn1q_s32(row(2), row(3)), odd23 = (int64x2_t)vtrn2q_s32(row(2), row(3));
        to[4 * j].part[i] = (IntRegister)vtrn1q_s64(even01, even23);
        to[4 * j + 1].part[i] = (IntRegister)vtrn1q_s64(odd01, odd23);
        to[4 * j + 2].part[i] = (IntRegister)vtrn2q_s64(even01, even23);
        to[4 * j + 3].part[i] = (IntRegister)vtrn2q_s64(odd01, odd23);
    }
    memcpy(v, to, sizeof(to));
#else
    int32_t from[16][16], to[16][16];
    memcpy(from, v, sizeof(from));
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) to[j][i] = from[i][j];
    memcpy(v, to, sizeof(to));
#endif
}

}  // namespace ferrum::cpu::FERRUM_CPU_ISA
