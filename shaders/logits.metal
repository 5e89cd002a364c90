// What is done with logits: cross-entropy, argmax, top-k. A threadgroup of 256 threads takes a row.
#include "common.h"

constant constexpr uint kRowThreads = 256;
constant constexpr uint kRowSimdgroups = kRowThreads / FERRUM_SIMD_WIDTH;

// ---- Cross-entropy

// Sums of two floats each, what rounding took from the first in the second: the error does not grow with the
// vocabulary, and a target that has nearly all of the probability still gets its loss to float32's relative accuracy.
inline float2 add_sums(float2 a, float2 b) {
    float2 sum = two_sum(a.x, b.x);
    sum.y += a.y + b.y;
    return sum;
}

// log(sum.x + sum.y), at least 1: its exponent, and a series for what is left of it.
inline float log_of_sum(float2 sum) {
    const uint bits = as_type<uint>(sum.x);
    const uint exponent = (bits - 0x3f3504f3u) >> 23;  // such that the rest is in [sqrt(1/2), sqrt(2))
    const float power = as_type<float>((127u - exponent) << 23);
    const float u = (sum.x * power - 1.0f) + sum.y * power;
    const float s = u / (2.0f + u), s2 = s * s;  // log(1 + u) = 2 artanh(s)
    float series = 1.0f / 11.0f;
    series = fma(series, s2, 1.0f / 9.0f);
    series = fma(series, s2, 1.0f / 7.0f);
    series = fma(series, s2, 1.0f / 5.0f);
    series = fma(series, s2, 1.0f / 3.0f);
    const float rest = 2.0f * fma(series * s2, s, s);
    const float n = float(exponent);
    return fma(n, 0.693145751953125f, fma(n, 1.42860682030941723e-6f, rest));
}

kernel void cross_entropy_f32(device const float *logits [[buffer(FERRUM_CROSS_ENTROPY_LOGITS)]],
                              device const int *targets [[buffer(FERRUM_CROSS_ENTROPY_TARGETS)]],
                              device float *loss [[buffer(FERRUM_CROSS_ENTROPY_LOSS)]],
                              constant ferrum_rows_params &p [[buffer(FERRUM_CROSS_ENTROPY_PARAMS)]],
                              uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
                              uint simdgroup [[simdgroup_index_in_threadgroup]],
                              uint lane [[thread_index_in_simdgroup]]) {
    FERRUM_THREADGROUP(float, largest, kRowSimdgroups)
    FERRUM_THREADGROUP(float2, sums, kRowSimdgroups)
    device const float *row = logits + ulong(group.x) * p.width;
    float most = -INFINITY;
    for (uint i = index; i < p.width; i += kRowThreads) most = max(most, row[i]);
    most = simd_max(most);
    if (lane == 0) largest[simdgroup] = most;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    FERRUM_UNROLL for (uint i = 0; i < kRowSimdgroups; i++) most = max(most, largest[i]);

    float2 sum = float2(0.0f);
    for (uint i = index; i < p.width; i += kRowThreads) sum = add_sums(sum, float2(exp_of(row[i] - most), 0.0f));
    FERRUM_UNROLL for (uint distance = 16; distance > 0; distance /= 2) sum =
        add_sums(sum, simd_shuffle_xor(sum, ushort(distance)));
    if (lane == 0) sums[simdgroup] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (index != 0) return;
    for (uint i = 1; i < kRowSimdgroups; i++) sum = add_sums(sum, sums[i]);
    // NaN has no exponent to take apart.
    const float logarithm = sum.x == sum.x ? log_of_sum(two_sum(sum.x, sum.y)) : sum.x;
    loss[group.x] = logarithm + (most - row[targets[group.x]]);
}

// ---- Order

