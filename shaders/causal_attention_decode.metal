// Attention of single query tokens: over all their spans (decode), over one (split), and putting those together
// (combine).
//
// A span is attended by a threadgroup of eight SIMD-groups. Each takes every eighth tile of 16 keys, counted from the
// span's start, with an online softmax of its own; their results are merged in their order, and spans in theirs. All of
// that hangs on absolute positions alone, so decode and split with combine give the same bits.
//
// Inside a tile. Scores: a lane loads the same dim of 8 keys (half of the tile's row of 16) for every sixteenth dim,
// and sums over dims are exchanged so that each lane ends with one key. Values: a lane has 8 dims of a key; as many
// keys as fit into a SIMD-group are taken together. Head dims that are no multiple of 8, and the narrow last tile of a
// page, go element by element. What is masked or not written is loaded perhaps, but never multiplied: it may be NaN.
#include "causal_attention.h"

constant constexpr uint kSimdgroups = FERRUM_ATTENTION_SIMDGROUPS;
constant constexpr uint kTile = FERRUM_KEY_TILE;
constant constexpr uint kMostDim = FERRUM_MAX_HEAD_DIM;
static_assert(kTile == 16, "lanes exchange sums of 16 keys");

// Of the tile: the lane that ends with key `key`'s score (its neighbour two further has it, too), and back.
inline uint lane_of_key(uint key) {
    return key >> 3 | (key & 1) << 2 | (key & 2) << 2 | (key & 4) << 2;
}
inline uint key_of_lane(uint lane) {
    return (lane & 1) << 3 | (lane >> 2 & 7);
}

// query . key of key_of_lane(lane), the tile's keys side by side: `keys` [dim][16], aligned to 16 bytes.
template <uint kDim>
inline float tile_score(device const half *keys, threadgroup const float *query, uint head_dim, uint lane) {
    const uint dim = kDim != 0 ? kDim : head_dim;
    device const half *from = keys + (lane & 1) * 8;
    float4 low = float4(0.0f), high = float4(0.0f);
    if (kDim != 0) {
        FERRUM_UNROLL for (uint i = 0; i < kDim / 16; i++) {
            const uint d = i * 16 + (lane >> 1);
            float4 key_low, key_high;
            load_octet(from + d * kTile, key_low, key_high);
            low = fma(float4(query[d]), key_low, low);
            high = fma(float4(query[d]), key_high, high);
        }
    } else {
        for (uint d = lane >> 1; d < dim; d += 16) {
            float4 key_low, key_high;
            load_octet(from + d * kTile, key_low, key_high);
            low = fma(float4(query[d]), key_low, low);
            high = fma(float4(query[d]), key_high, high);
        }
    }
    // Each exchange halves the keys of a lane and the lanes of a key.
    const bool upper4 = (lane & 16) != 0, upper2 = (lane & 8) != 0, upper1 = (lane & 4) != 0;
    const float4 four = (upper4 ? high : low) + simd_shuffle_xor(upper4 ? low : high, 16);
    const float2 two = (upper2 ? four.zw : four.xy) + simd_shuffle_xor(upper2 ? four.xy : four.zw, 8);
    const float one = (upper1 ? two.y : two.x) + simd_shuffle_xor(upper1 ? two.x : two.y, 4);
    return one + simd_shuffle_xor(one, 2);
}

// The same, key by key: `keys` [dim][width].
inline float narrow_score(device const half *keys, threadgroup const float *query, uint dim, uint width, uint lane) {
    const uint key = key_of_lane(lane);
    float sum = 0.0f;
    if (key < width)
        for (uint d = lane >> 1 & 1; d < dim; d += 2) sum = fma(query[d], float(keys[d * width + key]), sum);
    return sum + simd_shuffle_xor(sum, 2);
}

// One SIMD-group's part of a span: largest score, sum of exponentials, and weighted values of 8 dims.
struct span_part {
    float most, total;
    float4 low, high;
};

