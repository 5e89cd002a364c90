// Lanes turn 32 numbers round through threadgroup memory, each SIMD-group in its own part of it.
#include "common.h"

#define KERNEL(name, BARRIER)                                                                          \
    kernel void name(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],               \
                     uint index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) { \
        FERRUM_THREADGROUP(float, turned, 128)                                                         \
        turned[index] = x[index];                                                                      \
        BARRIER                                                                                        \
        y[index] = turned[index - lane + (lane + 31) % 32];                                            \
    }
KERNEL(missing_simdgroup_barrier, )
KERNEL(missing_simdgroup_barrier_correct, simdgroup_barrier(mem_flags::mem_threadgroup);)