// Unsigned numbers in the order of values: NaN above all, the two zeros equal. 0 is no value's.
inline uint order_of(float value) {
    const uint bits = as_type<uint>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0xffffffffu;
    if (bits == 0x80000000u) return 0x80000000u;
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// Does (a, at index a_index) come before b? The larger one; of equals that of lower index.
inline bool precedes(uint a, uint a_index, uint b, uint b_index) {
    return a > b || (a == b && a_index < b_index);
}

kernel void argmax_f32(device const float *x [[buffer(FERRUM_TOP_K_X)]],
                       device uint *indices [[buffer(FERRUM_TOP_K_INDICES)]],
                       constant ferrum_rows_params &p [[buffer(FERRUM_TOP_K_PARAMS)]],
                       uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
                       uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    FERRUM_THREADGROUP(uint2, bests, kRowSimdgroups)
    device const float *row = x + ulong(group.x) * p.width;
    uint2 best = uint2(0u, 0xffffffffu);  // order, index
    for (uint i = index; i < p.width; i += kRowThreads) {
        const uint order = order_of(row[i]);
        if (order > best.x) best = uint2(order, i);
    }
    FERRUM_UNROLL for (uint distance = 16; distance > 0; distance /= 2) {
        const uint2 other = simd_shuffle_xor(best, ushort(distance));
        if (precedes(other.x, other.y, best.x, best.y)) best = other;
    }
    if (lane == 0) bests[simdgroup] = best;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (index != 0) return;
    for (uint i = 1; i < kRowSimdgroups; i++)
        if (precedes(bests[i].x, bests[i].y, best.x, best.y)) best = bests[i];
    indices[group.x] = best.y;
}

// ---- Top-k: the k-th in order is found four bits at a time, those up to it are gathered, then sorted.

// `memory` [kRowSimdgroups][16]. How many of all threads' `counts[j]` there are, for every j; fits all threads.
// Gives the largest j with at least `wanted`, counting from 1; 0 if there is none.
inline uint largest_digit(thread const uint (&counts)[15], uint wanted, threadgroup uint *memory, uint simdgroup,
                          uint lane) {
    FERRUM_UNROLL for (uint j = 0; j < 15; j++) {
        const uint count = simd_sum(counts[j]);
        if (lane == 0) memory[simdgroup * 16 + j] = count;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint digit = 0;
    for (uint j = 15; j > 0 && digit == 0; j--) {
        uint total = 0;
        for (uint i = 0; i < kRowSimdgroups; i++) total += memory[i * 16 + j - 1];
        if (total >= wanted) digit = j;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return digit;
}

// The sum of `count` over the threads before this one.
inline uint count_before(uint count, threadgroup uint *memory, uint simdgroup, uint lane) {
    const uint before = simd_prefix_exclusive_sum(count);
    if (lane == FERRUM_SIMD_WIDTH - 1) memory[simdgroup] = before + count;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint sum = before;
    for (uint i = 0; i < simdgroup; i++) sum += memory[i];
    return sum;
}

kernel void top_k_f32(device const float *x [[buffer(FERRUM_TOP_K_X)]],
                      device uint *indices [[buffer(FERRUM_TOP_K_INDICES)]],
                      device float *values [[buffer(FERRUM_TOP_K_VALUES)]],
                      constant ferrum_rows_params &p [[buffer(FERRUM_TOP_K_PARAMS)]],
                      uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    FERRUM_THREADGROUP(uint, memory, kRowSimdgroups * 16)
    FERRUM_THREADGROUP(uint2, found, FERRUM_MAX_TOP_K)  // order, index
    device const float *row = x + ulong(group.x) * p.width;

    // The order of the k-th, `least`: the largest number that at least k values reach.
    uint least = 0;
    for (uint round = 0; round < 8; round++) {
        const uint shift = 28 - 4 * round;
        uint counts[15];
        FERRUM_UNROLL for (uint j = 0; j < 15; j++) counts[j] = 0;
        for (uint i = index; i < p.width; i += kRowThreads) {
            const uint order = order_of(row[i]);
            const uint digit = order >= least ? min((order - least) >> shift, 15u) : 0;
            FERRUM_UNROLL for (uint j = 0; j < 15; j++) counts[j] += digit > j ? 1 : 0;
        }
        least += largest_digit(counts, p.k, memory, simdgroup, lane) << shift;
    }

    // Values above it are all taken; of equal ones those of lowest index, up to `last`.
    uint above = 0;
    for (uint i = index; i < p.width; i += kRowThreads) above += order_of(row[i]) > least ? 1 : 0;
    above = simd_sum(above);
    if (lane == 0) memory[simdgroup] = above;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint wanted = p.k;
    for (uint i = 0; i < kRowSimdgroups; i++) wanted -= memory[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint first = 0;  // the largest index such that at least `wanted` equal ones lie at or past it, counted from the end
    for (uint round = 0; round < 8; round++) {
        const uint shift = 28 - 4 * round;
        if (p.width >> shift == 0) continue;
        uint counts[15];
        FERRUM_UNROLL for (uint j = 0; j < 15; j++) counts[j] = 0;
        for (uint i = index; i < p.width; i += kRowThreads) {
            if (order_of(row[i]) != least) continue;
            const uint from_end = p.width - 1 - i;
            const uint digit = from_end >= first ? min((from_end - first) >> shift, 15u) : 0;
            FERRUM_UNROLL for (uint j = 0; j < 15; j++) counts[j] += digit > j ? 1 : 0;
        }
        first += largest_digit(counts, wanted, memory, simdgroup, lane) << shift;
    }
    const uint last = p.width - 1 - first;

    uint mine = 0;
    for (uint i = index; i < p.width; i += kRowThreads) {
        const uint order = order_of(row[i]);
        mine += order > least || (order == least && i <= last) ? 1 : 0;
    }
    uint at = count_before(mine, memory, simdgroup, lane);
    for (uint i = index; i < p.width; i += kRowThreads) {
        const uint order = order_of(row[i]);
        if (order > least || (order == least && i <= last)) found[at++] = uint2(order, i);
    }

    // Bitonic sort of a power of two; what fills it up comes last.
    uint size = 1;
    while (size < p.k) size *= 2;
    for (uint i = p.k + index; i < size; i += kRowThreads) found[i] = uint2(0u, 0xffffffffu);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint run = 2; run <= size; run *= 2) {
        for (uint distance = run / 2; distance > 0; distance /= 2) {
            for (uint i = index; i < size / 2; i += kRowThreads) {
                const uint a = i / distance * 2 * distance + i % distance, b = a + distance;
                const bool in_order = !precedes(found[b].x, found[b].y, found[a].x, found[a].y);
                if (in_order != ((a & run) == 0)) {
                    const uint2 swapped = found[a];
                    found[a] = found[b];
                    found[b] = swapped;
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
    }
    for (uint i = index; i < p.k; i += kRowThreads) {
        indices[ulong(group.x) * p.k + i] = found[i].y;
        values[ulong(group.x) * p.k + i] = row[found[i].y];
    }
}
