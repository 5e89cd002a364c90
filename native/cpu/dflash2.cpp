// DFlash 2: rings, packed attention, convolution, heads, selection. What they compute: ferrum_kernels.h.
#include <math.h>

#include "../include/ferrum_kv_layout.h"
#include "kernels.h"
#include "simd_math.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

namespace {

// To nearest even on the bits; a NaN stays one, which the sum alone would turn into infinity.
bfloat narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return {(uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded)};
}

void narrow(bfloat *to, const float *from, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) to[i] = narrow(from[i]);
}

// The page-local start of a slot's key and value of one head; NULL where the page is not there.
struct Slot {
    bfloat *key, *value;
};
Slot slot_of(const ferrum_dflash2_params &p, const uint64_t *pages, uint32_t lane, uint32_t slot, uint32_t head) {
    const uint64_t number = (uint64_t)lane * p.window + slot;
    auto *page = (bfloat *)pages[number / p.slots_per_page];
    if (!page) return {nullptr, nullptr};
    const uint32_t local = (uint32_t)(number % p.slots_per_page);
    return {page + ferrum_ring_slot(p.slots_per_page, p.head_dim, head, 0, local),
            page + ferrum_ring_slot(p.slots_per_page, p.head_dim, head, 1, local)};
}

}  // namespace

void dflash2_pack_bf16(const Call &call, Worker &worker) {
    const auto &p = call.params<ferrum_dflash2_params>();
    const uint32_t dim = p.head_dim, group = p.query_heads / p.key_value_heads;
    worker.for_each((uint64_t)p.lanes * p.key_value_heads * p.columns, 16, [&](uint64_t item) {
        const uint32_t c = (uint32_t)(item % p.columns), h = (uint32_t)(item / p.columns % p.key_value_heads),
                       lane = (uint32_t)(item / p.columns / p.key_value_heads);
        bfloat *key = call.at<bfloat>(FERRUM_DFLASH2_PACK_PACKED_KEY) + item * dim;
        bfloat *value = call.at<bfloat>(FERRUM_DFLASH2_PACK_PACKED_VALUE) + item * dim;
        if (c < p.rows) {
            const uint64_t row = (uint64_t)lane * p.rows + c;
            narrow(key, call.at<const float>(FERRUM_DFLASH2_PACK_KEY) + (row * p.key_value_heads + h) * dim, dim);
            narrow(value, call.at<const float>(FERRUM_DFLASH2_PACK_VALUE) + (row * p.key_value_heads + h) * dim, dim);
            for (uint32_t q = h * group; q < (h + 1) * group; q++)
                narrow(call.at<bfloat>(FERRUM_DFLASH2_PACK_PACKED_QUERY) +
                           (((uint64_t)lane * p.query_heads + q) * p.rows + c) * dim,
                       call.at<const float>(FERRUM_DFLASH2_PACK_QUERY) + (row * p.query_heads + q) * dim, dim);
            return;
        }
        const uint32_t *position = call.at<const uint32_t>(FERRUM_DFLASH2_PACK_LANES) + 2 * lane;
        const uint32_t j = c - p.rows, most = p.window - 1;
        Slot from = {nullptr, nullptr};
        if (j < (position[0] < most ? position[0] : most))
            from = slot_of(p, call.at<const uint64_t>(FERRUM_DFLASH2_PACK_PAGES), lane,
                           (position[1] + most - j) % p.window, h);
        if (from.key) {
            memcpy(key, from.key, dim * sizeof(bfloat));
            memcpy(value, from.value, dim * sizeof(bfloat));
        } else {
            memset(key, 0, dim * sizeof(bfloat));
            memset(value, 0, dim * sizeof(bfloat));
        }
    });
}

void dflash2_mask_bf16(const Call &call, Worker &worker) {
    const auto &p = call.params<ferrum_dflash2_params>();
    worker.for_each((uint64_t)p.lanes * p.query_heads * p.rows, 4, [&](uint64_t item) {
        const uint32_t r = (uint32_t)(item % p.rows), lane = (uint32_t)(item / p.rows / p.query_heads);
        const uint32_t length = call.at<const uint32_t>(FERRUM_DFLASH2_MASK_LANES)[2 * lane];
        const uint32_t in_reach = p.window - 1 - r, seen = length < in_reach ? length : in_reach;
        bfloat *y = call.at<bfloat>(FERRUM_DFLASH2_MASK_Y) + item * p.columns;
        for (uint32_t c = 0; c < p.columns; c++) y[c].bits = c < p.rows + seen ? 0 : 0xff80;
    });
}

