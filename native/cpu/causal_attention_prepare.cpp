// Before attention: head norms, rotation, and keys and values into their pages.
#include "causal_attention.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

namespace {

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
        const f32x16 scale = splat(inverse_rms(out, p.head_dim, p.epsilon));
        for (uint32_t i = 0; i < p.head_dim; i += kLanes) {
            const uint64_t left = p.head_dim - i;
            const f32x16 weight =
                norm_f32 ? load_up_to((const float *)norm + i, left) : load_up_to((const half *)norm + i, left);
            store_up_to(out + i, load_up_to(out + i, left) * scale * weight, left);
        }
    }
    const uint32_t pairs = p.rope_dim / 2;
    if (interleaved) {
        for (uint32_t i = 0; i < pairs; i++) {
            const float x0 = out[2 * i], x1 = out[2 * i + 1];
            out[2 * i] = x0 * cosine[i] - x1 * sine[i];
            out[2 * i + 1] = x1 * cosine[i] + x0 * sine[i];
        }
        return;
    }
    for (uint32_t i = 0; i < pairs; i += kLanes) {
        const uint64_t left = pairs - i;
        const f32x16 x0 = load_up_to(out + i, left), x1 = load_up_to(out + pairs + i, left);
        const f32x16 c = load_up_to(cosine + i, left), s = load_up_to(sine + i, left);
        store_up_to(out + i, x0 * c - x1 * s, left);
        store_up_to(out + pairs + i, x1 * c + x0 * s, left);
    }
}

void write_key(half *page, const Params &p, uint32_t head, uint32_t slot, const float *key) {
    half *to = page + ferrum_kv_head(p.tokens_per_page, p.head_dim, head) + ferrum_kv_key(p.head_dim, slot);
    const uint32_t width = ferrum_kv_tile_width(p.tokens_per_page, slot);
    half rounded[FERRUM_MAX_HEAD_DIM];
    for (uint32_t d = 0; d < p.head_dim; d += kLanes)
        store_up_to(rounded + d, load_up_to(key + d, p.head_dim - d), p.head_dim - d);
    for (uint32_t d = 0; d < p.head_dim; d++) to[d * width] = rounded[d];
}

}  // namespace

void causal_attention_prepare_f16(const Call &call, Worker &worker) {
    const auto &p = call.params<Params>();
    const bool interleaved = call.constant(FERRUM_CONSTANT_ROPE_INTERLEAVED);
    const void *query_norm =
        call.constant(FERRUM_CONSTANT_QUERY_NORM) ? call.slots[FERRUM_PREPARE_QUERY_NORM] : nullptr;
    const void *key_norm = call.constant(FERRUM_CONSTANT_KEY_NORM) ? call.slots[FERRUM_PREPARE_KEY_NORM] : nullptr;
    const auto *pages = call.at<const uint64_t>(FERRUM_PREPARE_PAGES);
    auto prepare = [&](uint64_t token) {
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
    };
    // Neighbours' keys share lines of memory.
    worker.for_ranges(p.tokens, [&](uint64_t begin, uint64_t end) {
        for (uint64_t token = begin; token < end; token++) prepare(token);
    });
}

}  // namespace ferrum::cpu::FERRUM_CPU_ISA
