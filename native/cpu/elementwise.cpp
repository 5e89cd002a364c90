// Norms, residuals, SwiGLU and embeddings.
#include "blocks.h"
#include "kernels.h"
#include "simd_math.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

namespace {

template <class X>
void rms_norm_row(const Call &call, uint64_t row, uint32_t) {
    const auto &p = call.params<ferrum_rms_norm_params>();
    const X *x = call.at<const X>(FERRUM_RMS_NORM_X) + row * p.width;
    half *y = call.at<half>(FERRUM_RMS_NORM_Y) + row * p.output_stride;
    const f32x16 scale = splat(inverse_rms(x, p.width, p.epsilon));
    for (uint32_t i = 0; i < p.width; i += kLanes) {
        const uint64_t left = p.width - i;
        const f32x16 weight = call.constant(FERRUM_CONSTANT_NORM_F32)
                                  ? load_up_to(call.at<const float>(FERRUM_RMS_NORM_WEIGHT) + i, left)
                                  : load_up_to(call.at<const half>(FERRUM_RMS_NORM_WEIGHT) + i, left);
        store_up_to(y + i, load_up_to(x + i, left) * scale * weight, left);
    }
}

template <class X>
void residual_add_row(const Call &call, uint64_t row, uint32_t) {
    const auto &p = call.params<ferrum_residual_add_params>();
    const X *x = call.at<const X>(FERRUM_RESIDUAL_ADD_X) + row * p.width;
    const half *branch = call.at<const half>(FERRUM_RESIDUAL_ADD_BRANCH) + row * p.branch_stride;
    X *y = call.at<X>(FERRUM_RESIDUAL_ADD_Y) + row * p.width;
    for (uint32_t i = 0; i < p.width; i += kLanes) {
        const uint64_t left = p.width - i;
        store_up_to(y + i, load_up_to(x + i, left) + load_up_to(branch + i, left), left);
    }
}

// Elements [begin, end).
void swiglu(const Call &call, uint64_t begin, uint64_t end) {
    for (uint64_t i = begin; i < end; i += kLanes) {
        const f32x16 gate = load_up_to(call.at<const half>(FERRUM_SWIGLU_GATE) + i, end - i);
        const f32x16 up = load_up_to(call.at<const half>(FERRUM_SWIGLU_UP) + i, end - i);
        store_up_to(call.at<half>(FERRUM_SWIGLU_Y) + i, gate * sigmoid(gate) * up, end - i);
    }
}

void swiglu_row(const Call &call, uint64_t row, uint32_t width) {
    swiglu(call, row * width, (row + 1) * width);
}

template <class Params>
void for_each_row(const Call &call, Worker &worker, RowFunction function) {
    const auto &p = call.params<Params>();
    worker.for_each(p.rows, 4, [&](uint64_t row) { function(call, row, p.width); });
}

void put(const Call &call, uint64_t at, f32x16 value, uint64_t count) {
    if (call.constant(FERRUM_CONSTANT_OUTPUT_F32))
        store_up_to(call.at<float>(FERRUM_EMBED_Y) + at, value, count);
    else
        store_up_to(call.at<half>(FERRUM_EMBED_Y) + at, value, count);
}

// Calls body(weight row, first element of the output row) for every token.
template <class Body>
void embed_rows(const Call &call, Worker &worker, Body &&body) {
    const auto &p = call.params<ferrum_embed_params>();
    worker.for_each(p.rows, 8, [&](uint64_t row) {
        const int32_t token = call.at<const int32_t>(FERRUM_EMBED_TOKENS)[row];
        body(call.at<const uint8_t>(FERRUM_EMBED_WEIGHT) + (uint64_t)token * p.weight_row_bytes, row * p.width);
    });
}

template <class F>
void embed(const Call &call, Worker &worker) {
    const uint32_t width = call.params<ferrum_embed_params>().width;
    embed_rows(call, worker, [&](const uint8_t *weights, uint64_t at) {
        if constexpr (F::bits > 8) {
            const auto *from = (const typename F::Element *)weights;
            for (uint32_t i = 0; i < width; i += kLanes) put(call, at + i, load_up_to(from + i, width - i), width - i);
        } else {
            for (uint32_t b = 0; b < width / 32; b++) {
                float values[32];
                block_values<F>(weights, b, values);
                put(call, at + 32 * b, load(values), kLanes);
                put(call, at + 32 * b + 16, load(values + 16), kLanes);
            }
        }
    });
}

}  // namespace

void rms_norm_f16(const Call &call, Worker &worker) {
    for_each_row<ferrum_rms_norm_params>(call, worker, rms_norm_row<half>);
}
void rms_norm_f32(const Call &call, Worker &worker) {
    for_each_row<ferrum_rms_norm_params>(call, worker, rms_norm_row<float>);
}

void residual_add_f16(const Call &call, Worker &worker) {
    for_each_row<ferrum_residual_add_params>(call, worker, residual_add_row<half>);
}
void residual_add_f32(const Call &call, Worker &worker) {
    for_each_row<ferrum_residual_add_params>(call, worker, residual_add_row<float>);
}

void swiglu_f16(const Call &call, Worker &worker) {
    constexpr uint64_t kStep = 1024;
    const uint64_t elements = call.params<ferrum_swiglu_params>().elements;
    worker.for_each((elements + kStep - 1) / kStep, 1, [&](uint64_t step) {
        swiglu(call, step * kStep, (step + 1) * kStep < elements ? (step + 1) * kStep : elements);
    });
}

RowFunction row_function(uint32_t kernel) {
    switch (kernel) {
        case kernel_rms_norm_f16:
            return rms_norm_row<half>;
        case kernel_rms_norm_f32:
            return rms_norm_row<float>;
        case kernel_residual_add_f16:
            return residual_add_row<half>;
        case kernel_residual_add_f32:
            return residual_add_row<float>;
        case kernel_swiglu_f16:
            return swiglu_row;
        default:
            return nullptr;
    }
}

#define FERRUM_EMBED(NAME, name, id, elements, bytes)     \
    void embed_##name(const Call &call, Worker &worker) { \
        embed<name>(call, worker);                        \
    }
FERRUM_FORMATS(FERRUM_EMBED)
#undef FERRUM_EMBED

}  // namespace ferrum::cpu::FERRUM_CPU_ISA
