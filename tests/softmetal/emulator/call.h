// Between the generated trampolines (generate.py) and the emulator. Plain types only: this is seen by kernel code.
#pragma once

#include "emulator.h"

namespace emu {

// Everything a kernel's argument can be.
struct call {
    void *const *buffers;
    void *threadgroup_memory;  // [[threadgroup(0)]]
    uint32_t threadgroup_position_in_grid[3];
    uint32_t threadgroups_per_grid[3];
    uint32_t thread_position_in_threadgroup[3];
    uint32_t threads_per_threadgroup[3];
    uint32_t thread_position_in_grid[3];
    uint32_t thread_index_in_threadgroup;
    uint32_t thread_index_in_simdgroup;
    uint32_t simdgroup_index_in_threadgroup;
    uint32_t simdgroups_per_threadgroup;
    uint32_t threads_per_simdgroup;
};

struct linked_kernel {
    emu_kernel face;
    void (*run)(const call &call);
};

// Of one .metal file; and of all that are linked (generate.py table).
struct linked_file {
    const linked_kernel *kernels;
    unsigned count;
};
extern const linked_file *const linked_files[];
extern const unsigned linked_file_count;

template <class T>
struct referred;
template <class T>
struct referred<T &> {
    typedef T type;
};

template <class Pointer>
inline Pointer pointer(const call &call, unsigned index) {
    return (Pointer)call.buffers[index];
}
// What an argument refers to that does not exist (function_constant is false): NaN, and an error to AddressSanitizer.
// Not NULL, since a compiler may read what a reference refers to before it is asked to.
extern unsigned char absent[4096];
template <class Reference>
inline Reference reference(const call &call, unsigned index) {
    static_assert(sizeof(typename referred<Reference>::type) <= sizeof(absent));
    void *const buffer = call.buffers[index];
    return *(typename referred<Reference>::type *)(buffer ? buffer : absent);
}

}  // namespace emu
