/* libferrum: the C ABI of pyferrum. The one contract between the languages; cffi reads this very file.
 *
 * Conventions
 * -----------
 * Handles are opaque and reference-counted. A function that returns a handle through `out_…` gives one reference to the
 * caller; `ferrum_<noun>_release` takes the variable that holds it, gives the reference back and sets the variable to
 * NULL. A variable that is NULL already, or no variable, is fine: so an owner can be made before the call that fills
 * it. Every function is thread-safe. None aborts, prints or throws: each returns a status, and on failure leaves every
 * handle, page and output as it was; `ferrum_last_error()` then says which argument was wrong, what was expected and
 * what was found.
 *
 * Tensors are row-major and contiguous. Shapes are in elements, sizes and offsets in bytes, positions in tokens from
 * the sequence's start. `format` is a GGML type number: 0 float32, 1 float16, 30 bfloat16, 26 int32, and the block
 * formats of FERRUM_FORMATS in ferrum_kernels.h. A weight [out, in] is `out` rows of `in / elements-per-block` blocks.
 *
 * Calls run on the device in the order in which they are made. Inputs are never written; outputs are new buffers.
 */
#ifndef FERRUM_H
#define FERRUM_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The library is built with hidden visibility; what is declared here is all it exports. */
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

/* Changes whenever a declaration below does. A binding refuses a library with another number. */
enum { FERRUM_ABI_VERSION = 6 };

/* Status codes. */
enum {
    FERRUM_OK = 0,
    FERRUM_INVALID_ARGUMENT = 1, /* a shape, format, range or combination; the message names the argument */
    FERRUM_UNSUPPORTED = 2,      /* valid, but no kernel of this device does it */
    FERRUM_OUT_OF_PAGES = 3,     /* the arena's limit; the message says needed, in use, free */
    FERRUM_STATE_ERROR = 4,      /* a handle used after fork */
    FERRUM_DEVICE_ERROR = 5,     /* the device failed, or does not exist here */
    FERRUM_OUT_OF_MEMORY = 6,    /* the system has no memory for a buffer, slab or scratch */
    FERRUM_INTERNAL_ERROR = 7    /* a bug in libferrum */
};

/* Forms of a batched call. */
enum { FERRUM_FORM_SCALAR = 0, FERRUM_FORM_PARTICIPANT_LOOP = 1, FERRUM_FORM_PACKED = 2 };

/* What a launch's resource is. */
enum {
    FERRUM_ROLE_INPUT = 0,      /* index: participant (0 if packed); for other ops the operand */
    FERRUM_ROLE_OUTPUT = 1,     /* index as above */
    FERRUM_ROLE_WEIGHT = 2,     /* index: field of ferrum_attention_weights, in order */
    FERRUM_ROLE_SCRATCH = 3,    /* one block of ferrum_plan_summary.scratch_bytes */
    FERRUM_ROLE_PAGE_TABLE = 4, /* one block of page_table_bytes: device addresses of pages, u64 each */
    FERRUM_ROLE_ROPE = 5,       /* the attention op's rotary table */
    FERRUM_ROLE_PARTIALS = 6    /* one block of partials_bytes */
};

enum { FERRUM_MAX_BINDINGS = 8, FERRUM_MAX_PARAMS = 80, FERRUM_MAX_RANK = 4 };

typedef struct ferrum_device ferrum_device;       /* a device, its kernels and its arena of pages */
typedef struct ferrum_buffer ferrum_buffer;       /* bytes on a device */
typedef struct ferrum_state ferrum_state;         /* immutable keys and values of a sequence: pages and a length */
typedef struct ferrum_attention ferrum_attention; /* a validated attention configuration with its rotary table */
typedef struct ferrum_ring ferrum_ring;       /* immutable DFlash 2 context of up to four lanes: pages and positions */
typedef struct ferrum_plan ferrum_plan;       /* what a call will dispatch, as data */
typedef struct ferrum_program ferrum_program; /* recorded calls, replayed as one */

typedef struct ferrum_tensor {
    ferrum_buffer *buffer; /* NULL: absent (optional arguments only) */
    uint64_t offset;       /* bytes from the buffer's start */
    uint64_t shape[4];     /* FERRUM_MAX_RANK; unused entries are ignored */
    uint32_t rank;
    uint32_t format;
} ferrum_tensor;

