// A threadgroup's sum: every SIMD-group leaves its part, then all add the parts. The faulty one does not wait for them.
#include "common.h"

#define KERNEL(name, BARRIER)                                                                          \
    kernel void name(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],               \
                     uint index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]], \
                     uint simdgroup [[simdgroup_index_in_threadgroup]]) {                              \
        FERRUM_THREADGROUP(float, parts, 4)                                                            \
        const float part = simd_sum(x[index]);                                                         \
        if (lane == 0) parts[simdgroup] = part;                                                        \
        BARRIER                                                                                        \
        y[index] = parts[0] + parts[1] + parts[2] + parts[3];                                          \
    }
KERNEL(missing_first_barrier, )
KERNEL(missing_first_barrier_correct, threadgroup_barrier(mem_flags::mem_threadgroup);)
