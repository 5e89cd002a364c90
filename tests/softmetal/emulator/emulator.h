/* The emulator: shaders, compiled for the CPU through metal_shim.h, run thread by thread.
 *
 * A fresh threadgroup's memory is NaN. What a dispatch does wrong with barriers and SIMD-group functions is reported;
 * what it does wrong with memory is for the variants built with sanitizers (softmetal.mk).
 */
#ifndef FERRUM_EMULATOR_H
#define FERRUM_EMULATOR_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct emu_buffer_argument {
    uint32_t index;
    uint32_t writes;                     /* 0: constant, or device const */
    uint32_t function_constant_plus_one; /* the argument exists only where this constant is true; 0: always */
} emu_buffer_argument;

typedef struct emu_kernel {
    const char *name;
    uint32_t buffer_count;
    const emu_buffer_argument *buffers;
    uint32_t constants_used; /* bit mask: the function constants that its file declares */
} emu_kernel;

/* NULL: no such kernel linked. */
const emu_kernel *emu_find_kernel(const char *name);
uint32_t emu_kernel_count(void);
const emu_kernel *emu_kernel_at(uint32_t index);

typedef struct emu_binding {
    uint32_t index;
    void *address;
} emu_binding;

enum { EMU_MAX_BUFFERS = 31, EMU_MAX_THREADS = 1024, EMU_MAX_THREADGROUP_BYTES = 32768, EMU_SIMD_WIDTH = 32 };

/* Runs all threadgroups, and returns when they are done. 0, or 1 with a message: divergent barrier or SIMD-group
 * function, too much threadgroup memory, unbound argument … One dispatch runs at a time; others wait. */
int emu_dispatch(const emu_kernel *kernel, uint32_t constants, const emu_binding *bindings, uint32_t binding_count,
                 const uint32_t groups[3], const uint32_t threads[3], uint32_t threadgroup_bytes, char *message,
                 uint64_t message_bytes);

/* 0: threads and threadgroups in order. Else at random: whole SIMD-groups run ahead of the others, lanes and
 * threadgroups are shuffled. The same seed gives the same order of threads. Holds for later dispatches. A process
 * begins with $EMU_ORDER; $EMU_THREADS is the number of OS threads, else one a core. */
void emu_set_order(uint64_t seed);

#ifdef __cplusplus
}
#endif
#endif
