/* SoftMetal's memory. Host and GPU see the same bytes at different addresses, and the GPU's view is only open while a
 * dispatch runs that may use it: bound buffers, and those declared with useResources. Whatever else a kernel touches
 * faults; the fault is described, the memory opened, and the dispatch goes on and fails at its end. */
#ifndef SOFTMETAL_MEMORY_H
#define SOFTMETAL_MEMORY_H

#include <stdint.h>

typedef struct soft_range {
    struct soft_range *next, *previous;
    uint64_t references;
    uint64_t length;
    char *host; /* of the first byte */
    char *gpu;  /* the same byte; `host` for memory that is the caller's own */
    char *host_map, *gpu_map;
    uint64_t host_map_bytes, gpu_map_bytes; /* guards included */
    int borrowed;                           /* the caller's own memory: cannot be closed, is not filled */
    int freed;
    int open; /* SOFT_READ | SOFT_WRITE: what the GPU may do to it now */
    char label[64];
} soft_range;

enum { SOFT_READ = 1, SOFT_WRITE = 2 };

/* `length` bytes of NaN; NULL: no memory. */
soft_range *soft_range_new(uint64_t length);
/* NULL, and a reason: this memory cannot be shared with the GPU. */
soft_range *soft_range_borrow(void *data, uint64_t length, const char **reason);
void soft_range_retain(soft_range *range);
void soft_range_release(soft_range *range);
/* The buffer is gone. Its addresses stay closed for a while, and are not given to another one. */
void soft_range_free(soft_range *range);

typedef struct soft_access {
    soft_range *range;
    int access;
} soft_access;

/* Around a dispatch: opens exactly these; then the first fault, "" if there was none. */
void soft_memory_open(const soft_access *list, uint32_t count);
const char *soft_memory_fault(void);
/* Before the first dispatch, on the one thread that dispatches. */
void soft_memory_start_thread(void);

uint64_t soft_memory_bytes(void);

#endif
