// What this machine can do: loops that only read memory, or only multiply. `kernels.py` runs them on every thread at
// once.

#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

typedef uint64_t words __attribute__((vector_size(64), aligned(64)));

// The sum of all 64-byte vectors, four streams apart, so that enough loads are under way.
uint64_t limits_read(const void *data, size_t bytes) {
    const words *v = data;
    size_t quarter = bytes / sizeof(words) / 4;
    words sum[4] = {{0}};
    for (size_t i = 0; i < quarter; i++) {
        sum[0] += v[i];
        sum[1] += v[quarter + i];
        sum[2] += v[2 * quarter + i];
        sum[3] += v[3 * quarter + i];
    }
    words all = sum[0] + sum[1] + sum[2] + sum[3];
    uint64_t result = 0;
    for (int i = 0; i < 8; i++) result += all[i];
    return result;
}

// Twelve chains of operations, enough to cover the latency of one; variables, because arrays would go through memory.
#define CHAINS 12
#define EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)

#if defined(__AVX512VNNI__)
#define DOT16_LANES 32
#define DOT16(c)                                \
    sum##c = _mm512_dpwssd_epi32(sum##c, a, b); \
    KEEP(sum##c)
#define DOT16_TYPE __m512i
#define DOT16_SET(x) _mm512_set1_epi16((short)(x))
#define DOT16_FIRST(x) _mm512_cvtsi512_si32(x)
#elif defined(__AVX2__)
#define DOT16_LANES 16
#define DOT16(c)                                                        \
    KEEP(b) sum##c = _mm256_add_epi32(sum##c, _mm256_madd_epi16(a, b)); \
    KEEP(sum##c)
#define DOT16_TYPE __m256i
#define DOT16_SET(x) _mm256_set1_epi16((short)(x))
#define DOT16_FIRST(x) _mm256_cvtsi256_si32(x)
#elif defined(__ARM_NEON)
#define DOT16_LANES 4
#define DOT16(c)                                                                                                \
    sum##c = vmlal_s16(sum##c, vget_low_s16(vreinterpretq_s16_s32(a)), vget_low_s16(vreinterpretq_s16_s32(b))); \
    KEEP(sum##c)
#define DOT16_TYPE int32x4_t
#define DOT16_SET(x) vreinterpretq_s32_s16(vdupq_n_s16((int16_t)(x)))
#define DOT16_FIRST(x) vgetq_lane_s32(x, 0)
#endif

#if defined(__AVX512F__)
#define FMA_LANES 16
#define FMA(c)                              \
    sum##c = _mm512_fmadd_ps(a, b, sum##c); \
    KEEP(sum##c)
#define FMA_TYPE __m512
#define FMA_SET(x) _mm512_set1_ps((float)(x))
#define FMA_FIRST(x) _mm512_cvtss_f32(x)
#elif defined(__FMA__)
#define FMA_LANES 8
#define FMA(c)                              \
    sum##c = _mm256_fmadd_ps(a, b, sum##c); \
    KEEP(sum##c)
#define FMA_TYPE __m256
#define FMA_SET(x) _mm256_set1_ps((float)(x))
#define FMA_FIRST(x) _mm256_cvtss_f32(x)
#elif defined(__ARM_NEON)
#define FMA_LANES 4
#define FMA(c)                        \
    sum##c = vfmaq_f32(sum##c, a, b); \
    KEEP(sum##c)
#define FMA_TYPE float32x4_t
#define FMA_SET(x) vdupq_n_f32((float)(x))
#define FMA_FIRST(x) vgetq_lane_f32(x, 0)
#endif

// The compiler must take the value as changed, so it cannot merge rounds.
#if defined(__aarch64__)
#define KEEP(x) __asm__ volatile("" : "+w"(x));
#else
#define KEEP(x) __asm__ volatile("" : "+v"(x));
#endif

// Operations (a multiplication and an addition are two) of `rounds` rounds, 0 where this file knows no instruction for
// them. `sink` gives a factor and takes a sum, so that nothing is left out.
#define LIMIT(name, KIND)                                                                             \
    double name(size_t rounds, int32_t *sink) {                                                       \
        KIND##_TYPE a = KIND##_SET(3), b = KIND##_SET(*sink), EACH(KIND##_ZERO) zero = KIND##_SET(0); \
        for (size_t i = 0; i < rounds; i++) {                                                         \
            EACH(KIND)                                                                                \
        }                                                                                             \
        (void)zero;                                                                                   \
        EACH(KIND##_TAKE)                                                                             \
        return (double)rounds * CHAINS * KIND##_LANES * 2;                                            \
    }
#define UNKNOWN(name)                           \
    double name(size_t rounds, int32_t *sink) { \
        (void)rounds, (void)sink;               \
        return 0;                               \
    }
#define DOT16_ZERO(c) sum##c = DOT16_SET(0),
#define DOT16_TAKE(c) *sink += DOT16_FIRST(sum##c) & 1;
#define FMA_ZERO(c) sum##c = FMA_SET(0),
#define FMA_TAKE(c) *sink += (int32_t)FMA_FIRST(sum##c) & 1;

// Dots of 16-bit integers, summed in 32 bits.
#ifdef DOT16
LIMIT(limits_dot16, DOT16)
#else
UNKNOWN(limits_dot16)
#endif

// Fused multiply-adds of float32.
#ifdef FMA
LIMIT(limits_fma, FMA)
#else
UNKNOWN(limits_fma)
#endif
