// What is done with logits: cross-entropy, argmax, top-k. One row is one thread's work.
#include <math.h>

#include "kernels.h"
#include "simd_math.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

namespace {

// a before b: larger first, the lower index of equals, NaN before every number.
bool precedes(float a, int32_t a_index, float b, int32_t b_index) {
    const bool a_nan = a != a, b_nan = b != b;
    if (a_nan != b_nan) return a_nan;
    if (!a_nan && a != b) return a > b;
    return a_index < b_index;
}

}  // namespace

void cross_entropy_f32(const Call &call, Worker &worker) {
    const auto &p = call.params<ferrum_rows_params>();
    worker.for_each(p.rows, 1, [&](uint64_t row) {
        const float *x = call.at<const float>(FERRUM_CROSS_ENTROPY_LOGITS) + row * p.width;
        f32x16 top = splat(-__builtin_inff());
        for (uint32_t i = 0; i < p.width; i += kLanes) {
            f32x16 v = load_up_to(x + i, p.width - i);
            if (p.width - i < kLanes) {
                float lanes[kLanes];
                store(lanes, v);
                for (uint32_t j = p.width - i; j < kLanes; j++) lanes[j] = x[i];
                v = load(lanes);
            }
            top = max(v, top);
        }
        const float most = largest(top);
        // Float32 over 64 vectors at most, then float64: the error does not grow with the vocabulary.
        double total = 0;
        for (uint32_t begin = 0; begin < p.width; begin += 64 * kLanes) {
            const uint32_t end = p.width - begin < 64 * kLanes ? p.width : begin + 64 * kLanes;
            f32x16 part = splat(0.0f);
            uint32_t i = begin;
            for (; i + kLanes <= end; i += kLanes) part = part + exp(load(x + i) - splat(most));
            total += sum(part);
            if (i < end) {
                float lanes[kLanes];
                store(lanes, exp(load_some(x + i, (int)(end - i)) - splat(most)));
                for (uint32_t j = 0; j < end - i; j++) total += lanes[j];
            }
        }
        const int32_t target = call.at<const int32_t>(FERRUM_CROSS_ENTROPY_TARGETS)[row];
        call.at<float>(FERRUM_CROSS_ENTROPY_LOSS)[row] = (float)(log(total) + ((double)most - (double)x[target]));
    });
}

void argmax_f32(const Call &call, Worker &worker) {
    const auto &p = call.params<ferrum_rows_params>();
    worker.for_each(p.rows, 1, [&](uint64_t row) {
        const float *x = call.at<const float>(FERRUM_TOP_K_X) + row * p.width;
        int32_t best = 0;
        for (int32_t i = 1; i < (int32_t)p.width; i++)
            if (precedes(x[i], i, x[best], best)) best = i;
        call.at<int32_t>(FERRUM_TOP_K_INDICES)[row] = best;
    });
}

void top_k_f32(const Call &call, Worker &worker) {
    const auto &p = call.params<ferrum_rows_params>();
    worker.for_each(p.rows, 1, [&](uint64_t row) {
        const float *x = call.at<const float>(FERRUM_TOP_K_X) + row * p.width;
        int32_t *indices = call.at<int32_t>(FERRUM_TOP_K_INDICES) + row * p.k;
        // A sorted list that a new element enters from behind; most elements do not get past its last one.
        uint32_t held = 0;
        for (int32_t i = 0; i < (int32_t)p.width; i++) {
            if (held == p.k && !precedes(x[i], i, x[indices[held - 1]], indices[held - 1])) continue;
            uint32_t at = held < p.k ? held++ : held - 1;
            for (; at > 0 && precedes(x[i], i, x[indices[at - 1]], indices[at - 1]); at--)
                indices[at] = indices[at - 1];
            indices[at] = i;
        }
        for (uint32_t i = 0; i < p.k; i++) call.at<float>(FERRUM_TOP_K_VALUES)[row * p.k + i] = x[indices[i]];
    });
}

}  // namespace ferrum::cpu::FERRUM_CPU_ISA