// Adds the visible keys [begin, end) of a tile with scores `score`, one a lane. `values` [key][dim].
template <uint kDim>
inline void add_tile(thread span_part &part, device const half *values, float score, uint begin, uint end,
                     uint head_dim, uint lane) {
    const uint dim = kDim != 0 ? kDim : head_dim, octets = (dim + 7) / 8, together = FERRUM_SIMD_WIDTH / octets;
    const bool wide = kDim != 0 || dim % 8 == 0;
    const uint key = key_of_lane(lane);
    const float masked = key >= begin && key < end ? score : -INFINITY;
    const float most = max(part.most, simd_max(masked));
    const float base = finite_most(most), factor = exp_of(part.most - base), weight = exp_of(masked - base);
    part.most = most;
    part.total = fma(part.total, factor, (lane & 2) == 0 ? weight : 0.0f);
    part.low *= factor;
    part.high *= factor;

    const uint mine = lane / octets, octet = lane % octets;
    device const half *from = values + octet * 8;
    if (kDim != 0 && begin == 0 && end == kTile) {
        FERRUM_UNROLL for (uint i = 0; i < kTile; i += together) {
            const float w = simd_shuffle(weight, ushort(lane_of_key(i + mine)));
            float4 low, high;
            load_octet(from + (i + mine) * dim, low, high);
            part.low = fma(float4(w), low, part.low);
            part.high = fma(float4(w), high, part.high);
        }
        return;
    }
    for (uint i = 0; i < end; i += together) {
        const uint at = i + mine;
        const float w = simd_shuffle(weight, ushort(lane_of_key(at % kTile)));
        if (mine >= together || at < begin || at >= end) continue;
        float4 low, high;
        if (wide)
            load_octet(from + at * dim, low, high);
        else
            load_octet(from + at * dim, dim - octet * 8, low, high);
        part.low = fma(float4(w), low, part.low);
        part.high = fma(float4(w), high, part.high);
    }
}

// Threadgroup memory of a span.
struct span_memory {
    threadgroup float *query;   // [kMostDim], scaled
    threadgroup float *values;  // [kSimdgroups][kMostDim]
    threadgroup float2 *sums;   // [kSimdgroups]: largest score, sum
};

// What a span gives: thread t has dim t.
struct span_result {
    float most, total, value;
};

