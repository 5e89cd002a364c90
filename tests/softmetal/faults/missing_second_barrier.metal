// Sums of four rows, one after another through the same array. The faulty one writes the next row's parts while others may
// still read this one's.
#include "common.h"

#define KERNEL(name, BARRIER)                                                                          \
    kernel void name(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],               \
                     uint index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]], \
                     uint simdgroup [[simdgroup_index_in_threadgroup]]) {                              \
        FERRUM_THREADGROUP(float, parts, 4)                                                            \
        for (uint row = 0; row < 4; row++) {                                                           \
            const float part = simd_sum(x[128 * row + index]);                                         \
            if (lane == 0) parts[simdgroup] = part;                                                    \
            threadgroup_barrier(mem_flags::mem_threadgroup);                                           \
            y[128 * row + index] = parts[0] + parts[1] + parts[2] + parts[3];                          \
            BARRIER                                                                                    \
        }                                                                                              \
    }
KERNEL(missing_second_barrier, )
KERNEL(missing_second_barrier_correct, threadgroup_barrier(mem_flags::mem_threadgroup);)
