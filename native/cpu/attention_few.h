// Attention of a few rows of a key head, straight from the pages. Memory sets the pace: what is read later is fetched
// all the while, see attention_ahead.h.
#pragma once

#include "attention_ahead.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

namespace {

constexpr uint32_t kValuesAtOnce = 16;  // that are weighed while as much is fetched

bool reads_pages(const Block &block) {
    return block.rows() <= (kRegisterLanes == 16 ? 12 : 4) && block.p.head_dim % kLanes == 0;
}

// Queries, [row][padded_dim].
void scale_queries(const Block &block) {
    for (uint32_t row = 0; row < block.rows(); row++)
        for (uint32_t d = 0; d < block.p.head_dim; d += kLanes)
            store(block.query + row * block.temp.padded_dim + d, load(block.query_of(row) + d) * splat(block.p.scale));
}

// Tiles of keys, [dim][width] each, and where in the span they begin.
struct KeyTiles {
    const half *keys[kDirectTiles];
    uint32_t at[kDirectTiles];
    uint32_t width;
};

// Scores of kTiles tiles from number `first` against kRows rows, [row][key of the span]. Lanes of keys that no row sees
// are of no meaning.
template <int kRows, int kTiles>
FERRUM_ALWAYS_INLINE void score_rows(const Block &block, uint32_t row, const KeyTiles &tiles, uint32_t first,
                                     Ahead &ahead) {
    const uint32_t padded = block.temp.padded_dim, dim = block.p.head_dim, width = tiles.width;
    f32x16 acc[kRows][kTiles];
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (int t = 0; t < kTiles; t++) acc[r][t] =
        splat(0.0f);
    const float *query = block.query + (uint64_t)row * padded;
    const half *keys[kTiles];
    FERRUM_UNROLL for (int t = 0; t < kTiles; t++) keys[t] = tiles.keys[first + t];
    uint32_t d = 0;
    for (uint32_t slice = 1; slice <= kTiles; slice++) {
        const uint32_t end = slice * dim / kTiles;
        const half *next = ahead.take(row == 0 ? (end - d) * kTiles * width : 0);
        for (; d < end; d++) {
            FERRUM_UNROLL for (int line = 0; line < kTiles; line += 2) __builtin_prefetch(next + line * kLanes);
            next += kTiles * kLanes;
            f32x16 key[kTiles];
            FERRUM_UNROLL for (int t = 0; t < kTiles; t++) key[t] = load(keys[t] + d * width);
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
                const f32x16 q = splat(query[r * padded + d]);
                FERRUM_UNROLL for (int t = 0; t < kTiles; t++) acc[r][t] = fma(q, key[t], acc[r][t]);
            }
        }
    }
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (int t = 0; t < kTiles; t++) {
        float *to = block.scores + (uint64_t)(row + r) * block.temp.score_stride + tiles.at[first + t];
        if (width == FERRUM_KEY_TILE)
            store(to, acc[r][t]);
        else
            store_some(to, acc[r][t], (int)width);
    }
}

// Scores of every key in `seen`, for every row of the block: those that a row does not see included. Whole tiles go
// first, so that tiles of one width go together; narrow ones end pages.
void score_pages(const Block &block, Range span, Range seen, Ahead &ahead) {
    const Params &p = block.p;
    const uint32_t dim = p.head_dim, head = ferrum_kv_head(p.tokens_per_page, dim, block.kv_head);
    const uint32_t narrow = p.tokens_per_page % FERRUM_KEY_TILE, whole = p.tokens_per_page - narrow;
    for (int pass = 0; pass < 2; pass++) {
        const bool picks_narrow = pass == 1;
        KeyTiles tiles;
        tiles.width = picks_narrow ? narrow : (uint32_t)FERRUM_KEY_TILE;
        uint32_t count = 0;
        auto score = [&] {
            in_groups<kDirectTiles>(0, count, [&](auto count_, uint32_t first) __attribute__((always_inline)) {
                in_groups<kDirectRows>(0, block.rows(), [&](auto rows, uint32_t row) __attribute__((always_inline)) {
                    score_rows<decltype(rows)::value, decltype(count_)::value>(block, row, tiles, first, ahead);
                });
            });
            count = 0;
        };
        for (uint32_t page = seen.begin / p.tokens_per_page * p.tokens_per_page; page < seen.end;
             page += p.tokens_per_page) {
            const half *keys = page_of(block.pages, p.tokens_per_page, page) + head;
            const uint32_t end = picks_narrow ? p.tokens_per_page : whole;
            for (uint32_t slot = picks_narrow ? whole : 0; slot < end; slot += FERRUM_KEY_TILE) {
                if (page + slot + tiles.width <= seen.begin || page + slot >= seen.end) continue;
                tiles.keys[count] = keys + ferrum_kv_key(dim, slot);
                tiles.at[count] = page + slot - span.begin;
                if (++count == (uint32_t)kDirectTiles) score();
            }
        }
        score();
    }
}

