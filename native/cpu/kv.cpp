// Keys and values into, out of and between pages. The layout inside a page is ferrum_kv_layout.h's.
#include "../include/ferrum_kv_layout.h"
#include "kernels.h"
#include "simd.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

namespace {

// Calls body(key of dim 0, distance between its dims, value, element offset in the arrays) for every token and head.
template <class Body>
void each_token(const Call &call, Worker &worker, Body &&body) {
    const auto &p = call.params<ferrum_kv_params>();
    const auto *pages = call.at<const uint64_t>(FERRUM_KV_PAGES);
    worker.for_each(p.tokens, 16, [&](uint64_t token) {
        const uint32_t position = p.position_start + (uint32_t)token, slot = position % p.tokens_per_page;
        half *page = (half *)pages[position / p.tokens_per_page];
        for (uint32_t h = 0; h < p.key_value_heads; h++) {
            half *head = page + ferrum_kv_head(p.tokens_per_page, p.head_dim, h);
            body(head + ferrum_kv_key(p.head_dim, slot), ferrum_kv_tile_width(p.tokens_per_page, slot),
                 head + ferrum_kv_value(p.tokens_per_page, p.head_dim, slot),
                 (token * p.key_value_heads + h) * p.head_dim);
        }
    });
}

}  // namespace

void kv_append_f16(const Call &call, Worker &worker) {
    const uint32_t dim = call.params<ferrum_kv_params>().head_dim;
    each_token(call, worker, [&](half *key, uint32_t width, half *value, uint64_t at) {
        const half *from = call.at<const half>(FERRUM_KV_KEYS) + at;
        for (uint32_t d = 0; d < dim; d++) memcpy(key + d * width, from + d, sizeof(half));
        memcpy(value, call.at<const half>(FERRUM_KV_VALUES) + at, dim * sizeof(half));
    });
}

void kv_gather_f16(const Call &call, Worker &worker) {
    const uint32_t dim = call.params<ferrum_kv_params>().head_dim;
    each_token(call, worker, [&](const half *key, uint32_t width, const half *value, uint64_t at) {
        half *to = call.at<half>(FERRUM_KV_KEYS) + at;
        for (uint32_t d = 0; d < dim; d++) memcpy(to + d, key + d * width, sizeof(half));
        memcpy(call.at<half>(FERRUM_KV_VALUES) + at, value, dim * sizeof(half));
    });
}

void kv_copy_f16(const Call &call, Worker &worker) {
    const auto &p = call.params<ferrum_kv_params>();
    const auto *pages = call.at<const uint64_t>(FERRUM_KV_COPY_PAGES);
    worker.for_each(p.key_value_heads, 1, [&](uint64_t h) {
        const half *source = (const half *)pages[0];
        half *target = (half *)pages[1];
        const uint32_t head = ferrum_kv_head(p.tokens_per_page, p.head_dim, (uint32_t)h);
        // Only written slots are copied: those behind them may be another state's, being written now.
        for (uint32_t slot = 0; slot < p.tokens; slot += FERRUM_KEY_TILE) {
            const uint32_t width = ferrum_kv_tile_width(p.tokens_per_page, slot);
            const uint32_t count = p.tokens - slot < width ? p.tokens - slot : width;
            const uint32_t key = head + ferrum_kv_key(p.head_dim, slot);
            for (uint32_t d = 0; d < p.head_dim; d++)
                memcpy(target + key + d * width, source + key + d * width, count * sizeof(half));
        }
        const uint32_t value = head + ferrum_kv_value(p.tokens_per_page, p.head_dim, 0);
        memcpy(target + value, source + value, (uint64_t)p.tokens * p.head_dim * sizeof(half));
    });
}

}  // namespace ferrum::cpu::FERRUM_CPU_ISA
