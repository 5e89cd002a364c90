// Threads past the end leave early. In the faulty one they do so before a barrier.
#include "common.h"

#define KERNEL(name, BEFORE, AFTER)                                                                    \
    kernel void name(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],               \
                     uint index [[thread_index_in_threadgroup]]) {                                     \
        FERRUM_THREADGROUP(float, turned, 128)                                                         \
        BEFORE                                                                                         \
        turned[index] = x[index];                                                                      \
        threadgroup_barrier(mem_flags::mem_threadgroup);                                               \
        AFTER                                                                                          \
        y[index] = turned[99 - index];                                                                 \
    }
KERNEL(divergent_barrier, if (index >= 100) return;, )
KERNEL(divergent_barrier_correct, , if (index >= 100) return;)

kernel void two_barriers(device float *y [[buffer(1)]], uint index [[thread_index_in_threadgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    if (simdgroup == 0) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
    } else {
        y[index] = 1.0f;
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}

// One lane stores a matrix alone.
kernel void divergent_store(device float *y [[buffer(1)]], uint lane [[thread_index_in_simdgroup]]) {
    simdgroup_float8x8 matrix = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
    if (lane == 0) simdgroup_store(matrix, y, 8);
    simdgroup_barrier(mem_flags::mem_device);
}