void dflash2_commit_bf16(const Call &call, Worker &worker) {
    const auto &p = call.params<ferrum_dflash2_params>();
    const uint64_t pages = call.launch->grid[1], dim = p.head_dim;
    worker.for_each(pages * p.slots_per_page, 16, [&](uint64_t item) {
        const uint64_t *page = call.at<const uint64_t>(FERRUM_DFLASH2_COMMIT_PAGES) + item / p.slots_per_page * 3;
        const uint32_t local = (uint32_t)(item % p.slots_per_page);
        const uint64_t number = page[2] * p.slots_per_page + local;
        if (number >= (uint64_t)p.lanes * p.window) return;
        const uint32_t lane = (uint32_t)(number / p.window), slot = (uint32_t)(number % p.window);
        const uint32_t *position = call.at<const uint32_t>(FERRUM_DFLASH2_COMMIT_LANES) + 2 * lane;
        const uint64_t row = ((uint64_t)slot + p.window - position[1]) % p.window;
        const bool is_new = row < position[0];
        if (!is_new && !page[0]) return;
        for (uint32_t h = 0; h < p.key_value_heads; h++) {
            const uint32_t key = ferrum_ring_slot(p.slots_per_page, p.head_dim, h, 0, local);
            const uint32_t value = ferrum_ring_slot(p.slots_per_page, p.head_dim, h, 1, local);
            bfloat *to = (bfloat *)page[1];
            if (is_new) {
                const uint64_t at = (((uint64_t)lane * p.rows + row) * p.key_value_heads + h) * dim;
                narrow(to + key, call.at<const float>(FERRUM_DFLASH2_COMMIT_KEY) + at, p.head_dim);
                narrow(to + value, call.at<const float>(FERRUM_DFLASH2_COMMIT_VALUE) + at, p.head_dim);
            } else {
                memcpy(to + key, (const bfloat *)page[0] + key, dim * sizeof(bfloat));
                memcpy(to + value, (const bfloat *)page[0] + value, dim * sizeof(bfloat));
            }
        }
    });
}

void dflash2_gather_bf16(const Call &call, Worker &worker) {
    const auto &p = call.params<ferrum_dflash2_params>();
    const uint32_t dim = p.head_dim;
    worker.for_each((uint64_t)p.lanes * p.key_value_heads * p.window, 16, [&](uint64_t item) {
        const uint32_t slot = (uint32_t)(item % p.window), h = (uint32_t)(item / p.window % p.key_value_heads),
                       lane = (uint32_t)(item / p.window / p.key_value_heads);
        const uint32_t *position = call.at<const uint32_t>(FERRUM_DFLASH2_GATHER_LANES) + 2 * lane;
        const uint64_t age = ((uint64_t)position[1] + p.window - 1 - slot) % p.window;
        Slot from = {nullptr, nullptr};
        if (age < position[0]) from = slot_of(p, call.at<const uint64_t>(FERRUM_DFLASH2_GATHER_PAGES), lane, slot, h);
        bfloat *key = call.at<bfloat>(FERRUM_DFLASH2_GATHER_KEY) + item * dim;
        bfloat *value = call.at<bfloat>(FERRUM_DFLASH2_GATHER_VALUE) + item * dim;
        if (from.key) {
            memcpy(key, from.key, dim * sizeof(bfloat));
            memcpy(value, from.value, dim * sizeof(bfloat));
        } else {
            memset(key, 0, dim * sizeof(bfloat));
            memset(value, 0, dim * sizeof(bfloat));
        }
    });
}

void dflash2_mask_rows_f32(const Call &call, Worker &worker) {
    const auto &p = call.params<ferrum_dflash2_mask_rows_params>();
    worker.for_each((uint64_t)p.lanes * p.rows, 2, [&](uint64_t row) {
        float *y = call.at<float>(FERRUM_DFLASH2_MASK_ROWS_Y) + row * p.width;
        if (row % p.rows == 0) {
            memcpy(y, call.at<const float>(FERRUM_DFLASH2_MASK_ROWS_HIDDEN) + row * p.width, p.width * sizeof(float));
            return;
        }
        const bfloat *mask = call.at<const bfloat>(FERRUM_DFLASH2_MASK_ROWS_EMBEDDING);
        for (uint32_t i = 0; i < p.width; i += kLanes)
            store_up_to(y + i, load_up_to(mask + i, p.width - i), p.width - i);
    });
}