/* ---- Library ---------------------------------------------------------------------------------------------------- */

/* FERRUM_ABI_VERSION of the built library. */
uint32_t ferrum_abi_version(void);

/* SHA-256, in hex, over the sources this library was built from: its implementation fingerprint. Static storage. */
const char *ferrum_build_fingerprint(void);

/* Message of the calling thread's last failed call; "" if none. Valid until that thread's next call. */
const char *ferrum_last_error(void);

/* Live objects of the whole process, for leak tests. */
typedef struct ferrum_counts {
    uint64_t devices;
    uint64_t buffers;
    uint64_t states;
    uint64_t attentions;
    uint64_t plans;
    uint64_t page_lists;
    uint64_t rings;
    uint64_t programs;
} ferrum_counts;
void ferrum_debug_counts(ferrum_counts *out_counts);

/* Name of kernel `kernel` of a launch, or NULL past the last one. Static storage. */
const char *ferrum_kernel_name(uint32_t kernel);

/* A weight or array format this library multiplies or reads. */
typedef struct ferrum_format_info {
    const char *name; /* GGML's: "F16", "Q4_1" */
    uint32_t format;
    uint32_t block_elements;
    uint32_t block_bytes;
} ferrum_format_info;

/* The `index`-th format, counted from 0; FERRUM_INVALID_ARGUMENT past the last one. */
int32_t ferrum_format_at(uint32_t index, ferrum_format_info *out_info);

/* ---- Device ----------------------------------------------------------------------------------------------------- */

typedef struct ferrum_device_options {
    uint64_t arena_limit_bytes; /* 0: half of the machine's memory. Rounded down to whole pages */
    uint32_t threads;           /* CPU threads, the caller's included, 256 at most; 0: one per available core */
    uint32_t exact;             /* 1: every row takes the same order of sums however many come with it, on every device;
                                   0: prefill may use faster tiles (the CPU device is exact either way) */
    uint32_t poison;            /* 1: fill pages and buffers with NaN when they are freed (debugging) */
    const char *instruction_set; /* CPU: "avx512", "avx2", "neon", "portable"; NULL or "": the best here */
} ferrum_device_options;

typedef struct ferrum_device_summary {
    const char *name;            /* "cpu" */
    const char *instruction_set; /* "avx512" …; "" where it has no meaning. Static storage */
    uint32_t threads;
    uint32_t pad;
    uint64_t memory_bytes; /* of the machine */
} ferrum_device_summary;

/* Opens device `name`: "cpu", or "metal" where the library has it. `options` may be NULL. Errors: FERRUM_DEVICE_ERROR
 * for a device that is not here. */
int32_t ferrum_device_new(const char *name, const ferrum_device_options *options, ferrum_device **out_device);

/* The device lives on until its last buffer, state and attention are gone. */
void ferrum_device_release(ferrum_device **device);

int32_t ferrum_device_describe(ferrum_device *device, ferrum_device_summary *out_summary);

typedef struct ferrum_arena_stats {
    uint64_t page_bytes;
    uint64_t limit_pages; /* pages the arena may ever hold */
    uint64_t slab_pages;  /* pages of all slabs so far */
    uint64_t used_pages;  /* pages that some state shows */
    uint64_t free_pages;  /* limit_pages - used_pages */
    uint64_t peak_used_pages;
    uint64_t allocated_pages; /* pages handed out since the device was opened */
    uint64_t copied_pages;    /* of those, pages that began as a copy of another one's prefix */
} ferrum_arena_stats;

/* Pages as they are once every call made so far is done; waits for that. */
int32_t ferrum_device_arena_stats(ferrum_device *device, ferrum_arena_stats *out_stats);

/* ---- Buffers ---------------------------------------------------------------------------------------------------- */

/* A new buffer of `bytes` bytes (0 is fine), contents undefined. */
int32_t ferrum_buffer_new(ferrum_device *device, uint64_t bytes, ferrum_buffer **out_buffer);

/* A buffer over the caller's memory, not copied: it must stay readable and unchanged until the buffer is gone. Arrays
 * in it are used only if it is aligned to their elements. */
