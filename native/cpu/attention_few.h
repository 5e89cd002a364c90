// Attention of a few rows of a key head, straight from the pages. Memory sets the pace: scores go over several tiles of
// keys at a time, while these keys' values are fetched; values then, while the keys that come next are fetched.
#pragma once

#include "causal_attention.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

namespace {

// Sums in registers: rows by tiles of keys, and rows by four vectors of a value.
constexpr int kDirectRows = kRegisterLanes == 16 ? 4 : 2;
constexpr int kDirectTiles = kRegisterLanes == 16 ? 6 : 2;
constexpr int kDirectVectors = 4;
static_assert(kDirectTiles * FERRUM_KEY_TILE <= kCopiedKeys);

bool reads_pages(const Block &block) {
    return block.rows() <= (kRegisterLanes == 16 ? 12 : 4) && block.p.head_dim % kLanes == 0;
}

// Queries, [row][padded_dim].
void scale_queries(const Block &block) {
    for (uint32_t row = 0; row < block.rows(); row++)
        for (uint32_t d = 0; d < block.p.head_dim; d += kLanes)
            store(block.query + row * block.temp.padded_dim + d, load(block.query_of(row) + d) * splat(block.p.scale));
}

// Tiles of keys, [dim][16] each, and where in the span they begin. Lanes past a tile's keys hold zero. Meanwhile the
// keys of the tiles that follow and the values of these are fetched.
struct KeyTiles {
    const half *keys[kDirectTiles];
    uint32_t at[kDirectTiles];
    const half *next[kDirectTiles], *values[kDirectTiles];
};

// Scores of kTiles tiles from number `first` against kRows rows, [row][key of the span].
template <int kRows, int kTiles>
FERRUM_ALWAYS_INLINE void score_rows(const Block &block, uint32_t row, const KeyTiles &tiles, uint32_t first) {
    const uint32_t padded = block.temp.padded_dim;
    f32x16 acc[kRows][kTiles];
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (int t = 0; t < kTiles; t++) acc[r][t] =
        splat(0.0f);
    const float *query = block.query + (uint64_t)row * padded;
    const half *keys[kTiles];
    FERRUM_UNROLL for (int t = 0; t < kTiles; t++) keys[t] = tiles.keys[first + t];
    const uint32_t dim = block.p.head_dim;
    uint32_t d = 0;
    for (int fetch = 0; fetch < kTiles; fetch++) {  // a tile after the other, as they lie in memory
        const half *next = tiles.next[first + fetch], *values = tiles.values[first + fetch];
        for (const uint32_t end = (fetch + 1) * dim / kTiles; d < end; d++) {
            FERRUM_UNROLL for (int line = 0; line < kTiles; line += 2) __builtin_prefetch(values + line * kLanes, 0, 2);
            if (!block.keys_fetched)
                FERRUM_UNROLL for (int line = 0; line < kTiles; line += 2)
                    __builtin_prefetch(next + line * kLanes, 0, 2);
            next += kTiles * kLanes;
            values += kTiles * kLanes;
            f32x16 key[kTiles];
            FERRUM_UNROLL for (int t = 0; t < kTiles; t++) key[t] = load(keys[t] + d * FERRUM_KEY_TILE);
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
                const f32x16 q = splat(query[r * padded + d]);
                FERRUM_UNROLL for (int t = 0; t < kTiles; t++) acc[r][t] = fma(q, key[t], acc[r][t]);
            }
        }
    }
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (int t = 0; t < kTiles; t++)
        store(block.scores + (uint64_t)(row + r) * block.temp.score_stride + tiles.at[first + t], acc[r][t]);
}

// Scores of every key in `seen`, for every row of the block: those that a row does not see included.
void score_pages(const Block &block, Range span, Range seen) {
    const Params &p = block.p;
    const uint32_t dim = p.head_dim, head = ferrum_kv_head(p.tokens_per_page, dim, block.kv_head);
    for (uint32_t at = seen.begin; at < seen.end;) {
        KeyTiles tiles;
        uint32_t count = 0;
        for (; count < (uint32_t)kDirectTiles && at < seen.end; count++) {
            const uint32_t slot = at % p.tokens_per_page, width = ferrum_kv_tile_width(p.tokens_per_page, slot);
            const half *page = page_of(block.pages, p.tokens_per_page, at) + head;
            const half *keys = page + ferrum_kv_key(dim, slot);
            uint32_t tokens = width - slot % FERRUM_KEY_TILE;
            if (seen.end - at < tokens) tokens = seen.end - at;
            tiles.at[count] = at - span.begin;
            tiles.keys[count] = keys;
            if (tokens < FERRUM_KEY_TILE) {  // keys behind them may not be written yet, and are not read
                half *copy = (half *)block.keys + count * dim * FERRUM_KEY_TILE;
                for (uint32_t d = 0; d < dim; d++)
                    store(copy + d * FERRUM_KEY_TILE, load_some(keys + d * width, (int)tokens));
                tiles.keys[count] = copy;
            }
            tiles.values[count] = page + ferrum_kv_value(p.tokens_per_page, dim, slot);
            at += tokens;
        }
        for (uint32_t t = 0; t < count; t++) {
            const uint32_t then = at + t * FERRUM_KEY_TILE, slot = then % p.tokens_per_page;
            tiles.next[t] = then < p.position_start + p.tokens
                                ? page_of(block.pages, p.tokens_per_page, then) + head + ferrum_kv_key(dim, slot)
                                : tiles.keys[t];
        }
        in_groups<kDirectTiles>(0, count, [&](auto count_, uint32_t first) __attribute__((always_inline)) {
            in_groups<kDirectRows>(0, block.rows(), [&](auto rows, uint32_t row) __attribute__((always_inline)) {
                score_rows<decltype(rows)::value, decltype(count_)::value>(block, row, tiles, first);
            });
        });
    }
}

