// No fault: what the tests ask of the shim itself.
#include "common.h"

// Everything a kernel can be told about where it is.
kernel void where(device uint *y [[buffer(0)]], uint3 group [[threadgroup_position_in_grid]],
                  uint3 thread_at [[thread_position_in_threadgroup]], uint index [[thread_index_in_threadgroup]],
                  uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                  uint3 threads [[threads_per_threadgroup]]) {
    device uint *row = y + ulong(group.y * 3 + group.x) * threads.x * threads.y * 8 + index * 8;
    row[0] = group.x;
    row[1] = group.y;
    row[2] = thread_at.x;
    row[3] = thread_at.y;
    row[4] = index;
    row[5] = lane;
    row[6] = simdgroup;
    row[7] = threads.x * 1000 + threads.y;
}

kernel void lanes(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],
                  uint lane [[thread_index_in_simdgroup]]) {
    const float v = x[lane];
    device float *row = y + lane;
    row[0] = simd_sum(v);
    row[32] = simd_max(v);
    row[64] = simd_min(v);
    row[96] = simd_shuffle(v, 31 - lane);
    row[128] = simd_shuffle_xor(v, 5);
    row[160] = simd_shuffle_down(v, 3);
    row[192] = simd_shuffle_up(v, 3);
    row[224] = simd_broadcast(v, 7);
    row[256] = simd_prefix_inclusive_sum(v);
    row[288] = simd_prefix_exclusive_sum(v);
    row[320] = simd_any(v == 3.0f) ? 1.0f : 0.0f;
    row[352] = simd_all(v > 0.0f) ? 1.0f : 0.0f;
    row[384] = float(simd_sum(half(v)));
    row[416] = simd_sum(float4(v, 2.0f * v, v, v)).y;
    row[448] = float(simd_or(1u << lane) == 0xffffffffu);
}

kernel void matrices(device const half *a [[buffer(0)]], device const half *b [[buffer(1)]],
                     device float *y [[buffer(2)]], uint lane [[thread_index_in_simdgroup]]) {
    FERRUM_THREADGROUP(float, product, 64)
    simdgroup_half8x8 left, right, turned;
    simdgroup_load(left, a, 16);
    simdgroup_load(right, b, 8);
    simdgroup_load(turned, b, 8, ulong2(0, 0), true);
    simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
    simdgroup_multiply_accumulate(sum, left, right, sum);
    simdgroup_store(sum, y, 8);
    simdgroup_multiply(sum, left, turned);
    sum.thread_elements()[0] *= 2.0f;
    sum.thread_elements()[1] *= 2.0f;
    simdgroup_store(sum, product, 8);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = lane; i < 64; i += 32) y[64 + i] = product[i];
    // Elements that a lane holds, as everybody's kernels suppose.
    const uint quad = lane / 4, row = (quad & 4) + lane / 2 % 4, column = (quad & 2) * 2 + lane % 2 * 2;
    simdgroup_float8x8 at;
    at.thread_elements()[0] = float(8 * row + column);
    at.thread_elements()[1] = float(8 * row + column + 1);
    simdgroup_store(at, y + 128, 8);
}

kernel void numbers(device const half *h [[buffer(0)]], device const uchar *bytes [[buffer(1)]],
                    device float *y [[buffer(2)]], uint index [[thread_index_in_threadgroup]]) {
    if (index != 0) return;
    y[0] = float(h[0] * h[1] + h[2]);  // each operation rounded to float16
    y[1] = 1.1;                        // a float, and so is the sum of the next line
    y[2] = 1.1 + 1e-9;
    const float4 v = float4(half2(h[0], h[1]), 3.0f, 4.0f);
    y[3] = v.x;
    y[4] = v.wzyx.x;
    y[5] = dot(v, float4(1.0f));
    const uint4 words = *(device const uint4 *)bytes;
    y[6] = float(as_type<half2>(words.y).y);
    y[7] = float(as_type<uchar4>(words.x).z);
    y[8] = fma(1.0f + 0x1p-12f, 1.0f + 0x1p-12f, -1.0f);
    y[9] = max(NAN, 2.0f);
    y[10] = clamp(5.0f, 0.0f, 1.0f);
    y[11] = isnan(NAN) && isinf(INFINITY) && !isnan(1.0f) ? 1.0f : 0.0f;
    y[12] = select(1.0f, 2.0f, true);
    y[13] = float(half(65520.0f));  // rounds to infinity
    y[14] = float(1.5h);
    y[15] = precise::exp(1.0f);
}

FERRUM_CONSTANT(probe_extra, 20)
kernel void optional(device float *y [[buffer(0)]],
                     device const float *extra [[buffer(1), function_constant(probe_extra)]],
                     threadgroup float *memory FERRUM_THREADGROUP_ARGUMENT, uint index [[thread_index_in_threadgroup]]) {
    memory[index] = float(index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[index] = memory[31 - index] + (probe_extra ? extra[index] : 0.0f);
}