// Keys [begin, end) of span `span`, at least one, for the query in memory.
template <uint kDim>
inline void attend_span(device const ferrum_page *pages, constant ferrum_causal_attention_params &p,
                        thread const span_memory &memory, uint kv_head, uint span, uint begin, uint end, uint simdgroup,
                        uint lane, thread span_result &result) {
    const uint dim = kDim != 0 ? kDim : p.head_dim, per_page = p.tokens_per_page;
    const uint tiles = (per_page + kTile - 1) / kTile;  // of a page
    const uint start = span * p.span_tokens, first_page = start / per_page;
    const uint head = ferrum_kv_head(per_page, dim, kv_head);
    const uint first_tile = (begin - start) / per_page * tiles + (begin - start) % per_page / kTile;
    const uint last_tile = (end - 1 - start) / per_page * tiles + (end - 1 - start) % per_page / kTile;

    span_part part;
    part.most = -INFINITY;
    part.total = 0.0f;
    part.low = float4(0.0f);
    part.high = float4(0.0f);
    for (uint tile = first_tile + (simdgroup - first_tile) % kSimdgroups; tile <= last_tile; tile += kSimdgroups) {
        const uint page = tile / tiles, slot = tile % tiles * kTile;
        const uint position = start + page * per_page + slot, width = ferrum_kv_tile_width(per_page, slot);
        device const half *from = pages[first_page + page].data + head;
        device const half *keys = from + ferrum_kv_key(dim, slot);
        const float score = width == kTile && (kDim != 0 || dim % 8 == 0)
                                ? tile_score<kDim>(keys, memory.query, dim, lane)
                                : narrow_score(keys, memory.query, dim, width, lane);
        add_tile<kDim>(part, from + ferrum_kv_value(per_page, dim, slot), capped(score, p.softcap),
                       begin > position ? begin - position : 0, min(end - position, width), dim, lane);
    }

    // Lanes that have the same dims of other keys, in order.
    const uint octets = (dim + 7) / 8, together = FERRUM_SIMD_WIDTH / octets, octet = lane % octets;
    float4 low = part.low, high = part.high;
    for (uint i = 1; i < together; i++) {
        low += simd_shuffle(part.low, ushort(octet + i * octets));
        high += simd_shuffle(part.high, ushort(octet + i * octets));
    }
    if (lane < octets) {
        threadgroup float4 *to = (threadgroup float4 *)(memory.values + simdgroup * kMostDim + octet * 8);
        to[0] = low;
        to[1] = high;
    }
    const float total = simd_sum(part.total);
    if (lane == 0) memory.sums[simdgroup] = float2(part.most, total);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float most = memory.sums[0].x;
    FERRUM_UNROLL for (uint i = 1; i < kSimdgroups; i++) most = max(most, memory.sums[i].x);
    const float base = finite_most(most);
    const uint d = simdgroup * FERRUM_SIMD_WIDTH + lane;
    result.most = most;
    result.total = 0.0f;
    result.value = 0.0f;
    FERRUM_UNROLL for (uint i = 0; i < kSimdgroups; i++) {
        const float factor = exp_of(memory.sums[i].x - base);  // 0 for a SIMD-group without a tile
        result.total = fma(memory.sums[i].y, factor, result.total);
        if (d < dim) result.value = fma(memory.values[i * kMostDim + d], factor, result.value);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

inline void attend_span(device const ferrum_page *pages, constant ferrum_causal_attention_params &p,
                        thread const span_memory &memory, uint kv_head, uint span, uint begin, uint end, uint simdgroup,
                        uint lane, thread span_result &result) {
    if (p.head_dim == 128)
        attend_span<128>(pages, p, memory, kv_head, span, begin, end, simdgroup, lane, result);
    else if (p.head_dim == 64)
        attend_span<64>(pages, p, memory, kv_head, span, begin, end, simdgroup, lane, result);
    else if (p.head_dim == 256)
        attend_span<256>(pages, p, memory, kv_head, span, begin, end, simdgroup, lane, result);
    else
        attend_span<0>(pages, p, memory, kv_head, span, begin, end, simdgroup, lane, result);
}

// Online softmax: adds a span with largest score `span_most` and sum `span_total`, not 0, to those before it. Gives
// what the values before are to be multiplied with, and those of the span.
inline float2 add_span(thread float &most, thread float &total, float span_most, float span_total) {
    if (total == 0.0f) {  // nothing before
        most = span_most;
        total = span_total;
        return float2(0.0f, 1.0f);
    }
    const float top = max(most, span_most), before = exp_of(most - top), now = exp_of(span_most - top);
    total = fma(total, before, span_total * now);
    most = top;
    return float2(before, now);
}

inline void load_query(device const half *query, constant ferrum_causal_attention_params &p, uint token, uint head,
                       thread const span_memory &memory, uint d) {
    if (d < p.head_dim)
        memory.query[d] = p.scale * float(query[ulong(token) * p.query_stride + ulong(head) * p.head_dim + d]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

#define SPAN_MEMORY(memory)                                            \
    FERRUM_THREADGROUP(float4, span_query, kMostDim / 4)               \
    FERRUM_THREADGROUP(float4, span_values, kSimdgroups *kMostDim / 4) \
    FERRUM_THREADGROUP(float2, span_sums, kSimdgroups)                 \
    span_memory memory;                                                \
    memory.query = (threadgroup float *)span_query;                    \
    memory.values = (threadgroup float *)span_values;                  \
    memory.sums = span_sums;

kernel void causal_attention_decode_f16(device const half *query [[buffer(FERRUM_ATTENTION_QUERY)]],
                                        device const half *query_raw [[buffer(FERRUM_ATTENTION_QUERY_RAW)]],
                                        device half *context [[buffer(FERRUM_ATTENTION_CONTEXT)]],
                                        device const ferrum_page *pages [[buffer(FERRUM_ATTENTION_PAGES)]],
                                        constant ferrum_causal_attention_params &p [[buffer(FERRUM_ATTENTION_PARAMS)]],
                                        uint3 group [[threadgroup_position_in_grid]],
                                        uint simdgroup [[simdgroup_index_in_threadgroup]],
                                        uint lane [[thread_index_in_simdgroup]]) {
    SPAN_MEMORY(memory)
    const uint token = group.x, head = group.y, d = simdgroup * FERRUM_SIMD_WIDTH + lane;
    load_query(query, p, token, head, memory, d);
    const uint end = p.position_start + token + 1, begin = first_visible(p, end - 1);
    float most = 0.0f, total = 0.0f, value = 0.0f;
    for (uint span = begin / p.span_tokens; span <= (end - 1) / p.span_tokens; span++) {
        span_result result;
        attend_span(pages, p, memory, head / (p.query_heads / p.key_value_heads), span,
                    max(begin, span * p.span_tokens), min(end, (span + 1) * p.span_tokens), simdgroup, lane, result);
        if (result.total == 0.0f) continue;
        const float2 factors = add_span(most, total, result.most, result.total);
        value = fma(value, factors.x, result.value * factors.y);
    }
    if (d < p.head_dim) store_context(context, query_raw, p, token, head, d, value, total);
}

// Threadgroups that follow each other read the same keys: all tokens and heads of a span and a key head, so that the
// caches serve all but the first.
kernel void causal_attention_split_f16(device const half *query [[buffer(FERRUM_SPLIT_QUERY)]],
                                       device const ferrum_page *pages [[buffer(FERRUM_SPLIT_PAGES)]],
                                       device float *partials [[buffer(FERRUM_SPLIT_PARTIALS)]],
                                       constant ferrum_causal_attention_params &p [[buffer(FERRUM_SPLIT_PARAMS)]],
                                       uint3 group [[threadgroup_position_in_grid]],
                                       uint simdgroup [[simdgroup_index_in_threadgroup]],
                                       uint lane [[thread_index_in_simdgroup]]) {
    SPAN_MEMORY(memory)
    const uint sharing = p.query_heads / p.key_value_heads;
    uint index = group.x + p.spans * (group.y + p.query_heads * group.z);
    const uint token = index % p.tokens;
    index /= p.tokens;
    const uint head_of_group = index % sharing;
    index /= sharing;
    const uint kv_head = index / p.spans, head = kv_head * sharing + head_of_group, offset = index % p.spans;
    const uint d = simdgroup * FERRUM_SIMD_WIDTH + lane;

    const uint span = p.first_span + offset, last = p.position_start + token;
    const uint begin = max(first_visible(p, last), span * p.span_tokens),
               end = min(last + 1, (span + 1) * p.span_tokens);
    device float *partial = partials + ((ulong(token) * p.query_heads + head) * p.spans + offset) * p.partial_stride;
    device float *sums = partial + (p.partial_stride - 16);
    if (begin >= end) {  // this token sees nothing of the span
        if (d == 0) {
            sums[0] = 0.0f;
            sums[1] = 0.0f;
        }
        return;
    }
    load_query(query, p, token, head, memory, d);
    span_result result;
    attend_span(pages, p, memory, kv_head, span, begin, end, simdgroup, lane, result);
    if (d < p.head_dim) partial[d] = result.value;
    if (d == 0) {
        sums[0] = result.most;
        sums[1] = result.total;
    }
}

kernel void causal_attention_combine_f16(device const float *partials [[buffer(FERRUM_COMBINE_PARTIALS)]],
                                         device const half *query_raw [[buffer(FERRUM_COMBINE_QUERY_RAW)]],
                                         device half *context [[buffer(FERRUM_COMBINE_CONTEXT)]],
                                         constant ferrum_causal_attention_params &p [[buffer(FERRUM_COMBINE_PARAMS)]],
                                         uint3 group [[threadgroup_position_in_grid]],
                                         uint lane [[thread_index_in_simdgroup]]) {
    const uint token = group.x, head = group.y;
    device const float *partial = partials + (ulong(token) * p.query_heads + head) * p.spans * p.partial_stride;
    float most = 0.0f, total = 0.0f;
    float4 value[2] = {float4(0.0f), float4(0.0f)};  // dims 4 lane …, and those 128 further
    for (uint span = 0; span < p.spans; span++, partial += p.partial_stride) {
        device const float *sums = partial + (p.partial_stride - 16);
        if (sums[1] == 0.0f) continue;
        const float2 factors = add_span(most, total, sums[0], sums[1]);
        FERRUM_UNROLL for (uint i = 0; i < 2; i++) {
            const uint d = i * 128 + lane * 4;
            if (d < p.head_dim)
                value[i] = fma(value[i], float4(factors.x), *(device const float4 *)(partial + d) * factors.y);
        }
    }
    FERRUM_UNROLL for (uint i = 0; i < 8; i++) {
        const uint d = i / 4 * 128 + lane * 4 + i % 4;
        if (d < p.head_dim) store_context(context, query_raw, p, token, head, d, value[i / 4][i % 4], total);
    }
}
