/* The kernels: their names, params structs, buffer slots and constants.
 *
 * Read by the planner, by every device, by the shaders and (struct layouts only) by Python's cffi. A kernel, a weight
 * format or a limit is written down here once and nowhere else.
 *
 * Rules: uint32_t counts, uint64_t byte strides, float scalars; widest first; sizes a multiple of 8; no pointers.
 */
#ifndef FERRUM_KERNELS_H
#define FERRUM_KERNELS_H

#ifdef __METAL_VERSION__
typedef uint uint32_t;
typedef ulong uint64_t;
#else
#include <stdint.h>
#endif

/* Limits and tile sizes. */
enum {
    FERRUM_PAGE_BYTES = 65536,      /* one page of the arena */
    FERRUM_MAX_STATE_PAGES = 16384, /* pages of one state */
    FERRUM_MAX_HEAD_DIM = 256,
    FERRUM_MAX_TOP_K = 1024,
    FERRUM_KEY_TILE = 16,          /* tokens whose keys are interleaved inside a page */
    FERRUM_ROPE_LOW = 256,         /* rows of the low half of a rotary table */
    FERRUM_SCRATCH_ALIGNMENT = 16, /* bytes; every row of scratch starts on it */
    FERRUM_SIMD_WIDTH = 32,
    FERRUM_FEW_ROWS = 16,              /* rows and tokens up to which the kernels for verification are planned */
    FERRUM_ATTENTION_SIMDGROUPS = 8,   /* of a decode threadgroup; fixed, since it is part of the order of a sum */
    FERRUM_ATTENTION_TILE_TOKENS = 32, /* query tokens of a prefill threadgroup, 8 a SIMD-group */
    FERRUM_LINEAR_VECTOR_OUTPUTS = 8,  /* outputs of a threadgroup of two SIMD-groups */
    FERRUM_LINEAR_TILE_ROWS = 32,
    FERRUM_LINEAR_TILE_OUTPUTS = 64, /* of a threadgroup of four SIMD-groups */
    FERRUM_DFLASH2_MAX_LANES = 4,
    FERRUM_DFLASH2_MAX_ROWS = 16, /* of a block; FERRUM_FEW_ROWS, so that verification is one call */
    FERRUM_DFLASH2_MAX_TAPS = 8,
    FERRUM_DFLASH2_MAX_CANDIDATES = 64
};

/* Weight and array formats: X(NAME, name, id, elements per block, bytes per block). Ids are GGML's type numbers. */
#define FERRUM_FORMATS(X)       \
    X(F32, f32, 0, 1, 4)        \
    X(F16, f16, 1, 1, 2)        \
    X(Q4_0, q4_0, 2, 32, 18)    \
    X(Q4_1, q4_1, 3, 32, 20)    \
    X(Q5_0, q5_0, 6, 32, 22)    \
    X(Q5_1, q5_1, 7, 32, 24)    \
    X(Q8_0, q8_0, 8, 32, 34)    \
    X(Q4_K, q4_k, 12, 256, 144) \
    X(Q5_K, q5_k, 13, 256, 176) \
    X(Q6_K, q6_k, 14, 256, 210) \
    X(BF16, bf16, 30, 1, 2)

/* Formats of index arrays; they hold no weights. */
enum { FERRUM_FORMAT_I32 = 26 };

/* Every kernel a plan can name: X(name). Linear and embed come once per weight format; linear in three shapes: one row
 * (vector), up to FERRUM_FEW_ROWS rows a threadgroup (rows), and tiles of many. Attention: decode takes a query token
 * through all its spans; split takes one span and leaves a partial result, combine puts those together; tiles takes
 * many query tokens at once. */
#define FERRUM_KERNELS(X)                   \
    X(rms_norm_f16)                         \
    X(rms_norm_f32)                         \
    X(causal_attention_prepare_f16)         \
    X(causal_attention_decode_f16)          \
    X(causal_attention_split_f16)           \
    X(causal_attention_combine_f16)         \
    X(causal_attention_tiles_f16)           \
    X(residual_add_f16)                     \
    X(residual_add_f32)                     \
    X(swiglu_f16)                           \
    X(cross_entropy_f32)                    \
    X(argmax_f32)                           \
    X(top_k_f32)                            \
    X(kv_append_f16)                        \
    X(kv_gather_f16)                        \
    X(kv_copy_f16)                          \
    X(dflash2_pack_bf16)                    \
    X(dflash2_mask_bf16)                    \
    X(dflash2_commit_bf16)                  \
    X(dflash2_gather_bf16)                  \
    X(dflash2_mask_rows_f32)                \
    X(dflash2_attention_bf16)               \
    X(dflash2_conv_f16)                     \
    X(dflash2_heads_f32)                    \
    X(dflash2_select_f32)                   \
    FERRUM_FORMAT_KERNELS(X, linear_vector) \
    FERRUM_FORMAT_KERNELS(X, linear_rows)   \
    FERRUM_FORMAT_KERNELS(X, linear_tiles)  \
    FERRUM_FORMAT_KERNELS(X, embed)

