// Attention of many rows of a key head: the keys and values of a span are laid out side by side once, and groups of
// twelve rows go through them. What a group works on stays in the first cache: its queries, [dim][row], and its scores,
// [tile of 16 keys][row][16]. So every operand of the inner loops lies at a constant distance from a running pointer.
#pragma once

#include "attention_ahead.h"
#include "simd_integers.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

namespace {

// Sums in registers: rows by vectors, of keys or of a value's dims.
constexpr int kTileRows = kRegisterLanes == 16 ? kGroupRows : kGroupRows / 2;
constexpr int kTileVectors = kRegisterLanes == 16 ? 2 : 1;
constexpr uint32_t kScoreTile = kGroupRows * kLanes;  // floats

// Up to twelve rows of a block, and the span they go through. Keys are counted from the span's beginning.
struct Group {
    const Block &block;
    uint32_t rows;
    const float *query;
    float *acc, *most, *total;
    Range any, all;  // keys that some row sees, and that every row does
    Range visible[kGroupRows];
    float before[kLanes], now[kLanes];
    Join how[kGroupRows];
    Ahead &ahead;
    bool fetches;  // one group of a block does
    const half *take(uint32_t elements) const { return ahead.take(fetches ? elements : 0); }
};

// Queries, [group][dim][row]. Stores reach past a group's rows, into the next dim, so dims go in order.
void lay_out_queries(const Block &block) {
    const Params &p = block.p;
    for (uint32_t first = 0; first < block.rows(); first += kGroupRows) {
        float *to = block.query + (uint64_t)first * block.temp.padded_dim;
        for (uint32_t d = 0; d < p.head_dim; d += kLanes) {
            i32x16 square[kLanes] = {};
            for (uint32_t r = 0; r < kGroupRows && first + r < block.rows(); r++) {
                const f32x16 v = load_up_to(block.query_of(first + r) + d, p.head_dim - d) * splat(p.scale);
                memcpy(&square[r], &v, sizeof(v));
            }
            transpose(square);
            for (int i = 0; i < kLanes; i++) memcpy(to + (d + i) * kGroupRows, &square[i], sizeof(square[i]));
        }
    }
}

// Keys, [dim][key of the span]. Lanes past a tile's keys are written too: the next tile comes after.
void gather_keys(const Block &block, Range span, Range seen) {
    const Params &p = block.p;
    const uint32_t dim = p.head_dim, stride = block.temp.key_stride;
    for (uint32_t at = seen.begin; at < seen.end;) {
        const uint32_t slot = at % p.tokens_per_page, width = ferrum_kv_tile_width(p.tokens_per_page, slot);
        const half *from = page_of(block.pages, p.tokens_per_page, at) +
                           ferrum_kv_head(p.tokens_per_page, dim, block.kv_head) + ferrum_kv_key(dim, slot);
        uint32_t tokens = width - slot % FERRUM_KEY_TILE;
        if (seen.end - at < tokens) tokens = seen.end - at;  // keys behind them may not be written yet
        half *to = block.keys + (at - span.begin);
        if (tokens == FERRUM_KEY_TILE)
            for (uint32_t d = 0; d < dim; d++)
                memcpy(to + d * stride, from + d * FERRUM_KEY_TILE, FERRUM_KEY_TILE * sizeof(half));
        else
            for (uint32_t d = 0; d < dim; d++) store(to + d * stride, load_some(from + d * width, (int)tokens));
        at += tokens;
    }
}

// Values, [key of the span][dim].
void gather_values(const Block &block, Range span, Range seen) {
    const Params &p = block.p;
    const uint32_t dim = p.head_dim, padded = block.temp.padded_dim;
    half *to = block.values + (uint64_t)(seen.begin - span.begin) * padded;
    for (uint32_t at = seen.begin; at < seen.end;) {
        const uint32_t slot = at % p.tokens_per_page, left = p.tokens_per_page - slot;
        const uint32_t end = seen.end - at < left ? seen.end : at + left;
        const half *from = page_of(block.pages, p.tokens_per_page, at) +
                           ferrum_kv_head(p.tokens_per_page, dim, block.kv_head) +
                           ferrum_kv_value(p.tokens_per_page, dim, slot);
        const uint64_t count = (uint64_t)(end - at) * dim;
        if (dim == padded)
            memcpy(to, from, count * sizeof(half));
        else
            for (uint32_t j = 0; j < end - at; j++)
                for (uint32_t d = 0; d < dim; d += kLanes)
                    store(to + (uint64_t)j * padded + d, load_up_to(from + j * dim + d, dim - d));
        to += (uint64_t)(end - at) * padded;
        at = end;
    }
}

// Scores of a few vectors of keys against kRows rows; lanes that no row sees hold anything.
template <int kRows, int kVectors>
FERRUM_ALWAYS_INLINE void score_tile(const float *query, const half *keys, uint32_t stride, uint32_t dim, float *scores,
                                     const half *next) {
    f32x16 acc[kRows][kVectors];
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (int v = 0; v < kVectors; v++) acc[r][v] =
        splat(0.0f);
    for (uint32_t d = 0; d < dim; d++, query += kGroupRows, keys += stride, next += kVectors * kLanes) {
        f32x16 key[kVectors];
        __builtin_prefetch(next);
        FERRUM_UNROLL for (int v = 0; v < kVectors; v++) key[v] = load(keys + v * kLanes);
        FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
            const f32x16 q = splat(query[r]);
            FERRUM_UNROLL for (int v = 0; v < kVectors; v++) acc[r][v] = fma(q, key[v], acc[r][v]);
        }
    }
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (int v = 0; v < kVectors; v++)
        store(scores + v * kScoreTile + r * kLanes, acc[r][v]);
}

