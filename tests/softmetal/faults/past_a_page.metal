// Reads 64 elements of each page, through a table of pages' addresses. The faulty one reads a few more.
#include "common.h"

struct page {
    device half *data;
};

#define KERNEL(name, COUNT)                                                                            \
    kernel void name(device const page *pages [[buffer(0)]], device float *y [[buffer(1)]],            \
                     uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) { \
        device const half *data = pages[group.x].data;                                                 \
        float sum = 0.0f;                                                                              \
        for (uint i = lane; i < COUNT; i += 32) sum += float(data[i]);                                 \
        sum = simd_sum(sum);                                                                           \
        if (lane == 0) y[group.x] = sum;                                                               \
    }
KERNEL(past_a_page, 66)
KERNEL(past_a_page_correct, 64)
