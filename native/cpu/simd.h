// Sixteen lanes, whatever the machine's registers hold. Every instruction set computes the same bits: fused
// multiply-adds are explicit, nothing else is contracted, and the order of a horizontal sum is fixed here.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define FERRUM_ALWAYS_INLINE inline __attribute__((always_inline))
#define FERRUM_NOINLINE __attribute__((noinline))
#define FERRUM_UNROLL _Pragma("GCC unroll 16")
// Elements of a vector of four by their index.
#if defined(__clang__)
#define FERRUM_SHUFFLE(a, ...) __builtin_shufflevector(a, a, __VA_ARGS__)
#else
#define FERRUM_SHUFFLE(a, ...) __builtin_shuffle(a, (IntFour){__VA_ARGS__})
#endif

namespace ferrum::cpu::FERRUM_CPU_ISA {

#if defined(__AVX512F__)
constexpr int kRegisterLanes = 16;
#elif defined(__AVX2__)
constexpr int kRegisterLanes = 8;
#else
constexpr int kRegisterLanes = 4;
#endif
constexpr int kLanes = 16;
constexpr int kParts = kLanes / kRegisterLanes;

typedef float FloatRegister __attribute__((vector_size(4 * kRegisterLanes)));
typedef int32_t IntRegister __attribute__((vector_size(4 * kRegisterLanes)));
typedef int32_t IntFour __attribute__((vector_size(16)));

struct f32x16 {
    FloatRegister part[kParts];
};
struct i32x16 {
    IntRegister part[kParts];
};

// A number known to the compiler, for loops that must unroll.
template <int kValue>
struct Constant {
    static constexpr int value = kValue;
};

#define FERRUM_EACH(...) FERRUM_UNROLL for (int i = 0; i < kParts; i++) __VA_ARGS__

static FERRUM_ALWAYS_INLINE f32x16 load(const float *from) {
    f32x16 r;
    memcpy(&r, from, sizeof(r));
    return r;
}
static FERRUM_ALWAYS_INLINE void store(float *to, f32x16 a) {
    memcpy(to, &a, sizeof(a));
}
static FERRUM_ALWAYS_INLINE i32x16 load(const int32_t *from) {
    i32x16 r;
    memcpy(&r, from, sizeof(r));
    return r;
}
static FERRUM_ALWAYS_INLINE f32x16 splat(float value) {
    f32x16 r;
    FERRUM_EACH(r.part[i] = value - FloatRegister{});
    return r;
}
static FERRUM_ALWAYS_INLINE i32x16 splat(int32_t value) {
    i32x16 r;
    FERRUM_EACH(r.part[i] = value - IntRegister{});
    return r;
}
static FERRUM_ALWAYS_INLINE f32x16 operator+(f32x16 a, f32x16 b) {
    FERRUM_EACH(a.part[i] += b.part[i]);
    return a;
}
static FERRUM_ALWAYS_INLINE f32x16 operator-(f32x16 a, f32x16 b) {
    FERRUM_EACH(a.part[i] -= b.part[i]);
    return a;
}
static FERRUM_ALWAYS_INLINE f32x16 operator*(f32x16 a, f32x16 b) {
    FERRUM_EACH(a.part[i] *= b.part[i]);
    return a;
}
static FERRUM_ALWAYS_INLINE f32x16 operator/(f32x16 a, f32x16 b) {
    FERRUM_EACH(a.part[i] /= b.part[i]);
    return a;
}
// The larger; the second where one is NaN.
static FERRUM_ALWAYS_INLINE f32x16 max(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)  // g++ makes a comparison and a choice of it
    a.part[0] = (FloatRegister)_mm512_max_ps((__m512)a.part[0], (__m512)b.part[0]);
#elif defined(__AVX2__)
    FERRUM_EACH(a.part[i] = (FloatRegister)_mm256_max_ps((__m256)a.part[i], (__m256)b.part[i]));
#else
    FERRUM_EACH(a.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i]);