int32_t ferrum_buffer_wrap(ferrum_device *device, const void *data, uint64_t bytes, ferrum_buffer **out_buffer);

void ferrum_buffer_release(ferrum_buffer **buffer);

/* Waits until every call that writes the buffer is done, and gives its address on the host. `out_bytes` may be NULL. */
int32_t ferrum_buffer_contents(ferrum_buffer *buffer, void **out_data, uint64_t *out_bytes);

/* Lets the device make what it needs to multiply a matrix [out, in] often, and hold it as long as the matrix's buffer
 * lives: the CPU device keeps a copy laid out for its kernels. No result depends on it. `out_bytes`: what is held; 0
 * where a device multiplies the stored form. The matrix must not change afterwards. */
int32_t ferrum_weight_prepare(ferrum_device *device, const ferrum_tensor *weight, uint64_t *out_bytes);

/* ---- States ----------------------------------------------------------------------------------------------------- */

typedef struct ferrum_state_summary {
    uint64_t length; /* tokens */
    uint64_t pages;  /* pages that this state shows; most are shared with its relatives */
    uint32_t key_value_heads;
    uint32_t head_dim;
    uint32_t tokens_per_page; /* FERRUM_PAGE_BYTES / (4 * key_value_heads * head_dim) */
    uint32_t pad;
} ferrum_state_summary;

/* An empty state. Holds no page. Errors: head_dim not in 1…256, or one token larger than a page. */
int32_t ferrum_state_new(ferrum_device *device, uint32_t key_value_heads, uint32_t head_dim, ferrum_state **out_state);

void ferrum_state_release(ferrum_state **state);

/* Releases and clears the states of an array up to its first NULL. */
void ferrum_states_release(ferrum_state **states);

int32_t ferrum_state_describe(ferrum_state *state, ferrum_state_summary *out_summary);

/* Numbers of the pages that the state shows, in order. `out_count`: how many there are; the first `capacity` of them go
 * to `out_pages`, which may be NULL where that is 0. A number tells a page from others of the device's arena as long as
 * a living state shows it, and may then be another page's. */
int32_t ferrum_state_pages(ferrum_state *state, uint64_t capacity, uint64_t *out_pages, uint64_t *out_count);

/* The first `length` tokens of `state`: O(1), shares everything. Errors: length > the state's. */
int32_t ferrum_state_truncate(ferrum_state *state, uint64_t length, ferrum_state **out_state);

/* A state with `keys` and `values`, float16 [tokens, key_value_heads, head_dim], appended as they are (keys already
 * rotated). `state` still shows what it showed. Writes in place where no living state shows the slots, else copies one
 * page. Nothing appended is the same handle once more. Errors: FERRUM_OUT_OF_PAGES. */
int32_t ferrum_state_append(ferrum_state *state, const ferrum_tensor *keys, const ferrum_tensor *values,
                            ferrum_state **out_state);

/* Keys and values of tokens [start, start + tokens) as float16 [tokens, key_value_heads, head_dim]. */
int32_t ferrum_state_read(ferrum_state *state, uint64_t start, uint64_t tokens, ferrum_buffer **out_keys,
                          ferrum_buffer **out_values);

/* ---- Causal attention ------------------------------------------------------------------------------------------- */

typedef struct ferrum_attention_config {
    uint64_t maximum_context_tokens; /* at most 16384 pages of keys and values */
    uint32_t hidden_size;
    uint32_t query_heads; /* a multiple of key_value_heads */
    uint32_t key_value_heads;
    uint32_t head_dim;           /* at most 256 */
    uint32_t rope_dim;           /* even, at most head_dim: the first dims of a head are rotated */
    uint32_t sliding_window;     /* keys a query sees, itself included; 0: all */
    uint32_t output_gate;        /* 1: q_proj rows are [query | gate] per head; context *= sigmoid(gate) */
    uint32_t rope_interleaved;   /* 1: pairs (2i, 2i+1); 0: pairs (i, i + rope_dim / 2) */
    float epsilon;               /* of every RMS norm in the call */
    float scale;                 /* of q·k; 0: 1 / sqrt(head_dim) */
    float softcap;               /* scores become softcap * tanh(score / softcap); 0: none */
    float rope_attention_factor; /* multiplies cos and sin (YaRN); 1: none */
} ferrum_attention_config;

