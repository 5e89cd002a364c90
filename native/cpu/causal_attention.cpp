// Causal attention over pages: the CPU kernels of prepare and attention, and of moving keys and values.
//
// Order of every sum, which makes a row's bits depend on its own query and on absolute key positions alone:
//   score      over dims, in order, one key a lane
//   span       (span_tokens of the params) largest score; sum of exponentials in 16 lanes by position in the span;
//              weighted values over keys, in order
//   context    spans combined in order by online softmax
// Work is split over key heads, blocks of query tokens and, where the plan says so, spans; a split only decides who
// computes a span, never what is in it.
#include "../include/ferrum_kv_layout.h"
#include "kernels.h"
#include "simd.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

namespace {

using Params = ferrum_causal_attention_params;

half *page_of(const uint64_t *pages, uint32_t tokens_per_page, uint32_t position) {
    return (half *)pages[position / tokens_per_page];
}

// ---- Prepare

// cos and sin at `position` for every pair, from the two halves of the rotary table.
void rotation(const float *table, uint32_t pairs, uint32_t position, float *cosine, float *sine) {
    const float *low = table + (uint64_t)(position % FERRUM_ROPE_LOW) * pairs * 2;
    const float *high = table + (uint64_t)(FERRUM_ROPE_LOW + position / FERRUM_ROPE_LOW) * pairs * 2;
    for (uint32_t i = 0; i < pairs; i++) {
        cosine[i] = low[2 * i] * high[2 * i] - low[2 * i + 1] * high[2 * i + 1];
        sine[i] = low[2 * i + 1] * high[2 * i] + low[2 * i] * high[2 * i + 1];
    }
}

// Norm (optional) and rotation of one head: `out` float32 [head_dim].
void prepare_head(const Params &p, const half *raw, const void *norm, bool norm_f32, bool interleaved,
                  const float *cosine, const float *sine, float *out) {
    for (uint32_t i = 0; i < p.head_dim; i += kLanes)
        store_up_to(out + i, load_up_to(raw + i, p.head_dim - i), p.head_dim - i);
    if (norm) {
        f32x16 squares = splat(0.0f);
        for (uint32_t i = 0; i < p.head_dim; i += kLanes) {
            const f32x16 v = load_up_to(out + i, p.head_dim - i);
            squares = fma(v, v, squares);
        }
        const f32x16 scale = splat(1.0f / __builtin_sqrtf(sum(squares) / (float)p.head_dim + p.epsilon));
        for (uint32_t i = 0; i < p.head_dim; i += kLanes) {
            const uint64_t left = p.head_dim - i;
            const f32x16 weight =
                norm_f32 ? load_up_to((const float *)norm + i, left) : load_up_to((const half *)norm + i, left);
            store_up_to(out + i, load_up_to(out + i, left) * scale * weight, left);
        }
    }
    const uint32_t pairs = p.rope_dim / 2;
    const uint32_t step = interleaved ? 2 : 1, partner = interleaved ? 1 : pairs;
    for (uint32_t i = 0; i < pairs; i++) {
        const float x0 = out[i * step], x1 = out[i * step + partner];
        out[i * step] = x0 * cosine[i] - x1 * sine[i];
        out[i * step + partner] = x1 * cosine[i] + x0 * sine[i];
    }
}

void write_key(half *page, const Params &p, uint32_t head, uint32_t slot, const float *key) {
    half *to = page + ferrum_kv_head(p.tokens_per_page, p.head_dim, head) + ferrum_kv_key(p.head_dim, slot);
    const uint32_t width = ferrum_kv_tile_width(p.tokens_per_page, slot);
    for (uint32_t d = 0; d < p.head_dim; d++) to[d * width] = (half)key[d];
}

// ---- Attention

// Sums that a pass keeps in registers: a block's rows by tiles of keys, a few rows by tiles straight from a page, and
// rows by four vectors of a value.
constexpr bool kWide = kRegisterLanes == 16;
constexpr int kScoreRows = kWide ? 6 : 3, kScoreTiles = kWide ? 2 : 1;
constexpr int kFewRows = kWide ? 4 : 2, kDirectTiles = kWide ? 6 : 2;
static_assert(kScoreTiles * FERRUM_KEY_TILE <= kStagedKeys && kDirectTiles * FERRUM_KEY_TILE <= 2 * kStagedKeys);

// One thread's working memory for the rows of a block: row = token of the block * group + query head of the group.
struct Workspace {
    uint32_t score_stride;
    float *query;                                  // [rows][padded_dim], scaled
    float *scores;                                 // [rows][score_stride]
    float *acc;                                    // [rows][padded_dim]: running weighted values
    float *part;                                   // [rows][padded_dim]: the span's
    float *most, *total, *span_most, *span_total;  // [rows]
    float *keys;                                   // [kStagedKeys / 16][head_dim][16], or twice as many as half
    float *values;                                 // [kValueTile][padded_dim]
};

Workspace workspace(uint8_t *memory, const AttentionTemp &temp) {
    const uint32_t rows = temp.group * temp.block_tokens, padded_dim = temp.padded_dim;
    float *at = (float *)memory;
    auto take = [&](uint64_t count) {
        float *taken = at;
        at += count;
        return taken;
    };
    const uint64_t wide = (uint64_t)rows * padded_dim;
    Workspace w;
    w.score_stride = temp.score_stride;
    w.query = take(wide);
    w.acc = take(wide);
    w.part = take(wide);
    w.scores = take((uint64_t)rows * temp.score_stride);
    w.keys = take(kStagedKeys * padded_dim);
    w.values = take(kValueTile * padded_dim);
    w.most = take(rows);
    w.total = take(rows);
    w.span_most = take(rows);
    w.span_total = take(rows);
    return w;
}

struct Range {
    uint32_t begin, end;
};

struct Block {
    const Params &p;
    const AttentionTemp &temp;
    const uint64_t *pages;
    Workspace w;
    uint32_t kv_head, first_token, tokens;

