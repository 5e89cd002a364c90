// Attention of many query tokens at once: a threadgroup takes 32 tokens of one head, eight a SIMD-group, and walks over
// the keys that any of them sees, a tile of the pages (16 keys) at a time.
//
// Keys and values of a tile go to threadgroup memory as 8 x 8 tiles, 64 numbers in a row each, so that loading one
// meets every bank once. Dims are padded to whole tiles with zeros, and so are keys that are not there: their values
// must be numbers, since a weight of zero does not rid a sum of NaN. Queries stay in registers as float16, exponentials
// as float32; scores and sums are float32.
#include "causal_attention.h"

constant constexpr uint kBlockTokens = FERRUM_ATTENTION_TILE_TOKENS;
constant constexpr uint kBlockThreads = 4 * FERRUM_SIMD_WIDTH;
constant constexpr uint kKeys = FERRUM_KEY_TILE;
constant constexpr uint kTileOctets = kKeys * FERRUM_MAX_HEAD_DIM / 8;  // of keys, and of values
static_assert(kBlockTokens == 32 && kKeys == 16, "four SIMD-groups of 8 tokens, tiles of 16 keys");

// Threadgroup memory. Queries of 32 tokens lie where keys and values will be.
struct tile_memory {
    threadgroup uint4 *keys;     // [half of 8 keys][dim][8 keys]
    threadgroup uint4 *values;   // [8 dims][key][8 dims]
    threadgroup float *scores;   // of this SIMD-group: [8 tokens][16 keys]
    threadgroup float *factors;  // of this SIMD-group: [8 tokens][8 times the same]
};

// `wide`: the eight are there, on an address that is a multiple of 16.
inline uint4 tile_octet(device const half *from, uint count, bool wide) {
    return wide ? *(device const uint4 *)from : octet_bits(from, count);
}

inline void load_tile(device const half *head, constant ferrum_causal_attention_params &p, uint slot, uint count,
                      uint blocks, thread const tile_memory &memory, uint thread_index) {
    const uint dim = p.head_dim, width = ferrum_kv_tile_width(p.tokens_per_page, slot);
    const bool wide = dim % 8 == 0;
    device const half *keys = head + ferrum_kv_key(dim, slot);
    device const half *values = head + ferrum_kv_value(p.tokens_per_page, dim, slot);
    for (uint i = thread_index; i < 2 * 8 * blocks; i += kBlockThreads) {
        const uint d = i / 2, first = i % 2 * 8;
        uint4 octet = uint4(0u);
        if (d < dim && first < width)
            octet = tile_octet(keys + d * width + first, width - first, wide && width == kKeys);
        memory.keys[i % 2 * 8 * blocks + d] = octet;
    }
    for (uint i = thread_index; i < kKeys * blocks; i += kBlockThreads) {
        const uint key = i / blocks, block = i % blocks;
        uint4 octet = uint4(0u);
        if (key < count) octet = tile_octet(values + key * dim + block * 8, dim - block * 8, wide);
        memory.values[block * kKeys + key] = octet;
    }
}