/* Weights of one layer. Matrices may be in any weight format; norms and biases are float16 or float32. */
typedef struct ferrum_attention_weights {
    ferrum_tensor input_norm; /* [hidden] */
    ferrum_tensor q_proj;     /* [query_heads * head_dim (* 2 with a gate), hidden] */
    ferrum_tensor k_proj;     /* [key_value_heads * head_dim, hidden] */
    ferrum_tensor v_proj;     /* [key_value_heads * head_dim, hidden] */
    ferrum_tensor o_proj;     /* [hidden, query_heads * head_dim] */
    ferrum_tensor q_norm;     /* [head_dim], optional */
    ferrum_tensor k_norm;     /* [head_dim], optional */
    ferrum_tensor q_bias;     /* [rows of q_proj], optional; so are the next three */
    ferrum_tensor k_bias;
    ferrum_tensor v_bias;
    ferrum_tensor o_bias;
} ferrum_attention_weights;

/* Validates `config` and builds the rotary table on the device from `inverse_frequencies`, float64 [rope_dim / 2]
 * (radians per position). Errors name the field. */
int32_t ferrum_attention_new(ferrum_device *device, const ferrum_attention_config *config,
                             const double *inverse_frequencies, ferrum_attention **out_attention);

void ferrum_attention_release(ferrum_attention **attention);

/* One attention sub-layer, y = x + o_proj(gate * attention(rope(norm(qkv(rms_norm(x)))))), for `participants`
 * sequences. `form` FERRUM_FORM_PACKED: `xs` is one tensor [sum of tokens, hidden], rows in participants' order, and
 * `out_ys` one buffer; else `xs` holds one tensor [tokens[i], hidden] per participant and `out_ys` one buffer each.
 * x is float16 or float32 (the float32-master op); y has its format. `out_states[i]` is states[i] with tokens[i] more
 * tokens; the arrays hold the variables to be filled. The same state may appear twice. Nothing is returned unless
 * everything succeeds. */
int32_t ferrum_causal_attention(ferrum_attention *attention, const ferrum_attention_weights *weights, uint32_t form,
                                uint32_t participants, ferrum_state *const *states, const uint64_t *tokens,
                                const ferrum_tensor *xs, ferrum_state **const *out_states,
                                ferrum_buffer **const *out_ys);

/* ---- Plans ------------------------------------------------------------------------------------------------------ */

/* What a causal-attention call dispatches. Pure: touches no page and runs nothing. */
typedef struct ferrum_plan_request {
    uint32_t form; /* FERRUM_FORM_PACKED, or any other: scalar or loop by the number of participants */
    uint32_t participants;
    uint32_t hidden_format;         /* 0 float32-master, 1 float16 */
    uint32_t projection_formats[4]; /* of q_proj, k_proj, v_proj, o_proj */
    uint32_t constants; /* FERRUM_CONSTANT_NORM_F32, _QUERY_NORM(_F32), _KEY_NORM(_F32) as the weights have it */
    uint32_t biases;    /* bit i: projection i has a bias; bit i + 4: it is float32 */
    uint32_t pad;
    const uint64_t *starts; /* [participants] tokens already in each state */
    const uint64_t *tokens; /* [participants] new tokens, each at least 1 */
} ferrum_plan_request;

typedef struct ferrum_plan_summary {
    uint32_t form;
    uint32_t participants;
    uint32_t launches;
    uint32_t resources;
    uint64_t total_tokens;
    uint64_t scratch_bytes;
    uint64_t scratch_bytes_per_token;
    uint64_t scratch_regions[7]; /* offsets: normalized, query_raw, key_raw, value_raw, query, context, projected */
    uint64_t partials_bytes;     /* of attention split over a long context; 0 where none is */
    uint64_t page_table_bytes;
    uint64_t pages;         /* of all participants after the call, before sharing */
    uint64_t maximum_pages; /* of one state at maximum_context_tokens */
    uint64_t state_bytes_per_token;
    uint8_t fingerprint[32]; /* SHA-256 of the topology: docs/c-abi.md says over what */
} ferrum_plan_summary;

