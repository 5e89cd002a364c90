// Kernels for tests of SoftMetal itself: small, and wrong on demand.
#include "common.h"

struct strict_page {
    device float *data;
};

kernel void strict_copy(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],
                        constant uint &first [[buffer(2)]],
                        uint3 group [[threadgroup_position_in_grid]], uint3 groups [[threads_per_threadgroup]],
                        uint thread_index [[thread_index_in_threadgroup]]) {
    const uint i = group.x * groups.x + thread_index;
    y[i] = x[first + i];
}

kernel void strict_add_one(device float *y [[buffer(0)]], uint thread_index [[thread_index_in_threadgroup]]) {
    y[thread_index] += 1.0f;
}

kernel void strict_double(device float *y [[buffer(0)]], uint thread_index [[thread_index_in_threadgroup]]) {
    y[thread_index] *= 2.0f;
}

kernel void strict_optional(device const float *x [[buffer(0), function_constant(constant_bias)]],
                            device float *y [[buffer(1)]], uint thread_index [[thread_index_in_threadgroup]]) {
    y[thread_index] = constant_bias ? x[thread_index] : 7.0f;
}

// Through a table of addresses: page 0 to page 1.
kernel void strict_pages(device const strict_page *pages [[buffer(0)]],
                         uint thread_index [[thread_index_in_threadgroup]]) {
    pages[1].data[thread_index] = pages[0].data[thread_index];
}

kernel void strict_memory(device float *y [[buffer(0)]], uint thread_index [[thread_index_in_threadgroup]]) {
    FERRUM_THREADGROUP(float, scratch, 32)
    y[thread_index] = scratch[thread_index];
}