// Scores become exponentials against the row's largest.
void exponentials(const Block &block, Range span, float *most, float *total) {
    for (uint32_t row = 0; row < block.rows(); row++) {
        const Range keys = block.visible(row / block.temp.group, span);
        if (keys.begin >= keys.end) continue;
        float *scores = block.scores + (uint64_t)row * block.temp.score_stride;
        const uint32_t from = keys.begin - span.begin, to = keys.end - span.begin;
        const uint32_t start = from / kLanes * kLanes, stop = (to + kLanes - 1) / kLanes * kLanes;
        if (block.p.softcap != 0)
            for (uint32_t i = start; i < stop; i += kLanes)
                store(scores + i, soft_cap(load(scores + i), block.p.softcap));
        for (uint32_t i = start; i < from; i++) scores[i] = -__builtin_inff();
        for (uint32_t i = to; i < stop; i++) scores[i] = -__builtin_inff();
        f32x16 top = splat(-__builtin_inff());
        for (uint32_t i = start; i < stop; i += kLanes) top = max(load(scores + i), top);
        most[row] = largest(top);
        f32x16 sums = splat(0.0f);
        for (uint32_t i = start; i < stop; i += kLanes) {
            const f32x16 e = exp_below(load(scores + i) - splat(most[row]));
            sums = sums + e;
            store(scores + i, e);
        }
        total[row] = sum(sums);
    }
}

// Values of the span that rows [row, row + kRows) see, weighted, from dim d on; they join those of earlier spans.
// Meanwhile the keys of the next span are fetched, if this thread goes on with it.
template <int kRows, int kVectors>
FERRUM_ALWAYS_INLINE void weigh_pages(const Block &block, Range span, uint32_t row, uint32_t d, const float *before,
                                      const float *now, const Join *how) {
    const Params &p = block.p;
    const uint32_t dim = p.head_dim, head = ferrum_kv_head(p.tokens_per_page, dim, block.kv_head);
    const uint32_t stride = block.temp.score_stride;
    Range visible[kRows];
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) visible[r] = block.visible((row + r) / block.temp.group, span);
    const Range any = {visible[0].begin, visible[kRows - 1].end}, all = {visible[kRows - 1].begin, visible[0].end};
    f32x16 acc[kRows][kVectors];
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (int v = 0; v < kVectors; v++) acc[r][v] =
        splat(0.0f);
    for (uint32_t at = any.begin; at < any.end;) {
        const uint32_t slot = at % p.tokens_per_page, left = p.tokens_per_page - slot;
        const half *values =
            page_of(block.pages, p.tokens_per_page, at) + head + ferrum_kv_value(p.tokens_per_page, dim, slot) + d;
        const float *weights = block.scores + (uint64_t)row * stride + (at - span.begin);
        f32x16 value[kVectors];
        if (at < all.begin || at >= all.end) {  // a value is read for those alone that see it: it may be NaN
            FERRUM_UNROLL for (int v = 0; v < kVectors; v++) value[v] = load(values + v * kLanes);
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
                if (at < visible[r].begin || at >= visible[r].end) continue;
                FERRUM_UNROLL for (int v = 0; v < kVectors; v++) acc[r][v] =
                    fma(splat(weights[r * stride]), value[v], acc[r][v]);
            }
            at++;
            continue;
        }
        const uint32_t count = all.end - at < left ? all.end - at : left;
        // Each group of dims fetches its share of the page: both are as large.
        const half *next = values;
        const uint32_t then = at + p.span_tokens;
        if (row == 0 && block.goes_on && then < p.position_start + p.tokens)
            next =
                page_of(block.pages, p.tokens_per_page, then) + head + d * p.tokens_per_page + slot * kVectors * kLanes;
        for (uint32_t j = 0; j < count; j++, values += dim, next += kVectors * kLanes) {
            FERRUM_UNROLL for (int v = 0; v < kVectors; v += 2) {
                __builtin_prefetch(next + v * kLanes, 0, 2);
            }
            FERRUM_UNROLL for (int v = 0; v < kVectors; v++) value[v] = load(values + v * kLanes);
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
                const f32x16 weight = splat(weights[r * stride + j]);
                FERRUM_UNROLL for (int v = 0; v < kVectors; v++) acc[r][v] = fma(weight, value[v], acc[r][v]);
            }
        }
        at += count;
    }
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (int v = 0; v < kVectors; v++)
        join_values(block.acc + (row + r) * block.temp.padded_dim + d + v * kLanes, acc[r][v], how[row + r],
                    before[row + r], now[row + r]);
}

void attend_few(const Block &block, Range span) {
    score_pages(block, span, block.seen(span));
    alignas(64) float most[kLanes] = {}, total[kLanes] = {}, before[kLanes], now[kLanes];
    Join how[kLanes];
    exponentials(block, span, most, total);
    join_sums(block.rows(), block.most, block.total, most, total, before, now, how);
    in_groups<kDirectRows>(0, block.rows(), [&](auto rows, uint32_t row) __attribute__((always_inline)) {
        uint32_t d = 0;
        for (; d + kDirectVectors * kLanes <= block.p.head_dim; d += kDirectVectors * kLanes)
            weigh_pages<decltype(rows)::value, kDirectVectors>(block, span, row, d, before, now, how);
        for (; d < block.p.head_dim; d += kLanes)
            weigh_pages<decltype(rows)::value, 1>(block, span, row, d, before, now, how);
    });
}

}  // namespace

}  // namespace ferrum::cpu::FERRUM_CPU_ISA