typedef struct ferrum_binding {
    uint32_t slot;     /* the kernel's buffer index */
    uint32_t resource; /* index into the plan's resources */
    uint64_t offset;   /* bytes, added to the resource's own */
} ferrum_binding;

typedef struct ferrum_resource {
    uint32_t role;
    uint32_t index;
} ferrum_resource;

typedef struct ferrum_launch {
    uint32_t kernel;    /* ferrum_kernel_name() */
    uint32_t constants; /* FERRUM_CONSTANT_… */
    uint32_t barrier;   /* 1: waits for every launch before it; 0: may run beside them */
    uint32_t participant;
    uint32_t grid[3];    /* threadgroups */
    uint32_t threads[3]; /* of a threadgroup */
    uint32_t threadgroup_bytes;
    uint32_t binding_count;
    uint32_t params_slot; /* the kernel's buffer index of its params */
    uint32_t params_bytes;
    ferrum_binding bindings[8]; /* FERRUM_MAX_BINDINGS */
    uint8_t params[80];         /* the kernel's params struct; FERRUM_MAX_PARAMS */
} ferrum_launch;

int32_t ferrum_attention_plan(ferrum_attention *attention, const ferrum_plan_request *request, ferrum_plan **out_plan);

void ferrum_plan_release(ferrum_plan **plan);

int32_t ferrum_plan_describe(ferrum_plan *plan, ferrum_plan_summary *out_summary);

int32_t ferrum_plan_launch(ferrum_plan *plan, uint32_t index, ferrum_launch *out_launch);

int32_t ferrum_plan_resource(ferrum_plan *plan, uint32_t index, ferrum_resource *out_resource);

/* ---- Programs --------------------------------------------------------------------------------------------------- */

/* From here to ferrum_program_end this thread's calls on `device` are taken down while they run as ever, if `run`, else
 * instead: arrays and states that they make then are names of values that a run will have, to be given to other calls
 * and to ferrum_program_end, and released; whatever else would use them, then or later, is refused. What calls read of
 * the inputs will be another array, or state, in every run; any other array, state or number they use is captured as it
 * is. Inputs are states of their own and buffers of their own, with nothing else in them, each at most once; `inputs`
 * and `input_states` may be NULL where there are none. As long as a recording lasts, FERRUM_UNSUPPORTED is the answer
 * to calls on `device` that cannot be replayed (those of rings and of DFlash 2, ferrum_program_run, weight_prepare,
 * state_append, state_truncate, state_read and state_pages) and to reading an array that depends on the inputs. A
 * thread that ends while it records leaves what the recording holds, the device included, to the end of the process. */
int32_t ferrum_program_begin(ferrum_device *device, uint32_t run, uint32_t arrays, const ferrum_tensor *inputs,
                             uint32_t states, ferrum_state *const *input_states);

/* Ends the recording, whether it succeeds or not: the program that makes `outputs` and `output_states`, each of which a
 * recorded call made. Of an output only the buffer counts: a run gives all of it. Either list may be NULL if empty. */
int32_t ferrum_program_end(uint32_t arrays, const ferrum_tensor *outputs, uint32_t states,
                           ferrum_state *const *output_states, ferrum_program **out_program);

/* Ends the recording of this thread, if there is one, and keeps nothing. */
void ferrum_program_abandon(void);

void ferrum_program_release(ferrum_program **program);

/* Runs a program on other inputs of the same shapes and formats, as one call: everything is checked and reserved before
 * anything starts, and nothing is returned unless all of it succeeds. `values`: NULL, or the host's address of all the
 * inputs' bytes, one input behind the other; they are copied, and `inputs` is ignored. `states`: as many as
 * ferrum_program_begin was given. Lists may be NULL where they are empty. New states come in `groups` groups:
 * out_states[i] is the first of sizes[i] variables that lie one behind the other. `out_lengths`: tokens of each new
 * state; may be NULL. */
int32_t ferrum_program_run(ferrum_program *program, const ferrum_tensor *inputs, const void *values,
                           ferrum_state *const *states, ferrum_buffer **const *out_arrays, uint32_t groups,
                           const uint32_t *sizes, ferrum_state **const *out_states, uint64_t *out_lengths);

/* ---- Other operations ------------------------------------------------------------------------------------------- */
/* `device` owns every tensor; outputs are new buffers. T = rows. */