    uint32_t rows() const { return tokens * temp.group; }
    // Whether any row sees a key of the span.
    bool sees(Range span) const { return visible(0, span).begin < visible(tokens - 1, span).end; }
    uint32_t position(uint32_t token) const { return p.position_start + first_token + token; }
    // Keys in [begin, end) that query token `token` of the block sees.
    Range visible(uint32_t token, Range span) const {
        const uint32_t at = position(token);
        const uint32_t from = p.window && at + 1 > p.window ? at + 1 - p.window : 0;
        return {span.begin > from ? span.begin : from, span.end < at + 1 ? span.end : at + 1};
    }
};

// Calls body(Constant<rows>, first) for rows [first, end), as many as kMost at a time.
template <int kMost, class Body>
FERRUM_ALWAYS_INLINE void in_groups(uint32_t first, uint32_t end, Body &&body) {
    for (; first + kMost <= end; first += kMost) body(Constant<kMost>(), first);
    if constexpr (kMost > 1)
        if (first < end) in_groups<kMost - 1>(first, end, body);
}

// Tiles of keys, [dim][16] each, and where in the span they begin. Lanes past a tile's keys hold zero. Where rows are
// few, memory sets the pace: meanwhile the keys of the tiles that follow and the values of these are fetched.
template <class Element>
struct KeyTiles {
    const Element *keys[kDirectTiles];
    uint32_t at[kDirectTiles];
    const half *next[kDirectTiles], *values[kDirectTiles];
};

// Scores of kTiles tiles from number `first` against kRows rows.
template <int kRows, int kTiles, class Element>
FERRUM_ALWAYS_INLINE void score_rows(const Workspace &w, const Params &p, uint32_t padded_dim, uint32_t row,
                                     const KeyTiles<Element> &tiles, uint32_t first) {
    f32x16 acc[kRows][kTiles];
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (int t = 0; t < kTiles; t++) acc[r][t] =
        splat(0.0f);
    const float *query = w.query + (uint64_t)row * padded_dim;
    const Element *keys[kTiles];
    FERRUM_UNROLL for (int t = 0; t < kTiles; t++) keys[t] = tiles.keys[first + t];
    for (uint32_t d = 0; d < p.head_dim; d++) {
        f32x16 key[kTiles];
        if constexpr (sizeof(Element) == sizeof(half))  // a line of both every other time
            FERRUM_UNROLL for (int t = 0; t < kTiles; t++)
                __builtin_prefetch((d % 2 ? tiles.values : tiles.next)[first + t] + d / 2 * 2 * FERRUM_KEY_TILE, 0, 2);
        FERRUM_UNROLL for (int t = 0; t < kTiles; t++) key[t] = load(keys[t] + d * FERRUM_KEY_TILE);
        FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
            const f32x16 q = splat(query[r * padded_dim + d]);
            FERRUM_UNROLL for (int t = 0; t < kTiles; t++) acc[r][t] = fma(q, key[t], acc[r][t]);
        }
    }
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (int t = 0; t < kTiles; t++) {
        f32x16 score = acc[r][t];
        if (p.softcap != 0) {  // cap * tanh(x / cap) = cap * (1 - 2 / (e^(2 x / cap) + 1))
            const f32x16 e = exp(score * splat(2.0f / p.softcap));
            score = splat(p.softcap) * (splat(1.0f) - splat(2.0f) / (e + splat(1.0f)));
        }
        store(w.scores + (uint64_t)(row + r) * w.score_stride + tiles.at[first + t], score);
    }
}

