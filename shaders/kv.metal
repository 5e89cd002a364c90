// Keys and values into, out of and between pages.
#include "pages.h"

kernel void kv_append_f16(device const half *keys [[buffer(FERRUM_KV_KEYS)]],
                          device const half *values [[buffer(FERRUM_KV_VALUES)]],
                          device const ferrum_page *pages [[buffer(FERRUM_KV_PAGES)]],
                          constant ferrum_kv_params &p [[buffer(FERRUM_KV_PARAMS)]],
                          uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
    const uint position = p.position_start + group.x, slot = position % p.tokens_per_page;
    device half *head =
        pages[position / p.tokens_per_page].data + ferrum_kv_head(p.tokens_per_page, p.head_dim, group.y);
    device half *key = head + ferrum_kv_key(p.head_dim, slot);
    device half *value = head + ferrum_kv_value(p.tokens_per_page, p.head_dim, slot);
    const uint width = ferrum_kv_tile_width(p.tokens_per_page, slot);
    const ulong from = (ulong(group.x) * p.key_value_heads + group.y) * p.head_dim;
    for (uint d = lane; d < p.head_dim; d += FERRUM_SIMD_WIDTH) {
        key[d * width] = keys[from + d];
        value[d] = values[from + d];
    }
}

kernel void kv_gather_f16(device half *keys [[buffer(FERRUM_KV_KEYS)]],
                          device half *values [[buffer(FERRUM_KV_VALUES)]],
                          device const ferrum_page *pages [[buffer(FERRUM_KV_PAGES)]],
                          constant ferrum_kv_params &p [[buffer(FERRUM_KV_PARAMS)]],
                          uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
    const uint position = p.position_start + group.x, slot = position % p.tokens_per_page;
    device const half *head =
        pages[position / p.tokens_per_page].data + ferrum_kv_head(p.tokens_per_page, p.head_dim, group.y);
    device const half *key = head + ferrum_kv_key(p.head_dim, slot);
    device const half *value = head + ferrum_kv_value(p.tokens_per_page, p.head_dim, slot);
    const uint width = ferrum_kv_tile_width(p.tokens_per_page, slot);
    const ulong to = (ulong(group.x) * p.key_value_heads + group.y) * p.head_dim;
    for (uint d = lane; d < p.head_dim; d += FERRUM_SIMD_WIDTH) {
        keys[to + d] = key[d * width];
        values[to + d] = value[d];
    }
}

// The first tokens of page 0 into page 1, a threadgroup a head. Only written slots are copied: those behind them may be
// another state's, being written now.
kernel void kv_copy_f16(device const ferrum_page *pages [[buffer(FERRUM_KV_COPY_PAGES)]],
                        constant ferrum_kv_params &p [[buffer(FERRUM_KV_COPY_PARAMS)]],
                        uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]]) {
    const uint head = ferrum_kv_head(p.tokens_per_page, p.head_dim, group.x);
    device const half *from = pages[0].data + head;
    device half *to = pages[1].data + head;
    for (uint slot = 0; slot < p.tokens; slot += FERRUM_KEY_TILE) {
        const uint width = ferrum_kv_tile_width(p.tokens_per_page, slot), key = ferrum_kv_key(p.head_dim, slot);
        for (uint i = index; i < width * p.head_dim; i += 256)
            if (slot + i % width < p.tokens) to[key + i] = from[key + i];
    }
    const uint value = ferrum_kv_value(p.tokens_per_page, p.head_dim, 0);
    for (uint i = index; i < p.tokens * p.head_dim; i += 256) to[value + i] = from[value + i];
}