/* y f16 [T, width] = x * rsqrt(mean(x^2) + epsilon) * weight; x f16 or f32 [T, width], weight f16 or f32 [width]. */
int32_t ferrum_rms_norm(ferrum_device *device, const ferrum_tensor *x, const ferrum_tensor *weight, float epsilon,
                        ferrum_buffer **out_y);

/* y [T, out] = x weight^T + bias; x f16 [T, in], weight [out, in] in any weight format, bias f16 or f32 [out] or NULL;
 * y is float16, or float32 where `output_format` is 0. */
int32_t ferrum_linear(ferrum_device *device, const ferrum_tensor *x, const ferrum_tensor *weight,
                      const ferrum_tensor *bias, uint32_t output_format, ferrum_buffer **out_y);

/* y [T, width] = weight[tokens]; tokens i32 [T], each in 0…vocabulary-1; y is float16 (1) or float32 (0). */
int32_t ferrum_embed(ferrum_device *device, const ferrum_tensor *tokens, const ferrum_tensor *weight,
                     uint32_t output_format, ferrum_buffer **out_y);

/* y f16 = gate * sigmoid(gate) * up; both f16 and of one shape. */
int32_t ferrum_swiglu(ferrum_device *device, const ferrum_tensor *gate, const ferrum_tensor *up, ferrum_buffer **out_y);

/* y = x + branch, in x's format (f16 or f32); branch f16; both [T, width]. */
int32_t ferrum_residual_add(ferrum_device *device, const ferrum_tensor *x, const ferrum_tensor *branch,
                            ferrum_buffer **out_y);

/* loss f32 [T] in nats; logits f32 [T, vocabulary], targets i32 [T], each in 0…vocabulary-1. */
int32_t ferrum_cross_entropy(ferrum_device *device, const ferrum_tensor *logits, const ferrum_tensor *targets,
                             ferrum_buffer **out_loss);

/* indices i32 [T] of each row's largest value, the lowest of equals; NaN counts as largest. x f32 [T, width]. */
int32_t ferrum_argmax(ferrum_device *device, const ferrum_tensor *x, ferrum_buffer **out_indices);

/* values f32 and indices i32 [T, k] of each row's k largest, largest first, lower index first among equals.
 * k at most FERRUM_MAX_TOP_K and the width. */
int32_t ferrum_top_k(ferrum_device *device, const ferrum_tensor *x, uint32_t k, ferrum_buffer **out_indices,
                     ferrum_buffer **out_values);

/* ---- DFlash 2 --------------------------------------------------------------------------------------------------- */
/* A ring holds the last `window` tokens' keys and values of a draft model's context, lane by lane, in pages of the
 * arena. It is immutable: a commit gives a new one, which shares every page that no new token lies on. B: lanes, H and
 * Hk: query and key heads, D: head_dim, R: rows of a block, W: window. ferrum_kernels.h says what each kernel computes.
 */

typedef struct ferrum_ring_summary {
    uint64_t lengths[4];         /* FERRUM_DFLASH2_MAX_LANES; tokens committed to a lane so far */
    uint32_t write_positions[4]; /* the slot that a lane's next token takes */
    uint32_t lanes;
    uint32_t window;
    uint32_t key_value_heads;
    uint32_t head_dim;
    uint32_t slots_per_page;
    uint32_t pages; /* that this ring shows */
} ferrum_ring_summary;

/* An empty ring; holds no page. lanes 1…4, head_dim 64, 128 or 256, window at least 3. */
int32_t ferrum_ring_new(ferrum_device *device, uint32_t lanes, uint32_t window, uint32_t key_value_heads,
                        uint32_t head_dim, ferrum_ring **out_ring);

void ferrum_ring_release(ferrum_ring **ring);

int32_t ferrum_ring_describe(ferrum_ring *ring, ferrum_ring_summary *out_summary);

/* An empty ring's twin with `keys` and `values`, f32 [B, W, Hk, D] by slot, as if lengths[b] tokens had been committed
 * to lane b and the next one were due at write_positions[b]. */
int32_t ferrum_ring_load(ferrum_ring *ring, const ferrum_tensor *keys, const ferrum_tensor *values,
                         const uint64_t *lengths, const uint32_t *write_positions, ferrum_ring **out_ring);

