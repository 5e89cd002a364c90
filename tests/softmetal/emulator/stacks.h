// Memory of fibers and threadgroups, and how much of it.
#pragma once

#include <cstddef>
#include <new>

#include <sys/mman.h>

#include "emulator.h"
#include "sanitizers.h"

namespace emu {

#ifdef EMU_ASAN
constexpr size_t stack_bytes = 512 << 10;  // red zones around every local array
constexpr size_t red_zone = 64;
#else
constexpr size_t stack_bytes = 64 << 10;
constexpr size_t red_zone = 0;
#endif
constexpr size_t max_arrays = 64;
constexpr size_t page = 4096;
constexpr size_t guard_bytes = page;
constexpr size_t memory_bytes =
    (EMU_MAX_THREADGROUP_BYTES + (max_arrays + 1) * (64 + red_zone) + page - 1) / page * page;
// Of a stack, what a kernel's own frames may take; ThreadSanitizer's reports need the rest.
constexpr size_t kernel_stack_bytes = 24 << 10;

inline char *map(size_t bytes) {
    void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return (char *)memory;
}

// Whole pages for stacks and threadgroup memory. ThreadSanitizer renews memory in one region only, which is never
// unmapped.
inline char *take_memory(size_t bytes) {
    if (!races_checked) return map(bytes);
    constexpr size_t region_bytes = 1ul << 30;
    static char *region = nullptr, *free = nullptr;
    if (!region) heap_is(free = region = map(region_bytes), region_bytes);
    if (free + bytes > region + region_bytes) throw std::bad_alloc();
    free += bytes;
    return free - bytes;
}
inline void give_memory_back(char *memory, size_t bytes) {
    if (!races_checked) munmap(memory, bytes);
}

}  // namespace emu