// part[row + r] += sum over keys of probability * value, value rows `stride` elements apart.
template <int kRows, class Element>
FERRUM_ALWAYS_INLINE void weigh_values(const Workspace &w, uint32_t padded_dim, uint32_t row, uint32_t score_at,
                                       Range keys, const Element *values, uint32_t stride) {
    auto run = [&](uint32_t d, auto count) __attribute__((always_inline)) {
        constexpr int kVectors = decltype(count)::value;
        f32x16 acc[kRows][kVectors];
        FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (int v = 0; v < kVectors; v++) acc[r][v] =
            load(w.part + (uint64_t)(row + r) * padded_dim + d + v * kLanes);
        const float *scores = w.scores + (uint64_t)row * w.score_stride + score_at;
        for (uint32_t j = keys.begin; j < keys.end; j++) {
            f32x16 value[kVectors];
            FERRUM_UNROLL for (int v = 0; v < kVectors; v++) value[v] =
                load(values + (uint64_t)j * stride + d + v * kLanes);
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
                const f32x16 weight = splat(scores[r * w.score_stride + j]);
                FERRUM_UNROLL for (int v = 0; v < kVectors; v++) acc[r][v] = fma(weight, value[v], acc[r][v]);
            }
        }
        FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (int v = 0; v < kVectors; v++)
            store(w.part + (uint64_t)(row + r) * padded_dim + d + v * kLanes, acc[r][v]);
    };
    uint32_t d = 0;
    for (; d + 4 * kLanes <= padded_dim; d += 4 * kLanes) run(d, Constant<4>());
    for (; d < padded_dim; d += kLanes) run(d, Constant<1>());
}

// A few rows read keys and values straight from the pages; more share copies in float32.
bool reads_pages(const Block &block) {
    return block.rows() <= kScoreRows && block.p.head_dim % kLanes == 0;
}

