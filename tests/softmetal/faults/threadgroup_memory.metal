// Faults with threadgroup memory: past the end of an array, read before anybody wrote, too much.
#include "common.h"

#define KERNEL(name, COUNT)                                                                            \
    kernel void name(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],               \
                     uint index [[thread_index_in_threadgroup]]) {                                     \
        FERRUM_THREADGROUP(float, first, 64)                                                           \
        FERRUM_THREADGROUP(float, second, 64)                                                          \
        second[index] = x[index];                                                                      \
        if (index < COUNT) first[index + 1] = 0.0f;                                                    \
        y[index] = second[index];                                                                      \
    }
KERNEL(past_an_array, 64)
KERNEL(past_an_array_correct, 63)

kernel void never_written(device float *y [[buffer(1)]], uint index [[thread_index_in_threadgroup]]) {
    FERRUM_THREADGROUP(float, values, 64)
    y[index] = values[index];
}

kernel void too_much(device float *y [[buffer(1)]], uint index [[thread_index_in_threadgroup]]) {
    FERRUM_THREADGROUP(float, values, 8193)
    values[index] = 0.0f;
    y[index] = values[index];
}

// A 16-byte load from where only 4 are certain.
kernel void misaligned(device const uchar *x [[buffer(0)]], device uint4 *y [[buffer(1)]],
                       uint index [[thread_index_in_threadgroup]]) {
    y[index] = *(device const uint4 *)(x + 4 * index);
}
