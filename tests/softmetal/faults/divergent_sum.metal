// A sum of the lanes' numbers above a limit. In the faulty one only those lanes come to the sum.
#include "common.h"

kernel void divergent_sum(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],
                          uint index [[thread_index_in_threadgroup]]) {
    float sum = 0.0f;
    if (x[index] > 0.5f) sum = simd_sum(x[index]);
    y[index] = sum;
}

kernel void divergent_sum_correct(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],
                                  uint index [[thread_index_in_threadgroup]]) {
    y[index] = simd_sum(x[index] > 0.5f ? x[index] : 0.0f);
}

// The two halves of a SIMD-group meet in different places.
kernel void two_sums(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],
                     uint index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    if (lane < 16) y[index] = simd_sum(x[index]);
    else y[index] = simd_max(x[index]);
}
