// What every shader starts with: the only place that includes Metal's library. Other macros only instantiate kernels.
//
// Bits. A sum that must come out the same in two kernels (one row or sixteen, one span or many) is written with fma(),
// so that no compiler chooses what to contract, and exp_of() is ours, so that no library chooses how to round. The
// device compiles without fast math: NaN and infinity are numbers of this contract.
#ifndef FERRUM_COMMON_H
#define FERRUM_COMMON_H

#ifndef FERRUM_EMULATED  // tests/softmetal brings its own
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

// A boolean that specialises a kernel.
#define FERRUM_CONSTANT(name, index) constant bool name [[function_constant(index)]];
// An array of the threadgroup; inside a kernel's body only.
#define FERRUM_THREADGROUP(type, name, count) threadgroup type name[count];
#endif

#include "ferrum_kernels.h"

#define FERRUM_UNROLL _Pragma("clang loop unroll(full)")

// Bit i of FERRUM_CONSTANT_… is function constant i.
FERRUM_CONSTANT(constant_norm_f32, 0)
FERRUM_CONSTANT(constant_output_f32, 1)
FERRUM_CONSTANT(constant_bias, 2)
FERRUM_CONSTANT(constant_bias_f32, 3)
FERRUM_CONSTANT(constant_output_gate, 4)
FERRUM_CONSTANT(constant_rope_interleaved, 5)
FERRUM_CONSTANT(constant_query_norm, 6)
FERRUM_CONSTANT(constant_query_norm_f32, 7)
FERRUM_CONSTANT(constant_key_norm, 8)
FERRUM_CONSTANT(constant_key_norm_f32, 9)
static_assert(FERRUM_CONSTANT_NORM_F32 == 1 << 0 && FERRUM_CONSTANT_OUTPUT_F32 == 1 << 1 &&
                  FERRUM_CONSTANT_BIAS == 1 << 2 && FERRUM_CONSTANT_BIAS_F32 == 1 << 3 &&
                  FERRUM_CONSTANT_OUTPUT_GATE == 1 << 4 && FERRUM_CONSTANT_ROPE_INTERLEAVED == 1 << 5 &&
                  FERRUM_CONSTANT_QUERY_NORM == 1 << 6 && FERRUM_CONSTANT_QUERY_NORM_F32 == 1 << 7 &&
                  FERRUM_CONSTANT_KEY_NORM == 1 << 8 && FERRUM_CONSTANT_KEY_NORM_F32 == 1 << 9,
              "a constant's bit is its index");

// ---- Arithmetic

// e^x within 2 units in the last place: x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial in r, and n into the exponent
// in two halves, so that results down to the smallest subnormal are reached without a branch.
inline float exp_of(float x) {
    const float clamped = x > 89.0f ? 89.0f : (x < -104.0f ? -104.0f : x);  // NaN passes
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds to an integer
    const float shifted = fma(clamped, 1.44269504088896341f, magic);
    const float n = shifted - magic;
    float r = fma(n, -0.693145751953125f, clamped);
    r = fma(n, -1.42860682030941723e-6f, r);
    float p = 1.0f / 5040.0f;
    p = fma(p, r, 1.0f / 720.0f);
    p = fma(p, r, 1.0f / 120.0f);
    p = fma(p, r, 1.0f / 24.0f);
    p = fma(p, r, 1.0f / 6.0f);
    p = fma(p, r, 0.5f);
    p = fma(p, r, 1.0f);
    p = fma(p, r, 1.0f);
    const uint exponent = as_type<uint>(shifted) - 0x4b400000u;  // n as an integer, two's complement
    const uint lower = (exponent >> 1) | (exponent & 0x80000000u);
    return p * as_type<float>((lower + 127u) << 23) * as_type<float>((exponent - lower + 127u) << 23);
}

inline float sigmoid_of(float x) {
    return 1.0f / (1.0f + exp_of(-x));
}

// ---- Loads

// Does `address` lie on a multiple of `alignment`, a power of two?
inline bool is_aligned(device const void *address, ulong alignment) {
    return (reinterpret_cast<ulong>(address) & (alignment - 1)) == 0;
}

// Eight float16 from an address that is a multiple of 16.
inline void load_octet(device const half *from, thread float4 &low, thread float4 &high) {
    const uint4 bits = *(device const uint4 *)from;
    low = float4(as_type<half4>(bits.xy));
    high = float4(as_type<half4>(bits.zw));
}

// The first `count` of eight float16 from anywhere, and zeros: what lies behind is not touched.
inline void load_octet(device const half *from, uint count, thread float4 &low, thread float4 &high) {
    low = float4(0.0f);
    high = float4(0.0f);
    FERRUM_UNROLL for (uint i = 0; i < 4; i++) {
        if (i < count) low[i] = float(from[i]);
        if (i + 4 < count) high[i] = float(from[i + 4]);
    }
}

// The same as bits, to be stored elsewhere.
inline uint4 octet_bits(device const half *from, uint count) {
    device const ushort *bits = (device const ushort *)from;
    uint4 octet = uint4(0u);
    FERRUM_UNROLL for (uint i = 0; i < 8; i++) if (i < count) octet[i / 2] |= uint(bits[i]) << (16 * (i % 2));
    return octet;
}

inline float4 load_quad(device const half *from) {
    return float4(*(device const half4 *)from);
}
inline float4 load_quad(device const float *from) {
    return *(device const float4 *)from;
}

// a + b and what rounding took from it.
inline float2 two_sum(float a, float b) {
    const float sum = a + b, back = sum - a;
    return float2(sum, (a - (sum - back)) + (b - back));
}

#endif
