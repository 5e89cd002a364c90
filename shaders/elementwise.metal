// Norms, residuals and SwiGLU.
#include "common.h"

// ---- RMS norm: a threadgroup a row

// Elements [i, i + 4) of a row. `whole`: four of them exist, on an address of their own size.
template <typename T>
inline float4 norm_quad(device const T *row, uint i, uint width, bool whole) {
    if (whole) return load_quad(row + i);
    float4 quad = float4(0.0f);
    FERRUM_UNROLL for (uint j = 0; j < 4; j++) if (i + j < width) quad[j] = float(row[i + j]);
    return quad;
}

template <typename X>
inline void rms_norm(device const X *x, device const uchar *weight, device half *y, constant ferrum_rms_norm_params &p,
                     threadgroup float *partial, uint row, uint index, uint simdgroup, uint lane) {
    x += ulong(row) * p.width;
    y += ulong(row) * p.output_stride;
    // Thread t takes elements 4 t … 4 t + 3, then those 1024 further, whatever the alignment.
    const bool aligned = p.width % 4 == 0 && is_aligned(x, 4 * sizeof(X)) && is_aligned(weight, 16) && is_aligned(y, 8);
    float squares = 0.0f;
    for (uint i = 4 * index; i < p.width; i += 1024) {
        const float4 v = norm_quad(x, i, p.width, aligned);
        FERRUM_UNROLL for (uint j = 0; j < 4; j++) squares = fma(v[j], v[j], squares);
    }
    squares = simd_sum(squares);
    if (lane == 0) partial[simdgroup] = squares;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float total = 0.0f;
    FERRUM_UNROLL for (uint i = 0; i < 8; i++) total += partial[i];
    const float scale = 1.0f / precise::sqrt(total / float(p.width) + p.epsilon);
    for (uint i = 4 * index; i < p.width; i += 1024) {
        const float4 w = constant_norm_f32 ? norm_quad((device const float *)weight, i, p.width, aligned)
                                           : norm_quad((device const half *)weight, i, p.width, aligned);
        const float4 v = norm_quad(x, i, p.width, aligned) * scale * w;
        if (aligned) {
            *(device half4 *)(y + i) = half4(v);
        } else {
            FERRUM_UNROLL for (uint j = 0; j < 4; j++) if (i + j < p.width) y[i + j] = half(v[j]);
        }
    }
}

#define KERNEL_RMS_NORM(suffix, X)                                                                                   \
    kernel void rms_norm_##suffix(                                                                                   \
        device const X *x [[buffer(FERRUM_RMS_NORM_X)]],                                                             \
        device const uchar *weight [[buffer(FERRUM_RMS_NORM_WEIGHT)]], device half *y [[buffer(FERRUM_RMS_NORM_Y)]], \
        constant ferrum_rms_norm_params &p [[buffer(FERRUM_RMS_NORM_PARAMS)]],                                       \
        uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],                    \
        uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {                \
        FERRUM_THREADGROUP(float, partial, 8)                                                                        \
        rms_norm(x, weight, y, p, partial, group.x, index, simdgroup, lane);                                         \
    }
KERNEL_RMS_NORM(f16, half)
KERNEL_RMS_NORM(f32, float)

// ---- Residual and SwiGLU: a thread an element

#define KERNEL_RESIDUAL_ADD(suffix, X)                                                                               \
    kernel void residual_add_##suffix(device const X *x [[buffer(FERRUM_RESIDUAL_ADD_X)]],                           \
                                      device const half *branch [[buffer(FERRUM_RESIDUAL_ADD_BRANCH)]],              \
                                      device X *y [[buffer(FERRUM_RESIDUAL_ADD_Y)]],                                 \
                                      constant ferrum_residual_add_params &p [[buffer(FERRUM_RESIDUAL_ADD_PARAMS)]], \
                                      uint3 group [[threadgroup_position_in_grid]],                                  \
                                      uint index [[thread_index_in_threadgroup]]) {                                  \
        const uint i = group.x * 256 + index;                                                                        \
        if (i >= p.width) return;                                                                                    \
        const ulong at = ulong(group.y) * p.width + i;                                                               \
        y[at] = X(float(x[at]) + float(branch[ulong(group.y) * p.branch_stride + i]));                               \
    }
KERNEL_RESIDUAL_ADD(f16, half)
KERNEL_RESIDUAL_ADD(f32, float)

kernel void swiglu_f16(device const half *gate [[buffer(FERRUM_SWIGLU_GATE)]],
                       device const half *up [[buffer(FERRUM_SWIGLU_UP)]], device half *y [[buffer(FERRUM_SWIGLU_Y)]],
                       constant ferrum_swiglu_params &p [[buffer(FERRUM_SWIGLU_PARAMS)]],
                       uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]]) {
    const ulong i = ulong(group.x) * 256 + index;
    if (i >= p.elements) return;
    const float g = float(gate[i]);
    y[i] = half(g * sigmoid_of(g) * float(up[i]));
}