#endif
    return a;
}
// a where a < b, b elsewhere.
static FERRUM_ALWAYS_INLINE f32x16 min(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    a.part[0] = (FloatRegister)_mm512_min_ps((__m512)a.part[0], (__m512)b.part[0]);
#elif defined(__AVX2__)
    FERRUM_EACH(a.part[i] = (FloatRegister)_mm256_min_ps((__m256)a.part[i], (__m256)b.part[i]));
#else
    FERRUM_EACH(a.part[i] = a.part[i] < b.part[i] ? a.part[i] : b.part[i]);
#endif
    return a;
}
static FERRUM_ALWAYS_INLINE i32x16 max(i32x16 a, i32x16 b) {
    FERRUM_EACH(a.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i]);
    return a;
}
// |a| as an integer: ordered as the magnitudes are, infinity and NaN from 0x7f800000 on.
static FERRUM_ALWAYS_INLINE i32x16 magnitude_bits(f32x16 a) {
    i32x16 r;
    memcpy(&r, &a, sizeof(r));
    FERRUM_EACH(r.part[i] &= 0x7fffffff);
    return r;
}
// 2^n, for n from -126 to 127.
static FERRUM_ALWAYS_INLINE float power_of_two(int32_t n) {
    const int32_t bits = (n + 127) << 23;
    float r;
    memcpy(&r, &bits, 4);
    return r;
}
static FERRUM_ALWAYS_INLINE f32x16 to_float(i32x16 a) {
    f32x16 r;
    FERRUM_EACH(r.part[i] = __builtin_convertvector(a.part[i], FloatRegister));
    return r;
}

// Towards zero; the values fit.
static FERRUM_ALWAYS_INLINE i32x16 to_integer(f32x16 a) {
    i32x16 r;
    FERRUM_EACH(r.part[i] = __builtin_convertvector(a.part[i], IntRegister));
    return r;
}
// The integers fit 16 bits.
static FERRUM_ALWAYS_INLINE void store_shorts(int16_t *to, i32x16 a) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)a.part[0]));
#elif defined(FERRUM_NEON)
    FERRUM_EACH(vst1_s16(to + 4 * i, vmovn_s32((int32x4_t)a.part[i])));
#else
    FERRUM_EACH(for (int j = 0; j < kRegisterLanes; j++) to[i * kRegisterLanes + j] = (int16_t)a.part[i][j]);
#endif
}

// a * b + c, rounded once.
static FERRUM_ALWAYS_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    c.part[0] = (FloatRegister)_mm512_fmadd_ps((__m512)a.part[0], (__m512)b.part[0], (__m512)c.part[0]);
#elif defined(__AVX2__)
    FERRUM_EACH(c.part[i] = (FloatRegister)_mm256_fmadd_ps((__m256)a.part[i], (__m256)b.part[i], (__m256)c.part[i]));
#elif defined(__aarch64__)  // portable too: all such machines have it
    FERRUM_EACH(c.part[i] =
                    (FloatRegister)vfmaq_f32((float32x4_t)c.part[i], (float32x4_t)a.part[i], (float32x4_t)b.part[i]));
#else
    FERRUM_EACH({
        float lanes[kRegisterLanes];
        for (int j = 0; j < kRegisterLanes; j++) lanes[j] = __builtin_fmaf(a.part[i][j], b.part[i][j], c.part[i][j]);
        memcpy(&c.part[i], lanes, sizeof(lanes));
    });
#endif
    return c;
}