// w.scores of every key in `seen`, for every row of the block: those that a row does not see included.
void score_span(const Block &block, Range span, Range seen) {
    const Params &p = block.p;
    const Workspace &w = block.w;
    const uint32_t dim = p.head_dim, padded = block.temp.padded_dim, rows = block.rows();
    const uint32_t head = ferrum_kv_head(p.tokens_per_page, dim, block.kv_head), tile = dim * FERRUM_KEY_TILE;
    const bool direct = reads_pages(block);
    for (uint32_t at = seen.begin; at < seen.end;) {
        KeyTiles<half> raw;
        KeyTiles<float> wide;
        uint32_t count = 0;
        for (; count < (direct ? (uint32_t)kDirectTiles : (uint32_t)kScoreTiles) && at < seen.end; count++) {
            const uint32_t slot = at % p.tokens_per_page, width = ferrum_kv_tile_width(p.tokens_per_page, slot);
            const half *page = page_of(block.pages, p.tokens_per_page, at) + head;
            const half *keys = page + ferrum_kv_key(dim, slot);
            uint32_t tokens = width - slot % FERRUM_KEY_TILE;
            if (seen.end - at < tokens) tokens = seen.end - at;
            raw.at[count] = wide.at[count] = at - span.begin;
            if (direct && tokens == FERRUM_KEY_TILE) {
                raw.keys[count] = keys;
            } else if (direct) {  // keys behind them may not be written yet, and are not read
                half *copy = (half *)w.keys + count * tile;
                for (uint32_t d = 0; d < dim; d++)
                    store(copy + d * FERRUM_KEY_TILE, load_some(keys + d * width, (int)tokens));
                raw.keys[count] = copy;
            } else {
                float *copy = w.keys + count * tile;
                for (uint32_t d = 0; d < dim; d++)
                    store(copy + d * FERRUM_KEY_TILE, load_up_to(keys + d * width, tokens));
                wide.keys[count] = copy;
            }
            raw.values[count] = page + ferrum_kv_value(p.tokens_per_page, dim, slot);
            at += tokens;
        }
        for (uint32_t t = 0; direct && t < count; t++) {
            const uint32_t then = at + t * FERRUM_KEY_TILE, slot = then % p.tokens_per_page;
            raw.next[t] = then < p.position_start + p.tokens
                              ? page_of(block.pages, p.tokens_per_page, then) + head + ferrum_kv_key(dim, slot)
                              : raw.keys[t];
        }
        if (direct)
            in_groups<kDirectTiles>(0, count, [&](auto tiles, uint32_t first) __attribute__((always_inline)) {
                constexpr int kTiles = decltype(tiles)::value;
                in_groups<kFewRows>(0, rows, [&](auto n, uint32_t row) __attribute__((always_inline)) {
                    score_rows<decltype(n)::value, kTiles>(w, p, padded, row, raw, first);
                });
            });
        else
            in_groups<kScoreTiles>(0, count, [&](auto tiles, uint32_t first) __attribute__((always_inline)) {
                constexpr int kTiles = decltype(tiles)::value;
                in_groups<kScoreRows>(0, rows, [&](auto n, uint32_t row) __attribute__((always_inline)) {
                    score_rows<decltype(n)::value, kTiles>(w, p, padded, row, wide, first);
                });
            });
    }
}

// Scores become exponentials against the row's largest; span_total is 0 for a row that sees nothing.
void exponentials(const Block &block, Range span) {
    const Workspace &w = block.w;
    for (uint32_t row = 0; row < block.rows(); row++) {
        const Range keys = block.visible(row / block.temp.group, span);
        w.span_total[row] = 0;
        if (keys.begin >= keys.end) continue;
        float *scores = w.scores + (uint64_t)row * w.score_stride;
        const uint32_t from = keys.begin - span.begin, to = keys.end - span.begin;
        const uint32_t start = from / kLanes * kLanes, stop = (uint32_t)align_up(to, kLanes);
        for (uint32_t i = start; i < from; i++) scores[i] = -__builtin_inff();
        for (uint32_t i = to; i < stop; i++) scores[i] = -__builtin_inff();
        f32x16 top = splat(-__builtin_inff());
        for (uint32_t i = start; i < stop; i += kLanes) top = max(load(scores + i), top);
        const float most = largest(top);
        f32x16 total = splat(0.0f);
        for (uint32_t i = start; i < stop; i += kLanes) {
            const f32x16 e = exp(load(scores + i) - splat(most));
            total = total + e;
            store(scores + i, e);
        }
        w.span_most[row] = most;
        w.span_total[row] = sum(total);
    }
}

