// Per-head norms and rotary embedding of queries and keys; keys and values into the pages. A SIMD-group takes one head
// of one token: the queries' heads, then the keys', then the values'.
#include "pages.h"

// Value d of a head after norm and rotation. `values`: the head after its norm.
inline float rotated(threadgroup const float *values, device const float2 *low, device const float2 *high,
                     uint rope_dim, uint d) {
    if (d >= rope_dim) return values[d];
    const uint pairs = rope_dim / 2;
    const uint pair = constant_rope_interleaved ? d / 2 : (d < pairs ? d : d - pairs);
    const bool first = constant_rope_interleaved ? d % 2 == 0 : d < pairs;
    const uint distance = constant_rope_interleaved ? 1 : pairs;
    const float x = values[d], partner = values[first ? d + distance : d - distance];
    // The angle is a sum of two, and so are cosine and sine of it.
    const float2 a = low[pair], b = high[pair];
    const float cosine = fma(a.x, b.x, -(a.y * b.y)), sine = fma(a.y, b.x, a.x * b.y);
    return first ? fma(x, cosine, -(partner * sine)) : fma(x, cosine, partner * sine);
}

kernel void causal_attention_prepare_f16(
    device const half *query_raw [[buffer(FERRUM_PREPARE_QUERY_RAW)]],
    device const half *key_raw [[buffer(FERRUM_PREPARE_KEY_RAW)]],
    device const half *value_raw [[buffer(FERRUM_PREPARE_VALUE_RAW)]],
    device const uchar *query_norm [[buffer(FERRUM_PREPARE_QUERY_NORM), function_constant(constant_query_norm)]],
    device const uchar *key_norm [[buffer(FERRUM_PREPARE_KEY_NORM), function_constant(constant_key_norm)]],
    device const float2 *rope [[buffer(FERRUM_PREPARE_ROPE)]], device half *query [[buffer(FERRUM_PREPARE_QUERY)]],
    device const ferrum_page *pages [[buffer(FERRUM_PREPARE_PAGES)]],
    constant ferrum_causal_attention_params &p [[buffer(FERRUM_PREPARE_PARAMS)]],
    uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
    FERRUM_THREADGROUP(float, values, FERRUM_MAX_HEAD_DIM)
    const uint token = group.x, position = p.position_start + token, slot = position % p.tokens_per_page;
    const bool is_query = group.y < p.query_heads, is_value = group.y >= p.query_heads + p.key_value_heads;
    const uint head = is_query ? group.y : (group.y - p.query_heads) % p.key_value_heads;
    const uint dim = p.head_dim;
    const ulong key_value = ulong(token) * p.key_value_stride + ulong(head) * dim;

    device half *page_head = pages[position / p.tokens_per_page].data + ferrum_kv_head(p.tokens_per_page, dim, head);
    if (is_value) {
        device half *to = page_head + ferrum_kv_value(p.tokens_per_page, dim, slot);
        for (uint d = lane; d < dim; d += FERRUM_SIMD_WIDTH) to[d] = value_raw[key_value + d];
        return;
    }

    device const half *raw = is_query
                                 ? query_raw + ulong(token) * p.query_raw_stride + ulong(head) * p.query_head_stride
                                 : key_raw + key_value;
    float squares = 0.0f;
    for (uint d = lane; d < dim; d += FERRUM_SIMD_WIDTH) {
        const float v = float(raw[d]);
        values[d] = v;
        squares = fma(v, v, squares);
    }
    const bool normed = is_query ? bool(constant_query_norm) : bool(constant_key_norm);
    if (normed) {
        const float scale = 1.0f / precise::sqrt(simd_sum(squares) / float(dim) + p.epsilon);
        for (uint d = lane; d < dim; d += FERRUM_SIMD_WIDTH) {
            float weight = 1.0f;
            if (is_query) {
                if (constant_query_norm)
                    weight = constant_query_norm_f32 ? ((device const float *)query_norm)[d]
                                                     : float(((device const half *)query_norm)[d]);
            } else if (constant_key_norm) {
                weight = constant_key_norm_f32 ? ((device const float *)key_norm)[d]
                                               : float(((device const half *)key_norm)[d]);
            }
            values[d] = values[d] * scale * weight;
        }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);  // a pair's halves lie in two lanes

    const uint pairs = p.rope_dim / 2;
    device const float2 *low = rope + ulong(position % FERRUM_ROPE_LOW) * pairs;
    device const float2 *high = rope + ulong(FERRUM_ROPE_LOW + position / FERRUM_ROPE_LOW) * pairs;
    device half *to =
        is_query ? query + ulong(token) * p.query_stride + ulong(head) * dim : page_head + ferrum_kv_key(dim, slot);
    const uint step = is_query ? 1 : ferrum_kv_tile_width(p.tokens_per_page, slot);
    for (uint d = lane; d < dim; d += FERRUM_SIMD_WIDTH) to[d * step] = half(rotated(values, low, high, p.rope_dim, d));
}