// Softmax over columns in steps of a vector of scores: the sums so far are scaled down when a larger score comes.
void dflash2_attention_bf16(const Call &call, Worker &worker) {
    const auto &p = call.params<ferrum_dflash2_attention_params>();
    const uint32_t dim = p.head_dim, vectors = dim / kLanes, group = p.query_heads / p.key_value_heads;
    worker.for_each((uint64_t)p.lanes * p.query_heads * p.rows, 1, [&](uint64_t item) {
        const uint32_t r = (uint32_t)(item % p.rows), h = (uint32_t)(item / p.rows % p.query_heads),
                       lane = (uint32_t)(item / p.rows / p.query_heads);
        const uint64_t head = ((uint64_t)lane * p.key_value_heads + h / group) * p.columns * dim;
        const bfloat *query = call.at<const bfloat>(FERRUM_DFLASH2_ATTENTION_QUERY) + item * dim;
        const bfloat *keys = call.at<const bfloat>(FERRUM_DFLASH2_ATTENTION_KEY) + head;
        const bfloat *values = call.at<const bfloat>(FERRUM_DFLASH2_ATTENTION_VALUE) + head;
        const bfloat *mask = call.at<const bfloat>(FERRUM_DFLASH2_ATTENTION_MASK) + item * p.columns;
        f32x16 q[FERRUM_MAX_HEAD_DIM / kLanes], context[FERRUM_MAX_HEAD_DIM / kLanes];
        for (uint32_t i = 0; i < vectors; i++) {
            q[i] = load(query + i * kLanes);
            context[i] = splat(0.0f);
        }
        float most = -__builtin_inff(), total = 0;
        for (uint32_t begin = 0; begin < p.columns; begin += kLanes) {
            const uint32_t count = p.columns - begin < kLanes ? p.columns - begin : kLanes;
            float bias[kLanes], scores[kLanes];
            store(bias, load_some(mask + begin, (int)count));
            for (uint32_t c = 0; c < kLanes; c++) {
                scores[c] = -__builtin_inff();
                if (c >= count || bias[c] == -__builtin_inff()) continue;
                f32x16 dot = splat(0.0f);
                for (uint32_t i = 0; i < vectors; i++)
                    dot = fma(q[i], load(keys + (uint64_t)(begin + c) * dim + i * kLanes), dot);
                scores[c] = sum(dot) * p.scale + bias[c];
            }
            const float peak = largest(load(scores));
            if (peak == -__builtin_inff()) continue;
            if (peak > most) {
                const f32x16 shrink = exp(splat(most - peak));
                for (uint32_t i = 0; i < vectors; i++) context[i] = context[i] * shrink;
                float lanes[kLanes];
                store(lanes, shrink);
                total *= lanes[0];
                most = peak;
            }
            float weights[kLanes];
            store(weights, exp(load(scores) - splat(most)));
            for (uint32_t c = 0; c < count; c++) {
                if (scores[c] == -__builtin_inff()) continue;
                total += weights[c];
                for (uint32_t i = 0; i < vectors; i++)
                    context[i] =
                        fma(splat(weights[c]), load(values + (uint64_t)(begin + c) * dim + i * kLanes), context[i]);
            }
        }
        half *y = call.at<half>(FERRUM_DFLASH2_ATTENTION_Y) + (((uint64_t)lane * p.rows + r) * p.query_heads + h) * dim;
        const f32x16 divisor = splat(total == 0 ? 1.0f : total);  // a row that sees no column is zero
        for (uint32_t i = 0; i < vectors; i++) store(y + i * kLanes, context[i] / divisor);
    });
}

void dflash2_conv_f16(const Call &call, Worker &worker) {
    const auto &p = call.params<ferrum_dflash2_conv_params>();
    const uint32_t size = p.width / p.groups;
    worker.for_each(p.rows, 2, [&](uint64_t row) {
        const uint32_t above = (uint32_t)(row % p.block), taps = above + 1 < p.taps ? above + 1 : p.taps;
        const half *x = call.at<const half>(FERRUM_DFLASH2_CONV_X) + row * p.width;
        const float *base = call.at<const float>(FERRUM_DFLASH2_CONV_BASE) + (uint64_t)p.side * p.taps * p.width;
        const float *dynamic =
            call.at<const float>(FERRUM_DFLASH2_CONV_DYNAMIC) + (row * 2 + p.side) * p.taps * p.groups;
        half *y = call.at<half>(FERRUM_DFLASH2_CONV_Y) + row * p.width;
        for (uint32_t g = 0; g < p.groups; g++)
            for (uint32_t i = 0; i < size; i += kLanes) {
                const uint32_t c = g * size + i;
                const uint64_t count = size - i;
                f32x16 total = splat(0.0f);
                for (uint32_t tap = 0; tap < taps; tap++)
                    total =
                        fma(load_up_to(base + (uint64_t)tap * p.width + c, count) + splat(dynamic[tap * p.groups + g]),
                            load_up_to(x - (uint64_t)tap * p.width + c, count), total);
                store_up_to(y + c, total, count);
            }
    });
}