// acc + a0 * b0 + a1 * b1 for the pairs of 16-bit integers in each lane; exact while the sum fits 32 bits.
static FERRUM_ALWAYS_INLINE i32x16 dot_pairs(i32x16 acc, i32x16 a, i32x16 b) {
#if defined(__AVX512VNNI__)
    acc.part[0] = (IntRegister)_mm512_dpwssd_epi32((__m512i)acc.part[0], (__m512i)a.part[0], (__m512i)b.part[0]);
#elif defined(__AVX2__)
    FERRUM_EACH(acc.part[i] += (IntRegister)_mm256_madd_epi16((__m256i)a.part[i], (__m256i)b.part[i]));
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

static FERRUM_ALWAYS_INLINE u8x32 load_bytes(const uint8_t *from) {
    u8x32 r;
    memcpy(&r, from, sizeof(r));
    return r;
}
// Each byte shifted right by `bits`, then masked; `mask` drops what came over from the byte's neighbour.
static FERRUM_ALWAYS_INLINE u8x32 shift_and_mask(u8x32 a, int bits, uint8_t mask) {
    return (u8x32)((u16x16)a >> bits) & mask;
}
static FERRUM_ALWAYS_INLINE i32x16 widen_unsigned(u8x32 a) {
    i32x16 r;
#if defined(__AVX512BW__)
    r.part[0] = (IntRegister)_mm512_cvtepu8_epi16((__m256i)a);
#elif defined(FERRUM_NEON)
    uint8x8_t bytes[4];
    memcpy(bytes, &a, sizeof(bytes));
    FERRUM_EACH(r.part[i] = (IntRegister)vmovl_u8(bytes[i]));
#else
    uint8_t bytes[32];
    memcpy(bytes, &a, 32);
    int16_t wide[32];
    for (int i = 0; i < 32; i++) wide[i] = bytes[i];
    memcpy(&r, wide, sizeof(r));
#endif
    return r;
}
static FERRUM_ALWAYS_INLINE i32x16 widen_signed(u8x32 a) {
    i32x16 r;
#if defined(__AVX512BW__)
    r.part[0] = (IntRegister)_mm512_cvtepi8_epi16((__m256i)a);
#elif defined(FERRUM_NEON)
    int8x8_t bytes[4];
    memcpy(bytes, &a, sizeof(bytes));
    FERRUM_EACH(r.part[i] = (IntRegister)vmovl_s8(bytes[i]));
#else
    int8_t bytes[32];
    memcpy(bytes, &a, 32);
    int16_t wide[32];
    for (int i = 0; i < 32; i++) wide[i] = bytes[i];
    memcpy(&r, wide, sizeof(r));
#endif
    return r;
}
static FERRUM_ALWAYS_INLINE i32x16 operator&(i32x16 a, i32x16 b) {
    FERRUM_EACH(a.part[i] &= b.part[i]);
    return a;
}
static FERRUM_ALWAYS_INLINE i32x16 operator|(i32x16 a, i32x16 b) {
    FERRUM_EACH(a.part[i] |= b.part[i]);
    return a;
}
static FERRUM_ALWAYS_INLINE i32x16 operator+(i32x16 a, i32x16 b) {
    FERRUM_EACH(a.part[i] += b.part[i]);
    return a;
}
// 32-bit lanes, to the left where `bits` is negative.
static FERRUM_ALWAYS_INLINE i32x16 shift_right(i32x16 a, int bits) {
    typedef uint32_t UnsignedRegister __attribute__((vector_size(4 * kRegisterLanes)));
    FERRUM_EACH(a.part[i] = (IntRegister)(bits < 0 ? (UnsignedRegister)a.part[i] << -bits
                                                   : (UnsignedRegister)a.part[i] >> bits));
    return a;
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
// Sixteen bytes, an integer a lane.
static FERRUM_ALWAYS_INLINE i32x16 unsigned_bytes(const uint8_t *from) {
    i32x16 r;
#if defined(__AVX512F__)
    r.part[0] = (IntRegister)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(FERRUM_NEON)
    const uint8x16_t bytes = vld1q_u8(from);
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
    r = {{(IntRegister)vmovl_u16(vget_low_u16(low)), (IntRegister)vmovl_high_u16(low),
          (IntRegister)vmovl_u16(vget_low_u16(high)), (IntRegister)vmovl_high_u16(high)}};
#else
    int32_t lanes[kLanes];
    for (int i = 0; i < kLanes; i++) lanes[i] = from[i];
    r = load(lanes);
#endif
    return r;
}
static FERRUM_ALWAYS_INLINE i32x16 signed_bytes(const uint8_t *from) {
    i32x16 r;
#if defined(__AVX512F__)
    r.part[0] = (IntRegister)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(FERRUM_NEON)
    const int8x16_t bytes = vld1q_s8((const int8_t *)from);
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    r = {{(IntRegister)vmovl_s16(vget_low_s16(low)), (IntRegister)vmovl_high_s16(low),
          (IntRegister)vmovl_s16(vget_low_s16(high)), (IntRegister)vmovl_high_s16(high)}};
#else
    int32_t lanes[kLanes];
    for (int i = 0; i < kLanes; i++) lanes[i] = (int8_t)from[i];
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

#if defined(__aarch64__)
typedef __fp16 half;  // g++ knows _Float16 there since its version 13 only
#else
typedef _Float16 half;
#endif

static FERRUM_ALWAYS_INLINE f32x16 load(const half *from) {
    f32x16 r;
#if defined(__AVX512F__)
    r.part[0] = (FloatRegister)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__AVX2__)
    FERRUM_EACH(r.part[i] = (FloatRegister)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 8 * i))));
#elif defined(FERRUM_NEON)
    float16x4_t halves[4];
    memcpy(halves, from, sizeof(halves));
    FERRUM_EACH(r.part[i] = (FloatRegister)vcvt_f32_f16(halves[i]));
#else
    float lanes[kLanes];
    for (int j = 0; j < kLanes; j++) lanes[j] = (float)from[j];
    r = load(lanes);