// 32 tokens from `first` on; kBlocks: runs of 8 dims, at least those of the head.
template <uint kBlocks>
inline void attend_tiles(device const half *query, device const half *query_raw, device half *context,
                         device const ferrum_page *pages, constant ferrum_causal_attention_params &p,
                         thread const tile_memory &memory, uint first, uint head, uint simdgroup, uint lane) {
    const uint dim = p.head_dim, blocks = (dim + 7) / 8, thread_index = simdgroup * FERRUM_SIMD_WIDTH + lane;
    const uint kv_head = ferrum_kv_head(p.tokens_per_page, dim, head / (p.query_heads / p.key_value_heads));

    // Queries. Rows past the last token are zero.
    const bool wide = dim % 8 == 0 && p.query_stride % 8 == 0 && is_aligned(query, 16);
    for (uint i = thread_index; i < kBlockTokens * blocks; i += kBlockThreads) {
        const uint row = i / blocks, block = i % blocks;
        uint4 octet = uint4(0u);
        if (first + row < p.tokens)
            octet = tile_octet(query + ulong(first + row) * p.query_stride + ulong(head) * dim + block * 8,
                               dim - block * 8, wide);
        memory.keys[(row / 8 * blocks + block) * 8 + row % 8] = octet;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_half8x8 q[kBlocks];
    simdgroup_float8x8 sum[kBlocks];
    threadgroup const half *own = (threadgroup const half *)memory.keys + simdgroup * blocks * 64;
    FERRUM_UNROLL for (uint b = 0; b < kBlocks; b++) {
        sum[b] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        if (b < blocks) simdgroup_load(q[b], own + b * 64, 8);
    }

    // Four lanes share a row: its softmax, four keys each.
    const uint row = lane / 4, quarter = lane % 4;
    const uint last_token = min(first + kBlockTokens, p.tokens) - 1;
    const uint token = first + simdgroup * 8 + row;
    const uint position = p.position_start + min(token, last_token), from = first_visible(p, position);
    // Positions that any row of the SIMD-group sees, and any of the threadgroup.
    const uint own_begin = first_visible(p, p.position_start + min(first + simdgroup * 8, last_token));
    const uint own_end = p.position_start + min(first + simdgroup * 8 + 7, last_token) + 1;
    const uint end = p.position_start + last_token + 1;
    const uint begin = first_visible(p, p.position_start + first);
    float most = -INFINITY, total = 0.0f;
    threadgroup const half *keys = (threadgroup const half *)memory.keys;
    threadgroup const half *values = (threadgroup const half *)memory.values;

    uint at = begin - begin % p.tokens_per_page % kKeys;
    while (at < end) {
        const uint slot = at % p.tokens_per_page;
        const uint count = min(ferrum_kv_tile_width(p.tokens_per_page, slot), end - at);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        load_tile(pages[at / p.tokens_per_page].data + kv_head, p, slot, count, blocks, memory, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (at < own_end && at + count > own_begin) {
            simdgroup_float8x8 score[2];
            FERRUM_UNROLL for (uint h = 0; h < 2; h++) score[h] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
            FERRUM_UNROLL for (uint b = 0; b < kBlocks; b++) {
                if (b >= blocks) continue;
                FERRUM_UNROLL for (uint h = 0; h < 2; h++) {
                    simdgroup_half8x8 key;
                    simdgroup_load(key, keys + (h * blocks + b) * 64, 8);
                    simdgroup_multiply_accumulate(score[h], q[b], key, score[h]);
                }
            }
            FERRUM_UNROLL for (uint h = 0; h < 2; h++) simdgroup_store(score[h], memory.scores + 8 * h, kKeys);
            simdgroup_barrier(mem_flags::mem_threadgroup);

            threadgroup float4 *mine = (threadgroup float4 *)(memory.scores + row * kKeys + quarter * 4);
            float4 weight = *mine;
            FERRUM_UNROLL for (uint i = 0; i < 4; i++) {
                const uint key = quarter * 4 + i;
                const bool visible = key < count && at + key >= from && at + key <= position;
                weight[i] = visible ? capped(weight[i] * p.scale, p.softcap) : -INFINITY;
            }
            float tile_most = max(max(weight.x, weight.y), max(weight.z, weight.w));
            tile_most = max(tile_most, simd_shuffle_xor(tile_most, 1));
            tile_most = max(tile_most, simd_shuffle_xor(tile_most, 2));
            tile_most = max(tile_most, most);
            const float base = finite_most(tile_most), factor = exp_of(most - base);
            most = tile_most;
            FERRUM_UNROLL for (uint i = 0; i < 4; i++) weight[i] = exp_of(weight[i] - base);
            total = fma(total, factor, (weight.x + weight.y) + (weight.z + weight.w));
            *mine = weight;
            *(threadgroup float2 *)(memory.factors + row * 8 + quarter * 2) = float2(factor);
            simdgroup_barrier(mem_flags::mem_threadgroup);

            // A product with each element of the same place: whichever lane Metal gives it to.
            simdgroup_float8x8 weights[2], scale;
            FERRUM_UNROLL for (uint h = 0; h < 2; h++) simdgroup_load(weights[h], memory.scores + 8 * h, kKeys);
            simdgroup_load(scale, memory.factors, 8);
            FERRUM_UNROLL for (uint b = 0; b < kBlocks; b++) {
                if (b >= blocks) continue;
                sum[b].thread_elements()[0] *= scale.thread_elements()[0];
                sum[b].thread_elements()[1] *= scale.thread_elements()[1];
                FERRUM_UNROLL for (uint h = 0; h < 2; h++) {
                    simdgroup_half8x8 value;
                    simdgroup_load(value, values + b * kKeys * 8 + h * 64, 8);
                    simdgroup_multiply_accumulate(sum[b], weights[h], value, sum[b]);
                }
            }
        }
        at += count;
    }

    total += simd_shuffle_xor(total, 1);
    total += simd_shuffle_xor(total, 2);
    FERRUM_UNROLL for (uint b = 0; b < kBlocks; b++) {
        if (b >= blocks) continue;
        simdgroup_barrier(mem_flags::mem_threadgroup);
        simdgroup_store(sum[b], memory.scores, 8);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        const uint d = b * 8 + quarter * 2;
        if (token > last_token) continue;
        if (d < dim) store_context(context, query_raw, p, token, head, d, memory.scores[row * 8 + quarter * 2], total);
        if (d + 1 < dim)
            store_context(context, query_raw, p, token, head, d + 1, memory.scores[row * 8 + quarter * 2 + 1], total);
    }
}

kernel void causal_attention_tiles_f16(device const half *query [[buffer(FERRUM_ATTENTION_QUERY)]],
                                       device const half *query_raw [[buffer(FERRUM_ATTENTION_QUERY_RAW)]],
                                       device half *context [[buffer(FERRUM_ATTENTION_CONTEXT)]],
                                       device const ferrum_page *pages [[buffer(FERRUM_ATTENTION_PAGES)]],
                                       constant ferrum_causal_attention_params &p [[buffer(FERRUM_ATTENTION_PARAMS)]],
                                       uint3 group [[threadgroup_position_in_grid]],
                                       uint simdgroup [[simdgroup_index_in_threadgroup]],
                                       uint lane [[thread_index_in_simdgroup]]) {
    FERRUM_THREADGROUP(uint4, tile, 2 * kTileOctets)
    FERRUM_THREADGROUP(float4, scores, 4 * 8 * kKeys / 4)
    FERRUM_THREADGROUP(float4, factors, 4 * 8 * 8 / 4)
    tile_memory memory;
    memory.keys = tile;
    memory.values = tile + kTileOctets;
    memory.scores = (threadgroup float *)scores + simdgroup * 8 * kKeys;
    memory.factors = (threadgroup float *)factors + simdgroup * 8 * 8;
    const uint first = group.x * kBlockTokens;
    if (p.head_dim <= 64)
        attend_tiles<8>(query, query_raw, context, pages, p, memory, first, group.y, simdgroup, lane);
    else if (p.head_dim <= 128)
        attend_tiles<16>(query, query_raw, context, pages, p, memory, first, group.y, simdgroup, lane);
    else
        attend_tiles<32>(query, query_raw, context, pages, p, memory, first, group.y, simdgroup, lane);
}
