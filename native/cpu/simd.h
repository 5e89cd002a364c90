// Sixteen lanes, whatever the machine's registers hold. Every instruction set computes the same bits: fused
// multiply-adds are explicit, and nothing else is contracted.
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

// Calls body(Constant<count>, first) for [first, end), kMost at a time, and then what is left at once.
template <int kMost, class Body>
static FERRUM_ALWAYS_INLINE void in_groups(uint64_t first, uint64_t end, Body &&body) {
    for (; first + kMost <= end; first += kMost) body(Constant<kMost>(), first);
    if constexpr (kMost > 1)
        if (first < end) in_groups<kMost - 1>(first, end, body);
}

// The same for [0, count), in as few groups as it takes, of equal sizes or nearly so.
template <int kMost, class Body>
static FERRUM_ALWAYS_INLINE void in_even_groups(uint64_t count, Body &&body) {
    uint64_t first = 0;
    for (uint64_t groups = (count + kMost - 1) / kMost; groups > 1; groups--) {
        const uint64_t size = (count - first + groups - 1) / groups;
        in_groups<kMost>(first, first + size, body);
        first += size;
    }
    in_groups<kMost>(first, count, body);
}

#define FERRUM_EACH(...) FERRUM_UNROLL for (int i = 0; i < kParts; i++) __VA_ARGS__

// Register by register: g++ copies a whole struct in pieces that a load of a register then waits for.
static FERRUM_ALWAYS_INLINE f32x16 load(const float *from) {
    f32x16 r;
    FERRUM_EACH(memcpy(&r.part[i], from + i * kRegisterLanes, sizeof(r.part[i])));
    return r;
}
static FERRUM_ALWAYS_INLINE void store(float *to, f32x16 a) {
    FERRUM_EACH(memcpy(to + i * kRegisterLanes, &a.part[i], sizeof(a.part[i])));
}
static FERRUM_ALWAYS_INLINE i32x16 load(const int32_t *from) {
    i32x16 r;
    FERRUM_EACH(memcpy(&r.part[i], from + i * kRegisterLanes, sizeof(r.part[i])));
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
    FERRUM_EACH(r.part[i] = (IntRegister)a.part[i] & 0x7fffffff);
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
#elif defined(__AVX2__)
    const __m256i mixed = _mm256_packs_epi32((__m256i)a.part[0], (__m256i)a.part[1]);  // by 128-bit halves
    _mm256_storeu_si256((__m256i *)to, _mm256_permute4x64_epi64(mixed, 0xd8));
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

}  // namespace ferrum::cpu::FERRUM_CPU_ISA
