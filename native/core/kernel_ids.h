// Numbers of kernels and formats. Includes nothing that emits code: see cpu/kernels.h.
#pragma once

#include "../include/ferrum.h"
#include "../include/ferrum_kernels.h"

namespace ferrum {

enum Kernel : uint32_t {
#define FERRUM_KERNEL_ID(name) kernel_##name,
    FERRUM_KERNELS(FERRUM_KERNEL_ID)
#undef FERRUM_KERNEL_ID
        kernel_count
};

enum Format : uint32_t {
#define FERRUM_FORMAT_ID(NAME, name, id, elements, bytes) format_##name = id,
    FERRUM_FORMATS(FERRUM_FORMAT_ID)
#undef FERRUM_FORMAT_ID
        format_i32 = FERRUM_FORMAT_I32
};

static inline uint64_t align_up(uint64_t bytes, uint64_t alignment) {
    return (bytes + alignment - 1) / alignment * alignment;
}

static inline uint32_t div_up(uint64_t a, uint64_t b) {
    return uint32_t((a + b - 1) / b);
}

}  // namespace ferrum
