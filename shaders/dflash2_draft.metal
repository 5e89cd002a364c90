// DFlash 2: what a draft layer does beside: attention over a packed block, rows, convolution, heads, selection. Grids
// and layouts: ferrum_kernels.h.
#include "common.h"

inline float widened(ushort bits) {
    return as_type<float>(uint(bits) << 16);
}

// ---- Attention: a threadgroup a row and head

constant constexpr uint kSimdgroups = 8;
constant constexpr uint kTogether = 4;  // columns that a SIMD-group takes at once

// Dims lane * kDims … of a row. `kWide`: pairs of them lie on addresses of their own size.
template <uint kDims, bool kWide>
inline void load_dims(device const ushort *row, uint lane, thread float (&to)[kDims]) {
    device const ushort *from = row + lane * kDims;
    FERRUM_UNROLL for (uint i = 0; i < kDims / 2; i++) {
        const uint pair = kWide ? ((device const uint *)from)[i] : uint(from[2 * i]) | uint(from[2 * i + 1]) << 16;
        to[2 * i] = as_type<float>(pair << 16);
        to[2 * i + 1] = as_type<float>(pair & 0xffff0000u);
    }
}

// Softmax over every eighth run of columns, counted from the SIMD-group's own: the sums so far are scaled down when a
// larger score comes. A lane has kDims dims of the query and of the context.
template <uint kDims, bool kWide>
inline void attend_columns(device const ushort *query, device const ushort *keys, device const ushort *values,
                           device const ushort *mask, constant ferrum_dflash2_attention_params &p,
                           threadgroup float *contexts, threadgroup float2 *sums, uint simdgroup, uint lane) {
    float q[kDims], context[kDims];
    load_dims<kDims, kWide>(query, lane, q);
    FERRUM_UNROLL for (uint i = 0; i < kDims; i++) context[i] = 0.0f;
    float most = -INFINITY, total = 0.0f;
    for (uint begin = simdgroup * kTogether; begin < p.columns; begin += kSimdgroups * kTogether) {
        float4 bias = float4(-INFINITY), score = float4(0.0f);
        FERRUM_UNROLL for (uint j = 0; j < kTogether; j++) {
            if (begin + j < p.columns) bias[j] = widened(mask[begin + j]);
            if (bias[j] == -INFINITY) continue;  // not read: it may hold anything
            float key[kDims];
            load_dims<kDims, kWide>(keys + ulong(begin + j) * (kDims * FERRUM_SIMD_WIDTH), lane, key);
            FERRUM_UNROLL for (uint i = 0; i < kDims; i++) score[j] = fma(q[i], key[i], score[j]);
        }
        score = fma(simd_sum(score), float4(p.scale), bias);
        const float top = max(most, max(max(score.x, score.y), max(score.z, score.w)));
        const float base = top == -INFINITY ? 0.0f : top, shrink = exp_of(most - base);
        most = top;
        total *= shrink;
        FERRUM_UNROLL for (uint i = 0; i < kDims; i++) context[i] *= shrink;
        FERRUM_UNROLL for (uint j = 0; j < kTogether; j++) {
            if (bias[j] == -INFINITY) continue;
            const float weight = exp_of(score[j] - base);
            float value[kDims];
            load_dims<kDims, kWide>(values + ulong(begin + j) * (kDims * FERRUM_SIMD_WIDTH), lane, value);
            total += weight;
            FERRUM_UNROLL for (uint i = 0; i < kDims; i++) context[i] = fma(weight, value[i], context[i]);
        }
    }
    FERRUM_UNROLL for (uint i = 0; i < kDims; i++) contexts[(simdgroup * FERRUM_SIMD_WIDTH + lane) * kDims + i] =
        context[i];
    if (lane == 0) sums[simdgroup] = float2(most, total);
}

template <uint kDims>
inline void attend_columns(device const ushort *query, device const ushort *keys, device const ushort *values,
                           device const ushort *mask, constant ferrum_dflash2_attention_params &p,
                           threadgroup float *contexts, threadgroup float2 *sums, uint simdgroup, uint lane) {
    if (is_aligned(query, 4) && is_aligned(keys, 4) && is_aligned(values, 4))
        attend_columns<kDims, true>(query, keys, values, mask, p, contexts, sums, simdgroup, lane);
    else
        attend_columns<kDims, false>(query, keys, values, mask, p, contexts, sums, simdgroup, lane);
}

