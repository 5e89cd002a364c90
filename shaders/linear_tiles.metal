// y = x W^T + b for many rows: a threadgroup takes 32 rows of x and 64 outputs, 64 inputs at a time.
//
// Inputs and weights, decoded once for all rows, go to threadgroup memory as 8 x 8 tiles (a tile is 64 numbers in a
// row, so that loading one meets every bank once); each of four SIMD-groups multiplies all rows with 16 outputs.
// Weights become float16 there, an error below that of x; F32 and BF16, which float16 does not hold, stay float32.
#include "linear.h"

constant constexpr uint kTileDepth = 64;
constant constexpr uint kTileRows = FERRUM_LINEAR_TILE_ROWS, kTileOutputs = FERRUM_LINEAR_TILE_OUTPUTS;
constant constexpr uint kTileThreads = 4 * FERRUM_SIMD_WIDTH;
static_assert(kTileRows == 32 && kTileOutputs == 64, "four SIMD-groups of 32 rows and 16 outputs");

// Eight neighbours of row `row` of a matrix of tiles, from column 8 * octet on.
inline void put_octet(threadgroup half *to, uint row, uint octet, float4 low, float4 high) {
    threadgroup half4 *at = (threadgroup half4 *)(to + ((row / 8) * (kTileDepth / 8) + octet) * 64 + row % 8 * 8);
    at[0] = half4(low);
    at[1] = half4(high);
}
inline void put_octet(threadgroup float *to, uint row, uint octet, float4 low, float4 high) {
    threadgroup float4 *at = (threadgroup float4 *)(to + ((row / 8) * (kTileDepth / 8) + octet) * 64 + row % 8 * 8);
    at[0] = low;
    at[1] = high;
}

// Inputs [64 window, 64 window + 64) of 64 outputs, two threads an output; zeros past the last input.
template <typename F, typename T, bool kWide>
inline void load_weights(device const uchar *weight, constant ferrum_linear_params &p, uint first, uint window,
                         threadgroup T *to, uint thread_index) {
    const uint output = thread_index / 2;
    device const uchar *row = weight + min(first + output, p.out_features - 1) * p.weight_row_bytes;
    FERRUM_UNROLL for (uint i = 0; i < F::window / 2; i++) {
        const uint unit = F::unit_of(window, 2 * i + thread_index % 2);
        // Blocks are whole, and so is a unit's last element there if its first one is.
        const uint begin = F::element(unit, 0), left = begin < p.in_features ? p.in_features - begin : 0;
        const bool whole = left >= (F::dense ? 8u : 1u);
        typename F::bits bits;
        if (kWide && whole)
            F::template load<true>(row, unit, 8, bits);
        else if (left != 0)
            F::template load<false>(row, unit, min(left, 8u), bits);
        FERRUM_UNROLL for (uint octet = 0; octet < F::octets; octet++) {
            const uint at = F::element(unit, octet) - window * kTileDepth;
            if (at >= kTileDepth) continue;
            float4 low = float4(0.0f), high = float4(0.0f);
            if (left != 0) F::weights(bits, octet, low, high);
            put_octet(to, output, at / 8, low, high);
        }
    }
}

// The same inputs of 32 rows of x. Rows that are not there repeat the last one, and are dropped.
template <typename T>
inline void load_inputs(device const half *x, constant ferrum_linear_params &p, uint first_row, uint window, bool wide,
                        threadgroup T *to, uint thread_index) {
    FERRUM_UNROLL for (uint i = 0; i < kTileRows * kTileDepth / 8 / kTileThreads; i++) {
        const uint item = i * kTileThreads + thread_index, row = item / (kTileDepth / 8),
                   octet = item % (kTileDepth / 8);
        const uint begin = window * kTileDepth + octet * 8, left = begin < p.in_features ? p.in_features - begin : 0;
        device const half *from = x + ulong(min(first_row + row, p.rows - 1)) * p.input_stride + begin;
        float4 low, high;
        if (wide && left >= 8)
            load_octet(from, low, high);
        else
            load_octet(from, left, low, high);
        put_octet(to, row, octet, low, high);
    }
}