#endif
    return r;
}
// Rounds to nearest even.
static FERRUM_ALWAYS_INLINE void store(half *to, f32x16 a) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)to,
                        _mm512_cvtps_ph((__m512)a.part[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__AVX2__)
    FERRUM_EACH(_mm_storeu_si128((__m128i *)(to + 8 * i),
                                 _mm256_cvtps_ph((__m256)a.part[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)));
#elif defined(FERRUM_NEON)
    float16x4_t halves[4];
    FERRUM_EACH(halves[i] = vcvt_f16_f32((float32x4_t)a.part[i]));
    memcpy(to, halves, sizeof(halves));
#else
    FERRUM_EACH(for (int j = 0; j < kRegisterLanes; j++) to[i * kRegisterLanes + j] = (half)a.part[i][j]);
#endif
}

// bfloat16: the upper half of a float32.
struct bfloat {
    uint16_t bits;
};
static FERRUM_ALWAYS_INLINE f32x16 load(const bfloat *from) {
    f32x16 r;
#if defined(__AVX512F__)
    r.part[0] = (FloatRegister)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#elif defined(FERRUM_NEON)
    uint16x4_t halves[4];
    memcpy(halves, from, sizeof(halves));
    FERRUM_EACH(r.part[i] = (FloatRegister)vshll_n_u16(halves[i], 16));
#else
    uint32_t bits[kLanes];
    for (int i = 0; i < kLanes; i++) bits[i] = (uint32_t)from[i].bits << 16;
    memcpy(&r, bits, sizeof(r));
#endif
    return r;
}

// The first `count` elements; the other lanes are zero and their memory is not touched.
template <class T>
static FERRUM_ALWAYS_INLINE f32x16 load_some(const T *from, int count) {
#if defined(__AVX512F__)
    const __mmask16 mask = (__mmask16)((1u << count) - 1);
    T lanes[kLanes];
    if (sizeof(T) == 4) {
        const __m512i raw = _mm512_maskz_loadu_epi32(mask, from);
        memcpy(lanes, &raw, sizeof(lanes));
    } else {
        const __m256i raw = _mm256_maskz_loadu_epi16(mask, from);
        memcpy(lanes, &raw, sizeof(lanes));
    }
    return load(lanes);
#else
    T lanes[kLanes] = {};
    memcpy(lanes, from, sizeof(T) * count);
    return load(lanes);
#endif
}
template <class T>
static FERRUM_ALWAYS_INLINE void store_some(T *to, f32x16 a, int count) {
    T lanes[kLanes];
    store(lanes, a);
#if defined(__AVX512F__)
    const __mmask16 mask = (__mmask16)((1u << count) - 1);
    if (sizeof(T) == 4) {
        _mm512_mask_storeu_epi32(to, mask, _mm512_loadu_si512(lanes));
    } else {
        __m256i raw;
        memcpy(&raw, lanes, sizeof(raw));
        _mm256_mask_storeu_epi16(to, mask, raw);
    }
#else
    memcpy(to, lanes, sizeof(T) * count);
#endif
}
// All lanes if `count` is 16 or more.
template <class T>
static FERRUM_ALWAYS_INLINE f32x16 load_up_to(const T *from, uint64_t count) {
    return count >= kLanes ? load(from) : load_some(from, (int)count);
}
template <class T>
static FERRUM_ALWAYS_INLINE void store_up_to(T *to, f32x16 a, uint64_t count) {
    if (count >= kLanes)
        store(to, a);
    else
        store_some(to, a, (int)count);
}

// Lane i with lane i + 8, then 4, 2, 1 apart.
template <class Operation>
static FERRUM_ALWAYS_INLINE float reduce(f32x16 a, Operation combine) {
    typedef float Eight __attribute__((vector_size(32)));
    typedef float Four __attribute__((vector_size(16)));
    Eight halves[2];
    memcpy(halves, &a, sizeof(a));
    const Eight eight = combine(halves[0], halves[1]);
    Four quarters[2];
    memcpy(quarters, &eight, sizeof(eight));
    Four four = combine(quarters[0], quarters[1]);
    four = combine(four, FERRUM_SHUFFLE(four, 2, 3, 0, 1));
    four = combine(four, FERRUM_SHUFFLE(four, 1, 0, 3, 2));
    return four[0];
}
static FERRUM_ALWAYS_INLINE float sum(f32x16 a) {
    return reduce(a, [](auto x, auto y) __attribute__((always_inline)) { return x + y; });
}
static FERRUM_ALWAYS_INLINE float largest(f32x16 a) {
    return reduce(a, [](auto x, auto y) __attribute__((always_inline)) { return x > y ? x : y; });
}
// Integer sums: the order does not matter.
static FERRUM_ALWAYS_INLINE int32_t sum(i32x16 a) {
    IntFour fours[4];
    memcpy(fours, &a, sizeof(a));
    IntFour four = (fours[0] + fours[1]) + (fours[2] + fours[3]);
    four = four + FERRUM_SHUFFLE(four, 2, 3, 0, 1);
    return four[0] + four[1];
}

static FERRUM_ALWAYS_INLINE int32_t largest(i32x16 a) {
    IntFour fours[4];
    memcpy(fours, &a, sizeof(a));
    auto larger = [](IntFour x, IntFour y) __attribute__((always_inline)) { return x > y ? x : y; };
    IntFour four = larger(larger(fours[0], fours[1]), larger(fours[2], fours[3]));
    four = larger(four, FERRUM_SHUFFLE(four, 2, 3, 0, 1));
    return four[0] > four[1] ? four[0] : four[1];
}
// The sum of each of eight vectors of integers below 2^24 in all: exact, in any order.
static FERRUM_ALWAYS_INLINE void whole_sums(const f32x16 (&v)[8], float *sums) {
#if defined(__AVX512F__)
    // Pairs of vectors, pairs of pairs, then the quarters of both.
    __m512 pairs[4], fours[2];
    FERRUM_UNROLL for (int i = 0; i < 4; i++) {
        const __m512 a = (__m512)v[2 * i].part[0], b = (__m512)v[2 * i + 1].part[0];
        pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    FERRUM_UNROLL for (int i = 0; i < 2; i++) {
        const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
        fours[i] =
            _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    __m512 all =
        _mm512_add_ps(_mm512_shuffle_f32x4(fours[0], fours[1], 0x88), _mm512_shuffle_f32x4(fours[0], fours[1], 0xdd));
    all = _mm512_add_ps(_mm512_shuffle_f32x4(all, all, 0x88), _mm512_shuffle_f32x4(all, all, 0xdd));
    _mm256_storeu_ps(sums, _mm512_castps512_ps256(all));
#else
    for (int i = 0; i < 8; i++) sums[i] = sum(v[i]);
#endif
}

// e^x for x <= 89: x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial in r of the least relative error, and n into the
// exponent, by one rounding, so that results down to the smallest subnormal are reached without a branch.
static FERRUM_ALWAYS_INLINE f32x16 exp_below(f32x16 x) {
    const f32x16 clamped = max(x, splat(-104.0f));
    const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding and subtracting it rounds to an integer
    const f32x16 shifted = fma(clamped, splat(1.44269504088896341f), magic);
    const f32x16 n = shifted - magic;
    f32x16 r = fma(n, splat(-0.693145751953125f), clamped);
    r = fma(n, splat(-1.42860682030941723e-6f), r);
    f32x16 p = splat(0.00831268448382616f);
    p = fma(p, r, splat(0.04189018905162811f));
    p = fma(p, r, splat(0.16667112708091736f));
    p = fma(p, r, splat(0.499992311000824f));
    p = fma(p, r, splat(1.0f));
    p = fma(p, r, splat(1.0f));
#if defined(__AVX512F__)
    const __m512 nan = (__m512)x.part[0];  // NaN stays NaN
    p.part[0] = (FloatRegister)_mm512_mask_scalef_ps(nan, _mm512_cmp_ps_mask(nan, nan, _CMP_ORD_Q), (__m512)p.part[0],
                                                     (__m512)n.part[0]);
#else
    FERRUM_EACH({  // two factors, since 2^n alone may be no normal number; the first product is exact
        IntRegister bits;
        memcpy(&bits, &shifted.part[i], sizeof(bits));
        const IntRegister exponent = bits - 0x4b400000;  // n as an integer
        const IntRegister half = exponent >> 1;
        const IntRegister low = (half + 127) << 23, high = (exponent - half + 127) << 23;
        FloatRegister low_scale, high_scale;
        memcpy(&low_scale, &low, sizeof(low));
        memcpy(&high_scale, &high, sizeof(high));
        p.part[i] = p.part[i] * low_scale * high_scale;
        p.part[i] = x.part[i] == x.part[i] ? p.part[i] : x.part[i];  // NaN stays NaN
    });
#endif
    return p;
}
// e^x within 3 units in the last place (2.19 at most, over all float32).
static FERRUM_ALWAYS_INLINE f32x16 exp(f32x16 x) {
    return exp_below(min(splat(89.0f), x));
}

static FERRUM_ALWAYS_INLINE f32x16 sigmoid(f32x16 x) {
    return splat(1.0f) / (splat(1.0f) + exp(splat(0.0f) - x));
}

}  // namespace ferrum::cpu::FERRUM_CPU_ISA