// w.part of every row: the values it sees, weighted.
void weigh_span(const Block &block, Range span, Range seen) {
    const Params &p = block.p;
    const Workspace &w = block.w;
    const uint32_t dim = p.head_dim, padded = block.temp.padded_dim, rows = block.rows(), group = block.temp.group;
    const uint32_t head = ferrum_kv_head(p.tokens_per_page, dim, block.kv_head);
    const bool direct = reads_pages(block);
    memset(w.part, 0, (uint64_t)rows * padded * sizeof(float));
    for (uint32_t at = seen.begin; at < seen.end;) {
        const uint32_t slot = at % p.tokens_per_page;
        uint32_t end = at + p.tokens_per_page - slot;
        if (!direct && end > at + kValueTile) end = at + kValueTile;
        if (end > seen.end) end = seen.end;
        const half *values =
            page_of(block.pages, p.tokens_per_page, at) + head + ferrum_kv_value(p.tokens_per_page, dim, slot);
        if (!direct)
            for (uint32_t j = 0; j < end - at; j++)
                for (uint32_t d = 0; d < dim; d += kLanes)
                    store(w.values + j * padded + d, load_up_to(values + j * dim + d, dim - d));
        // Rows that see the same of these keys go together.
        for (uint32_t row = 0; row < rows;) {
            const Range own = block.visible(row / group, {at, end});
            uint32_t last = row + group;
            for (; last < rows; last += group) {
                const Range next = block.visible(last / group, {at, end});
                if (next.begin != own.begin || next.end != own.end) break;
            }
            if (own.begin < own.end)
                in_groups<kFewRows>(row, last, [&](auto n, uint32_t first) __attribute__((always_inline)) {
                    constexpr int kRows = decltype(n)::value;
                    const Range keys = {own.begin - at, own.end - at};
                    if (direct)
                        weigh_values<kRows>(w, padded, first, at - span.begin, keys, values, dim);
                    else
                        weigh_values<kRows>(w, padded, first, at - span.begin, keys, (const float *)w.values, padded);
                });
            row = last;
        }
        at = end;
    }
}

// The span's largest score, sum of exponentials and weighted values, for every row of the block that sees some of it;
// span_total is 0 for a row that sees none.
void attend_span(const Block &block, Range span) {
    // Keys that any row sees; slots outside are never touched.
    const Range seen = {block.visible(0, span).begin, block.visible(block.tokens - 1, span).end};
    score_span(block, span, seen);
    exponentials(block, span);
    weigh_span(block, span, seen);
}

// Online softmax: adds a span to what earlier spans gave. total == 0 stands for "nothing yet".
void combine(float &most, float &total, float *acc, float span_most, float span_total, const float *part,
             uint32_t padded) {
    if (span_total == 0) return;
    if (total == 0) {
        most = span_most;
        total = span_total;
        memcpy(acc, part, padded * sizeof(float));
        return;
    }
    const float top = most > span_most ? most : span_most;
    float factors[kLanes] = {most - top, span_most - top};
    store(factors, exp(load(factors)));
    total = __builtin_fmaf(total, factors[0], span_total * factors[1]);
    for (uint32_t d = 0; d < padded; d += kLanes)
        store(acc + d, fma(load(acc + d), splat(factors[0]), load(part + d) * splat(factors[1])));
    most = top;
}

// context = acc / total, times the sigmoid of the gate.
void finish_row(const Call &call, uint32_t gate_slot, uint32_t context_slot, uint32_t token, uint32_t query_head,
                const float *acc, float total) {
    const auto &p = call.params<Params>();
    const half *gate = call.at<const half>(gate_slot) + (uint64_t)token * p.query_raw_stride +
                       (uint64_t)query_head * p.query_head_stride + p.head_dim;
    half *out = call.at<half>(context_slot) + (uint64_t)token * p.query_stride + (uint64_t)query_head * p.head_dim;
    for (uint32_t d = 0; d < p.head_dim; d += kLanes) {
        f32x16 value = load(acc + d) / splat(total);
        if (call.constant(FERRUM_CONSTANT_OUTPUT_GATE)) value = value * sigmoid(load_up_to(gate + d, p.head_dim - d));
        store_up_to(out + d, value, p.head_dim - d);
    }
}