void dflash2_heads_f32(const Call &call, Worker &worker) {
    const auto &p = call.params<ferrum_dflash2_heads_params>();
    const uint32_t pairs = p.head_dim / 2;
    worker.for_each((uint64_t)p.rows * p.heads, 4, [&](uint64_t item) {
        const float *x = call.at<const float>(FERRUM_DFLASH2_HEADS_X) + item * p.head_dim;
        const float *angles = call.at<const float>(FERRUM_DFLASH2_HEADS_ANGLES) + item / p.heads * p.head_dim;
        float *y = call.at<float>(FERRUM_DFLASH2_HEADS_Y) + item * p.head_dim;
        float normed[FERRUM_MAX_HEAD_DIM];
        memcpy(normed, x, p.head_dim * sizeof(float));
        if (call.constant(FERRUM_CONSTANT_QUERY_NORM)) {
            float squares = 0;
            for (uint32_t d = 0; d < p.head_dim; d++) squares += x[d] * x[d];
            const float scale = 1.0f / __builtin_sqrtf(squares / (float)p.head_dim + p.epsilon);
            for (uint32_t d = 0; d < p.head_dim; d++)
                normed[d] = x[d] * scale *
                            (call.constant(FERRUM_CONSTANT_QUERY_NORM_F32)
                                 ? call.at<const float>(FERRUM_DFLASH2_HEADS_NORM)[d]
                                 : (float)call.at<const half>(FERRUM_DFLASH2_HEADS_NORM)[d]);
        }
        for (uint32_t i = 0; i < pairs; i++) {
            const float cosine = angles[2 * i], sine = angles[2 * i + 1], low = normed[i], high = normed[i + pairs];
            y[i] = low * cosine - high * sine;
            y[i + pairs] = high * cosine + low * sine;
        }
    });
}

void dflash2_select_f32(const Call &call, Worker &worker) {
    const auto &p = call.params<ferrum_dflash2_select_params>();
    const uint32_t k = p.candidates;
    worker.for_each(p.lanes, 1, [&](uint64_t lane) {
        const float *predecessors = call.at<const float>(FERRUM_DFLASH2_SELECT_PREDECESSORS) +
                                    lane * (1 + (uint64_t)(p.steps - 1) * k) * p.rank;
        const float *previous = predecessors;
        for (uint32_t t = 0; t < p.steps; t++) {
            const uint64_t step = lane * p.steps + t;
            const float *values = call.at<const float>(FERRUM_DFLASH2_SELECT_VALUES) + step * k;
            const float *hidden = call.at<const float>(FERRUM_DFLASH2_SELECT_HIDDEN) + step * p.rank;
            const float *successors = call.at<const float>(FERRUM_DFLASH2_SELECT_SUCCESSORS) + step * k * p.rank;
            float *q = call.at<float>(FERRUM_DFLASH2_SELECT_PROBABILITIES) + step * k;
            float scores[FERRUM_DFLASH2_MAX_CANDIDATES];
            uint32_t choice = 0;
            for (uint32_t c = 0; c < k; c++) {
                f32x16 dot = splat(0.0f);
                for (uint32_t i = 0; i < p.rank; i += kLanes) {
                    const uint64_t left = p.rank - i;
                    dot = fma(load_up_to(previous + i, left) * load_up_to(hidden + i, left),
                              load_up_to(successors + (uint64_t)c * p.rank + i, left), dot);
                }
                scores[c] = values[c] + sum(dot);
                if (scores[c] > scores[choice]) choice = c;
            }
            const float best = scores[choice];
            if (p.temperature == 0) {
                for (uint32_t c = 0; c < k; c++) q[c] = c == choice ? 1.0f : 0.0f;
            } else {
                float total = 0;
                for (uint32_t c = 0; c < k; c++) {
                    float lanes[kLanes];
                    store(lanes, exp(splat((scores[c] - best) / p.temperature)));
                    q[c] = lanes[0];
                    total += q[c];
                }
                const float target = call.at<const float>(FERRUM_DFLASH2_SELECT_UNIFORMS)[step] * total;
                float running = 0;
                bool found = false;
                for (uint32_t c = 0; c < k && !found; c++) {
                    running += q[c];
                    if (q[c] > 0) choice = c;  // never one of probability zero, wherever rounding lets the search end
                    found = running > target;
                }
                for (uint32_t c = 0; c < k; c++) q[c] /= total;
            }
            call.at<int32_t>(FERRUM_DFLASH2_SELECT_TOKENS)[step] =
                call.at<const int32_t>(FERRUM_DFLASH2_SELECT_IDS)[step * k + choice];
            previous = predecessors + (1 + (uint64_t)t * k + choice) * p.rank;
        }
    });
}

}  // namespace ferrum::cpu::FERRUM_CPU_ISA