// Scores of kRows rows of one token become exponentials against the row's largest. Rows go side by side, since a row's
// sums wait for each other.
template <int kRows>
FERRUM_ALWAYS_INLINE void exponentials(const Block &block, Range span, Range keys, uint32_t row, float *most,
                                       float *total) {
    const uint32_t from = keys.begin - span.begin, to = keys.end - span.begin, stride = block.temp.score_stride;
    const uint32_t start = from / kLanes * kLanes, stop = (to + kLanes - 1) / kLanes * kLanes;
    float *scores = block.scores + (uint64_t)row * stride;
    f32x16 top[kRows], sums[kRows];
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
        if (block.p.softcap != 0)
            for (uint32_t i = start; i < stop; i += kLanes)
                store(scores + r * stride + i, soft_cap(load(scores + r * stride + i), block.p.softcap));
        for (uint32_t i = start; i < from; i++) scores[r * stride + i] = -__builtin_inff();
        for (uint32_t i = to; i < stop; i++) scores[r * stride + i] = -__builtin_inff();
        top[r] = splat(kNoScore);
        sums[r] = splat(0.0f);
    }
    for (uint32_t i = start; i < stop; i += kLanes)
        FERRUM_UNROLL for (int r = 0; r < kRows; r++) top[r] = max(load(scores + r * stride + i), top[r]);
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
        most[row + r] = largest(top[r]);
        top[r] = splat(most[row + r]);
    }
    for (uint32_t i = start; i < stop; i += kLanes) FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
            const f32x16 e = exp_below(load(scores + r * stride + i) - top[r]);
            sums[r] = sums[r] + e;
            store(scores + r * stride + i, e);
        }
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) total[row + r] = sum(sums[r]);
}

// Values of the span that rows [row, row + kRows) see, weighted, from dim d on; they join those of earlier spans.
template <int kRows, int kVectors>
FERRUM_ALWAYS_INLINE void weigh_pages(const Block &block, Range span, uint32_t row, uint32_t d, const float *before,
                                      const float *now, const Join *how, Ahead &ahead) {
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
        uint32_t count = all.end - at < left ? all.end - at : left;
        count = count < kValuesAtOnce ? count : kValuesAtOnce;
        const half *next = ahead.take(row == 0 ? count * kVectors * kLanes : 0);
        for (uint32_t j = 0; j < count; j++, values += dim, next += kVectors * kLanes) {
            FERRUM_UNROLL for (int v = 0; v < kVectors; v += 2) __builtin_prefetch(next + v * kLanes);
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

void attend_few(const Block &block, Range span, Ahead &ahead) {
    score_pages(block, span, block.seen(span), ahead);
    alignas(64) float most[kLanes] = {}, total[kLanes] = {}, before[kLanes], now[kLanes];
    Join how[kLanes];
    const uint32_t group = block.temp.group;
    for (uint32_t token = 0; token < block.tokens; token++) {
        const Range keys = block.visible(token, span);
        if (keys.begin >= keys.end) continue;
        in_groups<kDirectRows>(0, group, [&](auto rows, uint32_t row) __attribute__((always_inline)) {
            exponentials<decltype(rows)::value>(block, span, keys, token * group + row, most, total);
        });
    }
    join_sums(block.rows(), block.most, block.total, most, total, before, now, how);
    in_groups<kDirectRows>(0, block.rows(), [&](auto rows, uint32_t row) __attribute__((always_inline)) {
        constexpr int kRows = decltype(rows)::value;
        uint32_t d = 0;
        for (; d + kDirectVectors * kLanes <= block.p.head_dim; d += kDirectVectors * kLanes)
            weigh_pages<kRows, kDirectVectors>(block, span, row, d, before, now, how, ahead);
        for (; d < block.p.head_dim; d += kLanes) weigh_pages<kRows, 1>(block, span, row, d, before, now, how, ahead);
    });
}

}  // namespace

}  // namespace ferrum::cpu::FERRUM_CPU_ISA
