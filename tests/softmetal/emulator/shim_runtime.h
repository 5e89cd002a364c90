// What a shader, compiled through metal_shim.h, asks of the emulator. Plain types only: this is seen by kernel code.
#pragma once

namespace emu {

// The running GPU thread, as far as the shim needs it.
struct shim_thread {
    unsigned char *area;    // of its SIMD-group: what the lanes bring to their next meeting
    unsigned lane;          // in the SIMD-group
    unsigned lanes;         // of the SIMD-group: 32, fewer in the last one of an uneven threadgroup
    unsigned matrix_moves;  // simdgroup_load and simdgroup_store so far: all lanes must make them together
};
constexpr unsigned area_bytes = 2048;

// Initial-exec: several accesses per simd_sum, and the library is never unloaded.
extern thread_local shim_thread *current __attribute__((__tls_model__("initial-exec")));
extern unsigned constants;  // function constants of the running dispatch

template <unsigned Index>
struct function_constant {
    static constexpr unsigned index = Index;
    operator bool() const { return constants >> Index & 1; }
};

// All lanes of the SIMD-group come here, or the dispatch fails. The last one combines what is in the area; then the
// next meeting's area is another one, so whoever runs ahead does not disturb those who still read this one. Orders no
// memory.
void meet(const char *what, const char *file, int line, void (*combine)(unsigned char *area, unsigned lanes));

// Barriers also order memory, unless `flags` is 0.
void meet_simdgroup(unsigned flags, const char *file, int line);
void meet_threadgroup(unsigned flags, const char *file, int line);

// The array that this threadgroup has for this place of the source.
void *threadgroup_array(const void *place, unsigned long bytes, const char *name);

}  // namespace emu