Block make_block(const Call &call, const Worker &worker, const AttentionTemp &temp, uint32_t pages_slot,
                 uint32_t kv_head, uint32_t index) {
    static_assert(int(FERRUM_SPLIT_QUERY) == int(FERRUM_ATTENTION_QUERY));
    const auto &p = call.params<Params>();
    const uint32_t first = index * temp.block_tokens;
    const uint32_t tokens = p.tokens - first < temp.block_tokens ? p.tokens - first : temp.block_tokens;
    Block block{p,
                temp,
                call.at<const uint64_t>(pages_slot),
                workspace(call.temp + worker.index() * temp.thread_bytes, temp),
                kv_head,
                first,
                tokens};
    for (uint32_t row = 0; row < block.rows(); row++) {
        const half *from = call.at<const half>(FERRUM_ATTENTION_QUERY) +
                           (uint64_t)(first + row / temp.group) * p.query_stride +
                           (uint64_t)(kv_head * temp.group + row % temp.group) * p.head_dim;
        for (uint32_t d = 0; d < p.head_dim; d += kLanes)
            store(block.w.query + row * temp.padded_dim + d, load_up_to(from + d, p.head_dim - d) * splat(p.scale));
    }
    return block;
}

// Span `index` of those that the call visits.
Range span_at(const Params &p, uint32_t index) {
    const uint32_t begin = (p.first_span + index) * p.span_tokens;
    return {begin, begin + p.span_tokens};
}

// decode and tiles: each block goes through its spans in order.
void attend(const Call &call, Worker &worker) {
    const auto &p = call.params<Params>();
    const AttentionTemp temp = attention_temp(p);
    const uint32_t padded = temp.padded_dim;
    worker.for_each((uint64_t)temp.blocks * p.key_value_heads, 1, [&](uint64_t item) {
        // The longest contexts first, so that no thread is left with one at the end.
        const uint32_t index = temp.blocks - 1 - (uint32_t)(item / p.key_value_heads);
        const Block block =
            make_block(call, worker, temp, FERRUM_ATTENTION_PAGES, (uint32_t)(item % p.key_value_heads), index);
        const Workspace &w = block.w;
        memset(w.total, 0, block.rows() * sizeof(float));
        for (uint32_t span = 0; span < p.spans; span++) {
            if (!block.sees(span_at(p, span))) continue;
            attend_span(block, span_at(p, span));
            for (uint32_t row = 0; row < block.rows(); row++)
                combine(w.most[row], w.total[row], w.acc + row * padded, w.span_most[row], w.span_total[row],
                        w.part + row * padded, padded);
        }
        for (uint32_t row = 0; row < block.rows(); row++)
            finish_row(call, FERRUM_ATTENTION_QUERY_RAW, FERRUM_ATTENTION_CONTEXT, block.first_token + row / temp.group,
                       block.kv_head * temp.group + row % temp.group, w.acc + row * padded, w.total[row]);
    });
}

float *partial_of(const Call &call, uint32_t slot, uint64_t token, uint32_t query_head, uint32_t span) {
    const auto &p = call.params<Params>();
    return call.at<float>(slot) + ((token * p.query_heads + query_head) * p.spans + span) * p.partial_stride;
}

}  // namespace