kernel void dflash2_attention_bf16(device const ushort *query [[buffer(FERRUM_DFLASH2_ATTENTION_QUERY)]],
                                   device const ushort *keys [[buffer(FERRUM_DFLASH2_ATTENTION_KEY)]],
                                   device const ushort *values [[buffer(FERRUM_DFLASH2_ATTENTION_VALUE)]],
                                   device const ushort *mask [[buffer(FERRUM_DFLASH2_ATTENTION_MASK)]],
                                   device half *y [[buffer(FERRUM_DFLASH2_ATTENTION_Y)]],
                                   constant ferrum_dflash2_attention_params &p
                                   [[buffer(FERRUM_DFLASH2_ATTENTION_PARAMS)]],
                                   uint3 group [[threadgroup_position_in_grid]],
                                   uint index [[thread_index_in_threadgroup]],
                                   uint simdgroup [[simdgroup_index_in_threadgroup]],
                                   uint lane [[thread_index_in_simdgroup]]) {
    FERRUM_THREADGROUP(float, contexts, kSimdgroups *FERRUM_MAX_HEAD_DIM)
    FERRUM_THREADGROUP(float2, sums, kSimdgroups)  // largest score, sum of exponentials
    const uint dim = p.head_dim, head = group.y % p.query_heads, sequence = group.y / p.query_heads;
    const ulong item = ulong(group.y) * p.rows + group.x;
    const uint kv_head = head / (p.query_heads / p.key_value_heads);
    const ulong columns = (ulong(sequence) * p.key_value_heads + kv_head) * p.columns * dim;
    query += item * dim;
    keys += columns;
    values += columns;
    mask += item * p.columns;
    if (dim == 128)
        attend_columns<4>(query, keys, values, mask, p, contexts, sums, simdgroup, lane);
    else if (dim == 64)
        attend_columns<2>(query, keys, values, mask, p, contexts, sums, simdgroup, lane);
    else
        attend_columns<8>(query, keys, values, mask, p, contexts, sums, simdgroup, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (index >= dim) return;
    float most = sums[0].x;
    FERRUM_UNROLL for (uint i = 1; i < kSimdgroups; i++) most = max(most, sums[i].x);
    const float base = most == -INFINITY ? 0.0f : most;
    float total = 0.0f, value = 0.0f;
    FERRUM_UNROLL for (uint i = 0; i < kSimdgroups; i++) {
        const float factor = exp_of(sums[i].x - base);  // 0 for a SIMD-group that saw nothing
        total = fma(sums[i].y, factor, total);
        value = fma(contexts[i * dim + index], factor, value);
    }
    y[((ulong(sequence) * p.rows + group.x) * p.query_heads + head) * dim + index] = half(total == 0.0f ? 0.0f : value / total);
}

// ---- Rows of a block

kernel void dflash2_mask_rows_f32(device const uint *hidden [[buffer(FERRUM_DFLASH2_MASK_ROWS_HIDDEN)]],
                                  device const ushort *embedding [[buffer(FERRUM_DFLASH2_MASK_ROWS_EMBEDDING)]],
                                  device uint *y [[buffer(FERRUM_DFLASH2_MASK_ROWS_Y)]],
                                  constant ferrum_dflash2_mask_rows_params &p
                                  [[buffer(FERRUM_DFLASH2_MASK_ROWS_PARAMS)]],
                                  uint3 group [[threadgroup_position_in_grid]],
                                  uint index [[thread_index_in_threadgroup]]) {
    const uint i = group.x * 256 + index;
    if (i >= p.width) return;
    const ulong at = ulong(group.y) * p.width + i;
    y[at] = group.y % p.rows == 0 ? hidden[at] : uint(embedding[i]) << 16;
}

kernel void dflash2_conv_f16(device const half *x [[buffer(FERRUM_DFLASH2_CONV_X)]],
                             device const float *base [[buffer(FERRUM_DFLASH2_CONV_BASE)]],
                             device const float *dynamic [[buffer(FERRUM_DFLASH2_CONV_DYNAMIC)]],
                             device half *y [[buffer(FERRUM_DFLASH2_CONV_Y)]],
                             constant ferrum_dflash2_conv_params &p [[buffer(FERRUM_DFLASH2_CONV_PARAMS)]],
                             uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]]) {
    const uint c = group.x * 256 + index, row = group.y;
    if (c >= p.width) return;
    const uint taps = min(row % p.block + 1, p.taps), channels = c / (p.width / p.groups);
    base += ulong(p.side) * p.taps * p.width + c;
    dynamic += (ulong(row) * 2 + p.side) * p.taps * p.groups + channels;
    float total = 0.0f;
    for (uint tap = 0; tap < taps; tap++)
        total =
            fma(base[ulong(tap) * p.width] + dynamic[tap * p.groups], float(x[ulong(row - tap) * p.width + c]), total);
    y[ulong(row) * p.width + c] = half(total);
}

inline float head_weight(device const uchar *norm, uint d) {
    return constant_query_norm_f32 ? ((device const float *)norm)[d] : float(((device const half *)norm)[d]);
}

