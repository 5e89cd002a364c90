// MLX's single-query attention, instantiated. The kernel itself, a template, is in the macOS wheel of mlx-metal;
// tests/test_outside_kernel.py brings it as mlx_sdpa_vector.h.

// Its style of warnings is its own.
#pragma clang diagnostic ignored "-Wduplicate-decl-specifier"
#pragma clang diagnostic ignored "-Wsign-compare"
#pragma clang diagnostic ignored "-Wunused-parameter"

template <typename T>
struct Limits {
    static constexpr T finite_min = numeric_limits<T>::lowest();
};

#include "mlx_sdpa_vector.h"

#define KERNEL(suffix, T, D)                                                                                     \
    kernel void mlx_sdpa_vector_##suffix##_##D(                                                                  \
        const device T *queries [[buffer(0)]], const device T *keys [[buffer(1)]],                               \
        const device T *values [[buffer(2)]], device T *out [[buffer(3)]],                                       \
        const constant int &gqa_factor [[buffer(4)]], const constant int &N [[buffer(5)]],                       \
        const constant size_t &k_head_stride [[buffer(6)]], const constant size_t &k_seq_stride [[buffer(7)]],   \
        const constant size_t &v_head_stride [[buffer(8)]], const constant size_t &v_seq_stride [[buffer(9)]],   \
        const constant float &scale [[buffer(10)]],                                                              \
        const device bool *bmask [[buffer(11), function_constant(bool_mask)]],                                   \
        const device T *fmask [[buffer(12), function_constant(float_mask)]],                                     \
        const constant int &mask_kv_seq_stride [[buffer(13), function_constant(has_mask)]],                      \
        const constant int &mask_q_seq_stride [[buffer(14), function_constant(has_mask)]],                       \
        const constant int &mask_head_stride [[buffer(15), function_constant(has_mask)]],                        \
        const device T *sinks [[buffer(16), function_constant(has_sinks)]],                                      \
        const constant int &num_q_heads [[buffer(17), function_constant(has_sinks)]],                            \
        uint3 tid [[threadgroup_position_in_grid]], uint3 tpg [[threadgroups_per_grid]],                         \
        uint simd_gid [[simdgroup_index_in_threadgroup]], uint simd_lid [[thread_index_in_simdgroup]]) {         \
        sdpa_vector<T, D>(queries, keys, values, out, gqa_factor, N, k_head_stride, k_seq_stride, v_head_stride, \
                          v_seq_stride, scale, bmask, fmask, mask_kv_seq_stride, mask_q_seq_stride,              \
                          mask_head_stride, sinks, num_q_heads, tid, tpg, simd_gid, simd_lid);                   \
    }
#define KERNELS(suffix, T) KERNEL(suffix, T, 64) KERNEL(suffix, T, 96) KERNEL(suffix, T, 128) KERNEL(suffix, T, 256)
KERNELS(f32, float)
KERNELS(f16, half)
KERNELS(bf16, bfloat)