// `shared`: 64 weight rows, then 32 rows of x; at the end, 32 rows of 64 outputs in float32.
template <typename F, typename T, bool kWide>
inline void multiply_tiles(device const half *x, device const uchar *weight, device const uchar *bias, device uchar *y,
                           constant ferrum_linear_params &p, threadgroup float4 *shared, uint3 group, uint simdgroup,
                           uint lane) {
    const uint first = group.x * kTileOutputs, first_row = group.y * kTileRows;
    const uint thread_index = simdgroup * FERRUM_SIMD_WIDTH + lane;
    threadgroup T *weights = (threadgroup T *)shared, *inputs = weights + kTileOutputs * kTileDepth;
    simdgroup_float8x8 sum[4][2];
    FERRUM_UNROLL for (uint r = 0; r < 4; r++) {
        FERRUM_UNROLL for (uint o = 0; o < 2; o++) sum[r][o] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    for (uint window = 0; window * kTileDepth < p.in_features; window++) {
        load_weights<F, T, kWide>(weight, p, first, window, weights, thread_index);
        load_inputs<T>(x, p, first_row, window, kWide, inputs, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        FERRUM_UNROLL for (uint k = 0; k < kTileDepth / 8; k++) {
            simdgroup_matrix<T, 8, 8> a[4], b[2];
            FERRUM_UNROLL for (uint r = 0; r < 4; r++)
                simdgroup_load(a[r], inputs + (r * (kTileDepth / 8) + k) * 64, 8);
            FERRUM_UNROLL for (uint o = 0; o < 2; o++) simdgroup_load(
                b[o], weights + ((2 * simdgroup + o) * (kTileDepth / 8) + k) * 64, 8, ulong2(0, 0), true);
            FERRUM_UNROLL for (uint r = 0; r < 4; r++) {
                FERRUM_UNROLL for (uint o = 0; o < 2; o++)
                    simdgroup_multiply_accumulate(sum[r][o], a[r], b[o], sum[r][o]);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    threadgroup float *outputs = (threadgroup float *)shared;
    FERRUM_UNROLL for (uint r = 0; r < 4; r++) {
        FERRUM_UNROLL for (uint o = 0; o < 2; o++)
            simdgroup_store(sum[r][o], outputs + r * 8 * kTileOutputs + (2 * simdgroup + o) * 8, kTileOutputs);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint output = first + thread_index % kTileOutputs;
    if (output >= p.out_features) return;
    for (uint r = thread_index / kTileOutputs; r < kTileRows && first_row + r < p.rows;
         r += kTileThreads / kTileOutputs)
        store_output(y, bias, p, first_row + r, output, outputs[r * kTileOutputs + thread_index % kTileOutputs]);
}

template <typename F, typename T>
inline void linear_tiles(device const half *x, device const uchar *weight, device const uchar *bias, device uchar *y,
                         constant ferrum_linear_params &p, threadgroup float4 *shared, uint3 group, uint simdgroup,
                         uint lane) {
    if (has_wide_rows<F>(x, weight, p))
        multiply_tiles<F, T, true>(x, weight, bias, y, p, shared, group, simdgroup, lane);
    else
        multiply_tiles<F, T, false>(x, weight, bias, y, p, shared, group, simdgroup, lane);
}

#define KERNEL_LINEAR_TILES(format, T)                                                                                 \
    kernel void linear_tiles_##format(                                                                                 \
        device const half *x [[buffer(FERRUM_LINEAR_X)]], device const uchar *weight [[buffer(FERRUM_LINEAR_WEIGHT)]], \
        device const uchar *bias [[buffer(FERRUM_LINEAR_BIAS), function_constant(constant_bias)]],                     \
        device uchar *y [[buffer(FERRUM_LINEAR_Y)]],                                                                   \
        constant ferrum_linear_params &p [[buffer(FERRUM_LINEAR_PARAMS)]],                                             \
        uint3 group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],               \
        uint lane [[thread_index_in_simdgroup]]) {                                                                     \
        FERRUM_THREADGROUP(float4, shared, (kTileRows + kTileOutputs) * kTileDepth * sizeof(T) / 16)                   \
        linear_tiles<format, T>(x, weight, bias, y, p, shared, group, simdgroup, lane);                                \
    }
KERNEL_LINEAR_TILES(f32, float)
KERNEL_LINEAR_TILES(bf16, float)
KERNEL_LINEAR_TILES(f16, half)
KERNEL_LINEAR_TILES(q4_0, half)
KERNEL_LINEAR_TILES(q4_1, half)
KERNEL_LINEAR_TILES(q5_0, half)
KERNEL_LINEAR_TILES(q5_1, half)
KERNEL_LINEAR_TILES(q8_0, half)
KERNEL_LINEAR_TILES(q4_k, half)
KERNEL_LINEAR_TILES(q5_k, half)
KERNEL_LINEAR_TILES(q6_k, half)
