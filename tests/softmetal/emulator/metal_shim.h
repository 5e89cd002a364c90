// What of metal_stdlib our shaders may use, in C++20: the header that stands for <metal_stdlib> when a .metal file is
// run on Linux (through emulated_metal.h) and when its address spaces are checked (FERRUM_CHECK, see checks.py).
//
// Supported
//   address spaces   device, constant, threadgroup, thread; kernel; every [[attribute]] in its usual place
//   scalars          half (= _Float16, suffix h), bfloat (= __bf16), uchar, ushort, uint, ulong, size_t
//   vectors          {half,float,char,uchar,short,ushort,int,uint,long,ulong}{2,3,4},
//   packed_{half,float,uchar,ushort,uint}{2,3,4}
//                    constructors by literal name, float4(a, b.xy, c); swizzles; vec<T, N> as a type
//   casts            as_type<T>(x), T(x)
//   math             metal_math.h: metal::, precise:: and fast:: are the same
//   SIMD-groups      metal_simd.h: simd_*, barriers, mem_flags; simdgroup_matrix 8 x 8
//   ours             FERRUM_CONSTANT, FERRUM_THREADGROUP, ferrum's kernel argument attributes (generate.py)
//
// A conversion of vectors is written float4(h), never (float4)h: the latter means a bit cast here.
// The headers use no standard library, so that they are valid in all three languages (C++20, C++17 with address spaces,
// C++ for OpenCL).
#pragma once

#define METAL_FUNC inline

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef signed char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;

#ifndef __OPENCL_CPP_VERSION__
#pragma clang diagnostic ignored "-Wuser-defined-literals"
typedef _Float16 half;
inline half operator""h(long double value) {
    return (half)value;
}
inline half operator""h(unsigned long long value) {
    return (half)value;
}
typedef __bf16 bfloat;
#else
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
typedef ushort bfloat;  // C++ for OpenCL has no such type: it checks address spaces, not bfloat arithmetic
#endif

#define EMU_VECTORS(T)                                      \
    typedef T T##2 __attribute__((__ext_vector_type__(2))); \
    typedef T T##3 __attribute__((__ext_vector_type__(3))); \
    typedef T T##4 __attribute__((__ext_vector_type__(4)));
EMU_VECTORS(char)
EMU_VECTORS(uchar)
EMU_VECTORS(short)
EMU_VECTORS(ushort)
EMU_VECTORS(int)
EMU_VECTORS(uint)
EMU_VECTORS(long)
EMU_VECTORS(ulong)
EMU_VECTORS(half)
EMU_VECTORS(float)

#define EMU_PACKED(T, N) typedef T packed_##T##N __attribute__((__ext_vector_type__(N), __aligned__(sizeof(T))));
#define EMU_PACKED_EACH(T) EMU_PACKED(T, 2) EMU_PACKED(T, 4)
EMU_PACKED_EACH(uchar)
EMU_PACKED_EACH(ushort)
EMU_PACKED_EACH(uint)
EMU_PACKED_EACH(half)
EMU_PACKED_EACH(float)

// MSL's char is signed; so is x86's.
namespace emu {

template <class T>
struct vector_of {
    typedef T element;
    static constexpr int count = 0;
};
template <class T, int N>
struct vector_of<T __attribute__((__ext_vector_type__(N)))> {
    typedef T element;
    static constexpr int count = N;
};
template <class T>
constexpr bool is_vector = vector_of<T>::count != 0;

template <class V, class A>
inline void put(thread V &to, thread int &at, A value) {
    typedef typename vector_of<V>::element E;
    if constexpr (is_vector<A>) {
        for (int i = 0; i < vector_of<A>::count; i++) to[at++] = (E)value[i];
    } else {
        to[at++] = (E)value;
    }
}

// float4(…): scalars and vectors one after another; one scalar fills all; one vector is converted.
template <class V, class A, class... Rest>
inline V make(A first, Rest... rest) {
    typedef typename vector_of<V>::element E;
    constexpr int count = vector_of<V>::count;
    if constexpr (sizeof...(Rest) == 0 && is_vector<A>) {
        static_assert(vector_of<A>::count == count, "a vector is converted to one of another length");
        return __builtin_convertvector(first, V);
    } else if constexpr (sizeof...(Rest) == 0) {
        V to = (V)(E)first;
        return to;
    } else {
        constexpr int given =
            ((is_vector<A> ? vector_of<A>::count : 1) + ... + (is_vector<Rest> ? vector_of<Rest>::count : 1));
        static_assert(given == count, "a vector is given too many or too few elements");
        V to = (V)(E)0;
        int at = 0;
        put(to, at, first);
        (put(to, at, rest), ...);
        return to;
    }
}

}  // namespace emu

#define char2(...) (::emu::make<char2>(__VA_ARGS__))
#define char3(...) (::emu::make<char3>(__VA_ARGS__))
#define char4(...) (::emu::make<char4>(__VA_ARGS__))
#define uchar2(...) (::emu::make<uchar2>(__VA_ARGS__))
#define uchar3(...) (::emu::make<uchar3>(__VA_ARGS__))
#define uchar4(...) (::emu::make<uchar4>(__VA_ARGS__))
#define short2(...) (::emu::make<short2>(__VA_ARGS__))
#define short3(...) (::emu::make<short3>(__VA_ARGS__))
#define short4(...) (::emu::make<short4>(__VA_ARGS__))
#define ushort2(...) (::emu::make<ushort2>(__VA_ARGS__))
#define ushort3(...) (::emu::make<ushort3>(__VA_ARGS__))
#define ushort4(...) (::emu::make<ushort4>(__VA_ARGS__))
#define int2(...) (::emu::make<int2>(__VA_ARGS__))
#define int3(...) (::emu::make<int3>(__VA_ARGS__))
#define int4(...) (::emu::make<int4>(__VA_ARGS__))
#define uint2(...) (::emu::make<uint2>(__VA_ARGS__))
#define uint3(...) (::emu::make<uint3>(__VA_ARGS__))
#define uint4(...) (::emu::make<uint4>(__VA_ARGS__))
#define long2(...) (::emu::make<long2>(__VA_ARGS__))
#define long4(...) (::emu::make<long4>(__VA_ARGS__))
#define ulong2(...) (::emu::make<ulong2>(__VA_ARGS__))
#define ulong4(...) (::emu::make<ulong4>(__VA_ARGS__))
#define half2(...) (::emu::make<half2>(__VA_ARGS__))
#define half3(...) (::emu::make<half3>(__VA_ARGS__))
#define half4(...) (::emu::make<half4>(__VA_ARGS__))
#define float2(...) (::emu::make<float2>(__VA_ARGS__))
#define float3(...) (::emu::make<float3>(__VA_ARGS__))
#define float4(...) (::emu::make<float4>(__VA_ARGS__))

#include "metal_math.h"
#include "metal_simd.h"
