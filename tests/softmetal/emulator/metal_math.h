// Arithmetic functions of metal_stdlib, for scalars and vectors alike. Part of metal_shim.h.
#pragma once

template <class To, class From>
inline To as_type(From value) {
    static_assert(sizeof(To) == sizeof(From), "as_type between sizes");
    return __builtin_bit_cast(To, value);
}

#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.693147180559945309417f
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HALF_MAX ((half)65504.0f)
#define HALF_MIN ((half)6.103515625e-05f)
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define INT_MAX __INT_MAX__
#define INT_MIN (-__INT_MAX__ - 1)
#define UINT_MAX 0xffffffffu

namespace metal {

template <class T, int N>
using vec = T __attribute__((__ext_vector_type__(N)));

#define EMU_UNARY(name, builtin) \
    template <class T>           \
    inline T name(T x) {         \
        return (T)builtin(x);    \
    }
#define EMU_FUNCTIONS                                   \
    EMU_UNARY(exp, __builtin_elementwise_exp)           \
    EMU_UNARY(exp2, __builtin_elementwise_exp2)         \
    EMU_UNARY(log, __builtin_elementwise_log)           \
    EMU_UNARY(log2, __builtin_elementwise_log2)         \
    EMU_UNARY(sin, __builtin_elementwise_sin)           \
    EMU_UNARY(cos, __builtin_elementwise_cos)           \
    EMU_UNARY(sqrt, __builtin_elementwise_sqrt)         \
    EMU_UNARY(floor, __builtin_elementwise_floor)       \
    EMU_UNARY(ceil, __builtin_elementwise_ceil)         \
    EMU_UNARY(trunc, __builtin_elementwise_trunc)       \
    EMU_UNARY(rint, __builtin_elementwise_rint)         \
    EMU_UNARY(round, __builtin_elementwise_round)       \
    EMU_UNARY(fabs, __builtin_elementwise_abs)          \
    template <class T>                                  \
    inline T rsqrt(T x) {                               \
        return (T)1 / (T)__builtin_elementwise_sqrt(x); \
    }                                                   \
    template <class T>                                  \
    inline T pow(T x, T y) {                            \
        return __builtin_elementwise_pow(x, y);         \
    }                                                   \
    template <class T>                                  \
    inline T divide(T x, T y) {                         \
        return x / y;                                   \
    }                                                   \
    inline float tanh(float x) {                        \
        return __builtin_tanhf(x);                      \
    }                                                   \
    inline half tanh(half x) {                          \
        return (half)__builtin_tanhf((float)x);         \
    }

EMU_FUNCTIONS
namespace precise {
EMU_FUNCTIONS
}
namespace fast {
EMU_FUNCTIONS
}
#undef EMU_FUNCTIONS
EMU_UNARY(abs, __builtin_elementwise_abs)
#undef EMU_UNARY

// Of a number and a NaN: the number, as in MSL.
template <class T>
inline T min(T x, T y) {
    return __builtin_elementwise_min(x, y);
}
template <class T>
inline T max(T x, T y) {
    return __builtin_elementwise_max(x, y);
}
template <class T>
inline T fmin(T x, T y) {
    return __builtin_elementwise_min(x, y);
}
template <class T>
inline T fmax(T x, T y) {
    return __builtin_elementwise_max(x, y);
}
template <class T>
inline T clamp(T x, T low, T high) {
    return min(max(x, low), high);
}
template <class T>
inline T saturate(T x) {
    return clamp(x, (T)0, (T)1);
}
template <class T>
inline T fma(T x, T y, T z) {
    return __builtin_elementwise_fma(x, y, z);
}
template <class T>
inline T mad(T x, T y, T z) {
    return x * y + z;
}
template <class T>
inline T mix(T x, T y, T a) {
    return x + (y - x) * a;
}
template <class T>
inline T copysign(T x, T y) {
    return __builtin_elementwise_copysign(x, y);
}

// b where c is true, else a. c: bool for scalars, the result of a comparison for vectors.
template <class T, class C>
inline T select(T a, T b, C c) {
    return c ? b : a;
}

inline bool isnan(float x) {
    return __builtin_isnan(x);
}
inline bool isnan(half x) {
    return __builtin_isnan((float)x);
}
inline bool isinf(float x) {
    return __builtin_isinf(x);
}
inline bool isinf(half x) {
    return __builtin_isinf((float)x);
}
inline bool isfinite(float x) {
    return __builtin_isfinite(x);
}
inline bool isfinite(half x) {
    return __builtin_isfinite((float)x);
}

template <class V>
inline bool any(V condition) {
    if constexpr (::emu::is_vector<V>)
        return __builtin_reduce_or(condition) < 0;
    else
        return condition;
}
template <class V>
inline bool all(V condition) {
    if constexpr (::emu::is_vector<V>)
        return __builtin_reduce_and(condition) < 0;
    else
        return condition;
}

template <class V>
inline typename ::emu::vector_of<V>::element dot(V a, V b) {
    typename ::emu::vector_of<V>::element sum = a[0] * b[0];
    for (int i = 1; i < ::emu::vector_of<V>::count; i++) sum = sum + a[i] * b[i];
    return sum;
}

template <class T>
inline T popcount(T x) {
    return (T)__builtin_popcountll((ulong)x);
}
template <class T>
inline T clz(T x) {
    return x == 0 ? (T)(8 * sizeof(T)) : (T)(__builtin_clzll((ulong)x) - 64 + 8 * (int)sizeof(T));
}
template <class T>
inline T ctz(T x) {
    return x == 0 ? (T)(8 * sizeof(T)) : (T)__builtin_ctzll((ulong)x);
}
inline uint mulhi(uint x, uint y) {
    return (uint)((ulong)x * y >> 32);
}
// Bits [offset, offset + bits) of x, and x with those bits replaced.
inline uint extract_bits(uint x, uint offset, uint bits) {
    return bits == 32 ? x : (x >> offset) & ((1u << bits) - 1);
}
inline uint insert_bits(uint x, uint y, uint offset, uint bits) {
    const uint mask = bits == 32 ? ~0u : ((1u << bits) - 1) << offset;
    return (x & ~mask) | ((y << offset) & mask);
}

template <class T>
struct numeric_limits;
template <>
struct numeric_limits<float> {
    static constexpr float infinity() { return __builtin_inff(); }
    static constexpr float quiet_NaN() { return __builtin_nanf(""); }
    static constexpr float max() { return __FLT_MAX__; }
    static constexpr float lowest() { return -__FLT_MAX__; }
    static constexpr float min() { return __FLT_MIN__; }
    static constexpr float epsilon() { return __FLT_EPSILON__; }
};
template <>
struct numeric_limits<half> {
    static constexpr half infinity() { return (half)__builtin_inff(); }
    static constexpr half max() { return (half)65504.0f; }
    static constexpr half lowest() { return (half)-65504.0f; }
    static constexpr half min() { return (half)6.103515625e-05f; }
};
#ifndef __OPENCL_CPP_VERSION__
template <>
struct numeric_limits<bfloat> {
    static constexpr bfloat infinity() { return (bfloat)__builtin_inff(); }
    static constexpr bfloat max() { return (bfloat)3.38953139e38f; }
    static constexpr bfloat lowest() { return (bfloat)-3.38953139e38f; }
};
#endif
template <>
struct numeric_limits<int> {
    static constexpr int max() { return __INT_MAX__; }
    static constexpr int min() { return -__INT_MAX__ - 1; }
};
template <>
struct numeric_limits<uint> {
    static constexpr uint max() { return 0xffffffffu; }
    static constexpr uint min() { return 0; }
};

}  // namespace metal
