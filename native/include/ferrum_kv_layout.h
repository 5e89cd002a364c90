/* Where a key or a value lies inside a page. Read by the CPU kernels and by the shaders.
 *
 * A page holds `tokens_per_page` tokens, head after head: [head][keys | values]. Values are [token][dim]. Keys are
 * interleaved in tiles of FERRUM_KEY_TILE tokens, [tile][dim][token of the tile], so that one vector load brings the
 * same dimension of 16 keys: dot products then run across keys, each summed over dims in order, and never need a
 * horizontal sum. The last tile of a page is as narrow as the tokens that are left for it.
 */
#ifndef FERRUM_KV_LAYOUT_H
#define FERRUM_KV_LAYOUT_H

#include "ferrum_kernels.h"

/* Offset, in elements from the page's start, of head `head`. */
static inline uint32_t ferrum_kv_head(uint32_t tokens_per_page, uint32_t head_dim, uint32_t head) {
    return head * tokens_per_page * 2u * head_dim;
}

/* Tokens that the tile of page-local token `token` holds: the distance between two dims of one key. */
static inline uint32_t ferrum_kv_tile_width(uint32_t tokens_per_page, uint32_t token) {
    uint32_t left = tokens_per_page - token / FERRUM_KEY_TILE * FERRUM_KEY_TILE;
    return left < FERRUM_KEY_TILE ? left : (uint32_t)FERRUM_KEY_TILE;
}

/* Offset from the head's start of dim 0 of the key of page-local token `token`; dim d is d * tile_width further. */
static inline uint32_t ferrum_kv_key(uint32_t head_dim, uint32_t token) {
    return token / FERRUM_KEY_TILE * FERRUM_KEY_TILE * head_dim + token % FERRUM_KEY_TILE;
}

/* Offset from the head's start of dim 0 of the value of page-local token `token`; dims are adjacent. */
static inline uint32_t ferrum_kv_value(uint32_t tokens_per_page, uint32_t head_dim, uint32_t token) {
    return (tokens_per_page + token) * head_dim;
}

/* Tokens of a softmax span on a device that wants about `wanted`: whole pages, at least one. So no key tile is ever cut
 * by a span, and a boundary depends on absolute position alone: how a context is split for parallelism never changes
 * the order of a sum. */
static inline uint32_t ferrum_kv_span_tokens(uint32_t tokens_per_page, uint32_t wanted) {
    return tokens_per_page < wanted ? wanted / tokens_per_page * tokens_per_page : tokens_per_page;
}

/* Floats of a partial: the values padded to whole vectors of 16, then largest score and sum, then padding. */
static inline uint32_t ferrum_partial_stride(uint32_t head_dim) {
    return (head_dim + 15u) / 16u * 16u + 16u;
}

/* Offset, in elements from the start of a ring's page, of dim 0 of a slot of the page; `which` 0: keys, 1: values. */
static inline uint32_t ferrum_ring_slot(uint32_t slots_per_page, uint32_t head_dim, uint32_t head, uint32_t which,
                                        uint32_t slot) {
    return ((head * 2u + which) * slots_per_page + slot) * head_dim;
}

#endif
