// Threadgroups of 32 outputs each. The faulty one writes the first output of its neighbour too.
#include "common.h"

#define KERNEL(name, COUNT)                                                                            \
    kernel void name(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],               \
                     uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) { \
        for (uint i = lane; i < COUNT; i += 32) y[32 * group.x + i] = x[32 * group.x + i];             \
    }
KERNEL(overlapping_threadgroups, 33)
KERNEL(overlapping_threadgroups_correct, 32)

// Every threadgroup leaves the same number at the same place: right on any machine, and still no way to write.
kernel void same_output_twice(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],
                              uint lane [[thread_index_in_simdgroup]]) {
    y[lane] = x[lane];
}
