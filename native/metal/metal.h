/* The Metal device's plain-C face: what metal_device.cpp asks of the Objective-C files. It knows no operation, and no
 * policy either: when to commit, what to keep alive and whom to tell of a failure is the C++ side's business.
 *
 * Objects come from …_new, …_open and …_begin with one reference, which the function named beside them takes. Calls on
 * one context must not overlap, except those on buffers.
 */
#ifndef FERRUM_METAL_H
#define FERRUM_METAL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct metal_context metal_context;   /* device, queue, library, pipelines */
typedef struct metal_buffer metal_buffer;     /* an MTLBuffer in shared storage */
typedef struct metal_pipeline metal_pipeline; /* a kernel with its function constants */
typedef struct metal_commands metal_commands; /* an open command buffer with one concurrent encoder */

typedef struct metal_message {
    char text[768];
} metal_message;

/* ---- Device */

typedef struct metal_options {
    const char *archive; /* file of compiled pipelines, read here and written by metal_save; NULL: none */
} metal_options;

/* The system's default GPU with the shaders loaded; NULL and a message where there is none that will do. */
metal_context *metal_open(const metal_options *options, metal_message *message);
void metal_close(metal_context *context);

/* "Apple M2". Valid as long as the context. */
const char *metal_name(const metal_context *context);
uint64_t metal_longest_buffer(const metal_context *context);

/* Writes the archive if a pipeline has been compiled that is not in it. Failing to is no error: the next process
 * compiles again. */
void metal_save(metal_context *context);

/* ---- Buffers */

/* NULL: no memory. Contents are undefined. */
metal_buffer *metal_buffer_new(metal_context *context, uint64_t bytes, const char *label);
/* A buffer over `bytes` bytes at `data`, both multiples of the system's page size; NULL: Metal will not have it. */
metal_buffer *metal_buffer_wrap(metal_context *context, void *data, uint64_t bytes, const char *label);
void metal_buffer_release(metal_buffer *buffer);
void *metal_buffer_contents(metal_buffer *buffer);
uint64_t metal_buffer_address(metal_buffer *buffer);

/* ---- Pipelines */

/* Kernel `name` with function constant i set to bit i of `constants`; NULL and a message if it does not compile. */
metal_pipeline *metal_pipeline_new(metal_context *context, const char *name, uint32_t constants,
                                   metal_message *message);
void metal_pipeline_release(metal_pipeline *pipeline);

typedef struct metal_limits {
    uint32_t simd_width;
    uint32_t threads;           /* the most of a threadgroup */
    uint32_t threadgroup_bytes; /* that its arrays take */
} metal_limits;
metal_limits metal_pipeline_limits(metal_pipeline *pipeline);

/* ---- Commands */

/* NULL: Metal gives no command buffer. */
metal_commands *metal_commands_begin(metal_context *context);

/* Kernels from here on may read and write `buffers` through addresses in memory. */
void metal_commands_use(metal_commands *commands, metal_buffer *const *buffers, uint64_t count);

/* What follows, up to the group's end, shows under `label` in captures and in failures. */
void metal_commands_begin_group(metal_commands *commands, const char *label);
void metal_commands_end_group(metal_commands *commands);

/* What follows waits for every dispatch before. */
void metal_commands_barrier(metal_commands *commands);

typedef struct metal_binding {
    metal_buffer *buffer;
    uint64_t offset;
    uint32_t slot;
} metal_binding;

typedef struct metal_dispatch {
    metal_pipeline *pipeline;
    const metal_binding *bindings;
    const void *params;
    uint32_t binding_count;
    uint32_t params_bytes; /* 0: none */
    uint32_t params_slot;
    uint32_t grid[3];    /* threadgroups */
    uint32_t threads[3]; /* of a threadgroup */
    uint32_t threadgroup_bytes;
} metal_dispatch;
void metal_commands_dispatch(metal_commands *commands, const metal_dispatch *dispatch);

/* Hands the commands to the GPU, and takes them. `done` runs once they are finished, on a thread of Metal's; `failure`
 * is NULL, or what went wrong with `label`, the group that was running, "" where Metal does not say. */
typedef void (*metal_done)(void *user, const char *failure, const char *label);
void metal_commands_commit(metal_commands *commands, metal_done done, void *user);

/* ---- What the build embeds (native/generate.py) */

extern const unsigned char ferrum_shader_source[]; /* every shader as one source, without quoted includes; a C string */
extern const unsigned char ferrum_metallib[];      /* the same, compiled, where the build had Apple's tools */
extern const unsigned long long ferrum_metallib_size; /* 0: it had not */

#ifdef __cplusplus
}
#endif

#endif