void causal_attention_prepare_f16(const Call &call, Worker &worker) {
    const auto &p = call.params<Params>();
    const bool interleaved = call.constant(FERRUM_CONSTANT_ROPE_INTERLEAVED);
    const void *query_norm =
        call.constant(FERRUM_CONSTANT_QUERY_NORM) ? call.slots[FERRUM_PREPARE_QUERY_NORM] : nullptr;
    const void *key_norm = call.constant(FERRUM_CONSTANT_KEY_NORM) ? call.slots[FERRUM_PREPARE_KEY_NORM] : nullptr;
    const auto *pages = call.at<const uint64_t>(FERRUM_PREPARE_PAGES);
    worker.for_each(p.tokens, 1, [&](uint64_t token) {
        float cosine[FERRUM_MAX_HEAD_DIM / 2], sine[FERRUM_MAX_HEAD_DIM / 2], head[FERRUM_MAX_HEAD_DIM];
        const uint32_t position = p.position_start + (uint32_t)token, slot = position % p.tokens_per_page;
        rotation(call.at<const float>(FERRUM_PREPARE_ROPE), p.rope_dim / 2, position, cosine, sine);
        for (uint32_t h = 0; h < p.query_heads; h++) {
            prepare_head(p,
                         call.at<const half>(FERRUM_PREPARE_QUERY_RAW) + token * p.query_raw_stride +
                             (uint64_t)h * p.query_head_stride,
                         query_norm, call.constant(FERRUM_CONSTANT_QUERY_NORM_F32), interleaved, cosine, sine, head);
            half *out = call.at<half>(FERRUM_PREPARE_QUERY) + token * p.query_stride + (uint64_t)h * p.head_dim;
            for (uint32_t d = 0; d < p.head_dim; d += kLanes)
                store_up_to(out + d, load_up_to(head + d, p.head_dim - d), p.head_dim - d);
        }
        half *page = page_of(pages, p.tokens_per_page, position);
        for (uint32_t h = 0; h < p.key_value_heads; h++) {
            const uint64_t from = token * p.key_value_stride + (uint64_t)h * p.head_dim;
            prepare_head(p, call.at<const half>(FERRUM_PREPARE_KEY_RAW) + from, key_norm,
                         call.constant(FERRUM_CONSTANT_KEY_NORM_F32), interleaved, cosine, sine, head);
            write_key(page, p, h, slot, head);
            memcpy(page + ferrum_kv_head(p.tokens_per_page, p.head_dim, h) +
                       ferrum_kv_value(p.tokens_per_page, p.head_dim, slot),
                   call.at<const half>(FERRUM_PREPARE_VALUE_RAW) + from, p.head_dim * sizeof(half));
        }
    });
}

void causal_attention_decode_f16(const Call &call, Worker &worker) {
    attend(call, worker);
}
void causal_attention_tiles_f16(const Call &call, Worker &worker) {
    attend(call, worker);
}

void causal_attention_split_f16(const Call &call, Worker &worker) {
    const auto &p = call.params<Params>();
    const AttentionTemp temp = attention_temp(p);
    const uint32_t padded = temp.padded_dim;
    worker.for_each((uint64_t)temp.blocks * p.key_value_heads * p.spans, 1, [&](uint64_t item) {
        const uint32_t span = (uint32_t)(item % p.spans), pair = (uint32_t)(item / p.spans);
        const Block block =
            make_block(call, worker, temp, FERRUM_SPLIT_PAGES, pair % p.key_value_heads, pair / p.key_value_heads);
        const bool seen = block.sees(span_at(p, span));
        if (seen) attend_span(block, span_at(p, span));
        for (uint32_t row = 0; row < block.rows(); row++) {
            float *out = partial_of(call, FERRUM_SPLIT_PARTIALS, block.first_token + row / temp.group,
                                    block.kv_head * temp.group + row % temp.group, span);
            out[padded + 1] = seen ? block.w.span_total[row] : 0;
            if (out[padded + 1] == 0) continue;
            out[padded] = block.w.span_most[row];
            memcpy(out, block.w.part + row * padded, padded * sizeof(float));
        }
    });
}

void causal_attention_combine_f16(const Call &call, Worker &worker) {
    const auto &p = call.params<Params>();
    const uint32_t padded = attention_temp(p).padded_dim;
    worker.for_each((uint64_t)p.tokens * p.query_heads, 1, [&](uint64_t item) {
        const uint32_t token = (uint32_t)(item / p.query_heads), head = (uint32_t)(item % p.query_heads);
        float acc[FERRUM_MAX_HEAD_DIM], most = 0, total = 0;
        for (uint32_t span = 0; span < p.spans; span++) {
            const float *part = partial_of(call, FERRUM_COMBINE_PARTIALS, token, head, span);
            combine(most, total, acc, part[padded], part[padded + 1], part, padded);
        }
        finish_row(call, FERRUM_COMBINE_QUERY_RAW, FERRUM_COMBINE_CONTEXT, token, head, acc, total);
    });
}

}  // namespace ferrum::cpu::FERRUM_CPU_ISA