/* One kernel per weight format, in the order of FERRUM_FORMATS. */
#define FERRUM_FORMAT_KERNELS(X, family) \
    X(family##_f32)                      \
    X(family##_f16)                      \
    X(family##_q4_0)                     \
    X(family##_q4_1)                     \
    X(family##_q5_0)                     \
    X(family##_q5_1)                     \
    X(family##_q8_0)                     \
    X(family##_q4_k)                     \
    X(family##_q5_k)                     \
    X(family##_q6_k)                     \
    X(family##_bf16)

/* Function constants: booleans that specialise a kernel. Bit i is function constant i. */
enum {
    FERRUM_CONSTANT_NORM_F32 = 1,          /* the norm weight is float32, else float16 */
    FERRUM_CONSTANT_OUTPUT_F32 = 2,        /* the output is float32, else float16 */
    FERRUM_CONSTANT_BIAS = 4,              /* a bias is bound */
    FERRUM_CONSTANT_BIAS_F32 = 8,          /* the bias is float32, else float16 */
    FERRUM_CONSTANT_OUTPUT_GATE = 16,      /* query rows carry a gate per head */
    FERRUM_CONSTANT_ROPE_INTERLEAVED = 32, /* pairs (2i, 2i+1), else (i, i + rope_dim / 2) */
    FERRUM_CONSTANT_QUERY_NORM = 64,
    FERRUM_CONSTANT_QUERY_NORM_F32 = 128,
    FERRUM_CONSTANT_KEY_NORM = 256,
    FERRUM_CONSTANT_KEY_NORM_F32 = 512
};

/* rms_norm_*: y[r, i] = f16(x[r, i] * rsqrt(mean(x[r]^2) + epsilon) * weight[i]) */
enum { FERRUM_RMS_NORM_X, FERRUM_RMS_NORM_WEIGHT, FERRUM_RMS_NORM_Y, FERRUM_RMS_NORM_PARAMS };
typedef struct ferrum_rms_norm_params {
    uint32_t rows;
    uint32_t width;
    uint32_t output_stride; /* elements between rows of y */
    float epsilon;
} ferrum_rms_norm_params;

/* linear_*: y[r, o] = sum_i weight[o, i] * x[r, i] + bias[o]; x is float16 */
enum { FERRUM_LINEAR_X, FERRUM_LINEAR_WEIGHT, FERRUM_LINEAR_BIAS, FERRUM_LINEAR_Y, FERRUM_LINEAR_PARAMS };
typedef struct ferrum_linear_params {
    uint64_t weight_row_bytes;
    uint32_t rows;
    uint32_t in_features;
    uint32_t out_features;
    uint32_t input_stride;  /* elements between rows of x */
    uint32_t output_stride; /* elements between rows of y */
    uint32_t pad;
} ferrum_linear_params;

/* causal_attention_*: one params struct for all.
 *   prepare   per-head norms and rotary embedding of queries and keys; keys and values into the pages
 *   decode    context = softmax(scale * query keys^T) values, times sigmoid(gate)
 *   split     the same over one span: a partial (values, largest score, sum of exponentials) per token, head and span
 *   combine   partials to context
 *   tiles     decode, for many query tokens at once */
enum {
    FERRUM_PREPARE_QUERY_RAW,
    FERRUM_PREPARE_KEY_RAW,
    FERRUM_PREPARE_VALUE_RAW,
    FERRUM_PREPARE_QUERY_NORM,
    FERRUM_PREPARE_KEY_NORM,
    FERRUM_PREPARE_ROPE,
    FERRUM_PREPARE_QUERY,
    FERRUM_PREPARE_PAGES,
    FERRUM_PREPARE_PARAMS
};
/* decode, tiles */
enum {
    FERRUM_ATTENTION_QUERY,
    FERRUM_ATTENTION_QUERY_RAW,
    FERRUM_ATTENTION_CONTEXT,
    FERRUM_ATTENTION_PAGES,
    FERRUM_ATTENTION_PARAMS
};
enum { FERRUM_SPLIT_QUERY, FERRUM_SPLIT_PAGES, FERRUM_SPLIT_PARTIALS, FERRUM_SPLIT_PARAMS };
enum { FERRUM_COMBINE_PARTIALS, FERRUM_COMBINE_QUERY_RAW, FERRUM_COMBINE_CONTEXT, FERRUM_COMBINE_PARAMS };
typedef struct ferrum_causal_attention_params {
    uint32_t position_start; /* absolute position of the first new token */
    uint32_t tokens;         /* new tokens of this participant */
    uint32_t query_heads;
    uint32_t key_value_heads;
    uint32_t head_dim;
    uint32_t rope_dim;
    uint32_t query_raw_stride;  /* elements between tokens of query_raw */
    uint32_t query_head_stride; /* elements between heads of query_raw: head_dim, twice that with a gate */
    uint32_t key_value_stride;  /* elements between tokens of key_raw and of value_raw */
    uint32_t query_stride;      /* elements between tokens of query and of context */
    uint32_t tokens_per_page;
    uint32_t page_count;
    uint32_t window;         /* keys a query sees, itself included; 0: all */
    uint32_t span_tokens;    /* span i is positions [i, i + 1) * span_tokens: whole pages */
    uint32_t first_span;     /* the first one that the first token sees */
    uint32_t spans;          /* from there to the last token */
    uint32_t partial_stride; /* floats of a partial [token][query head][span]: values, largest score, sum */
    float epsilon;
    float scale;
    float softcap; /* 0: none */
} ferrum_causal_attention_params;

/* residual_add_*: y = x + float(branch); branch is float16 and has its own row stride */
enum { FERRUM_RESIDUAL_ADD_X, FERRUM_RESIDUAL_ADD_BRANCH, FERRUM_RESIDUAL_ADD_Y, FERRUM_RESIDUAL_ADD_PARAMS };
typedef struct ferrum_residual_add_params {
    uint32_t rows;
    uint32_t width;
    uint32_t branch_stride;
    uint32_t pad;
} ferrum_residual_add_params;

/* swiglu_f16: y = gate * sigmoid(gate) * up */
enum { FERRUM_SWIGLU_GATE, FERRUM_SWIGLU_UP, FERRUM_SWIGLU_Y, FERRUM_SWIGLU_PARAMS };
typedef struct ferrum_swiglu_params {
    uint64_t elements;
} ferrum_swiglu_params;

/* embed_*: y[t] = weight[tokens[t]] */
enum { FERRUM_EMBED_TOKENS, FERRUM_EMBED_WEIGHT, FERRUM_EMBED_Y, FERRUM_EMBED_PARAMS };
typedef struct ferrum_embed_params {
    uint64_t weight_row_bytes;
    uint32_t rows;
    uint32_t width;
} ferrum_embed_params;

/* cross_entropy_f32: loss[r] = logsumexp(logits[r]) - logits[r, targets[r]] */
enum {
    FERRUM_CROSS_ENTROPY_LOGITS,
    FERRUM_CROSS_ENTROPY_TARGETS,
    FERRUM_CROSS_ENTROPY_LOSS,
    FERRUM_CROSS_ENTROPY_PARAMS
};
/* argmax_f32, top_k_f32: largest first; of equal values the lower index first */
enum { FERRUM_TOP_K_X, FERRUM_TOP_K_INDICES, FERRUM_TOP_K_VALUES, FERRUM_TOP_K_PARAMS };
typedef struct ferrum_rows_params {
    uint32_t rows;
    uint32_t width;
    uint32_t k;
    uint32_t pad;
} ferrum_rows_params;

/* kv_append_f16, kv_gather_f16: arrays [tokens, heads, head_dim] into and out of pages.
 * kv_copy_f16: the first tokens of one page into another. */
enum { FERRUM_KV_KEYS, FERRUM_KV_VALUES, FERRUM_KV_PAGES, FERRUM_KV_PARAMS };
enum { FERRUM_KV_COPY_PAGES, FERRUM_KV_COPY_PARAMS }; /* a page table of two: from, to */
typedef struct ferrum_kv_params {
    uint32_t position_start;
    uint32_t tokens;
    uint32_t key_value_heads;
    uint32_t head_dim;
    uint32_t tokens_per_page;
    uint32_t pad;
} ferrum_kv_params;

/* dflash2_pack, _mask, _commit, _gather: a ring is `lanes` times `window` slots, slot s of lane b being number
 * b * window + s. `slots_per_page` of them lie in a page: [key_value_head][keys | values][slot of the page][dim],
 * bfloat16; ferrum_kv_layout.h has the offsets. A lane table holds two u32 a lane. Indices below are row-major. pack
 * packed_query[b, h, r] = query[b, r, h]; packed columns [0, rows) are the block's, column rows + j is slot (write
 * position + window - 1 - j) % window where j < min(length, window - 1), else zero. Lane table: length, write position.
 * One threadgroup a column (x) and lane and key head (y): also the query row of that number, of every head of the group
 *   mask    0 where column c < rows, or j = c - rows < min(length, window - 1) and r + 1 + j < window; else -infinity.
 *           x: columns by 256; y: lane, head and row. Lane table as in pack
 *   commit  pages: u64 [touched][3], source (0: none), target and number of a page. Slot s of lane b takes row
 *           i = (s + window - write position) % window of the new keys where i < count, else the source's bits if there
 *           is a source. Lane table: count, write position. x: slot of the page; y: touched page. `rows`: of a lane of
 *           the new keys
 *   gather  keys and values by slot [lanes, key_value_heads, window, head_dim]; zero in a slot never written. Lane
 *           table as in pack. x: slot; y: lane and key head
 * float32 becomes bfloat16 to nearest even; NaN stays NaN. */
enum {
    FERRUM_DFLASH2_PACK_QUERY,        /* f32 [lanes, rows, query_heads, head_dim] */
    FERRUM_DFLASH2_PACK_KEY,          /* f32 [lanes, rows, key_value_heads, head_dim] */
    FERRUM_DFLASH2_PACK_VALUE,        /* the same */
    FERRUM_DFLASH2_PACK_PAGES,        /* u64 [pages]; 0: a page with no slot written yet */
    FERRUM_DFLASH2_PACK_LANES,        /* u32 [lanes, 2] */
    FERRUM_DFLASH2_PACK_PACKED_QUERY, /* bf16 [lanes, query_heads, rows, head_dim] */
    FERRUM_DFLASH2_PACK_PACKED_KEY,   /* bf16 [lanes, key_value_heads, columns, head_dim] */
    FERRUM_DFLASH2_PACK_PACKED_VALUE, /* the same */
    FERRUM_DFLASH2_PACK_PARAMS
};
enum { FERRUM_DFLASH2_MASK_LANES, FERRUM_DFLASH2_MASK_Y, FERRUM_DFLASH2_MASK_PARAMS }; /* bf16 [B, H, rows, columns] */
enum {
    FERRUM_DFLASH2_COMMIT_KEY,   /* f32 [lanes, rows, key_value_heads, head_dim] */
    FERRUM_DFLASH2_COMMIT_VALUE, /* the same */
    FERRUM_DFLASH2_COMMIT_PAGES,
    FERRUM_DFLASH2_COMMIT_LANES,
    FERRUM_DFLASH2_COMMIT_PARAMS
};
enum {
    FERRUM_DFLASH2_GATHER_PAGES,
    FERRUM_DFLASH2_GATHER_LANES,
    FERRUM_DFLASH2_GATHER_KEY,
    FERRUM_DFLASH2_GATHER_VALUE,
    FERRUM_DFLASH2_GATHER_PARAMS
};
typedef struct ferrum_dflash2_params {
    uint32_t lanes;
    uint32_t query_heads;
    uint32_t key_value_heads;
    uint32_t head_dim;
    uint32_t rows;
    uint32_t window;
    uint32_t columns; /* window - 1 + rows */
    uint32_t slots_per_page;
} ferrum_dflash2_params;

/* dflash2_mask_rows_f32: y = hidden, but every row of a lane after its first is the embedding. x: width by 256; y: row
 */
enum {
    FERRUM_DFLASH2_MASK_ROWS_HIDDEN,    /* f32 [lanes * rows, width] */
    FERRUM_DFLASH2_MASK_ROWS_EMBEDDING, /* bf16 [width] */
    FERRUM_DFLASH2_MASK_ROWS_Y,
    FERRUM_DFLASH2_MASK_ROWS_PARAMS
};
typedef struct ferrum_dflash2_mask_rows_params {
    uint32_t lanes;
    uint32_t rows;
    uint32_t width;
    uint32_t pad;
} ferrum_dflash2_mask_rows_params;

/* dflash2_attention_bf16: context[b, r, h] = softmax(scale * query keys^T + mask) values. Columns masked with -infinity
 * are not read. Sums float32 over columns in order. x: row; y: lane and head */
enum {
    FERRUM_DFLASH2_ATTENTION_QUERY, /* bf16 [lanes, query_heads, rows, head_dim] */
    FERRUM_DFLASH2_ATTENTION_KEY,   /* bf16 [lanes, key_value_heads, columns, head_dim] */
    FERRUM_DFLASH2_ATTENTION_VALUE, /* the same */
    FERRUM_DFLASH2_ATTENTION_MASK,  /* bf16 [lanes, query_heads, rows, columns] */
    FERRUM_DFLASH2_ATTENTION_Y,     /* f16 [lanes * rows, query_heads * head_dim] */
    FERRUM_DFLASH2_ATTENTION_PARAMS
};
typedef struct ferrum_dflash2_attention_params {
    uint32_t lanes;
    uint32_t query_heads;
    uint32_t key_value_heads;
    uint32_t head_dim;
    uint32_t rows;
    uint32_t columns;
    float scale;
    uint32_t pad;
} ferrum_dflash2_attention_params;

/* dflash2_conv_f16: y[t, c] = sum over taps of (base[side, tap, c] + dynamic[t, side, tap, c / (width / groups)]) *
 * x[t - tap, c], where row t - tap is of the same block of `block` rows. Sums float32, tap 0 first. x: width by 256;
 * y: row */
enum {
    FERRUM_DFLASH2_CONV_X,       /* f16 [rows, width] */
    FERRUM_DFLASH2_CONV_BASE,    /* f32 [2, taps, width] */
    FERRUM_DFLASH2_CONV_DYNAMIC, /* f32 [rows, 2 * taps * groups] */
    FERRUM_DFLASH2_CONV_Y,       /* f16 [rows, width] */
    FERRUM_DFLASH2_CONV_PARAMS
};
typedef struct ferrum_dflash2_conv_params {
    uint32_t rows;
    uint32_t block;
    uint32_t width;
    uint32_t taps;
    uint32_t groups;
    uint32_t side;
} ferrum_dflash2_conv_params;

/* dflash2_heads_f32: per-head RMS norm (FERRUM_CONSTANT_QUERY_NORM: a weight is bound, _QUERY_NORM_F32: it is float32),
 * then pairs (i, i + head_dim / 2) turned by (cos, sin) = angles[row, i]. x: head; y: row */
enum {
    FERRUM_DFLASH2_HEADS_X,      /* f32 [rows, heads * head_dim] */
    FERRUM_DFLASH2_HEADS_NORM,   /* [head_dim] */
    FERRUM_DFLASH2_HEADS_ANGLES, /* f32 [rows, head_dim / 2, 2] */
    FERRUM_DFLASH2_HEADS_Y,      /* f32 [rows, heads, head_dim] */
    FERRUM_DFLASH2_HEADS_PARAMS
};
typedef struct ferrum_dflash2_heads_params {
    uint32_t rows;
    uint32_t heads;
    uint32_t head_dim;
    float epsilon;
} ferrum_dflash2_heads_params;

/* dflash2_select_f32: a walk over steps t: scores[i] = values[b, t, i] + sum over the rank of previous * hidden[b, t] *
 * successors[b, t, i]; previous is row 0 of the lane's predecessors, then row 1 + t * candidates + (choice of step t).
 * temperature 0: the choice is the largest score, the first of equals, and its probability 1. Else probabilities are
 * softmax(scores / temperature), and the choice the first whose running sum passes uniform * total. One threadgroup a
 * lane (x) */
enum {
    FERRUM_DFLASH2_SELECT_IDS,           /* i32 [lanes, steps, candidates] */
    FERRUM_DFLASH2_SELECT_VALUES,        /* f32, the same */
    FERRUM_DFLASH2_SELECT_HIDDEN,        /* f32 [lanes, steps, rank] */
    FERRUM_DFLASH2_SELECT_PREDECESSORS,  /* f32 [lanes, 1 + (steps - 1) * candidates, rank] */
    FERRUM_DFLASH2_SELECT_SUCCESSORS,    /* f32 [lanes, steps, candidates, rank] */
    FERRUM_DFLASH2_SELECT_UNIFORMS,      /* f32 [lanes, steps]; any buffer, not read, where temperature is 0 */
    FERRUM_DFLASH2_SELECT_TOKENS,        /* i32 [lanes, steps] */
    FERRUM_DFLASH2_SELECT_PROBABILITIES, /* f32 [lanes, steps, candidates] */
    FERRUM_DFLASH2_SELECT_PARAMS
};
typedef struct ferrum_dflash2_select_params {
    uint32_t lanes;
    uint32_t steps;
    uint32_t candidates;
    uint32_t rank;
    float temperature;
    uint32_t pad;
} ferrum_dflash2_select_params;

#endif
