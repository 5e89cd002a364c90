// What the kernels of causal attention have in common.
#ifndef FERRUM_CAUSAL_ATTENTION_H
#define FERRUM_CAUSAL_ATTENTION_H

#include "pages.h"

// The first key that a query at `position` sees; the last one is its own.
inline uint first_visible(constant ferrum_causal_attention_params &p, uint position) {
    return p.window != 0 && position >= p.window ? position + 1 - p.window : 0;
}

// cap * tanh(score / cap)
inline float capped(float score, float softcap) {
    if (softcap == 0.0f) return score;
    return softcap * (1.0f - 2.0f / (exp_of(score * (2.0f / softcap)) + 1.0f));
}

// What exponents are relative to: the largest score, or any number where every score is minus infinity.
inline float finite_most(float most) {
    return most == -INFINITY ? 0.0f : most;
}

// Dim `d` of a context: weighted values over the sum of the weights, times the gate's sigmoid.
inline void store_context(device half *context, device const half *query_raw,
                          constant ferrum_causal_attention_params &p, uint token, uint head, uint d, float value,
                          float total) {
    float result = value / total;
    if (constant_output_gate)
        result *= sigmoid_of(
            float(query_raw[ulong(token) * p.query_raw_stride + ulong(head) * p.query_head_stride + p.head_dim + d]));
    context[ulong(token) * p.query_stride + ulong(head) * p.head_dim + d] = half(result);
}

#endif
