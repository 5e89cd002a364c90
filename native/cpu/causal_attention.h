// What the two ways of computing attention share: attention_few.h and attention_many.h.
//
// Order of every sum, which makes a row's bits depend on its own query and on absolute key positions alone:
//   score      over dims, in order, one key a lane
//   span       (span_tokens of the params) largest score; sum of exponentials in 16 lanes by position in the span;
//              weighted values over keys, in order
//   context    spans combined in order by online softmax
// Work is split over key heads, blocks of query tokens and, where the plan says so, spans; a split only decides who
// computes a span, never what is in it.
#pragma once

#include "../include/ferrum_kv_layout.h"
#include "kernels.h"
#include "simd_math.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

namespace {

using Params = ferrum_causal_attention_params;

// Sums in registers where rows are few: rows by tiles of keys, and rows by four vectors of a value.
constexpr int kDirectRows = kRegisterLanes == 16 ? 4 : 2;
constexpr int kDirectTiles = kRegisterLanes == 16 ? 6 : 2;
constexpr int kDirectVectors = 4;

inline half *page_of(const uint64_t *pages, uint32_t tokens_per_page, uint32_t position) {
    return (half *)pages[position / tokens_per_page];
}

struct Range {
    uint32_t begin, end;
};

// Query rows of one key head: row = token of the block * group + query head of the group. After each span, `acc`,
// `most` and `total` of a row are its weighted values, largest score and sum of exponentials so far; total == 0 stands
// for "nothing yet".
struct Block {
    const Params &p;
    const AttentionTemp &temp;
    const uint64_t *pages;
    const half *queries;  // of the call
    uint32_t kv_head, first_token, tokens;
    float *acc;           // [rows][padded_dim]
    float *most, *total;  // [rows rounded up to whole vectors]
    float *query;         // scaled; how it is laid out is the way's own affair, as is what follows
    float *scores;
    half *keys, *values;

    uint32_t rows() const { return tokens * temp.group; }
    uint32_t position(uint32_t token) const { return p.position_start + first_token + token; }
    // Keys in [begin, end) that query token `token` of the block sees.
    Range visible(uint32_t token, Range span) const {
        const uint32_t at = position(token);
        const uint32_t from = p.window && at + 1 > p.window ? at + 1 - p.window : 0;
        return {span.begin > from ? span.begin : from, span.end < at + 1 ? span.end : at + 1};
    }
    // Keys that any row sees, if any; slots outside are never touched.
    Range seen(Range span) const { return {visible(0, span).begin, visible(tokens - 1, span).end}; }
    const half *query_of(uint32_t row) const {
        return queries + (uint64_t)(first_token + row / temp.group) * p.query_stride +
               (uint64_t)(kv_head * temp.group + row % temp.group) * p.head_dim;
    }
};

// cap * tanh(x / cap) = cap * (1 - 2 / (e^(2 x / cap) + 1))
FERRUM_ALWAYS_INLINE f32x16 soft_cap(f32x16 score, float cap) {
    const f32x16 e = exp(score * splat(2.0f / cap));
    return splat(cap) * (splat(1.0f) - splat(2.0f) / (e + splat(1.0f)));
}

// What a largest score starts at. Finite, so that where all scores of a span are -inf, so are their distances from it,
// and each has a weight of 0.
constexpr float kNoScore = -__FLT_MAX__;

// How a row's span joins what earlier spans gave, by online softmax.
enum class Join { nothing, first, both };

// For up to sixteen rows: updates their `most` and `total`, and says how weighted values are joined:
// acc * before + those of the span * now. span_total is 0 for a row that sees none of the span.
FERRUM_ALWAYS_INLINE void join_sums(uint32_t rows, float *most, float *total, const float *span_most,
                                    const float *span_total, float *before, float *now, Join *how) {
    const f32x16 most_before = load(most), most_now = load(span_most), top = max(most_before, most_now);
    const f32x16 factor_before = exp_below(most_before - top), factor_now = exp_below(most_now - top);
    float tops[kLanes], totals[kLanes];
    store(before, factor_before);
    store(now, factor_now);
    store(tops, top);
    store(totals, fma(load(total), factor_before, load(span_total) * factor_now));
    for (uint32_t r = 0; r < rows; r++) {
        how[r] = span_total[r] == 0 ? Join::nothing : total[r] == 0 ? Join::first : Join::both;
        if (how[r] == Join::nothing) continue;
        most[r] = how[r] == Join::first ? span_most[r] : tops[r];
        total[r] = how[r] == Join::first ? span_total[r] : totals[r];
    }
}

FERRUM_ALWAYS_INLINE void join_values(float *acc, f32x16 part, Join how, float before, float now) {
    if (how == Join::first) store(acc, part);
    if (how == Join::both) store(acc, fma(load(acc), splat(before), part * splat(now)));
}

}  // namespace

}  // namespace ferrum::cpu::FERRUM_CPU_ISA