kernel void dflash2_heads_f32(device const float *x [[buffer(FERRUM_DFLASH2_HEADS_X)]],
                              device const uchar *norm
                              [[buffer(FERRUM_DFLASH2_HEADS_NORM), function_constant(constant_query_norm)]],
                              device const float *angles [[buffer(FERRUM_DFLASH2_HEADS_ANGLES)]],
                              device float *y [[buffer(FERRUM_DFLASH2_HEADS_Y)]],
                              constant ferrum_dflash2_heads_params &p [[buffer(FERRUM_DFLASH2_HEADS_PARAMS)]],
                              uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
    const ulong at = (ulong(group.y) * p.heads + group.x) * p.head_dim;
    const uint pairs = p.head_dim / 2;
    x += at;
    y += at;
    angles += ulong(group.y) * p.head_dim;
    float scale = 1.0f;
    if (constant_query_norm) {
        float squares = 0.0f;
        for (uint d = lane; d < p.head_dim; d += FERRUM_SIMD_WIDTH) squares = fma(x[d], x[d], squares);
        scale = 1.0f / precise::sqrt(simd_sum(squares) / float(p.head_dim) + p.epsilon);
    }
    for (uint i = lane; i < pairs; i += FERRUM_SIMD_WIDTH) {
        float low = x[i], high = x[i + pairs];
        if (constant_query_norm) {
            low *= scale * head_weight(norm, i);
            high *= scale * head_weight(norm, i + pairs);
        }
        const float cosine = angles[2 * i], sine = angles[2 * i + 1];
        y[i] = low * cosine - high * sine;
        y[i + pairs] = high * cosine + low * sine;
    }
}

// ---- Selection: a threadgroup a lane. SIMD-groups score candidates; then every thread walks over all of them, as
// there are few, and finds the same choice without telling the others.

kernel void dflash2_select_f32(device const int *ids [[buffer(FERRUM_DFLASH2_SELECT_IDS)]],
                               device const float *values [[buffer(FERRUM_DFLASH2_SELECT_VALUES)]],
                               device const float *hidden [[buffer(FERRUM_DFLASH2_SELECT_HIDDEN)]],
                               device const float *predecessors [[buffer(FERRUM_DFLASH2_SELECT_PREDECESSORS)]],
                               device const float *successors [[buffer(FERRUM_DFLASH2_SELECT_SUCCESSORS)]],
                               device const float *uniforms [[buffer(FERRUM_DFLASH2_SELECT_UNIFORMS)]],
                               device int *tokens [[buffer(FERRUM_DFLASH2_SELECT_TOKENS)]],
                               device float *probabilities [[buffer(FERRUM_DFLASH2_SELECT_PROBABILITIES)]],
                               constant ferrum_dflash2_select_params &p [[buffer(FERRUM_DFLASH2_SELECT_PARAMS)]],
                               uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
                               uint simdgroup [[simdgroup_index_in_threadgroup]],
                               uint lane [[thread_index_in_simdgroup]]) {
    FERRUM_THREADGROUP(float, scores, FERRUM_DFLASH2_MAX_CANDIDATES)
    FERRUM_THREADGROUP(float, weights, FERRUM_DFLASH2_MAX_CANDIDATES)
    const uint k = p.candidates;
    predecessors += ulong(group.x) * (1 + (p.steps - 1) * k) * p.rank;
    ulong previous = 0;
    for (uint t = 0; t < p.steps; t++) {
        const ulong step = ulong(group.x) * p.steps + t;
        for (uint c = simdgroup; c < k; c += kSimdgroups) {
            device const float *successor = successors + (step * k + c) * p.rank;
            float sum = 0.0f;
            for (uint i = lane; i < p.rank; i += FERRUM_SIMD_WIDTH)
                sum = fma(predecessors[previous + i] * hidden[step * p.rank + i], successor[i], sum);
            sum = simd_sum(sum);
            if (lane == 0) scores[c] = values[step * k + c] + sum;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint choice = 0;
        for (uint c = 1; c < k; c++)
            if (scores[c] > scores[choice]) choice = c;
        if (p.temperature != 0.0f) {
            if (index < k) weights[index] = exp_of((scores[index] - scores[choice]) / p.temperature);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            float total = 0.0f, running = 0.0f;
            for (uint c = 0; c < k; c++) total += weights[c];
            const float target = uniforms[step] * total;
            for (uint c = 0; c < k && !(running > target); c++) {
                running += weights[c];
                if (weights[c] > 0.0f) choice = c;  // never one of probability zero, wherever rounding ends the search
            }
            if (index < k) probabilities[step * k + index] = weights[index] / total;
        } else if (index < k) {
            probabilities[step * k + index] = index == choice ? 1.0f : 0.0f;
        }
        if (index == 0) tokens[step] = ids[step * k + choice];
        previous = (1 + ulong(t) * k + choice) * p.rank;
        threadgroup_barrier(mem_flags::mem_threadgroup);  // the scores have been read
    }
}