void score(const Group &group) {
    const Block &block = group.block;
    const uint32_t end = (group.any.end + kLanes - 1) / kLanes;
    in_groups<kTileVectors>(
        group.any.begin / kLanes, end, [&](auto vectors, uint32_t tile) __attribute__((always_inline)) {
            in_groups<kTileRows>(0, group.rows, [&](auto rows, uint32_t row) __attribute__((always_inline)) {
                score_tile<decltype(rows)::value, decltype(vectors)::value>(
                    group.query + row, block.keys + tile * kLanes, block.temp.key_stride, block.p.head_dim,
                    block.scores + tile * kScoreTile + row * kLanes,
                    group.take(row == 0 ? block.p.head_dim * decltype(vectors)::value * kLanes : 0));
            });
        });
}

// Scores become exponentials against the row's largest, and its sums join those of earlier spans.
void exponentials(Group &group) {
    const float cap = group.block.p.softcap;
    alignas(64) float most[kLanes] = {}, total[kLanes] = {};
    for (uint32_t r = 0; r < group.rows; r++) {
        const Range keys = group.visible[r];
        if (keys.begin >= keys.end) continue;
        float *scores = group.block.scores + r * kLanes;
        const uint32_t first = keys.begin / kLanes, end = (keys.end + kLanes - 1) / kLanes;
        if (cap != 0)
            for (uint32_t i = first; i < end; i++)
                store(scores + i * kScoreTile, soft_cap(load(scores + i * kScoreTile), cap));
        for (uint32_t i = first * kLanes; i < keys.begin; i++)
            scores[first * kScoreTile + i % kLanes] = -__builtin_inff();
        for (uint32_t i = keys.end; i < end * kLanes; i++)
            scores[(end - 1) * kScoreTile + i % kLanes] = -__builtin_inff();
        f32x16 top = splat(kNoScore);
        for (uint32_t i = first; i < end; i++) top = max(load(scores + i * kScoreTile), top);
        most[r] = largest(top);
    }
    for (uint32_t r = 0; r < group.rows; r++) {
        const Range keys = group.visible[r];
        if (keys.begin >= keys.end) continue;
        float *scores = group.block.scores + r * kLanes;
        f32x16 sums = splat(0.0f);
        for (uint32_t i = keys.begin / kLanes; i < (keys.end + kLanes - 1) / kLanes; i++) {
            const f32x16 e = exp_below(load(scores + i * kScoreTile) - splat(most[r]));
            sums = sums + e;
            store(scores + i * kScoreTile, e);
        }
        total[r] = sum(sums);
    }
    join_sums(group.rows, group.most, group.total, most, total, group.before, group.now, group.how);
}

