// DFlash 2: rings, and blocks packed over them. Grids and layouts: ferrum_kernels.h.
//
// bfloat16 is handled as bits: what is moved keeps them, and what is rounded or widened is so by integer arithmetic, so
// that NaN and subnormal numbers come through on any GPU. Heads have 64, 128 or 256 dims where two of them are taken as
// one word: rows of pages and of new outputs begin at multiples of 128 bytes.
#include "pages.h"

// ---- bfloat16

// To nearest even on the bits; a NaN stays one, which the sum alone would turn into infinity.
inline uint narrow(uint bits) {
    return (bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

// Numbers 2 i and 2 i + 1 of a row, float32 as bits, as one word.
inline uint narrow_pair(device const uint *row, uint i) {
    return narrow(row[2 * i]) | narrow(row[2 * i + 1]) << 16;
}

// ---- Rings

// Where a slot's key lies, its value `value` words further; nowhere where the page is not there.
struct ring_place {
    device const uint *key;
    uint value;
};

inline void find_slot(device const ferrum_page *pages, constant ferrum_dflash2_params &p, uint lane, uint slot,
                      uint head, thread ring_place &place) {
    const ulong number = ulong(lane) * p.window + slot;
    const uint within = uint(number % p.slots_per_page);
    device const half *page = pages[number / p.slots_per_page].data;
    const uint key = ferrum_ring_slot(p.slots_per_page, p.head_dim, head, 0, within);
    place.key = page ? (device const uint *)(page + key) : (device const uint *)page;
    place.value = (ferrum_ring_slot(p.slots_per_page, p.head_dim, head, 1, within) - key) / 2;
}

// A key and a value of a ring to where they are asked for, or zeros.
inline void copy_slot(thread const ring_place &from, bool is_there, device uint *key, device uint *value, uint words,
                      uint lane) {
    for (uint i = lane; i < words; i += FERRUM_SIMD_WIDTH) {
        key[i] = is_there ? from.key[i] : 0u;
        value[i] = is_there ? from.key[from.value + i] : 0u;
    }
}

kernel void dflash2_pack_bf16(device const uint *query [[buffer(FERRUM_DFLASH2_PACK_QUERY)]],
                              device const uint *keys [[buffer(FERRUM_DFLASH2_PACK_KEY)]],
                              device const uint *values [[buffer(FERRUM_DFLASH2_PACK_VALUE)]],
                              device const ferrum_page *pages [[buffer(FERRUM_DFLASH2_PACK_PAGES)]],
                              device const uint *positions [[buffer(FERRUM_DFLASH2_PACK_LANES)]],
                              device uint *packed_query [[buffer(FERRUM_DFLASH2_PACK_PACKED_QUERY)]],
                              device uint *packed_keys [[buffer(FERRUM_DFLASH2_PACK_PACKED_KEY)]],
                              device uint *packed_values [[buffer(FERRUM_DFLASH2_PACK_PACKED_VALUE)]],
                              constant ferrum_dflash2_params &p [[buffer(FERRUM_DFLASH2_PACK_PARAMS)]],
                              uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
    const uint column = group.x, head = group.y % p.key_value_heads, sequence = group.y / p.key_value_heads;
    const uint words = p.head_dim / 2;
    const ulong to = (ulong(group.y) * p.columns + column) * words;
    if (column >= p.rows) {
        const uint length = positions[2 * sequence], write_position = positions[2 * sequence + 1];
        const uint j = column - p.rows, most = p.window - 1;
        ring_place from;
        find_slot(pages, p, sequence, (write_position + most - j) % p.window, head, from);
        copy_slot(from, j < min(length, most) && from.key, packed_keys + to, packed_values + to, words, lane);
        return;
    }
    const ulong row = ulong(sequence) * p.rows + column;
    device const uint *key = keys + (row * p.key_value_heads + head) * p.head_dim;
    device const uint *value = values + (row * p.key_value_heads + head) * p.head_dim;
    for (uint i = lane; i < words; i += FERRUM_SIMD_WIDTH) {
        packed_keys[to + i] = narrow_pair(key, i);
        packed_values[to + i] = narrow_pair(value, i);
    }
    const uint sharing = p.query_heads / p.key_value_heads;
    for (uint h = head * sharing; h < (head + 1) * sharing; h++) {
        device const uint *from = query + (row * p.query_heads + h) * p.head_dim;
        device uint *packed = packed_query + ((ulong(sequence) * p.query_heads + h) * p.rows + column) * words;
        for (uint i = lane; i < words; i += FERRUM_SIMD_WIDTH) packed[i] = narrow_pair(from, i);
    }
}

kernel void dflash2_mask_bf16(device const uint *positions [[buffer(FERRUM_DFLASH2_MASK_LANES)]],
                              device ushort *y [[buffer(FERRUM_DFLASH2_MASK_Y)]],
                              constant ferrum_dflash2_params &p [[buffer(FERRUM_DFLASH2_MASK_PARAMS)]],
                              uint3 group [[threadgroup_position_in_grid]],
                              uint index [[thread_index_in_threadgroup]]) {
    const uint column = group.x * 256 + index;
    if (column >= p.columns) return;
    const uint r = group.y % p.rows, sequence = group.y / p.rows / p.query_heads;
    const uint seen = min(positions[2 * sequence], p.window - 1 - r);
    y[ulong(group.y) * p.columns + column] = column < p.rows + seen ? 0 : 0xff80;
}

// An entry of the table of touched pages.
struct touched_page {
    device const half *source;
    device half *target;
    ulong number;
};

kernel void dflash2_commit_bf16(device const uint *keys [[buffer(FERRUM_DFLASH2_COMMIT_KEY)]],
                                device const uint *values [[buffer(FERRUM_DFLASH2_COMMIT_VALUE)]],
                                device const touched_page *pages [[buffer(FERRUM_DFLASH2_COMMIT_PAGES)]],
                                device const uint *positions [[buffer(FERRUM_DFLASH2_COMMIT_LANES)]],
                                constant ferrum_dflash2_params &p [[buffer(FERRUM_DFLASH2_COMMIT_PARAMS)]],
                                uint3 group [[threadgroup_position_in_grid]],
                                uint index [[thread_index_in_threadgroup]]) {
    device const touched_page &page = pages[group.y];
    const uint within = group.x, words = p.head_dim / 2;
    const ulong number = page.number * p.slots_per_page + within;
    if (number >= ulong(p.lanes) * p.window) return;  // behind the last lane's end
    const uint sequence = uint(number / p.window), slot = uint(number % p.window);
    const uint count = positions[2 * sequence], write_position = positions[2 * sequence + 1];
    const uint row = slot >= write_position ? slot - write_position : slot + p.window - write_position;
    const bool is_new = row < count;
    device const uint *source = (device const uint *)page.source;
    if (!is_new && !source) return;
    device uint *target = (device uint *)page.target;
    const ulong from = (ulong(sequence) * p.rows + row) * p.key_value_heads * p.head_dim;
    for (uint i = index; i < p.key_value_heads * words; i += 256) {
        const uint head = i / words, word = i % words;
        const uint key = ferrum_ring_slot(p.slots_per_page, p.head_dim, head, 0, within) / 2 + word;
        const uint value = ferrum_ring_slot(p.slots_per_page, p.head_dim, head, 1, within) / 2 + word;
        target[key] = is_new ? narrow_pair(keys + from, i) : source[key];
        target[value] = is_new ? narrow_pair(values + from, i) : source[value];
    }
}

kernel void dflash2_gather_bf16(device const ferrum_page *pages [[buffer(FERRUM_DFLASH2_GATHER_PAGES)]],
                                device const uint *positions [[buffer(FERRUM_DFLASH2_GATHER_LANES)]],
                                device uint *keys [[buffer(FERRUM_DFLASH2_GATHER_KEY)]],
                                device uint *values [[buffer(FERRUM_DFLASH2_GATHER_VALUE)]],
                                constant ferrum_dflash2_params &p [[buffer(FERRUM_DFLASH2_GATHER_PARAMS)]],
                                uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
    const uint slot = group.x, head = group.y % p.key_value_heads, sequence = group.y / p.key_value_heads;
    const uint length = positions[2 * sequence], write_position = positions[2 * sequence + 1];
    const uint age = (write_position + p.window - 1 - slot) % p.window;
    const ulong to = (ulong(group.y) * p.window + slot) * (p.head_dim / 2);
    ring_place from;
    find_slot(pages, p, sequence, slot, head, from);
    copy_slot(from, age < length && from.key, keys + to, values + to, p.head_dim / 2, lane);
}
