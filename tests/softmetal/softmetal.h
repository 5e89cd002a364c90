/* SoftMetal from the outside: what tests ask it and tell it. Metal itself has none of this. */
#ifndef SOFTMETAL_H
#define SOFTMETAL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* Objects of Metal's that are alive: devices, queues, buffers, pipelines … */
uint64_t softmetal_live_objects(void);

/* So far: dispatches that ran, command buffers that were committed, pipelines that were compiled (not those found in an
 * archive), bytes of buffers alive. */
typedef struct softmetal_counts {
    uint64_t dispatches;
    uint64_t command_buffers;
    uint64_t compiled;
    uint64_t buffer_bytes;
} softmetal_counts;
void softmetal_count(softmetal_counts *counts);

/* What was done wrong outside of a command buffer since the last call, the first of it; "" if nothing. A mistake in a
 * command buffer is that command buffer's error. */
const char *softmetal_complaint(void);

/* The order of dispatches that no barrier orders. 0: as encoded. 1, the default: from last to first, so that a missing
 * barrier always shows. Else: shuffled with this seed, and threads inside of a dispatch with it. */
void softmetal_set_order(uint64_t seed);

/* Every command buffer takes this much longer to begin. */
void softmetal_set_delay(uint32_t microseconds);

/* The next dispatch of this kernel fails; NULL: none does. */
void softmetal_fail_kernel(const char *name);

/* What pipelines say of themselves. At first 32 and 1024. */
void softmetal_set_limits(uint32_t simd_width, uint32_t threads);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif

#endif