/* keys and values by slot, bf16 [B, Hk, W, D]; zero in a slot that no token was committed to. */
int32_t ferrum_ring_read(ferrum_ring *ring, ferrum_buffer **out_keys, ferrum_buffer **out_values);

/* A ring with the first counts[b] of the C tokens of `keys` and `values`, f32 [B, C, Hk, D], behind lane b. C at most
 * 16 and less than W, counts[b] at most C. Copies the pages that these tokens lie on. Errors: FERRUM_OUT_OF_PAGES. */
int32_t ferrum_dflash2_commit(ferrum_ring *ring, const ferrum_tensor *keys, const ferrum_tensor *values,
                              const uint32_t *counts, ferrum_ring **out_ring);

/* [block | ring, newest first]: packed queries bf16 [B, H, R, D], keys and values bf16 [B, Hk, W - 1 + R, D], from
 * f32 [B, R, H, D] and [B, R, Hk, D]. R 2…16 and less than W. */
int32_t ferrum_dflash2_pack(ferrum_ring *ring, const ferrum_tensor *queries, const ferrum_tensor *keys,
                            const ferrum_tensor *values, ferrum_buffer **out_queries, ferrum_buffer **out_keys,
                            ferrum_buffer **out_values);

/* bf16 [B, query_heads, rows, W - 1 + rows]: 0 where a row sees a packed column, -infinity elsewhere. */
int32_t ferrum_dflash2_mask(ferrum_ring *ring, uint32_t rows, uint32_t query_heads, ferrum_buffer **out_mask);

/* f32 [lanes * rows, width]: `hidden` with every row of a lane but its first replaced by `embedding`, bf16 [width]. */
int32_t ferrum_dflash2_mask_rows(ferrum_device *device, const ferrum_tensor *hidden, const ferrum_tensor *embedding,
                                 uint32_t lanes, uint32_t rows, ferrum_buffer **out_hidden);

/* f16 [B * R, H * D] = softmax(queries keys^T / sqrt(D) + mask) values, packed; 0 where a row sees nothing. */
int32_t ferrum_dflash2_attention(ferrum_device *device, const ferrum_tensor *queries, const ferrum_tensor *keys,
                                 const ferrum_tensor *values, const ferrum_tensor *mask, ferrum_buffer **out_context);

/* f16 [T, width]: grouped dynamic causal convolution within blocks of `rows` rows; x f16 [T, width], base f32
 * [2, taps, width], dynamic f32 [T, 2 * taps * groups]; side 0 (prepare) or 1 (finish). */
int32_t ferrum_dflash2_conv(ferrum_device *device, const ferrum_tensor *x, const ferrum_tensor *base,
                            const ferrum_tensor *dynamic, uint32_t side, uint32_t rows, ferrum_buffer **out_y);

/* f32 [T, heads, D]: per-head RMS norm with `norm` [D] (NULL: none), then rotation of the halves of a head by
 * angles f32 [T, D / 2, 2] (cos, sin); x f32 [T, heads * D]. */
int32_t ferrum_dflash2_heads(ferrum_device *device, const ferrum_tensor *x, const ferrum_tensor *norm,
                             const ferrum_tensor *angles, float epsilon, ferrum_buffer **out_y);

/* The candidate selector's walk over S steps: tokens i32 [B, S] and probabilities f32 [B, S, k] over `ids` i32 [B, S,
 * k] with `scores` f32 [B, S, k], `hidden` f32 [B, S, r], rows of the codebooks `predecessors` f32 [B, 1 + (S - 1) k,
 * r] (the anchor's, then the candidates' of every step but the last) and `successors` f32 [B, S k, r]. temperature 0
 * takes the best; else `uniforms` f32 [B, S] in [0, 1) draw. */
int32_t ferrum_dflash2_select(ferrum_device *device, const ferrum_tensor *ids, const ferrum_tensor *scores,
                              const ferrum_tensor *hidden, const ferrum_tensor *predecessors,
                              const ferrum_tensor *successors, const ferrum_tensor *uniforms, float temperature,
                              ferrum_buffer **out_tokens, ferrum_buffer **out_probabilities);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#ifdef __cplusplus
}
#endif

#endif
