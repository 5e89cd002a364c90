// Causal attention over pages: the kernels of decode, of tiles, of spans side by side and of combining them.
#include "attention_few.h"
#include "attention_many.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

namespace {

Block make_block(const Call &call, const Worker &worker, const AttentionTemp &temp, uint32_t pages_slot,
                 uint32_t kv_head, uint32_t index) {
    static_assert(int(FERRUM_SPLIT_QUERY) == int(FERRUM_ATTENTION_QUERY));
    const auto &p = call.params<Params>();
    const uint32_t first = index * temp.block_tokens;
    const uint32_t tokens = p.tokens - first < temp.block_tokens ? p.tokens - first : temp.block_tokens;
    float *at = (float *)(call.temp + worker.index() * temp.thread_bytes);
    auto take = [&](uint64_t count) {
        float *taken = at;
        at += count;
        return taken;
    };
    Block block{p,
                temp,
                call.at<const uint64_t>(pages_slot),
                call.at<const half>(FERRUM_ATTENTION_QUERY),
                kv_head,
                first,
                tokens,
                take(temp.acc),
                take(temp.sums),
                take(temp.sums),
                take(temp.query),
                take(temp.scores),
                (half *)take(temp.keys),
                (half *)take(temp.values)};
    memset(block.total, 0, temp.sums * sizeof(float));
    memset(block.most, 0, temp.sums * sizeof(float));
    if (reads_pages(block))
        scale_queries(block);
    else
        lay_out_queries(block);
    return block;
}

// A span, if some row of the block sees it.
void attend_span(const Block &block, Range span, Ahead &ahead) {
    const Range seen = block.seen(span);
    if (seen.begin >= seen.end) return;
    if (reads_pages(block))
        attend_few(block, span, ahead);
    else
        attend_many(block, span, ahead);
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

// `count` spans from number `index` on, of those that the call visits.
Range span_at(const Params &p, uint32_t index, uint32_t count = 1) {
    const uint32_t begin = (p.first_span + index) * p.span_tokens;
    return {begin, begin + count * p.span_tokens};
}

void finish_rows(const Call &call, const Block &block) {
    const uint32_t group = block.temp.group;
    for (uint32_t row = 0; row < block.rows(); row++)
        finish_row(call, FERRUM_ATTENTION_QUERY_RAW, FERRUM_ATTENTION_CONTEXT, block.first_token + row / group,
                   block.kv_head * group + row % group, block.acc + row * block.temp.padded_dim, block.total[row]);
}

// Each block goes through its spans in order.
void attend_in_order(const Call &call, Worker &worker) {
    const auto &p = call.params<Params>();
    const AttentionTemp temp = attention_temp(p);
    worker.for_each((uint64_t)temp.blocks * p.key_value_heads, 1, [&](uint64_t item) {
        // Of a key head, the longest contexts first, so that no thread is left with one at the end.
        const uint32_t index = temp.blocks - 1 - (uint32_t)(item % temp.blocks);
        const uint32_t head = (uint32_t)(item / temp.blocks);
        const Block block = make_block(call, worker, temp, FERRUM_ATTENTION_PAGES, head, index);
        const uint64_t first = (uint64_t)head * p.spans;
        const Range seen = block.seen(span_at(p, 0, p.spans));
        Ahead ahead(p, block.pages, Parts{p.key_value_heads, p.spans, false});
        for (uint32_t span = 0; span < p.spans; span++) {
            ahead.start(first + span, first + p.spans, seen, !reads_pages(block));
            attend_span(block, span_at(p, span), ahead);
        }
        finish_rows(call, block);
    });
}

// Spans side by side: finish(block, span) takes what each of them gave.
template <class Finish>
void attend_side_by_side(const Call &call, Worker &worker, uint32_t pages_slot, Finish &&finish) {
    const auto &p = call.params<Params>();
    const AttentionTemp temp = attention_temp(p);
    const Parts parts{p.key_value_heads, p.spans, true};
    const uint64_t items = temp.blocks * parts.count();
    Ahead ahead(p, call.at<const uint64_t>(pages_slot), parts);
    worker.for_ranges(items, [&](uint64_t begin, uint64_t end) {
        const bool own = begin >= worker.share(items) && begin < worker.share_end(items);
        for (uint64_t item = begin; item < end; item++) {
            const uint64_t index = item / parts.count(), part = item % parts.count();
            const uint64_t goes_to = part + (own ? worker.share_end(items) : end) - item;
            const Block block = make_block(call, worker, temp, pages_slot, parts.head(part), (uint32_t)index);
            ahead.start(part, goes_to < parts.count() ? goes_to : parts.count(), block.seen(span_at(p, 0, p.spans)),
                        !reads_pages(block));
            attend_span(block, span_at(p, parts.span(part)), ahead);
            finish(block, parts.span(part));
        }
    });
}

float *partial_of(const Call &call, uint32_t slot, uint64_t token, uint32_t query_head, uint32_t span) {
    const auto &p = call.params<Params>();
    return call.at<float>(slot) + ((token * p.query_heads + query_head) * p.spans + span) * p.partial_stride;
}

}  // namespace

void causal_attention_decode_f16(const Call &call, Worker &worker) {
    if (call.params<Params>().spans > 1) return attend_in_order(call, worker);
    attend_side_by_side(call, worker, FERRUM_ATTENTION_PAGES,
                        [&](const Block &block, uint32_t) { finish_rows(call, block); });
}
void causal_attention_tiles_f16(const Call &call, Worker &worker) {
    attend_in_order(call, worker);
}

void causal_attention_split_f16(const Call &call, Worker &worker) {
    attend_side_by_side(call, worker, FERRUM_SPLIT_PAGES, [&](const Block &block, uint32_t span) {
        const uint32_t group = block.temp.group, padded = block.temp.padded_dim;
        for (uint32_t row = 0; row < block.rows(); row++) {
            float *out = partial_of(call, FERRUM_SPLIT_PARTIALS, block.first_token + row / group,
                                    block.kv_head * group + row % group, span);
            out[padded + 1] = block.total[row];
            if (block.total[row] == 0) continue;
            out[padded] = block.most[row];
            memcpy(out, block.acc + row * padded, padded * sizeof(float));
        }
    });
}

void causal_attention_combine_f16(const Call &call, Worker &worker) {
    const auto &p = call.params<Params>();
    const uint32_t padded = attention_temp(p).padded_dim;
    worker.for_each((uint64_t)p.tokens * p.query_heads, 1, [&](uint64_t item) {
        const uint32_t token = (uint32_t)(item / p.query_heads), head = (uint32_t)(item % p.query_heads);
        float acc[FERRUM_MAX_HEAD_DIM];
        alignas(64) float most[kLanes] = {}, total[kLanes] = {}, before[kLanes], now[kLanes];
        for (uint32_t span = 0; span < p.spans; span++) {
            const float *part = partial_of(call, FERRUM_COMBINE_PARTIALS, token, head, span);
            alignas(64) const float span_most[kLanes] = {part[padded]}, span_total[kLanes] = {part[padded + 1]};
            Join how;
            join_sums(1, most, total, span_most, span_total, before, now, &how);
            for (uint32_t d = 0; d < padded; d += kLanes) join_values(acc + d, load(part + d), how, *before, *now);
        }
        finish_row(call, FERRUM_COMBINE_QUERY_RAW, FERRUM_COMBINE_CONTEXT, token, head, acc, *total);
    });
}

}  // namespace ferrum::cpu::FERRUM_CPU_ISA