// Values that rows [row, row + kRows) see, weighted, from dim d on; they join those of earlier spans.
template <int kRows, int kVectors>
FERRUM_ALWAYS_INLINE void weigh_tile(const Group &group, uint32_t row, uint32_t d) {
    const Block &block = group.block;
    const uint32_t padded = block.temp.padded_dim;
    f32x16 acc[kRows][kVectors];
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (int v = 0; v < kVectors; v++) acc[r][v] =
        splat(0.0f);
    for (uint32_t j = group.any.begin; j < group.any.end;) {
        const float *weights = block.scores + j / kLanes * kScoreTile + row * kLanes + j % kLanes;
        const half *values = block.values + (uint64_t)j * padded + d;
        f32x16 value[kVectors];
        if (j < group.all.begin || j >= group.all.end) {  // a value is read for those alone that see it: it may be NaN
            FERRUM_UNROLL for (int v = 0; v < kVectors; v++) value[v] = load(values + v * kLanes);
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
                const Range keys = group.visible[row + r];
                if (j < keys.begin || j >= keys.end) continue;
                FERRUM_UNROLL for (int v = 0; v < kVectors; v++) acc[r][v] =
                    fma(splat(weights[r * kLanes]), value[v], acc[r][v]);
            }
            j++;
            continue;
        }
        uint32_t end = (j / kLanes + 1) * kLanes;
        if (end > group.all.end) end = group.all.end;
        const half *next = group.take(row == 0 ? (end - j) * kVectors * kLanes : 0);
        for (; j < end; j++, weights++, values += padded, next += kVectors * kLanes) {
            __builtin_prefetch(next);
            FERRUM_UNROLL for (int v = 0; v < kVectors; v++) value[v] = load(values + v * kLanes);
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
                const f32x16 weight = splat(weights[r * kLanes]);
                FERRUM_UNROLL for (int v = 0; v < kVectors; v++) acc[r][v] = fma(weight, value[v], acc[r][v]);
            }
        }
    }
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (int v = 0; v < kVectors; v++)
        join_values(group.acc + (row + r) * padded + d + v * kLanes, acc[r][v], group.how[row + r],
                    group.before[row + r], group.now[row + r]);
}

void weigh(const Group &group) {
    const uint32_t vectors = group.block.temp.padded_dim / kLanes;
    in_groups<kTileRows>(0, group.rows, [&](auto rows, uint32_t row) __attribute__((always_inline)) {
        in_groups<kTileVectors>(0, vectors, [&](auto count, uint32_t v) __attribute__((always_inline)) {
            weigh_tile<decltype(rows)::value, decltype(count)::value>(group, row, v * kLanes);
        });
    });
}

void attend_many(const Block &block, Range span, Ahead &ahead) {
    const Range seen = block.seen(span);
    gather_keys(block, span, seen);
    gather_values(block, span, seen);
    for (uint32_t first = 0; first < block.rows(); first += kGroupRows) {
        const uint32_t left = block.rows() - first;
        const uint64_t at = (uint64_t)first * block.temp.padded_dim;
        Group group{block,
                    left < kGroupRows ? left : kGroupRows,
                    block.query + at,
                    block.acc + at,
                    block.most + first,
                    block.total + first,
                    {},
                    {},
                    {},
                    {},
                    {},
                    {},
                    ahead,
                    first == 0};
        for (uint32_t r = 0; r < group.rows; r++) {
            const Range keys = block.visible((first + r) / block.temp.group, span);
            group.visible[r] = {keys.begin - span.begin, keys.end > span.begin ? keys.end - span.begin : 0};
        }
        const Range &earliest = group.visible[0], &latest = group.visible[group.rows - 1];
        group.any = {earliest.begin, latest.end};
        group.all = {latest.begin, earliest.end};
        if (group.any.begin >= group.any.end) continue;
        score(group);
        exponentials(group);
        weigh(group);
    }
}

}  // namespace

}  // namespace ferrum::cpu::FERRUM_CPU_ISA
