// Sums over sixteen lanes, whose order is fixed here, and functions of them.
#pragma once

#include "simd.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

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
static FERRUM_ALWAYS_INLINE int32_t largest(i32x16 a) {
    IntFour fours[4];
    memcpy(fours, &a, sizeof(a));
    auto larger = [](IntFour x, IntFour y) __attribute__((always_inline)) { return x > y ? x : y; };
    IntFour four = larger(larger(fours[0], fours[1]), larger(fours[2], fours[3]));
    four = larger(four, FERRUM_SHUFFLE(four, 2, 3, 0, 1));
    return four[0] > four[1] ? four[0] : four[1];
}
// 1 / sqrt(mean of squares + epsilon).
template <class X>
static FERRUM_ALWAYS_INLINE float inverse_rms(const X *x, uint32_t width, float epsilon) {
    f32x16 squares = splat(0.0f);
    for (uint32_t i = 0; i < width; i += kLanes) {
        const f32x16 v = load_up_to(x + i, width - i);
        squares = fma(v, v, squares);
    }
    return 1.0f / __builtin_sqrtf(sum(squares) / (float)width + epsilon);
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
